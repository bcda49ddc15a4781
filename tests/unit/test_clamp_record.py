"""What was recorded of the SwiGLU limit on an H200: that stock drops it, and that the switch does not."""

from __future__ import annotations

import json

import pytest
from sparkling import clampcheck

ROUNDING = 0.006
"""More than the root mean square error of BF16 activations between two products (2**-8 = 0.0039)."""


@pytest.fixture(scope="module")
def record(root) -> clampcheck.Record:
    return clampcheck.recorded(root)


def outputs(record, runner: str, exceeds: bool):
    found = [one for one in record.outputs if one.runner == runner and one.exceeds == exceeds]
    assert {one.tokens for one in found} == {1, 4, 8}
    return found


def test_it_says_where_and_how(record, root):
    assert record.where == "NVIDIA H200" and record.versions["sglang"] == "0.5.23"
    assert record.versions["humming-kernels"] == "0.1.12" and record.versions["sm"] == "9.0"
    assert record.command == "python3 scripts/check_clamp.py --limit-s 120 --out clamp.json"
    assert record.failures == [] and not record.outcomes["flashinfer_mxfp4"].startswith("done")
    text = (root / clampcheck.RECORDED).read_text()
    shape = json.loads(text)["shape"]
    assert (shape["hidden"], shape["intermediate"], shape["top_k"]) == (2560, 768, 8)
    assert "/var/" not in text and "/tmp" not in text


@pytest.mark.parametrize("runner", ["humming", "marlin"])
def test_stock_computes_the_function_without_the_limit_and_the_switch_the_one_with_it(
    record, runner
):
    exceeding = outputs(record, runner, exceeds=True)
    assert {one.experts for one in exceeding} == {64, 512}
    for one in exceeding:
        assert 0.03 < one.beyond[0] < 0.05 and 0.08 < one.beyond[1] < 0.1
        limited, free = one.errors["stock"]
        assert free < ROUNDING and limited > 0.25
        limited, free = one.errors["hooked"]
        assert limited < ROUNDING and free > 0.2
        assert one.unlike_stock["hooked"] > 0.98 * one.entries


@pytest.mark.parametrize("runner", ["humming", "marlin"])
def test_the_switch_changes_no_bit_below_the_limit_nor_in_a_layer_without_one(record, runner):
    for exceeds in (True, False):
        for one in outputs(record, runner, exceeds):
            assert one.repeats and one.unlike_stock["hooked_without_limit"] == 0
            if not exceeds:
                assert one.beyond == (0, 0) and one.unlike_stock["hooked"] == 0
                assert max(one.errors["stock"]) < ROUNDING
    for case in record.activations:
        assert case["fast_bits_differ_below"] == 0 < case["entries_below"]
        assert case["fast_error"] < 2**-9 < 0.2 < case["stock_error"]


def test_stock_triton_applies_it(record):
    for one in outputs(record, "triton", exceeds=True):
        limited, free = one.errors["stock"]
        assert limited < ROUNDING and free > 0.2


def test_it_costs_less_than_a_microsecond_a_layer(record):
    for runner in ("humming", "marlin"):
        mine = [one for one in record.times if one.runner == runner]
        assert [one.tokens for one in mine] == [1, 2, 4, 8]
        for one in mine:
            assert one.experts == 512 and one.graph_is_eager and one.more["n"] == 60
            low, high = one.more["interval"]
            assert low <= one.more["median"] <= high and low > -1 and high < 0.5
            assert 30 < one.stock["median"] < 150
