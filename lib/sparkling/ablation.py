"""What each switch does alone and together with the others: the full factorial of the switches.

Let L be the logarithm of an arm's decode rate, pooled over the prompts that all arms answered, and
x the switches, +1 on and -1 off. For a set E of m of the k switches the contrast is

    C(E) = 2^m / 2^k · Σ over all 2^k arms of ( Π over E of x ) · L

One switch: the mean of L with it on minus the mean with it off, so exp(C) is the factor by which the
switch changes the rate, on (geometric) average over the settings of the others. Two switches: the
effect of one with the other on, minus its effect with the other off, so exp(C) is what the gain of
both together is to the product of their separate gains: 1 means they do not touch each other. Three:
how much that factor depends on the third. The C are the coefficients of least squares on L with
every x coded ±1/2 (the tests compare them with that).

Intervals are paired bootstraps over prompts: a drawn prompt brings its measurements under every arm.
They say nothing of what differs from start to start; the values of each round stand beside them, and
an effect is called clear only if its interval excludes 1, every round lies on the same side, and the
machine was steady.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkling.errors import UsageError
from sparkling.ladder import Gain, Ladder, Unit, ladder, units
from sparkling.stats import Interval, bootstrap

DEFINITION = (
    "effect = factor on the decode rate, on geometric average over the settings of the other "
    "switches; of two switches: gain of both together / product of their gains; 95 % paired "
    "bootstrap interval over prompts"
)


def combinations(switches: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of switches, the empty one first, in the order of binary counting."""
    return [
        tuple(s for s, on in zip(switches, reversed(bits), strict=True) if on)
        for bits in itertools.product((False, True), repeat=len(switches))
    ]


def arm_name(baseline: str, switches: Iterable[str]) -> str:
    """The arm with these switches on, as `Recipe.combination` calls it."""
    return "+".join((baseline, *switches))


@dataclass(frozen=True)
class Effect:
    """A main effect (one switch) or an interaction (several), as a factor on the decode rate.
    `by_round`: the same from each round's rows alone. `steady`: whether the repeats of every prompt
    agree well enough to read anything (see `ladder.unsteady`)."""

    switches: tuple[str, ...]
    ratio: Interval
    by_round: tuple[float, ...]
    steady: bool = True

    @property
    def name(self) -> str:
        return " × ".join(self.switches)

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 1 and every round lies on the same side of 1; never on a
        machine that was not steady."""
        same = {v > 1.0 for v in (self.ratio.value, *self.by_round)}
        return self.steady and self.ratio.excludes(1.0) and len(same) == 1

    def to_json(self) -> dict[str, Any]:
        return {
            "switches": list(self.switches),
            "ratio": self.ratio.to_json(),
            "by_round": list(self.by_round),
            "clear": self.clear,
        }


@dataclass(frozen=True)
class Ablation:
    """The arms with their gains over the baseline, and the effects. `pace`: the geometric mean rate
    of all arms in each round, relative to the first round: what drifted."""

    switches: tuple[str, ...]
    ladder: Ladder
    effects: tuple[Effect, ...]
    pace: tuple[float, ...]
    definition: str = DEFINITION

    def __getitem__(self, switches: str | tuple[str, ...]) -> Effect:
        wanted = {switches} if isinstance(switches, str) else set(switches)
        for effect in self.effects:
            if set(effect.switches) == wanted:
                return effect
        raise UsageError(f"No effect of {' × '.join(sorted(wanted))} was measured.")

    def arm(self, *switches: str) -> Gain:
        """The arm with just these switches on, and its gain."""
        ordered = [s for s in self.switches if s in switches]
        return self.ladder[arm_name(self.ladder.baseline, ordered)]

    def to_json(self) -> dict[str, Any]:
        return {
            "switches": list(self.switches),
            "definition": self.definition,
            "pace": list(self.pace),
            "effects": [e.to_json() for e in self.effects],
            "ladder": self.ladder.to_json(),
        }


def ablation(
    rows: Iterable[Mapping[str, Any]],
    switches: Sequence[str],
    *,
    baseline: str = "baseline",
    workload: str | None = None,
    seed: int = 0,
) -> Ablation:
    """Arms, gains and effects from the rows of all 2^k combinations, over one workload or over all.

    Raises UsageError when an arm is missing, and as `ladder.ladder` does when arms differ in more
    than their switches.
    """
    switches = tuple(switches)
    names = [arm_name(baseline, c) for c in combinations(switches)]
    chosen = [r for r in rows if r["arm"] in names]
    missing = [n for n in names if n not in {r["arm"] for r in chosen}]
    if missing:
        raise UsageError(
            f"{len(missing)} of the {len(names)} arms of this ablation "
            f"{'was' if len(missing) == 1 else 'were'} not measured: {', '.join(missing)}."
        )
    place = {name: i for i, name in enumerate(names)}
    chosen.sort(key=lambda r: place[r["arm"]])
    _one_difference(chosen, switches, baseline)
    rungs = ladder(chosen, baseline, workload=workload, seed=seed)
    chosen = [r for r in chosen if workload is None or r["workload"] == workload]
    table = _table(chosen, names)
    rounds = sorted({r.get("round", 0) for r in chosen})
    by_round = [_table([r for r in chosen if r.get("round", 0) == k], names) for k in rounds]
    by_round = [t for t in by_round if t is not None]
    assert table is not None, "ladder has refused rows without a common prompt"
    effects = []
    for of, weights in _weights(switches).items():
        ratio = bootstrap(_statistic(table, weights), table.shape[2], seed=seed)
        parts = tuple(float(_statistic(t, weights)(np.ones(t.shape[2]))) for t in by_round)
        effects.append(Effect(of, ratio, parts, steady=rungs.warning is None))
    return Ablation(switches, rungs, tuple(effects), _pace(by_round))


def gains_by_round(
    rows: Sequence[Mapping[str, Any]], baseline: str, *, workload: str | None = None
) -> dict[str, tuple[float, ...]]:
    """Each arm's gain over the baseline from the rows of every round alone, over the prompts that
    all arms answered in it: what the interval over prompts does not see, the differences from start
    to start. A round that lacks an arm is left out."""
    rows = [r for r in rows if workload in (None, r["workload"])]
    names = list(dict.fromkeys(r["arm"] for r in rows))
    out: dict[str, list[float]] = {n: [] for n in names if n != baseline}
    if baseline not in names:
        return {}
    at = names.index(baseline)
    for number in sorted({r.get("round", 0) for r in rows}):
        table = _table([r for r in rows if r.get("round", 0) == number], names)
        if table is None:
            continue
        rates = table[0].sum(axis=1) / table[1].sum(axis=1)
        for i, name in enumerate(names):
            if name != baseline:
                out[name].append(float(rates[i] / rates[at]))
    return {name: tuple(values) for name, values in out.items()}


def contrasts(logs: Sequence[float], switches: Sequence[str]) -> dict[tuple[str, ...], float]:
    """C(E) of every non-empty set E, from one logarithm an arm in the order of `combinations`."""
    return {of: float(w @ np.asarray(logs)) for of, w in _weights(switches).items()}


def _weights(switches: Sequence[str]) -> dict[tuple[str, ...], np.ndarray]:
    """2^(m-k) Π x for every non-empty set of switches: one weight an arm."""
    arms = combinations(switches)
    signs = np.array([[1.0 if s in on else -1.0 for s in switches] for on in arms])
    return {
        tuple(switches[i] for i in of): 2.0 ** (size - len(switches)) * signs[:, of].prod(axis=1)
        for size in range(1, len(switches) + 1)
        for of in itertools.combinations(range(len(switches)), size)
    }


def _statistic(table: np.ndarray, weights: np.ndarray) -> Any:
    """exp(Σ weights · L) as a function of how often each prompt was drawn."""
    tokens, seconds = table  # (arms, prompts) each

    def value(drawn: np.ndarray) -> Any:
        logs = np.log(drawn @ tokens.T) - np.log(drawn @ seconds.T)
        return np.exp(logs @ weights)

    return value


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> np.ndarray | None:
    """(2, arms, prompts): tokens and seconds of the prompts that every arm has; None without one."""
    by_arm: dict[str, dict[Unit, tuple[float, float]]] = {
        name: units(r for r in rows if r["arm"] == name) for name in names
    }
    common = sorted(set.intersection(*(set(theirs) for theirs in by_arm.values())))
    if not common:
        return None
    return np.array([[[by_arm[n][u][i] for u in common] for n in names] for i in range(2)])


def _pace(by_round: Sequence[np.ndarray]) -> tuple[float, ...]:
    means = [float(np.mean(np.log(t[0].sum(1)) - np.log(t[1].sum(1)))) for t in by_round]
    return tuple(math.exp(m - means[0]) for m in means)


def _one_difference(rows: Sequence[Mapping[str, Any]], switches: Sequence[str], base: str) -> None:
    """Refuse arms whose rows say that other switches were on than their names say."""
    for row in rows:
        told = row.get("switches")
        if told is None:
            continue
        on = tuple(s for s in switches if told.get(s))
        extra = [s for s, yes in told.items() if yes and s not in switches]
        if arm_name(base, on) != row["arm"] or extra:
            raise UsageError(
                f"The rows of {row['arm']!r} were measured with {', '.join([*on, *extra]) or 'no'} "
                "switched on, so they are another arm's."
            )
