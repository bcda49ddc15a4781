"""Rows of a benchmark into summaries per arm, and into the gain of each arm over the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkling.errors import UsageError
from sparkling.metrics import Summary, accept_interval, in_burst, summary
from sparkling.stats import Interval, bootstrap_gain, bootstrap_ratio_of_sums

ALL = "all"
Unit = tuple[str, str]  # (workload, prompt): what the bootstrap resamples
STEADY = 1.5  # fastest ÷ slowest repeat of one prompt; above it the machine did other work as well

RATE_DEFINITION = (
    "decode rate = Σ tokens after the first chunk / Σ seconds from first to last chunk, repeats of a "
    "prompt averaged; 95 % bootstrap interval over prompts"
)
GAIN_DEFINITION = (
    "gain = decode rate of the arm / decode rate of the baseline over the same prompts; 95 % paired "
    "bootstrap interval over prompts"
)


@dataclass(frozen=True)
class Arm:
    """One arm under one workload (or under all: "all").

    `decode_rate` pools the tokens and the seconds of all prompts. `deterministic`: whether every repeat of
    every prompt gave the same output; None when nothing was repeated or sampling was on.
    `unrated`: complete rows without a decode rate (one chunk, or chunks in one burst); they are in no
    rate. `spread`: the fastest ÷ the slowest repeat of one prompt, of the worst prompt; None when
    nothing was repeated. Sampled repeats are other texts, so they count as repeats only where their
    outputs are the same.
    """

    arm: str
    arm_hash: str
    workload: str
    rows: int
    failed: int
    prompts: int
    decode_rate: Interval | None
    ttft_s: Summary | None
    tpot_s: Summary | None
    e2e_s: Summary | None
    peak_rate: float | None
    accept_length: Interval | None
    accept_source: str | None
    completion_tokens: float | None
    cached_tokens: int
    deterministic: bool | None
    unrated: int = 0
    spread: float | None = None

    def to_json(self) -> dict[str, Any]:
        out = dict(self.__dict__)
        for key in ("decode_rate", "accept_length", "ttft_s", "tpot_s", "e2e_s"):
            out[key] = out[key].to_json() if out[key] is not None else None
        return out


@dataclass(frozen=True)
class Gain:
    """A rung: an arm and, unless it is the baseline, how many times faster it is. `steady`: whether
    the repeats of every prompt agree well enough to read a gain at all."""

    summary: Arm
    gain: Interval | None
    steady: bool = True

    @property
    def arm(self) -> str:
        return self.summary.arm

    @property
    def faster(self) -> bool | None:
        """True or False when the interval lies on one side of 1; None when it cannot be told, which
        is always so on a machine that was not steady."""
        if self.gain is None or not self.steady or not self.gain.excludes(1.0):
            return None
        return self.gain.value > 1.0


@dataclass(frozen=True)
class Ladder:
    """All arms of a file under one workload, in the order in which they were measured."""

    baseline: str
    workload: str
    rungs: tuple[Gain, ...]
    definition: str = f"{RATE_DEFINITION}; {GAIN_DEFINITION}"

    def __iter__(self) -> Any:
        return iter(self.rungs)

    def __getitem__(self, arm: str) -> Gain:
        for rung in self.rungs:
            if rung.arm == arm:
                return rung
        raise UsageError(
            f"No arm {arm!r} was measured; there are {', '.join(r.arm for r in self)}."
        )

    @property
    def warning(self) -> str | None:
        """Why no gain can be read from these rows; None when the repeats agree."""
        return unsteady(r.summary.spread for r in self.rungs)

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "workload": self.workload,
            "warning": self.warning,
            "definition": self.definition,
            "rungs": [
                {**r.summary.to_json(), "gain": r.gain.to_json() if r.gain else None}
                for r in self.rungs
            ],
        }


@dataclass(frozen=True)
class RoundCost:
    """What a round of speculation costs on one workload, over the prompts that both arms measured.

    `cost` = accept length ÷ gain: the time of a round ÷ the time of a plain step. `spread` as in
    `Arm`, of the worse of the two arms.
    """

    workload: str
    accept_length: Interval
    gain: Interval
    prompts: int
    spread: float | None = None

    @property
    def cost(self) -> float:
        return self.accept_length.value / self.gain.value


def unsteady(spreads: Iterable[float | None]) -> str | None:
    """One sentence when repeats of a prompt differ by more than STEADY; None otherwise."""
    worst = max((s for s in spreads if s is not None), default=1.0)
    if worst <= STEADY:
        return None
    return (
        f"Machine not steady: repeats of one prompt differ by ×{worst:.1f}; "
        "read no gain from this run."
    )


def summarise(rows: Iterable[Mapping[str, Any]], *, seed: int = 0) -> list[Arm]:
    """One summary for each (arm, workload), and one over all workloads of an arm that has several.

    The order is that of the rows. UsageError when one arm's name stands for two launches.
    """
    grouped: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        grouped.setdefault(row["arm"], {}).setdefault(row["workload"], []).append(row)
    out: list[Arm] = []
    for arm, by_workload in grouped.items():
        everything = [r for group in by_workload.values() for r in group]
        _one_launch(arm, everything)
        for workload, group in by_workload.items():
            out.append(_arm(arm, workload, group, seed))
        if len(by_workload) > 1:
            out.append(_arm(arm, ALL, everything, seed))
    return out


def ladder(
    rows: Iterable[Mapping[str, Any]],
    baseline: str = "baseline",
    *,
    workload: str | None = None,
    seed: int = 0,
) -> Ladder:
    """Each arm's decode rate and its gain over `baseline`, over one workload or over all.

    Only prompts that every arm answered are used, so that all arms answer for the same work.
    UsageError, saying in what they differ, when rows of the arms are not comparable: another
    machine, model, sampling, prompt or regime; or when no common prompt is left.
    """
    rows = [r for r in rows if workload is None or r["workload"] == workload]
    if not rows:
        raise UsageError(f"There are no rows{f' of {workload}' if workload else ''} to compare.")
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    if baseline not in arms:
        raise UsageError(
            f"The baseline {baseline!r} was not measured; there are {', '.join(arms)}."
        )
    for arm, group in arms.items():
        _one_launch(arm, group)
        _comparable(baseline, arms[baseline], arm, group)
    good = {arm: units(group) for arm, group in arms.items()}
    common = [u for u in good[baseline] if all(u in theirs for theirs in good.values())]
    if not common:
        unrated = sum(_unrated(group) for group in arms.values())
        raise UsageError(
            "No prompt was answered completely by every arm"
            + (f" with a decode rate ({unrated} answers have none)" if unrated else "")
            + ", so nothing can be compared."
        )
    base, every = good[baseline], set(common)
    rungs = []
    for arm, group in arms.items():
        kept = [r for r in group if (r["workload"], r["prompt"]) in every]
        gain = None
        if arm != baseline:
            gain = _gain(good[arm], base, common, seed)
        names = {r["workload"] for r in kept}
        label = workload or (names.pop() if len(names) == 1 else ALL)
        # Rows that cost a prompt its place are told as well.
        rungs.append(Gain(replace(_arm(arm, label, kept, seed), unrated=_unrated(group)), gain))
    steady = unsteady(r.summary.spread for r in rungs) is None
    rungs = [replace(r, steady=steady) for r in rungs]
    return Ladder(baseline, rungs[0].summary.workload, tuple(rungs))


def round_costs(
    rows: Iterable[Mapping[str, Any]],
    plain: str = "fp8-head",
    spec: str = "nextn",
    *,
    seed: int = 0,
) -> list[RoundCost]:
    """What a round costs, for each workload of which both arms measured the same prompts.

    Paired: accept length and gain are those of the common prompts. There is no line over all
    workloads, since the arms may have measured different ones. UsageError as in `ladder`.
    """
    grouped: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["arm"] in (plain, spec):
            grouped.setdefault(row["workload"], {}).setdefault(row["arm"], []).append(row)
    out = []
    for workload, arms in grouped.items():
        if len(arms) < 2:
            continue
        for arm, group in arms.items():
            _one_launch(arm, group)
            _comparable(plain, arms[plain], arm, group)
        base, mine = units(arms[plain]), units(arms[spec])
        common = [u for u in mine if u in base]
        every = set(common)
        both = [
            [r for r in arms[arm] if _rated(r) and (r["workload"], r["prompt"]) in every]
            for arm in (plain, spec)
        ]
        length = accept_interval(both[1], seed=seed)
        if not common or length is None:
            continue
        spread = max((s for s in map(_spread, both) if s is not None), default=None)
        gain = _gain(mine, base, common, seed)
        out.append(RoundCost(workload, length, gain, len(common), spread))
    return out


# -- pieces --------------------------------------------------------------------------------------


def _rated(row: Mapping[str, Any]) -> bool:
    """Whether a row has a decode rate. Rows written before bursts were told apart have one that
    means nothing."""
    seconds = row.get("decode_s") if row["complete"] else None
    return seconds is not None and not in_burst(row["decode_tokens"], seconds)


def _unrated(rows: Iterable[Mapping[str, Any]]) -> int:
    return sum(bool(r["complete"]) and not _rated(r) for r in rows)


def _spread(rows: Iterable[Mapping[str, Any]]) -> float | None:
    rates: dict[Any, list[float]] = {}
    for r in rows:
        if _rated(r):
            sampled = r["settings"]["sampling"].get("temperature")
            text = r.get("output_hash") if sampled else None
            key = (r["workload"], r["prompt"], text)
            rates.setdefault(key, []).append(r["decode_tokens"] / r["decode_s"])
    return max((max(x) / min(x) for x in rates.values() if len(x) > 1), default=None)


def _gain(
    mine: Mapping[Unit, tuple[float, float]],
    base: Mapping[Unit, tuple[float, float]],
    common: Sequence[Unit],
    seed: int,
) -> Interval:
    return bootstrap_gain(
        [mine[u][0] for u in common],
        [mine[u][1] for u in common],
        [base[u][0] for u in common],
        [base[u][1] for u in common],
        seed=seed,
    )


def units(rows: Iterable[Mapping[str, Any]]) -> dict[Unit, tuple[float, float]]:
    """(tokens, seconds) per prompt: means over its complete repeats that have a decode stretch, so
    that a prompt weighs the same in every arm however often it was repeated."""
    sums: dict[Unit, list[float]] = {}
    for r in rows:
        if not _rated(r):
            continue
        entry = sums.setdefault((r["workload"], r["prompt"]), [0.0, 0.0, 0.0])
        entry[0] += r["decode_tokens"]
        entry[1] += r["decode_s"]
        entry[2] += 1
    return {unit: (tokens / n, seconds / n) for unit, (tokens, seconds, n) in sums.items()}


def _arm(arm: str, workload: str, rows: Sequence[Mapping[str, Any]], seed: int) -> Arm:
    good = [r for r in rows if r["complete"]]
    mine = units(good)
    rate = None
    if mine:
        tokens, seconds = zip(*mine.values(), strict=True)
        rate = bootstrap_ratio_of_sums(tokens, seconds, seed=seed)
    lengths = [r["completion_tokens"] for r in good if r["completion_tokens"] is not None]
    rated = [r for r in good if _rated(r)]
    peaks = [r["peak_rate"] for r in rated if r.get("peak_rate") is not None]
    sources = {r["spec"]["source"] for r in good if r.get("spec")}
    return Arm(
        arm=arm,
        arm_hash=rows[0]["arm_hash"] if rows else "",
        workload=workload,
        rows=len(rows),
        failed=len(rows) - len(good),
        prompts=len({(r["workload"], r["prompt"]) for r in rows}),
        decode_rate=rate,
        ttft_s=summary(r["ttft_s"] for r in good),
        tpot_s=summary(r["tpot_s"] for r in rated),
        e2e_s=summary(r["e2e_s"] for r in good),
        peak_rate=max(peaks) if peaks else None,
        accept_length=accept_interval(good, seed=seed),
        accept_source=", ".join(sorted(sources)) or None,
        completion_tokens=sum(lengths) / len(lengths) if lengths else None,
        cached_tokens=sum(r.get("cached_tokens") or 0 for r in good),
        deterministic=_deterministic(good),
        unrated=len(good) - len(rated),
        spread=_spread(rated),
    )


def _deterministic(rows: Iterable[Mapping[str, Any]]) -> bool | None:
    outputs: dict[Unit, list[str]] = {}
    for r in rows:
        if not r["settings"]["sampling"].get("temperature") and r.get("output_hash"):
            outputs.setdefault((r["workload"], r["prompt"]), []).append(r["output_hash"])
    repeated = [hashes for hashes in outputs.values() if len(hashes) > 1]
    return all(len(set(hashes)) == 1 for hashes in repeated) if repeated else None


def _one_launch(arm: str, rows: Iterable[Mapping[str, Any]]) -> None:
    hashes = list(dict.fromkeys(r["arm_hash"] for r in rows))
    if len(hashes) > 1:
        raise UsageError(
            f"The arm {arm!r} was measured under {len(hashes)} different launches "
            f"({', '.join(hashes)}); name them apart or use a new run."
        )


def _comparable(
    base: str, base_rows: Sequence[Mapping[str, Any]], arm: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse to compare what differs in more than the arm, and say in what."""
    for field, what in (
        ("machine_id", "machine"),
        ("model_id", "model"),
        ("regime", "regime"),
        ("recipe", "recipe"),
    ):
        mine, theirs = ({r.get(field) for r in group} for group in (base_rows, rows))
        if mine != theirs or len(mine) > 1:
            _refuse(base, arm, f"the {what}", mine | theirs)
    settings: dict[str, Mapping[str, Any]] = {}
    hashes: dict[Unit, str] = {}
    for r in (*base_rows, *rows):
        known = settings.setdefault(r["workload"], r["settings"])
        for key in known.keys() | r["settings"].keys():
            if known.get(key) != r["settings"].get(key):
                _refuse(
                    base, arm, f"{key} of {r['workload']}", [known.get(key), r["settings"].get(key)]
                )
        unit = (r["workload"], r["prompt"])
        if hashes.setdefault(unit, r["case_hash"]) != r["case_hash"]:
            _refuse(base, arm, f"the text of prompt {r['prompt']} of {r['workload']}", ())


def _refuse(base: str, arm: str, what: str, values: Iterable[Any]) -> None:
    seen = ", ".join(sorted(str(v) for v in values))
    who = (
        f"The rows of {arm!r} differ from one another"
        if arm == base
        else f"{base!r} and {arm!r} differ"
    )
    raise UsageError(f"{who} in {what}{f' ({seen})' if seen else ''}; they cannot be compared.")
