"""The cost model: its algebra, the recorded H200, the published puzzle, and a run of our own rows."""

from __future__ import annotations

import dataclasses
import json
import struct
from types import SimpleNamespace

import pytest
from sparkling import (
    canvas,
    cli,
    cost_recorded,
    costmodel,
    devices,
    fullsize,
    inventory,
    published,
    puzzle,
    show_cost,
    store,
    traffic,
)
from sparkling.costmodel import Range
from sparkling.errors import UsageError


@pytest.fixture(scope="module")
def flash():
    return inventory.inventory(inventory.FLASH)


@pytest.fixture(scope="module")
def spark():
    return devices.device("spark")


# -- devices ---------------------------------------------------------------------------------------


def test_the_known_devices(spark):
    assert spark.bandwidth == 273e9 and spark.kind == "stated"
    assert devices.device("h200").bandwidth == 4333e9
    assert spark.bandwidth == published.value("spark_bandwidth") * 1e9
    assert devices.of_gpus(["NVIDIA GB10"]) is spark
    assert devices.of_gpus(["NVIDIA H200"]).id == "h200"
    assert devices.of_gpus(["NVIDIA H100"]) is None
    with pytest.raises(UsageError, match="did you mean spark"):
        devices.device("sparc")


def test_this_machine_is_measured_with_n_and_spread():
    here = devices.measure_here(mib=16, repeats=5, threads=2)
    assert here.n == 5 and here.kind == "measured"
    assert 0 < here.low <= here.bandwidth <= here.high
    assert "median of n=5" in here.text()
    with pytest.raises(UsageError):
        devices.measure_here(mib=0)


# -- algebra ---------------------------------------------------------------------------------------


def test_effective_bandwidth(flash, spark):
    step = flash.step_bytes()
    at_half = costmodel.effective(step, 2 * step.total / spark.bandwidth, spark)
    assert at_half.share == pytest.approx(0.5) and at_half.bound
    assert at_half.bandwidth == pytest.approx(136.5e9)
    assert not costmodel.effective(step, 1.0, spark).bound
    with pytest.raises(UsageError):
        costmodel.effective(step, 0.0, spark)


def test_break_even_is_where_the_gain_is_one():
    assert costmodel.spec_gain(costmodel.break_even(1.62), 1.62) == 1.0
    assert costmodel.spec_gain(3.90, published.value("post_implied_round_cost")) == pytest.approx(
        published.value("post_nextn_ratio")
    )
    with pytest.raises(UsageError):
        costmodel.break_even(0.0)


def test_the_implied_union_is_the_inverse_of_the_cost(flash):
    for union in (8.0, 17.5, 30.0):
        cost = costmodel.byte_cost(flash, union=union, head="FP8", context=500)
        found = costmodel.implied_union(flash, cost, head="FP8", context=500)
        assert found == pytest.approx(union)
    span = costmodel.byte_costs(flash)
    assert costmodel.implied_union(flash, span.high + 0.01) is None
    assert costmodel.implied_union(flash, span.low - 0.01) is None


def test_the_two_readings_meet_where_memory_is_the_only_limit(flash, spark):
    """A step that takes exactly its bytes at the ceiling: both readings say the same."""
    step_s = flash.step_bytes().seconds(spark.bandwidth)
    gain = costmodel.predict_head(flash, step_s, spark).gain
    assert gain.low == pytest.approx(gain.high)
    cost = costmodel.round_cost(flash, step_s, spark)
    span = costmodel.byte_costs(flash)
    assert (cost.low, cost.high) == pytest.approx((span.low, span.high))


def test_a_step_shorter_than_its_head_is_refused(flash, spark):
    with pytest.raises(UsageError, match="shorter than reading half the head"):
        costmodel.predict_head(flash, 0.001, spark)


def test_the_verdict_looks_at_the_interval():
    def verdict(measured, low, high):
        return costmodel.Prediction("s", "d", Range(1.0, 1.1), "", measured, low, high).verdict

    assert verdict(1.05, 1.0, 1.2) == "within"
    assert verdict(0.99, 0.98, 1.0) == "within"  # the interval reaches it
    assert verdict(0.9, 0.8, 0.95).startswith("below")
    assert verdict(1.3, 1.2, 1.4).startswith("above")
    assert verdict(None, None, None) == "not measured"


# -- the H200 --------------------------------------------------------------------------------------


def test_bytes_say_what_a_short_round_costs_and_not_a_long_one():
    found = cost_recorded.predictions()
    assert len(found) == 8 and all(p.low < p.measured < p.high for p in found)
    for one in found:
        short = "1,024 tokens before, n=5" in one.source
        assert short or "32,768 tokens before, n=3" in one.source
        if one.switch == "nextn":
            # A round of eight steps is no question of bytes: attention verifies, slowly.
            assert one.verdict.startswith("within" if short else "below")
            assert (1 / one.measured < 1.7) is short and (1 / one.measured > 8) is not short
        else:  # the head gains what the lower end says: a hundredth
            assert abs(one.measured - one.gain.low) < 0.005


def test_the_notebook_s_words_on_the_record_are_its_figures(root):
    cells = json.loads((root / "notebooks" / "appendix_cost_model.ipynb").read_text())["cells"]
    text = " ".join("".join("".join(c["source"]) for c in cells if c["id"] == "h200").split())
    record = fullsize.recorded()
    step = record.cell("humming-bf16-plain", 1024)
    needed = (
        inventory.inventory(inventory.FLASH).step_bytes(context=1024).total
        / devices.device("h200").bandwidth
    )
    assert (
        f"took {step.median:.2f} ms with Humming where its bytes need {1000 * needed:.2f}" in text
    )
    costs = [record.round_cost(k, h, 32768).value for k in fullsize.KERNELS for h in fullsize.HEADS]
    assert {round(c) for c in costs} == {8} and "a round costs about eight steps" in text


def test_a_head_of_any_size_is_told_in_whole_numbers(flash):
    spark = devices.device("spark")
    assert "402 MB of 4,9" in costmodel.predict_head(flash, 0.026, spark, context=1024).why
    # More than four digits, and no 1.3e+04.
    assert "402 MB of 13,0" in costmodel.predict_head(flash, 0.5, spark, context=1_000_000).why


def test_what_a_record_lacks_is_not_predicted():
    record = fullsize.recorded()
    arms = {
        n: a for n, a in record.arms.items() if n not in ("marlin-bf16-plain", "humming-fp8-plain")
    }
    found = cost_recorded.predictions(dataclasses.replace(record, arms=arms))
    assert [one.switch for one in found] == ["nextn", "nextn"]


def test_the_head_is_read_four_times_in_a_recorded_round():
    """The round lost 0.24 ms with the FP8 head, a step 0.055: four reads, as `traffic` counts."""
    data = costmodel.recorded()
    mean = {name: sum(arm["ms"]) / len(arm["ms"]) for name, arm in data["arms"].items()}
    step = mean["humming"] - mean["humming-fp8-head"]
    whole = mean["humming-nextn"] - data["summaries"]["all-three"]["ms"]
    assert whole / step == pytest.approx(4, abs=0.5)


def test_the_counted_union_is_near_the_expected_one():
    counted = costmodel.recorded()["kernels"]["union_of_4"]
    assert counted == pytest.approx(traffic.union(4), rel=0.02)


# -- the puzzle ------------------------------------------------------------------------------------


def test_the_published_puzzle_is_settled(flash):
    found = puzzle.settle()
    assert 0.65 < found.baseline_share < 0.75
    # Humming and FP8 together are published with +9 %: what the head's bytes give at most.
    assert published.value("humming_fp8_gain") == pytest.approx(found.head_gain.high, abs=0.5)
    assert published.value("fp8_head_gain") > found.head_gain.high
    # All three on GSM8K: bytes with independent experts come within 2 % of the published rate.
    assert found.all_rate == pytest.approx(published.value("gsm8k_all_rate"), rel=0.02)
    # The sampled round exceeds the bytes by about what sampling is said to cost.
    assert found.gsm8k_implied > found.gsm8k_cost.high
    excess = found.gsm8k_implied - found.gsm8k_cost.high
    assert excess == pytest.approx(found.sampling_steps, abs=0.05)
    # The synthetic round is cheaper than independent experts allow, and dearer than equal ones.
    assert found.post_implied in found.post_cost
    assert 8 < found.post_union < 0.7 * found.expected_union
    assert json.loads(json.dumps(found.to_json()))["post_implied"] == found.post_implied


def test_the_puzzle_in_words():
    text = str(show_cost.puzzle(puzzle.settle()))
    for figure in ("102.88", "36.09", "43.94", "2.34", "1.67", "2.29", "2.68", "at most"):
        assert figure in text
    assert "none measured by us" in text.replace("\n", " ")


# -- a run -----------------------------------------------------------------------------------------


def row(arm, prompt, tokens, seconds, switches, spec=None, machine=None):
    return {
        "arm": arm,
        "arm_hash": arm,
        "workload": "short",
        "prompt": prompt,
        "repeat": 0,
        "complete": True,
        "problem": None,
        "switches": switches,
        "prompt_tokens": 1000,
        "completion_tokens": tokens + 1,
        "decode_tokens": tokens,
        "decode_s": seconds,
        "decode_rate": tokens / seconds,
        "decode_method": "counted",
        "ttft_s": 0.1,
        "e2e_s": seconds + 0.1,
        "tpot_s": seconds / tokens,
        "chunk_times_s": [0.1, 0.1 + seconds],
        "spec": spec,
        "accept_source": "reply" if spec else None,
        "machine": machine or {"gpus": ["NVIDIA GB10"]},
        "machine_id": "m",
        "model_id": "x",
        "case_hash": prompt,
        "settings": {"sampling": {"temperature": 0.0}, "max_tokens": tokens},
        "regime": "r",
        "fingerprint": prompt,
        "cached_tokens": 0,
    }


def rows_of(gain_head, round_cost):
    """Three arms over five prompts: a plain step of 26 ms, an FP8 head, rounds of 2.5 tokens."""
    base = {"humming": True, "fp8-head": False, "nextn": False}
    head, spec = {**base, "fp8-head": True}, {**base, "fp8-head": True, "nextn": True}
    step = 0.026 / gain_head
    out = []
    for i in range(5):
        wobble = 1 + 0.001 * i
        counts = {"tokens": 250, "rounds": 100, "correct": 150, "proposed": 300, "source": "reply"}
        out.append(row("humming", str(i), 250, 250 * 0.026 * wobble, base))
        out.append(row("fp8-head", str(i), 250, 250 * step * wobble, head))
        seconds = 100 * round_cost * step * wobble
        out.append(row("nextn", str(i), 250, seconds, spec, counts))
    return out


def test_a_run_beside_its_prediction(flash, spark):
    head, nextn = costmodel.run_predictions(rows_of(1.07, 1.9), flash, spark)
    assert (head.switch, nextn.switch) == ("fp8-head", "nextn")
    assert head.measured == pytest.approx(1.07) and head.verdict == "within"
    assert nextn.measured == pytest.approx(2.5 / 1.9, rel=1e-3) and nextn.verdict == "within"
    assert "humming to fp8-head" in head.source and "n=5" in head.source
    worse = costmodel.run_predictions(rows_of(0.9, 3.5), flash, spark)
    assert all(one.verdict.startswith("below") for one in worse)
    better = costmodel.run_predictions(rows_of(1.3, 1.02), flash, spark)
    assert all(one.verdict.startswith("above") for one in better)


def test_a_run_in_bytes_a_second(flash, spark):
    arms = {arm.arm: arm for arm in costmodel.measured(rows_of(1.07, 1.9), flash, spark)}
    assert arms["humming"].what == "step" and arms["nextn"].what == "round"
    assert arms["humming"].seconds == pytest.approx(0.026, rel=0.01)
    expected = flash.step_bytes(context=1126).total
    assert arms["humming"].bytes == pytest.approx(expected, rel=1e-4)
    assert arms["fp8-head"].bytes < arms["humming"].bytes
    assert arms["nextn"].seconds == pytest.approx(1.9 * 0.026 / 1.07, rel=0.01)
    assert all(arm.effective.bound and arm.n == 5 for arm in arms.values())
    text = str(show_cost.measured(list(arms.values()), spark))
    assert "Memory is the limit." in text


def test_arms_that_differ_in_two_switches_are_not_compared(flash, spark):
    rows = [r for r in rows_of(1.07, 1.9) if r["arm"] != "fp8-head"]
    assert costmodel.run_predictions(rows, flash, spark) == []


@pytest.fixture
def nb(root, tmp_path):
    """A notebook's session, as far as `show_cost.run` looks at it."""
    lane = SimpleNamespace(
        root=root,
        recipe_path=root / "env" / "recipes" / "sparklet.toml",
        model=root / "models" / "sparklet",
        runs=tmp_path / "runs",
    )
    return SimpleNamespace(lane=lane, run=store.open_run(lane.runs, notebook="80_live_evaluation"))


def test_a_notebook_s_own_run_comes_first(nb, spark):
    text = str(show_cost.run(nb, spark))
    assert "No run on this machine holds measurements yet" in text
    for one in rows_of(1.07, 1.9):
        nb.run.append("rows", {**one, "recipe": "sparklet"})
    text = str(show_cost.run(nb, spark)).replace("\n", " ")
    assert f"Run {nb.run.id}, sparklet" in text and "Memory is not the limit here" in text
    assert "Predicted against measured" in text
    # Another notebook's run finds it as the newest one.
    later = SimpleNamespace(lane=nb.lane, run=store.open_run(nb.lane.runs, notebook="x"))
    assert f"Run {nb.run.id}, sparklet" in str(show_cost.run(later, spark))


def test_a_run_that_cannot_be_compared_is_a_sentence(nb, spark):
    for one in rows_of(1.07, 1.9):
        nb.run.append("rows", {**one, "recipe": "none-of-ours"})
    text = str(show_cost.run(nb, spark))
    assert "cannot be compared with the cost model" in text and "none-of-ours" in text
    nb.run.append("rows", {**rows_of(1, 2)[0], "arm_hash": "another", "recipe": "sparklet"})
    assert "cannot be compared" in str(show_cost.run(nb, spark))


# -- pictures --------------------------------------------------------------------------------------


def test_the_pictures_are_small_and_have_words(flash, spark):
    arms = costmodel.measured(rows_of(1.07, 1.9), flash, spark)
    made = [
        show_cost.inventory_picture(flash),
        show_cost.steps_picture(flash, context=1000),
        show_cost.union_picture(flash, {4: 30.8}),
        show_cost.break_even_picture(flash, arms=arms),
    ]
    for view in made:
        assert view.png.startswith(b"\x89PNG") and 5_000 < len(view.png) <= canvas.MAX_BYTES
        assert struct.unpack(">I", view.png[16:20]) == (960,)  # none had to be drawn coarser
        assert len(str(view)) > 80
    assert "30.8" in str(made[2])


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def here(root, monkeypatch):
    """No GPU and no run of the machine's own decides what is printed."""
    monkeypatch.setenv("SPARKLING_LANE", "cpu")
    monkeypatch.setenv("SPARKLING_ROOT", str(root))
    quick = devices.measure_here(mib=4, repeats=3)
    monkeypatch.setattr(devices, "measure_here", lambda: quick)


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_inventory_of_the_full_size_model_without_one(capsys, here):
    code, out, _ = run(capsys, "inventory", "--recipe", "ling-3.0-flash")
    assert code == 0 and "70.42 GB" in out and "LM head" in out
    assert "61,440" in out and "< 0.01" in out and "e-05" not in out
    code, out, _ = run(capsys, "inventory", "--recipe", "ling-3.0-flash", "--json")
    found = json.loads(out)
    parts = {(c["name"], c["dtype"]): c["bytes"] for c in found["components"]}
    assert parts[("LM head", "BF16")] == 804_782_080


def test_inventory_of_a_folder(capsys, root, tmp_path):
    code, out, _ = run(capsys, "inventory", str(root / "models" / "sparklet"))
    assert code == 0 and "headers of 517 tensors" in out
    code, _, err = run(capsys, "inventory", str(tmp_path))
    assert code == 2 and err.startswith("error: There is no checkpoint")
    code, _, err = run(capsys, "inventory", str(tmp_path), "--recipe", "sparklet")
    assert code == 2 and "not both" in err


def test_costmodel_prints_everything(capsys, here):
    code, out, _ = run(capsys, "costmodel", "--recipe", "ling-3.0-flash")
    assert code == 0
    for words in (
        "Bytes of one decode step",
        "round of 3 drafts",
        "DGX Spark",
        "reconciled",
    ):
        assert words in out
    code, out, _ = run(capsys, "costmodel", "--recipe", "ling-3.0-flash", "--json")
    found = json.loads(out)
    assert found["bytes"]["FP8"]["round_cost"] == pytest.approx([1.404, 2.057], abs=0.001)
    assert found["published"]["post_implied"] == pytest.approx(1.6657, abs=1e-4)
    assert {one["id"] for one in found["devices"]} == {"spark", "h200", "here"}


def test_costmodel_with_a_run(capsys, here, tmp_path):
    folder = tmp_path / "run" / "80_live_evaluation"
    folder.mkdir(parents=True)
    lines = [json.dumps(row) for row in rows_of(1.07, 1.9)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = run(
        capsys, "costmodel", "--recipe", "ling-3.0-flash", "--run", str(tmp_path / "run"), "--json"
    )
    found = json.loads(out)
    assert code == 0 and len(found["predictions"]) == 2
    assert all(one["device"] == "spark" for one in found["predictions"])
    assert [one["verdict"] for one in found["predictions"]] == ["within", "within"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--context", "-1"], "--context -1 is impossible"),
        (["--device", "h300"], "no device 'h300'"),
        (["--run", "./nothing"], "There is no run"),
        (["--checkpoint", "/nothing"], "There is no checkpoint"),
    ],
)
def test_costmodel_refuses(capsys, here, argv, sentence):
    code, _, err = run(capsys, "costmodel", *argv)
    assert code == 2 and sentence in err and err.count("\n") == 1


def test_an_unknown_gpu_needs_a_device(capsys, here, tmp_path):
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "rows.jsonl").write_text(
        json.dumps(row("a", "0", 10, 1.0, {}, machine={"gpus": ["NVIDIA X"]})) + "\n"
    )
    run_option = ["--recipe", "ling-3.0-flash", "--run", str(tmp_path)]
    code, _, err = run(capsys, "costmodel", *run_option)
    assert code == 2 and "NVIDIA X" in err and "--device" in err
    code, _, _ = run(capsys, "costmodel", *run_option, "--device", "here")
    assert code == 0


def test_the_lane_s_checkpoint_is_the_default(capsys, here, monkeypatch, root, tmp_path):
    monkeypatch.setenv("SPARKLING_MODEL", str(root / "models" / "sparklet"))
    code, out, _ = run(capsys, "inventory")
    assert code == 0 and "What sparklet consists of" in out
    monkeypatch.setenv("SPARKLING_MODEL", str(tmp_path))  # not there yet: the full-size model
    code, out, _ = run(capsys, "inventory")
    assert code == 0 and "the sizes that come with this package" in out


def test_rows_of_several_users_are_no_steps(capsys, here, tmp_path):
    folder = tmp_path / "run" / "90_users"
    folder.mkdir(parents=True)
    rows = [{**one, "users": 4} for one in rows_of(1.07, 1.9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    code, _, err = run(capsys, "costmodel", "--run", str(tmp_path / "run"))
    assert code == 2 and "no benchmark rows" in err


def test_a_run_without_rows(capsys, here, tmp_path):
    code, _, err = run(capsys, "costmodel", "--run", str(tmp_path))
    assert code == 2 and "no benchmark rows" in err
