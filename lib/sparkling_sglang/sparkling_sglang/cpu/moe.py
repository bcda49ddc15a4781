"""Routed experts on a CPU, with the two factors of Ling-3.0 that SGLang 0.5.23's CPU path drops.

Upstream's ``moe_forward_native`` returns the routed sum without ``routed_scaling_factor`` (which
``BailingMoeV3`` leaves to the runner) and ignores ``gemm1_clamp_limit`` unless ``gemm1_alpha`` is
set, so neither the factor 2.5 nor ``expert_swiglu_limit_list`` has any effect on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sparkling_sglang import status

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

TARGET = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"

# Below this many (token, expert) pairs copying the experts' weights beats one product per expert:
# 0.21 against 0.61 ms for 4 tokens of the tiny Ling, 3.9 against 1.2 ms for 256 (2 contended cores).
FEW_ROWS = 16


def swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Ling's gated activation: ``min(silu(gate), limit) * clamp(up, -limit, limit)``.

    The limit applies after SiLU, as in SGLang's ``BailingMLP`` and its Triton runner; other models
    clamp the gate before SiLU, which is not the same.

    Args:
        gate_up: [tokens, 2 * intermediate], gate first.
        limit: upper bound, or None (or 0) for a plain SwiGLU.

    Returns:
        [tokens, intermediate] in the dtype of ``gate_up``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = F.silu(gate)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * up


def routed_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    scaling: float = 1.0,
    limit: float | None = None,
) -> torch.Tensor:
    """Weighted sum of the chosen experts, times ``scaling``.

    The products run in the dtype of ``x``; the weighting, the sum over experts and the scaling in
    float32, rounded once at the end.

    Args:
        x: [tokens, hidden].
        w13: [experts, 2 * intermediate, hidden], gate rows first.
        w2: [experts, hidden, intermediate].
        topk_weights: [tokens, k] routing weights, before ``routed_scaling_factor``.
        topk_ids: [tokens, k] expert numbers; anything outside ``range(experts)`` (SGLang marks
            padded tokens with -1) contributes nothing.

    Returns:
        [tokens, hidden] in the dtype of ``x``.
    """
    valid = (topk_ids >= 0) & (topk_ids < w13.shape[0])
    weights = topk_weights.float().masked_fill(~valid, 0.0)
    ids = topk_ids.long().masked_fill(~valid, 0)
    few = ids.numel() <= FEW_ROWS
    total = (_gathered if few else _grouped)(x, w13, w2, weights, ids, limit)
    return total.mul_(scaling).to(x.dtype)


def _gathered(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Copies each row's experts and multiplies in one go: a decode or a verification of 4."""
    gate_up = torch.einsum("th,tkoh->tko", x, w13[ids])
    out = torch.einsum("tki,tkhi->tkh", swiglu(gate_up, limit), w2[ids])
    return (out.float() * weights.unsqueeze(-1)).sum(1)


def _grouped(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """One product per expert in use, over all of its tokens: prefill."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        out = F.linear(swiglu(F.linear(x[token], w13[expert]), limit), w2[expert])
        total.index_add_(0, token, out.float() * weights[token, slot].unsqueeze(-1))
    return total


def _scaling(layer: Any, config: Any) -> float:
    """The factor the runner has to apply itself: 1 when top-k folded it into the weights."""
    factor = config.routed_scaling_factor
    return 1.0 if factor is None or layer.should_fuse_routed_scaling_factor_in_topk else factor


def _plain_silu(layer: Any, config: Any) -> bool:
    """True for the only form Ling uses: SwiGLU without alpha, biases or input weighting."""
    return (
        config.activation == "silu"
        and config.gemm1_alpha is None
        and not config.apply_router_weight_on_input
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
    )


def moe_forward(
    original: Callable[..., torch.Tensor],
    layer: Any,
    x: torch.Tensor,
    topk_output: Any,
    config: Any,
) -> torch.Tensor:
    """Around ``moe_forward_native(layer, x, topk_output, moe_runner_config)``.

    Any other activation than Ling's runs upstream's code; the scaling factor is applied to it too.
    """
    scaling = _scaling(layer, config)
    if _plain_silu(layer, config):
        limit = config.gemm1_clamp_limit or None
        weights, ids, _ = topk_output
        out = routed_experts(
            x, layer.w13_weight, layer.w2_weight, weights, ids, scaling=scaling, limit=limit
        )
    else:
        limit = None
        out = original(layer, x, topk_output, config)
        out = out if scaling == 1.0 else out * scaling
    status.moe_used(layer.layer_name, scaling, limit)
    return out


def register(patches: Patches) -> None:
    """Hook SGLang's CPU routed experts."""
    patches.hook("moe", TARGET, moe_forward, "around")
