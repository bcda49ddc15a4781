"""The tensors that a BailingMoeV3 checkpoint must hold: names, dtypes and shapes from its config.

Read from SGLang 0.5.23's loader (`models/bailing_moe_v3.py`, `kimi_linear.py`, `bailing_moe_nextn.py`,
`layers/quantization/fp8.py`), and checked against real files: the practice model (FP8 and MXFP4) and
the tiny Ling (BF16). SGLang itself skips a name it does not know and leaves a tensor that is missing
uninitialised, both without a word, so this list is what notices.

Dtypes are safetensors' names. MXFP4 experts are `I8`, two E2M1 codes a byte, with one `F8_E8M0` scale
for `routed_experts_group_size` weights of a row; FP8 matrices are `F8_E4M3` with one scale a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkling.errors import UsageError

ARCHITECTURE = "BailingMoeV3ForCausalLM"
Spec = tuple[str, tuple[int, ...]]
"""(dtype, shape) of one tensor."""

_BASE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_PLAIN = frozenset({"BF16", "F16", "F32"})
# Names the loader leaves out on purpose: v3.load_weights and rewrite_nextn_weight_name.
_UNUSED = re.compile(
    r"^model\.mtp|v_head|inv_freq|\.shared_head\.head\.|^model\.layers\.\d+\.embed_tokens\."
)


@dataclass(frozen=True)
class Shape:
    """What the tensors' shapes follow from, with the names of `config.json`."""

    vocab: int
    hidden: int
    layers: int
    mla: tuple[int, ...]  # indices of the MLA layers; the others are KDA
    moe_from: int  # first MoE layer
    nextn: int  # NEXTN layers behind the last one: 0 or 1
    heads: int
    head_dim: int
    conv: int
    kda_lora: bool
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    gate: str | None  # of the MLA layers: "head_wise", "element_wise" or none
    dense_width: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int  # 0: no shared expert
    bias: bool  # a bias for each expert in the router
    router: str  # dtype of the router's matrix
    tied: bool
    base: str  # dtype of what is not quantized
    fp8: tuple[int, int] | None  # block (rows, columns) of the FP8 matrices
    mxfp4: int | None  # weights for each scale of the routed experts
    plain_modules: tuple[str, ...]  # `modules_to_not_convert`

    @property
    def moe_layers(self) -> int:
        return self.layers - self.moe_from

    @property
    def kda_layers(self) -> int:
        return self.layers - len(self.mla)

    @property
    def kda_width(self) -> int:
        """Columns of q, k and v in a KDA layer."""
        return self.heads * self.head_dim


def shape(config: Mapping[str, Any]) -> Shape:
    """Read a checkpoint's `config.json`. Raises UsageError for another architecture, a missing or
    impossible size, or a quantization whose layout we do not know."""
    names = config.get("architectures") or ()
    if ARCHITECTURE not in names:
        found = ", ".join(map(str, names)) or "none"
        raise UsageError(
            f"The configuration's architecture is {found}, and only {ARCHITECTURE} is known here: "
            "give a checkpoint of Ling-3.0."
        )
    layers = _size(config, "num_hidden_layers")
    if config.get("full_attention_type", "mla") != "mla":
        raise UsageError(
            "The configuration's full_attention_type is not mla, which is unknown here."
        )
    nextn = _size(config, "num_nextn_predict_layers", 0, least=0)
    if nextn > 1:
        raise UsageError(f"num_nextn_predict_layers is {nextn}, and SGLang reads one at most.")
    width = _size(config, "moe_intermediate_size")
    shared = _size(config, "num_shared_experts", 0, least=0)
    fp8, mxfp4, plain = _quantization(config.get("quantization_config"))
    base = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix(
        "torch."
    )
    if base not in _BASE:
        raise UsageError(
            f"The configuration's torch_dtype is {base!r}: known are {', '.join(_BASE)}."
        )
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return Shape(
        vocab=_size(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        mla=_mla(config.get("layer_group_size", 1), layers),
        moe_from=min(layers, _size(config, "first_k_dense_replace", 0, least=0)),
        nextn=nextn,
        heads=heads,
        head_dim=_size(config, "head_dim", max(1, hidden // heads)),
        conv=_size(config, "short_conv_kernel_size"),
        kda_lora=not config.get("no_kda_lora", False),
        q_lora=config.get("q_lora_rank") and _size(config, "q_lora_rank"),
        kv_lora=_size(config, "kv_lora_rank"),
        nope=_size(config, "qk_nope_head_dim"),
        rope=_size(config, "qk_rope_head_dim", least=0),
        v_dim=_size(config, "v_head_dim"),
        gate=config.get("gated_attention_proj_granularity_type"),
        dense_width=_size(config, "intermediate_size"),
        experts=_size(config, "num_experts"),
        top_k=_size(config, "num_experts_per_tok"),
        expert_width=width,
        shared_width=_size(config, "moe_shared_expert_intermediate_size", width * shared, least=0),
        bias=bool(config.get("moe_router_enable_expert_bias", False)),
        router="F32" if config.get("router_dtype") in (None, "fp32") else "BF16",
        tied=bool(config.get("tie_word_embeddings", False)),
        base=_BASE[base],
        fp8=fp8,
        mxfp4=mxfp4,
        plain_modules=plain,
    )


def _size(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise UsageError(
            f"The configuration's {key} is {value!r}: it must be a whole number from {least}."
        )
    return value


def _mla(group: Any, layers: int) -> tuple[int, ...]:
    """MLA layers: every `group`-th, or those a list marks with 0 (1 is linear attention)."""
    if isinstance(group, list):
        return tuple(i for i, linear in enumerate(group[:layers]) if linear != 1)
    if type(group) is not int or group < 1 or layers % group:
        raise UsageError(
            f"The configuration's layer_group_size is {group!r}, which does not divide its "
            f"{layers} layers."
        )
    return tuple(i for i in range(layers) if (i + 1) % group == 0)


def _quantization(
    quant: Mapping[str, Any] | None,
) -> tuple[tuple[int, int] | None, int | None, tuple[str, ...]]:
    if not quant:
        return None, None, ()
    method, block = quant.get("quant_method"), quant.get("weight_block_size")
    experts = quant.get("routed_experts_quant_method")
    if method != "fp8" or experts not in (None, "fp8", "mxfp4"):
        raise UsageError(
            f"The configuration's quantization is {method!r} with {experts!r} experts, whose tensors "
            "are unknown here: known are none, FP8 in blocks, and FP8 with MXFP4 experts."
        )
    if not isinstance(block, list) or len(block) != 2 or any(type(b) is not int for b in block):
        raise UsageError(
            "The configuration's FP8 weights have no weight_block_size of two numbers."
        )
    group = _size(quant, "routed_experts_group_size", 32) if experts == "mxfp4" else None
    return (block[0], block[1]), group, tuple(map(str, quant.get("modules_to_not_convert") or ()))


def expected(config: Mapping[str, Any]) -> dict[str, Spec]:
    """Every tensor of the checkpoint: name -> (dtype, shape), in the order of the layers.

    dtype is the one SGLang's own parameter has, or the stored form of a quantized matrix; a file may
    hold another that is converted while loading (`fits`). Raises UsageError as `shape` does.
    """
    return dict(_all(shape(config)))


def fits(want: Spec, found: Spec) -> bool:
    """Whether SGLang loads a tensor found in a file as the one wanted.

    Plain numbers are copied by value, so BF16, F16 and F32 stand in for one another; an FP8 block's
    scale may be plain or E8M0. FP4 codes, FP8 weights and the experts' E8M0 scales are taken bit by
    bit and must be exactly what is expected. Extents of 1 do not count: the loader adds some itself.
    """
    (want_dtype, want_shape), (dtype, size) = want, found
    if [n for n in want_shape if n != 1] != [n for n in size if n != 1]:
        return False
    if want_dtype == dtype:
        return True
    scale = want_dtype == "F32" and len(want_shape) == 2 and dtype == "F8_E8M0"
    return (want_dtype in _PLAIN and dtype in _PLAIN) or scale


def unused(name: str) -> bool:
    """Whether SGLang leaves a tensor of this name out on purpose (not merely unknown to it)."""
    return bool(_UNUSED.search(name))


# -- the tensors, layer by layer -------------------------------------------------------------------


def _all(s: Shape) -> Iterator[tuple[str, Spec]]:
    yield "model.word_embeddings.weight", (s.base, (s.vocab, s.hidden))
    for layer in range(s.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (s.base, (s.hidden,))
        mla = layer in s.mla
        yield from (_mla_layer if mla else _kda_layer)(s, f"{name}.attention")
        yield f"{name}.post_attention_layernorm.weight", (s.base, (s.hidden,))
        if layer < s.moe_from:
            yield from _mlp(s, f"{name}.mlp", s.dense_width)
        else:
            yield from _moe(s, f"{name}.mlp")
    for layer in range(s.layers, s.layers + s.nextn):
        name = f"model.layers.{layer}"
        for norm in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (s.base, (s.hidden,))
        yield from _matrix(s, f"{name}.eh_proj", s.hidden, 2 * s.hidden)
        yield from _mla_layer(s, f"{name}.attention")  # always MLA, always a mixture of experts
        yield from _moe(s, f"{name}.mlp")
        yield f"{name}.final_layernorm.weight", (s.base, (s.hidden,))
    yield "model.norm.weight", (s.base, (s.hidden,))
    if not s.tied:
        yield "lm_head.weight", (s.base, (s.vocab, s.hidden))


def _matrix(s: Shape, name: str, rows: int, columns: int) -> Iterator[tuple[str, Spec]]:
    """A linear layer's weight, FP8 with its scales where the checkpoint is quantized."""
    if s.fp8 is None or any(_covers(entry, name) for entry in s.plain_modules):
        yield f"{name}.weight", (s.base, (rows, columns))
        return
    yield f"{name}.weight", ("F8_E4M3", (rows, columns))
    blocks = (-(-rows // s.fp8[0]), -(-columns // s.fp8[1]))
    yield f"{name}.weight_scale_inv", ("F32", blocks)


def _covers(entry: str, name: str) -> bool:
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}")


def _kda_layer(s: Shape, name: str) -> Iterator[tuple[str, Spec]]:
    width = s.kda_width
    for part in "qkv":
        yield from _matrix(s, f"{name}.{part}_proj", width, s.hidden)
    if s.kda_lora:
        for part in "fg":
            yield from _matrix(s, f"{name}.{part}_a_proj", s.head_dim, s.hidden)
            yield from _matrix(s, f"{name}.{part}_b_proj", width, s.head_dim)
        yield from _matrix(s, f"{name}.b_proj", s.heads, s.hidden)
    else:
        for part in "fg":
            yield from _matrix(s, f"{name}.{part}_proj", width, s.hidden)
        yield f"{name}.b_proj.weight", (s.base, (s.heads, s.hidden))  # never quantized here
    for part in "qkv":
        yield f"{name}.{part}_conv1d.weight", ("F32", (width, 1, s.conv))
    yield f"{name}.A_log", ("F32", (s.heads,))
    yield f"{name}.dt_bias", ("F32", (width,))
    yield f"{name}.o_norm.weight", (s.base, (s.head_dim,))
    yield from _matrix(s, f"{name}.o_proj", s.hidden, width)


def _mla_layer(s: Shape, name: str) -> Iterator[tuple[str, Spec]]:
    query = s.heads * (s.nope + s.rope)
    if s.q_lora:
        yield from _matrix(s, f"{name}.q_a_proj", s.q_lora, s.hidden)
        yield f"{name}.q_a_layernorm.weight", (s.base, (s.q_lora,))
        yield from _matrix(s, f"{name}.q_b_proj", query, s.q_lora)
    else:
        yield from _matrix(s, f"{name}.q_proj", query, s.hidden)
    yield from _matrix(s, f"{name}.kv_a_proj_with_mqa", s.kv_lora + s.rope, s.hidden)
    yield f"{name}.kv_a_layernorm.weight", (s.base, (s.kv_lora,))
    yield from _matrix(s, f"{name}.kv_b_proj", s.heads * (s.nope + s.v_dim), s.kv_lora)
    if s.gate:
        rows = s.heads * (1 if s.gate == "head_wise" else s.v_dim)
        yield f"{name}.g_proj.weight", (s.base, (rows, s.hidden))
    yield from _matrix(s, f"{name}.dense", s.hidden, s.heads * s.v_dim)


def _mlp(s: Shape, name: str, width: int) -> Iterator[tuple[str, Spec]]:
    yield from _matrix(s, f"{name}.gate_proj", width, s.hidden)
    yield from _matrix(s, f"{name}.up_proj", width, s.hidden)
    yield from _matrix(s, f"{name}.down_proj", s.hidden, width)


def _moe(s: Shape, name: str) -> Iterator[tuple[str, Spec]]:
    yield f"{name}.gate.weight", (s.router, (s.experts, s.hidden))
    if s.bias:
        yield f"{name}.gate.expert_bias", ("F32", (s.experts,))
    for expert in range(s.experts):
        one = f"{name}.experts.{expert}"
        if s.mxfp4 is None:
            yield from _mlp(s, one, s.expert_width)
            continue
        for part, rows, columns in (
            ("gate_proj", s.expert_width, s.hidden),
            ("up_proj", s.expert_width, s.hidden),
            ("down_proj", s.hidden, s.expert_width),
        ):
            yield f"{one}.{part}.weight", ("I8", (rows, columns // 2))
            yield f"{one}.{part}.weight_scale_inv", ("F8_E8M0", (rows, columns // s.mxfp4))
    if s.shared_width:
        yield from _mlp(s, f"{name}.shared_experts", s.shared_width)
