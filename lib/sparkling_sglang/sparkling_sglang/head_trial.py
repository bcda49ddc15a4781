"""Try the FP8 head's configurations on a GPU: ``python -m sparkling_sglang.head_trial``.

Started by :mod:`sparkling_sglang.head_choice` with the head's rows and columns and the device's
number. The weights are random: a product's time does not depend on them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from sparkling_sglang import head_kernels
from sparkling_sglang.fp8_head import dequantized_product
from sparkling_sglang.head_choice import Chosen, Limits, as_text, candidates, inputs, wrong
from sparkling_sglang.head_kernels import Config, HeadKernel, KernelError

CALLS, REPLAYS = 4, 9  # in a graph, and how often it is replayed


def microseconds(call: Callable[[], object]) -> float:
    """Median time of ``call`` within a CUDA graph, as the server runs it.

    The head is many times larger than the caches, so that each call reads it from memory.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return 1e3 / CALLS * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def fastest(
    configs: list[Config],
    build: Callable[[Config], HeadKernel],
    check: Callable[[HeadKernel], int],
    clock: Callable[[HeadKernel], float],
) -> tuple[Config, float]:
    """The fastest of ``configs`` that can be built and computes what it should.

    Raises:
        KernelError: none does; the message says how many were tried and what the first said.
    """
    best: tuple[Config, float] | None = None
    reasons = []
    for config in configs:
        try:
            kernel = build(config)
            if bad := check(kernel):
                raise KernelError(f"{bad} logits are wrong")
            us = clock(kernel)
        except KernelError as error:
            reasons.append(str(error))
            continue
        if best is None or us < best[1]:
            best = (config, us)
    if best is None:
        told = reasons[0] if reasons else "no configuration suits the device and the shape"
        raise KernelError(f"of {len(configs)} configurations none works: {told}")
    return best


def random_head(rows: int, hidden: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Every e4m3 code but NaN in ``q`` [rows, hidden], and ``scale`` [rows] float32."""
    noise = torch.Generator(device=device).manual_seed(1)
    codes = torch.randint(0, 254, (rows, hidden), dtype=torch.uint8, device=device, generator=noise)
    codes += codes > 126  # 127 and 255 are NaN
    scale = torch.rand(rows, device=device, generator=noise) + 0.5
    return codes.view(torch.float8_e4m3fn), scale


def trial(rows: int, hidden: int, device: torch.device) -> Chosen:
    """Groups of 8 tokens -> the fastest configuration and its microseconds for the fewest tokens.

    Raises:
        KernelError: nothing works for up to 8 tokens; for 9 to 16 that is no error.
    """
    limits = Limits.of(device)
    q, scale = random_head(rows, hidden, device)
    x = inputs(hidden, device)
    wanted = dequantized_product(x, q, scale)
    chosen: Chosen = {}
    for groups in (1, 2):
        configs = candidates(hidden, groups, limits)

        def compiled(config: Config) -> bytes | KernelError:
            try:
                return head_kernels.compile_kernel(config, hidden, limits.architecture)
            except KernelError as error:
                return error

        with ThreadPoolExecutor(4) as pool:
            cubins = dict(zip(configs, pool.map(compiled, configs), strict=True))

        def build(config: Config, cubins: dict = cubins) -> HeadKernel:
            cubin = cubins[config]
            if isinstance(cubin, KernelError):
                raise cubin
            return HeadKernel(cubin, config, rows, limits.multiprocessors, device)

        part, few = x[: 8 * groups], x[: 8 * groups - 7]
        try:
            chosen[groups] = fastest(
                configs,
                build,
                lambda k, part=part: wrong(k(part, q, scale), wanted[: len(part)]),
                lambda k, few=few: microseconds(lambda: k(few, q, scale)),
            )
        except KernelError:
            if groups == 1:
                raise
    return chosen


def main(told: list[str]) -> None:
    """Try, and print the choice as one line; ends with an error's text where that fails."""
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device")
    rows, hidden, index = map(int, told)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    try:
        print(as_text(trial(rows, hidden, device)))
    except (KernelError, OSError, RuntimeError) as error:
        raise SystemExit(" ".join(str(error).split())[:800]) from error


if __name__ == "__main__":
    main(sys.argv[1:])
