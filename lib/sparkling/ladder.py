"""Rows of a benchmark into summaries per arm, and into the gain of each arm over the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkling.errors import UsageError
from sparkling.metrics import Summary, accept_interval, summary
from sparkling.stats import Interval, bootstrap_gain, bootstrap_ratio_of_sums

ALL = "all"
Unit = tuple[str, str]  # (workload, prompt): what the bootstrap resamples

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

    def to_json(self) -> dict[str, Any]:
        out = dict(self.__dict__)
        for key in ("decode_rate", "accept_length", "ttft_s", "tpot_s", "e2e_s"):
            out[key] = out[key].to_json() if out[key] is not None else None
        return out


@dataclass(frozen=True)
class Gain:
    """A rung: an arm and, unless it is the baseline, how many times faster it is."""

    summary: Arm
    gain: Interval | None

    @property
    def arm(self) -> str:
        return self.summary.arm

    @property
    def faster(self) -> bool | None:
        """True or False when the interval lies on one side of 1; None when it cannot be told."""
        if self.gain is None or not self.gain.excludes(1.0):
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

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "workload": self.workload,
            "definition": self.definition,
            "rungs": [
                {**r.summary.to_json(), "gain": r.gain.to_json() if r.gain else None}
                for r in self.rungs
            ],
        }


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
    good = {arm: _units(group) for arm, group in arms.items()}
    common = [u for u in good[baseline] if all(u in units for units in good.values())]
    if not common:
        raise UsageError(
            "No prompt was answered completely by every arm, so nothing can be compared."
        )
    base = good[baseline]
    rungs = []
    for arm, group in arms.items():
        kept = [r for r in group if (r["workload"], r["prompt"]) in common]
        gain = None
        if arm != baseline:
            mine = good[arm]
            gain = bootstrap_gain(
                [mine[u][0] for u in common],
                [mine[u][1] for u in common],
                [base[u][0] for u in common],
                [base[u][1] for u in common],
                seed=seed,
            )
        names = {r["workload"] for r in kept}
        label = workload or (names.pop() if len(names) == 1 else ALL)
        rungs.append(Gain(_arm(arm, label, kept, seed), gain))
    return Ladder(baseline, rungs[0].summary.workload, tuple(rungs))


# -- pieces --------------------------------------------------------------------------------------


def _units(rows: Iterable[Mapping[str, Any]]) -> dict[Unit, tuple[float, float]]:
    """(tokens, seconds) per prompt: means over its complete repeats that have a decode stretch, so
    that a prompt weighs the same in every arm however often it was repeated."""
    sums: dict[Unit, list[float]] = {}
    for r in rows:
        if not r["complete"] or r.get("decode_s") is None:
            continue
        entry = sums.setdefault((r["workload"], r["prompt"]), [0.0, 0.0, 0.0])
        entry[0] += r["decode_tokens"]
        entry[1] += r["decode_s"]
        entry[2] += 1
    return {unit: (tokens / n, seconds / n) for unit, (tokens, seconds, n) in sums.items()}


def _arm(arm: str, workload: str, rows: Sequence[Mapping[str, Any]], seed: int) -> Arm:
    good = [r for r in rows if r["complete"]]
    units = _units(good)
    rate = None
    if units:
        tokens, seconds = zip(*units.values(), strict=True)
        rate = bootstrap_ratio_of_sums(tokens, seconds, seed=seed)
    lengths = [r["completion_tokens"] for r in good if r["completion_tokens"] is not None]
    peaks = [r["peak_rate"] for r in good if r.get("peak_rate") is not None]
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
        tpot_s=summary(r["tpot_s"] for r in good),
        e2e_s=summary(r["e2e_s"] for r in good),
        peak_rate=max(peaks) if peaks else None,
        accept_length=accept_interval(good, seed=seed),
        accept_source=", ".join(sorted(sources)) or None,
        completion_tokens=sum(lengths) / len(lengths) if lengths else None,
        cached_tokens=sum(r.get("cached_tokens") or 0 for r in good),
        deterministic=_deterministic(good),
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
