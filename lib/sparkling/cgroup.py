"""Limits that a container or service manager sets: control groups, v1 and v2, whole hierarchy.

A limit anywhere between the process's own group and the root holds, so every level is looked at.
Memory: the kernel's documentation of `memory.max`, `memory.high`, `memory.current` and `memory.stat`
(v2), `memory.limit_in_bytes`, `memory.usage_in_bytes` (v1). CPUs: `cpu.max` (v2) and
`cpu.cfs_quota_us` / `cpu.cfs_period_us` (v1).

What a group's usage counts and the kernel gives back before it refuses memory is the same as
MemAvailable counts for the whole machine (`si_mem_available` in mm/show_mem.c): the file pages of both
lists and reclaimable slab. A file that was read twice, or written and then hashed, is on the *active*
list: 70 GB of weights just downloaded are, and they go as readily. Shared memory and tmpfs are
not on these lists, nor is what is locked. File pages that have yet to be written are taken off,
for they go only once the disk has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

Read = Callable[[str], str | None]
"""The text of a file by its absolute path, None when there is none or it may not be read."""


def read_text(path: str) -> str | None:
    """The real reader."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


@dataclass(frozen=True)
class Group:
    """One level: the folder of its files, and which version of the interface it speaks."""

    folder: str
    version: int  # 1 | 2


@dataclass(frozen=True)
class MemoryLimit:
    """What one level allows. `used` is what cannot be reclaimed at once: without the clean file
    cache and reclaimable slab that the kernel drops before it refuses memory."""

    folder: str
    version: int
    limit: int  # bytes
    used: int  # bytes

    @property
    def headroom(self) -> int:
        """Bytes that may still be taken; never below zero."""
        return max(0, self.limit - self.used)


def groups(controller: str, read: Read = read_text) -> Iterator[Group]:
    """Every level that governs this process for `controller` ("memory" or "cpu"), innermost first.

    Where a container sees only its own part of the hierarchy, the mount is where the walk ends.
    """
    own: dict[int, str] = {}
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            own[2] = path
        elif controller in names.split(","):
            own[1] = path
    for version, path in sorted(own.items(), reverse=True):
        root, mount = _mount(controller, version, read)
        below = PurePosixPath(path)
        if root != "/" and below.is_relative_to(root):
            below = PurePosixPath("/") / below.relative_to(root)
        if ".." in below.parts or not below.is_absolute():
            below = PurePosixPath("/")
        for level in (below, *below.parents):
            yield Group(f"{mount}{level}".rstrip("/"), version)


def _mount(controller: str, version: int, read: Read) -> tuple[str, str]:
    """(root of the mounted part, mount point) of this hierarchy; the usual place if not told."""
    usual = "/sys/fs/cgroup" if version == 2 else f"/sys/fs/cgroup/{controller}"
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 3:
            continue
        right = kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup"
        if right and (version == 2 or controller in kind[2].split(",")):
            return fields[3], fields[4].replace("\\040", " ")
    return "/", usual


def _number(text: str | None) -> int | None:
    """A whole number of bytes; None for "max", nothing or nonsense."""
    word = (text or "").strip()
    return int(word) if word.isdigit() else None


DROPPED = ("inactive_file", "active_file", "slab_reclaimable")
UNWRITTEN = (("file_dirty", "dirty"), ("file_writeback", "writeback"))  # v2's name, v1's


def droppable(stat: str | None, version: int) -> int:
    """Bytes that a group's `memory.stat` says the kernel would give back at once; see above. v1 names
    what a group holds with all below it "total_…", and has no figure for slab."""
    found = {}
    for line in (stat or "").splitlines():
        name, _, value = line.partition(" ")
        found[name] = _number(value) or 0

    def of(name: str) -> int:
        return (
            found.get(f"total_{name}", found.get(name, 0)) if version == 1 else found.get(name, 0)
        )

    held = sum(of(name) for name in DROPPED)
    return max(0, held - sum(of(names[version == 1]) for names in UNWRITTEN))


def memory_limits(read: Read = read_text) -> list[MemoryLimit]:
    """Every memory limit that holds here, innermost first; [] when there is none.

    A limit of v1 near the largest integer (its "none") is one like any other: the machine's own
    size is smaller.
    """
    found = []
    for group in groups("memory", read):
        if group.version == 2:
            told = [
                _number(read(f"{group.folder}/{name}")) for name in ("memory.max", "memory.high")
            ]
            used = _number(read(f"{group.folder}/memory.current"))
        else:
            told = [_number(read(f"{group.folder}/memory.limit_in_bytes"))]
            used = _number(read(f"{group.folder}/memory.usage_in_bytes"))
        limits = [limit for limit in told if limit is not None]
        if not limits:
            continue
        cache = droppable(read(f"{group.folder}/memory.stat"), group.version)
        taken = max(0, (used or 0) - cache)
        found.append(MemoryLimit(group.folder, group.version, min(limits), taken))
    return found


def cpu_limit(read: Read = read_text) -> float | None:
    """CPUs' worth of time that this process may use, None when no quota holds."""
    quotas = []
    for group in groups("cpu", read):
        if group.version == 2:
            words = (read(f"{group.folder}/cpu.max") or "").split()
            quota, period = (*words, "100000")[:2] if words else ("max", "100000")
        else:
            quota = (read(f"{group.folder}/cpu.cfs_quota_us") or "-1").strip()
            period = (read(f"{group.folder}/cpu.cfs_period_us") or "100000").strip()
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
