"""The full factorial: effects equal an independent least squares, and only switches may differ."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from sparkling.ablation import (
    ablation,
    arm_name,
    combinations,
    contrasts,
    gains_by_round,
)
from sparkling.errors import UsageError
from sparkling.ladder import ladder

THREE = ("humming", "fp8-head", "nextn")


def row(arm, prompt, rate, *, on=(), switches=THREE, round=0, tokens=100, workload="w", **more):
    return {
        "arm": arm,
        "arm_hash": f"hash of {arm}",
        "workload": workload,
        "prompt": prompt,
        "repeat": round,
        "round": round,
        "case_hash": f"text of {prompt}",
        "settings": {"sampling": {"temperature": 0.0}, "max_tokens": 128},
        "machine_id": "m",
        "model_id": "w",
        "regime": "",
        "recipe": "r",
        "switches": {s: s in on for s in switches},
        "complete": True,
        "decode_tokens": tokens,
        "decode_s": tokens / rate,
        "tpot_s": 1 / rate,
        "ttft_s": 0.1,
        "e2e_s": 0.1 + tokens / rate,
        "completion_tokens": tokens + 1,
        "output_hash": "same",
        "spec": None,
        **more,
    }


def rows(gain, *, switches=THREE, prompts=6, rounds=2, pace=lambda r: 1.0, noise=None):
    """Rows of every arm; `gain(on)` is the arm's factor over 20 tokens/s, `pace(round)` the machine's."""
    out = []
    for r in range(rounds):
        for on in combinations(switches):
            for p in range(prompts):
                rate = 20 * (1 + 0.3 * p) * gain(on) * pace(r)
                if noise is not None:
                    rate *= math.exp(noise.normal(0, 0.02))
                arm = arm_name("baseline", on)
                out.append(row(arm, f"{p:02d}", rate, on=on, switches=switches, round=r))
    return out


def test_combinations_count_in_binary():
    assert combinations(("a", "b")) == [(), ("a",), ("b",), ("a", "b")]
    assert len(set(combinations(THREE))) == 8
    assert arm_name("baseline", ("a", "b")) == "baseline+a+b" and arm_name("x", ()) == "x"


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_contrasts_are_the_coefficients_of_least_squares(k):
    switches = tuple("abcd"[:k])
    rng = np.random.default_rng(k)
    logs = rng.normal(3.0, 0.4, size=2**k)
    sets = [s for n in range(k + 1) for s in itertools.combinations(range(k), n)]
    coded = np.array(
        [[0.5 if s in on else -0.5 for s in switches] for on in combinations(switches)]
    )
    design = np.column_stack([np.prod(coded[:, list(s)], axis=1) for s in sets])
    wanted, *_ = np.linalg.lstsq(design, logs, rcond=None)
    found = contrasts(logs, switches)
    assert len(found) == 2**k - 1
    for names, value in zip(sets[1:], wanted[1:], strict=True):
        assert found[tuple(switches[i] for i in names)] == pytest.approx(value, abs=1e-12)


def test_contrasts_by_hand():
    logs = [math.log(x) for x in (20.0, 30.0, 24.0, 45.0)]  # none, a, b, both
    found = contrasts(logs, ("a", "b"))
    assert math.exp(found["a",]) == pytest.approx(math.sqrt(1.5 * 45 / 24))
    assert math.exp(found["b",]) == pytest.approx(math.sqrt(1.2 * 1.5))
    assert math.exp(found["a", "b"]) == pytest.approx((45 / 20) / (1.5 * 1.2))


def test_gains_that_multiply_have_no_interaction():
    def gain(on):
        return 1.2 ** ("humming" in on) * 1.1 ** ("fp8-head" in on) * 1.5 ** ("nextn" in on)

    found = ablation(rows(gain), THREE)
    assert [e.name for e in found.effects[3:]] == [
        "humming × fp8-head", "humming × nextn", "fp8-head × nextn", "humming × fp8-head × nextn"
    ]  # fmt: skip
    for name, factor in (("humming", 1.2), ("fp8-head", 1.1), ("nextn", 1.5)):
        effect = found[name]
        assert effect.ratio.value == pytest.approx(factor) and effect.clear
        assert effect.by_round == pytest.approx((factor, factor))
        assert found.arm(name).gain.value == pytest.approx(factor)
    for effect in found.effects[3:]:
        assert effect.ratio.value == pytest.approx(1.0) and not effect.clear
    assert found.arm("nextn", "humming").gain.value == pytest.approx(1.8)
    assert found.arm().gain is None and found.arm().arm == "baseline"
    assert found["nextn", "humming"].switches == ("humming", "nextn")


def test_an_interaction_is_the_ratio_of_gains():
    def gain(on):
        return (1.5 if "nextn" in on else 1.0) * (0.8 if {"nextn", "fp8-head"} <= {*on} else 1.0)

    found = ablation(rows(gain, switches=THREE[1:]), THREE[1:])
    assert found["fp8-head", "nextn"].ratio.value == pytest.approx(0.8)
    assert found["nextn"].ratio.value == pytest.approx(1.5 * math.sqrt(0.8))
    assert found["fp8-head"].ratio.value == pytest.approx(math.sqrt(0.8))


def test_the_interval_is_paired_and_covers():
    """Prompts differ by a factor of 2.5 and leave the interval narrow; 95 % of intervals hold 1.5."""
    held = 0
    for seed in range(24):
        noise = np.random.default_rng(seed)
        found = ablation(
            rows(
                lambda on: 1.5 ** ("b" in on), switches=("a", "b"), prompts=8, rounds=1, noise=noise
            ),
            ("a", "b"),
        )
        ratio = found["b"].ratio
        assert ratio.high - ratio.low < 0.12 and ratio.n == 8
        held += ratio.low <= 1.5 <= ratio.high
    assert held >= 19  # 24 draws at 95 % give fewer than 19 once in 1,000


def test_a_drift_between_rounds_cancels_and_is_told():
    found = ablation(rows(lambda on: 1.3 ** ("nextn" in on), pace=lambda r: 1 - 0.2 * r), THREE)
    assert found.pace == pytest.approx((1.0, 0.8))
    assert found["nextn"].ratio.value == pytest.approx(1.3) and found["nextn"].clear


def test_nothing_is_clear_on_a_machine_that_was_not_steady():
    found = ablation(rows(lambda on: 1.3 ** ("nextn" in on), pace=lambda r: 1 + r), THREE)
    assert "not steady" in found.ladder.warning
    assert found["nextn"].ratio.value == pytest.approx(1.3) and not found["nextn"].clear


def test_an_effect_that_only_one_round_shows_is_not_clear():
    def made():
        for r in rows(lambda on: 1.0, switches=("a",)):
            if r["arm"] == "baseline+a":
                r["decode_s"] /= 1.2 if r["round"] == 0 else 0.99
            yield r

    effect = ablation(made(), ("a",))["a"]
    assert effect.ratio.low > 1 and effect.by_round == pytest.approx((1.2, 0.99))
    assert not effect.clear


def test_gains_by_round():
    def made():
        for r in rows(lambda on: 1.2 ** len(on), switches=("a",), pace=lambda r: 1 + r):
            faster = r["arm"] == "baseline+a" and r["round"] == 1
            yield {**r, "decode_s": r["decode_s"] / (1.1 if faster else 1)}

    data = list(made())
    got = gains_by_round(data, "baseline")
    assert list(got) == ["baseline+a"] and got["baseline+a"] == pytest.approx((1.2, 1.32))
    # A round that one arm lacks, and a prompt that it lacks, are left out for both.
    cut = [r for r in data if r["round"] == 0 or r["arm"] == "baseline"]
    assert gains_by_round(cut, "baseline")["baseline+a"] == pytest.approx((1.2,))
    assert gains_by_round(data, "baseline", workload="other") == {}


def test_the_ladder_of_the_same_rows_agrees():
    data = rows(lambda on: 1.1 ** len(on), noise=np.random.default_rng(1))
    found = ablation(data, THREE)
    assert found.ladder.to_json() == ladder(data).to_json()
    assert [r.arm for r in found.ladder][:3] == [
        "baseline",
        "baseline+humming",
        "baseline+fp8-head",
    ]
    # The rows' own order, which is that of the starts, does not matter.
    for effect, other in zip(found.effects, ablation(data[::-1], THREE).effects, strict=True):
        assert other.switches == effect.switches and other.by_round == pytest.approx(
            effect.by_round
        )
        for key in ("value", "low", "high"):
            assert getattr(other.ratio, key) == pytest.approx(getattr(effect.ratio, key))


def change(data, arm, **more):
    return [{**r, **more} if r["arm"] == arm else r for r in data]


def test_what_differs_in_more_than_the_switch_is_refused():
    data = rows(lambda on: 1.0, switches=("a", "b"))
    for broken, said in (
        (
            [r for r in data if r["arm"] != "baseline+b"],
            r"1 of the 4 arms.*was not.*: baseline\+b\.",
        ),
        (change(data, "baseline+a", machine_id="other"), "differ in the machine"),
        (change(data, "baseline+a", model_id="other"), "differ in the model"),
        (change(data, "baseline+a+b", case_hash="other"), "the text of prompt 00 of w"),
        (change(data, "baseline+b", settings={"sampling": {}, "max_tokens": 9}), "of w"),
        (
            change(data, "baseline+b", switches={"a": True, "b": True}),
            "measured with a, b switched",
        ),
        (change(data, "baseline", switches={"a": False, "c": True}), "measured with c switched"),
    ):
        with pytest.raises(UsageError, match=said):
            ablation(broken, ("a", "b"))


def test_prompts_that_one_arm_lacks_are_left_out_for_all():
    data = rows(lambda on: 1.5 ** ("b" in on), switches=("a", "b"))
    cut = [
        {**r, "complete": False} if (r["arm"], r["prompt"]) == ("baseline", "05") else r
        for r in data
    ]
    found = ablation(cut, ("a", "b"))
    assert found["b"].ratio.n == 5 and found["b"].ratio.value == pytest.approx(1.5)
    few = [r for r in data if r["prompt"] in ("00", "01")]
    assert ablation(few, ("a", "b"))["b"].ratio.low is None  # two prompts say nothing of others
