"""Intervals and tests: case 39 (McNemar's corners), coverage, reproducibility."""

import math
import random

import numpy as np
import pytest
from sparkling import stats
from sparkling.errors import UsageError
from sparkling.stats import mcnemar_exact, pair, wilson


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0), (3, 3, 1.0), (1, 9, 22 / 1024), (9, 1, 22 / 1024), (0, 1, 1.0),
        (0, 6, 2 / 64), (5, 15, 0.041389465332), (13, 27, 0.0384773083), (0, 1100, 0.0),
    ],
)  # fmt: skip
def test_case_39_mcnemar(b, c, p):
    assert mcnemar_exact(b, c) == pytest.approx(p, rel=1e-6, abs=1e-300)


def test_case_39_mcnemar_equals_whole_number_arithmetic():
    for n in (1, 2, 7, 40, 333, 1319):
        for k in {0, 1, n // 3, n // 2, n}:
            low = min(k, n - k)
            exact = min(1.0, 2 * sum(math.comb(n, i) for i in range(low + 1)) / 2**n)
            assert mcnemar_exact(k, n - k) == pytest.approx(exact, rel=1e-9, abs=1e-300)


def test_case_39_pairs_are_joined_by_id():
    a = [(i, i % 3 == 0) for i in range(50)]
    b = [(i, i % 4 == 0) for i in range(50)]
    shuffled = b[:]
    random.Random(1).shuffle(shuffled)
    assert (
        pair(a, b).discordant == pair(a, shuffled).discordant == pair(dict(a), dict(b)).discordant
    )
    assert pair(a, b).note == "" and pair(a, b).discordant == (12, 8)


def test_case_39_more_ids_on_one_side_is_said_aloud():
    joined = pair([(1, True), (2, False)], [(2, True), (1, True), (3, True), (4, False), (5, True)])
    assert joined.ids == (1, 2) and joined.discordant == (0, 1)
    assert joined.note == "2 ids paired; left out: 3 only in the second set"


def test_case_39_an_id_twice_or_none_in_common_is_refused():
    with pytest.raises(UsageError, match="7 stands twice in the first"):
        pair([(7, True), (7, True)], [(7, True)])
    with pytest.raises(UsageError, match="no id in common"):
        pair([(1, True)], [(2, True)])
    with pytest.raises(UsageError, match="negative"):
        mcnemar_exact(-1, 3)


def test_wilson():
    # R: prop.test(15, 20, correct = FALSE)
    interval = wilson(15, 20)
    assert (interval.low, interval.high) == pytest.approx((0.5312994, 0.8881380), abs=1e-6)
    assert wilson(0, 10).low == 0.0 and wilson(0, 10).high == pytest.approx(0.2775328, abs=1e-6)
    assert wilson(10, 10).high == 1.0
    for bad in ((1, 0), (3, 2), (-1, 5)):
        with pytest.raises(UsageError):
            wilson(*bad)


@pytest.mark.parametrize(
    ("df", "q"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (4, 2.7764451),
        (10, 2.2281389),
        (29, 2.0452296),
    ],
)
def test_t_quantiles(df, q):
    assert stats.t_quantile(0.975, df) == pytest.approx(q, abs=1e-6)
    assert stats.t_quantile(0.025, df) == pytest.approx(-q, abs=1e-6)


def test_normal_quantile():
    assert stats.normal_quantile(0.975) == pytest.approx(1.959963985, abs=1e-8)


def coverage(n, interval, truth, seed, trials=300):
    rng = np.random.default_rng(seed)
    return sum(not interval(rng, n).excludes(truth) for _ in range(trials)) / trials


@pytest.mark.parametrize(("n", "at_least"), [(4, 0.84), (6, 0.89), (15, 0.92)])
def test_bootstrap_mean_covers(n, at_least, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 2000)
    share = coverage(n, lambda rng, n: stats.bootstrap_mean(rng.normal(10, 2, n)), 10, seed=n)
    assert at_least <= share <= 0.99


def test_bootstrap_gain_covers_and_pairing_narrows_it(monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 2000)
    widths = {}

    def gain(rng, n, paired):
        prompts = rng.lognormal(0, 0.5, n)  # prompts differ much more than arms do
        tokens = np.full(n, 200.0)
        slow = tokens / 50 * prompts * rng.normal(1, 0.02, n)
        fast = tokens / 75 * prompts * rng.normal(1, 0.02, n)
        if paired:
            return stats.bootstrap_gain(tokens, fast, tokens, slow)
        return stats.bootstrap_ratio(1 / fast, 1 / slow, paired=False)

    share = coverage(10, lambda rng, n: gain(rng, n, True), 1.5, seed=2, trials=200)
    assert 0.89 <= share <= 0.99
    for paired in (True, False):
        found = gain(np.random.default_rng(5), 10, paired)
        widths[paired] = found.high - found.low
    assert widths[True] < widths[False] / 5


def test_values_of_the_estimates():
    assert stats.bootstrap_mean([1, 2, 3, 6]).value == 3
    assert stats.bootstrap_ratio_of_sums([300, 4], [100, 4]).value == pytest.approx(304 / 104)
    assert stats.bootstrap_ratio([2, 4], [1, 1]).value == 3
    assert stats.bootstrap_ratio([2, 4], [1, 1, 1], paired=False).value == 3
    # (30+10)/(1+1) over (20+10)/(2+1)
    assert stats.bootstrap_gain([30, 10], [1, 1], [20, 10], [2, 1]).value == pytest.approx(2.0)


def test_same_seed_same_interval():
    data = list(np.random.default_rng(0).normal(5, 1, 12))
    a, b, c = (stats.bootstrap_mean(data, seed=s) for s in (1, 1, 2))
    assert a == b and (a.low, a.high) != (c.low, c.high)
    assert a.n == 12 and a.method == stats.METHOD and a.low < a.value < a.high
    wide = stats.bootstrap_mean(data, level=0.99)
    assert wide.low < a.low and wide.high > a.high


def test_too_few_units_have_no_interval():
    few = stats.bootstrap_mean([1.0, 2.0, 3.0])
    assert (few.value, few.low, few.high, few.n) == (2.0, None, None, 3)
    assert few.text() == "2.00 [interval unknown] (n=3)" and not few.excludes(99)
    enough = stats.bootstrap_mean([1.0, 2.0, 3.0, 4.0])
    assert enough.low is not None and enough.text(1, "ms").startswith("2.5 ms [")


def test_unusable_input_is_refused():
    for bad in ([], [1.0, float("nan")], [[1.0]]):
        with pytest.raises(UsageError):
            stats.bootstrap_mean(bad)
    with pytest.raises(UsageError, match="as many on both sides"):
        stats.bootstrap_ratio([1, 2], [1, 2, 3])
