"""Who a process is, and that signals reach nobody else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sparkling import procs


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_name_with_brackets_and_spaces_does_not_shift_the_fields() -> None:
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b') S 1 (x'); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        stat = procs.read_stat(process.pid)
        assert (stat.name, stat.ppid, stat.pgrp) == (
            ") S 1 (x",
            os.getpid(),
            os.getpgid(process.pid),
        )
        assert stat.start == procs.identify(process.pid).start > 0
    finally:
        process.kill()
        process.communicate()


def test_identity_is_pid_start_time_and_boot(sleeper: subprocess.Popen) -> None:
    who = procs.identify(sleeper.pid)
    assert procs.is_alive(who)
    assert not procs.is_alive(replace(who, start=who.start - 1))
    assert not procs.is_alive(replace(who, boot="another boot"))
    assert not procs.is_alive(None)
    assert procs.Identity.from_json(who.to_json()) == who


def test_case_29_a_stranger_is_never_signalled(sleeper: subprocess.Popen) -> None:
    who = procs.identify(sleeper.pid)
    for other in (replace(who, start=who.start + 1), replace(who, boot="another boot")):
        assert procs.send(other, signal.SIGKILL) is False
    assert sleeper.poll() is None
    assert procs.send(who, signal.SIGKILL) is True
    assert sleeper.wait(60) == -signal.SIGKILL


def test_case_29_pid_one_is_never_signalled() -> None:
    first = procs.identify(1)
    assert procs.send(first, signal.SIGCONT) is False
    assert procs.Identity.from_json(first.to_json()) is None


@pytest.mark.parametrize("pidfd", [True, False])
def test_signals_also_work_where_the_kernel_has_no_pidfd(
    sleeper: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:

        def missing(pid: int) -> int:
            raise OSError(38, "not implemented")

        monkeypatch.setattr(os, "pidfd_open", missing)
    assert procs.send(procs.identify(sleeper.pid), signal.SIGKILL) is True
    assert sleeper.wait(60) == -signal.SIGKILL


def test_case_29_a_zombie_counts_as_gone() -> None:
    process = subprocess.Popen(["sleep", "600"])
    who = procs.identify(process.pid)
    process.kill()
    deadline = time.monotonic() + 60
    while procs.read_stat(process.pid).state != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        assert procs.read_stat(process.pid).dead
        assert not procs.is_alive(who)
        assert procs.wait_gone([who], 0.0) == []
        assert procs.send(who, signal.SIGKILL) is False
        assert procs.read_stat(process.pid).exit_code == signal.SIGKILL
    finally:
        process.wait()


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"pid": 5}, {"pid": "5", "start": 1, "boot": "b"}, {"pid": 5, "start": 1, "boot": 7},
     {"pid": 1, "start": 1, "boot": "b"}, {"pid": -5, "start": 1, "boot": "b"}, {"pid": True, "start": 1, "boot": "b"}],
)  # fmt: skip
def test_case_29_half_an_identity_is_none(data: object) -> None:
    assert procs.Identity.from_json(data) is None


def test_descendants_and_marks_are_found_through_a_double_fork() -> None:
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    middle = os.getpid()\n"
        "    if os.fork() == 0:\n"
        "        while os.getppid() == middle: time.sleep(0.01)\n"
        "        print(os.getpid(), flush=True); time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(600)\n"
    )
    mark = f"here-{os.getpid()}"  # another run of this test may be under way
    env = {**os.environ, "SPARKLING_TEST_MARK": mark}
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, env=env, text=True
    )
    grandchild = int(process.stdout.readline())
    try:
        marked = {one.pid for one in procs.marked("SPARKLING_TEST_MARK", mark)}
        assert marked == {process.pid, grandchild}
        assert procs.marked("SPARKLING_TEST_MARK", mark[:-1]) == []
        below = {one.pid for one in procs.descendants(os.getpid())}
        assert process.pid in below
        assert grandchild not in below  # it has another parent: only the mark finds it
    finally:
        for pid in (process.pid, grandchild):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_group_is_found_by_session_and_group_and_age() -> None:
    code = "import os, time; os.fork(); print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdout=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    try:
        process.stdout.readline()
        process.stdout.readline()
        leader = procs.identify(process.pid)
        session = process.pid
        members = procs.grouped(session, process.pid, leader.boot, leader.start)
        assert len(members) == 2 and leader in members
        assert procs.grouped(session, process.pid + 1, leader.boot, leader.start) == []
        assert procs.grouped(session + 1, process.pid, leader.boot, leader.start) == []
        assert procs.grouped(session, process.pid, "another boot", leader.start) == []
        assert procs.grouped(session, process.pid, leader.boot, leader.start + 10**6) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_who_has_a_pipe_open() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(["sleep", "600"], stdout=write)
    os.close(write)
    try:
        name = f"pipe:[{os.fstat(read).st_ino}]"
        assert [one.pid for one in procs.holding(name)] == [process.pid]
        assert procs.holding("pipe:[0]") == []
    finally:
        process.kill()
        process.wait()
        os.close(read)


def test_who_listens_on_a_port() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert procs.listeners(port) == []
        listening.listen()
        assert [one.pid for one in procs.listeners(port)] == [os.getpid()]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listening.accept()
    # A connection that is still open on the port is nobody who listens.
    with client, server:
        assert procs.listeners(port) == []


def test_memory_is_in_bytes() -> None:
    assert procs.memory_available() > 1 << 20
    assert procs.oom_kills() >= 0


def test_prctl_reports_its_errors() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        procs.prctl(9999, 1)
