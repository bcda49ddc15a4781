"""How many compilers may run at once. Pure arithmetic; nothing here runs.

The rule that Spark users proposed to FlashInfer (flashinfer-ai/flashinfer #3634, PR #5313) keeps 16 GiB
back and counts 8 GiB for each job. MAX_JOBS is what FlashInfer passes to ninja, and two of its values
do harm: 0 is *no limit* to ninja, and one that is not only digits (" 4", "auto") FlashInfer drops
without a word, whereupon ninja takes the cores plus two. FLASHINFER_NVCC_THREADS multiplies a job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sparkling.errors import SparklingError, UsageError

GIB = 2**30
KEEP = 16 * GIB
PER_JOB = 8 * GIB
MAX_JOBS = "MAX_JOBS"
THREADS = "FLASHINFER_NVCC_THREADS"


@dataclass(frozen=True)
class Jobs:
    """The number of jobs, and what there is to say about it."""

    count: int
    threads: int  # nvcc's own, for each job
    available: int
    notices: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """What a child that may compile is given, so that its own rules lead to the same number."""
        return {MAX_JOBS: str(self.count)}


def _asked(env: Mapping[str, str], name: str) -> int | None:
    """A whole number from 1 in the environment; None when it is not set (or set to nothing)."""
    text = env.get(name, "")
    if not text:
        return None
    whole = text.isascii() and text.isdigit()
    if not whole or not text.strip("0"):
        harm = "ninja takes 0 for no limit" if whole else "FlashInfer would drop it silently"
        raise UsageError(
            f"{name}={text!r} is not a whole number from 1, and {harm}; set a number or unset it."
        )
    return int(text) if len(text) < 10 else 10**9  # capped by whoever asks


def room(
    available: int, cores: int, threads: int = 1, *, keep: int = KEEP, each: int = PER_JOB
) -> int:
    """max(1, min(cores, (available − keep) ÷ each)), counted for `threads` threads a job."""
    return max(1, min(cores // threads or 1, (available - keep) // (each * threads)))


def jobs(
    available: int,
    cores: int,
    env: Mapping[str, str] = os.environ,
    *,
    keep: int = KEEP,
    each: int = PER_JOB,
) -> Jobs:
    """How many compile jobs fit: at least one, or a refusal.

    Args:
        available: bytes that may be taken now.
        cores: CPUs that may be kept busy.
        env: where MAX_JOBS (a lower one wins, a higher one is capped) and FLASHINFER_NVCC_THREADS
            are read.
        keep, each: bytes kept back, and counted for each job.

    Raises:
        SparklingError: not even one job fits.
        UsageError: one of the two variables has a value that would do harm.
    """
    asked, threads = _asked(env, MAX_JOBS), _asked(env, THREADS) or 1
    if available < each * threads:
        raise SparklingError(
            f"Nothing is compiled: {available / GIB:.1f} GiB of memory are available and one "
            f"compiler may take {each * threads / GIB:.1f}; stop what else uses memory."
        )
    fits = room(available, cores, threads, keep=keep, each=each)
    notices = []
    if asked is not None and asked > fits:
        notices.append(f"{MAX_JOBS}={asked} is more than fits: {fits} here")
    if threads > 1:
        notices.append(f"{THREADS}={threads} makes each job count {threads} times")
    return Jobs(min(asked or fits, fits), threads, available, tuple(notices))


def beside(available: int, held: int, cores: int, env: Mapping[str, str] = os.environ) -> str:
    """MAX_JOBS for a server, should it compile something after all: with `held` bytes taken by its
    model. Never 0. Raises UsageError for a value that would do harm."""
    asked, threads = _asked(env, MAX_JOBS), _asked(env, THREADS) or 1
    fits = room(max(0, available - held), cores, threads)
    return str(min(asked or fits, fits))
