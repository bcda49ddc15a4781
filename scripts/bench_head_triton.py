"""Plain Triton kernels for the FP8 head's product, for comparison in bench_head.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The best of four and of five that were tried on an H200.
CONFIGS = [
    {"kind": "gemv", "bn": 16, "bk": 256, "warps": 4, "stages": 4},
    {"kind": "dot", "bn": 64, "bk": 128, "warps": 4, "stages": 4},
]


@triton.jit
def gemv(x, q, scale, out, M: tl.constexpr, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    inside = rows < N
    s = tl.load(scale + rows, mask=inside, other=0.0)
    a0 = tl.zeros((BN, BK), tl.float32)
    a1 = tl.zeros((BN, BK), tl.float32)
    a2 = tl.zeros((BN, BK), tl.float32)
    a3 = tl.zeros((BN, BK), tl.float32)
    for k in range(0, K, BK):
        w = tl.load(
            q + rows[:, None].to(tl.int64) * K + k + cols[None, :],
            mask=inside[:, None],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        a0 += w * tl.load(x + k + cols).to(tl.float32)[None, :]
        if M > 1:
            a1 += w * tl.load(x + K + k + cols).to(tl.float32)[None, :]
        if M > 2:
            a2 += w * tl.load(x + 2 * K + k + cols).to(tl.float32)[None, :]
        if M > 3:
            a3 += w * tl.load(x + 3 * K + k + cols).to(tl.float32)[None, :]
    tl.store(out + rows, (tl.sum(a0, 1) * s).to(tl.bfloat16), mask=inside)
    if M > 1:
        tl.store(out + N + rows, (tl.sum(a1, 1) * s).to(tl.bfloat16), mask=inside)
    if M > 2:
        tl.store(out + 2 * N + rows, (tl.sum(a2, 1) * s).to(tl.bfloat16), mask=inside)
    if M > 3:
        tl.store(out + 3 * N + rows, (tl.sum(a3, 1) * s).to(tl.bfloat16), mask=inside)


@triton.jit
def dot(x, q, scale, out, M, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    tokens = tl.arange(0, 16)
    inside = rows < N
    total = tl.zeros((BN, 16), tl.float32)
    for k in range(0, K, BK):
        w = tl.load(
            q + rows[:, None].to(tl.int64) * K + k + cols[None, :],
            mask=inside[:, None],
            other=0.0,
            eviction_policy="evict_first",
        )
        v = tl.load(
            x + tokens[None, :] * K + k + cols[:, None], mask=tokens[None, :] < M, other=0.0
        )
        total = tl.dot(w.to(tl.bfloat16), v, total)
    s = tl.load(scale + rows, mask=inside, other=0.0)
    tl.store(
        out + tokens[None, :].to(tl.int64) * N + rows[:, None],
        (total * s[:, None]).to(tl.bfloat16),
        mask=inside[:, None] & (tokens[None, :] < M),
    )


def product(x, q, scale, config: dict):
    """Logits [tokens, rows] bfloat16 by one of the two kernels."""
    tokens, hidden = x.shape
    rows = q.shape[0]
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    kernel = gemv if config["kind"] == "gemv" else dot
    kernel[(triton.cdiv(rows, config["bn"]),)](
        x, q, scale, out, tokens, rows, hidden, config["bn"], config["bk"],
        num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip
    return out
