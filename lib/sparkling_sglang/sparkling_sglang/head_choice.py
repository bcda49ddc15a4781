"""Which product the FP8 head uses: tried on the device while the server loads, kept on disk.

The configurations follow from what the device has (multiprocessors, shared memory, threads), so
nothing is made for one GPU alone. At the first start another process compiles each, checks it
against torch's product and times it (:mod:`sparkling_sglang.head_trial`); the fastest correct one
is kept in a file and checked once more on the real weights. Whatever fails, the server starts: with
torch's own product, a warning and the reason in the status file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparkling_sglang import head_kernels, status
from sparkling_sglang.head_kernels import Config, HeadKernel, KernelError

PLAIN = "torch-dequantize"
OURS = "sparkling-cuda"

NARROW, WIDE = 8, 16  # tokens at most: one and two groups of 8

# Up to here the tokens are taken 16 at a time: on an H200 104 us for each 16, where torch needs
# 1,590 us for 64 tokens and 2,250 us for 512.
SLICED = 128
TRIAL_S = 120

LEAST_SM = 89  # the first that converts e4m3

# A logit may differ by one BF16 step and by this part of the token's root mean square. A wrong
# layout or a lost stage is off by about 1.
TOLERANCE = 1e-2

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Chosen = dict[int, tuple[Config, float]]
"""Groups of 8 tokens -> the configuration and its microseconds for the fewest tokens."""

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

    def fits(self, config: Config) -> bool:
        """Whether ``config.blocks`` blocks of it run on a multiprocessor at once."""
        # A kernel declares at most 48 KiB, and CUDA keeps 1 KiB for each block.
        return (
            config.shared() <= min(self.shared_per_block, 48 * 1024)
            and config.blocks * (config.shared() + 1024) <= self.shared
            and config.blocks * config.warps * 32 <= self.threads
        )


def candidates(hidden: int, groups: int, limits: Limits) -> list[Config]:
    """The configurations to try for ``8 * groups`` tokens; none if the shape does not suit.

    On an H200 at 157,184 x 2,560 the widths differ little and a prefetch of 128 bytes matters
    (tests/data/h200/lm-head.json); fetching by cp.async or bulk copies was slower there.
    """
    segments, rest = divmod(hidden, 64)
    if rest or int(limits.architecture.removeprefix("sm_")) < LEAST_SM:
        return []
    # The activations of more than 8 segments would not stay in a thread's registers.
    widths = [w for w in (20, 16, 10, 8, 5, 4, 2, 1) if segments % w == 0]
    made: list[Config] = []
    for warps in widths:
        most = 2 if warps <= 10 and groups == 1 else 1
        shapes = [Config(warps, blocks, groups) for blocks in range(most, 0, -1)]
        fitting = [config for config in shapes if limits.fits(config)]
        if fitting and segments // warps * groups <= 8:
            made += [fitting[0], replace(fitting[0], prefetch=0)]
    return made[:6]


@dataclass
class Choice:
    """A product and what the log and the status file say about it."""

    name: str
    product: Product
    details: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------ the cache


def cache_file(limits: Limits, rows: int, hidden: int) -> Path:
    """Where the choice for this device, shape and these versions is kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # then it counts as unset
        base = os.path.expanduser("~/.cache")
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


def as_text(chosen: Chosen) -> str:
    """One line, for the cache and for :func:`understood`."""
    return json.dumps(
        {g: {"config": asdict(c), "us": round(us, 1)} for g, (c, us) in chosen.items()}
    )


def understood(text: str, hidden: int, limits: Limits) -> Chosen | None:
    """What :func:`as_text` wrote; None for anything but candidates for this device and shape."""
    known: Chosen = {}
    try:
        for key, entry in json.loads(text).items():
            groups, us = int(key), float(entry["us"])
            offered = candidates(hidden, groups, limits) if groups in (1, 2) else []
            if not 0 < us < math.inf:
                return None
            known[groups] = offered[offered.index(Config(**entry["config"]))], us
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return known if 1 in known else None


def remembered(path: Path, hidden: int, limits: Limits) -> Chosen | None:
    """The choice kept in ``path``, or None if there is none that can be used."""
    try:
        return understood(path.read_text(encoding="utf-8"), hidden, limits)
    except (OSError, ValueError):
        return None


def keep(path: Path, chosen: Chosen) -> None:
    """Write ``path`` for the next start. A folder that cannot be written costs that start a trial."""
    try:
        if not path.is_absolute():
            raise OSError("there is no home folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        status.replace_file(path, as_text(chosen) + "\n")
    except OSError as error:
        logger.warning("The choice of the FP8 head's kernel cannot be kept in %s: %s.", path, error)


# ---------------------------------------------------------------------------------- the choice


def wrong(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Logits [tokens, rows] that differ from the float32 ones by more than rounding explains."""
    rms = wanted.square().mean(1, keepdim=True).sqrt()
    bound = wanted.abs() * 2**-8 + rms * TOLERANCE
    return int((~((got.float() - wanted).abs() <= bound)).sum())


def inputs(hidden: int, device: torch.device) -> torch.Tensor:
    """Activations [WIDE, hidden] bfloat16 to check a kernel with."""
    noise = torch.Generator(device=device).manual_seed(0)
    return torch.randn(WIDE, hidden, generator=noise, device=device).bfloat16()


def run_trial(rows: int, hidden: int, device: torch.device) -> str:
    """Let :mod:`sparkling_sglang.head_trial` try the configurations; returns what it printed last.

    In a process of its own: a kernel that faults or hangs on a GPU it was never run on takes down
    the trial and not the server.

    Raises:
        KernelError: the trial failed or took more than :data:`TRIAL_S`.
    """
    package = str(Path(__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    told = [str(rows), str(hidden), str(device.index or 0)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sparkling_sglang.head_trial", *told],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"the trial took more than {TRIAL_S} s") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise KernelError(f"the trial ended with {done.returncode}: {lines[-1]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def tuned(q: torch.Tensor, scale: torch.Tensor, plain: Product) -> Choice:
    """Our kernel, configured from the cache or, at the first start, by a trial.

    A choice from the cache that does not work is tried anew: another driver may be the reason.

    Raises:
        KernelError: it does not work here.
    """
    rows, hidden = q.shape
    limits = Limits.of(q.device)
    if not candidates(hidden, 1, limits):
        raise KernelError(f"no configuration suits {limits.architecture} and {hidden} columns")
    started = time.monotonic()
    path = cache_file(limits, rows, hidden)
    x = inputs(hidden, q.device)
    wanted = plain(x, q, scale).float()

    def built(known: Chosen) -> dict[int, Product]:
        kernels: dict[int, Product] = {}
        for groups, (config, _) in known.items():
            cubin = head_kernels.compile_kernel(config, hidden, limits.architecture)
            kernel = HeadKernel(cubin, config, rows, limits.multiprocessors, q.device)
            part = x[: 8 * groups]
            if bad := wrong(kernel(part, q, scale), wanted[: len(part)]):
                raise KernelError(f"{bad} logits are wrong with {config}")
            kernels[groups] = kernel
        return kernels

    known, source, kernels = remembered(path, hidden, limits), "cache", None
    if known is not None:
        try:
            kernels = built(known)
        except KernelError as error:
            logger.warning(
                "The FP8 head's kernel is tried anew, %s does not work: %s.", path, said(error)
            )
    if known is None or kernels is None:
        torch.cuda.empty_cache()  # the trial is another process: leave it what the BF16 head held
        text, source = run_trial(rows, hidden, q.device), "trial"
        known = understood(text, hidden, limits)
        if known is None:
            raise KernelError(f"the trial answered {text[:200]!r}")
        kernels = built(known)
        keep(path, known)
    details = {
        "kernel_config": {str(8 * g): asdict(c) for g, (c, _) in known.items()},
        "kernel_us": {str(8 * g): us for g, (_, us) in known.items()},
        "kernel_from": source,
        "kernel_seconds": round(time.monotonic() - started, 1),
    }
    return Choice(OURS, FewTokens(kernels[1], kernels.get(2), plain), details)


class FewTokens:
    """Our kernel for BF16 tokens, 16 at a time; ``plain`` for very many or for other dtypes."""

    def __init__(self, narrow: Product, wide: Product | None, plain: Product) -> None:
        self._narrow, self._wide, self._plain = narrow, wide, plain

    def __call__(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        if not 0 < tokens <= SLICED or x.dtype != torch.bfloat16:
            return self._plain(x, q, scale)
        kernel = self._narrow if tokens <= NARROW else self._wide
        if kernel is None:
            return self._plain(x, q, scale)
        # The kernel reads 16 bytes at a time; a slice of a wider tensor may not allow that.
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        if tokens <= WIDE:
            return kernel(x, q, scale)
        return torch.cat([kernel(part, q, scale) for part in x.split(WIDE)])


def bf16_works(q: torch.Tensor, scale: torch.Tensor, exact: Product, fast: Product) -> bool:
    """Whether ``fast`` runs here and agrees with ``exact``, on the head's first rows."""
    few = torch.ones(WIDE + 1, q.shape[1], dtype=torch.bfloat16, device=q.device)
    return not wrong(fast(few, q[:64], scale[:64]), exact(few, q[:64], scale[:64]))


def choose(q: torch.Tensor, scale: torch.Tensor, exact: Product, fast: Product) -> Choice:
    """The product for this head: ours on a CUDA GPU where it works, otherwise torch's.

    Args:
        q: [rows, hidden] float8_e4m3fn; scale: [rows] float32.
        exact: torch's float32 product, which runs everywhere.
        fast: a quicker one for many tokens on a GPU, used if it runs here.
    """
    if q.device.type != "cuda":
        return Choice(PLAIN, exact)
    plain, notes = exact, []
    try:
        if not bf16_works(q, scale, exact, fast):
            raise KernelError("the product of BF16 matrices is wrong")
        plain = fast
    except Exception as error:  # whatever it is, a slower head is better than no server
        notes.append(said(error))
        logger.warning("The FP8 LM head's product for many tokens stays in float32: %s.", notes[-1])
    try:
        choice = tuned(q, scale, plain)
    except Exception as error:
        notes.append(said(error))
        logger.warning(
            "The FP8 LM head falls back to torch's product, which is slower: %s.", notes[-1]
        )
        choice = Choice(PLAIN, plain)
    if notes:
        choice.details["kernel_note"] = "; ".join(notes)
    return choice


def said(error: Exception) -> str:
    """An error as part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(".")
