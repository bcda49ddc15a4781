"""Which of Humming's kernels were compiled and which came from its cache, for the status file.

Humming (0.1.12) asks for each kernel once, through ``humming.jit.compiler.Compiler.compile``, which
returns the file of a cached kernel or compiles it under a lock. A file that was written after the
question was asked was compiled, here or by a process that held the lock meanwhile. A first start that
compiles looks like a slow one, and a cache that is compiled again at every start (another installation
changes all its names) looks like nothing at all: hence the count.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling_sglang import status

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

BACKEND = "humming"

# File systems keep times more coarsely than the clock: a file may look this much older than it is.
COARSE_S = 0.05


class Counts:
    """Kernels asked for in this process, and the seconds that compiling took."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.compiled = self.cached = self.failed = 0
        self.seconds = 0.0
        self.folder: str | None = None
        self._clock, self._lock = clock, threading.Lock()

    def ask(self, compile_: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        """Call Humming's ``compile_`` and count what came of it; the path of the kernel."""
        began = self._clock()
        try:
            path = compile_(*args, **kwargs)
        except Exception:
            with self._lock:
                self.failed += 1
            self._tell()
            raise
        now = self._clock()
        try:
            fresh = os.stat(path).st_mtime >= began - COARSE_S
        except OSError:
            fresh = False
        with self._lock:
            if fresh:
                self.compiled += 1
                self.seconds += now - began
            else:
                self.cached += 1
            self.folder = str(Path(path).parent.parent)
        self._tell()
        return path

    def _tell(self) -> None:
        status.update(
            humming={
                "compiled": self.compiled,
                "cached": self.cached,
                "failed": self.failed,
                "compile_s": round(self.seconds, 3),
                "cache": self.folder,
            }
        )


def watch(compiler: type, counts: Counts) -> None:
    """Count the kernels that are asked of ``compiler``, Humming's base class of its compilers."""
    original = compiler.compile.__func__  # a classmethod: its subclasses are the compilers in use
    if getattr(original, "_sparkling", False):
        return

    def counted(cls: type, *args: Any, **kwargs: Any) -> str:
        return counts.ask(original, cls, *args, **kwargs)

    counted._sparkling = True
    compiler.compile = classmethod(counted)


def _loading(runner: Any) -> None:
    """Before ``ModelRunner.load_model``, where Humming prepares its layers."""
    if getattr(runner.server_args, "moe_runner_backend", None) != BACKEND or not status.current:
        return
    if not status.first():
        return
    try:
        from humming.jit.compiler import Compiler
    except ImportError:
        return  # SGLang says so itself
    status.update(humming={"compiled": 0, "cached": 0, "failed": 0, "compile_s": 0.0})
    watch(Compiler, Counts())


def register(patches: Patches) -> None:
    """Count Humming's kernels from the load on (scheduler process)."""
    patches.hook(
        "humming-kernels",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        _loading,
        "before",
    )
