"""A measurement as a child of the server's Python: bounded, its output in a file, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparkling import procs, server
from sparkling.lane import Lane


def run(
    lane: Lane,
    command: Sequence[str],
    said: Path,
    *,
    limit_s: float,
    grace_s: float,
    parting: int = signal.SIGKILL,
    cwd: Path | None = None,
) -> str:
    """Run `command` in the environment of a server with Humming and return the last line it said.

    It has `limit_s` and then `grace_s` to end by itself. After that, on Ctrl-C and when this process
    dies it gets `parting`: SIGTERM for a program that has children of its own to end, and SIGKILL
    if that did not end it within `grace_s`.

    said: the file for its output; its folder exists.
    """
    # As the recipes set it, so that kernels compiled for a server are found and kept.
    humming = {"HUMMING_COMPILER": "nvrtc", "HUMMING_CACHE_DIR": str(lane.cache / "humming")}
    with said.open("wb") as log:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=server.child_environment(humming, lane.server_python),
            start_new_session=True,
            preexec_fn=procs.with_parent(parting),
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(limit_s + grace_s)
        finally:  # Ctrl-C too
            for number in (parting, signal.SIGKILL):
                if child.poll() is None:
                    with contextlib.suppress(OSError):
                        os.killpg(child.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(grace_s)
    lines = [line for line in said.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"
