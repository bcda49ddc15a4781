"""RMS norm with an output gate, which KDA applies with a sigmoid."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight + bias``, times ``sigmoid(g)`` or ``silu(g)``.

    ``x`` and ``g`` have the same number of elements, the last dimension of ``x`` is normalised,
    ``weight`` and ``bias`` match it. Computed in float32, returned in ``x``'s dtype and shape. Takes
    the place of the Triton function that ``FusedRMSNormGated.forward`` calls on a CPU without AMX
    (``kernels/ops/attention/fla/fused_norm_gate.py``).

    Raises:
        NotImplementedError: a residual, which Ling-3.0 never passes.
    """
    if residual is not None or prenorm:
        raise NotImplementedError("gated RMS norm with a residual on a CPU")
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    gate = g.float().reshape(x.shape)
    return (y * (torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate))).to(x.dtype)
