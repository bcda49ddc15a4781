"""What several tests of the server environment share."""

from __future__ import annotations

import json
import os

# Read by SGLang and torch when they are imported, so set before any test module is.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

CONFIG = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "torch_dtype": "float32",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "layer_group_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "routed_scaling_factor": 2.5,
    "expert_swiglu_limit_list": [0.7, 0.4, 0, 0.4],
    "share_expert_swiglu_limit_list": [0.9, 0.6, 0.6, 0],
}


@pytest.fixture
def rng() -> torch.Generator:
    """A generator that starts from the same seed in every test."""
    return torch.Generator().manual_seed(20)


@pytest.fixture(scope="session")
def engine_context(tmp_path_factory):
    """SGLang's process-wide context (arguments, parallel groups) for a tiny Ling on a CPU.

    Only the configuration exists, no weights; yields SGLang's ServerArgs.
    """
    folder = tmp_path_factory.mktemp("ling")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        import sglang.srt.managers.scheduler  # noqa: F401  (the order in which SGLang imports)
        from sglang.srt.distributed import bootstrap, parallel_state
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        args = ServerArgs(
            model_path=str(folder),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            disable_overlap_schedule=True,
            mamba_radix_cache_strategy="no_buffer",
        )
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        bootstrap._init_parallel_groups(
            backend="gloo",
            dist_init_method=f"file://{folder / 'rendezvous'}",
            server_args=args,
            gpu_id=0,
        )
        yield args
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
