"""Several workers (`scripts/test.sh`) run every test once, and the lonely ones when nothing else runs."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections import OrderedDict

import pytest

TEST = """
import json, os, time
from pathlib import Path
import pytest
@pytest.mark.parametrize("n", range({n}))
def test_it(n):
    began = time.monotonic()
    # A worker's first test waits for those of the others, however late they come to run.
    notes, many = Path(os.environ["NOTES"]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    notes.with_name("begun-" + os.environ["PYTEST_XDIST_WORKER"]).touch()
    while len([*notes.parent.glob("begun-*")]) < many and time.monotonic() < began + 60:
        time.sleep(0.01)
    time.sleep(0.05)
    line = [Path(__file__).name, n, os.environ["PYTEST_XDIST_WORKER"], began, time.monotonic()]
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(line) + "\\n")
    {more}
"""
FILES = {  # file: tests in it
    "unit/test_a.py": 3,
    "unit/test_b.py": 1,
    "unit/test_suite.py": 2,
    "unit/test_client_rate.py": 2,
    "server/test_lifecycle.py": 5,
    "server/test_reference.py": 5,
    "server/test_proof_real.py": 1,
    "server/test_new.py": 2,
    "leaks/test_left.py": 1,
}
KIND = {
    "alone": {"test_client_rate.py", "test_new.py", "test_left.py"},
    "heavy": {"test_lifecycle.py", "test_reference.py", "test_proof_real.py"},
}
# The folders are made in this order, and collected in that of the command.
FOLDERS = ("tests/unit", "tests/server", "tests/leaks")


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    def go(more: dict[str, str], *arguments: str):
        for name, n in FILES.items():
            path = tmp_path / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(TEST.format(n=n, more=more.get(name, "")))
        for name in ("conftest.py", "in_turn.py"):
            shutil.copy(root / "tests" / name, tmp_path / "tests")
        shutil.copy(root / "pytest.ini", tmp_path)
        notes = tmp_path / "notes"
        monkeypatch.setenv("NOTES", str(notes))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing the others takes time
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done, [json.loads(line) for line in notes.read_text().splitlines()]

    return go


def together(notes) -> int:
    """How many of these ran at the same time, at most."""
    return max(sum(begun <= began < ended for *_, begun, ended in notes) for *_, began, _ in notes)


@pytest.mark.parametrize("workers", ["2", "3"])
def test_every_test_runs_once_and_the_lonely_ones_alone_and_last(run, workers):
    done, notes = run({}, "-n", workers, *FOLDERS)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = sorted((name.partition("/")[2], n) for name in FILES for n in range(FILES[name]))
    assert sorted((name, n) for name, n, *_ in notes) == expected
    assert f"{len(expected)} passed" in done.stdout
    alone = [note for note in notes if note[0] in KIND["alone"]]
    rest = [note for note in notes if note[0] not in KIND["alone"]]
    assert min(note[3] for note in alone) >= max(note[4] for note in rest)
    assert together(alone) == 1 and len({note[2] for note in alone}) == 1
    assert alone[-1][0] == "test_left.py" and [n for n, *_ in alone] == [
        "test_client_rate.py", "test_client_rate.py", "test_new.py", "test_new.py", "test_left.py"
    ]  # fmt: skip
    assert together(rest) == int(workers)
    assert together([note for note in rest if note[0] in KIND["heavy"]]) == min(int(workers), 2)
    for name in FILES:  # a file has one worker, and keeps its order
        mine = [note for note in notes if note[0] == name.partition("/")[2]]
        assert len({note[2] for note in mine}) == 1 and [note[1] for note in mine] == sorted(
            note[1] for note in mine
        )


@pytest.mark.parametrize("where", ["server/test_lifecycle.py", "server/test_new.py"])
def test_failures_are_told_and_a_worker_that_dies_costs_one_test(run, where):
    more = {
        where: "os._exit(3) if n == 0 else None",
        "unit/test_client_rate.py": "assert n == 0, 'as asked'",
        "unit/test_b.py": "assert n",
    }
    done, notes = run(more, "-n", "3", *FOLDERS)
    assert done.returncode == 1
    assert f"3 failed, {sum(FILES.values()) - 3} passed" in done.stdout
    assert set(re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)) == {
        f"tests/{where}::test_it[0]",
        "tests/unit/test_client_rate.py::test_it[1]",
        "tests/unit/test_b.py::test_it[0]",
    }
    # Each ran once; the one in which the worker died had written its note by then.
    assert len(notes) == sum(FILES.values()) == len({(name, n) for name, n, *_ in notes})


@pytest.fixture
def in_turn(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "tests"))
    return importlib.import_module("in_turn")


class Worker:
    """What the scheduler knows of one."""

    def __init__(self) -> None:
        self.shutting_down, self.sent = False, []

    def shutdown(self) -> None:
        self.shutting_down = True

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.sent.append(indexes)


def test_a_worker_that_comes_late_does_not_keep_the_last_one_waiting(in_turn):
    """Another holds the lonely tests back until it is alone, and this one replaces one that died."""
    names = [f"tests/unit/test_client_rate.py::test_it[{n}]" for n in range(2)]
    last, late = Worker(), Worker()
    turns = in_turn.InTurn.__new__(in_turn.InTurn)
    turns.collection, turns.workqueue = names, OrderedDict()
    turns.registered_collections = {last: names, late: names}
    turns.assigned_work = OrderedDict(
        {last: {"tests/unit/test_client_rate.py": dict.fromkeys(names, False)}, late: {}}
    )
    turns.held = last, [1]
    turns.schedule()
    assert late.shutting_down and not late.sent and not last.sent and not last.shutting_down
    assert turns.remove_node(late) is None
    assert last.sent == [[1]] and last.shutting_down and turns.held is None


def test_what_is_named_exists(root, in_turn):
    named = (*in_turn.HEAVY, *in_turn.ALONE, *in_turn.LONG)
    assert [name for name in named if not (root / name).is_file()] == []
    assert [in_turn.kind(name) for name in in_turn.HEAVY] == ["heavy"] * len(in_turn.HEAVY)
    assert [in_turn.kind(name) for name in in_turn.ALONE] == ["alone"] * len(in_turn.ALONE)
    # What looks at what is left behind, and what compares rates, is never beside anything.
    for name in ("leaks/test_nothing_left.py", "server/test_cross_checks.py"):
        assert in_turn.kind(f"tests/{name}") == "alone"
