"""scripts/record_full_size.py without a GPU: its queues, its arithmetic, and a whole call with servers
that only pretend."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).parent / "fakes" / "full_size_server.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "record_full_size", ROOT / "scripts" / "record_full_size.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_eight_arms_differ_by_their_three_switches_alone(script):
    core = [script.arms()[name] for name in script.CORE]
    switches = {(a.kernels, "SPARKLING_FP8_LM_HEAD" in a.env, a.nextn) for a in core}
    assert len(core) == len(switches) == 8
    assert {tuple((k, v) for k, v in a.env.items() if "FP8" not in k) for a in core} == {
        (("SPARKLING_SWIGLU_CLAMP", "1"),)
    }


def test_marlin_has_the_last_gpu_and_one_gpu_keeps_the_order(script):
    wanted = script.CORE + script.EXTRA
    two = script.queues([0, 1], wanted)
    assert sorted(two[0] + two[1]) == sorted(wanted)
    assert two[1][-1] == "swap" and all(n.startswith("marlin") for n in two[1][:-1])
    assert two[0][:4] == script.CORE[:4]
    one = script.queues([3], wanted)
    assert one == {3: wanted[:-1]} and wanted[:8] == script.CORE and wanted[-1] == "swap"


def test_one_gpu_does_not_wait_for_what_takes_two(calls):
    alone = calls.run("--arms", "stock,swap")
    assert alone.returncode == 0 and "1 of 1 arms done; left: []" in alone.stdout
    wrong = calls.run("--arms", "swap")
    assert wrong.returncode == 2 and "swap compares two GPUs" in wrong.stderr


def test_the_short_form_names_the_device_that_was_measured(script):
    raw = json.loads((ROOT / "tests" / "data" / "h200" / "full-size.json").read_text())
    for gpu, device in (("NVIDIA GB10", "spark"), ("NVIDIA L4", "NVIDIA L4")):
        for arm in raw["arms"].values():
            arm["gpu"] = {"name": gpu}
        assert script.compact(raw, "", {})["device"] == device
    known = tomllib.loads((ROOT / "lib" / "sparkling" / "facts" / "devices.toml").read_text())
    assert set(script.DEVICES.values()) <= set(known)


def test_a_step_is_the_time_after_the_first_token_over_the_tokens_after_it(script):
    arrived = [(0.5, 1), (0.51, 2), (0.52, 3), (0.53, 4), (0.56, 5)]
    meta = {"completion_tokens": 5, "e2e_latency": 0.57, "first_token_latency": 0.49}
    row = script.summary(64, arrived, meta, [1, 2, 2, 3, 4])
    assert (row["of"], row["ms"], row["ttft_s"]) == ("step", 15.0, 0.5)
    assert row["later_ms"] == 20.0  # from the third token on
    assert row["server_ms"] == 20.0
    assert (row["distinct"], row["given"]) == (4, 5)


def test_a_round_is_counted_by_the_server(script):
    arrived = [(0.1, 1), (0.12, 3), (0.14, 4), (0.16, 7)]
    row = script.summary(64, arrived, {"spec_verify_ct": 3}, [])
    assert (row["of"], row["ms"], row["accept_length"]) == ("round", 20.0, 2.0)


def test_an_answer_in_two_chunks_tells_no_steps(script):
    with pytest.raises(script.Failed, match="2 chunks"):
        script.summary(64, [(0.1, 1), (0.2, 9)], {}, [])
    with pytest.raises(script.Failed, match="no token"):  # the last chunks repeat the count
        script.summary(64, [(0.1, 1), (0.2, 9), (0.3, 9)], {}, [])


def test_the_log_tells_timings_and_memory(script):
    text = (ROOT / "tests" / "data" / "logs" / "h200-humming-nextn.log").read_text()
    found = script.from_log(text)
    assert found["weights_gb"] == {
        "BailingMoeV3ForCausalLM": 65.13,
        "BailingMoeForCausalLMNextN": 3.38,
    }
    assert found["timings"].startswith("load_weight=1.90")
    assert found["expert_layers_prepared"] == 41


class Calls:
    """Calls of the script, with a Python that runs the pretended server instead of SGLang's."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {FAKE} "$@"\n')
        self.python.chmod(0o755)

    def command(self, *more: str) -> list[str]:
        where = ["--out", str(self.folder / "out"), "--state", str(self.folder / "state")]
        script = [sys.executable, str(ROOT / "scripts" / "record_full_size.py")]
        limits = ["--budget", "240", "--first-s", "120", "--arm-s", "60", "--port", str(self.port)]
        plan = ["--plan", "64x8x3,128x4x2", "--cpu", "--python", str(self.python)]
        return [*script, *where, *limits, *plan, *more]

    def run(self, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*more), env=os.environ | env, capture_output=True, text=True, timeout=280
        )

    def found(self) -> dict:
        return json.loads((self.folder / "out" / "full.json").read_text())

    def alive(self) -> list[str]:
        mark = f"FULL_SIZE_GATE={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    found.append(path.parent.name)
            except OSError:
                continue
        return found


@pytest.fixture
def calls(tmp_path, free_port):
    return Calls(tmp_path, free_port)


@pytest.fixture
def free_port():
    """A port whose followers are free for every arm on two GPUs too: below those that the system
    gives away (32768 on) and those that servers ask for (30000 on)."""
    import random
    import socket

    for port in random.Random().sample(range(10000, 28000, 200), 90):
        with contextlib.suppress(OSError):
            for one in (*range(port, port + 20), *range(port + 100, port + 120)):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", one))
            return port
    pytest.fail("no free ports")


def test_a_call_measures_every_arm_and_the_next_call_resumes(calls):
    arms = "humming-bf16-plain,marlin-fp8-nextn"
    first = calls.run("--gpus", "0,1", "--arms", arms)
    assert first.returncode == 0, first.stdout + first.stderr
    found = calls.found()["arms"]
    assert list(found) == arms.split(",")
    for name, of in zip(found, ("step", "round"), strict=True):
        one = found[name]
        assert one["complete"] and {r["of"] for r in one["runs"]} == {of}
        assert [(r["prompt"], r["tokens"]) for r in one["runs"]] == [(64, 8), (128, 4)] * 2 + [
            (64, 8)
        ]
        # The server's clock: this process may have been late to read the first token.
        least = 4 if of == "round" else 2
        assert all(r["server_ms"] >= least and r["ms"] > 0 for r in one["runs"])
        assert one["arguments"] == {"version": "0.5.23", "random_seed": 1}
        assert one["status"] == {"switches": {"fp8-head": True}}
    with tarfile.open(calls.folder / "out" / "logs.tar.gz") as logs:
        assert len(logs.getnames()) == 2
    assert not calls.alive()
    made = calls.found()
    again = calls.run("--gpus", "0,1", "--arms", arms)
    assert "2 of 2 arms done" in again.stdout and calls.found() == made


def test_a_server_that_ends_is_a_result_and_does_not_end_the_queue(calls):
    arms = "unshared,humming-fp8-plain"
    ended = calls.run("--arms", arms, FAKE_DIE="SPARKLING_SHARE_HEAD=0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = calls.found()["arms"]
    assert found["humming-fp8-plain"]["complete"]
    assert not found["unshared"]["complete"] and "ended with 1" in found["unshared"]["error"]
    with tarfile.open(calls.folder / "out" / "logs.tar.gz") as logs:
        assert b"addmm_cuda" in logs.extractfile("arms/unshared.log").read()


def test_a_call_whose_servers_all_ended_has_failed_and_says_how_to_go_on(calls):
    ended = calls.run("--arms", "unshared", FAKE_DIE="SPARKLING_SHARE_HEAD=0")
    assert ended.returncode == 1
    assert "ended unmeasured: ['unshared']" in ended.stdout and "--again" in ended.stdout
    assert calls.run("--arms", "unshared").returncode == 1  # kept, so not started again
    again = calls.run("--arms", "unshared", "--again")
    assert again.returncode == 0 and "unmeasured" not in again.stdout
    assert calls.found()["arms"]["unshared"]["complete"]


def test_a_slow_start_is_no_result(calls):
    """A later start has twice --arm-s; the first one, which may compile kernels, has --first-s."""
    slow = calls.run(
        "--arms", "stock,clamp-off", "--arm-s", "1", FAKE_HANG="SPARKLING_SWIGLU_CLAMP=0"
    )
    assert slow.returncode == 1
    assert "left: ['clamp-off']" in slow.stdout
    found = calls.found()["arms"]
    assert found["stock"]["complete"] and "not ready within 2 s" in found["clamp-off"]["error"]
    assert not calls.alive()


def test_an_ended_call_leaves_no_server(calls):
    held = subprocess.Popen(
        calls.command("--arms", "stock", "--plan", "64x4000x3"), stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not calls.alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert calls.alive()
    held.send_signal(signal.SIGTERM)
    assert held.wait(60) == 1
    assert not calls.alive()
    assert not (calls.folder / "state" / "arms" / "stock.json").exists()


def test_an_unknown_arm_is_named(calls):
    wrong = calls.run("--arms", "humming")
    assert wrong.returncode == 2 and "no such arm: humming" in wrong.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--gpus", "x"], "argument --gpus: invalid indices value: 'x'"),
        (["--gpus", "0,0"], "argument --gpus: invalid indices value: '0,0'"),
        (["--gpus", ","], "argument --gpus"),
        (["--set", "foo"], "argument --set: invalid setting value: 'foo'"),
        (["--plan", "1024x256"], "argument --plan: invalid plan value"),
        (["--plan", "1024x1x3"], "argument --plan: invalid plan value"),
        (["--out", "FILE/full"], "cannot be written: Not a directory"),
        (["--compact", "none.json", "x"], "none.json cannot be used: No such file"),
        (["--compact", "FILE", "x"], "is not what a recording leaves"),
        (["--compact", "LIST", "x"], "is not what a recording leaves"),
    ],
)
def test_wrong_arguments_are_one_sentence(script, tmp_path, capsys, given, words):
    for name, text in (("FILE", "no JSON"), ("LIST", "[]")):
        (tmp_path / name).write_text(text)
    given = [
        x.replace("FILE", f"{tmp_path}/FILE").replace("LIST", f"{tmp_path}/LIST") for x in given
    ]
    rest = ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    with pytest.raises(SystemExit) as end:
        script.main([*rest, *given])
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and words in said, said


def test_the_librarys_record_is_this_short_form_of_the_whole_one(script):
    """tests/data/h200/full-size.json is what the GPU machine sent back, its logs read again."""
    raw = json.loads((ROOT / "tests" / "data" / "h200" / "full-size.json").read_text())
    kept = json.loads((ROOT / "lib" / "sparkling" / "facts" / "h200-full-size.json").read_text())
    assert script.compact(raw, kept["conditions"], {}) == kept
    slow = dict.fromkeys(kept["unmeasured"], False)
    assert {name: raw["arms"][name]["complete"] for name in slow} == slow
    # The server's own clock says the same as ours: no time was lost between the two.
    for arm in raw["arms"].values():
        for row in arm.get("runs", []):
            assert row["ms"] == pytest.approx(row["server_ms"], rel=1e-3)
