"""Whatever is killed, whenever: nothing of the server is left a few seconds later.

How many they were is printed and recorded (`-rA`), not judged: a busy machine takes longer.
The server is a fake that does what servers do to survive: a worker that ignores polite signals and
has another name, and one that also leaves the session, loses its parent and listens on a port.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sparkling import keeper, procs, server

FAKES = Path(__file__).resolve().parent / "fakes"
LIMIT_S = 60.0
# Two for each server; below those that servers choose themselves, so nobody else's.
PORTS = itertools.count(28500, 2)


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(check: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.05)
    return check()


class Notebook:
    """A process that plays a notebook's kernel, and the server it started."""

    def __init__(self, folder: Path, own: Path, how: str, *arguments: str) -> None:
        self.folder, self.own = folder, own
        self.log = folder / "server.log"
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES / "notebook.py"), str(self.log), how, *arguments],
            env={**os.environ, "TMPDIR": str(own)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        told = self.process.stdout.readline()
        assert told, "the notebook's stand-in did not start its server"
        self.record = json.loads(told)
        self.port = self.record["port"]
        self.id = self.record["id"]
        self.people = {
            name: procs.Identity.from_json(self.record[name])
            for name in ("keeper", "warden", "server")
        }
        self.people["notebook"] = procs.identify(self.process.pid)

    def members(self) -> list[procs.Identity]:
        keeper, main = self.people["keeper"], self.people["server"]
        found = server._members(self.id, keeper.pid, main, self.record["pipe"])
        return [one for one in found if one != self.people["warden"]]

    def workers(self) -> list[procs.Identity]:
        return [one for one in self.members() if one != self.people["server"]]

    def left(self) -> list[str]:
        """What of the server still exists, in words."""
        found = [f"process {one.pid}" for one in self.members()]
        found += [
            f"{name} {self.people[name].pid}"
            for name in ("keeper", "warden", "server")
            if procs.is_alive(self.people[name])
        ]
        found += [f"port {port}" for port in (self.port, self.port + 1) if not can_bind(port)]
        state = self.folder / server.STATE_FOLDER
        found += [str(path) for path in state.glob("*")] if state.exists() else []
        return found + [str(path) for path in self.own.rglob("*")]

    def end(self) -> None:
        procs.send(self.people["notebook"], signal.SIGKILL)
        wait_until(lambda: not self.left())
        for one in [*self.people.values(), *self.members()]:
            procs.send(one, signal.SIGKILL)
        if self.record["fork"]:
            procs.send(procs.identify(self.record["fork"]), signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Notebook]]:
    notebooks = []
    # A short place of this test's own, so that what stays there is seen.
    own = tempfile.mkdtemp(prefix="spk")
    monkeypatch.setattr(tempfile, "tempdir", own)

    def make(how: str = "wait", *arguments: str) -> Notebook:
        folder = tmp_path / f"runs{len(notebooks)}"
        made = Notebook(folder, Path(own), how, "--port", str(next(PORTS)), *arguments)
        notebooks.append(made)
        return made

    yield make
    for notebook in notebooks:
        notebook.end()
    assert not os.listdir(own)
    os.rmdir(own)


def has_workers(notebook: Notebook) -> bool:
    # The ordinary one, and the one that lost its parent and listens.
    return len(notebook.workers()) == 2 and not can_bind(notebook.port + 1)


VICTIMS = ("notebook", "keeper", "warden", "server", "worker")
MOMENTS = ("ready", "loading")


@pytest.fixture(scope="module")
def kills(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[float, list[str]]]:
    """Every kill, all at the same time: seconds until nothing was left, and what was left."""
    base = tmp_path_factory.mktemp("kills")  # not in the threads: pytest's own is not theirs

    def kill(port: int, victim: str, moment: str) -> tuple[float, list[str]]:
        own = Path(tempfile.mkdtemp(prefix="spk"))
        how, mood = ("wait", "ok") if moment == "ready" else ("", "hang-loading")
        arguments = ("--port", str(port), "--tree", "--mood", mood)
        notebook = Notebook(base / str(port), own, how, *arguments)
        try:
            assert wait_until(lambda: has_workers(notebook))
            if victim == "worker":
                time.sleep(1.7)  # the warden must have seen the worker to miss it
                below = {one.pid for one in procs.descendants(notebook.people["server"].pid)}
                who = next(one for one in notebook.workers() if one.pid in below)
            else:
                who = notebook.people[victim]
            began = time.monotonic()
            assert procs.send(who, signal.SIGKILL)
            wait_until(lambda: not notebook.left())
            return time.monotonic() - began, notebook.left()
        finally:
            notebook.end()
            shutil.rmtree(own)

    with ThreadPoolExecutor(16) as pool:
        cases = [(victim, moment) for victim in VICTIMS for moment in MOMENTS]
        done = pool.map(lambda one: kill(one[0], *one[1]), [(next(PORTS), c) for c in cases])
        return dict(zip(cases, done, strict=True))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_case_17_killing_any_process_leaves_nothing(
    kills: dict, victim: str, moment: str, record_property: Callable[[str, object], None]
) -> None:
    seconds, left = kills[victim, moment]
    record_property("seconds", round(seconds, 2))
    print(f"{victim} killed while {moment}: all gone after {seconds:.2f} s")
    assert not left


def test_killing_keeper_and_warden_at_once_is_cleaned_by_the_stop_command(
    begin: Callable[..., Notebook],
) -> None:
    notebook = begin("wait", "--tree")
    assert wait_until(lambda: has_workers(notebook))
    for name in ("keeper", "warden"):
        procs.send(notebook.people[name], signal.SIGSTOP)
    for name in ("keeper", "warden"):
        procs.send(notebook.people[name], signal.SIGKILL)
    # The kernel itself takes the main process; its workers have lost everybody.
    assert wait_until(lambda: not procs.is_alive(notebook.people["server"]))
    assert notebook.workers()
    assert len(server.stop_all(notebook.folder)) == 1
    assert notebook.members() == []
    assert not (notebook.folder / server.STATE_FOLDER).exists()
    assert server.free_port(notebook.port) == notebook.port
    assert not notebook.left()


def test_a_worker_that_is_killed_before_it_has_its_name_is_missed(
    begin: Callable[..., Notebook],
) -> None:
    notebook = begin("", "--mood", "hang-loading", "--spawn", "600")
    main = notebook.people["server"]
    assert wait_until(lambda: len(procs.descendants(main.pid)) == 1)
    time.sleep(1.7)  # the warden must have seen it to miss it
    procs.send(procs.identify(procs.descendants(main.pid)[0].pid), signal.SIGKILL)
    assert wait_until(lambda: not notebook.left()), notebook.left()


def test_a_worker_that_is_killed_before_it_is_seen_is_missed(
    begin: Callable[..., Notebook],
) -> None:
    notebook = begin("", "--mood", "stillborn")
    assert wait_until(lambda: not notebook.left()), notebook.left()


def test_a_helper_that_ends_in_peace_is_not_missed(begin: Callable[..., Notebook]) -> None:
    notebook = begin("wait", "--spawn", "2.5")
    main = notebook.people["server"]
    (helper,) = procs.descendants(main.pid)
    # It ends and stays a zombie, because the fake never waits for it.
    assert wait_until(lambda: procs.read_stat(helper.pid).dead)
    time.sleep(keeper.LOST_GRACE_S + 1.5)
    assert procs.is_alive(main)


@pytest.mark.parametrize(
    ("name", "victim", "removed"),
    [
        ("sglang_loads_sparkling_test", "server", True),
        ("sem.mp-sparkling_test", "keeper", True),
        ("somebody_elses_sparkling_test", "server", False),
    ],
)
def test_shared_memory_of_a_killed_server_is_removed(
    begin: Callable[..., Notebook], name: str, victim: str, removed: bool
) -> None:
    path = Path("/dev/shm", name)
    path.unlink(missing_ok=True)
    try:
        notebook = begin("wait", "--shm", name)
        assert path.exists()
        time.sleep(0.3)  # the note that it is ready must reach the warden
        procs.send(notebook.people[victim], signal.SIGKILL)
        assert wait_until(lambda: not notebook.left()), notebook.left()
        assert path.exists() != removed
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("used", [False, True])
def test_the_file_of_a_server_killed_at_once_is_removed_unless_used(
    begin: Callable[..., Notebook], used: bool
) -> None:
    path = Path("/dev/shm", "sglang_loads_sparkling_at_once")
    path.unlink(missing_ok=True)
    mapped = None
    try:
        notebook = begin("", "--shm", path.name, "--mood", "hang-loading")
        # Held, so that the server dies before the warden's first look at its maps.
        procs.send(notebook.people["warden"], signal.SIGSTOP)
        assert wait_until(lambda: path.exists() and path.stat().st_size > 0)
        if used:  # by this process
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        procs.send(notebook.people["server"], signal.SIGKILL)
        procs.send(notebook.people["warden"], signal.SIGCONT)
        assert wait_until(lambda: not notebook.left()), notebook.left()
        assert path.exists() == used
    finally:
        path.unlink(missing_ok=True)
        if mapped is not None:
            mapped.close()


def test_a_fork_that_holds_the_pipe_does_not_keep_the_server(
    begin: Callable[..., Notebook],
) -> None:
    notebook = begin("wait,fork", "--tree")
    assert procs.is_alive(procs.identify(notebook.record["fork"]))
    procs.send(notebook.people["notebook"], signal.SIGKILL)
    assert wait_until(lambda: not notebook.left()), notebook.left()
    assert procs.is_alive(procs.identify(notebook.record["fork"]))


@pytest.mark.parametrize("how", ["wait,exit", "wait,raise"])
def test_a_notebook_that_ends_takes_its_server_along(
    begin: Callable[..., Notebook], how: str
) -> None:
    notebook = begin(how, "--tree")
    assert notebook.process.wait(120) == (1 if "raise" in how else 0)
    # It stopped the server itself, at exit: nothing is left at that moment.
    assert not notebook.left()


def test_a_server_survives_the_thread_that_started_it(begin: Callable[..., Notebook]) -> None:
    notebook = begin("wait,thread")
    time.sleep(1.2)  # the parent-death signal would have come at the thread's end
    assert procs.is_alive(notebook.people["server"])
    assert not can_bind(notebook.port)


def test_case_17_a_similar_process_that_is_not_ours_is_untouched(
    begin: Callable[..., Notebook],
) -> None:
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'sglang::schedul'); print(flush=True); time.sleep(600)"
    stranger = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        stranger.stdout.readline()
        notebook = begin("wait", "--tree")
        procs.send(notebook.people["server"], signal.SIGKILL)
        assert wait_until(lambda: not notebook.left()), notebook.left()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate()


def test_the_keeper_has_a_session_and_the_server_a_group_of_its_own(
    begin: Callable[..., Notebook],
) -> None:
    notebook = begin("wait")
    main = procs.read_stat(notebook.people["server"].pid)
    kept = procs.read_stat(notebook.people["keeper"].pid)
    assert kept.session == kept.pid != os.getsid(0)
    assert main.pgrp == main.pid == notebook.record["pgid"]
    assert main.session == kept.session
    # Jupyter interrupts a kernel by a SIGINT to its group: the server must not get it.
    os.kill(notebook.people["keeper"].pid, signal.SIGINT)
    time.sleep(0.3)
    assert procs.is_alive(notebook.people["keeper"])


# --------------------------------------------------------------------------- redaction


@pytest.mark.parametrize("seed", range(20))
def test_secrets_are_struck_out_wherever_the_stream_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    secrets = [b"sk-aaaab", b"sk-aaaabaaab", b"zz"]
    words = [b"sk-aaaab", b"sk-aaaabaaab", b"sk-aaaa", b"sk-", b"a", b"z", b"\n", b"zz", b"hello "]
    data = b"".join(rng.choice(words) for _ in range(200))
    expected = data
    for secret in sorted(secrets, key=len, reverse=True):
        expected = expected.replace(secret, b"[redacted]")
    redactor, out, at = keeper.Redactor(secrets), b"", 0
    while at < len(data):
        size = rng.randint(1, 9)
        out += redactor.feed(data[at : at + size])
        at += size
    out += redactor.close()
    for secret in (b"sk-aaaab", b"zz"):
        assert secret not in out
    assert out.count(b"[redacted]") > 0
    if seed == 0:
        assert keeper.Redactor(secrets).feed(data + b"\n") == expected + b"\n"


def test_a_stream_without_secrets_is_passed_on_at_once() -> None:
    assert keeper.Redactor([]).feed(b"sk-half") == b"sk-half"
    redactor = keeper.Redactor([b"secret-key"])
    assert redactor.feed(b"plain text\n") == b"plain text\n"
    # Only what could become the secret is held back.
    assert redactor.feed(b"abc secret-k") == b"abc "
    assert redactor.feed(b"ay") == b"secret-kay"
    assert redactor.close() == b""


# --------------------------------------------------------------------------- the script itself


def test_the_script_needs_only_the_standard_library() -> None:
    path = importlib.util.find_spec("sparkling.procs").origin
    subprocess.run([sys.executable, "-I", "-S", path], check=True, timeout=120)


def test_without_a_specification_or_parent_the_keeper_ends() -> None:
    path = importlib.util.find_spec("sparkling.keeper").origin
    command = [sys.executable, "-I", "-S", path]
    assert subprocess.run(command, input=b"", timeout=120, check=False).returncode == 0
    orphan = json.dumps({"parent": 1}).encode() + b"\n"
    done = subprocess.run(command, input=orphan, timeout=120, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
