"""How fast a device reads its memory: the ceiling of every decode step.

Known devices stand in `facts/devices.toml`, each with where its figure comes from. The machine this
runs on is measured (`measure_here`): that is its processor's memory, not a GPU's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sparkling._toml import Table, closest, read
from sparkling.errors import UsageError

FILE = Path(__file__).parent / "facts" / "devices.toml"
KINDS = ("stated", "measured")


@dataclass(frozen=True)
class Device:
    """A memory and its read bandwidth in bytes/s. `low` and `high`: slowest and fastest of `n`
    repeats where we measured it here; n is 0 where nobody told."""

    id: str
    name: str
    bandwidth: float
    kind: str  # "stated" or "measured"
    source: str
    n: int = 0
    low: float | None = None
    high: float | None = None
    match: tuple[str, ...] = ()

    def text(self) -> str:
        """`DGX Spark (GB10): 273 GB/s, stated`, with n and spread where they are known."""
        spread = ""
        if self.n and self.low is not None and self.high is not None:
            spread = f", median of n={self.n}, {self.low / 1e9:,.1f} to {self.high / 1e9:,.1f}"
        return f"{self.name}: {self.bandwidth / 1e9:,.4g} GB/s, {self.kind}{spread}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "match": list(self.match)}


@cache
def known() -> dict[str, Device]:
    """The devices of the file, by id. Raises UsageError for a file that does not fit."""
    found = {}
    for name, table in Table(FILE.name, "", read(FILE, FILE.name)).tables():
        kind = table.take("kind", str)
        if kind not in KINDS:
            raise table.refuse("kind", f"must be {' or '.join(KINDS)}, not {kind!r}")
        found[name] = Device(
            id=name,
            name=table.take("name", str),
            bandwidth=table.take("bandwidth_gb_s", float) * 1e9,
            kind=kind,
            source=table.take("source", str),
            match=table.strings("match"),
        )
        table.close()
    return found


def device(name: str) -> Device:
    """One known device. Raises UsageError when there is none of that name."""
    devices = known()
    if name not in devices:
        raise UsageError(
            f"There is no device {name!r}{closest(name, devices)}; known are {', '.join(devices)}."
        )
    return devices[name]


def of_gpus(names: Iterable[str]) -> Device | None:
    """The known device that one of these GPU names belongs to, or None."""
    for gpu in names:
        for one in known().values():
            if any(word in gpu for word in one.match):
                return one
    return None


def measure_here(*, mib: int = 192, repeats: int = 7, threads: int | None = None) -> Device:
    """Measure this machine's read bandwidth: every thread sums its share of `mib` MiB with numpy.

    The array is larger than most caches; one pass is thrown away. The median of `repeats` passes is
    reported with the slowest and the fastest. Takes under a second. Raises UsageError for sizes
    that are impossible.
    """
    threads = threads or len(os.sched_getaffinity(0))
    if mib < 1 or repeats < 1 or threads < 1:
        raise UsageError("A measurement of bandwidth needs at least 1 MiB, 1 repeat and 1 thread.")
    words = np.ones(mib * 2**20 // 8)
    shares = np.array_split(words, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):
            before = time.perf_counter()
            total = sum(pool.map(np.sum, shares))
            rates.append(words.nbytes / (time.perf_counter() - before))
            assert total == len(words), "every word was read"
    kept = rates[1:]
    return Device(
        id="here",
        name=f"this machine's processor ({threads} thread{'s' if threads > 1 else ''})",
        bandwidth=median(kept),
        kind="measured",
        source=f"numpy summing {mib} MiB",
        n=len(kept),
        low=min(kept),
        high=max(kept),
    )
