"""What compiling the CUTLASS experts takes, as far as it was measured: `facts/fused-moe-120.json`.

Targets of FlashInfer 0.7.2 for sm_121a, in a random order, one at a time, on a two-core x86-64 machine
without a GPU that other work kept busy: CPU seconds and peak memory are the compilers' own, wall
seconds are not and are left out. `together` is another record, of some of them at once on a larger
machine; the two are never mixed. An Arm machine's compilers may take more or less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GIB = 2**30
_FILE = Path(__file__).parent / "facts" / "fused-moe-120.json"
FAMILIES = (
    ("grouped GEMM for SM120", "120_cutlass_kernel_file"),
    ("GEMM for SM90 (empty for 121)", "90_cutlass_kernel_file"),
    ("grouped GEMM for SM80", "80_cutlass_kernel_file"),
    ("MoE dispatch and binding", ""),
)
"""Families of targets by how their names begin; the last takes the rest."""


@dataclass(frozen=True)
class Family:
    """What targets of one kind took. Seconds of CPU, bytes; None where none was measured."""

    name: str
    targets: int
    measured: int
    mean_s: float | None
    least_s: float | None
    most_s: float | None
    peak: int | None
    mean_peak: float | None = None


@cache
def facts() -> dict[str, Any]:
    """The data file: conditions, all targets' names, and a row for each that was measured."""
    return json.loads(_FILE.read_text("utf-8"))


def family(target: str) -> str:
    """The family of a target, by its file's name."""
    name = Path(target).name
    return next(label for label, start in FAMILIES if name.startswith(start))


def together(data: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The record of many targets compiled at once on another machine; None where there is none."""
    return (facts() if data is None else data).get("together")


def families(
    data: Mapping[str, Any] | None = None, measured: Sequence[Mapping[str, Any]] | None = None
) -> list[Family]:
    """Every family with what was measured of it.

    measured: rows of another record of the same targets; those of `data` when not given.
    """
    data = facts() if data is None else data
    found = []
    for label, _ in FAMILIES:
        mine = [name for name in data["targets"] if family(name) == label]
        taken = data["rows"] if measured is None else measured
        rows = [row for row in taken if family(row["target"]) == label]
        seconds = [row["cpu_s"] for row in rows]
        peaks = [row["peak_tree_bytes"] for row in rows]
        found.append(
            Family(
                label,
                len(mine),
                len(rows),
                sum(seconds) / len(seconds) if seconds else None,
                min(seconds, default=None),
                max(seconds, default=None),
                max(peaks, default=None),
                sum(peaks) / len(peaks) if peaks else None,
            )
        )
    return found


def total_s(found: Sequence[Family] | None = None) -> float | None:
    """CPU seconds of all targets: each family's mean times its number. None while a family has no
    measurement."""
    found = families() if found is None else found
    if any(one.mean_s is None for one in found if one.targets):
        return None
    return sum(one.targets * (one.mean_s or 0.0) for one in found)


def at_once(jobs: int, found: Sequence[Family] | None = None) -> float:
    """Bytes that the `jobs` largest targets would take together, each at its family's mean."""
    found = families() if found is None else found
    each = [one.mean_peak or 0.0 for one in found for _ in range(one.targets)]
    return sum(sorted(each, reverse=True)[:jobs])


def rows(found: Iterable[Family] | None = None) -> list[dict[str, Any]]:
    """For a table."""
    return [
        {
            "targets of FlashInfer 0.7.2": one.name,
            "targets": one.targets,
            "measured": one.measured,
            "CPU s, mean": one.mean_s,
            "least": one.least_s,
            "most": one.most_s,
            "GiB at most": one.peak / GIB if one.peak else None,
        }
        for one in (families() if found is None else found)
    ]
