"""Intervals and tests, small enough to read. No scipy.

Every interval is at 95 % unless `level` says otherwise and carries its n and its method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sparkling.errors import UsageError

RESAMPLES = 10_000
MANY_UNITS = 500  # from here on the number of resamples falls, see `_replicates`
MOST_PAIRS = 10**9
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval. `low` and `high` are None when n is too small to say (fewer
    than MIN_UNITS for a bootstrap)."""

    value: float
    low: float | None
    high: float | None
    n: int
    method: str
    level: float = 0.95

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and does not contain `value`."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= value <= self.high

    def text(self, digits: int = 2, unit: str = "") -> str:
        """`1.42 [1.38, 1.47] (n=12)`; an unknown interval is said to be unknown."""
        unit = f" {unit}" if unit else ""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}{unit} [interval unknown] (n={self.n})"
        span = f"[{self.low:.{digits}f}, {self.high:.{digits}f}]"
        return f"{self.value:.{digits}f}{unit} {span} (n={self.n})"

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "method": self.method,
            "level": self.level,
        }


# -- proportions ---------------------------------------------------------------------------------


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (E. B. Wilson, 1927). UsageError if 0 ≤ k ≤ n fails."""
    if n < 1 or not 0 <= successes <= n:
        raise UsageError(
            f"A proportion needs 0 <= successes <= n and n >= 1, not {successes} of {n}."
        )
    z = normal_quantile(0.5 + level / 2)
    p, zz = successes / n, z * z
    centre = (p + zz / (2 * n)) / (1 + zz / n)
    half = z * math.sqrt(p * (1 - p) / n + zz / (4 * n * n)) / (1 + zz / n)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(p, low, high, n, "Wilson", level)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar p-value from the two discordant counts.

    Twice the smaller tail of Binomial(only_a + only_b, 1/2), capped at 1. The tail is summed from its
    largest term down, relative to it, so that no count overflows and a billion pairs take no longer
    than they must. No discordant pair: p = 1. UsageError for counts below 0 or above a billion.
    """
    if not (0 <= only_a <= MOST_PAIRS and 0 <= only_b <= MOST_PAIRS):
        raise UsageError(
            f"Counts of discordant pairs lie between 0 and {MOST_PAIRS:,}, not {only_a}, {only_b}: they "
            "cannot be negative, and more cannot be summed exactly."
        )
    n, k = only_a + only_b, min(only_a, only_b)
    if 2 * k >= n - 1:  # the two tails meet (or overlap): everything is as extreme as this
        return 1.0
    log_top = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
    total = term = 1.0
    for i in range(k, 0, -1):
        term *= i / (n - i + 1)
        total += term
        if term < total * 1e-17:
            break
    return min(1.0, 2.0 * math.exp(log_top) * total)


@dataclass(frozen=True)
class Pairs:
    """Two result sets joined by id, in sorted order of the ids."""

    ids: tuple[Any, ...]
    a: tuple[Any, ...]
    b: tuple[Any, ...]
    note: str  # "" or which ids are in one set only

    @property
    def discordant(self) -> tuple[int, int]:
        """(true in a only, true in b only)."""
        only_a = sum(1 for x, y in zip(self.a, self.b, strict=True) if x and not y)
        only_b = sum(1 for x, y in zip(self.a, self.b, strict=True) if y and not x)
        return only_a, only_b


def pair(
    a: Mapping[K, Any] | Iterable[tuple[K, Any]], b: Mapping[K, Any] | Iterable[tuple[K, Any]]
) -> Pairs:
    """Join two sets of (id, value) by id, never by position.

    Ids that only one side has are left out and counted in `note`. UsageError when an id stands
    twice on one side, or when no id is common.
    """
    left, right = _unique(a, "first"), _unique(b, "second")
    ids = sorted(left.keys() & right.keys(), key=lambda i: (str(type(i)), i))
    if not ids:
        raise UsageError("The two result sets have no id in common, so they cannot be paired.")
    missing = [
        f"{len(extra)} only in the {name} set"
        for name, extra in (
            ("first", left.keys() - right.keys()),
            ("second", right.keys() - left.keys()),
        )
        if extra
    ]
    note = f"{len(ids)} ids paired; left out: {', '.join(missing)}" if missing else ""
    return Pairs(tuple(ids), tuple(left[i] for i in ids), tuple(right[i] for i in ids), note)


def _unique(items: Any, which: str) -> dict[Any, Any]:
    if isinstance(items, Mapping):
        return dict(items)
    out: dict[Any, Any] = {}
    for key, value in items:
        if key in out:
            raise UsageError(f"The id {key!r} stands twice in the {which} result set.")
        out[key] = value
    return out


# -- bootstrap -----------------------------------------------------------------------------------
#
# Percentile bootstrap over units (prompts or requests), with the tails widened for small n after
# T. Hesterberg, "What Teachers Should Know About the Bootstrap" (2015), section 3.2: the normal
# tail probability of z is replaced by that of t_{n-1} * sqrt(n / (n-1)). Without it, five prompts
# would give "95 %" intervals that cover about 80 % of the time. No interval is given for fewer than
# four units: it could not reach beyond the smallest and the largest, and three values lie on both
# sides of their mean in at most 75 % of all cases.

MIN_UNITS = 4
METHOD = "percentile bootstrap over units, tails widened for small n"


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, level: float = 0.95) -> Interval:
    """Mean of independent values."""
    x = _column(values, "values")
    return _bootstrap(lambda w: w @ x / len(x), len(x), seed, level)


def bootstrap_ratio_of_sums(
    top: Sequence[float], bottom: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> Interval:
    """Σ top / Σ bottom, the two resampled together, unit by unit: accept length (tokens, rounds),
    pooled decode rate (tokens, seconds)."""
    x, y = _column(top, "top"), _column(bottom, "bottom")
    _same_length(x, y)
    return _bootstrap(lambda w: (w @ x) / (w @ y), len(x), seed, level)


def bootstrap_ratio(
    a: Sequence[float],
    b: Sequence[float],
    *,
    paired: bool = True,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """mean(a) / mean(b). `paired`: a[i] and b[i] belong together (the same prompt) and are
    resampled together, which takes the differences between prompts out of the interval."""
    x, y = _column(a, "a"), _column(b, "b")
    if paired:
        return bootstrap_ratio_of_sums(a, b, seed=seed, level=level)
    rng = np.random.default_rng(seed)
    # Two independent samples; the widening follows the smaller one.
    rows_a, rows_b = (_replicates(lambda w, z=z: w @ z / len(z), len(z), rng) for z in (x, y))
    value = float(x.mean() / y.mean())
    size = min(len(rows_a), len(rows_b))
    return _interval(rows_a[:size] / rows_b[:size], value, min(len(x), len(y)), level)


def bootstrap_gain(
    tokens_a: Sequence[float],
    seconds_a: Sequence[float],
    tokens_b: Sequence[float],
    seconds_b: Sequence[float],
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """(Σ tokens_a / Σ seconds_a) / (Σ tokens_b / Σ seconds_b), units paired by position: how many
    times faster arm a is than arm b over the same prompts."""
    return bootstrap_gains([(tokens_a, seconds_a, tokens_b, seconds_b)], seed=seed, level=level)[0]


def bootstrap_gains(
    cases: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]],
    *,
    seed: int = 0,
    level: float = 0.95,
) -> list[Interval]:
    """`bootstrap_gain` of several quantities of the same units, from the same resamples."""
    columns = [[_column(c, "column") for c in case] for case in cases]
    for column in (c for case in columns for c in case):
        _same_length(columns[0][0], column)

    def gains(w: np.ndarray) -> np.ndarray:
        made = [(w @ ta) * (w @ sb) / ((w @ sa) * (w @ tb)) for ta, sa, tb, sb in columns]
        return np.stack(made, axis=-1)

    n = len(columns[0][0])
    values = [float(v) for v in gains(np.ones(n))]
    if n < MIN_UNITS:
        return [Interval(v, None, None, n, METHOD, level) for v in values]
    drawn = _replicates(gains, n, np.random.default_rng(seed))
    return [_interval(drawn[:, i], v, n, level) for i, v in enumerate(values)]


def bootstrap_quantile_ratio(
    a: Sequence[float],
    b: Sequence[float],
    q: float,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """quantile(a, q) / quantile(b, q), a[i] and b[i] paired: how a median or a tail latency changed.
    Quantiles interpolate linearly between order statistics. No interval where fewer than four values
    lie beyond the quantile: a resample could not reach past the largest."""
    x, y = _column(a, "a"), _column(b, "b")
    _same_length(x, y)
    n = len(x)
    value = float(np.quantile(x, q) / np.quantile(y, q))
    if n * min(q, 1 - q) < MIN_UNITS and q != 0.5:
        return Interval(value, None, None, n, METHOD, level)
    rng = np.random.default_rng(seed)
    count = max(RESAMPLES // 25, RESAMPLES // 5 * 1000 // max(n, 1000))  # a quantile costs a sort
    step = max(1, 2_000_000 // n)  # indices held at once
    parts = []
    for start in range(0, count, step):
        picks = rng.integers(0, n, (min(step, count - start), n))
        parts.append(np.quantile(x[picks], q, axis=1) / np.quantile(y[picks], q, axis=1))
    return _interval(np.concatenate(parts), value, n, level)


def bootstrap(
    statistic: Callable[[np.ndarray], Any], n: int, *, seed: int = 0, level: float = 0.95
) -> Interval:
    """Any statistic of n units. `statistic` takes how often each unit was drawn, shape (n,) or
    (resamples, n), and returns a number or one a resample; units stay together, so whatever
    belongs to a unit is paired."""
    return _bootstrap(statistic, n, seed, level)


def _bootstrap(statistic: Callable[[np.ndarray], Any], n: int, seed: int, level: float) -> Interval:
    """`statistic` takes weights, one per unit (a vector, or a matrix with a resample a row)."""
    value = float(statistic(np.ones(n)))
    if n < MIN_UNITS:
        return Interval(value, None, None, n, METHOD, level)
    return _interval(_replicates(statistic, n, np.random.default_rng(seed)), value, n, level)


def _replicates(
    statistic: Callable[[np.ndarray], Any], n: int, rng: np.random.Generator
) -> np.ndarray:
    """The statistic of every resample, some rows at a time so that memory stays bounded.

    With many units fewer resamples are drawn, but at least a fifth of RESAMPLES: a limit then moves
    by about 1.5 % of the interval's width from seed to seed, and the work is linear in n.
    """
    count = RESAMPLES if n <= MANY_UNITS else max(RESAMPLES // 5, RESAMPLES * MANY_UNITS // n)
    step = max(1, 2_000_000 // n)
    parts = [
        np.asarray(statistic(_weights(rng, n, min(step, count - at))))
        for at in range(0, count, step)
    ]
    return np.concatenate(parts)


def _weights(rng: np.random.Generator, n: int, rows: int) -> np.ndarray:
    """How often each of n units is drawn, shape (rows, n)."""
    if n <= 200:
        return rng.multinomial(n, np.full(n, 1.0 / n), size=rows).astype(float)
    # The same distribution, and much faster where n is large.
    picks = rng.integers(0, n, (rows, n)) + np.arange(rows)[:, None] * n
    return np.bincount(picks.ravel(), minlength=rows * n).reshape(rows, n).astype(float)


def _interval(replicates: np.ndarray, value: float, n: int, level: float) -> Interval:
    if n < MIN_UNITS:
        return Interval(value, None, None, n, METHOD, level)
    tail = normal_cdf(-math.sqrt(n / (n - 1)) * t_quantile(0.5 + level / 2, n - 1))
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return Interval(value, float(low), float(high), n, METHOD, level)


def _column(values: Sequence[float], name: str) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or not len(x):
        raise UsageError(f"A bootstrap needs at least one value in {name}.")
    if not np.isfinite(x).all():
        raise UsageError(f"A bootstrap cannot use missing or infinite values ({name}).")
    return x


def _same_length(x: np.ndarray, y: np.ndarray) -> None:
    if len(x) != len(y):
        raise UsageError(f"Paired values must be as many on both sides, not {len(x)} and {len(y)}.")


# -- the whole distribution ---------------------------------------------------------------------


def ecdf(values: Iterable[float | None]) -> tuple[list[float], list[float]]:
    """The empirical distribution of the values that are known: each distinct value, ascending, and
    the share of values that are at most so large."""
    known = np.asarray([v for v in values if v is not None], dtype=float)
    if not len(known):
        return [], []
    at, counts = np.unique(known, return_counts=True)
    return at.tolist(), (np.cumsum(counts) / len(known)).tolist()


# -- distributions -------------------------------------------------------------------------------


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normal_quantile(p: float) -> float:
    return _invert(normal_cdf, p)


def t_cdf(x: float, df: int) -> float:
    """Student's t for whole degrees of freedom, by the finite series (Abramowitz and Stegun
    26.7.3 and 26.7.4)."""
    theta = math.atan(x / math.sqrt(df))
    cos2 = math.cos(theta) ** 2
    if df % 2:
        term = total = math.cos(theta) if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cos2 * (k - 1) / k
            total += term
        return 0.5 + (theta + math.sin(theta) * total) / math.pi
    term = total = 1.0
    for k in range(2, df - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    return 0.5 + math.sin(theta) * total / 2


def t_quantile(p: float, df: int) -> float:
    if df > 1000:
        return normal_quantile(p)
    return _invert(lambda x: t_cdf(x, df), p)


def _invert(cdf: Callable[[float], float], p: float) -> float:
    """The x with cdf(x) = p by bisection, to about 1e-12."""
    low, high = -1.0, 1.0
    while cdf(low) > p:
        low *= 2
    while cdf(high) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if cdf(middle) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2
