"""Ask a short command something, with a limit that holds even against a wedged driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

Answer = tuple[int, str] | str
"""(exit code, stdout), or a clause saying why there is no answer."""

Ask = Callable[[Sequence[str], float], Answer]
"""What asks a command, so that tests can answer in its place."""


def ask(
    command: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    stderr: bool = False,
) -> Answer:
    """Run `command` for at most `timeout_s` seconds; `stderr` adds what it says there. Never raises
    for a command that is missing, fails or hangs."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if stderr else subprocess.DEVNULL,
            start_new_session=True,
            env=None if env is None else dict(env),
        )
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror or error})"
    try:
        out, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # Not waited for: a child stuck in the driver cannot be killed, and would take us along.
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        return f"{command[0]} did not answer within {timeout_s:g} s"
    return child.returncode, out.decode("utf-8", "replace")
