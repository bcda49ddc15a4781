"""The watchdog: what it reads, when it strikes, and a server that it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sparkling import crash, memwatch, procs, readiness, server
from sparkling.errors import ServerError
from sparkling.recipe import Launch

GIB = 2**30
FAKE = Path(__file__).resolve().parent / "fakes" / "fake_server.py"


def meminfo(path: Path, free: float) -> None:
    """Replace the file at once: the watchdog must never read half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"MemTotal: {24 * 2**20} kB\nMemAvailable: {int(free * 2**20)} kB\n")
    fresh.replace(path)


# -- reading -------------------------------------------------------------------------------------


def test_available_is_the_smallest_of_the_machine_and_its_containers(tmp_path: Path) -> None:
    info, v2, v1 = tmp_path / "meminfo", tmp_path / "v2", tmp_path / "v1"
    meminfo(info, 10)
    v2.mkdir()
    (v2 / "memory.current").write_text(f"{30 * GIB}\n")
    (v2 / "memory.stat").write_text(f"anon 5\ninactive_file {20 * GIB}\n")
    v1.mkdir()
    (v1 / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (v1 / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    at = lambda *groups: memwatch.available(  # noqa: E731
        memwatch.Limits(2, 1, meminfo=str(info), groups=groups)
    )
    assert at() == 10 * GIB
    assert at((str(v2), 2, 32 * GIB)) == 10 * GIB  # case 33: 22 GiB of headroom there
    assert at((str(v2), 2, 18 * GIB)) == 8 * GIB
    assert at((str(v1), 1, 4 * GIB)) == 2 * GIB
    assert at((str(v1), 1, GIB)) == 0
    # Weights that were read twice are active cache: nothing to end a server for.
    (v2 / "memory.stat").write_text(f"inactive_file {2 * GIB}\nactive_file {26 * GIB}\n")
    assert at((str(v2), 2, 31 * GIB)) == 10 * GIB
    assert at((str(v2), 2, 5 * GIB)) == 3 * GIB
    (v1 / "memory.stat").write_text(f"active_file 7\ntotal_active_file {2 * GIB}\n")
    assert at((str(v1), 1, 4 * GIB)) == 3 * GIB
    assert at((str(tmp_path / "gone"), 2, GIB)) == 10 * GIB
    info.unlink()
    assert at() is None


def test_a_look_agrees_with_the_machines_and_costs_next_to_nothing() -> None:
    limits = memwatch.Limits(2, 1)
    # Others may take much memory, or give it back, between two looks: of many pairs one agrees.
    looks = ((memwatch.available(limits), procs.memory_available()) for _ in range(100))
    assert any(found == pytest.approx(machines, rel=0.2) for found, machines in looks)
    before, began = os.times(), time.monotonic()
    for _ in range(200):
        memwatch.available(limits)
    used = sum(os.times()[:2]) - sum(before[:2])
    # Printed, not judged: what a busy machine does to a clock proves nothing.
    print(f"{used / 200 * 1e6:.0f} µs of CPU a look, {time.monotonic() - began:.3f} s for 200")


def test_the_limits_survive_json() -> None:
    limits = memwatch.Limits(5, 4, 3, "/x", (("/g", 2, 9),), 0.1, True)
    assert memwatch.Limits.from_json(json.loads(json.dumps(limits.to_json()))) == limits


# -- deciding ------------------------------------------------------------------------------------


def told(*looks: float | None, step: float = 0.2, warn: float = 4, end: float = 2) -> list:
    watch = memwatch.Watch(memwatch.Limits(int(warn * GIB), int(end * GIB)))
    return [
        watch.feed(i * step, None if free is None else int(free * GIB))
        for i, free in enumerate(looks)
    ]


def test_it_warns_once_and_again_only_after_a_recovery() -> None:
    assert told(9, 3.9, 3.8, 3.9, 4.5, 3.9, 5.1, 3.9, step=5) == [
        None, "warn", None, None, None, None, "recovered", "warn",
    ]  # fmt: skip


def test_it_ends_below_the_limit_and_only_once() -> None:
    assert told(9, 1.9, 1.0, step=5) == [None, "end", None]


def test_it_ends_early_when_memory_falls_fast() -> None:
    # 1 GiB every fifth of a second: at 3.9 nothing would be left a second later.
    assert told(6.9, 5.9, 4.9, 3.9) == [None, None, None, "end"]
    # The same looks, spread over a minute, are only a warning.
    assert told(6.9, 5.9, 4.9, 3.9, step=20) == [None, None, None, "warn"]
    # Fast, but with plenty left; and a single step that is over.
    assert told(20, 19, 18, 17) == [None] * 4
    assert told(20, 3.9, 3.9, 3.9, 3.9, step=0.6)[1:3] == ["warn", None]


def test_a_look_that_fails_does_nothing() -> None:
    assert told(None, 9, None, None) == [None] * 4


def test_the_events_read_as_plain_words() -> None:
    event = {
        "level": "end",
        "available": int(1.5 * GIB),
        "total": 120 * GIB,
        "warn": 4 * GIB,
        "end": 2 * GIB,
        "server_resident": GIB,
        "biggest": [{"name": "hog", "pid": 7, "resident": 90 * GIB}],
    }
    text = memwatch.sentence(event)
    assert text == (
        "1.50 of 120.0 GiB of memory available, less than the 2.00 that are kept free: the server "
        "was ended before the machine ran out; it held 1.0 GiB (most is held by hog (pid 7) 90.0 GiB)"
    )
    assert "falling so fast" in memwatch.sentence({**event, "available": 3 * GIB})
    assert "below 2.00 the server is ended" in memwatch.sentence({**event, "level": "warn"})
    assert memwatch.sentence({**event, "level": "recovered"}).endswith("available again")
    found = crash.diagnose(["x", f"[sparkling] memory: {text}", "RuntimeError: y"], -9)
    assert found.kind == "memory-guard" and text in found.cause
    # The kernel's own killer may have struck somebody else in the same minute.
    lines = [f"[sparkling] memory: {text}"]
    assert crash.diagnose(lines, -9, out_of_memory=True).kind == "memory-guard"
    warning = memwatch.sentence({**event, "level": "warn"})
    assert crash.diagnose([f"[sparkling] memory: {warning}"]) is None


def test_a_driver_that_is_not_there_or_says_nothing_leaves_the_gpu_unknown() -> None:
    for library in ("libnothing-of-the-kind.so", "libc.so.6"):
        gpu = memwatch.GpuMemory(library=library)
        gpu.start()
        gpu.join(60)
        assert not gpu.is_alive() and (gpu.free, gpu.total) == (None, None)


def test_the_biggest_processes_are_named_without_their_arguments() -> None:
    mine = memwatch.biggest(10_000)
    me = next(one for one in mine if one["pid"] == os.getpid())
    assert me["resident"] > 2**20 and set(me) == {"name", "pid", "resident"}
    assert [one["resident"] for one in mine] == sorted((o["resident"] for o in mine), reverse=True)


# -- a server that it ends -----------------------------------------------------------------------


@pytest.fixture
def info(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    meminfo(path, 12)
    return path


@pytest.fixture
def begin(tmp_path: Path, info: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    # The watchdog's word comes through two processes, which a busy machine lets wait.
    monkeypatch.setattr(server, "WORD_S", 60.0)

    def make(*arguments: str, **settings: object) -> server.Server:
        launch = Launch(
            argv=("-u", str(FAKE), "--port", "0", "--device", "cpu", *arguments),
            env={},
            recipe="fake",
            stage="baseline",
            variant=None,
            switches={},
            served_name="fake",
        )
        limits = memwatch.Limits(4 * GIB, 2 * GIB, 24 * GIB, str(info), (), 0.05)
        run = tmp_path / "runs" / "r1"
        run.mkdir(parents=True, exist_ok=True)
        (run / "manifest.json").write_text("{}")
        settings = {"log": run / "40_baseline" / "logs" / "s.log", "watch": limits, **settings}
        return server.start(launch, python=Path(sys.executable), deadline_s=180, **settings)

    yield make
    for one in list(server._SERVERS):
        one.stop()


def wait(check) -> bool:
    deadline = time.monotonic() + 60
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(check())


def events_of(tmp_path: Path) -> list[dict]:
    path = tmp_path / "runs" / "r1" / server.MEMORY_EVENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_server_is_ended_in_time_and_everybody_is_told(
    begin, tmp_path: Path, info: Path
) -> None:
    running = begin("--tree", "--hold-mb", "64", "--mood", "stubborn")
    # The second worker has left the one that started it, and listens once it holds its memory.
    assert wait(lambda: procs.listeners(running.port + 1) and len(running.processes()) == 3)
    people = running.processes()
    meminfo(info, 3)
    assert wait(lambda: len(events_of(tmp_path)) == 1)
    assert running.alive()
    meminfo(info, 1.5)
    assert wait(lambda: not running.alive())
    # All of it is gone, a worker that ignores polite signals too, and nobody had to be asked.
    assert wait(lambda: not [one for one in people if procs.is_alive(one)])
    # It ends the server first and tells of it afterwards: on the disk, and through its keeper.
    assert wait(lambda: len(events_of(tmp_path)) == 2) and running.ended_for_memory()
    warned, ended = events_of(tmp_path)
    assert (warned["level"], ended["level"]) == ("warn", "end")
    assert ended["available"] == int(1.5 * 2**20) * 1024 and ended["total"] == 24 * GIB
    assert ended["stage"] == "baseline" and ended["port"] == running.port and ended["biggest"]
    assert ended["server_resident"] > 64 << 20
    # The log, and what a benchmark quotes of it; the notebook's own words.
    assert "the server was ended before the machine ran out" in running.tail(1)[0]
    assert "[sparkling] memory: 1.50 of 24.0 GiB" in running.log.read_text()
    assert [one["level"] for one in running.memory_events] == ["warn", "end"]
    with pytest.raises(ServerError, match=r"is gone: 1\.50 of 24\.0 GiB .* stop what else uses"):
        running.generate_one(5)
    running.stop()
    # The next one starts: nothing is left behind that stands in its way.
    meminfo(info, 12)
    begin().stop()
    assert len(events_of(tmp_path)) == 2


def test_a_start_that_the_watchdog_ends_says_so(begin, info: Path) -> None:
    def starve(phase: str, seconds: float) -> None:
        meminfo(info, 1)

    with pytest.raises(readiness.StartFailed) as caught:
        begin("--mood", "hang-loading", progress=starve)
    assert caught.value.diagnosis.kind == "memory-guard"
    assert "did not start: 1.00 of 24.0 GiB of memory available" in caught.value.sentence


def test_a_real_hog_ends_the_server_and_not_the_machine(begin, tmp_path: Path) -> None:
    """Real /proc/meminfo, real memory: a hog takes it in steps until the limit is met."""
    free = procs.memory_available()
    step, steps = 128 << 20, 24
    if free < 8 * GIB:
        pytest.skip("less than 8 GiB are available, and this test may take three of them")
    # Eight steps, so that nobody else's need ends it while it starts.
    limits = memwatch.Limits(free - step, free - 8 * step, 0, interval_s=0.05)
    running = begin(watch=limits)
    code = (
        "import sys, time\nheld = []\n"
        f"for _ in range({steps}):\n"
        f"    held.append(bytearray(b'x' * {step}))\n    time.sleep(0.1)\n"
        "print('full', flush=True)\nsys.stdin.read()\n"
    )
    hog = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        gone = wait(lambda: not running.alive())
        if not gone and procs.memory_available() > limits.end:
            pytest.skip("other programs gave back more memory than the hog took")
        assert gone and running.ended_for_memory()
        assert hog.poll() is None  # not ours to end
    finally:
        hog.kill()
        hog.communicate()
    assert wait(lambda: [one["level"] for one in events_of(tmp_path)][-1:] == ["end"])
    running.stop()


def test_without_limits_nothing_is_watched(begin, info: Path, monkeypatch) -> None:
    monkeypatch.setattr(server.memory, "watch_limits", lambda **_: None)
    running = begin(watch=None)
    meminfo(info, 0)
    time.sleep(0.5)
    assert running.alive() and running.memory_events == []


def test_the_watchdog_survives_a_keeper_that_is_gone(begin, info: Path) -> None:
    """Nobody listens any more: the server is stopped for that, and memory still counts."""
    running = begin("--mood", "stubborn")
    os.kill(running._keeper.pid, signal.SIGSTOP)
    meminfo(info, 1)
    assert wait(lambda: not procs.is_alive(running._identity))
    threading.Timer(0.2, os.kill, (running._keeper.pid, signal.SIGCONT)).start()
    running.stop()
    assert running.ended_for_memory()
