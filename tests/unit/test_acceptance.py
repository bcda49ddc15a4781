"""Accept length by workload, its histogram, and where in the answer it falls."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from sparkling.acceptance import acceptance, histogram, rounds_of


def row(kept, *, prompt="00", cut=0, silent=False, source="meta_info", workload="w", **more):
    """A reply whose rounds kept these many drafts; `cut` tokens of the last were not sent."""
    counts = list(itertools.accumulate([1, *(k + 1 for k in kept)]))
    total = counts[-1] - cut
    counts[-1] = total
    if silent:  # the last round brings the end-of-text token only
        counts.pop()
    bins = [kept.count(i) for i in range(4)]
    spec = {
        "tokens": sum(kept) + len(kept), "rounds": len(kept), "histogram": bins, "source": source,
        "proposed": 3 * len(kept), "reported": None,
    }  # fmt: skip
    return {
        "arm": "nextn", "workload": workload, "prompt": prompt, "complete": True, "spec": spec,
        "completion_tokens": total, "chunk_tokens": counts, **more,
    }  # fmt: skip


def test_rounds_are_read_from_chunks_and_the_cut_one_is_left_out():
    assert rounds_of(row([3, 0, 2, 1])) == [(1, 4), (5, 1), (6, 3)]
    assert rounds_of(row([3, 0, 2, 3], cut=2)) == [(1, 4), (5, 1), (6, 3)]
    assert rounds_of(row([3, 0, 2, 0], silent=True)) == [(1, 4), (5, 1), (6, 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_tokens": [1, 6, 9, 11]},  # two rounds in one chunk
        {"chunk_tokens": [5, 6, 9, 11]},  # a round in the first chunk
        {"chunk_tokens": [1, 5, 6, None, 11]},
        {"chunk_tokens": [1, 4, 6, 9, 11]},  # as many, but not what the histogram says
        {"chunk_tokens": [1, 7, 8, 9, 11]},  # more than a round can keep
        {"chunk_tokens": [11]},
        {"spec": None},
        {"spec": {"tokens": 10, "rounds": 4, "source": "counters"}},
    ],
)
def test_chunks_that_are_not_rounds_are_not_taken_for_them(change):
    assert rounds_of(row([3, 0, 2, 1])) is not None
    assert rounds_of({**row([3, 0, 2, 1]), **change}) is None


def test_lengths_and_histograms_are_sums_not_averages():
    rows = [row([3] * 9, prompt="00"), row([0], prompt="01"), row([1, 1], prompt="02")]
    got = acceptance(rows)[0]
    assert got.length.value == pytest.approx((36 + 1 + 4) / 12)
    assert (got.requests, got.rounds, got.placed) == (3, 12, 2)  # one has no round but its last
    assert got.histogram == (1, 2, 0, 9) and sum(got.histogram) == got.rounds
    assert got.length.low is None and got.length.n == 3
    assert json.dumps(got.to_json())


def test_the_place_in_the_answer():
    """Drafts of which three are kept before token 128, and none from there on."""
    answers = []
    for i in range(5):
        early = [3] * 32  # 1 + 128 tokens
        answers.append(row(early + [0] * (40 + i), prompt=f"{i:02d}"))
    got = acceptance(answers)[0]
    found = {s.start: (s.end, s.rounds, s.length.value) for s in got.by_place}
    assert found[0] == (16, 20, 4.0) and found[16] == (32, 20, 4.0)
    assert found[64] == (128, 80, 4.0)
    assert found[128][2] == pytest.approx(1.0)
    assert sum(s.rounds for s in got.by_place) == sum(len(rounds_of(r)) for r in answers)
    # The first half ends at about 85 tokens and holds only fours; the later holds 11 of them.
    assert got.falls is True and got.later.n == 5 and got.later.high < 1


def test_no_fall_is_claimed_of_noise():
    draw = random.Random(3)
    rows = [
        row([draw.choice([0, 1, 2, 3]) for _ in range(60)], prompt=f"{i:02d}") for i in range(12)
    ]
    got = acceptance(rows)[0]
    assert got.falls is None and got.later.low < 1 < got.later.high
    assert got.length.low < 2.5 < got.length.high


def test_arms_and_workloads_apart_and_plain_ones_absent():
    rows = [
        row([1, 2], workload="a"), row([3, 3], workload="b"), row([0, 0], arm="other", workload="a"),
        {**row([1], workload="a"), "arm": "plain", "spec": None}, {**row([1]), "complete": False},
    ]  # fmt: skip
    got = {(a.arm, a.workload): a.length.value for a in acceptance(rows)}
    assert got == {("nextn", "a"): 2.5, ("nextn", "b"): 4.0, ("other", "a"): 1.0}


def test_what_is_not_known_is_not_made_up():
    counters = {"tokens": 10, "rounds": 4, "histogram": None, "source": "counters"}
    got = acceptance([{**row([3, 0, 2, 1]), "spec": counters}])[0]
    assert got.length.value == 2.5 and got.source == "counters"
    assert got.histogram is None and got.by_place == () and got.later is None
    assert got.falls is None and got.placed == 0
    assert histogram([]) is None and histogram([row([1, 2]), row([0])]) == (1, 1, 1, 0)


def test_repeats_of_a_prompt_are_one_unit():
    rows = [row([i % 4, 3, 1], prompt=f"{i:02d}") for i in range(6)]
    once, twice = acceptance(rows)[0], acceptance(rows + rows)[0]
    assert twice.length.n == once.length.n == 6
    assert twice.length.high - twice.length.low == pytest.approx(once.length.high - once.length.low)
