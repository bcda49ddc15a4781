"""Facts about processes, ports and memory, read from /proc (Linux); signals that cannot miss.

This file imports the standard library only: `keeper.py` loads it by path, outside the package.

A process is named by its *identity* (pid, start time, boot id), never by a bare pid: pids are
reused, also across reboots, and a state file can be older than the process that now owns its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that matter here; `start` is in clock ticks since boot."""

    pid: int
    name: str
    state: str
    ppid: int
    pgrp: int
    session: int
    start: int
    exit_code: int = 0
    """Of a zombie: as wait(2) reports it, 0 also where this user may not see it."""

    @property
    def dead(self) -> bool:
        """A zombie holds nothing but its exit status: for us it is gone."""
        return self.state in "ZXx"


@dataclass(frozen=True)
class Identity:
    """What makes a process that process: pid, start time in clock ticks, boot id."""

    pid: int
    start: int
    boot: str

    def to_json(self) -> dict[str, int | str]:
        return {"pid": self.pid, "start": self.start, "boot": self.boot}

    @classmethod
    def from_json(cls, data: object) -> Identity | None:
        """The identity in `data`, or None if it is incomplete or nonsense."""
        if not isinstance(data, dict):
            return None
        pid, start, boot = data.get("pid"), data.get("start"), data.get("boot")
        if type(pid) is int and type(start) is int and isinstance(boot, str) and pid > 1:
            return cls(pid, start, boot)
        return None


def boot_id() -> str:
    """The kernel's id of this boot ("" where the kernel does not say)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_stat(pid: int) -> Stat | None:
    """/proc/PID/stat, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
        # The name may hold spaces and brackets: everything is counted from the last ")".
        head, tail = raw[: raw.rindex(b")")], raw[raw.rindex(b")") + 1 :].split()
        name = head[head.index(b"(") + 1 :].decode("utf-8", "replace")
        ppid, pgrp, session, start = (int(tail[i]) for i in (1, 2, 3, 19))
        code = int(tail[49]) if len(tail) > 49 else 0
        return Stat(pid, name, tail[0].decode(), ppid, pgrp, session, start, code)
    except (OSError, ValueError, IndexError):
        return None


def identify(pid: int) -> Identity | None:
    """The identity of the process that owns `pid` now."""
    stat = read_stat(pid)
    return None if stat is None else Identity(pid, stat.start, boot_id())


def is_alive(who: Identity | None) -> bool:
    """True if exactly this process still runs; a zombie, or another owner of the pid, is not it."""
    if who is None or who.boot != boot_id():
        return False
    stat = read_stat(who.pid)
    return stat is not None and stat.start == who.start and not stat.dead


def send(who: Identity | None, sig: int) -> bool:
    """Signal exactly this process; False if it is gone, foreign, or pid 1.

    The pidfd is opened first and the identity checked afterwards, so the pid cannot change hands
    between the check and the signal.
    """
    if who is None or who.pid <= 1:
        return False
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # a kernel or sandbox without pidfd
        handle = None
    try:
        if not is_alive(who):
            return False
        if handle is None:
            os.kill(who.pid, sig)
        else:
            signal.pidfd_send_signal(handle, sig)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle is not None:
            os.close(handle)


def table() -> dict[int, Stat]:
    """Every process, by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = read_stat(int(entry))
            if stat is not None:
                found[stat.pid] = stat
    return found


def descendants(root: int, processes: dict[int, Stat] | None = None) -> list[Stat]:
    """All living and zombie descendants of `root`, parents before children."""
    processes = table() if processes is None else processes
    children: dict[int, list[Stat]] = {}
    for stat in processes.values():
        children.setdefault(stat.ppid, []).append(stat)
    found, queue, seen = [], [root], {root}
    while queue:
        for stat in children.get(queue.pop(0), ()):
            if stat.pid not in seen:
                seen.add(stat.pid)
                found.append(stat)
                queue.append(stat.pid)
    return found


def marked(name: str, value: str) -> list[Identity]:
    """Living processes of this user whose environment holds `name=value`.

    The environment is inherited through double forks and new sessions, so this finds what a walk
    of the process tree can no longer reach; but a program that renames itself (setproctitle) may
    overwrite it: see `grouped` and `holding`.
    """
    needle = f"{name}={value}".encode()
    found = []
    for pid, stat in table().items():
        if stat.dead or pid == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        if needle in environment:
            found.append(Identity(pid, stat.start, boot_id()))
    return found


def grouped(session: int, group: int, boot: str, since: int) -> list[Identity]:
    """Living processes of one session and process group that are not older than `since` ticks.

    Both numbers stay reserved while any member lives, so all members are of one origin; a later
    owner of both numbers at once would have to have been given them in the same combination.
    """
    if boot != boot_id():
        return []
    return [
        Identity(stat.pid, stat.start, boot)
        for stat in table().values()
        if stat.session == session and stat.pgrp == group and stat.start >= since and not stat.dead
    ]


def holding(target: str) -> list[Identity]:
    """Living processes of this user that have `target` open, as in "pipe:[1234]"."""
    found, boot = [], boot_id()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        folder = f"/proc/{entry}/fd"
        try:
            links = [os.readlink(f"{folder}/{handle}") for handle in os.listdir(folder)]
        except OSError:
            continue
        stat = read_stat(int(entry))
        if target in links and stat is not None and not stat.dead:
            found.append(Identity(stat.pid, stat.start, boot))
    return found


def wait_gone(who: list[Identity], timeout_s: float) -> list[Identity]:
    """Wait until none of these processes runs; what is left after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [one for one in who if is_alive(one)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.05)


def kill_descendants(timeout_s: float) -> list[Stat]:
    """SIGKILL and reap every descendant of this process; what is left after `timeout_s` seconds.

    For a child subreaper this is everything that was ever started below it: whoever changes its
    session or group, or loses its parent, becomes a child of the subreaper.
    """
    me, boot = os.getpid(), boot_id()
    deadline = time.monotonic() + timeout_s
    while True:
        below = [stat for stat in descendants(me) if not stat.dead]
        for stat in below:
            send(Identity(stat.pid, stat.start, boot), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not descendants(me):
                return []
        if time.monotonic() >= deadline:
            return below
        time.sleep(0.02)


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2) with one argument; errors are raised as OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), argument, zero, zero, zero) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def with_parent(number: int) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child signal `number` when its parent dies, however that
    was killed. The thread that forks must live as long as the child."""
    me = os.getpid()
    ctypes.CDLL(None)  # loaded before the fork

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != me:
            os._exit(1)

    return before_exec


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as file:
                rows = file.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            cells = row.split()
            # state 0A is LISTEN
            if len(cells) > 9 and cells[3] == "0A" and int(cells[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(cells[9])
    return inodes


def listeners(port: int) -> list[Stat] | None:
    """Processes that listen on TCP `port`; [] if nobody listens, None if /proc does not tell who.

    Another user's processes cannot be looked into, hence None rather than [] for them.
    """
    inodes = _listening_inodes(port)
    if not inodes:
        return []
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            handles = os.listdir(f"/proc/{entry}/fd")
        except OSError:
            continue
        for handle in handles:
            try:
                target = os.readlink(f"/proc/{entry}/fd/{handle}")
            except OSError:
                continue
            if target in wanted:
                stat = read_stat(int(entry))
                if stat is not None:
                    found.append(stat)
                break
    return found or None


def memory_available() -> int | None:
    """MemAvailable of /proc/meminfo in bytes, or None where it is not told."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer struck since boot (0 where it is not told)."""
    try:
        with open("/proc/vmstat") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0
