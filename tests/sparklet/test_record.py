"""Comparing two recordings of a server's answers, and what was recorded on a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "record_sparklet.py"
DATA = ROOT / "tests" / "data" / "sparklet"
GPU = DATA / "h200-nextn.json"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_sparklet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recording(ids, top, prompt=(1, 2)):
    row = {"prompt": list(prompt), "ids": ids, "top": top, "rounds": 2}
    return {"greedy": [row], "accept_length": {"greedy": 3.0, "sampled": None}}


def test_equal_texts_are_counted_and_a_difference_shows_its_gap(script):
    top = [[[-0.1, 5], [-2.0, 6]], [[-0.70, 7], [-0.72, 8]]]
    other = [[[-0.1, 5], [-2.0, 6]], [[-0.69, 8], [-0.74, 7]]]
    a, b = recording([5, 7], top), recording([5, 8], other)
    assert script.compare(a, a) == {
        "n": 1,
        "same": 1,
        "gaps": [],
        "accept_length": {"greedy": (3.0, 3.0)},
    }
    got = script.compare(a, b)
    assert got["same"] == 0 and got["gaps"] == [0.02]


def test_different_prompts_are_refused(script):
    with pytest.raises(ValueError, match="same prompts"):
        script.compare(recording([5], []), recording([5], [], prompt=(9,)))


def test_accept_length_leaves_the_first_token_out(script):
    rows = [{"ids": [1] * 9, "rounds": 2}, {"ids": [1] * 5, "rounds": 2}]
    assert script.accept_length(rows) == 12 / 4
    assert script.accept_length([{"ids": [1], "rounds": None}]) is None


def found(**other):
    return {
        "n": 50,
        "same": 47,
        "gaps": [0.01, 0.0, 0.06],
        "accept_length": {"greedy": (3.8, 3.75)},
    } | other


def test_the_goals_of_conformance(script):
    assert script.verdict(found()) == []
    assert "44 of 50" in script.verdict(found(same=44))[0]
    assert script.verdict(found(n=20, same=18)) == []
    (said,) = script.verdict(found(gaps=[0.01, 0.4, float("inf")]))
    assert said.startswith("2 differences are no near-ties")
    (said,) = script.verdict(found(accept_length={"sampled": (2.9, 2.6), "greedy": (3.8, 3.7)}))
    assert "sampled" in said and "2.90" in said


def test_the_command_exits_by_the_verdict(script, tmp_path, capsys):
    top = [[[-0.1, 5], [-2.0, 6]], [[-0.70, 7], [-3.0, 8]]]
    for name, ids in (("a", [5, 7]), ("b", [5, 8])):
        (tmp_path / f"{name}.json").write_text(json.dumps(recording(ids, top)))
    a, b = (str(tmp_path / f"{name}.json") for name in "ab")
    assert script.main(["compare", a, a]) == 0
    assert "all goals of conformance are met" in capsys.readouterr().out
    assert script.main(["compare", a, b]) == 1
    assert "the same on 0 of 1 prompts only" in capsys.readouterr().out


def test_a_started_server_has_every_switch_but_the_fp8_head(script, monkeypatch, tmp_path):
    asked = []

    class Process:
        pid = 2**22 + 1  # nobody's

        def __init__(self, command, env, **_given):
            asked.append((command, env))

        def wait(self, _limit=None):
            return 0

    monkeypatch.setattr(script.subprocess, "Popen", Process)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)  # the engine's tests set it
    for name in ("sparklet-gpu", "sparklet"):
        with script.started(name, tmp_path, 30799, tmp_path / "x.log") as (url, facts, _):
            assert url == "http://127.0.0.1:30799" and facts["recipe"] == name
    (gpu, gpu_env), (cpu, cpu_env) = asked
    assert "humming" in gpu and "humming" not in cpu
    for command, env in asked:
        assert command[command.index("--speculative-algorithm") + 1] == "NEXTN"
        assert "SPARKLING_FP8_LM_HEAD" not in env
    assert cpu_env["SGLANG_USE_CPU_ENGINE"] == "1" and "SGLANG_USE_CPU_ENGINE" not in gpu_env


# -- what was recorded -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu():
    return json.loads((DATA / "cpu-nextn.json").read_text())


def test_the_cpu_lane_s_recording_is_whole(cpu, script):
    assert cpu["complete"] and [len(cpu[k]) for k in ("greedy", "repeated", "sampled")] == [
        50,
        16,
        50,
    ]
    for kind, length in cpu["accept_length"].items():
        assert length == script.accept_length(cpu[kind])
    assert cpu["accept_length"]["repeated"] > 3.5 and 2.2 < cpu["accept_length"]["sampled"] < 3.4


def test_the_gpu_was_asked_the_same_and_kept_as_many_drafts(cpu):
    """Of the first GPU run the log was kept: it has every greedy prompt's length in order, and the
    accept length of each 40 rounds."""
    log = (DATA / "h200-humming-nextn.log").read_text()
    lengths = [int(n) for n in re.findall(r"#new-token: (\d+),", log)][2:]  # two warm-ups before
    assert lengths == [len(row["prompt"]) for row in cpu["greedy"]]
    windows = [float(x) for x in re.findall(r"accept len: ([\d.]+)", log)]
    rounds = sum(row["rounds"] for row in cpu["greedy"])
    assert abs(40 * len(windows) - rounds) <= 40  # as many rounds as the same answers take
    gpu = sum(windows) / len(windows)
    assert abs(gpu - cpu["accept_length"]["greedy"]) <= 0.05 * gpu
    print(
        f"greedy: {gpu:.3f} over {40 * len(windows)} rounds on the H200, "
        f"{cpu['accept_length']['greedy']:.3f} over {rounds} on the cpu lane"
    )


def test_the_gpu_says_the_same_as_the_cpu_lane(cpu, script):
    if not GPU.is_file():
        pytest.skip(
            f"{GPU.name} is not recorded yet: on a GPU, run "
            "`python scripts/record_sparklet.py record h200-nextn.json --start`"
        )
    gpu = json.loads(GPU.read_text())
    assert gpu["complete"] and gpu["server"]["moe_runner_backend"] == "humming"
    assert script.verdict(script.compare(cpu, gpu)) == []
