"""What was recorded of the SwiGLU limit on an H200: that stock drops it, and that the switch does not."""

from __future__ import annotations

import json
import re

import pytest
from sparkling import clampcheck, show_clamp

ROUNDING = 0.006
"""More than the root mean square error of BF16 activations between two products (2**-8 = 0.0039)."""

OURS = ("humming", "marlin", "marlin_torch")
TOKENS = (1, 2, 4, 8)


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
    assert record.command == (
        "python3 scripts/check_clamp.py --limit-s 180 --short-marlin marlin-sources --out clamp.json"
    )
    assert record.failures == [] and record.runners == [
        "marlin",
        "marlin_torch",
        "humming",
        "triton",
    ]
    assert [runner for runner, said in record.outcomes.items() if said != "done"] == [
        "flashinfer_mxfp4"
    ]
    assert record.outcomes["flashinfer_mxfp4"].startswith("not tried: ")
    assert list(record.compiled) == ["marlin"]
    text = (root / clampcheck.RECORDED).read_text()
    shape = json.loads(text)["shape"]
    assert (shape["hidden"], shape["intermediate"], shape["top_k"]) == (2560, 768, 8)
    assert not re.search(r"(?<![\w.])/\w+/", text), "a path of the machine"


@pytest.mark.parametrize("runner", OURS)
def test_stock_computes_the_function_without_the_limit_and_the_switch_the_one_with_it(
    record, runner
):
    exceeding = outputs(record, runner, exceeds=True)
    assert {one.experts for one in exceeding} == ({64} if runner == "marlin_torch" else {64, 512})
    for one in exceeding:
        assert 0.03 < one.beyond[0] < 0.05 and 0.08 < one.beyond[1] < 0.1
        limited, free = one.errors["stock"]
        assert free < ROUNDING and limited > 0.25
        limited, free = one.errors["hooked"]
        assert limited < ROUNDING and free > 0.2
        assert one.unlike_stock["hooked"] > 0.98 * one.entries


@pytest.mark.parametrize("runner", OURS)
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


def test_humming_told_of_a_limit_computes_as_if_it_were_not(record):
    """The upstream report's own lines."""
    assert record.reproduction["swiglu_limit"] is None and record.reproduction["output"] == 64
    text = str(show_clamp.reproduction(record))
    assert "none" in text and "63.98" in text and "✗" in text


def timed(record, kernels: bool, *runners: str) -> list[clampcheck.Times]:
    """The times of a layer, or of the activation alone: all numbers of tokens, each runner once."""
    found = record.kernel_times if kernels else record.times
    mine = [one for runner in runners for one in found if one.runner == runner]
    assert [one.tokens for one in mine] == [*TOKENS] * len(runners)
    return mine


def unclear(one: clampcheck.Times) -> bool:
    low, high = one.more["interval"]
    return low <= 0 <= high


def test_it_costs_less_than_a_microsecond_a_layer(record):
    for one in timed(record, False, "humming", "marlin"):
        assert one.experts == 512 and one.graph_is_eager
        assert one.more["n"] == one.stock["n"] == one.hooked["n"] == 60
        low, high = one.more["interval"]
        assert low <= one.more["median"] <= high and low > -1 and high < 0.5
        assert 30 < one.stock["median"] < 150
    for one in timed(record, True, *OURS):
        assert one.more["n"] == one.stock["n"] == one.hooked["n"] == 60
        assert one.more["interval"][0] <= one.more["median"] <= one.more["interval"][1] < 0.5
        assert 1 < one.stock["median"] < 3


def medians(found: list[clampcheck.Times]) -> list[str]:
    """The least and the most of the differences' medians, as prose has them."""
    ordered = sorted(abs(one.more["median"]) for one in found)
    return [f"{ordered[0]:.2f}", f"{ordered[-1]:.2f}"]


def flat(path, root) -> str:
    return " ".join((root / path).read_text("utf-8").split())


def test_the_design_quotes_the_record(record, root):
    text = flat("docs/design.md", root)
    marlin, humming = (timed(record, False, runner) for runner in ("marlin", "humming"))
    assert all(one.more["median"] < 0 for one in [*marlin, *humming])
    assert (
        "a layer takes {} to {} µs less with Marlin and {} to {} µs less with Humming".format(
            *medians(marlin), *medians(humming)
        )
    ) in text
    assert not any(map(unclear, marlin)) and sum(map(unclear, humming)) == 2
    assert "two of four 95 % intervals hold 0" in text
    ends = max(one.more["interval"][1] for one in [*marlin, *humming])
    assert f"none ends above {ends:+.2f}." in text
    alone = timed(record, True, "marlin", "marlin_torch")
    assert all(one.more["interval"][0] > 0 for one in alone)
    least, most = medians(alone)
    assert f"takes {least} to {most} µs more than Marlin's and, within" in text
    humming = timed(record, True, "humming")
    most = max(abs(end) for one in humming for end in one.more["interval"])
    assert f"within ±{most:.2f} µs, as long as Humming's" in text and all(map(unclear, humming))


def test_the_report_quotes_the_record(record, root):
    text = flat("docs/upstream/swiglu-clamp.md", root)
    for runner in record.runners:
        for one in record.largest(runner):
            if not one.exceeds or runner == "marlin_torch":
                continue
            stock, ours = (
                " / ".join(f"{100 * error:.2f} %" for error in one.errors[kind])
                for kind in ("stock", "hooked")
            )
            ours = "not touched" if runner == "triton" else ours
            assert f"| {runner} | {one.experts} | {one.tokens} | {stock} | {ours} |" in text
    for runner in ("humming", "marlin"):
        below = outputs(record, runner, exceeds=False)
        entries = sum(one.entries for one in below)
        assert f"({len(below)} inputs, {entries:,} entries, for each" in text
        both = [*below, *outputs(record, runner, exceeds=True)]
        assert f"a layer without a limit ({len(both)} inputs)" in text
    cells = [
        timed(record, kernels, runner)
        for runner in ("marlin", "humming")
        for kernels in (False, True)
    ]
    for row in zip(*cells, strict=True):
        shown = [
            f"{one.more['median']:+.2f} [{one.more['interval'][0]:+.2f}, {one.more['interval'][1]:+.2f}]"
            for one in row
        ]
        assert f"| {row[0].tokens} | {' | '.join(shown)} |".replace("-", "−") in text
    spans = [
        f"{least:.0f} to {most:.0f} µs in stock {runner.capitalize()}"
        for runner in ("marlin", "humming")
        for times in [[one.stock["median"] for one in timed(record, False, runner)]]
        for least, most in [(min(times), max(times))]
    ]
    assert f"A layer takes {' and '.join(spans)}" in text
    assert (
        f"gave {record.reproduction['swiglu_limit']} and {record.reproduction['output']:g}." in text
    )
    assert f"sglang-kernel {record.versions['sglang-kernel']}" in text and record.date[:10] in text


def test_the_notebook_quotes_the_record(record, root):
    notebook = json.loads((root / "notebooks/appendix_swiglu_clamp.ipynb").read_text("utf-8"))
    text = " ".join(" ".join("".join(cell["source"]).split()) for cell in notebook["cells"])
    marlin, humming = (timed(record, False, runner) for runner in ("marlin", "humming"))
    assert not any(map(unclear, marlin)) and all(one.more["median"] < 0 for one in marlin)
    least, most = medians(marlin)
    assert f"a layer of Marlin took {least} to {most} µs less" in text
    clear = [one for one in humming if not unclear(one)]
    assert all(one.more["median"] < 0 for one in clear)
    took = " and ".join(f"{-one.more['median']:.2f}" for one in clear)
    tokens = " and ".join(str(one.tokens) for one in clear)
    assert f"One of Humming took {took} µs less with {tokens} tokens" in text
    rest = " and ".join(str(one.tokens) for one in humming if unclear(one))
    assert f"with {rest} there is no difference beyond the interval." in text
    alone = timed(record, True, "marlin", "marlin_torch")
    assert not any(map(unclear, alone)) and all(one.more["median"] > 0 for one in alone)
    least, most = medians(alone)
    assert (
        f"our activation takes {least} to {most} µs more than Marlin's; next to Humming's" in text
    )
    assert all(map(unclear, timed(record, True, "humming")))


def test_all_of_the_record_is_shown_and_nothing_twice(record):
    text = show_clamp.kernel_times(record).html
    assert text.count("silu_and_mul") == len(record.kernel_times) == 12
    assert text.count("in a second process") == 4
    # Rows of Marlin's activation are those of its second process, bit for bit.
    assert show_clamp.activations(record).html.count("silu_and_mul") == 6
    assert "kernels of an MXFP4 checkpoint alone" in str(show_clamp.where(record))
    assert "its products by torch" in show_clamp.untouched(record).html
