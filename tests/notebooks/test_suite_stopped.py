"""A suite that is killed, refused or broken: nothing stays behind, it is continued, it says why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(2400)]


def suite(root, runs, *arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "sparkling.cli", "suite", "--lane", "cpu", *arguments],
        env=os.environ | {"SPARKLING_RUNS": str(runs)} | env,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def living(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("SUITE_RUN_TEST") == mark
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def words(process: psutil.Process) -> str:
    """Its command line; nothing of a helper that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(what, limit_s: float):
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.2)
    return found


VICTIMS = {
    "the suite": lambda below, parent: [parent],
    "papermill": lambda below, parent: [p for p in below if "suite_child" in words(p)],
    "the kernel": lambda below, parent: [p for p in below if "ipykernel" in words(p)],
    "the server": lambda below, parent: [p for p in below if "sglang.launch_server" in words(p)],
}


def test_a_run_that_is_killed_again_and_again_leaves_nothing_and_is_completed(root, tmp_path):
    """Each victim is killed while a server is loading, and the next attempt resumes the same run."""
    runs, mark = tmp_path / "runs", str(os.getpid())
    arguments = ["--notebook", "20_weights", "--notebook", "00_start_here"]

    def loading():
        return [p for p in living(mark) if "sglang.launch_server" in words(p)]

    for victim, find in VICTIMS.items():
        process = suite(root, runs, *arguments, SUITE_RUN_TEST=mark)
        until(loading, 300)
        time.sleep(3)
        (doomed, *_) = find(living(mark), psutil.Process(process.pid))
        doomed.kill()
        if victim == "the suite":
            assert process.wait(timeout=60) == -signal.SIGKILL
        else:
            said, _ = process.communicate(timeout=900)
            assert process.returncode == 1, (victim, said)
            assert "00_start_here" in said and "report:" in said
        until(lambda: not living(mark), 60)
        process.stdout.close()
        if "--resume" not in arguments:
            arguments.insert(0, "--resume")
    again = suite(root, runs, *arguments, SUITE_RUN_TEST=mark)
    said, _ = again.communicate(timeout=900)
    assert again.returncode == 0, said
    assert re.search(r"^00_start_here +\d+\.\d +ok$", said, re.MULTILINE)
    assert len(list(runs.glob("*/report.html"))) == 1 == len(list(runs.glob("*/manifest.json")))
    until(lambda: not living(mark), 60)


def test_a_wrong_parameter_is_refused_at_once(root, tmp_path):
    process = suite(root, tmp_path / "runs", "-p", "repeat=3")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert said.startswith("error: No notebook of this suite has a parameter 'repeat'")
    assert len(said.splitlines()) == 1 and not list(tmp_path.glob("runs/*/notebooks"))


def test_a_failing_notebook_is_named_and_the_report_still_exists(root, tmp_path):
    model = tmp_path / "model"
    subprocess.run(
        [sys.executable, "-m", "sparkling.cli", "tiny", "--dest", str(model)], check=True
    )
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    process = suite(
        root,
        tmp_path / "runs",
        "--model",
        str(model),
        *("--notebook", "10_environment", "--notebook", "20_weights", "--notebook", "40_baseline"),
    )
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 1
    assert re.search(r"^20_weights, cell \d+ \(model = nb\.lane\.model\):$", said, re.MULTILINE)
    assert "is short by 100 bytes" in said
    assert re.search(r"^10_environment +\d+\.\d +ok$", said, re.MULTILINE)
    assert re.search(r"^40_baseline +skipped$", said, re.MULTILINE)
    (report,) = (tmp_path / "runs").glob("*/report.html")
    assert "is short by 100 bytes" in report.read_text()
