"""What broken-off downloads left behind: found by name and place, named, removed when asked.

Ours are in `.fetch`: a partial file whose content the hub no longer has, whose state is gone, or
whose file is complete by now. huggingface_hub leaves `*.incomplete` files (2.4.0 gives each process
its own name and never comes back for one), the ModelScope library `*.incomplete`,
`*.parallel_tmp` and `._____temp` folders. A file that was written to within the last hour may
belong to a download that still runs, and is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkling.files import os_error
from sparkling.hubs import gb
from sparkling.weights_plan import DONE, WORK, Step, part_of, resumable, state_of

IDLE_S = 3600.0
_THEIRS = ("*.incomplete", "*.parallel_tmp", "._____temp")


@dataclass(frozen=True)
class Orphan:
    """A leftover. busy: it may belong to a download that still runs."""

    path: Path
    size: int
    why: str
    busy: bool = False

    def __str__(self) -> str:
        kept = "; written to within the hour, so it stays" if self.busy else ""
        return f"{self.path} ({gb(self.size)}): {self.why}{kept}"


def ours(folder: Path, steps: Sequence[Step] | None = None) -> list[Orphan]:
    """Partial files of ours that no step will go on with; without steps: all of them.

    Only while no other process fetches into the folder (the download holds its lock).
    """
    going_on = set()
    for step in steps or ():
        if step.action in ("resume", "check") and resumable(step.file, folder)[0]:
            going_on |= {part_of(folder, step.file.path), state_of(folder, step.file.path)}
    found = []
    for path in sorted((folder / WORK).glob("*")):
        if path in going_on or path.name in (DONE, "lock"):
            continue
        why = "a partial file that nothing goes on with"
        found.append(Orphan(path, _size(path), why))
    return found


def theirs(folder: Path, repo: str | None = None, now: float | None = None) -> list[Orphan]:
    """Leftovers of the hubs' own tools in the folder and, for `repo`, in their caches."""
    seen: dict[Path, Orphan] = {}
    clock = time.time() if now is None else now
    for root in (folder, *_caches(repo)):
        for pattern in _THEIRS:
            for path in sorted(root.rglob(pattern)) if root.is_dir() else ():
                if (folder / WORK) in path.parents or path.is_symlink():
                    continue
                idle = clock - _newest(path)
                why = "left by a download of a hub's own tool that broke off"
                seen[path] = Orphan(path, _size(path), why, busy=idle < IDLE_S)
    return [o for o in seen.values() if not any(p in seen for p in o.path.parents)]


def _caches(repo: str | None) -> Iterator[Path]:
    if not repo:
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    told = os.environ.get("HF_HUB_CACHE")
    yield (Path(told) if told else home / "hub") / f"models--{repo.replace('/', '--')}"
    root = Path(os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope")
    yield root / "models" / repo.replace("/", "--")
    yield root / "hub" / "models" / repo


def clean(orphans: Sequence[Orphan]) -> int:
    """Remove leftovers that are not busy; the bytes given back. Raises SparklingError."""
    freed = 0
    for orphan in orphans:
        if orphan.busy:
            continue
        try:
            if orphan.path.is_dir() and not orphan.path.is_symlink():
                shutil.rmtree(orphan.path)
            else:
                orphan.path.unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, "removing", orphan.path) from error
        freed += orphan.size
    return freed


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (inside for inside in path.rglob("*") if inside.is_file())
    else:
        yield path


def _size(path: Path) -> int:
    total = 0
    for file in _files(path):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _newest(path: Path) -> float:
    newest = 0.0
    for file in (path, *_files(path)):
        with contextlib.suppress(OSError):
            newest = max(newest, file.stat().st_mtime)
    return newest
