"""Where speculation stops paying: gain against the number of users, and where it falls below 1.

    gain         (Σ tokens / Σ end-to-end seconds) with speculation / the same without, at the same
                 level: by Little's law the ratio of the throughputs; paired over prompts
    break-even   the level at which the gain falls below 1: log gain linear in log2 level between the
                 levels measured, the first crossing; bootstrap over prompts, all levels together

What differs from start to start is in no interval over prompts: the level of each round's rows alone
stands beside it. Rows are those of `concurrency`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sparkling.errors import UsageError
from sparkling.stats import Interval, bootstrap, bootstrap_gain


@dataclass(frozen=True)
class Pays:
    """Speculation against none, level by level. `at` is the level of break-even; where the gain
    stays above 1 it is given as twice the highest level, where it starts below as half the lowest,
    and `text` says so; None when no prompt was answered at every level by both arms."""

    plain: str
    spec: str
    gains: tuple[tuple[int, Interval], ...]
    at: Interval | None
    levels: tuple[int, ...]
    by_round: tuple[float, ...] = ()  # the level of break-even from each round's rows alone

    @property
    def text(self) -> str:
        """One sentence."""
        if self.at is None:
            return (
                "Where speculation stops paying is unknown: no prompt was answered at every level."
            )
        last = self.gains[-1][0]
        ends = [self._place(v) for v in (self.at.low, self.at.high)]
        where = self._place(self.at.value)
        between = "interval unknown" if None in ends else f"between {ends[0]} and {ends[1]}"
        head = {
            "above": f"Speculation pays at every level measured, up to {last} users",
            "below": f"Speculation pays at no level measured, from {self.gains[0][0]} user on",
        }.get(str(where).split()[0], f"Speculation stops paying at about {where} users")
        n = self.at.n
        rounds = ", ".join(str(self._place(v)) for v in self.by_round)
        return (
            f"{head} ({between}; 95 % bootstrap over {n} prompt{'' if n == 1 else 's'}; by round: "
            f"{rounds or 'unknown'})."
        )

    def _place(self, level: float | None) -> str | None:
        if level is None:
            return None
        if level >= self.levels[-1] * 2:
            return f"above {self.levels[-1]}"
        return f"below {self.levels[0]}" if level < self.levels[0] else f"{level:.1f}"

    def to_json(self) -> dict[str, Any]:
        return {
            "plain": self.plain,
            "spec": self.spec,
            "gains": [{"users": u, "gain": g.to_json()} for u, g in self.gains],
            "at": self.at.to_json() if self.at else None,
            "by_round": list(self.by_round),
            "text": self.text,
        }


def pays(rows: Iterable[Mapping[str, Any]], plain: str, spec: str, *, seed: int = 0) -> Pays | None:
    """Where speculation stops paying; None when the two arms have no level in common.

    Raises UsageError when the arms differ in machine, model or prompts.
    """
    mine = [r for r in rows if r["arm"] in (plain, spec)]
    seen: dict[str, str] = {}
    for row in mine:
        for key in ("machine_id", "model_id"):
            _same(seen, key, row.get(key))
        _same(seen, f"the text of prompt {row['prompt']}", row["case_hash"])
    columns = _columns(mine, plain, spec)
    if not columns:
        return None
    gains = []
    for users, column in columns.items():
        four = list(zip(*column.values(), strict=True))
        gains.append((users, bootstrap_gain(*four, seed=seed)))
    parts = []
    for number in sorted({r.get("round", 0) for r in mine}):
        part = _columns([r for r in mine if r.get("round", 0) == number], plain, spec)
        if part.keys() == columns.keys():
            sums = np.array([np.sum(list(c.values()), axis=0) for c in part.values()])
            parts.append(float(_cross(list(part), _log_gains(*sums.T))))
    at = _crossing(columns, seed)
    return Pays(plain, spec, tuple(gains), at, tuple(columns), tuple(parts))


def _columns(
    rows: Iterable[Mapping[str, Any]], plain: str, spec: str
) -> dict[int, dict[str, tuple[float, ...]]]:
    """{users: {prompt: (tokens, seconds with speculation, tokens, seconds without)}} of the prompts
    that both arms answered, levels rising."""
    sums: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for row in rows:
        if row["complete"] and row["completion_tokens"]:
            unit = sums.setdefault((row["arm"], row["users"]), {})
            tokens, seconds = unit.get(row["prompt"], (0.0, 0.0))
            unit[row["prompt"]] = tokens + row["completion_tokens"], seconds + row["e2e_s"]
    out = {}
    for users in sorted({u for _, u in sums}):
        a, b = sums.get((spec, users), {}), sums.get((plain, users), {})
        common = sorted(a.keys() & b.keys())
        if common:
            out[users] = {p: (*a[p], *b[p]) for p in common}
    return out


def _same(seen: dict[str, str], what: str, value: Any) -> None:
    if seen.setdefault(what, value) != value:
        raise UsageError(f"The two arms differ in {what}; they cannot be compared.")


def _crossing(columns: Mapping[int, Mapping[str, Sequence[float]]], seed: int) -> Interval | None:
    """The level of break-even, over the prompts that every level has."""
    common = sorted(set.intersection(*(set(c) for c in columns.values())))
    if not common:
        return None
    table = np.array([[c[p] for p in common] for c in columns.values()])  # (levels, prompts, 4)
    used = list(columns)

    def statistic(drawn: np.ndarray) -> Any:
        logs = _log_gains(*(drawn @ table[:, :, i].T for i in range(4)))
        if logs.ndim == 1:
            return _cross(used, logs)
        return np.array([_cross(used, row) for row in logs])

    return bootstrap(statistic, len(common), seed=seed)


def _log_gains(ta: Any, sa: Any, tb: Any, sb: Any) -> Any:
    return np.log(ta * sb) - np.log(sa * tb)


def _cross(used: Sequence[int], logs: Sequence[float]) -> float:
    """Where the log gain first falls to 0 or below; half the first level when it begins there,
    twice the last when it never does."""
    if logs[0] <= 0:
        return used[0] / 2
    for (a, x), (b, y) in pairwise(zip(used, logs, strict=True)):
        if y <= 0:
            return 2 ** (math.log2(a) + (math.log2(b) - math.log2(a)) * x / (x - y))
    return used[-1] * 2.0
