"""One pass over the notebooks of a run: start each, watch it, end it, judge it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkling import card, report, tidy
from sparkling.files import write_atomic
from sparkling.lane import Lane
from sparkling.live import clock
from sparkling.store import Run
from sparkling.suite_result import GOOD, CellTime, NotebookResult, SuiteResult

OVERTIME_S = 60.0
"""Beyond a cell's own limit, after which the child itself is taken to hang."""

BETWEEN_S = 240.0
"""Longest time without a running cell: a kernel that starts, a server that is left to stop."""

LINGER_S = 40.0
"""How long a server may take to stop when the notebook that started it is gone."""

TICK_S = 15.0
"""Between two progress lines of a notebook that is still running."""

Progress = Callable[[str], None]


class Pass:
    """One pass over the notebooks of one run."""

    def __init__(
        self,
        lane: Lane,
        run_dir: Path,
        chosen: list[Path],
        sources: Mapping[str, Any],
        given: Mapping[str, dict[str, Any]],
        text: Mapping[str, Any],
        cell_timeout_s: float,
        progress: Progress,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        """asked: the notebooks and parameters of the request, kept for whoever resumes the run."""
        self.asked = dict(asked or {})
        self.lane, self.dir, self.chosen, self.given = lane, run_dir, chosen, given
        self.cell_timeout_s, self.progress, self.cards = cell_timeout_s, progress, text
        self.out = run_dir / "notebooks"
        self.out.mkdir(parents=True, exist_ok=True)
        self.expected = card.seconds(lane, chosen[0].parent)
        self.signal: int | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.results = [
            NotebookResult(p.stem, key=key_of(sources[p.stem], given[p.stem])) for p in chosen
        ]

    def run(self, *, keep: bool) -> SuiteResult:
        """Everything in order; the report is written whatever happens."""
        result = SuiteResult(
            self.dir.name,
            self.dir,
            self.lane.kind,
            self.results,
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        began = time.monotonic()
        if keep:
            self._keep_done()
        self._save(result)  # a run that is killed at once resumes with what it was asked for
        scratch = self.dir / tidy.SCRATCH
        shutil.rmtree(scratch, ignore_errors=True)  # of a suite that was killed
        scratch.mkdir()
        try:
            with self._signals():
                for i, (path, mine) in enumerate(zip(self.chosen, self.results, strict=True)):
                    if mine.verdict == "kept":
                        self.progress(f"[{i + 1}/{len(self.chosen)}] {mine.name}: kept")
                    elif self.signal is None:
                        self._one(path, mine, f"[{i + 1}/{len(self.chosen)}]", scratch)
                    result.seconds = time.monotonic() - began
                    self._save(result)
                result.leaks += tidy.end_marked(self.dir, LINGER_S)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            result.stopped = self.signal
            result.seconds = time.monotonic() - began
            result.leaks += tidy.leaks(self.dir)
            self._save(result)
            result.report = report.build(self.dir)
        return result

    def _keep_done(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads((self.dir / "timings.json").read_text("utf-8"))
            before = {n["name"]: n for n in data["notebooks"]}
            for mine in self.results:
                old = before.get(mine.name)
                done = old and old["verdict"] in GOOD and old["key"] == mine.key
                if done and (self.out / f"{mine.name}.ipynb").is_file():
                    mine.verdict, mine.seconds = "kept", old["seconds"]
                    mine.cells = [CellTime(**c) for c in old["cells"]]

    def _one(self, path: Path, mine: NotebookResult, at: str, scratch: Path) -> None:
        failed = {n.name for n in self.results if n.verdict in ("failed", "skipped")}
        blocked = [n for n in card.after(self.cards, mine.name) if n in failed]
        if blocked:
            mine.verdict, mine.said = "skipped", f"It needs {blocked[0]}, which did not finish."
            self.progress(f"{at} {mine.name}: skipped, it needs {blocked[0]}")
            return
        expected = self.expected.get(mine.name)
        about = f", about {clock(expected)}" if expected else ""
        self.progress(f"{at} {mine.name}{about} …")
        began = time.monotonic()
        mine.verdict = "failed"  # until it is known to be good
        done = self._watch(self._spawn(path, mine.name, scratch), mine, at, began)
        self._judge(mine, done)
        mine.seconds = round(time.monotonic() - began, 2)
        run = Run(self.dir, mine.name)
        if mine.verdict not in GOOD and mine.name in run.manifest["notebooks"]:
            run.finish(mine.verdict)
        self.progress(f"{at} {mine.name}: {mine.verdict} after {clock(mine.seconds)}")
        if mine.problem:
            self.progress(mine.problem)

    def _judge(self, mine: NotebookResult, done: Mapping[str, Any] | None) -> None:
        code = self._end_of_child()
        if self.signal is not None:
            mine.verdict, mine.said = "stopped", "The suite was stopped."
        elif done is None:
            mine.kind = mine.kind or "dead"
            mine.said = mine.said or f"The process that ran it ended without a word ({code})."
        elif done["problem"] is not None:
            problem = done["problem"]
            mine.kind, mine.said = problem["kind"], problem["said"]
            if problem["index"] is not None and problem["index"] != mine.cell:
                mine.cell = problem["index"]
                firsts = [c.first for c in mine.cells if c.index == mine.cell]
                mine.cell_first = firsts[-1] if firsts else None
        elif done["leaks"]:
            mine.kind, mine.said = "leak", "It left behind " + "; ".join(done["leaks"])
        elif code == 0 and (self.out / f"{mine.name}.ipynb").is_file():
            mine.verdict, mine.cell, mine.cell_first = "ok", None, None
        else:
            mine.kind, mine.said = "dead", f"The process that ran the notebook ended with {code}."

    def _spawn(self, path: Path, name: str, scratch: Path) -> int:
        """Start the child; returns the reading end of its events."""
        output = self.out / f"{name}.ipynb"
        output.unlink(missing_ok=True)  # an old one must not pass for this one
        job = {
            "source": str(path),
            "output": str(output),
            "parameters": self.given[name],
            "cwd": str(path.parent),
            "cell_timeout_s": self.cell_timeout_s,
            "parent": os.getpid(),
            "linger_s": LINGER_S,
            "scratch": str(scratch),
        }
        reader, writer = os.pipe()
        with open(self.out / f"{name}.log", "wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "sparkling.suite_child", str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.lane, self.dir, scratch),
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps(job).encode())
            self.child.stdin.close()
        return reader

    def _watch(
        self, reader: int, mine: NotebookResult, at: str, began: float
    ) -> dict[str, Any] | None:
        """Follow the child until it is done, dead, too late, or the suite is stopped.

        Returns its last word, None if it never said it.
        """
        rest, done, total = b"", None, 0
        since, limit = time.monotonic(), BETWEEN_S
        told = since
        try:
            while self.signal is None:
                if select.select([reader], [], [], 0.25)[0]:
                    piece = os.read(reader, 65536)
                    if not piece:
                        return done
                    *lines, rest = (rest + piece).split(b"\n")
                    for event in map(json.loads, lines):
                        now = time.monotonic()
                        if event["event"] == "cell":
                            total = event["total"]
                            mine.cell, mine.cell_first = event["index"], event["first"]
                            if event["kind"] == "code":
                                mine.cells.append(CellTime(event["index"], event["first"], 0.0))
                            since, limit = now, self.cell_timeout_s + OVERTIME_S
                        elif event["event"] == "cell-end":
                            if mine.cells and mine.cells[-1].index == event["index"]:
                                mine.cells[-1].seconds = round(now - since, 2)
                            since, limit = now, BETWEEN_S
                        else:
                            done = event
                now = time.monotonic()
                if now - since > limit:
                    mine.kind = "timeout"
                    mine.said = (
                        f"Nothing moved for {limit:g} s, and it could not be ended otherwise."
                    )
                    return None
                if now - told >= TICK_S:
                    told = now
                    self.progress(f"{at} {self._where(mine, now - began, total)}")
            return None
        finally:
            os.close(reader)
            if done is None:
                self._kill_child()

    def _where(self, mine: NotebookResult, elapsed_s: float, total: int) -> str:
        """Notebook, elapsed, expected, cell: one progress line."""
        expected = self.expected.get(mine.name)
        text = f"{mine.name}: {clock(elapsed_s)}" + (
            f" of about {clock(expected)}" if expected else ""
        )
        if total:
            text += f", cell {mine.cell} of {total}"
            text += f" ({mine.cell_first})" if mine.cell_first else ""
        return text

    def _end_of_child(self) -> int | None:
        """Its exit code; it has said its last word, so it is not waited for long."""
        child, self.child = self.child, None
        if child is None:
            return None
        try:
            return child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def _kill_child(self) -> None:
        """The child's whole group at once; its kernel dies with it, a server through its keeper."""
        if self.child is not None and self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP stop the notebook that runs; the report is still written."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _frame: Any) -> None:
            self.signal = self.signal or number

        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _save(self, result: SuiteResult) -> None:
        """timings.json, replaced at once so that a reader (or a resume) never sees half of it."""
        data = {
            "run": result.run_id,
            "lane": result.lane,
            "started": result.started,
            "seconds": round(result.seconds, 2),
            "ok": result.ok,
            "leaks": result.leaks,
            "stopped": result.stopped,
            "cell_timeout_s": self.cell_timeout_s,
            "asked": self.asked,
            "parameters": self.given,
            "notebooks": [asdict(n) for n in result.notebooks],
        }
        text = json.dumps(data, indent=1, ensure_ascii=False)
        write_atomic(self.dir / "timings.json", text + "\n")


def key_of(source: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Changes when what would run changes: the code and text of the cells and the parameters."""
    cells = [(c.get("cell_type"), "".join(c.get("source", ""))) for c in source["cells"]]
    blob = json.dumps([cells, {k: v for k, v in given.items() if k != "run_id"}], sort_keys=True)
    return hashlib.sha256(blob.encode()).hexdigest()[:16]


def environment(lane: Lane, run_dir: Path, scratch: Path) -> dict[str, str]:
    """What a kernel of the suite is given: this lane's places, this environment's programs first.

    Jupyter's files and IPython's history go to the suite's scratch folder (a kernel's connection file,
    which holds a key, by `suite_child`), so two suites share nothing and a kill leaves nothing behind.
    """
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env |= {
        "SPARKLING_LANE": lane.kind,
        "SPARKLING_ROOT": str(lane.root),
        "SPARKLING_SERVER_PYTHON": str(lane.server_python),
        "SPARKLING_RECIPE": str(lane.recipe_path),
        "SPARKLING_EDITION": lane.edition,
        "SPARKLING_MODEL": str(lane.model),
        "SPARKLING_RUNS": str(lane.runs),
        tidy.MARK: str(run_dir.absolute()),
        "JUPYTER_RUNTIME_DIR": str(scratch / "jupyter"),
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return env
