"""A against B: the same questions and prompts, paired by id, with everything a sceptic asks for.

Accuracy with McNemar and the interval of the difference, rates as paired bootstrap ratios, and how
much each wrote: an arm that writes more is slower per reply and no slower per token, so times are
given for the reply as it was and per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkling import ladder as _ladder
from sparkling.compare_rates import Ratio, Row, drift, ratios
from sparkling.compare_sides import (
    Difference,
    Side,
    choose,
    differences,
    recipe_at_hand,
    refuse,
    sides,
)
from sparkling.errors import UsageError
from sparkling.ladder import Ladder
from sparkling.metrics import accept_interval
from sparkling.stats import Interval, pair
from sparkling.stats_paired import Counts, Paired, paired

STATES = ("ok", "truncated", "unparsed", "error")


@dataclass(frozen=True)
class Outcome:
    """How one arm's questions ended, over all that it answered (not only the common ones)."""

    arm: str
    rows: int
    correct: int
    states: dict[str, int]
    accept_length: Interval | None


@dataclass(frozen=True)
class Evaluation:
    """Two arms on common questions."""

    note: str  # which ids were left out
    outcomes: tuple[Outcome, Outcome]
    accuracy: Paired
    ratios: tuple[Ratio, ...]

    def to_json(self) -> dict[str, Any]:
        outcomes = [
            {**o.__dict__, "accept_length": o.accept_length.to_json() if o.accept_length else None}
            for o in self.outcomes
        ]
        return {
            "left_out": self.note,
            "outcomes": outcomes,
            "accuracy": self.accuracy.to_json(),
            "ratios": [r.to_json() for r in self.ratios],
        }


@dataclass(frozen=True)
class Bench:
    """Two arms on common prompts: over everything, and by workload."""

    whole: Ladder
    by_workload: tuple[Ladder, ...]
    ratios: tuple[Ratio, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "all": self.whole.to_json(),
            "by_workload": [x.to_json() for x in self.by_workload],
            "ratios": [r.to_json() for r in self.ratios],
        }


@dataclass(frozen=True)
class Comparison:
    """One pair of arms. `differs`: the declared switch and its flags. `remarks`: what could not be
    checked, said aloud."""

    first: str
    second: str
    differs: tuple[Difference, ...]
    remarks: tuple[str, ...]
    evaluation: Evaluation | None = None
    bench: Bench | None = None
    labels: tuple[str, str] = field(default=("first", "second"))

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "second": self.second,
            "differs_in": [d.__dict__ for d in self.differs],
            "remarks": list(self.remarks),
            "evaluation": self.evaluation.to_json() if self.evaluation else None,
            "bench": self.bench.to_json() if self.bench else None,
        }


def compare(
    a: str,
    b: str,
    runs: Path,
    *,
    switches: Sequence[str] = (),
    margin: float | None = None,
    root: Path | None = None,
) -> list[Comparison]:
    """Compare two runs, arms or files (see `compare_sides`), one comparison a pair of arms.

    UsageError when they differ in more than the declared switch, saying in what; when an id stands
    twice; when nothing is common.
    """
    return [
        compare_sides(x, y, switches=switches, margin=margin, root=root)
        for x, y in choose(sides(a, runs), sides(b, runs))
    ]


def compare_sides(
    first: Side,
    second: Side,
    *,
    switches: Sequence[str] = (),
    margin: float | None = None,
    root: Path | None = None,
) -> Comparison:
    """Compare two arms that are already read; see `compare`."""
    same_rows = first.file is not None and (first.file, first.arm) == (second.file, second.arm)
    if first.name == second.name or same_rows:
        raise UsageError(f"{first.name} would be compared with itself; name two.")
    found = differences(first, second, root=root)
    refuse(first, second, found, switches)
    labels = (first.arm, second.arm) if first.arm != second.arm else (first.name, second.name)
    tested = bench = None
    if first.evaluation and second.evaluation:
        tested = evaluations(first.evaluation, second.evaluation, labels, margin=margin)
    if first.bench and second.bench:
        bench = benches(first.bench, second.bench, labels)
    if tested is None and bench is None:
        raise UsageError(
            f"{first.name} and {second.name} hold nothing of the same kind: one has evaluated "
            "questions, the other measured requests."
        )
    remarks = _remarks(first, second, found, root)
    return Comparison(first.name, second.name, tuple(found), remarks, tested, bench, labels)


def _remarks(
    first: Side, second: Side, found: Sequence[Difference], root: Path | None
) -> tuple[str, ...]:
    out = []
    for side in (first, second):
        if not side.manifest:
            out.append(
                f"{side.name} has no manifest beside it: versions, machine, flags and seeds are not "
                "checked."
            )
        elif not side.launch:
            out.append(f"The manifest of {side.name} has no launch of it: flags are not checked.")
    commits = [((s.manifest.get("git") or {}).get("commit") or "")[:12] for s in (first, second)]
    if all(commits) and commits[0] != commits[1]:
        out.append(f"Sparkling itself differs: commit {commits[0]} against {commits[1]}.")
    changed = [d.what for d in found if d.what.startswith("the switch ")]
    if len(changed) > 1:
        out.append(
            f"{len(changed)} switches differ ({', '.join(x[11:] for x in changed)}); what is seen is "
            "the sum of them."
        )
    if changed and recipe_at_hand(first.launch.get("recipe", ""), first.manifest, root) is None:
        out.append(
            "The recipe as it was then is not here, so which flags belong to the switch is not checked."
        )
    return tuple(out)


# -- evaluated questions -------------------------------------------------------------------------


def evaluations(
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    labels: tuple[str, str] = ("first", "second"),
    *,
    margin: float | None = None,
    seed: int = 0,
) -> Evaluation:
    """Two arms' rows of questions, joined by id; a question that was cut off, not parsed or not
    answered is wrong and stays in. UsageError as `stats.pair`."""
    joined = pair(((r["id"], r) for r in first), ((r["id"], r) for r in second))
    counts = Counter(
        (bool(x["correct"]), bool(y["correct"])) for x, y in zip(joined.a, joined.b, strict=True)
    )
    table = Counts(
        counts[True, True], counts[True, False], counts[False, True], counts[False, False]
    )
    return Evaluation(
        joined.note,
        (outcome(labels[0], first), outcome(labels[1], second)),
        paired(table, margin=margin),
        tuple(ratios(joined.a, joined.b, seed=seed)),
    )


def outcome(arm: str, rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """How one arm's questions ended; accept length = Σ tokens ÷ Σ rounds."""
    states = Counter(str(r.get("status") or "ok") for r in rows)
    ordered = {s: states[s] for s in (*STATES, *sorted(states.keys() - set(STATES)))}
    lengths = accept_interval({"prompt": r["id"], "spec": r.get("spec")} for r in rows)
    return Outcome(arm, len(rows), sum(bool(r["correct"]) for r in rows), ordered, lengths)


# -- measured requests ---------------------------------------------------------------------------


def benches(
    first: Sequence[Row], second: Sequence[Row], labels: tuple[str, str], *, seed: int = 0
) -> Bench:
    """Two arms' rows of `bench`. UsageError, saying in what, when `ladder` finds them not
    comparable: machine, model, regime, recipe, sampling or the hash of a prompt."""
    rows = [{**r, "arm": labels[0]} for r in first] + [{**r, "arm": labels[1]} for r in second]
    whole = _ladder.ladder(rows, labels[0], seed=seed)
    shared = {r["workload"] for r in first} & {r["workload"] for r in second}
    single = []
    for workload in dict.fromkeys(r["workload"] for r in first if r["workload"] in shared):
        try:
            single.append(_ladder.ladder(rows, labels[0], workload=workload, seed=seed))
        except UsageError:
            continue  # no prompt of it was answered by both
    a, b = (_means(group) for group in (first, second))
    common = [u for u in a if u in b]
    found = ratios([a[u] for u in common], [b[u] for u in common], seed=seed)
    return Bench(whole, tuple(single), tuple(r for r in found if r.name != "decode rate"))


def _means(rows: Iterable[Row]) -> dict[Any, dict[str, float]]:
    """Means over the complete repeats of each prompt, by (workload, prompt)."""
    groups: dict[Any, list[Row]] = {}
    for r in rows:
        if r["complete"]:
            groups.setdefault((r["workload"], r["prompt"]), []).append(r)
    out = {}
    for unit, group in groups.items():
        out[unit] = {
            key: sum(known) / len(known)
            for key in ("e2e_s", "ttft_s", "completion_tokens")
            if (known := [r[key] for r in group if r.get(key) is not None])
        }
    return out


# -- pairs of a run ------------------------------------------------------------------------------


def within(
    found: Sequence[Side], *, baseline: str = "baseline", margin: float | None = None
) -> list[Comparison]:
    """Every evaluated arm of a run against its baseline (or its first arm), by kind of questions."""
    tasks: dict[str, list[Side]] = {}
    for side in found:
        if side.evaluation:
            tasks.setdefault(side.task, []).append(replace(side, bench=()))
    out = []
    for tested in tasks.values():
        base = next((s for s in tested if s.arm == baseline), tested[0])
        out += [compare_sides(base, s, margin=margin) for s in tested if s is not base]
    return out


__all__ = [
    "Bench",
    "Comparison",
    "Evaluation",
    "Ratio",
    "benches",
    "compare",
    "compare_sides",
    "drift",
    "evaluations",
    "outcome",
    "ratios",
    "within",
]
