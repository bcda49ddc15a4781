"""MXFP4 and block FP8, as Ling-3.0-flash-fp4 stores them, and their rounding during training.

MXFP4 (OCP MX): 32 values share one power-of-two scale (E8M0); a value is E2M1, one of
0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign; two codes a byte, the even index in the low nibble.
FP8: E4M3 with one float32 scale per 128 x 128 block, here a power of two (`scale_fmt: ue8m0`).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
BLOCK = 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 magnitude of x >= 0 (ties to the even code), saturating at 6."""
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp_(max=6.0)


def mxfp4_parts(w: Tensor) -> tuple[Tensor, Tensor]:
    """(scaled values on the E2M1 grid, scales) of w [..., n], n a multiple of 32.

    Values [..., n / 32, 32], scales [..., n / 32, 1] (powers of two). Of the two sensible exponents
    a group takes the one with the smaller squared error: the smaller one clips its largest value.
    """
    g = w.detach().float().unflatten(-1, (-1, GROUP))
    top = g.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    low = torch.exp2(torch.floor(torch.log2(top)) - 2)
    best, error, scale = None, None, None
    for s in (low, low * 2):
        x = g / s
        y = torch.copysign(_round_e2m1(x.abs()), x)
        e = ((y - x) * s).square().sum(-1, keepdim=True)
        if best is None:
            best, error, scale = y, e, s
        else:
            take = e < error
            best, scale = torch.where(take, y, best), torch.where(take, s, scale)
    return best, scale


def mxfp4_pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [..., n / 2], scales float8_e8m0fnu [..., n / 32]) of w [..., n]."""
    values, scale = mxfp4_parts(w)
    grid = torch.tensor(E2M1, device=w.device)
    code = (values.abs().unsqueeze(-1) == grid).to(torch.uint8).argmax(-1).to(torch.uint8)
    code = code | (torch.signbit(values).to(torch.uint8) << 3)
    code = code.flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    exponent = (torch.log2(scale.squeeze(-1)) + 127).round().to(torch.uint8)
    return packed.view(torch.int8), exponent.view(torch.float8_e8m0fnu)


def mxfp4_unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., n] from `mxfp4_pack`'s output."""
    raw = packed.view(torch.uint8)
    code = torch.stack([raw & 15, raw >> 4], -1).flatten(-2).long()
    grid = torch.tensor([*E2M1, *(-x for x in E2M1)], device=packed.device)
    factor = torch.exp2(scale.view(torch.uint8).float() - 127)
    return (grid[code].unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2)


def _blocks(w: Tensor) -> Tensor:
    """Largest magnitude of each 128 x 128 block, [ceil(n / 128), ceil(k / 128)]."""
    n, k = w.shape
    x = torch.nn.functional.pad(w.abs(), (0, -k % BLOCK, 0, -n % BLOCK))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    x = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return x[: shape[0], : shape[1]]


def fp8_pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [n, k], scales float32 [ceil(n/128), ceil(k/128)]); w ~ values x scale."""
    w = w.detach().float()
    scale = torch.exp2(torch.ceil(torch.log2(_blocks(w).clamp_min(2.0**-100) / E4M3_MAX)))
    return (w / _spread(scale, w.shape)).to(torch.float8_e4m3fn), scale


def fp8_unpack(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [n, k] from `fp8_pack`'s output."""
    return values.float() * _spread(scale.float(), values.shape)


def fake_mxfp4(w: Tensor) -> Tensor:
    """w rounded to MXFP4; the gradient passes as if it were not."""
    values, scale = mxfp4_parts(w)
    return w + ((values * scale).flatten(-2) - w.detach())


def fake_fp8(w: Tensor) -> Tensor:
    """w [n, k] rounded to block FP8; the gradient passes as if it were not."""
    return w + (fp8_unpack(*fp8_pack(w)) - w.detach())


def fp8_activation(x: Tensor) -> Tensor:
    """x [..., k] as a W8A8 kernel sees it: E4M3 with one scale per token and 128 columns.

    Stock SGLang on CUDA quantizes the input of every FP8 linear so; a CPU lane with BF16 weights
    does not. Used to measure how much that changes. The gradient passes straight through.
    """
    g = x.detach().float().unflatten(-1, (-1, BLOCK))
    scale = g.abs().amax(-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    y = ((g / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
    return x + (y - x.detach())


def fp8_head(w: Tensor) -> Tensor:
    """The LM head [V, H] after per-row FP8 quantization (weights only), as float32."""
    w = w.detach().float()
    scale = w.abs().amax(1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    return (w / scale).to(torch.float8_e4m3fn).float() * scale
