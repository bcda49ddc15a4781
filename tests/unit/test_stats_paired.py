"""Two arms on the same questions: case 39, the published counts, and other people's figures."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import optimize
from scipy import stats as theirs
from sparkling import cli
from sparkling import stats_paired as sp
from sparkling.errors import UsageError
from sparkling.stats import mcnemar_exact
from sparkling.stats_paired import Counts

PUBLISHED = Counts(1264, 14, 13, 28)


def test_the_published_counts_say_no_more_than_they_can():
    found = sp.paired(PUBLISHED)
    assert found.p == 1.0
    assert found.sentence().endswith("only a loss above about 0.85 points is excluded.")
    assert 100 * found.difference.value == pytest.approx(-0.0758, abs=1e-4)
    # by hand: sqrt(27 - 1/1319) / 1319 = 0.39393 points, times 1.95996 = 0.77209
    assert 100 * found.difference.low == pytest.approx(-0.8479, abs=1e-4)
    assert 100 * found.difference.high == pytest.approx(0.6963, abs=1e-4)
    assert found.difference.method == sp.WALD and found.score.method == sp.TANGO
    assert 100 * found.score.low == pytest.approx(-0.903, abs=1e-3)


def test_wald_and_tango_agree_with_a_published_table():
    """Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014), 2850: 21 children before
    and after a transplant, counts 1, 1, 7, 12."""
    counts = Counts(1, 7, 1, 12)
    found = sp.tango(counts)
    assert (found.low, found.high) == pytest.approx((-0.517, -0.026), abs=6e-4)
    found = sp.wald(counts)
    assert (found.low, found.high) == pytest.approx((-0.520, -0.052), abs=6e-4)


def their_tango(counts: Counts, level: float = 0.95) -> tuple[float, float]:
    """Tango's interval the long way: the likelihood under each difference maximised by scipy."""
    n, b, c = counts.n, counts.first_only, counts.second_only
    z = theirs.norm.ppf(0.5 + level / 2)

    def score(delta: float) -> float:
        def against(q: float) -> float:  # minus the log likelihood of (b, c, rest)
            cells = ((b, q), (c, q + delta), (n - b - c, 1 - 2 * q - delta))
            return -sum(k * math.log(max(p, 1e-300)) for k, p in cells if k)

        low, high = max(0.0, -delta), (1 - delta) / 2
        q = optimize.minimize_scalar(
            against, bounds=(low, high), method="bounded", options={"xatol": 1e-13}
        ).x
        return (c - b - n * delta) / math.sqrt(n * (2 * q + delta - delta**2))

    d = (c - b) / n
    return (
        optimize.brentq(lambda x: score(x) - z, -0.999, d),
        optimize.brentq(lambda x: score(x) + z, d, 0.999),
    )


@pytest.mark.parametrize(
    "cells", [(1264, 14, 13, 28), (20, 7, 3, 10), (80, 1, 9, 10), (5, 30, 12, 3), (60, 2, 1, 5)]
)
def test_tango_against_numerical_likelihood(cells):
    found = sp.tango(Counts(*cells))
    assert (found.low, found.high) == pytest.approx(their_tango(Counts(*cells)), abs=2e-5)


def test_corners_have_an_interval_that_means_something():
    none = sp.paired(Counts(1319, 0, 0, 0))
    z = theirs.norm.ppf(0.975)
    floor = z * z / (1319 + z * z)
    assert none.p == 1.0 and none.difference.method == sp.TANGO
    assert (none.difference.low, none.difference.high) == pytest.approx((-floor, floor))
    assert none.detectable is None and none.excludable == pytest.approx(floor)
    assert "0.29 points is excluded" in none.sentence()
    for worst, sign in ((Counts(0, 9, 0, 0), -1), (Counts(0, 0, 9, 0), 1)):
        found = sp.tango(worst)
        assert found.value == sign and -1 <= found.low < found.high <= 1
    one = sp.paired(Counts(1, 0, 0, 0))
    assert one.difference.low < -0.5 and one.difference.high > 0.5
    huge = sp.paired(Counts(0, 0, 1100, 219))
    assert huge.p < 1e-300 and huge.sentence().startswith("The second is better, by at least 8")
    worse = sp.paired(Counts(1000, 60, 20, 20))
    assert worse.sentence().startswith("The second is worse, by at least")
    for bad in ((-1, 2, 2, 2), (0, 0, 0, 0)):
        with pytest.raises(UsageError, match="Counts of pairs"):
            Counts(*bad)


@pytest.mark.parametrize("rest", [0, 3, 24])
def test_nearly_all_on_one_side_is_no_certainty(rest):
    """Wald's interval has no width where all pairs are discordant one way."""
    found = sp.paired(Counts(rest, 0, 1100, 0))
    assert found.difference.method == sp.TANGO
    assert found.difference.low == found.score.low < 0.9931
    assert "at least 100.00" not in found.sentence()
    worse = sp.paired(Counts(rest, 1100, 0, 0))
    assert worse.difference.high == pytest.approx(-found.difference.low)
    if not rest:
        assert worse.sentence().endswith("points; no loss is excluded.")
    assert sp.difference(Counts(25, 0, 1100, 0)).method == sp.WALD


def test_the_sentence_claims_nothing_that_the_exact_test_does_not():
    """The approximate intervals leave 0 a little sooner than exact McNemar."""
    for b in range(30):
        for c in range(30):
            found = sp.paired(Counts(1319 - b - c, b, c, 0))
            claims = found.sentence().startswith("The second is")
            assert claims == (found.p < 0.05), (b, c)
    found = sp.paired(Counts(15, 0, 4, 1))
    assert found.difference.low > 0 and "the exact test has p = 0.1250" in found.sentence()


def test_a_loss_of_more_than_everything_is_not_spoken_of():
    found = sp.paired(Counts(0, 1, 0, 0))
    assert found.excludable > 1 and found.to_json()["excludable_loss_points"] is None
    assert "280" not in found.text() and "So few pairs exclude no loss" in found.text()


def test_swapping_the_arms_mirrors_everything():
    there, back = sp.paired(PUBLISHED), sp.paired(Counts(1264, 13, 14, 28))
    for a, b in ((there.difference, back.difference), (there.score, back.score)):
        assert (a.low, a.high) == pytest.approx((-b.high, -b.low), abs=1e-12)
    assert there.p == back.p


def coverage(interval, n: int, share: float, delta: float) -> float:
    """The exact chance that the interval holds `delta`, enumerated over all outcomes."""
    inside = 0.0
    for m in range(int(theirs.binom.ppf(1e-6, n, share)), int(theirs.binom.isf(1e-6, n, share))):
        pm = theirs.binom.pmf(m, n, share)
        ks = np.arange(m + 1)
        for c, weight in zip(ks, theirs.binom.pmf(ks, m, (1 + delta / share) / 2), strict=True):
            if pm * weight > 1e-8 and not interval(Counts(0, m - c, int(c), n - m)).excludes(delta):
                inside += pm * weight
    return inside


@pytest.mark.parametrize(("discordant", "delta"), [(25, 0.0), (27, 0.0), (27, -0.006)])
def test_the_stated_interval_covers(discordant, delta):
    assert 0.945 <= coverage(sp.wald, 1319, discordant / 1319, delta) <= 0.955


def test_wald_alone_would_not_do_with_few_discordant_pairs():
    assert coverage(sp.wald, 1319, 10 / 1319, -0.006) < 0.935
    assert sp.difference(Counts(1300, 9, 2, 8)).method == sp.TANGO
    assert sp.difference(Counts(1300, 12, 12, 8)).method == sp.TANGO
    assert sp.difference(Counts(1300, 13, 12, 8)).method == sp.WALD


@pytest.mark.parametrize("m", [0, 5, 6, 10, 20, 27, 30, 40, 1100])
def test_smallest_significant_is_where_the_test_turns(m):
    net = sp.smallest_significant(m)
    p = [theirs.binomtest(k, m).pvalue if m else 1.0 for k in range(m // 2 + 1)]
    good = [m - 2 * k for k in range(m // 2 + 1) if p[k] < 0.05]
    assert net == (min(good) if good else None)


def power_of(n: int, share: float, delta: float) -> float:
    """The exact power of exact McNemar, enumerated."""
    total = 0.0
    for m in range(int(theirs.binom.ppf(1e-7, n, share)), int(theirs.binom.isf(1e-7, n, share))):
        pm = theirs.binom.pmf(m, n, share)
        net = sp.smallest_significant(m)
        if net is not None:
            k = (m - net) // 2
            pi = (1 - delta / share) / 2
            total += pm * (theirs.binom.cdf(k, m, pi) + theirs.binom.sf(m - k - 1, m, pi))
    return float(total)


def test_detectable_has_the_power_that_it_names():
    share = 27 / 1319
    d = sp.detectable(1319, share)
    assert 100 * d == pytest.approx(1.10, abs=0.01)
    # the exact test is cautious, so its power is somewhat below that of Connor's approximation
    assert 0.72 <= power_of(1319, share, d) <= 0.82
    found = optimize.brentq(
        lambda x: (
            1319 * x * x - (1.959964 * share**0.5 + 0.841621 * max(0, share - x * x) ** 0.5) ** 2
        ),
        1e-4,
        share,
    )
    assert d == pytest.approx(found, abs=1e-6)
    assert sp.detectable(100, 3 / 100) is None  # three discordant pairs never reach p < 0.05


def test_excludable_is_what_simulated_runs_exclude():
    share, n = 27 / 1319, 1319
    limit = sp.excludable(n, share)
    rng = np.random.default_rng(3)
    m = rng.binomial(n, share, 4000)
    c = rng.binomial(m, 0.5)
    done = [
        sp.wald(Counts(0, int(mm - cc), int(cc), int(n - mm))).low > -limit
        for mm, cc in zip(m, c, strict=True)
    ]
    assert np.mean(done) == pytest.approx(0.8, abs=0.03)


def test_non_inferiority_needs_both_intervals():
    states = {m: sp.paired(PUBLISHED, margin=m / 100).verdict.state for m in (0.5, 0.86, 0.92, 1.0)}
    assert states == {
        0.5: "not shown", 0.86: "not shown", 0.92: "non-inferior", 1.0: "non-inferior",
    }  # fmt: skip
    bad = sp.paired(Counts(1000, 200, 20, 99), margin=0.05).verdict
    assert bad.state == "inferior" and "at least" in bad.text
    for margin in (0.0, -0.01, 1.0):
        with pytest.raises(UsageError, match="margin"):
            sp.paired(PUBLISHED, margin=margin)


def test_p_as_people_write_it():
    said = [sp.p_text(p) for p in (1.0, 0.0215, 3.14e-7, 0.0)]
    assert said == ["1.0", "0.0215", "3.1e-07", "0 (below 1e-300)"]


def test_a_billion_pairs_do_not_take_for_ever():
    n = 10**9
    p = mcnemar_exact(n - 90_000, n)
    assert p == pytest.approx(2 * theirs.norm.sf(90_000 / math.sqrt(2 * n - 90_000)), rel=1e-3)
    with pytest.raises(UsageError, match="cannot be summed"):
        mcnemar_exact(0, n + 1)


# -- the command ---------------------------------------------------------------------------------


def run(capsys, *args: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["stats", "mcnemar", *args])
    except SystemExit as done:
        code = done.code
    return code, *capsys.readouterr()


def test_command(capsys):
    code, out, err = run(capsys, "1264", "14", "13", "28")
    assert (code, err) == (0, "")
    assert "p = 1.0" in out and "only a loss above about 0.85 points is excluded" in out
    assert "[-0.90, +0.74]" in out and "Non-inferior" not in out
    code, out, _ = run(capsys, "1264", "14", "13", "28", "--margin", "1", "--json")
    data = json.loads(out)
    assert code == 0 and data["p_value"] == 1.0 and data["n"] == 1319 and data["discordant"] == 27
    assert data["excluded_loss_points"] == pytest.approx(0.848, abs=1e-3)
    assert data["non_inferiority"]["state"] == "non-inferior"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("1", "2", "3"), "NEITHER"),
        (("1", "2", "-3", "4"), "-3"),
        (("1", "2", "x", "4"), "'x' is not a whole number"),
        (("0", "0", "0", "0"), "not all 0"),
        (("1", "2", "3", "4", "--margin", "0"), "margin"),
        (("1", "9999999999", "3", "4"), "1,000,000,000"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, args, said):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err


def test_stats_alone_asks_which(capsys):
    assert cli.main(["stats"]) == 2
    assert "Which one?" in capsys.readouterr().err
