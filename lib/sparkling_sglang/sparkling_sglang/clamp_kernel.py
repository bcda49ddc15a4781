"""One Triton kernel: Ling's SwiGLU with its limit, for CUDA. Imported only where there is a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# One warp with 8 values (16 bytes of BF16) a thread: Ling's 768 columns are three programs a row.
BLOCK = 256

FAST = True
"""Divide and exponentiate as SGLang's own ``silu_and_mul`` does (both are built with nvcc's
``--use_fast_math``), so that a value below the limit comes out with the same bits."""


@triton.jit
def _kernel(gate_up, out, columns, limit, BLOCK: tl.constexpr, FAST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    base = gate_up + row * 2 * columns
    gate = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + columns + at, mask=mask, other=0.0).to(tl.float32)
    if FAST:
        gate = libdevice.fast_dividef(gate, 1.0 + libdevice.fast_expf(-gate))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    # Comparisons and not tl.minimum: NaN must stay NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    tl.store(out + row * columns + at, (gate * up).to(out.dtype.element_ty), mask=mask)


def launch(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    """``out`` [rows, columns] of contiguous ``gate_up`` [rows, 2 * columns] on a CUDA device."""
    rows, columns = out.shape
    if rows:
        grid = (rows, triton.cdiv(columns, BLOCK))
        _kernel[grid](gate_up, out, columns, float(limit), BLOCK=BLOCK, FAST=FAST, num_warps=1)
