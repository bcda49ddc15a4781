"""The check of the SwiGLU limit: a result read, shown and refused, and the script as a child."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from sparkling import clampcheck, procs, show_clamp
from sparkling.errors import SparklingError, UsageError

SPREAD = {"median": 50.0, "q1": 49.5, "q3": 50.5, "n": 60}


def layer(tokens: int, kind: str, stock: float, hooked: float, changed: int) -> dict:
    """A case of a layer whose errors to the limited reference are `stock` and `hooked`."""

    def one(error: float, unlike: int) -> dict:
        away = 0.3 - error if kind == "exceeding" else error
        found = {"error_to_clamped": error, "error_to_unclamped": away}
        return found | {"entries_unlike_stock": unlike, "applied": [4.0, "sparkling"]}

    return {
        "level": "layer",
        "experts": 512,
        "tokens": tokens,
        "input": kind,
        "gates_beyond": 0.04,
        "ups_beyond": 0.08,
        "stock": one(stock, 0),
        "hooked": one(hooked, changed),
        "hooked_without_limit": one(stock, 0),
        "stock_repeats": True,
        "entries": 2560 * tokens,
    }


def document(gpu: str | None = "NVIDIA H200") -> dict:
    more = SPREAD | {"median": -0.25, "interval": [-0.3, -0.2]}
    timed = {"tokens": 1, "stock": SPREAD, "hooked": SPREAD, "difference": more}
    cases = [
        {"level": "reproduction", "runner": "humming", "swiglu_limit": None, "output": 64.0},
        {
            "level": "activation",
            "runner": "humming",
            "rows": 8,
            "beyond_the_limit": 0.11,
            "stock_error": 0.25,
            "fast_error": 0.0017,
            "fast_bits_differ_below": 0,
            "entries_below": 5400,
        },
        layer(1, "exceeding", 0.29, 0.004, 2500),
        layer(1, "below", 0.004, 0.004, 0),
        {"level": "time", "experts": 512, "graph_equals_eager": {"stock": True, "hooked": True}}
        | timed,
        {"level": "activation time", "rows": 8, **timed},
    ]
    return {
        "date": "2026-11-30T03:40:00Z",
        "command": "python3 scripts/check_clamp.py --out x",
        "shape": {"hidden": 2560, "intermediate": 768, "top_k": 8, "limit": 4.0},
        "runners": {
            "humming": {
                "versions": {"gpu": gpu, "sglang": "0.5.23", "torch": "2.11.0"},
                "cases": cases,
                "failures": [{"step": "time 8", "error": "no time was left"}],
                "outcome": "done",
            },
            "marlin": {"cases": [], "failures": [], "outcome": "ended after 120 s"},
        },
    }


def read(tmp_path, data) -> clampcheck.Record:
    path = tmp_path / "clamp.json"
    path.write_text(json.dumps(data))
    return clampcheck.read(path)


def flat(view) -> str:
    """A view's HTML without its tags: nothing is wrapped there."""
    return html.unescape(re.sub(r"<[^>]+>", " ", view.html))


def test_a_result_is_read_and_shown(tmp_path):
    record = read(tmp_path, document())
    assert record.where == "NVIDIA H200" and record.runners == ["humming"]
    assert record.reproduction["output"] == 64.0
    lines = flat(show_clamp.reproduction(record))
    assert "63.98" in lines and "✗" in lines
    exceeds, below = record.outputs
    assert exceeds.exceeds and exceeds.errors["stock"] == (0.29, pytest.approx(0.01))
    assert exceeds.unlike_stock["hooked"] == 2500 and not below.exceeds
    assert record.times[0].graph_is_eager and record.times[0].more["median"] == -0.25
    assert [one.tokens for one in record.kernel_times] == [1]
    outputs = flat(show_clamp.outputs(record))
    # Stock meets the unlimited reference, the switch the limited one.
    assert re.findall("[✗✓]", outputs)[:2] == ["✗", "✓"]
    assert "29.00 %" in outputs and "0.40 %" in outputs
    untouched = flat(show_clamp.untouched(record))
    assert "inputs below the limit" in untouched and "a layer without a limit" in untouched
    assert "-0.25 [-0.30, -0.20]" in flat(show_clamp.times(record))
    assert "-1.8" in flat(show_clamp.times(record))  # seven layers
    assert "humming's silu_and_mul" in flat(show_clamp.kernel_times(record))
    assert "0 of 5,400" in flat(show_clamp.activations(record))
    data = document()
    data["runners"]["humming"] |= {"compiled": "some kernels alone"}
    data["runners"]["humming"]["cases"][0] |= {"swiglu_limit": 4.0, "output": 16.0}
    mended = read(tmp_path, data)
    assert "✓" in flat(show_clamp.reproduction(mended))
    assert "humming: some kernels alone." in flat(show_clamp.where(mended))
    undone = flat(show_clamp.unfinished(record))
    assert "ended after 120 s" in undone and "time 8" in undone
    assert "NVIDIA H200, 2026-11-30: sglang 0.5.23" in flat(show_clamp.where(record))


def test_a_cpu_is_called_so_and_its_layer_without_a_limit_is_shown(tmp_path):
    record = read(tmp_path, document(gpu=None))
    assert record.where == "this CPU" and record.runners == ["cpu"]
    text = str(show_clamp.outputs(record))
    assert "this lane's" in text and "without" in text and "stock" not in text
    data = document(gpu=None)
    data["runners"]["humming"] |= {"cases": data["runners"]["humming"]["cases"][2:4]}
    bare = read(tmp_path, data)
    for view in (show_clamp.untouched, show_clamp.activations, show_clamp.times):
        assert len(str(view(bare)).splitlines()) == 1  # one sentence in a table's place
    assert "not timed here" in str(show_clamp.kernel_times(bare))
    assert "not run here" in str(show_clamp.reproduction(bare))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runners": {"humming": {}}}'])
def test_what_is_no_result_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "clamp.json"
    path.write_text(text)
    with pytest.raises(SparklingError, match=r"is no result of scripts/check_clamp.py: .+\.$"):
        clampcheck.read(path)
    with pytest.raises(SparklingError, match="cannot be read: No such file"):
        clampcheck.read(tmp_path / "none.json")


WRITES = """
import json, sys
out = sys.argv[sys.argv.index("--out") + 1]
data = json.loads({data!r})
data["command"] = " ".join(sys.argv[1:])
open(out, "w").write(json.dumps(data))
"""


@pytest.fixture
def here(tmp_path):
    """here(script, kind) → (a lane with that script, run by this Python, and the file to write)."""

    def make(script: str, kind: str = "cpu"):
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "check_clamp.py").write_text(script)
        made = types.SimpleNamespace(
            kind=kind,
            root=tmp_path,
            cache=tmp_path / "cache",
            server_python=Path(sys.executable),
            set_up="./scripts/setup.sh",
        )
        return made, tmp_path / "run" / "clamp.json"

    return make


def test_on_a_cpu_the_script_gets_sparklets_shapes(here):
    where, out = here(WRITES.format(data=json.dumps(document(gpu=None))))
    record = clampcheck.run(where, out, limit_s=60)
    assert "--dry-run --runners triton --config" in record.command
    assert record.command.endswith("models/sparklet/config.json")


def test_on_a_gpu_it_runs_humming_and_wants_the_gpu_alone(here, monkeypatch):
    where, out = here(WRITES.format(data=json.dumps(document())), kind="gpu")
    monkeypatch.setattr(clampcheck, "refusal", lambda lane: None)
    assert clampcheck.run(where, out, limit_s=60).command.endswith("--runners humming")
    monkeypatch.undo()
    assert "Process 77 computes on the GPU" in clampcheck.refusal(where, lambda: {77: 5})
    assert clampcheck.refusal(where, dict) is None
    assert "knows whether the GPU is idle (nvidia-smi did not answer), and" in clampcheck.refusal(
        where, lambda: "nvidia-smi did not answer"
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('no torch here')", r"said: no torch here$"),
        ("", r"said: nothing$"),
        (
            WRITES.format(data=json.dumps(document() | {"runners": {}})),
            r"computed nothing \(\), see the logs in .+run\.$",
        ),
    ],
)
def test_a_script_that_fails_is_told_in_one_sentence(here, script, said):
    where, out = here(script)
    with pytest.raises(SparklingError, match=said):
        clampcheck.run(where, out, limit_s=60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runners", "humming,foo"], "'humming,foo' (choose from marlin,"),
        (["--runners", ""], "'' (choose from"),
        (["--limit-s", "-1"], "--limit-s: invalid seconds value"),
        (["--limit-s", "nan"], "--limit-s: invalid seconds value"),
        (["--config", "/no/such"], "--config /no/such cannot be read"),
        (["--config", "{here}"], "is no config.json of a Ling with limits"),
        (["--out", "{folder}"], "is a folder"),
        (["--experts", "7"], "--experts is 7; a token takes 8."),
    ],
)
def test_the_script_refuses_wrong_arguments_before_it_starts_anything(
    root, tmp_path, arguments, says
):
    (tmp_path / "config.json").write_text('{"expert_swiglu_limit_list": [0, 0]}')
    filled = [a.format(here=tmp_path / "config.json", folder=tmp_path) for a in arguments]
    command = [sys.executable, str(root / clampcheck.SCRIPT), "--out", str(tmp_path / "o.json")]
    done = subprocess.run([*command, *filled], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_script_says_with_its_exit_code_that_a_runner_failed(root, tmp_path):
    # Without torch and SGLang, as in this environment, no runner can do anything.
    out = tmp_path / "o.json"
    command = [sys.executable, str(root / clampcheck.SCRIPT), "--out", str(out), "--dry-run"]
    done = subprocess.run(
        [*command, "--runners", "triton"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "triton: failed with exit status 1" in done.stdout
    assert json.loads(out.read_text())["runners"]["triton"]["outcome"].startswith("failed")


class Spoken(subprocess.Popen):
    """A process that has said something: its limit begins then, since a busy machine may take
    seconds to start Python."""

    def __init__(self, *args, stdout, **more):
        super().__init__(*args, stdout=stdout, **more)
        end = time.monotonic() + 60
        while os.fstat(stdout.fileno()).st_size == 0 and time.monotonic() < end:
            time.sleep(0.01)


def gone(pid: int) -> bool:
    who = procs.identify(pid)
    return procs.wait_gone([who] if who else [], 60) == []


@pytest.mark.parametrize("deaf", [False, True])
def test_a_script_that_hangs_is_ended_and_killed_if_it_ignores_the_signal(here, monkeypatch, deaf):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    where, out = here(
        f"import os, signal, time; {ignore} print(os.getpid(), flush=True); time.sleep(200)"
    )
    monkeypatch.setattr(clampcheck, "GRACE_S", 0.3)
    monkeypatch.setattr(subprocess, "Popen", Spoken)
    with pytest.raises(SparklingError, match=r"said: \d+$") as ended:
        clampcheck.run(where, out, limit_s=0.4)
    assert gone(int(str(ended.value).split()[-1]))


def test_without_a_server_environment_nothing_starts(here, tmp_path):
    where, out = here("raise SystemExit(3)")
    where.server_python = tmp_path / "no" / "python"
    with pytest.raises(UsageError, match=r"There is no server environment at .+; run ./scripts"):
        clampcheck.run(where, out)
    assert not out.exists()
