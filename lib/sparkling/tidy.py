"""Nothing stays behind: processes that die with their parent, and what a run left, by name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from sparkling import procs

MARK = "SPARKLING_SUITE_RUN"
"""Environment variable that a suite gives to everything it starts: the folder of its run. It is
inherited through double forks and new sessions, so it finds what no process tree shows."""

SCRATCH = ".scratch"
"""The suite's temporary folder, inside its run's folder."""


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends, also when the parent is killed.

    parent: the pid that must still be the parent; if it is not, it has ended already.
    """
    with contextlib.suppress(OSError):
        procs.prctl(procs.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def guard_kernel() -> None:
    """In a kernel that a suite started: end with papermill, also in the middle of C code (where
    ipykernel's own watch on its parent, a Python thread, cannot act)."""
    if os.environ.get(MARK):
        die_with_parent(os.getppid())


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent ends."""
    with contextlib.suppress(OSError):
        procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)


def marked(run_dir: Path) -> list[procs.Identity]:
    """Living processes that this run's suite started, this process left out."""
    return procs.marked(MARK, str(run_dir.absolute()))


def end_marked(run_dir: Path, linger_s: float) -> list[str]:
    """Give the run's processes `linger_s` seconds to go, kill the rest; names what had to be killed."""
    left = procs.wait_gone(marked(run_dir), linger_s)
    told = []
    for who in left:
        told.append(f"process {describe(who.pid)} had to be killed")
        procs.send(who, signal.SIGKILL)
    procs.wait_gone(left, 5.0)
    return told


def describe(pid: int) -> str:
    """A pid with the beginning of its command line."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        raw = b""
    return f"{pid} ({raw.replace(bytes(1), b' ').decode('utf-8', 'replace').strip()[:80]})"


def leaks(run: Any) -> list[str]:
    """What a run left behind, one sentence each; [] is as it should be.

    run: a `store.Run`, or the run's folder. Looks for processes that the suite started, servers
    that the run's state files name, and the suite's temporary folders.
    """
    run_dir = Path(getattr(run, "dir", run)).absolute()
    found = [f"process {describe(who.pid)} still runs" for who in marked(run_dir)]
    found += _servers(run_dir)
    if (run_dir / SCRATCH).exists():
        found.append(f"temporary folder {run_dir / SCRATCH}")
    return found


def _servers(run_dir: Path) -> list[str]:
    """Servers of the run that are still alive, by the state files beside the runs."""
    found = []
    for path in sorted((run_dir.parent / ".servers").glob("*.json")):
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if not str(data.get("log", "")).startswith(str(run_dir) + os.sep):
            continue
        for key in ("keeper", "warden", "server"):
            who = procs.Identity.from_json(data.get(key))
            if who is not None and procs.is_alive(who):
                found.append(f"server {describe(who.pid)} still runs (port {data.get('port')})")
                break
        else:
            found.append(f"state file {path.name} of a server that is gone")
    return found
