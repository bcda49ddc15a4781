"""Runs last: nothing that the tests started still runs, listens or lies about.

Importing this module, before any test has run, marks everything that this pytest starts from then
on: the mark is an environment variable, so double forks and new sessions do not lose it. Several
workers (`-n`) collect before any of them runs a test, and share one mark.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MARK = "PYTEST_LEAK_CHECK"
IDENTITY = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{time.time_ns()}"
os.environ[MARK] = IDENTITY
PLACES = sorted({Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")})
PREFIXES = ("sparkling", "sglang", ".sparkling", "clamp-")
GRACE_S = 60.0


def temporary() -> set[Path]:
    found = set()
    for path in (path for place in PLACES if place.is_dir() for path in place.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            if path.name.startswith(PREFIXES) and path.lstat().st_uid == os.getuid():
                found.add(path)
    return found


BEFORE = temporary()


def ours() -> list[psutil.Process]:
    """Living processes with our mark, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == IDENTITY:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def told(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def test_the_mark_finds_what_hides():
    """Else the next test could not fail."""
    code = "'hides'; import os, time; os.setsid(); os.fork() or time.sleep(60)"
    subprocess.run([sys.executable, "-c", code], check=True)
    # An orphan in a session of its own; what other tests have left may still be ending.
    found = [process for process in ours() if "-c 'hides'" in told(process)]
    for process in found:
        process.kill()
    assert len(found) == 1


def test_no_process_is_left():
    deadline = time.monotonic() + GRACE_S
    while (left := ours()) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [told(process) for process in left]
    for process in left:  # told below; they must not outlive the tests as well
        process.kill()
    assert names == []


def test_no_port_is_left():
    """A socket outlives its process only if another one holds it."""
    mine = psutil.Process()
    listening = [c.laddr for c in mine.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening == []


def test_no_temporary_file_is_left():
    assert sorted(map(str, temporary() - BEFORE)) == []
