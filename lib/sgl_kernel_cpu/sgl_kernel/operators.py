"""Operators that SGLang reaches as ``torch.ops.sgl_kernel.NAME``.

They are defined with their schemas in the dispatcher, so that ``hasattr`` on the namespace, by
which SGLang decides what a CPU can do, tells the truth.
"""

from __future__ import annotations

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu

_library = torch.library.Library("sgl_kernel", "DEF")


def _define(schema: str, function) -> None:
    _library.define(schema)
    _library.impl(schema.split("(", 1)[0], function, "CompositeExplicitAutograd")


def _not_for_this_model(name: str):
    def operator(*args, **kwargs):
        raise NotImplementedError(
            f"sgl_kernel::{name} serves gated-delta-net models; Ling-3.0 does not call it"
        )

    return operator


def _init_cpu_threads_env(cpu_ids: str) -> str:
    """Bind OpenMP threads (``bootstrap.py``, on Arm only): left to the operating system here."""
    return ""


def _initialize(size: int, rank: int) -> None:
    """Open shared memory for all-reduce (``bootstrap.py``, on Arm only): nothing to open for 1."""
    if size != 1:
        raise NotImplementedError(f"tensor parallelism {size} on a CPU: only 1 is supported")


_define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, "
    "float logit_cap, bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, "
    "Tensor? sinks) -> ()",
    decode_attention_cpu,
)
_define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) output, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, "
    "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()",
    extend_attention_cpu,
)
_define("init_cpu_threads_env(str cpu_ids) -> str", _init_cpu_threads_env)
_define("initialize(int size, int rank) -> ()", _initialize)
# srt/layers/attention/linear/gdn_backend.py and gdn_triton.py look these two up when imported.
for _name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    _define(f"{_name}(Tensor x) -> Tensor", _not_for_this_model(_name))
