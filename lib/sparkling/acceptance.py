"""How many drafts are kept: by workload, as a histogram, and by place in the answer.

**Accept length** of a workload is Σ tokens kept / Σ rounds over its requests, from the counters that
SGLang keeps for each request; the interval is a bootstrap over prompts. **The histogram** is SGLang's
own, summed: how many rounds kept 0, 1, … drafts.

**By place.** SGLang does not say which round kept how many. It streams, though: with one request at a
time a chunk is what one round brought, and every chunk carries the number of tokens so far. A request
is used only if the numbers prove it (`rounds_of`): a server or a reader that is short of CPU puts
several rounds into one chunk. The last round is left out, since `max_tokens` or the end of the text
cut it. A round counts for the stretch of the answer in which it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sparkling.metrics import accept_interval
from sparkling.stats import Interval, bootstrap_gain, bootstrap_ratio_of_sums

EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Where stretches begin, in tokens of the answer; each holds as much as all before it."""

Rounds = list[tuple[int, int]]
"""(tokens of the answer before the round, tokens it brought), round by round."""


@dataclass(frozen=True)
class Stretch:
    """The rounds that began at `start` or later and before `end`, in tokens of the answer."""

    start: int
    end: int
    rounds: int
    length: Interval


@dataclass(frozen=True)
class Acceptance:
    """Of one arm under one workload. `length` None: no request has counters (unknown, not 1.0).

    `histogram[i]`: rounds that kept i drafts; None where counters came without one.
    `later`: accept length in the second half of the answers ÷ in the first half, paired over
    prompts; None where it cannot be told. `placed` of `requests` requests are in `by_place`.
    """

    arm: str
    workload: str
    length: Interval | None
    source: str | None
    requests: int
    rounds: int
    histogram: tuple[int, ...] | None
    by_place: tuple[Stretch, ...]
    later: Interval | None
    placed: int

    @property
    def falls(self) -> bool | None:
        """Whether fewer drafts are kept late in the answer than early; None when it is not clear."""
        if self.later is None or not self.later.excludes(1.0):
            return None
        return self.later.value < 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "length": self.length.to_json() if self.length else None,
            "later": self.later.to_json() if self.later else None,
            "falls": self.falls,
            "by_place": [{**s.__dict__, "length": s.length.to_json()} for s in self.by_place],
        }


def acceptance(rows: Iterable[Mapping[str, Any]], *, seed: int = 0) -> list[Acceptance]:
    """One for each arm and workload that speculated, in the order of the rows of `bench`."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["complete"]:
            grouped.setdefault((row["arm"], row["workload"]), []).append(row)
    return [
        _one(arm, workload, group, seed)
        for (arm, workload), group in grouped.items()
        if any(r.get("spec") for r in group)
    ]


def rounds_of(row: Mapping[str, Any]) -> Rounds | None:
    """The rounds of one request but the last, from its chunks; None where chunks are not known to be
    rounds.

    They are when the first chunk is prefill's one token, the chunks after it are as many as the
    rounds (one fewer if the last round brought no text, only the end), and what they brought is what
    SGLang's histogram of the request says.
    """
    counts, spec = row.get("chunk_tokens") or [], row.get("spec")
    if not spec or not spec.get("histogram") or len(counts) < 2 or None in counts:
        return None
    silent = counts[-1] < (row.get("completion_tokens") or 0)
    if counts[0] != 1 or spec["rounds"] != len(counts) - 1 + silent:
        return None
    rounds = [(a, b - a) for a, b in pairwise(counts)]
    whole = rounds if silent else rounds[:-1]
    left = list(spec["histogram"])
    for _, n in whole:
        if n > len(left) or left[n - 1] == 0:
            return None
        left[n - 1] -= 1
    return whole


def histogram(rows: Iterable[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Rounds that kept 0, 1, … drafts, summed; None when a request with counters has none."""
    total: list[int] = []
    for row in rows:
        spec = row.get("spec")
        if not spec:
            continue
        one = spec.get("histogram")
        if not one:
            return None
        total += [0] * (len(one) - len(total))
        for i, n in enumerate(one):
            total[i] += n
    return tuple(total) or None


def _one(arm: str, workload: str, rows: Sequence[Mapping[str, Any]], seed: int) -> Acceptance:
    counted = [r for r in rows if r.get("spec")]
    placed: dict[str, list[Rounds]] = {}
    used = 0
    for row in counted:
        rounds = rounds_of(row)
        if rounds:
            used += 1
            placed.setdefault(row["prompt"], []).append(rounds)
    sources = sorted({r["spec"]["source"] for r in counted})
    return Acceptance(
        arm=arm,
        workload=workload,
        length=accept_interval(counted, seed=seed),
        source=", ".join(sources) or None,
        requests=len(counted),
        rounds=sum(r["spec"]["rounds"] for r in counted),
        histogram=histogram(counted),
        by_place=_by_place(placed, seed),
        later=_later(placed, seed),
        placed=used,
    )


def _by_place(placed: Mapping[str, Sequence[Rounds]], seed: int) -> tuple[Stretch, ...]:
    out = []
    for start, end in pairwise(EDGES):
        tokens, rounds = [], []
        for answers in placed.values():
            inside = [n for answer in answers for at, n in answer if start <= at < end]
            if inside:
                tokens.append(sum(inside))
                rounds.append(len(inside))
        if rounds:
            length = bootstrap_ratio_of_sums(tokens, rounds, seed=seed)
            out.append(Stretch(start, end, sum(rounds), length))
    return tuple(out)


def _later(placed: Mapping[str, Sequence[Rounds]], seed: int) -> Interval | None:
    """(Σ tokens / Σ rounds of the later half) / (the same of the earlier half); an answer's half is
    that of its tokens, so that long and short answers have one."""
    columns: list[list[int]] = []
    for answers in placed.values():
        sums = [0, 0, 0, 0]
        for answer in answers:
            if len(answer) < 2:
                continue
            half = (answer[0][0] + answer[-1][0] + answer[-1][1]) / 2
            for at, n in answer:
                i = 0 if at >= half else 2
                sums[i] += n
                sums[i + 1] += 1
        if sums[1] and sums[3]:
            columns.append(sums)
    if not columns:
        return None
    late, late_rounds, early, early_rounds = (list(c) for c in zip(*columns, strict=True))
    return bootstrap_gain(late, late_rounds, early, early_rounds, seed=seed)
