"""A small JSON file in which the scheduler process says what it really did.

The notebooks read it as one of three independent pieces of evidence for a switch, so everything in
it is recorded where the work happens: a swapped weight, a shared module, a limit that was applied.
Written atomically, at most every :data:`INTERVAL_S`, and the last change is never lost: a change
that comes too early is written by a timer. Without ``SPARKLING_STATUS_FILE`` nothing here runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches
    from sparkling_sglang.switches import Switches

INTERVAL_S = 0.5
KERNEL_PACKAGES = ("humming-kernels", "flashinfer-python", "sglang-kernel", "triton")

logger = logging.getLogger("sparkling_sglang")

current: Status | None = None
"""This process's status file, or None when none is kept."""


class Status:
    """The contents of one status file and when to write them.

    Args:
        path: the file; its folder must exist.
        fields: the first contents, written with the first change.
        clock: monotonic seconds.
        timer: ``threading.Timer`` or, in tests, something that can be fired by hand.
    """

    def __init__(
        self,
        path: Path,
        fields: dict[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[..., Any] = threading.Timer,
    ) -> None:
        self.path = path
        self._fields = dict(fields)
        self._clock, self._timer_class = clock, timer
        self._counter: Callable[[], int] | None = None
        self._applied: int | None = None
        self._lock = threading.RLock()
        self._dirty = self._ticked = self._complained = False
        self._written_at: float | None = None
        self._timer: Any = None

    def update(self, **fields: Any) -> None:
        """Set top-level fields; a dict is merged into a dict that is already there."""
        with self._lock:
            for key, value in fields.items():
                old = self._fields.get(key)
                both = isinstance(old, dict) and isinstance(value, dict)
                self._fields[key] = {**old, **value} if both else value
            self._dirty = True
            self._soon()

    def get(self, field: str) -> Any:
        """What :meth:`update` last left in ``field``."""
        return self._fields.get(field)

    def count_head(self, counter: Callable[[], int]) -> None:
        """Let ``counter`` supply ``head.applied``, read after batches (see :meth:`tick`)."""
        with self._lock:
            self._counter, self._applied = counter, 0
            self._dirty = True
            self._soon()

    def tick(self) -> None:
        """Called after each batch: write soon if the counter moved.

        The counter is read only as a consequence of a tick. On a GPU it lives on the device:
        reading it waits for the device (so at most every :data:`INTERVAL_S`) and would break a
        graph capture, and no batch ends while graphs are captured.
        """
        if self._counter is None:
            return
        with self._lock:
            self._ticked = True
            self._soon()

    def _soon(self) -> None:
        wait = 0.0 if self._written_at is None else self._written_at + INTERVAL_S - self._clock()
        if wait <= 0:
            self._write()
        elif self._timer is None:
            self._timer = self._timer_class(wait, self._late)
            self._timer.daemon = True
            self._timer.start()

    def _late(self) -> None:
        with self._lock:
            self._timer = None
            self._write()

    def _write(self) -> None:
        if self._ticked and self._counter is not None:
            applied = self._counter()
            self._dirty |= applied != self._applied
            self._applied, self._ticked = applied, False
        self._written_at = self._clock()
        if not self._dirty:
            return
        fields = dict(self._fields)
        if self._applied is not None:
            fields["head"] = {**(fields.get("head") or {}), "applied": self._applied}
        fields["updated"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            replace_file(self.path, json.dumps(fields, indent=1) + "\n")
            self._dirty = False
        except OSError as error:
            # A full disk must not stop the server: the next change tries again.
            if not self._complained:
                logger.warning("Cannot write the status file %s: %s.", self.path, error)
            self._complained = True


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old or the new contents, never a part.

    Raises:
        OSError: the folder is missing, read-only or full; ``path`` is then unchanged.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def update(**fields: Any) -> None:
    """:meth:`Status.update` on this process's file, if one is kept."""
    if current is not None:
        current.update(**fields)


_moe_seen: dict[str, tuple[float, float | None]] = {}


def moe_used(layer_name: str, scaling: float, limit: float | None) -> None:
    """Note the factor and the limit with which a layer's routed experts were just computed.

    Called for every product, so it returns at once when nothing changed. ``swiglu_limits`` is keyed
    by the layer's number in the checkpoint, read from a name like ``model.layers.4.experts``: the
    NEXTN layer passes layer id 0 to SGLang, but its name has the number after the last layer.
    """
    if current is None or _moe_seen.get(layer_name) == (scaling, limit):
        return
    _moe_seen[layer_name] = (scaling, limit)
    number = {name: next(filter(str.isdigit, name.split(".")), name) for name in _moe_seen}
    current.update(
        moe={
            "routed_scaling_applied": True,
            "routed_scaling": {number[name]: s for name, (s, _) in _moe_seen.items()},
            "swiglu_limits": {number[name]: limit for name, (_, limit) in _moe_seen.items()},
        }
    )


def versions() -> dict[str, str]:
    """Versions of the installed packages whose kernels a server may run; absent ones left out."""
    found = {}
    for name in KERNEL_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def start(patches: Patches, wanted: Switches) -> None:
    """Begin this process's status file, if ``SPARKLING_STATUS_FILE`` names one.

    The first write happens once the target model is loaded, so a file from an earlier start must
    not be believed before its ``pid`` is the server's.
    """
    global current
    if not wanted.status_file:
        return
    import torch
    from sglang.version import __version__ as sglang_version

    from sparkling_sglang import __version__

    current = Status(
        Path(wanted.status_file),
        {
            "plugin": __version__,
            "sglang": sglang_version,
            "torch": torch.__version__,
            "versions": versions() | {"cuda": torch.version.cuda},
            "pid": os.getpid(),
            "device": None,
            "patched": patches.names,
            "switches": wanted.ids(),
            "head": None,
            "draft": None,
            "moe": None,
            "humming": None,
        },
    )
    patches.hook(
        "status", "sglang.srt.model_executor.model_runner.ModelRunner.load_model", _loaded, "after"
    )
    patches.hook(
        "status",
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        lambda _result, *_a, **_k: current.tick() if current else None,
        "after",
    )


def first() -> bool:
    """Whether this is the process that keeps the file: the first rank of the first replica."""
    from sglang.srt.runtime_context import get_parallel

    here = get_parallel()
    return not (here.tp_rank or here.dp_rank)


def _loaded(_result: Any, runner: Any) -> None:
    """After ``ModelRunner.load_model``: the device, and what head the target has now.

    Runs after the hook that quantizes the head, because that one is registered first.
    """
    global current
    if not first():
        current = None  # one file, one writer
    if current is None or runner.is_draft_worker:
        return
    current.update(device=str(runner.device))
    weight = getattr(getattr(runner.model, "lm_head", None), "weight", None)
    if current.get("head") is None and weight is not None:
        size = weight.numel() * weight.element_size()
        current.update(
            head={"dtype": dtype_name(weight.dtype), "bytes_before": size, "bytes_after": size}
        )


def dtype_name(dtype: Any) -> str:
    """``torch.float8_e4m3fn`` as ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")
