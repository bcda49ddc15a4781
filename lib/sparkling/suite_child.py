"""One notebook under papermill, in a process of its own that cannot outlive the suite.

Started by `suite` as `python -m sparkling.suite_child FD`: job as JSON on stdin, events as JSON
lines on the pipe FD (not on stdout, which the kernel inherits). The kernel sees to its own end (`notebook.begin`, ipykernel's parent poller), a server
to its own (its keeper's pipe); what is still there after the notebook is a leak and is ended here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sparkling import procs, tidy

BACKGROUND = re.compile(r"^(Exception in thread |Task exception was never retrieved)", re.M)
"""What Python prints where an error stays in the background and the cell succeeds."""


_events: list[int] = []


def say(**event: Any) -> None:
    """One event to the suite."""
    for fd in _events:
        os.write(fd, (json.dumps(event) + "\n").encode())


def first_line(source: str) -> str:
    """The first line of a cell that says something (not blank, not a comment)."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    code = [line for line in lines if not line.startswith("#")]
    return (code or lines or [""])[0][:100]


def run(job: dict[str, Any]) -> int:
    """Execute the job's notebook; the exit code is 0 only if every cell truly ran."""
    # nbformat checks notebooks with jsonschema, which builds a grammar of URIs out of this package while
    # it is imported: over a second for each notebook, for formats that a notebook does not have.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import papermill
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.exceptions import PapermillExecutionError

    at: dict[str, int] = {}

    class Telling(NBClientEngine):
        """papermill's own engine, telling where it is."""

        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> Any:
            start, complete = nb_man.cell_start, nb_man.cell_complete

            def cell_start(cell: Any, cell_index: int = 0, **kw: Any) -> None:
                at["cell"] = cell_index
                say(
                    event="cell",
                    index=cell_index,
                    total=len(nb_man.nb.cells),
                    kind=cell.cell_type,
                    first=first_line(cell.source),
                )
                start(cell, cell_index=cell_index, **kw)

            def cell_complete(cell: Any, cell_index: int = 0, **kw: Any) -> None:
                complete(cell, cell_index=cell_index, **kw)
                say(event="cell-end", index=cell_index)

            nb_man.cell_start, nb_man.cell_complete = cell_start, cell_complete
            return super().execute_managed_notebook(nb_man, kernel_name, **kwargs)

    papermill_engines.register("sparkling", Telling)
    problem: dict[str, Any] | None = None
    try:
        papermill.execute_notebook(
            job["source"],
            job["output"],
            parameters=job["parameters"],
            engine_name="sparkling",
            kernel_name="python3",
            progress_bar=False,
            coalesce_streams=True,
            cwd=job["cwd"],
            start_timeout=120,
            execution_timeout=job["cell_timeout_s"],
            autosave_cell_every=10,
        )
    except PapermillExecutionError as failure:
        said = strip_ansi("\n".join(failure.traceback)) or hidden(Path(job["output"]))
        problem = {"kind": "error", "index": at.get("cell"), "said": said}
    except TimeoutError:
        limit = job["cell_timeout_s"]
        problem = {
            "kind": "timeout",
            "index": at.get("cell"),
            "said": f"The cell ran longer than {limit:g} s and was ended.",
        }
    except Exception as failure:  # a dead kernel, a broken notebook: whatever it is, it is told
        said = f"{type(failure).__name__}: {failure}"
        if type(failure).__name__ == "DeadKernelError":
            said = "The kernel died while the cell ran (ended from outside, or out of memory?)."
        problem = {"kind": "dead", "index": at.get("cell"), "said": said}
    if problem is None:
        problem = untruth(Path(job["output"]))
    leaks = end_leftovers(job["linger_s"])
    say(event="done", problem=problem, leaks=leaks)
    return 0 if problem is None and not leaks else 1


def hidden(output: Path) -> str:
    """What a failing cell printed whose error itself was hidden by a custom traceback."""
    said = ""
    for cell in json.loads(output.read_text("utf-8"))["cells"]:
        if (cell["metadata"].get("papermill") or {}).get("exception"):
            said = "".join("".join(o.get("text", "")) for o in cell.get("outputs", ()))
    return (
        f"The cell failed, and its error was not shown. It printed: {strip_ansi(said) or 'nothing'}"
    )


def untruth(output: Path) -> dict[str, Any] | None:
    """Why an executed notebook that papermill calls good is not, or None.

    Looks for what slips through: an error output under another name, a cell that never ran (after
    `sys.exit(0)`), an error in a thread or a task.
    """
    try:
        cells = json.loads(output.read_text("utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as failure:
        return {
            "kind": "missing",
            "index": None,
            "said": f"The executed notebook is missing or unreadable ({failure}).",
        }
    for index, cell in enumerate(cells):
        if cell.get("cell_type") != "code" or not "".join(cell.get("source", "")).strip():
            continue
        if "skip-execution" in cell.get("metadata", {}).get("tags", ()):
            continue
        for out in cell.get("outputs", ()):
            text = "".join(out.get("text", ""))
            if out.get("output_type") == "error":
                return {
                    "kind": "error",
                    "index": index,
                    "said": f"{out.get('ename')}: {out.get('evalue')}",
                }
            if out.get("name") == "stderr" and BACKGROUND.search(text):
                return {"kind": "background", "index": index, "said": text}
        if cell.get("execution_count") is None:
            return {
                "kind": "unrun",
                "index": index,
                "said": "The cell was never run: the notebook ended before it without an error.",
            }
    return None


def end_leftovers(linger_s: float) -> list[str]:
    """Wait up to `linger_s` seconds for every descendant to go, kill the rest, and name them.

    This process adopts orphans, so nothing that the kernel started can hide under PID 1.
    """
    deadline = time.monotonic() + linger_s
    while True:
        with contextlib.suppress(ChildProcessError):  # reap: a zombie is nobody's leak
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [stat for stat in procs.descendants(os.getpid()) if not stat.dead]
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    told = [f"process {tidy.describe(stat.pid)}" for stat in left]
    procs.kill_descendants(5.0)
    return told


def strip_ansi(text: str) -> str:
    """Text without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def main() -> int:
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    _events.append(fd)
    job = json.load(sys.stdin)
    # jupyter_client makes the kernel's connection file here; only for this process, as the paths of
    # sockets that a server makes may not grow long.
    tempfile.tempdir = job["scratch"]
    tidy.die_with_parent(job["parent"])
    tidy.adopt_orphans()
    return run(job)


if __name__ == "__main__":
    raise SystemExit(main())
