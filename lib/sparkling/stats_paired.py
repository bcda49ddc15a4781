"""Two arms on the same questions: what their four counts show, and what they cannot show.

Everything is about second minus first (optimized minus baseline), as a fraction; `points` are
percentage points.

**Which interval.** For n pairs with b right in the first only and c in the second only the
difference is d = (c - b) / n. From 25 discordant pairs on, the usual limit for McNemar's
approximation, the interval is Wald's for paired proportions, d ± z · sqrt(b + c - (b - c)² / n) / n
(J. L. Fleiss, Statistical Methods for Rates and Proportions, chapter on matched pairs). With the
published counts (1264, 14, 13, 28) that is -0.08 ± 0.77 points, hence the known sentence that only
a loss above about 0.85 points is excluded. With n = 1319 and 25 to 40 discordant pairs expected it
covers 94.7 to 95.1 % (`coverage`, enumerated in the tests). Below 25 pairs it fails (with none it
has no width at all), and so it does where fewer than 25 pairs are not discordant in the same
direction (1,100 of 1,100: no width either), so there the interval is T. Tango's score interval (Statistics in Medicine 17,
1998, 891-908). Tango's stands beside it always; for the published counts it reaches to 0.90 points,
and a verdict of non-inferiority needs both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparkling.errors import UsageError
from sparkling.stats import Interval, mcnemar_exact, normal_quantile, wilson

WALD_FROM = 25
POWER = 0.80
WALD = "Wald, paired proportions"
TANGO = "Tango's score, paired proportions"


@dataclass(frozen=True)
class Counts:
    """Pairs by who was right. UsageError for negative counts or none at all."""

    both: int
    first_only: int
    second_only: int
    neither: int

    def __post_init__(self) -> None:
        values = (self.both, self.first_only, self.second_only, self.neither)
        if min(values) < 0 or sum(values) < 1:
            raise UsageError(f"Counts of pairs must be 0 or more and not all 0, not {values}.")

    @property
    def n(self) -> int:
        return self.both + self.first_only + self.second_only + self.neither

    @property
    def discordant(self) -> int:
        return self.first_only + self.second_only

    @property
    def difference(self) -> float:
        return (self.second_only - self.first_only) / self.n


def wald(counts: Counts, *, level: float = 0.95) -> Interval:
    """Wald's interval of the paired difference, second minus first."""
    n, b, c = counts.n, counts.first_only, counts.second_only
    half = normal_quantile(0.5 + level / 2) * math.sqrt(max(0.0, b + c - (b - c) ** 2 / n)) / n
    d = counts.difference
    return Interval(d, max(-1.0, d - half), min(1.0, d + half), n, WALD, level)


def tango(counts: Counts, *, level: float = 0.95) -> Interval:
    """Tango's score interval of the paired difference, second minus first.

    The limits are the differences Δ at which (c - b - nΔ) / sqrt(n (2q + Δ (1 - Δ))) is ± z, where
    q is the most likely probability of "first only" given Δ (a root of a quadratic).
    """
    z = normal_quantile(0.5 + level / 2)
    d = counts.difference
    low = _root(lambda x: _score(counts, x) > z, -1.0, d)
    high = _root(lambda x: _score(counts, x) >= -z, d, 1.0)
    return Interval(d, low, high, counts.n, TANGO, level)


def _score(counts: Counts, delta: float) -> float:
    n, b, c = counts.n, counts.first_only, counts.second_only
    half = ((2 * n - c + b) * delta - b - c) / 2
    inner = max(0.0, half * half + 2 * n * b * delta * (1 - delta))
    q = (math.sqrt(inner) - half) / (2 * n)
    variance = n * (2 * q + delta * (1 - delta))
    gap = c - b - n * delta
    if variance <= 0.0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)


def _root(before: Any, low: float, high: float) -> float:
    """Where `before` turns from true to false between low and high, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if before(middle) else (low, middle)
    return (low + high) / 2


def difference(counts: Counts, *, level: float = 0.95) -> Interval:
    """The interval to state: Wald's where WALD_FROM pairs lie outside the commonest of the three
    outcomes (first only, second only, neither of these), else Tango's."""
    b, c = counts.first_only, counts.second_only
    rare = counts.n - max(b, c, counts.n - b - c)
    return (wald if rare >= WALD_FROM else tango)(counts, level=level)


# -- what n pairs can show -----------------------------------------------------------------------


def smallest_significant(discordant: int, *, alpha: float = 0.05) -> int | None:
    """The smallest net change (b - c) of `discordant` pairs that exact McNemar calls significant;
    None below six pairs, where not even all on one side are."""
    if mcnemar_exact(0, discordant) >= alpha:
        return None
    low, high = 0, discordant // 2  # p falls as the smaller count falls
    while low < high:
        middle = (low + high + 1) // 2
        if mcnemar_exact(middle, discordant - middle) < alpha:
            low = middle
        else:
            high = middle - 1
    return discordant - 2 * low


def detectable(n: int, share: float, *, alpha: float = 0.05, power: float = POWER) -> float | None:
    """The smallest true difference that McNemar's test on n pairs finds with this power.

    share: the share of pairs that are discordant. R. J. Connor (Biometrics 43, 1987, 207-211):
    n d² = (z_{1-α/2} sqrt(share) + z_power sqrt(share - d²))². None when no difference that is
    possible with so few discordant pairs (d <= share) is found so often.
    """
    za, zb = normal_quantile(1 - alpha / 2), normal_quantile(power)

    def missed(d: float) -> bool:
        need = za * math.sqrt(share) + zb * math.sqrt(max(0.0, share - d * d))
        return n * d * d < need * need

    if share <= 0.0 or missed(share):
        return None
    return _root(missed, 0.0, share)


def excludable(n: int, share: float, *, level: float = 0.95, power: float = POWER) -> float:
    """The smallest loss that n pairs exclude with this power when the arms are equal:
    (z_{(1+level)/2} + z_power) sqrt(share / n). Not below what n pairs without any discordant one
    exclude, z² / (n + z²) (Tango's limit for b = c = 0)."""
    z = normal_quantile(0.5 + level / 2)
    floor = z * z / (n + z * z)
    return max(floor, (z + normal_quantile(power)) * math.sqrt(share / n))


# -- the verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Of non-inferiority against `margin` (a fraction): "non-inferior" when the lower limits of
    Wald's (where it holds) and of Tango's interval lie above -margin; "inferior" when the upper
    limit lies below it; else "not shown"."""

    state: str
    margin: float
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "margin_points": 100 * self.margin, "text": self.text}


@dataclass(frozen=True)
class Paired:
    """Everything that the four counts say."""

    counts: Counts
    first: Interval
    second: Interval
    p: float
    difference: Interval
    score: Interval
    smallest_significant: int | None
    detectable: float | None
    excludable: float
    verdict: Verdict | None = None

    @property
    def excluded_loss(self) -> float:
        """A larger loss than this is excluded; 0 when every loss is."""
        assert self.difference.low is not None
        return max(0.0, -self.difference.low)

    def sentence(self) -> str:
        """What a reader may take away, in one sentence."""
        low, high = self.difference.low, self.difference.high
        assert low is not None and high is not None
        reach = (
            "no loss is excluded"
            if self.excluded_loss >= 1
            else f"only a loss above about {100 * self.excluded_loss:.2f} points is excluded"
        )
        if self.p >= 1 - self.difference.level:
            if low > 0 or high < 0:  # approximate intervals end a little sooner than the exact test
                return (
                    f"No difference is shown: the interval does not hold 0, but the exact test has "
                    f"p = {p_text(self.p)}."
                )
            return f"No difference is shown, and that is not equality: {reach}."
        if low > 0:
            return f"The second is better, by at least {100 * low:.2f} points."
        if high < 0:
            return f"The second is worse, by at least {-100 * high:.2f} points; {reach}."
        return f"The exact test has p = {p_text(self.p)}, but the interval holds 0: {reach}."

    def text(self, first: str = "first", second: str = "second") -> str:
        """The table, the test, the interval and what n could have shown, for a terminal."""
        c = self.counts
        lines = [
            f"both right {c.both}, {first} only {c.first_only}, {second} only {c.second_only}, "
            f"neither {c.neither}; n = {c.n} pairs",
            f"accuracy: {first} {percent(self.first)}, {second} {percent(self.second)} "
            f"({self.first.method}, {100 * self.first.level:g} %)",
            f"McNemar, exact, two-sided: p = {p_text(self.p)} ({c.discordant} discordant pair{_s(c.discordant)})",
            f"difference, {second} minus {first}: {points(self.difference)} "
            f"({self.difference.method}, {100 * self.difference.level:g} %)",
        ]
        if self.difference.method != self.score.method:
            lines.append(f"the same by {self.score.method}: {points(self.score)}")
        lines += [self.sentence(), *self.limits()]
        if self.verdict:
            lines.append(self.verdict.text)
        return "\n".join(lines)

    def limits(self) -> list[str]:
        """What n pairs like these could have shown or excluded."""
        c, need = self.counts, self.smallest_significant
        out = [
            f"With {c.discordant} discordant pair{_s(c.discordant)} a net change of {need} "
            f"({100 * need / c.n:.2f} points) is the smallest with p < 0.05."
            if need is not None
            else f"With {c.discordant} discordant pair{_s(c.discordant)} no net change has p < 0.05."
        ]
        if self.detectable is not None:
            out.append(
                f"A true loss of {100 * self.detectable:.2f} points is the smallest that n = {c.n} "
                f"with so many discordant pairs shows in {100 * POWER:.0f} % of all runs."
            )
        out.append(
            f"Were both arms equal, {100 * POWER:.0f} % of such runs would exclude a loss above "
            f"{100 * self.excludable:.2f} points."
            if self.excludable < 1
            else f"So few pairs exclude no loss in {100 * POWER:.0f} % of all runs, even of equal arms."
        )
        return out

    def to_json(self) -> dict[str, Any]:
        c = self.counts
        return {
            "counts": dict(c.__dict__),
            "n": c.n,
            "discordant": c.discordant,
            "p_value": self.p,
            "test": "McNemar, exact, two-sided",
            "accuracy": {"first": self.first.to_json(), "second": self.second.to_json()},
            "difference_points": _in_points(self.difference),
            "difference_points_score": _in_points(self.score),
            "excluded_loss_points": 100 * self.excluded_loss,
            "smallest_significant_net": self.smallest_significant,
            "detectable_loss_points": None if self.detectable is None else 100 * self.detectable,
            "excludable_loss_points": 100 * self.excludable if self.excludable < 1 else None,
            "power": POWER,
            "sentence": self.sentence(),
            "non_inferiority": self.verdict.to_json() if self.verdict else None,
        }


def paired(counts: Counts, *, margin: float | None = None, level: float = 0.95) -> Paired:
    """The whole comparison; `margin` (a fraction, 0.01 = one point) asks for a verdict of
    non-inferiority. UsageError for a margin that is not between 0 and 1."""
    stated, score = difference(counts, level=level), tango(counts, level=level)
    share = counts.discordant / counts.n
    return Paired(
        counts=counts,
        first=wilson(counts.both + counts.first_only, counts.n, level=level),
        second=wilson(counts.both + counts.second_only, counts.n, level=level),
        p=mcnemar_exact(counts.first_only, counts.second_only),
        difference=stated,
        score=score,
        smallest_significant=smallest_significant(counts.discordant),
        detectable=detectable(counts.n, share),
        excludable=excludable(counts.n, share, level=level),
        verdict=None if margin is None else non_inferiority(stated, score, margin),
    )


def non_inferiority(stated: Interval, score: Interval, margin: float) -> Verdict:
    """The verdict from the stated interval and Tango's; see `Verdict`."""
    if not 0.0 < margin < 1.0:
        raise UsageError(
            f"A margin is a loss of more than 0 and less than 100 points, not {100 * margin:g}."
        )
    lows = [i.low for i in (stated, score) if i.low is not None]
    highs = [i.high for i in (stated, score) if i.high is not None]
    reach = max(0.0, -min(lows))
    said = f"a margin of {100 * margin:.2f} points"
    if min(lows) > -margin:
        state = "non-inferior"
        text = f"Non-inferior at {said}: the interval reaches to a loss of {100 * reach:.2f}."
    elif max(highs) < -margin:
        state = "inferior"
        text = f"Inferior at {said}: the loss is at least {-100 * max(highs):.2f} points."
    else:
        state = "not shown"
        text = f"Non-inferiority at {said} is not shown: a loss of up to {100 * reach:.2f} points is possible."
    return Verdict(state, margin, text)


def _s(count: int) -> str:
    return "" if count == 1 else "s"


# -- text ----------------------------------------------------------------------------------------


def p_text(p: float) -> str:
    """A p-value as people write it: 1.0, 0.0215, 3.1e-07, below 1e-300."""
    if p < 1e-300:
        return "0 (below 1e-300)"
    return "1.0" if p > 0.99995 else f"{p:.4f}" if p >= 1e-3 else f"{p:.1e}"


def percent(interval: Interval) -> str:
    """`96.89 % [95.82, 97.70]`."""
    assert interval.low is not None and interval.high is not None
    span = f"[{100 * interval.low:.2f}, {100 * interval.high:.2f}]"
    return f"{100 * interval.value:.2f} % {span}"


def points(interval: Interval) -> str:
    """`-0.08 points [-0.85, +0.70]`."""
    assert interval.low is not None and interval.high is not None
    span = f"[{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]"
    return f"{100 * interval.value:+.2f} points {span}"


def _in_points(interval: Interval) -> dict[str, Any]:
    out = interval.to_json()
    for key in ("value", "low", "high"):
        out[key] = 100 * out[key]
    return out
