"""The record of the full-size servers: what is computed from it, against numbers made by hand."""

from __future__ import annotations

import copy
import json
import math
from itertools import product

import pytest
from sparkling import fullsize, shapes, show_fullsize
from sparkling.errors import UsageError

HEAD = {"dtype": "float8_e4m3fn", "bytes_before": 804_782_080, "bytes_after": 403_019_776}
FACTOR = {"marlin": 1.2, "humming": 1.0, "bf16": 1.0, "fp8": 0.98, "plain": 5.0, "nextn": 8.0}


def cell(ms: float, of: str, noise: float = 0.001) -> dict:
    values = [ms * (1 - noise), ms, ms * (1 + noise)]
    return {"of": of, "tokens": 256, "ms": values, "accept_length": 1.0 if of == "round" else None}


@pytest.fixture
def data() -> dict:
    """Times that are products of one factor a switch, so that every effect is known."""
    arms = {}
    for kernels, head, mode in product(fullsize.KERNELS, fullsize.HEADS, fullsize.MODES):
        ms = FACTOR[kernels] * FACTOR[head] * FACTOR[mode]
        of = "round" if mode == "nextn" else "step"
        arms[fullsize.arm_name(kernels, head, mode)] = {
            "gpu": "1" if kernels == "marlin" else "0",
            "contexts": {"1024": cell(ms, of), "32768": cell(2 * ms, of)},
            "start": {"start_s": 61.0},
            "weights_gb": {"Target": 65.13, "Draft": 3.38}
            if mode == "nextn"
            else {"Target": 65.13},
            "head": HEAD if head == "fp8" else None,
        }
    return {
        "schema": fullsize.SCHEMA,
        "device": "h200",
        "date": "2026-01-01",
        "conditions": "made up for a test",
        "command": "none",
        "versions": {},
        "bandwidth": {"0": 4e12, "1": 4e12},
        "arms": arms,
    }


def test_effects_are_the_factors_that_the_times_were_made_of(data):
    record = fullsize.of(data)
    assert record.contexts == (1024, 32768) and not record.missing
    for context, mode in product(record.contexts, fullsize.MODES):
        humming = record.effect("humming", mode, context)
        head = record.effect("fp8-head", mode, context)
        assert humming.value == pytest.approx(1.2, rel=1e-6)
        assert head.value == pytest.approx(1 / 0.98, rel=1e-6)
        assert humming.low < humming.value < humming.high and humming.n == 3
        assert not record.interaction(mode, context).excludes(1.0)
    assert record.round_cost("humming", "fp8", 1024).value == pytest.approx(1.6, rel=1e-6)


def test_an_interaction_is_seen(data):
    data["arms"]["humming-fp8-plain"]["contexts"]["1024"] = cell(5.0 * 0.98 * 0.9, "step")
    found = fullsize.of(data).interaction("plain", 1024)
    assert found.value == pytest.approx(1 / 0.9, rel=1e-6) and found.excludes(1.0)


def test_the_interval_is_welchs():
    """Against numbers computed by hand: means 10 and 9, variances 1 and 4, n 3 and 3."""
    one = fullsize.Cell(1, 1, "step", (9.0, 10.0, 11.0))
    two = fullsize.Cell(1, 1, "step", (7.0, 9.0, 11.0))
    found = fullsize._difference([(1.0, one), (-1.0, two)])
    spread = 1 / 3 + 4 / 3
    df = int(spread**2 / ((1 / 9) / 2 + (16 / 9) / 2))
    assert df == 2
    assert found.value == 1.0
    assert found.high - found.value == pytest.approx(4.30265 * math.sqrt(spread), rel=1e-5)


def test_requests_alike_to_the_last_digit_are_no_certainty(data):
    for head in fullsize.HEADS:
        data["arms"][f"humming-{head}-plain"]["contexts"]["1024"]["ms"] = [4.9, 4.9]
    found = fullsize.of(data).effect("fp8-head", "plain", 1024)
    assert found.low is not None  # the other kernels' arms have a spread
    found = fullsize.of(data).factor("humming-bf16-plain", "humming-fp8-plain", 1024)
    assert (found.value, found.low, found.n) == (1.0, None, 2)


def test_one_request_tells_no_interval(data):
    data["arms"]["humming-fp8-plain"]["contexts"]["1024"]["ms"] = [4.9]
    found = fullsize.of(data).effect("fp8-head", "plain", 1024)
    assert found.low is None and found.n == 1


@pytest.mark.parametrize(
    ("saved", "noise", "enough"), [(0.1, 1e-5, True), (0.05, 1e-5, False), (0.08, 0.01, None)]
)
def test_the_heads_time_is_put_against_its_bytes(data, saved, noise, enough):
    """401,762,304 bytes at 4 TB/s are worth 0.10044 ms a step, four times as much a round."""
    arms = data["arms"]
    arms["humming-bf16-plain"]["contexts"]["1024"] = cell(5.0, "step", noise)
    arms["humming-fp8-plain"]["contexts"]["1024"] = cell(5.0 - saved, "step", noise)
    found = {(s.kernels, s.mode, s.context): s for s in fullsize.of(data).savings()}
    assert len(found) == 8
    one = found["humming", "plain", 1024]
    assert one.worth_ms == pytest.approx(0.10044, rel=1e-4) and one.products == 1
    assert one.share.value == pytest.approx(saved / 0.10044, rel=1e-3)
    assert one.enough is enough
    assert found["humming", "nextn", 1024].worth_ms == pytest.approx(4 * one.worth_ms)


def test_a_missing_arm_is_named_and_nothing_is_made_up(data):
    del data["arms"]["marlin-fp8-nextn"]
    data["unmeasured"] = {"marlin-fp8-nextn": "it was not ready within 5 s"}
    record = fullsize.of(data)
    assert record.missing == ["marlin-fp8-nextn at 1,024", "marlin-fp8-nextn at 32,768"]
    assert record.effect("humming", "plain", 1024).value == pytest.approx(1.2, rel=1e-6)
    assert record.round_cost("marlin", "fp8", 1024) is None
    assert record.interaction("nextn", 1024) is None
    shown = show_fullsize.table(record).text
    assert shown.count("not measured") == 3 and "it was not ready within 5 s" in shown


def test_an_effect_is_averaged_over_what_was_measured_and_says_so(data):
    for context in ("1024", "32768"):  # another factor at FP8, which is left out below
        data["arms"]["humming-fp8-nextn"]["contexts"][context]["ms"] = [1.0, 1.001, 1.002]
    del data["arms"]["marlin-fp8-nextn"]
    record = fullsize.of(data)
    assert record.settings("humming", "nextn", 1024) == ["bf16"]
    assert record.settings("fp8-head", "nextn", 1024) == ["humming"]
    assert record.settings("humming", "plain", 1024) == ["bf16", "fp8"]
    assert record.effect("humming", "nextn", 1024).value == pytest.approx(1.2, rel=1e-6)
    assert "bf16 alone" in show_fullsize.effects_table(record).html
    del data["arms"]["marlin-bf16-nextn"]
    assert fullsize.of(data).effect("humming", "nextn", 1024) is None


def test_tables_show_every_arm_with_its_n(data):
    data["arms"]["stock"] = copy.deepcopy(data["arms"]["humming-bf16-plain"])
    data["arms"]["stock"]["contexts"]["1024"] = cell(4.0, "step")
    data["arms"]["unshared"] = {
        "contexts": {},
        "error": "ended",
        "raised": "NotImplementedError: x",
    }
    record = fullsize.of(data)
    text = show_fullsize.table(record).text
    assert text.count("(n=3)") == 16 and "5.000 [4.995, 5.005] (n=3)" in text
    extras = show_fullsize.extras_table(record).text
    assert "x 1.2500" in extras and "NotImplementedError: x" in extras and "trap" not in extras
    effects = show_fullsize.effects_table(record).text
    assert "x 1.2000" in effects and "1.600" in effects
    assert "401.8" in show_fullsize.head_table(record).text
    shown = show_fullsize.picture(record)
    assert shown.png.startswith(b"\x89PNG") and "Marlin, BF16 head, plain: 6.000" in shown.text


def test_a_wrong_file_is_one_sentence(data, tmp_path):
    path = tmp_path / "record.json"
    with pytest.raises(UsageError, match="Cannot read"):
        fullsize.read(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        fullsize.read(path)
    for broken in (
        {"schema": "other"},
        {"arms": {"a": {"contexts": {"1": {"ms": []}}}}},
        {"arms": {"a": {"contexts": {"1": cell(float("nan"), "step")}}}},
        {"date": 0},
    ):
        path.write_text(json.dumps({**data, **broken} if broken != {"date": 0} else [1]))
        with pytest.raises(UsageError, match="not one of"):
            fullsize.read(path)
    with pytest.raises(UsageError, match="no switch"):
        fullsize.of(data).effect("nextn", "plain", 1024)


def test_the_record_of_the_library_shows_the_switches_live_and_right():
    """What was measured on a GPU, held: every limit applied, one head for both, no NaN, no gap hidden."""
    record = fullsize.recorded()
    assert not record.missing and not record.unmeasured
    for kernels, head, mode in product(fullsize.KERNELS, fullsize.HEADS, fullsize.MODES):
        arm = record.arms[fullsize.arm_name(kernels, head, mode)]
        facts = arm.facts
        assert {c: cell.n for c, cell in arm.cells.items()} == {1024: 5, 32768: 3}
        assert facts["moe"]["limits"] == {str(n): 4.0 for n in range(35, 42)}
        assert not facts["moe"]["wrong_limits"] and not facts["moe"]["wrong_shared_limits"]
        assert facts["expert_layers"] == facts["moe"]["layers"] == (41 if mode == "nextn" else 40)
        assert facts["head"]["bytes_before"] == 157_184 * 2_560 * 2
        if head == "fp8":
            assert facts["head"]["bytes_after"] == 157_184 * (2_560 + 4)
            assert facts["head"]["kernel"] == "sparkling-cuda" and facts["head"]["applied"] > 0
        if mode == "nextn":
            assert facts["draft"]["head_shared"]
            assert facts["draft"]["head_is_target_module"] is (head == "fp8")
        # Humming is live, and only where it should be.
        assert bool(facts.get("humming")) is (kernels == "humming")
        assert arm.gpu == ("0" if kernels == "humming" else "1")
        for cell in arm.cells.values():
            assert max(cell.ms) / min(cell.ms) < 1.01
            assert cell.accept_length == (1.0 if mode == "nextn" else None)
    assert not any(s.enough is False for s in record.savings())
    assert all(s.share.value > 0.79 for s in record.savings())
    assert "addmm_cuda" in record.arms["unshared"].facts["raised"]
    limited = [str(n) for n in range(35, 42)]
    for name in ("clamp-off", "clamp-off-nextn"):
        assert record.arms[name].facts["moe"]["wrong_limits"] == limited
    for name, against in FREE.items():
        for (
            context
        ) in record.contexts:  # neither the clamp nor the status file costs half a percent
            assert abs(record.factor(against, name, context).value - 1) < 0.005


FREE = {
    "stock": "humming-bf16-plain",
    "clamp-off": "humming-fp8-plain",
    "clamp-off-nextn": "humming-fp8-nextn",
}


def test_the_recorded_trap_is_slower_than_everything_off():
    record = fullsize.recorded()
    trap = record.arms["trap"]
    assert trap.facts["env"]["SPARKLING_TRAP"] == "tensor-only"
    for context, cell in trap.cells.items():
        off = record.cell("stock", context)
        assert cell.of == "round" and cell.accept_length == 1.0
        assert min(cell.ms) / cell.accept_length > 2 * max(off.ms)
        assert record.factor("humming-fp8-nextn", "trap", context).high < 1


def test_the_gpus_part_in_hummings_effect_is_shown(data):
    record = fullsize.recorded()
    assert record.arms["swap"].gpu == record.arms["marlin-bf16-plain"].gpu != "0"
    text = show_fullsize.effects_table(record).text
    for against in ("humming-bf16-plain", "marlin-bf16-plain"):
        assert f"x {record.factor(against, 'swap', 1024).text(4)}" in text
    # One GPU, or none that says which: nothing to take apart.
    assert "instead of the other" not in show_fullsize.effects_table(fullsize.of(data)).text
    data["arms"]["swap"] = copy.deepcopy(data["arms"]["humming-bf16-plain"]) | {"gpu": "7"}
    assert "instead of the other" not in show_fullsize.effects_table(fullsize.of(data)).text


def test_a_round_has_as_many_products_of_the_head_as_the_saving_counts():
    """The same requests were made of both servers, and with no draft accepted a round makes a token."""
    arms = fullsize.recorded().arms
    plain, nextn = (
        arms[fullsize.arm_name("humming", "fp8", mode)].facts["head"]["applied"]
        for mode in fullsize.MODES
    )
    counted = {saving.mode: saving.products for saving in fullsize.recorded().savings()}
    # The file is up to half a second behind: some 75 steps of nearly 2,000.
    assert nextn / plain == pytest.approx(counted["nextn"] / counted["plain"], rel=0.05)


def test_outputs_of_the_record_are_not_one_token_over_and_over():
    """As logits would give that are NaN, or the same whatever the token."""
    data = json.loads(fullsize.RECORDED.read_text("utf-8"))
    for name, arm in data["arms"].items():
        for cell in arm["contexts"].values():
            assert min(cell["distinct"]) > 0.9 * cell["tokens"], name


def test_the_design_quotes_the_record(root):
    text = (root / "docs" / "design.md").read_text("utf-8")
    record = fullsize.recorded()
    order = list(product(reversed(fullsize.KERNELS), record.contexts))
    for head, mode in product(fullsize.HEADS, fullsize.MODES):
        cells = [record.cell(fullsize.arm_name(k, head, mode), c) for k, c in order]
        assert " | ".join(cell.text().partition(" (")[0] for cell in cells) in text
    savings = {(s.kernels, s.mode, s.context): s for s in record.savings()}
    for mode in fullsize.MODES:
        shares = [savings[k, mode, c].share.text().partition(" (")[0] for k, c in order]
        assert " | ".join(shares) in text
    text = " ".join(text.split())
    enough = [s.enough for s in savings.values()]
    wholly, spans = enough.count(True), enough.count(None)
    assert f"Of {_word(len(enough))} shares of its bytes' worth {wholly} are wholly" in text
    assert f"{spans} have an interval that spans it" in text and wholly + spans == len(enough)
    open_ = {(s.kernels, s.mode, s.context) for s in savings.values() if s.enough is None}
    assert open_ == {
        ("marlin", "plain", 1024),
        ("marlin", "plain", 32768),
        ("humming", "nextn", 32768),
    }

    factors = [record.factor(a, name, c).value for name, a in FREE.items() for c in record.contexts]
    assert f"{min(factors):.3f} to {max(factors):.3f}); a server without" in text
    both = [record.interaction(m, c).value for m in fullsize.MODES for c in record.contexts]
    assert f"gain {min(both):.3f} to {max(both):.3f} times the product" in text
    alone = [
        record.factor(f"{k}-bf16-plain", f"{k}-fp8-plain", 1024).value for k in fullsize.KERNELS
    ]
    assert "head alone gains {:.3f} with Marlin and {:.3f} with Humming".format(*alone) in text
    assert all(abs(factor - 1) < 0.00105 for factor in factors) and "within 0.1 % of each" in text
    step, round_, long = (
        f"{record.effect('fp8-head', mode, context).value:.3f}"
        for mode, context in (("plain", 1024), ("nextn", 1024), ("nextn", 32768))
    )
    assert f"(a rate {round_} times as high), is above either spread; in a step ({step})" in text
    assert f"in a long round ({long}) it is above the first" in text

    swaps = {f"{record.factor('humming-bf16-plain', 'swap', c).value:.3f}" for c in record.contexts}
    assert [f"was {one} times as fast on GPU 1" in text for one in swaps] == [True]
    slower = record.factor("marlin-bf16-plain", "swap", 1024).text(3).partition(" (")[0]
    assert f"Humming's rate is {slower} times Marlin's" in text
    earlier = fullsize.read(root / "tests" / "data" / "h200" / "full-size-humming.json")
    names = [fullsize.arm_name("humming", *x) for x in product(fullsize.HEADS, fullsize.MODES)]
    short, long = (
        [earlier.cell(n, context).median / record.cell(n, context).median for n in names]
        for context in record.contexts
    )
    assert f"were {min(short):.3f} to {max(short):.3f} times these at 1,024 tokens" in text
    assert f"tokens and {min(long):.3f} to {max(long):.3f} at 32,768." in text


def test_the_design_quotes_the_records_trap_rounds_and_starts(root):
    text = " ".join((root / "docs" / "design.md").read_text("utf-8").split())
    record = fullsize.recorded()
    trap, right, off, marlin = (
        record.cell(name, 1024).median
        for name in ("trap", "humming-fp8-nextn", "stock", "marlin-bf16-plain")
    )
    assert f"last {trap:.3f} ms instead of {right:.3f}:" in text
    assert (
        f"{1000 / trap:.0f} tokens/s, and without that slowness still {1000 / right:.0f}, where Humming "
        f"without our switches has {1000 / off:.0f} and Marlin with a BF16 head {1000 / marlin:.0f}."
    ) in text
    trained = [
        "{greedy:.2f} {repeated:.2f} {sampled:.2f}".format(
            **json.loads((root / "tests/data/sparklet" / name).read_text("utf-8"))["accept_length"]
        ).split()
        for name in ("h200-trap.json", "h200-fp8-nextn.json")
    ]
    words = "{} (greedy), {} (repeating text) and {} (sampled) instead of {}, {} and {}."
    assert words.format(*trained[0], *trained[1]) in text
    cost = {
        (kernels, context): " and ".join(
            f"{record.round_cost(kernels, head, context).value:.1f}" for head in fullsize.HEADS
        )
        for kernels, context in product(fullsize.KERNELS, record.contexts)
    }
    short, long = record.contexts
    assert (
        f"a round costs {cost['humming', long]} steps (Humming, BF16 and FP8 head; Marlin "
        f"{cost['marlin', long]}) instead of {cost['humming', short]} ({cost['marlin', short]}):"
    ) in text
    ready = {n: a.facts["start"] for n, a in record.arms.items() if a.facts.get("start")}
    first = [ready.pop(f"{k}-bf16-plain")["load_to_ready_s"] for k in ("humming", "marlin")]
    made = record.arms["humming-bf16-plain"].facts["humming"]
    assert (
        f"took {first[0]:.0f} s (Humming) and {first[1]:.0f} s (Marlin) from imports to ready"
    ) in text
    assert f"Humming's {made['compiled']} kernels took {made['compile_s']:.0f} s" in text
    later = [start["load_to_ready_s"] for start in ready.values()]
    assert f"later ones took {min(later):.0f} to {max(later):.0f} s" in text
    earlier = fullsize.read(root / "tests" / "data" / "h200" / "full-size-humming.json")
    assert "not ready within 330 s" in earlier.unmeasured["marlin-bf16-plain"]


def test_the_report_on_the_clamp_quotes_the_record(root):
    text = " ".join((root / "docs" / "upstream" / "swiglu-clamp.md").read_text("utf-8").split())
    on, off, round_on, round_off = (
        fullsize.recorded().cell(name, 1024).text().partition(" (n=5)")[0]
        for name in ("humming-fp8-plain", "clamp-off", "humming-fp8-nextn", "clamp-off-nextn")
    )
    assert (
        f"a step took {on} ms with it and {off} without, a round of NEXTN {round_on} and {round_off}."
        in text
    )


def _word(number: int) -> str:
    return ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"][number]


def _prose(root, name: str) -> str:
    cells = json.loads((root / "notebooks" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return " ".join(text.split())


def test_the_notebooks_quote_the_record(root):
    record = fullsize.recorded()
    nextn = _prose(root, "70_nextn")
    for context in record.contexts:
        step, round_ = (record.cell(f"humming-fp8-{m}", context) for m in fullsize.MODES)
        cost = record.round_cost("humming", "fp8", context).value
        row = f"| {step.median:.2f} ms | {round_.median:.2f} ms | {cost:.2f} |"
        _, found, after = nextn.partition(row)
        assert found and f"n = {step.n} |" in after.partition("one Spark")[0]
    short = record.round_cost("humming", "fp8", record.contexts[0]).value
    assert f"pays there from an accept length of {short:.2f} on" in nextn
    slower = record.factor("marlin-bf16-plain", "swap", 1024)
    said = (
        f"its rate was {slower.value:.3f} times Marlin's (a step on the same GPU, BF16 head, 1,024"
    )
    assert slower.high < 1 and said in _prose(root, "50_humming")
    assert f"n = {slower.n};" in _prose(root, "50_humming")
    plain = [a for a in record.arms.values() if "humming" in a.facts and "draft" not in a.facts]
    plain = [a.facts["start"]["load_to_ready_s"] for a in [*plain, record.arms["stock"]]]
    first, later = max(plain), sorted(plain)[:-1]
    assert (
        f"ready after {first:.0f} s, later ones after {later[0]:.0f} to {later[-1]:.0f} s"
    ) in _prose(root, "50_humming")
    assert f"n = 1 and {len(later)})" in _prose(root, "50_humming")
    four = shapes.recorded().cost(shapes.recorded().expert_case(4))
    said = f"choose for themselves cost {four.value:.2f} times as much as one"
    assert said in _prose(root, "50_humming")
    shares = [s.share.value for s in record.savings()]
    said = (
        f"shorter by {min(shares):.1f} to {max(shares):.1f} times what the missing bytes are worth"
    )
    assert said in _prose(root, "60_fp8_lm_head")
    # "twice a step with everything off", "Marlin's experts were the faster ones", in every cell.
    for context in record.contexts:
        for head, mode in product(fullsize.HEADS, fullsize.MODES):
            marlin, humming = (
                record.cell(fullsize.arm_name(k, head, mode), context) for k in fullsize.KERNELS
            )
            assert max(marlin.ms) < min(humming.ms)
