"""Sizes of Sparklet, and the `config.json` that SGLang's `BailingMoeV3ForCausalLM` reads.

The sizes obey what stock SGLang 0.5.23 asks of an FP8 + MXFP4 checkpoint on CUDA: every part of a
merged FP8 linear and every MoE dimension is a multiple of 128, the MLA widths are Ling's own
(512 + 64, 128 + 64, 128), and each expert group holds at least two experts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Config:
    """Sizes and constants, with the names of `config.json`."""

    vocab_size: int = 1280
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    layer_group_size: int = 4  # every 4th layer is MLA, the others KDA
    num_attention_heads: int = 2
    head_dim: int = 128
    short_conv_kernel_size: int = 4
    kda_lower_bound: float = -5.0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 6_000_000.0
    max_position_embeddings: int = 32_768
    num_experts: int = 16
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    moe_intermediate_size: int = 128
    moe_shared_expert_intermediate_size: int = 128
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    expert_swiglu_limits: tuple[float, ...] = (0.0, 0.0, 0.0, 4.0)
    shared_swiglu_limits: tuple[float, ...] = (0.0, 0.0, 5.0, 7.0)

    def __post_init__(self) -> None:
        if self.num_hidden_layers % self.layer_group_size:
            raise ValueError("num_hidden_layers must be a multiple of layer_group_size")
        if self.num_experts % self.n_group or self.num_experts // self.n_group < 2:
            raise ValueError("each expert group needs at least two experts")
        for name in (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "kda_width",
        ):
            if getattr(self, name) % 128:
                raise ValueError(f"{name} must be a multiple of 128 (FP8 blocks)")
        for limits in (self.expert_swiglu_limits, self.shared_swiglu_limits):
            if len(limits) != self.num_hidden_layers:
                raise ValueError("one SwiGLU limit per layer")

    @property
    def kda_width(self) -> int:
        """Columns of q, k, v, f and g in a KDA layer: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether decoder layer `layer` is linear attention (SGLang: `is_linear_layer`)."""
        return (layer + 1) % self.layer_group_size != 0

    def to_hf(self, *, pad: int, eos: int) -> dict[str, Any]:
        """The whole `config.json`, quantization included; `pad` and `eos` are token ids."""
        limit = lambda row: [int(x) if float(x).is_integer() else x for x in row]  # noqa: E731
        return {
            "architectures": ["BailingMoeV3ForCausalLM"],
            "model_type": "bailing_hybrid",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "use_qkv_bias": False,
            "use_bias": False,
            "use_qk_norm": True,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_interleave": True,
            "partial_rotary_factor": 0.5,
            "rotary_dim": self.qk_rope_head_dim,
            "pad_token_id": pad,
            "eos_token_id": eos,
            "num_experts": self.num_experts,
            "num_shared_experts": 1,
            "num_experts_per_tok": self.num_experts_per_tok,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": self.moe_shared_expert_intermediate_size,
            "first_k_dense_replace": self.first_k_dense_replace,
            "moe_router_enable_expert_bias": True,
            "routed_scaling_factor": self.routed_scaling_factor,
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "num_nextn_predict_layers": 1,
            "layer_group_size": self.layer_group_size,
            "group_norm_size": 1,
            "linear_silu": True,
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": None,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "v_head_dim": self.v_head_dim,
            "short_conv_kernel_size": self.short_conv_kernel_size,
            "no_kda_lora": True,
            "kda_safe_gate": True,
            "kda_lower_bound": self.kda_lower_bound,
            "use_mla_nope": False,
            "full_attention_type": "mla",
            "gated_attention_proj_granularity_type": "head_wise",
            "expert_swiglu_limit_list": limit(self.expert_swiglu_limits),
            "share_expert_swiglu_limit_list": limit(self.shared_swiglu_limits),
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "scale_fmt": "ue8m0",
                "routed_experts_quant_method": "mxfp4",
                "routed_experts_group_size": 32,
                "modules_to_not_convert": ["lm_head"],
            },
        }

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Config:
        """The inverse of `to_hf`. Raises KeyError when a size is missing."""
        renamed = {
            "expert_swiglu_limits": "expert_swiglu_limit_list",
            "shared_swiglu_limits": "share_expert_swiglu_limit_list",
        }
        values = {f.name: raw[renamed.get(f.name, f.name)] for f in fields(cls)}
        for name in renamed:
            values[name] = tuple(float(x) for x in values[name])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; `Config(**d)` reads them back."""
        return asdict(self)
