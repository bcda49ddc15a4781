"""The suite runs notebooks for real (papermill and kernels, no server)."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from sparkling import card, procs, suite, suite_child, suite_run, tidy
from sparkling.errors import SparklingError, UsageError
from sparkling.lane import Lane
from sparkling.store import open_run
from sparkling.suite_result import last_lines

ROOT = Path(__file__).resolve().parents[2]
HEAD = 'lane = "auto"\nrun_id = ""\nrepeats = 3\nfast = False'


def write(folder: Path, name: str, *cells: str, parameters: str = HEAD) -> None:
    book = v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    )
    tagged = v4.new_code_cell(parameters)
    tagged.metadata["tags"] = ["parameters"]
    book.cells = [v4.new_markdown_cell(f"# {name}"), tagged, *map(v4.new_code_cell, cells)]
    nbformat.write(book, folder / f"{name}.ipynb")


def make_lane(tmp: Path) -> Lane:
    recipe = ROOT / "env" / "recipes" / "tiny-ling.toml"
    python = Path(sys.executable)
    return Lane("cpu", ROOT, python, recipe, tmp / "model", tmp / "runs", "a test")


LIVE = """from sparkling.live import Live
with Live("Counting") as live:
    for i in range(30):
        live.update([{"i": i}], note=f"{i} of 29")"""

CARD = 'title = "{0}"\nhave = "h"\nrisks = "r"\nundo = "u"\nafter = {1}\n'


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One suite with a good notebook, a failing one, one that needs it, and one that does not."""
    tmp = tmp_path_factory.mktemp("mixed")
    books = tmp / "notebooks"
    books.mkdir()
    write(
        books,
        "00_good",
        "import os\nprint(repeats, fast, lane, run_id)\nprint(os.environ['SPARKLING_RUNS'])",
        "for i in range(50):\n    print(i, end='\\r', flush=True)\nprint('end')",
        LIVE,
    )
    write(books, "10_bad", "x = 1", "# a comment\nraise ValueError('the bad thing')", "x = 2")
    write(books, "20_needs_bad", "1")
    connection = "import ipykernel, tempfile\nprint(ipykernel.get_connection_file())"
    write(books, "30_free", connection + "\nprint(tempfile.gettempdir())", parameters="y = 1")
    write(books, "notes", "1")
    cards = {
        name: CARD.format(name, json.dumps(["10_bad"] if name == "20_needs_bad" else []))
        for name in ("00_good", "10_bad", "20_needs_bad", "30_free")
    }
    text = "\n".join(f"[{name}]\n{table}" for name, table in cards.items())
    (books / "cards.toml").write_text(text)
    lines: list[str] = []
    lane = make_lane(tmp)
    result = suite.run_suite(
        lane,
        folder=books,
        params={"repeats": "007", "fast": "true"},
        cell_timeout_s=120,
        progress=lines.append,
    )
    return lane, books, result, lines


def executed(result, name: str) -> dict:
    return nbformat.read(result.run_dir / "notebooks" / f"{name}.ipynb", as_version=4)


def test_exit_code_and_verdicts_are_the_truth(mixed):
    _, _, result, _ = mixed
    verdicts = {n.name: n.verdict for n in result.notebooks}
    assert verdicts == {
        "00_good": "ok",
        "10_bad": "failed",
        "20_needs_bad": "skipped",
        "30_free": "ok",
    }
    assert result.exit_code == 1
    assert not result.ok
    assert result.leaks == []


def test_a_failure_names_notebook_cell_and_last_lines(mixed):
    _, _, result, lines = mixed
    bad = result.notebooks[1]
    assert bad.kind == "error"
    assert bad.cell_first == "raise ValueError('the bad thing')"
    told = result.text()
    for text in (told, "\n".join(lines)):
        assert "10_bad, cell 4 (raise ValueError('the bad thing'))" in text
        assert "ValueError: the bad thing" in text
    assert "20_needs_bad" in told
    assert "needs 10_bad" in told
    assert "\x1b" not in told
    assert "NOT OK" in told
    assert str(result.report) in told


def test_parameters_reach_the_notebook_typed(mixed):
    lane, _, result, _ = mixed
    out = "".join(
        o["text"] for c in executed(result, "00_good")["cells"][3:4] for o in c["outputs"]
    )
    assert out == f"7 True cpu {result.run_id}\n{lane.runs}\n"


def test_the_key_of_a_kernel_is_in_a_file_that_goes_with_the_run(mixed):
    _, _, result, _ = mixed
    (out,) = [
        output["text"]
        for cell in executed(result, "30_free")["cells"]
        for output in cell.get("outputs", ())
    ]
    file, temporary = map(Path, out.split())
    assert file.parent == result.run_dir / tidy.SCRATCH and not file.parent.exists()
    assert temporary == Path(tempfile.gettempdir())  # what the cells and servers make stays there


def test_streams_are_one_output(mixed):
    _, _, result, _ = mixed
    outputs = executed(result, "00_good")["cells"][4]["outputs"]
    assert len(outputs) == 1
    assert outputs[0]["text"].endswith("end\n")


def test_a_live_view_leaves_one_output_with_its_final_state(mixed):
    _, _, result, _ = mixed
    (output,) = executed(result, "00_good")["cells"][5]["outputs"]
    assert output["output_type"] == "display_data"
    for face in ("text/plain", "text/html"):
        assert "29 of 29" in output["data"][face]
        assert "…" not in output["data"][face]


def test_the_failing_notebook_is_saved_with_its_error(mixed):
    _, _, result, _ = mixed
    cells = executed(result, "10_bad")["cells"]
    assert any(o["output_type"] == "error" for c in cells for o in c.get("outputs", ()))


def test_timings_per_notebook_and_per_cell(mixed):
    _, _, result, _ = mixed
    data = json.loads((result.run_dir / "timings.json").read_text())
    assert data["ok"] is False
    assert data["lane"] == "cpu"
    assert data["seconds"] >= sum(n["seconds"] for n in data["notebooks"]) * 0.99
    good = data["notebooks"][0]
    assert good["seconds"] > 0
    firsts = [c["first"] for c in good["cells"]]
    assert firsts[-3:-1] == ["import os", "for i in range(50):"]
    assert sum(c["seconds"] for c in good["cells"]) <= good["seconds"]


def test_progress_says_which_notebook_and_how_it_ended(mixed):
    _, _, _, lines = mixed
    assert lines[0].startswith("[1/4] 00_good")
    assert any(re.match(r"\[1/4\] 00_good: ok after \d+:\d\d$", line) for line in lines)
    assert any("20_needs_bad: skipped" in line for line in lines)


def test_the_report_exists_although_a_notebook_failed(mixed):
    _, _, result, _ = mixed
    page = (result.run_dir / "report.html").read_text()
    assert 'href="notebooks/10_bad.ipynb"' in page
    assert "the bad thing" in page
    assert "2 of 4 notebooks" in page
    assert "NOT everything passed" in page
    for outside in ("http://", "https://", "<script", "<link"):
        assert outside not in page


def test_minutes_come_from_this_lane_s_last_run(mixed):
    lane, books, result, _ = mixed
    found = card.measured(lane, books)
    assert set(found) == {"00_good", "30_free"}
    assert result.run_id in found["00_good"].source


def test_resume_keeps_what_is_done_and_unchanged(mixed):
    lane, books, result, _ = mixed
    before = executed(result, "00_good")
    write(books, "10_bad", "x = 1")
    again = suite.run_suite(
        lane,
        folder=books,
        params={"repeats": "7", "fast": "yes"},
        resume=True,
        cell_timeout_s=120,
        progress=None,
    )
    assert again.run_id == result.run_id
    verdicts = [n.verdict for n in again.notebooks]
    assert verdicts == ["kept", "ok", "ok", "kept"]
    assert executed(again, "00_good") == before
    assert again.exit_code == 0
    assert again.notebooks[0].seconds == result.notebooks[0].seconds


class Cut(Exception):
    """Stands for a kill before the first notebook."""


def test_a_resumed_run_is_the_run_that_was_asked_for(tmp_path, monkeypatch):
    books = tmp_path / "notebooks"
    books.mkdir()
    for name in ("00_a", "10_b", "20_c"):
        write(books, name, "1")
    lane = make_lane(tmp_path)
    ran: list[tuple[str, dict]] = []

    def one(self, _path, mine, *_rest):
        ran.append((mine.name, {k: v for k, v in self.given[mine.name].items() if k == "repeats"}))
        raise Cut

    monkeypatch.setattr(suite_run.Pass, "_one", one)
    # What a kill leaves is what was written before; the end of a pass writes nothing here.
    monkeypatch.setattr(suite_run.report, "build", lambda _dir: None)

    def run(**options) -> list[str]:
        lines: list[str] = []
        with pytest.raises(Cut):
            suite.run_suite(lane, folder=books, progress=lines.append, **options)
        return lines

    saved = []
    save = suite_run.Pass._save
    with monkeypatch.context() as patch:  # only the first writing is left
        patch.setattr(suite_run.Pass, "_save", lambda *a: saved or saved.append(1) or save(*a))
        assert run(notebooks=["10_b"], params={"repeats": "7"}) == []
    (line,) = run(resume=True)
    assert ran == [("10_b", {"repeats": 7})] * 2
    assert line.endswith(", which began with 10_b, repeats=7")
    (line,) = run(resume=True, notebooks=["20_c"], params={"repeats": "5", "fast": "1"})
    assert ran[-1] == ("20_c", {"repeats": 5})
    assert "began with 10_b, repeats=7; given now instead: 20_c, repeats=5, fast=1" in line
    (line,) = run(resume=True)
    assert "began with 20_c, repeats=5, fast=1" in line
    (run_dir,) = lane.runs.glob("2*")
    assert run_dir.name in line
    run(params={"repeats": "2"})
    (line,) = run(resume=True, run_id=run_dir.name)
    assert "20_c" in line
    assert (
        "began with all notebooks, repeats=2"
        in run(resume=True, run_id=next(p.name for p in lane.runs.glob("2*") if p != run_dir))[0]
    )
    assert ran[-1] == ("00_a", {"repeats": 2})


def test_a_changed_cell_or_parameter_is_not_kept():
    book = {"cells": [{"cell_type": "code", "source": ["x = ", "1"]}]}
    same = {"cells": [{"cell_type": "code", "source": "x = 1", "outputs": [1], "id": "z"}]}
    other = {"cells": [{"cell_type": "code", "source": "x = 2"}]}
    key = suite_run.key_of(book, {"a": 1, "run_id": "r1"})
    assert key == suite_run.key_of(same, {"a": 1, "run_id": "r2"})
    assert key != suite_run.key_of(other, {"a": 1})
    assert key != suite_run.key_of(book, {"a": 2})


def test_the_sentence_of_an_error_is_not_cut_off_with_its_long_tail():
    tail = [f"  | line {i}" for i in range(30)]
    said = "\n".join(["StartFailed: The server did not start: the port is taken.", *tail])
    kept = last_lines(said)
    assert kept[0].startswith("StartFailed: The server did not start")
    assert kept[-1] == "  | line 29"
    assert len(kept) == 14
    assert last_lines("-----\n" + "\n".join(map(str, range(40)))) == list(map(str, range(28, 40)))
    assert last_lines("one\ntwo") == ["one", "two"]


def cell(source: str = "x", count: int | None = 1, **more) -> dict:
    return {
        "cell_type": "code",
        "source": source,
        "execution_count": count,
        "outputs": [],
        "metadata": {},
    } | more


ERROR = {"output_type": "error", "ename": "SystemExit", "evalue": "0", "traceback": []}
THREAD = {
    "output_type": "stream",
    "name": "stderr",
    "text": ["warned\n", "Exception in thread Thread-3 (f):\n", "Traceback …"],
}
TASK = {
    "output_type": "stream",
    "name": "stderr",
    "text": "Task exception was never retrieved\nfuture: <Task …>",
}
QUOTED = {"output_type": "stream", "name": "stdout", "text": "Exception in thread: quoted"}
SKIPPED = {"metadata": {"tags": ["skip-execution"]}}


@pytest.mark.parametrize(
    ("cells", "kind", "index"),
    [
        ([cell(), cell(outputs=[ERROR]), cell(count=None)], "error", 1),
        ([cell(), cell(count=None)], "unrun", 1),
        ([cell(outputs=[THREAD])], "background", 0),
        ([cell(outputs=[TASK])], "background", 0),
        ([cell(outputs=[QUOTED]), cell("", None), cell(count=None, **SKIPPED)], None, None),
        (None, "missing", None),
    ],
)
def test_what_papermill_lets_through_is_found(tmp_path, cells, kind, index):
    path = tmp_path / "x.ipynb"
    if cells is not None:
        path.write_text(json.dumps({"cells": cells}))
    found = suite_child.untruth(path)
    assert (found or {}).get("kind") == kind
    assert (found or {}).get("index") == index


@pytest.fixture(scope="module")
def tricks(tmp_path_factory):
    """Notebooks that hang, die, or leave something behind: results of the one that hangs, and
    of the others, which need time for what they do."""
    tmp = tmp_path_factory.mktemp("tricks")
    books = tmp / "notebooks"
    books.mkdir()
    write(books, "30_slow", "import time\ntime.sleep(300)")
    write(books, "40_dead", "import os\nos.kill(os.getpid(), 9)")
    leak = (
        "import subprocess\n"
        "p = subprocess.Popen(['setsid', 'sleep', '302'], stdout=subprocess.DEVNULL,"
        " start_new_session=True)"
    )
    write(books, "50_leak", leak)
    hide = "get_ipython().set_custom_exc((Exception,), lambda *a, **k: print('all is well'))"
    write(books, "60_hidden", hide, "1 / 0")
    lane = make_lane(tmp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkling.suite_run.LINGER_S", 1.0)
        return [
            suite.run_suite(
                lane, folder=books, notebooks=names, cell_timeout_s=limit_s, progress=None
            )
            for names, limit_s in ((["30_slow"], 3), (["40_dead", "50_leak", "60_hidden"], 60))
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("30_slow", "timeout", "longer than 3 s"),
        ("40_dead", "dead", "kernel died"),
        ("50_leak", "leak", "sleep 302"),
        ("60_hidden", "error", "It printed: all is well"),
    ],
)
def test_no_failure_slips_through(tricks, name, kind, said):
    result = next(n for ran in tricks for n in ran.notebooks if n.name == name)
    assert result.verdict == "failed"
    assert result.kind == kind
    assert said in (result.said or "")
    assert result.name in result.problem


@pytest.mark.slow
def test_what_a_notebook_left_behind_is_ended(tricks):
    assert [ran.exit_code for ran in tricks] == [1, 1]
    assert [tidy.leaks(ran.run_dir) for ran in tricks] == [[], []]
    assert not [s for s in procs.table().values() if _runs(s.pid, "sleep 302")]


def _runs(pid: int, words: str) -> bool:
    return words in tidy.describe(pid)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_suite import make_lane
from sparkling import suite
tmp = Path({tmp!r})
result = suite.run_suite(make_lane(tmp), folder=tmp / "notebooks", cell_timeout_s=100, resume={resume})
print(result.text())
sys.exit(result.exit_code)
"""


def launch(tmp: Path, *, resume: bool = False) -> subprocess.Popen[str]:
    code = SCRIPT.format(here=str(Path(__file__).parent), tmp=str(tmp), resume=resume)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(what, timeout_s: float = 90.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout_s} s in vain")


STUCK = """
import os, pathlib, re
from sparkling import tidy
tidy.guard_kernel()
pathlib.Path(here).write_text(str(os.getpid()))
re.match(r"(a+)+$", "a" * 60 + "b")  # hours in C code that holds the interpreter lock
"""


def begin_stuck(tmp: Path, *first: str) -> tuple[subprocess.Popen[str], procs.Identity, Path]:
    """A suite whose notebook hangs in C code; its process, its kernel and its run folder."""
    books = tmp / "notebooks"
    books.mkdir()
    here = tmp / "kernel.pid"
    for name in first:
        write(books, name, "print('done')")
    write(books, "10_stuck", STUCK, parameters=f"here = {str(here)!r}")
    child = launch(tmp)
    kernel = int(wait_for(lambda: here.is_file() and here.read_text()))
    run_dir = next((tmp / "runs").glob("2*"))
    assert len(tidy.marked(run_dir)) >= 2  # papermill's process and the kernel
    who = procs.identify(kernel)
    assert who is not None
    return child, who, run_dir


@pytest.mark.slow
def test_a_suite_that_is_told_to_stop_stops_everything_and_says_so(tmp_path):
    child, kernel, run_dir = begin_stuck(tmp_path)
    child.send_signal(signal.SIGTERM)
    out = child.communicate(timeout=120)[0]
    assert child.returncode == 128 + signal.SIGTERM
    assert not procs.is_alive(kernel)
    assert tidy.leaks(run_dir) == []
    assert "stopped by SIGTERM" in out
    assert "10_stuck" in out
    assert (run_dir / "report.html").is_file()


@pytest.mark.slow
def test_a_suite_that_is_killed_leaves_nothing_running_and_resumes(tmp_path):
    child, kernel, run_dir = begin_stuck(tmp_path, "00_done")
    child.kill()
    child.communicate(timeout=120)
    assert procs.wait_gone([kernel, *tidy.marked(run_dir)], 60.0) == []
    write(tmp_path / "notebooks", "10_stuck", "print('free now')", parameters="here = 1")
    again = launch(tmp_path, resume=True)
    out = again.communicate(timeout=240)[0]
    assert again.returncode == 0, out
    assert "00_done: kept" in out
    assert tidy.leaks(run_dir) == []  # the scratch folder of the killed one included


@pytest.mark.slow
def test_two_suites_at_once_do_not_meet(tmp_path):
    (tmp_path / "notebooks").mkdir()
    write(tmp_path / "notebooks", "00_a", "import time\ntime.sleep(1)\nprint(run_id)")
    pair = [launch(tmp_path), launch(tmp_path)]
    outs = [p.communicate(timeout=240)[0] for p in pair]
    assert [p.returncode for p in pair] == [0, 0], outs
    runs = sorted(p.name for p in (tmp_path / "runs").glob("2*"))
    assert len(runs) == 2
    for run in runs:
        book = nbformat.read(tmp_path / "runs" / run / "notebooks" / "00_a.ipynb", as_version=4)
        assert run in book.cells[-1].outputs[0]["text"]


def test_progress_says_elapsed_expected_and_cell(tmp_path):
    (tmp_path / "notebooks").mkdir()
    write(tmp_path / "notebooks", "00_a", "1")
    book = tmp_path / "notebooks" / "00_a.ipynb"
    one = suite_run.Pass(
        make_lane(tmp_path),
        tmp_path / "r",
        [book],
        {"00_a": {"cells": []}},
        {"00_a": {}},
        {},
        9.0,
        print,
    )
    one.expected = {"00_a": 70.0}
    mine = suite.NotebookResult("00_a", cell=5, cell_first="nb.start('nextn')")
    said = one._where(mine, 42.0, 14)
    assert said == "00_a: 0:42 of about 1:10, cell 5 of 14 (nb.start('nextn'))"
    one.expected = {}
    assert one._where(mine, 42.0, 0) == "00_a: 0:42"


def test_one_run_is_executed_by_one_suite(tmp_path):
    books = tmp_path / "notebooks"
    books.mkdir()
    write(books, "00_a", "1")
    lane = make_lane(tmp_path)
    run = open_run(lane.runs, None)
    with suite._sole(run.dir), pytest.raises(SparklingError, match="another suite"):
        suite.run_suite(lane, folder=books, run_id=run.id, progress=None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"notebooks": ["40_basline"]}, "no notebook '40_basline'; did you mean 40_baseline"),
        ({"params": {"repeat": "3"}}, "no parameter|has a parameter 'repeat'; did you mean"),
        ({"params": {"repeats": "many"}}, "repeats must be a whole number"),
        ({"run_id": "20200101-000000-aaaa", "resume": True}, "no run '20200101"),
        ({"run_id": "../x"}, "no run id"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_starts_nothing(tmp_path, options, said):
    books = tmp_path / "notebooks"
    books.mkdir()
    write(books, "40_baseline", "1")
    lane = make_lane(tmp_path)
    with pytest.raises(UsageError, match=said) as caught:
        suite.run_suite(lane, folder=books, progress=None, **options)
    assert "\n" not in str(caught.value)
    assert list(lane.runs.glob("2*")) == []


def test_no_notebooks_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="no notebooks in"):
        suite.run_suite(make_lane(tmp_path), folder=tmp_path, progress=None)


def test_kernels_find_this_environment_first(tmp_path):
    from sparkling.suite_run import environment

    env = environment(make_lane(tmp_path), tmp_path / "runs" / "r", tmp_path / "s")
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert env["JUPYTER_RUNTIME_DIR"].startswith(str(tmp_path / "s"))
    assert env["SPARKLING_LANE"] == "cpu"


def test_what_asks_a_model_comes_last_where_none_is_there_yet(tmp_path):
    books = ROOT / "notebooks"
    cards, every = card.load(books), suite.choose(books, None)
    here = make_lane(tmp_path)
    spark = dataclasses.replace(here, kind="spark")
    turned = [path.stem for path in suite.in_turn(spark, every, cards)]
    assert turned[:2] == ["10_environment", "20_weights"] and turned[-1] == "00_start_here"
    assert sorted(turned) == sorted(path.stem for path in every)
    assert suite.in_turn(here, every, cards) == every  # the cpu lane's model is in the repository
    only = suite.choose(books, ["00_start_here", "40_baseline"])
    assert suite.in_turn(spark, only, cards) == only  # nothing here brings one
    shutil.copytree(ROOT / "models" / "sparklet", spark.model)
    assert suite.in_turn(spark, every, cards) == every
