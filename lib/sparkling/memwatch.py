"""Watching the memory beside a running server: several looks a second, two small files each.

This file imports the standard library only: `keeper.py` loads it by path, outside the package. The
warden looks, because it owns the server and can end it without asking anybody.

A DGX Spark has one memory pool and no swap; when it is exhausted the driver locks up before the
kernel's own out-of-memory killer strikes. So the server is ended while there is still memory: when
less than `end` bytes are available, or when less than `warn` are and at the rate of the last second
nothing would be left in `HORIZON_S`. Cache that the kernel would drop counts as available.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field

INTERVAL_S = 0.2
HORIZON_S = 1.0
# Above this multiple of `warn` a warning is over, so that it is not given again at every tick.
CALM = 1.25
GIB = 2**30
DROPPED = ("inactive_file", "active_file", "slab_reclaimable")  # as in `cgroup`


@dataclass(frozen=True)
class Limits:
    """When to warn and when to end the server, and where to look; bytes.

    groups: (folder, version, limit) of every control group that limits this process (`cgroup`).
    """

    warn: int
    end: int
    total: int = 0
    meminfo: str = "/proc/meminfo"
    groups: tuple[tuple[str, int, int], ...] = ()
    interval_s: float = INTERVAL_S
    gpu: bool = False  # look at the GPU's own memory as well

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Limits:
        groups = tuple((str(f), int(v), int(n)) for f, v, n in data.get("groups", ()))
        return cls(**{**data, "groups": groups})


def _field(path: str, name: str) -> int | None:
    """The number after `name` in a file of "name number" lines."""
    try:
        with open(path) as file:
            for line in file:
                if line.startswith(name):
                    return int(line[len(name) :].split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def available(limits: Limits) -> int | None:
    """Bytes that may still be taken: MemAvailable, or what a container leaves if that is less.

    None where nothing can be read: then nobody is warned and nothing is ended.
    """
    kilobytes = _field(limits.meminfo, "MemAvailable:")
    found = [] if kilobytes is None else [kilobytes * 1024]
    for folder, version, limit in limits.groups:
        usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
        used = _number(os.path.join(folder, usage))
        if used is not None:
            # As before a start (`cgroup`), but with pages that have yet to be written: they go a
            # moment later, and ending a server for cache would be worse than that.
            before = "" if version == 2 else "total_"
            stat = os.path.join(folder, "memory.stat")
            dropped = sum(_field(stat, f"{before}{kind} ") or 0 for kind in DROPPED)
            found.append(max(0, limit - max(0, used - dropped)))
    return min(found, default=None)


@dataclass
class Watch:
    """What the looks add up to: "warn", "recovered", "end", or None for nothing new."""

    limits: Limits
    warned: bool = False
    ended: bool = False
    lowest: int | None = None
    looks: int = 0
    _recent: list[tuple[float, int]] = field(default_factory=list)

    def feed(self, now: float, free: int | None) -> str | None:
        """Take in one look (`now` in monotonic seconds, `free` in bytes)."""
        self.looks += 1
        if free is None or self.ended:
            return None
        self.lowest = free if self.lowest is None else min(self.lowest, free)
        self._recent = [one for one in self._recent if now - one[0] <= HORIZON_S] + [(now, free)]
        if free < self.limits.end or (free < self.limits.warn and free + self._change() <= 0):
            self.ended = True
            return "end"
        if free < self.limits.warn and not self.warned:
            self.warned = True
            return "warn"
        if self.warned and free > CALM * self.limits.warn:
            self.warned = False
            return "recovered"
        return None

    def _change(self) -> float:
        """By how much it would change within `HORIZON_S` if it went on as in the last looks.

        The middle one of the rates between them, so that one big step (a pool being allocated) is
        not taken for a fall that goes on. 0 for less than four looks.
        """
        rates = [
            (after - before) / (last - first)
            for (first, before), (last, after) in itertools.pairwise(self._recent)
            if last > first
        ]
        return sorted(rates)[len(rates) // 2] * HORIZON_S if len(rates) >= 3 else 0.0


def resident(pid: int) -> int:
    """Bytes that a process alone holds (resident without what it shares); 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            words = file.read().split()
        return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def biggest(count: int = 3) -> list[dict[str, object]]:
    """The processes that hold most memory: name (never arguments, they may hold secrets), pid and
    bytes of their own. One pass over /proc, some milliseconds: for an event, not for every look."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (held := resident(int(entry))):
            with contextlib.suppress(OSError):
                with open(f"/proc/{entry}/comm") as file:
                    found.append((held, int(entry), file.read().strip()))
    return [
        {"name": name, "pid": pid, "resident": held}
        for held, pid, name in sorted(found, reverse=True)[:count]
    ]


def sentence(event: dict) -> str:
    """One event in plain words, without a full stop."""
    free, total = event["available"] / GIB, event.get("total", 0) / GIB
    of = f" of {total:.1f}" if total else ""
    head = f"{free:.2f}{of} GiB of memory available"
    if event["level"] == "recovered":
        return f"{head} again"
    held = ", ".join(
        f"{one['name']} (pid {one['pid']}) {one['resident'] / GIB:.1f} GiB"
        for one in event.get("biggest", ())
    )
    most = f" (most is held by {held})" if held else ""
    if event["level"] == "warn":
        limit = event["end"] / GIB
        return f"{head}; below {limit:.2f} the server is ended{most}"
    if event["available"] < event["end"]:
        why = f"less than the {event['end'] / GIB:.2f} that are kept free"
    else:
        why = "and falling so fast that none would be left in a second"
    own = event.get("server_resident")
    its = f"; it held {own / GIB:.1f} GiB" if own is not None else ""
    return f"{head}, {why}: the server was ended before the machine ran out{its}{most}"


def record(path: str, event: dict) -> None:
    """Append one event to a JSONL file. A full disk loses it there; the log and the notebook have
    it too."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, json.dumps(event).encode() + b"\n")
        finally:
            os.close(handle)


class GpuMemory(threading.Thread):
    """The first GPU's own free memory, read through NVML in a thread: a wedged driver blocks this
    thread and nobody else. `free` and `total` stay None without a driver, and on a GB10, whose
    memory is the machine's (NVML answers "not supported")."""

    def __init__(self, interval_s: float = INTERVAL_S, library: str = "libnvidia-ml.so.1") -> None:
        super().__init__(daemon=True)
        self.free: int | None = None
        self.total: int | None = None
        self._interval_s, self._library = interval_s, library

    def run(self) -> None:
        class Memory(ctypes.Structure):
            _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

        try:
            nvml = ctypes.CDLL(self._library)
            device, memory = ctypes.c_void_p(), Memory()
            if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
                return
            while nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                if not memory.total:
                    return
                self.free, self.total = memory.free, memory.total
                time.sleep(self._interval_s)
        except (OSError, AttributeError):
            return
