"""Which product the FP8 head uses: tried on the device while the server loads, kept on disk.

The configurations follow from what the device has (multiprocessors, shared memory, threads), so
nothing is made for one GPU alone. Each is compiled, checked against the float32 product of the
same weights and timed; the fastest correct one is kept. Whatever fails, the server starts: with
torch's own product, a warning and the reason in the status file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparkling_sglang import head_kernels, status
from sparkling_sglang.head_kernels import Config, HeadKernel, KernelError

PLAIN = "torch-dequantize"
OURS = "sparkling-cuda"

NARROW, WIDE = 8, 16  # tokens at most: one and two groups of 8
REPEATS = 9

# A logit may differ by one BF16 step and by this part of the token's root mean square. A wrong
# layout or a lost stage is off by about 1.
TOLERANCE = 1e-2

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

logger = logging.getLogger("sparkling_sglang")


@dataclass(frozen=True)
class Limits:
    """What a device allows; bytes of shared memory, threads of one multiprocessor."""

    name: str
    architecture: str
    multiprocessors: int
    shared_per_block: int
    shared: int
    threads: int

    @classmethod
    def of(cls, device: torch.device) -> Limits:
        """Read from the driver, through torch."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            name=found.name,
            architecture=f"sm_{found.major}{found.minor}",
            multiprocessors=found.multi_processor_count,
            shared_per_block=found.shared_memory_per_block_optin,
            shared=found.shared_memory_per_multiprocessor,
            threads=found.max_threads_per_multi_processor,
        )

    def fits(self, config: Config, hidden: int) -> bool:
        """Whether ``config.blocks`` blocks of it run on a multiprocessor at once."""
        block = config.dynamic_shared(hidden) + config.static_shared()
        # CUDA keeps 1 KiB of each block's shared memory to itself; NVCC's static limit is 48 KiB.
        return (
            block <= self.shared_per_block
            and config.blocks * (block + 1024) <= self.shared
            and config.blocks * config.warps * 32 <= self.threads
            and config.static_shared() <= 48 * 1024
        )


def candidates(hidden: int, groups: int, limits: Limits) -> list[Config]:
    """The configurations to try for ``8 * groups`` tokens; none if the shape does not suit.

    As much of the weights as possible should be under way: by bulk copies or cp.async in as many
    stages as the shared memory holds, or in registers with several blocks on a multiprocessor.
    """
    segments, rest = divmod(hidden, 64)
    if rest:
        return []
    # Activations of more than 8 segments would not stay in a thread's registers.
    most = 8 // groups
    widths = [w for w in (10, 8, 7, 5, 4, 2, 1) if segments % w == 0 and segments // w <= most][:2]
    made = []
    for warps in widths:
        for fetch in (2, 1):
            for stages in (5, 4, 3, 2):
                config = Config(warps, fetch, 1, stages, groups=groups)
                if limits.fits(config, hidden):
                    made.append(config)
                    break
        made.append(Config(warps, 0, 3 - groups, prefetch=256, groups=groups))
        if groups == 1:
            made.append(Config(warps, 0, 2, prefetch=256, waves=4))
    return [config for config in made if limits.fits(config, hidden)]


@dataclass
class Choice:
    """A product and what the log and the status file say about it."""

    name: str
    product: Product
    details: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------ the cache


def cache_file(limits: Limits, rows: int, hidden: int) -> Path:
    """Where the choice for this device, shape and these versions is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = json.dumps(
        [
            asdict(limits),
            rows,
            hidden,
            torch.__version__,
            torch.version.cuda,
            hashlib.sha256(head_kernels.SOURCE.read_bytes()).hexdigest(),
        ]
    )
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(base) / "sparkling" / "fp8-head" / f"{name}.json"


def remembered(path: Path) -> dict[int, tuple[Config, float]] | None:
    """Groups of 8 tokens -> the configuration and its microseconds, or None if unusable."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {int(g): (Config(**c["config"]), float(c["us"])) for g, c in stored.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remember(path: Path, chosen: dict[int, tuple[Config, float]]) -> None:
    """Keep a choice; a folder that cannot be written costs the next start a few seconds."""
    stored = {g: {"config": asdict(c), "us": us} for g, (c, us) in chosen.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        status.replace_file(path, json.dumps(stored, indent=1) + "\n")
    except OSError as error:
        logger.warning("Cannot keep the FP8 head's configuration in %s: %s.", path, error)


# ----------------------------------------------------------------------------------- the trials


def wrong(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Logits [tokens, rows] that differ from the float32 ones by more than rounding explains."""
    rms = wanted.square().mean(1, keepdim=True).sqrt()
    bound = wanted.abs() * 2**-8 + rms * TOLERANCE
    return int((~((got.float() - wanted).abs() <= bound)).sum())


def microseconds(call: Callable[[], object]) -> float:
    """Median time of ``call`` on the current CUDA stream; the head is larger than the caches."""
    for _ in range(2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def fastest(
    configs: list[Config],
    build: Callable[[Config], HeadKernel],
    check: Callable[[HeadKernel], int],
    clock: Callable[[HeadKernel], float],
) -> tuple[HeadKernel, Config, float]:
    """The fastest of ``configs`` that can be built and computes what it should.

    Raises:
        KernelError: none does; the message says how many were tried and what the first said.
    """
    best: tuple[HeadKernel, Config, float] | None = None
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
        if best is None or us < best[2]:
            best = (kernel, config, us)
    if best is None:
        told = reasons[0] if reasons else "no configuration suits the device and the shape"
        raise KernelError(f"of {len(configs)} configurations none works: {told}")
    return best


def tuned(q: torch.Tensor, scale: torch.Tensor, limits: Limits, plain: Product) -> Choice:
    """Our kernel for one and two groups of tokens, from the cache or by trying.

    Raises:
        KernelError: it does not work here.
    """
    rows, hidden = q.shape
    started = time.monotonic()
    path = cache_file(limits, rows, hidden)
    known = remembered(path)
    noise = torch.Generator(device=q.device).manual_seed(0)
    x = torch.randn(WIDE, hidden, generator=noise, device=q.device).bfloat16()
    wanted = plain(x, q, scale).float()
    kernels: dict[int, HeadKernel] = {}
    chosen: dict[int, tuple[Config, float]] = {}
    tried = 0
    for groups in (1, 2):
        if known and groups in known:
            configs = [known[groups][0]]
        else:
            configs = candidates(hidden, groups, limits)
            tried += len(configs)

        def made(config: Config) -> bytes | KernelError:
            try:
                return head_kernels.compile_kernel(config, hidden, limits.architecture)
            except KernelError as error:
                return error

        with ThreadPoolExecutor(4) as pool:
            cubins = dict(zip(configs, pool.map(made, configs), strict=True))

        def build(config: Config, cubins: dict = cubins) -> HeadKernel:
            cubin = cubins[config]
            if isinstance(cubin, KernelError):
                raise cubin
            return HeadKernel(cubin, config, rows, hidden, limits.multiprocessors)

        part = x[: 8 * groups]
        kernels[groups], config, us = fastest(
            configs,
            build,
            lambda k, part=part: wrong(k(part, q, scale), wanted[: len(part)]),
            lambda k, few=x[: 8 * groups - 7]: microseconds(lambda: k(few, q, scale)),
        )
        chosen[groups] = (config, us)
    if tried:
        remember(path, chosen)
    details = {
        "kernel_config": {8 * g: asdict(c) for g, (c, _) in chosen.items()},
        "kernel_us": {1: round(chosen[1][1], 1), 9: round(chosen[2][1], 1)},
        "kernel_tried": tried,
        "kernel_from": str(path) if not tried else "tuned at this start",
        "kernel_seconds": round(time.monotonic() - started, 1),
    }
    return Choice(OURS, FewTokens(kernels[1], kernels[2], plain), details)


class FewTokens:
    """Our kernel for up to 16 BF16 tokens, ``plain`` for more or for other dtypes."""

    def __init__(self, narrow: Product, wide: Product, plain: Product) -> None:
        self._narrow, self._wide, self._plain = narrow, wide, plain

    def __call__(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        if not 0 < tokens <= WIDE or x.dtype != torch.bfloat16:
            return self._plain(x, q, scale)
        # The kernel reads 16 bytes at a time; a slice of a wider tensor may not allow that.
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        return (self._narrow if tokens <= NARROW else self._wide)(x, q, scale)


def choose(q: torch.Tensor, scale: torch.Tensor, exact: Product, fast: Product) -> Choice:
    """The product for this head: ours on a CUDA GPU where it works, otherwise torch's.

    Args:
        q: [rows, hidden] float8_e4m3fn; scale: [rows] float32.
        exact: torch's float32 product, which runs everywhere.
        fast: a quicker one for many tokens on a GPU, used if it runs here.
    """
    if q.device.type != "cuda":
        return Choice(PLAIN, exact)
    plain = exact
    try:
        few = torch.ones(WIDE + 1, q.shape[1], dtype=torch.bfloat16, device=q.device)
        if wrong(fast(few, q[:64], scale[:64]), exact(few, q[:64], scale[:64])):
            raise KernelError("the BF16 product is wrong")
        plain = fast
        return tuned(q, scale, Limits.of(q.device), plain)
    except Exception as error:  # whatever it is, a slower head is better than no server
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "The FP8 LM head falls back to torch's product, which is slower: %s.", reason
        )
        return Choice(PLAIN, plain, {"kernel_note": reason[:500]})
