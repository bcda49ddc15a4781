"""What this machine has for a server: memory, CPUs, disk, limits. Bytes throughout, read only.

Memory is the machine's, or the container's where that is less (see `cgroup`), and on a DGX Spark it
is the GPU's as well: one pool, for which nvidia-smi has no figure (see `gpus`). Nothing here needs
a GPU, a driver or root, and every source can be replaced by a test.

    memory()        one look, GPU included (nvidia-smi is asked, at most 2 s a question)
    host_memory()   the same without the GPU: two small files, for a watchdog
    cpus()          how many jobs make sense at once
"""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sparkling import cgroup
from sparkling import gpus as _gpus
from sparkling.cgroup import Read, read_text
from sparkling.errors import SparklingError
from sparkling.gpus import Gpus

MEMINFO = "/proc/meminfo"


@dataclass(frozen=True)
class Memory:
    """One look at the memory; bytes.

    `total` and `available` are what processes here may use: the machine's, or a container's if that
    is less; `source` says which. `available` counts cache that the kernel would drop, as MemAvailable
    does. `unified`: the GPU draws from this same memory. `gpu_total` and `gpu_available` are those of
    a GPU's own memory, None where there is no GPU, where it has none, or where it does not say.
    """

    total: int
    available: int
    source: str
    unified: bool = False
    limit: int | None = None  # the container's, None when there is none below the machine's size
    host_total: int = 0
    host_available: int = 0
    free: int = 0  # MemFree: untouched, without droppable cache
    page_cache: int = 0  # of it could be dropped by hand, at most
    swap_total: int = 0
    swap_free: int = 0
    gpu: str | None = None
    gpu_total: int | None = None
    gpu_available: int | None = None

    @property
    def untold(self) -> bool:
        """Whether there is a GPU with memory of its own, and a driver that says nothing of it."""
        return self.gpu is not None and not self.unified and self.gpu_total is None

    @property
    def model_total(self) -> int:
        """The memory that a model is loaded into: the GPU's own, else the machine's."""
        return self.total if self.gpu_total is None else self.gpu_total

    @property
    def model_available(self) -> int:
        """What of `model_total` is free."""
        return self.available if self.gpu_available is None else self.gpu_available


def _meminfo(read: Read) -> dict[str, int]:
    """/proc/meminfo in bytes. Raises SparklingError where it does not say how much there is."""
    found = {}
    for line in (read(MEMINFO) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    if not found.get("MemTotal"):
        raise SparklingError(
            f"{MEMINFO} does not say how much memory there is, so nothing here can judge what fits; "
            "run this on Linux with /proc mounted."
        )
    return found


def host_memory(read: Read = read_text) -> Memory:
    """The memory without a look at the GPU (`unified` is False): cheap enough for every tick."""
    info = _meminfo(read)
    file_cache = info.get("Active(file)", 0) + info.get("Inactive(file)", 0)
    unwritten = info.get("Dirty", 0) + info.get("Writeback", 0)
    cache = max(0, file_cache - unwritten) + info.get("SReclaimable", 0)
    source = MEMINFO
    if "MemAvailable" in info:
        host = info["MemAvailable"]
    else:  # before Linux 3.14; MemFree alone would call cache used
        host, source = info.get("MemFree", 0) + cache, f"{MEMINFO} (MemFree and droppable cache)"
    total, available, limit = info["MemTotal"], host, None
    for level in cgroup.memory_limits(read):
        if level.limit < total:
            total = limit = level.limit
        if level.limit < info["MemTotal"] and level.headroom < available:
            available = level.headroom
            source = f"control group {level.folder} (limit {level.limit / 2**30:.1f} GiB)"
    return Memory(
        total=total,
        available=min(available, total),
        source=source,
        limit=limit,
        host_total=info["MemTotal"],
        host_available=host,
        free=info.get("MemFree", 0),
        page_cache=cache,
        swap_total=info.get("SwapTotal", 0),
        swap_free=info.get("SwapFree", 0),
    )


def memory(read: Read = read_text, gpus: Callable[[], Gpus] | Gpus = _gpus.look) -> Memory:
    """One look at the memory, GPU included.

    Args:
        read: what reads a file.
        gpus: what looks at the GPUs, or what was already seen of them.

    Raises:
        SparklingError: /proc/meminfo does not say how much memory there is.
    """
    here = host_memory(read)
    seen = gpus if isinstance(gpus, Gpus) else gpus()
    if not seen.all:
        return here
    first = seen.all[0]
    if first.unified:
        source = f"{here.source}, unified with {first.name}"
        return dataclasses.replace(here, unified=True, gpu=first.name, source=source)
    return dataclasses.replace(
        here, gpu=first.name, gpu_total=first.memory_total, gpu_available=first.memory_free
    )


def _affinity() -> int:
    return len(os.sched_getaffinity(0))


def cpus(read: Read = read_text, affinity: Callable[[], int] = _affinity) -> int:
    """CPUs that this process may keep busy: its affinity, or a container's quota if that is less
    (rounded down). At least 1."""
    quota = cgroup.cpu_limit(read)
    allowed = affinity()
    return max(1, allowed if quota is None else min(allowed, int(quota)))


# -- disk and limits -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """The file system that would hold `path`: its size and what this user may still write."""

    path: Path  # the nearest folder above it that exists
    total: int
    free: int


def disk(path: Path, usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage) -> Disk:
    """The disk under `path`, which need not exist yet. Raises SparklingError."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            try:
                total, _, free = usage(folder)
            except OSError as error:
                raise SparklingError(
                    f"The disk under {folder} cannot be looked at: {error.strerror or error}."
                ) from error
            return Disk(folder, total, free)
    raise SparklingError(f"No folder above {path} exists, so its disk cannot be looked at.")


LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
}


def limits(
    get: Callable[[int], tuple[int, int]] = resource.getrlimit, names: Iterable[str] = LIMITS
) -> dict[str, int | None]:
    """This process's soft limits (`ulimit`), None for "unlimited". Memory in bytes."""
    found = {}
    for name in names:
        soft, _ = get(LIMITS[name])
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found
