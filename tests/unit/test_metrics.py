"""Definitions: case 19 (chunks are not tokens), case 37 (accept length from several places)."""

import math
import random

import pytest
from sparkling import metrics
from sparkling.metrics import AcceptReading, accept_length, accept_verdict
from sparkling.reply import Reply, SpecCounts


def reply(times, n, counts=None, **more):
    counts = list(counts) if counts is not None else [None] * len(times)
    more = {"complete": True, "finish_reason": "stop", "e2e_s": times[-1] if times else None} | more
    return Reply(chunk_times_s=list(times), chunk_tokens=counts, completion_tokens=n, **more)


TWELVE = [0.1 + 0.03 * i for i in range(12)]


def test_case_19_thirty_six_tokens_in_twelve_chunks():
    r = reply(TWELVE, 36)
    assert metrics.ttft_s(r) == pytest.approx(0.1)
    assert metrics.tpot_s(r) == pytest.approx(0.330 / 35)
    assert metrics.decode_rate(r) == pytest.approx(35 / 0.330)  # 106 tokens/s
    assert metrics.e2e_rate(r) == pytest.approx(36 / 0.430)  # 83.7 tokens/s
    assert r.e2e_s == pytest.approx(0.430)
    assert metrics.chunk_gap_s(r) == pytest.approx([0.03] * 11)
    assert metrics.decode(r).method == "k=1"
    assert metrics.peak_rate(r) >= metrics.decode_rate(r)


def test_case_19_with_counts_the_first_chunk_has_no_bias():
    r = reply(TWELVE, 36, range(3, 37, 3))
    assert metrics.decode(r).method == "counted"
    assert metrics.decode_rate(r) == pytest.approx(33 / 0.330)  # three tokens every 30 ms
    assert metrics.tpot_s(r) == pytest.approx(0.01)


def test_case_19_one_chunk_is_not_applicable():
    r = reply([0.4], 36)
    assert metrics.decode_rate(r) is metrics.tpot_s(r) is metrics.peak_rate(r) is None
    assert metrics.chunk_gap_s(r) == []
    assert metrics.e2e_rate(r) == pytest.approx(90)
    assert metrics.shown(metrics.tpot_s(r)) == "n/a"


def test_chunks_without_a_count_do_not_bound_the_stretch():
    r = reply([0.1, 0.2, 0.3, 0.4], 9, [None, 3, 5, None])
    assert (metrics.decode(r).tokens, metrics.decode(r).method) == (2, "counted")
    assert metrics.decode_rate(r) == pytest.approx(2 / 0.1)
    assert metrics.peak_rate(r) >= metrics.decode_rate(r)


def test_an_eos_token_without_text_is_not_counted_into_the_stretch():
    r = reply([0.1, 0.2, 0.3], 4, [1, 2, 3])  # the fourth token, EOS, came with no chunk
    assert metrics.decode_rate(r) == pytest.approx(2 / 0.2)


@pytest.mark.parametrize(
    "r",
    [
        reply([], 0),
        reply([0.1, 0.2], None),
        reply([0.1, 0.2], 2, complete=False),
        reply([0.1, 0.1], 2),
        reply([0.1, 0.2], 1),
        reply([0.1, 0.2], 2, [2, 2]),
        reply([0.1, 0.2], 2, [2, None]),
    ],
)
def test_what_cannot_be_known_is_none(r):
    assert metrics.decode(r) is metrics.decode_rate(r) is metrics.tpot_s(r) is None
    assert metrics.peak_rate(r) is None


def test_peak_is_never_below_the_mean():
    rng = random.Random(3)
    for _ in range(200):
        times, counts = [rng.random()], [rng.randint(1, 4)]
        for _ in range(rng.randint(1, 60)):
            times.append(times[-1] + rng.expovariate(20))
            counts.append(counts[-1] + rng.randint(1, 4))
        r = reply(times, counts[-1], counts)
        peak = metrics.peak_rate(r)
        assert peak >= metrics.decode_rate(r)
        assert math.isfinite(peak)


def test_peak_finds_the_fast_second():
    slow = [i * 0.1 for i in range(31)]  # 10/s for 3 s, then 100/s for 2 s
    times = slow + [3.0 + 0.01 * i for i in range(1, 201)]
    r = reply(times, len(times), range(1, len(times) + 1))
    assert metrics.peak_rate(r) == pytest.approx(100, rel=0.02)


# -- acceptance --------------------------------------------------------------------------------------


def test_accept_length_is_a_ratio_of_sums():
    long, short = SpecCounts(300, 100), SpecCounts(4, 4)
    assert accept_length([long, short]) == pytest.approx(304 / 104)
    assert accept_length([{"spec": long.to_json()}, {"spec": None}, Reply(spec=short)]) == 304 / 104
    assert accept_length([]) is None and accept_length([{"spec": None}, Reply()]) is None


def test_accept_interval_takes_repeats_of_a_prompt_as_one():
    rng = random.Random(5)
    rows = []
    for prompt in range(8):
        counts = SpecCounts(rng.randint(120, 260), 80).to_json()
        rows += [{"workload": "w", "prompt": str(prompt), "spec": counts}] * 5
    repeated, once = metrics.accept_interval(rows), metrics.accept_interval(rows[::5])
    assert repeated.n == once.n == 8
    assert repeated.value == pytest.approx(accept_length(rows))
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high))
    assert repeated.low < repeated.value < repeated.high
    assert metrics.accept_interval([]) is None


def test_case_37_106_tokens_in_43_rounds():
    info = {"spec_verify_ct": 43, "spec_num_correct_drafts": 62, "spec_accept_length": 106 / 43}
    counts = SpecCounts.from_server(info, 106)
    assert counts.accept_length == pytest.approx(2.44, abs=0.005)  # what the log says
    assert counts.reported == pytest.approx(2.465, abs=0.0005)  # prefill's token counted as well
    without = SpecCounts.from_server({"spec_verify_ct": 43}, 106)
    assert without.accept_length == counts.accept_length


@pytest.mark.parametrize("info", [{}, {"spec_verify_ct": 0}, {"spec_accept_length": 0.0}])
def test_case_37_a_missing_key_is_unknown(info):
    assert SpecCounts.from_server(info, 106) is None


def readings(log=None, reply=None, info=None, rounds=43):
    return [
        AcceptReading("log", log, "per interval, bonus included", "the last 40 steps", 40),
        AcceptReading("reply", reply, "Σ tokens / Σ rounds", "this request", rounds),
        AcceptReading("server_info", info, "cumulative mean", "since start or flush"),
    ]


def test_case_37_three_sources_that_disagree():
    verdict = accept_verdict(readings(log=4.0, reply=0.0))
    assert verdict.state == "speculating" and verdict.source == "log"
    assert "log" in verdict.text and "reply says 0, which is no accept length" in verdict.text
    verdict = accept_verdict(readings(log=4.0, reply=2.44))
    assert verdict.state == "sources disagree" and verdict.value == 2.44
    assert "log says 4.00" in verdict.text


def test_case_37_no_verdict_from_missing_figures():
    assert accept_verdict(readings()).state == "unknown"
    assert accept_verdict(readings(reply=0.0)).state == "unknown"
    assert accept_verdict([]).state == "unknown"


def test_case_37_a_draft_that_contributes_nothing():
    assert accept_verdict(readings(log=1.0, reply=1.0)).state == "draft contributes nothing"
    few = [AcceptReading("reply", 1.0, "Σ tokens / Σ rounds", "this request", 5)]
    assert accept_verdict(few).state == "unknown"


def test_case_37_agreement_shows_source_window_and_definition():
    verdict = accept_verdict(readings(log=2.44, reply=105 / 43, info=2.5))
    assert verdict.state == "speculating"
    assert verdict.text == "2.44 (reply: Σ tokens / Σ rounds; this request)"
    assert len(verdict.readings) == 3


# -- summaries ---------------------------------------------------------------------------------------


def test_percentiles_interpolate_and_carry_n():
    s = metrics.summary([1.0, 2.0, None, 3.0, 4.0])
    assert (s.mean, s.p50, s.n) == (2.5, 2.5, 4)
    assert s.p90 == pytest.approx(3.7) and s.p95 == pytest.approx(3.85)
    assert s.p99_like_max and "p99 4.0 (like max)" in s.text() and s.text().endswith("(n=4)")
    assert not metrics.summary(range(100)).p99_like_max
    assert metrics.summary([None]) is None
    assert s.to_json()["p99_like_max"] is True
