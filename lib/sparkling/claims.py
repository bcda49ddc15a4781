"""Who holds memory: one note for each server and kernel build of ours, for the whole machine.

A server that has just been started holds nothing yet, so the available memory does not show it; its
note does. On a GPU, and on a machine whose GPU shares the memory, there is one model at a time. On a
CPU several may run side by side as long as their needs fit together.

A note names its keeper by pid, start time and boot id (`procs.Identity`) and counts only while that
process lives: what a crash or a reboot left behind is removed by the next look.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import procs
from sparkling.errors import SparklingError
from sparkling.files import write_atomic
from sparkling.memory import NoMemory

GIB = 2**30


@dataclass(frozen=True)
class Claim:
    """One note. `ready`: its memory is taken by now, so the available memory shows it."""

    who: procs.Identity
    what: str  # for a sentence: "ling-3.0-flash, stage nextn, on port 30001"
    need: int
    device: bool  # holds a GPU's memory, of its own or shared
    ready: bool
    since: float
    path: Path

    def outstanding(self) -> int:
        """Bytes that it will still take."""
        return 0 if self.ready else max(0, self.need - _held(self.who.pid))


def _held(pid: int) -> int:
    """Anonymous and shared memory of a process and everything below it (files are cache)."""
    total = 0
    for one in [pid, *(each.pid for each in procs.descendants(pid))]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{one}/status") as file:
                for line in file:
                    if line.startswith(("RssAnon:", "RssShmem:")):
                        total += int(line.split()[1]) * 1024
    return total


def folder() -> Path:
    """Where the notes are: this user's own, never shared with another machine.

    One place whoever starts the server: XDG_RUNTIME_DIR is there in a login session, not in a
    service, a container or under sudo, and logind removes it when the user logs out. (SPARKLING_CLAIMS
    names another place, for tests.)
    """
    return Path(os.environ.get("SPARKLING_CLAIMS") or f"/tmp/sparkling-{os.getuid()}")


class Table:
    """The notes, while nobody else may change them."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def living(self) -> list[Claim]:
        """Every note whose process lives. Stale and unreadable ones are removed."""
        found = []
        for path in sorted(self.place.glob("*.json")):
            claim = _read(path)
            if claim is not None and procs.is_alive(claim.who):
                found.append(claim)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return found

    def require(self, what: str, need: int, *, device: bool, available: int | None) -> None:
        """Raise NoMemory when `what` may not be started beside what runs. available None: its need
        is unknown, and only the GPU is asked about."""
        others = self.living()
        for other in others:
            if device and other.device:
                at = time.strftime("%H:%M", time.localtime(other.since))
                raise NoMemory(
                    f"{what} is not started: {other.what} (pid {other.who.pid}) has held the GPU's "
                    f"memory since {at}, and there is one model at a time; stop it first "
                    "(`sparkling stop` for a server)."
                )
        coming = sum(other.outstanding() for other in others)
        if available is not None and others and need > available - coming:
            names = " and ".join(f"{one.what} (pid {one.who.pid})" for one in others)
            raise NoMemory(
                f"{what} is not started: it needs {need / GIB:.1f} GiB, {available / GIB:.1f} are "
                f"available and {coming / GIB:.1f} of them will be taken by {names}; wait until that "
                "is ready or stop it."
            )

    def path(self, name: str) -> Path:
        return self.place / f"{name}.json"

    def add(self, name: str, who: procs.Identity, what: str, need: int, *, device: bool) -> Path:
        """Write a note; it counts from now on."""
        note = {
            "who": who.to_json(),
            "what": what,
            "need": need,
            "device": device,
            "ready": False,
            "since": time.time(),
        }
        write_atomic(self.path(name), json.dumps(note) + "\n")
        return self.path(name)


def _read(path: Path) -> Claim | None:
    try:
        note: dict[str, Any] = json.loads(path.read_text())
        who = procs.Identity.from_json(note["who"])
        if who is None:
            return None
        return Claim(
            who,
            str(note["what"]),
            int(note["need"]),
            bool(note["device"]),
            bool(note["ready"]),
            float(note["since"]),
            path,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def table() -> Iterator[Table]:
    """Hold the notes: nobody else starts anything between a check and what it decides.

    Raises:
        SparklingError: the folder cannot be used, or belongs to somebody else.
    """
    place = folder()
    handle = _lock(place)
    try:
        yield Table(place)
    finally:
        _tidy(place)
        os.close(handle)


def _lock(place: Path) -> int:
    for _ in range(100):
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise SparklingError(
                f"{place} cannot be used to note who holds memory: {error.strerror or error}."
            ) from error
        mine = os.fstat(handle)
        if mine.st_uid != os.getuid() or mine.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(handle)
            raise SparklingError(f"{place} belongs to somebody else; have it removed.")
        fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            # It may have been removed, being empty, while we waited.
            if os.stat(place).st_ino == mine.st_ino:
                return handle
        os.close(handle)
    raise SparklingError(f"{place} is removed again and again; look what does it.")


def _tidy(place: Path) -> None:
    with contextlib.suppress(OSError):
        place.rmdir()  # only if it is empty


def ready(path: Path) -> None:
    """Note that a claim's memory is taken by now."""
    with table() as held:
        if path.parent == held.place and path.exists():
            note = json.loads(path.read_text())
            write_atomic(path, json.dumps({**note, "ready": True}) + "\n")


def release(path: Path) -> None:
    """Remove a note; harmless when it is gone."""
    with table():
        with contextlib.suppress(OSError):
            path.unlink()
