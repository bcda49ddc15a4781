"""Records of the kernels: read, refused in one sentence, put against the limit, and measured here."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import (
    cli,
    fullsize,
    procs,
    shapes,
    shapes_live,
    shapes_round,
    show_shapes,
    show_shapes_more,
)
from sparkling.costmodel import Range
from sparkling.errors import SparklingError, UsageError
from sparkling.stats import Interval

EXPERT = 3 * 2560 * 768 * (0.5 + 1 / 32)
LIMIT = 4e12


def case(us: float, **more):
    return {"us": [us * (1 + 0.001 * i) for i in range(-4, 5)], "calls": 40, "graph": True, **more}


def experts(tokens: int, routing: str, union: float, us: float, part: str = "layer"):
    return case(
        us,
        backend="humming",
        tokens=tokens,
        routing=routing,
        part=part,
        union=[union] * 9,
        union_least=int(union),
        union_most=int(union) + 1,
        union_expected=union,
    )


def data() -> dict:
    """A record whose numbers are round: a limit of 4 TB/s, one token in 40 µs."""
    return {
        "schema": shapes.SCHEMA,
        "taken": "2026-11-30T00:00:00+00:00",
        "command": "python -m sparkling_sglang.bench_shapes --out x.json",
        "complete": True,
        "stopped": None,
        "failed": [],
        "device": {"name": "Made Up 1", "capability": "9.0", "sms": 10},
        "clocks": {"before": {"clocks.sm": "1980 MHz", "clocks.mem": "3201 MHz"}},
        "versions": {"torch": "2.11.0"},
        "bandwidth": {
            "bytes": 4 * 10**9,
            "best": "fast",
            "bytes_s": LIMIT,
            "ways": {
                "fast": case(1000.0),
                "slow": case(1300.0),
                "broken": {"error": "RuntimeError: no"},
            },
        },
        "head_shape": {"vocab": 157184, "hidden": 2560},
        "head": [
            case(210.0, format="BF16", rows=1, kernel="a", bytes=800 * 10**6, relative_error=0.002),
            case(105.0, format="FP8", rows=1, kernel="b", bytes=400 * 10**6, relative_error=0.03),
        ],
        "expert_shape": {"experts": 512, "top_k": 8, "hidden": 2560, "intermediate": 768},
        "backends": {"humming": {"expert_bytes_stored": EXPERT, "relative_error": 0.004}},
        "experts": [
            experts(1, "random", 8.0, 40.0),
            experts(4, "random", 31.25, 100.0),
            experts(4, "repeated", 8.0, 39.9),
            {**experts(8, "random", 60.0, 1.0), "error": "RuntimeError: no kernel"},
        ],
    }


def made(tmp_path: Path, change=None) -> Path:
    one = data()
    if change is not None:
        change(one)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(one))
    return path


@pytest.fixture
def record(tmp_path) -> shapes.Record:
    return shapes.read(made(tmp_path))


# -- what is computed ------------------------------------------------------------------------------


def test_times_and_shares_follow_from_bytes_and_the_limit(record):
    bf16, fp8 = record.head
    assert bf16.times.median == pytest.approx(210.0) and bf16.times.n == 9
    assert record.least_us(bf16) == pytest.approx(200.0)  # 800 MB at 4 TB/s
    assert record.share(bf16) == pytest.approx(200 / 210)
    assert record.share(fp8) == pytest.approx(100 / 105)
    one = record.expert_case(1, "repeated")
    assert one is record.expert_case(1) and one is not None
    assert record.moved(one) == pytest.approx(8 * EXPERT)
    assert record.least_us(one) == pytest.approx(8 * EXPERT / LIMIT * 1e6)


def test_quartiles_and_spread_are_of_the_samples(record):
    low, high = record.head[0].times.quartiles
    assert (low, high) == (pytest.approx(210 * 0.998), pytest.approx(210 * 1.002))


def test_cost_is_the_ratio_of_medians_with_an_interval_around_it(record):
    cost = record.cost(record.expert_case(4))
    assert cost.value == pytest.approx(2.5) and cost.n == 9
    assert cost.low < 2.5 < cost.high and cost.high - cost.low < 0.05


def test_a_cost_needs_one_token(tmp_path):
    found = shapes.read(made(tmp_path, lambda d: d["experts"].pop(0)))
    assert found.cost(found.experts[0]) is None and found.predicted(found.experts[0]) is None


def test_the_model_frames_the_cost_from_bytes(record):
    span = record.predicted(record.expert_case(4))
    union = 512 * (1 - (1 - 8 / 512) ** 4)
    added_us = (union - 8) * EXPERT / LIMIT * 1e6
    assert span.low == pytest.approx(1 + added_us / 40) and span.high == pytest.approx(union / 8)
    assert record.predicted(record.expert_case(4, "repeated")) == Range(1.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.3, 1.5, "within"),
        (0.9, 1.05, "within"),
        (2.02, 2.2, "within"),
        (2.1, 2.2, "above"),
        (0.8, 0.9, "below"),
    ],
)
def test_the_verdict_uses_the_interval(low, high, word):
    cost = Interval((low + high) / 2, low, high, 9, "x")
    assert shapes.verdict(cost, Range(1.0, 2.0)).startswith(word)


def test_what_failed_is_named_and_left_out(tmp_path):
    def change(d):
        d["failed"] = [{"part": "humming", "reason": "8 tokens: no kernel"}]
        d["stopped"] = "stopped at the limit of 9 s"

    found = shapes.read(made(tmp_path, change))
    assert found.missing == ("humming: 8 tokens: no kernel", "stopped at the limit of 9 s")
    assert found.expert_case(8) is None and set(found.readers) == {"fast", "slow"}


# -- what is refused -------------------------------------------------------------------------------

WRONG = {
    "schema": (lambda d: d.update(schema="other/1"), "its schema is 'other/1'"),
    "no limit": (lambda d: d.pop("bandwidth"), "bandwidth is missing"),
    "limit 0": (lambda d: d["bandwidth"].update(bytes_s=0), "bandwidth.bytes_s is not a number"),
    "infinite": (
        lambda d: d["bandwidth"].update(bytes_s=float("inf")),
        "bandwidth.bytes_s is not a number",
    ),
    "true": (lambda d: d["bandwidth"].update(bytes_s=True), "bandwidth.bytes_s"),
    "text": (lambda d: d["device"].update(name=3), "device.name is no text"),
    "samples": (lambda d: d["head"][1]["us"].__delitem__(slice(2, None)), "2 samples and 3"),
    "negative": (lambda d: d["head"][0]["us"].append(-1.0), "head[0].us is not a number"),
    "half": (lambda d: d["head"][0].update(rows=1.5), "must be a whole number"),
    "list": (lambda d: d.update(experts={}), "experts is no list"),
    "routing": (lambda d: d["experts"][1].update(routing="same"), "not random or repeated"),
    "backend": (lambda d: d["experts"][1].update(backend="x"), "of which backends says nothing"),
    "unions": (lambda d: d["experts"][1]["union"].pop(), "9 times and 8 unions"),
    "shape": (lambda d: d.pop("expert_shape"), "expert_shape is missing"),
    "case": (lambda d: d["experts"].append(7), "experts[4] is no table"),
    "reader": (lambda d: d["bandwidth"].update(best="x"), "of which bandwidth.ways has no times"),
    "broken reader": (lambda d: d["bandwidth"].update(best="broken"), "bandwidth.best is 'broken'"),
    "clocks": (lambda d: d["clocks"].update(after=["1980 MHz"]), "clocks.after is no table"),
    "version": (lambda d: d["versions"].update(torch=None), "versions.torch is missing"),
    "top k": (lambda d: d["expert_shape"].update(experts=4), "expert_shape.top_k is 8 of 4"),
    "no bytes": (
        lambda d: d["backends"]["humming"].update(expert_bytes_stored=0),
        "backends.humming.expert_bytes_stored is not a number",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, name):
    change, says = WRONG[name]
    path = made(tmp_path, change)
    with pytest.raises(UsageError) as refused:
        shapes.read(path)
    text = str(refused.value)
    assert text.startswith(f"{path} is no usable record of the kernels: ") and says in text
    assert text.endswith(".") and "\n" not in text


@pytest.mark.parametrize("content", ["", "[1", "[]", '"x"'])
def test_a_file_that_is_something_else_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="no "):
        shapes.read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        shapes.read(tmp_path / "absent.json")


def test_the_benchmark_has_the_same_words_and_the_same_rounding(root):
    """The benchmark runs in the server's Python, where this library is not."""
    folder = root / "lib/sparkling_sglang/sparkling_sglang"
    found = {}
    for name in ("bench_shapes", "shapes_experts"):
        for node in ast.parse((folder / f"{name}.py").read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with contextlib.suppress(ValueError):
                    found[node.targets[0].id] = ast.literal_eval(node.value)
    assert (found["SCHEMA"], found["PARTS"]) == (shapes.SCHEMA, shapes_live.PARTS)
    assert found["WRONG"] == shapes.ROUNDING


# -- what is shown ---------------------------------------------------------------------------------


def test_tables_carry_n_spread_and_definitions(record):
    text = show_shapes.head(record).html
    assert "<td>210.0</td><td>209.6 to 210.4</td>" in text and "95 %" in text and "2.00" in text
    assert "median, quartiles and minimum over n replays" in text
    text = show_shapes.experts(record).html
    assert "31.25 (31 to 32)" in text and "95 % interval" in text and "2.50 [" in text
    assert "no measurement" in str(show_shapes.experts(record, part="products"))
    limit = show_shapes.limit(record).html
    assert limit.index("<td>fast") < limit.index("<td>slow") and "4,000.00" in limit
    agree = show_shapes_more.consistency(record).html
    assert "within" in agree and "1.46 to 3.91" in agree


def full(device: str = "h200") -> fullsize.Record:
    def cell(ms: float, of: str):
        return {"of": of, "tokens": 256, "ms": [ms, ms, ms]}

    arms = {
        "humming-bf16-plain": {"contexts": {"1024": cell(6.5, "step")}},
        "humming-bf16-nextn": {"contexts": {"1024": cell(10.5, "round")}},
        "humming-fp8-nextn": {"contexts": {"1024": cell(10.0, "round")}},
    }
    told = {"date": "d", "conditions": "c", "command": "x", "versions": {}, "bandwidth": {}}
    return fullsize.of({"schema": fullsize.SCHEMA, "device": device, "arms": arms, **told})


def test_a_round_is_accounted_for_on_the_same_device_only(tmp_path):
    def change(d):
        d["device"]["name"] = "NVIDIA H200"
        four = case(220.0, format="BF16", rows=4, kernel="a", bytes=8 * 10**8, relative_error=0.002)
        d["head"].append(four)

    found = shapes.read(made(tmp_path, change))
    # The FP8 head lacks four rows, and its plain arm: no account of it.
    (one,) = shapes_round.accounts(found, full())
    assert (one.head, one.context, one.n) == ("BF16", 1024, 3)
    assert one.added == pytest.approx(4.0)
    assert one.experts == pytest.approx(40 * 0.060)  # 100 µs against 40 in 40 layers
    assert one.draft_experts == pytest.approx(0.100 + 2 * 0.040)
    assert one.heads == pytest.approx(0.220 - 0.210 + 3 * 0.210)
    assert one.rest == pytest.approx(4.0 - 2.4 - 0.18 - 0.64)
    assert "<td>0.78, " in show_shapes_more.of_a_round(found, full()).html
    assert shapes_round.accounts(found, full("spark")) == []
    assert "another device" in str(show_shapes_more.of_a_round(found, full("spark")))


def test_recorded_elsewhere_is_never_shown_as_measured_here(record):
    assert "not on this machine" in str(show_shapes.where(record, live=False))
    told = str(show_shapes.where(shapes.recorded(), live=False))
    assert "failed, but see the remark" in told and "\nfailed " not in told
    here = str(show_shapes.where(record, live=True))
    assert "on this machine" in here and "not on this machine" not in here


@pytest.mark.parametrize("picture", [show_shapes.head_picture, show_shapes.experts_picture])
def test_pictures_are_small_and_say_their_numbers(record, picture):
    assert "not shown to be right" not in picture(record).text
    view = picture(record)
    assert view.png.startswith(b"\x89PNG") and len(view.png) < 60_000
    assert "Made Up 1" in view.text and "at the limit" in view.text


def test_a_wrong_output_is_said_in_the_title_of_every_table_with_its_times(tmp_path):
    def change(d):
        d["backends"]["marlin"] = {"expert_bytes_stored": EXPERT, "relative_error": 0.03}
        d["experts"] += [{**one, "backend": "marlin"} for one in d["experts"]]

    found = shapes.read(made(tmp_path, change))
    says = "(Marlin: output not shown to be right in this run)"
    views = [
        show_shapes.experts(found, backend="marlin"),
        show_shapes.experts_picture(found, backend="marlin"),
        show_shapes_more.backends(found),
    ]
    assert all(says in view.text.splitlines()[0] for view in views)
    assert says not in str(show_shapes.experts(found))


def test_an_empty_record_shows_sentences(tmp_path):
    def change(d):
        d["head"], d["experts"], d["backends"] = [], [], {}

    found = shapes.read(made(tmp_path, change))
    for view in (show_shapes.head_picture(found), show_shapes.experts_picture(found)):
        assert view.png is None and "no measurement" in str(view)
    assert "no measurement" in str(show_shapes_more.consistency(found))


# -- measured here ---------------------------------------------------------------------------------


def lane(tmp_path, kind="gpu", script: str | None = None):
    python = tmp_path / "bin" / "python"
    if script is not None:
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
    cache = tmp_path / "cache"
    return SimpleNamespace(kind=kind, server_python=python, set_up="./setup.sh", cache=cache)


def nobody():
    return {}


def test_it_is_refused_where_it_cannot_run(tmp_path):
    assert "lane cpu has none" in shapes_live.refusal(lane(tmp_path, "cpu"), nobody)
    assert "no server environment" in shapes_live.refusal(lane(tmp_path), nobody)
    ready = lane(tmp_path, script="exit 0")
    assert "Process 41 computes on the GPU" in shapes_live.refusal(ready, lambda: {41: None})
    assert shapes_live.refusal(ready, nobody) is None
    silent = shapes_live.refusal(ready, lambda: "nvidia-smi did not answer within 10 s")
    assert silent == (
        "Nobody knows whether the GPU is idle (nvidia-smi did not answer within 10 s), and the kernels "
        "must have it to themselves."
    )
    with pytest.raises(UsageError, match="Process 41"):
        shapes_live.measure(ready, tmp_path / "x.json", holders=lambda: {41: 5})


def test_the_record_of_the_child_is_read(tmp_path):
    good = made(tmp_path)
    # $4 is what follows --out.
    ready = lane(
        tmp_path, script=f'echo $HUMMING_CACHE_DIR; echo "$@" > {tmp_path}/said; cp {good} "$4"'
    )
    found = shapes_live.measure(
        ready, tmp_path / "new" / "x.json", only="head, bandwidth", holders=nobody
    )
    assert found.device == "Made Up 1"
    said = (tmp_path / "said").read_text()
    assert (
        said.startswith("-m sparkling_sglang.bench_shapes --out")
        and "--only head,bandwidth" in said
    )
    assert (tmp_path / "new" / "x.json.log").read_text() == f"{tmp_path}/cache/humming\n"


def test_a_child_that_leaves_nothing_is_quoted(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(data()))  # an older run's: not this one's result
    ready = lane(tmp_path, script="echo bench_shapes: error: no CUDA device; exit 1")
    with pytest.raises(SparklingError, match="no CUDA device"):
        shapes_live.measure(ready, tmp_path / "x.json", holders=nobody)


def test_what_is_no_record_is_not_overwritten(tmp_path):
    ready = lane(tmp_path, script="exit 0")
    mine = tmp_path / "notes.txt"
    for content in ("my notes", "[]", '{"schema": "other/1"}'):
        mine.write_text(content)
        with pytest.raises(UsageError, match="is no record of the kernels, so it is left alone"):
            shapes_live.measure(ready, mine, holders=nobody)
        assert mine.read_text() == content
    with pytest.raises(UsageError, match="is a folder"):
        shapes_live.measure(ready, tmp_path, holders=nobody)
    with pytest.raises(UsageError, match="cannot be written"):
        shapes_live.measure(ready, mine / "x.json", holders=nobody)


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes_live, "GRACE_S", 0.2)
    ready = lane(tmp_path, script="exec sleep 600")
    children, real = [], subprocess.Popen  # it need not live long enough to say its pid

    def begin(*given, **more):
        children.append(real(*given, **more))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", begin)
    with pytest.raises(SparklingError, match="said: nothing"):
        shapes_live.measure(ready, tmp_path / "x.json", limit_s=0.3, holders=nobody)
    (child,) = children
    assert child.wait(60) == -signal.SIGKILL


def test_a_child_does_not_outlive_a_killed_parent(tmp_path):
    told = tmp_path / "pid"
    ready = lane(tmp_path, script=f"echo $$ > {told}.new; mv {told}.new {told}; exec sleep 600")
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from sparkling import shapes_live\n"
        "here = Path(sys.argv[1]); python = here / 'bin' / 'python'\n"
        "lane = N(kind='gpu', server_python=python, set_up='x', cache=here)\n"
        "shapes_live.measure(lane, here / 'x.json', holders=dict)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(ready.server_python.parents[1])])
    try:
        until = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.02)
        child = procs.identify(int(told.read_text()))
        assert procs.is_alive(child)
    finally:
        parent.kill()
        parent.wait()
    assert procs.wait_gone([child], 60) == []


# -- the command -----------------------------------------------------------------------------------


def test_the_command_shows_a_record(tmp_path, capsys):
    assert cli.main(["shapes", "--record", str(made(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "not on this machine" in out and "The cost model against these kernels" in out
    assert cli.main(["shapes", "--record", str(tmp_path / "record.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == copy.deepcopy(data())


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_measurement_that_lacks_cases_exits_1(tmp_path, monkeypatch, capsys, more):
    path = made(tmp_path, lambda d: d.update(stopped="stopped at the limit of 9 s"))
    monkeypatch.setattr(shapes_live, "measure", lambda *_, **__: shapes.read(path))
    assert cli.main(["shapes", "--measure", "--lane", "cpu", "--out", str(path), *more]) == 1
    assert "stopped at the limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--measure", "--record", "x"], "not both"),
        (["--record", "/no/such"], "cannot be read"),
        (["--measure", "--lane", "cpu"], "lane cpu has none"),
        (["--measure", "--only", "heads"], "'heads' is no part"),
        (["--measure", "--only", ""], "'' is no part"),
        (["--measure", "--only", "head"], "as in --only bandwidth,head"),
        (["--out", "x.json"], "give --measure with them"),
        (["--only", "head"], "give --measure with them"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(arguments, says, capsys):
    assert cli.main(["shapes", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


# -- in a notebook ---------------------------------------------------------------------------------


def test_a_notebook_shows_the_record_where_nothing_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "RECORDED", made(tmp_path))
    monkeypatch.setattr(shapes, "recorded", lambda: shapes.read(shapes.RECORDED))
    nb = SimpleNamespace(lane=lane(tmp_path, "cpu"))
    found = shapes_live.here_or_recorded(nb, nobody)
    assert not found.live
    text = repr(found)
    assert text.startswith("The kernels need an NVIDIA GPU") and "not on this machine" in text


def test_a_notebook_measures_where_it_can(tmp_path):
    good = made(tmp_path)
    nb = SimpleNamespace(
        lane=lane(tmp_path, script=f'cp {good} "$4"'),
        run=SimpleNamespace(path=lambda name: tmp_path / "run" / name),
    )
    found = shapes_live.here_or_recorded(nb, nobody)
    assert found.live and (tmp_path / "run" / "kernel-shapes.json").exists()
    assert "not on this machine" not in found._repr_html_()
