"""How fast this device reads its memory: the limit that every other time is put against.

Several ways of reading one large buffer are tried and the fastest counts: a Triton kernel that only
loads and adds, in a few shapes, and PyTorch's own sum.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch.sum remains
    triton = None


# Elements a program loads at a time, how many such loads follow each other, warps.
CONFIGS = ((2048, 4, 4), (2048, 8, 4), (4096, 1, 8), (4096, 4, 8), (8192, 2, 8), (8192, 4, 16))
# Elements, programs a multiprocessor, stages, warps: few programs that walk through the buffer.
WALKERS = ((2048, 4, 4, 4), (4096, 2, 4, 8), (4096, 4, 1, 8), (4096, 4, 3, 8), (8192, 4, 1, 16))
MOST = 4 << 30  # bytes

if triton is not None:

    @triton.jit
    def _read(values, sums, BLOCK: tl.constexpr, LOADS: tl.constexpr):
        """One program adds up LOADS x BLOCK neighbouring int32 and stores one number."""
        program = tl.program_id(0).to(tl.int64)
        total = tl.zeros((BLOCK,), tl.int32)
        for load in tl.static_range(LOADS):
            total += tl.load(values + (program * LOADS + load) * BLOCK + tl.arange(0, BLOCK))
        tl.store(sums + program, tl.sum(total, axis=0))

    @triton.jit
    def _walk(values, sums, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
        """Every program adds up every n-th block of int32, n the number of programs."""
        program, programs = tl.program_id(0), tl.num_programs(0)
        total = tl.zeros((BLOCK,), tl.int32)
        place = values + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for _ in tl.range(0, tl.cdiv(blocks - program, programs), num_stages=STAGES):
            total += tl.load(place)
            place += programs * BLOCK
        tl.store(sums + program, tl.sum(total, axis=0))


def readers(values: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> function that reads all of `values` (int32, a multiple of 32,768) and returns sums."""
    found: dict[str, Callable[[], torch.Tensor]] = {"torch.sum": lambda: values.sum(dtype=None)}
    if triton is None:
        return found

    def reader(block: int, loads: int, warps: int) -> Callable[[], torch.Tensor]:
        programs = values.numel() // (block * loads)

        def run() -> torch.Tensor:
            sums = torch.empty(programs, dtype=torch.int32, device=values.device)
            _read[(programs,)](values, sums, BLOCK=block, LOADS=loads, num_warps=warps)
            return sums

        return run

    for block, loads, warps in CONFIGS:
        found[f"triton {block}x{loads} {warps} warps"] = reader(block, loads, warps)

    def walker(block: int, per_sm: int, stages: int, warps: int) -> Callable[[], torch.Tensor]:
        programs = per_sm * _multiprocessors(values.device)
        blocks = values.numel() // block

        def run() -> torch.Tensor:
            sums = torch.empty(programs, dtype=torch.int32, device=values.device)
            _walk[(programs,)](values, sums, blocks, BLOCK=block, STAGES=stages, num_warps=warps)
            return sums

        return run

    for block, per_sm, stages, warps in WALKERS:
        name = f"triton walk {block} {per_sm} a SM {stages} stages {warps} warps"
        found[name] = walker(block, per_sm, stages, warps)
    return found


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def measure(timer: Any, device: torch.device, size: int) -> dict[str, Any]:
    """The record's `bandwidth`: bytes/s of the fastest reader (median of its replays), and all of
    them. A reader that fails, or does not add up what is there, is left out and named.

    Args:
        timer: a `GraphTimer`.
        size: bytes of the buffer, rounded down to a multiple of 128 KiB; far more than the cache.
    """
    count = max(size // 4 // 32768, 1) * 32768
    values = torch.ones(count, dtype=torch.int32, device=device)
    ways: dict[str, Any] = {}
    for name, read in readers(values).items():
        try:
            if int(read().sum(dtype=torch.int64)) != count:
                raise RuntimeError("it did not read every element")
            ways[name] = timer.time(lambda _, read=read: read(), 2).to_json()
        except Exception as error:
            ways[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    medians = {n: median(w["us"]) for n, w in ways.items() if "us" in w}
    if not medians:
        raise RuntimeError(f"no way of reading the memory worked: {ways}")
    best = min(medians, key=lambda name: medians[name])
    return {
        "bytes": 4 * count,
        "best": best,
        "bytes_s": 4 * count / (medians[best] * 1e-6),
        "ways": ways,
    }


def buffer_size(device: torch.device) -> int:
    """4 GiB, or an eighth of the free memory where that is less."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(MOST, free // 8)
