"""Every statistic against scipy's, which shares no code with ours."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as theirs
from sparkling import metrics, stats


@pytest.mark.parametrize(
    ("k", "n"), [(0, 10), (10, 10), (15, 20), (1278, 1319), (1, 3), (659, 1319)]
)
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_wilson(k, n, level):
    ours = stats.wilson(k, n, level=level)
    other = theirs.binomtest(k, n).proportion_ci(level, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((other.low, other.high), abs=1e-10)


@pytest.mark.parametrize("n", [1, 2, 7, 27, 40, 333, 1100, 20_001])
def test_mcnemar(n):
    for k in sorted({0, 1, n // 3, n // 2, max(0, n // 2 - 1), n}):
        p = theirs.binomtest(k, n, 0.5).pvalue
        assert stats.mcnemar_exact(k, n - k) == pytest.approx(p, rel=1e-8, abs=1e-300)


def test_quantiles():
    for p in (1e-6, 0.025, 0.3, 0.5, 0.8, 0.975, 0.9999):
        assert stats.normal_quantile(p) == pytest.approx(theirs.norm.ppf(p), abs=1e-8)
        for df in (1, 2, 3, 4, 9, 30, 101):
            assert stats.t_quantile(p, df) == pytest.approx(theirs.t.ppf(p, df), rel=1e-6, abs=1e-8)


def tail_of(n: int) -> float:
    """Hesterberg's widened tail, from scipy's distributions."""
    return theirs.norm.cdf(np.sqrt(n / (n - 1)) * theirs.t.ppf(0.025, n - 1))


def their_bootstrap(data, statistic, n, *, paired=True):
    return theirs.bootstrap(
        data,
        statistic,
        n_resamples=20_000,
        vectorized=True,
        paired=paired,
        method="percentile",
        confidence_level=1 - 2 * tail_of(n),
        rng=np.random.default_rng(11),
    ).confidence_interval


@pytest.mark.parametrize("n", [5, 12, 60])
def test_bootstraps(n):
    rng = np.random.default_rng(n)
    tokens, seconds = rng.integers(50, 500, n) * 1.0, rng.uniform(1, 5, n)
    fast = seconds / rng.normal(1.5, 0.1, n)
    cases = [
        (stats.bootstrap_mean(seconds), (seconds,), lambda x, axis: x.mean(axis)),
        (
            stats.bootstrap_ratio_of_sums(tokens, seconds),
            (tokens, seconds),
            lambda x, y, axis: x.sum(axis) / y.sum(axis),
        ),
        (
            stats.bootstrap_ratio(seconds, fast),
            (seconds, fast),
            lambda x, y, axis: x.mean(axis) / y.mean(axis),
        ),
        (
            stats.bootstrap_gain(tokens, fast, tokens, seconds),
            (tokens, fast, tokens, seconds),
            lambda a, b, c, d, axis: a.sum(axis) / b.sum(axis) / (c.sum(axis) / d.sum(axis)),
        ),
        (
            stats.bootstrap_quantile_ratio(seconds, fast, 0.5),
            (seconds, fast),
            lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis),
        ),
    ]
    for ours, data, statistic in cases:
        other = their_bootstrap(data, statistic, n)
        width = ours.high - ours.low
        assert ours.low == pytest.approx(other.low, abs=0.06 * width)
        assert ours.high == pytest.approx(other.high, abs=0.06 * width)
        assert ours.value == pytest.approx(float(statistic(*data, axis=-1)))


def test_percentiles():
    x = np.random.default_rng(1).lognormal(0, 1, 257)
    ours = metrics.summary(x)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        # alphap = betap = 1 is the definition that interpolates between order statistics
        other = theirs.mstats.mquantiles(x, [q], alphap=1, betap=1)[0]
        assert getattr(ours, name) == pytest.approx(other)
    assert ours.mean == pytest.approx(theirs.tmean(x)) and ours.n == 257


def test_ecdf():
    x = np.random.default_rng(2).integers(1, 20, 40)
    values, share = stats.ecdf(x)
    other = theirs.ecdf(x).cdf
    assert values == pytest.approx(other.quantiles) and share == pytest.approx(other.probabilities)
