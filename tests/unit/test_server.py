"""Starting, waiting, stopping: a fake server in every mood that a real one has shown."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sparkling import log as log_events
from sparkling import ports, procs, readiness, server
from sparkling.errors import ServerError, UsageError
from sparkling.recipe import Launch

FAKE = Path(__file__).resolve().parent / "fakes" / "fake_server.py"
LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
PYTHON = Path(sys.executable)
KEY = "sk-T3st.Key_0123456789~+/="


def until(what: Callable[[], object], limit_s: float = 60) -> Any:
    """What `what` gives once that is something; its last answer after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


# Two for each server with `--tree`, whose worker listens on the second; below those that servers choose
# themselves, so that no start beside it has one of them.
PAIRS = itertools.count(29000, 2)


def roomy_port() -> int:
    """A free port whose next one is free too."""
    return next(one for one in PAIRS if ports.can_bind(one) and ports.can_bind(one + 1))


def launch(*arguments: str, port: int = 0, env: dict[str, str] | None = None) -> Launch:
    if "--tree" in arguments:
        port = port or roomy_port()
    return Launch(
        argv=("-u", str(FAKE), "--port", str(port), "--device", "cpu", *arguments),
        env=env or {},
        recipe="fake",
        stage="baseline",
        variant=None,
        switches={},
        served_name="fake",
    )


def line(message: str) -> str:
    return f"[2026-01-01 00:00:00] {message}\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runs folder; nothing may be left in it but logs, and nothing in the temporary folder."""
    own = tempfile.mkdtemp(prefix="spk")
    monkeypatch.setattr(tempfile, "tempdir", own)
    runs = tmp_path / "runs"
    yield runs
    for one in list(server._SERVERS):
        one.stop()
    assert not list(runs.glob(f"{server.STATE_FOLDER}*/*"))
    assert not (runs / server.STATE_FOLDER).exists()
    assert not os.listdir(own)
    os.rmdir(own)


@pytest.fixture
def begin(place: Path) -> Callable[..., server.Server]:
    def make(*arguments: str, port: int = 0, **settings: object) -> server.Server:
        settings = {"deadline_s": 120, "log": place / "run" / "server.log", **settings}
        return server.start(launch(*arguments, port=port), python=PYTHON, **settings)

    return make


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


# --------------------------------------------------------------------------- start and stop


def test_a_server_starts_answers_and_stops(
    begin: Callable[..., server.Server], place: Path
) -> None:
    phases = []
    before = time.time()
    with begin(progress=lambda phase, seconds: phases.append((phase, seconds))) as running:
        assert running.alive()
        assert running.url == f"http://127.0.0.1:{running.port}"
        assert running.launch.port == running.port
        assert running.ready_seconds > 0
        assert before - 1 < running.started < time.time()
        assert procs.read_stat(running.pid).pgrp == running.pid
        # It answers as soon as it has said so; the warden may write that down a little later.
        until(lambda: any(isinstance(one, log_events.Ready) for one in running.events()))
        assert [type(one) for one in running.events()] == [
            log_events.ServerArgs,
            log_events.WeightsBegin,
            log_events.HttpUp,
            log_events.Ready,
        ]
        assert running.tail(2)[-1].endswith("ready to roll!")
        assert phases and all(isinstance(phase, str) and seconds >= 0 for phase, seconds in phases)
        assert "running" in repr(running)
        running.generate_one(60)
        assert (place / server.STATE_FOLDER / f"{running.id}.json").exists()
    assert not running.alive()
    assert "stopped" in repr(running)
    assert running.processes() == []
    assert procs.listeners(running.port) == []
    running.stop()
    # Standard output is in the log, too.
    assert "a line on standard output" in running.log.read_text()


def test_the_recipes_words_are_used_as_they_are(begin: Callable[..., server.Server]) -> None:
    with begin(wait=False) as running:
        command = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        assert [one.decode() for one in command] == [str(PYTHON), *running.launch.argv]


def test_case_17_stop_takes_the_whole_tree(begin: Callable[..., server.Server]) -> None:
    running = begin("--tree", "--hold-mb", "200")
    # The worker that leaves the session has a parent for a moment: that one must be gone, too.
    until(lambda: procs.listeners(running.port + 1) and len(running.processes()) == 3)
    tree = running.processes()
    assert len(tree) == 3
    assert procs.listeners(running.port + 1)
    running.stop()
    # All of it holds at the moment stop returns, not a little later.
    assert not [one for one in tree if procs.is_alive(one)]
    assert procs.listeners(running.port) == procs.listeners(running.port + 1) == []


def test_a_server_that_ignores_the_polite_signal_is_killed(
    begin: Callable[..., server.Server],
) -> None:
    # The warden does it, after the grace; the keeper does not have to end the warden. It waits 3 s
    # longer for that, which a busy machine may exceed once, but not three times in a row.
    for _ in range(3):
        running = begin("--mood", "stubborn")
        running.stop()
        assert running.processes() == []
        if running._ended["reason"] == "stopped":
            break
    assert running._ended["reason"] == "stopped"


def test_the_server_gets_signals_that_its_keeper_ignores(
    begin: Callable[..., server.Server],
) -> None:
    running = begin("--mood", "hang-loading", wait=False)
    with open(f"/proc/{running.pid}/status") as status:
        masks = dict(one.split(":", 1) for one in status if one.startswith("Sig"))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        for name in ("SigIgn", "SigBlk"):
            assert not int(masks[name], 16) & 1 << (number - 1), (number, name)


def test_stop_is_safe_while_the_server_is_loading(begin: Callable[..., server.Server]) -> None:
    running = begin("--mood", "hang-loading", "--tree", wait=False)
    running.stop()
    assert running.processes() == []


def test_stop_works_without_the_keepers_help(begin: Callable[..., server.Server]) -> None:
    running = begin("--tree")
    os.kill(running._keeper.pid, signal.SIGKILL)
    running.stop()
    assert running.processes() == []
    assert not procs.is_alive(running._warden)


def test_a_stopped_keeper_is_given_up_on(begin: Callable[..., server.Server]) -> None:
    running = begin("--tree")
    os.kill(running._keeper.pid, signal.SIGSTOP)
    running.stop(timeout_s=2)
    assert running.processes() == []


def test_a_fork_of_the_notebook_does_not_stop_its_server(
    begin: Callable[..., server.Server],
) -> None:
    running = begin()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            running.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert running.alive()


def test_several_threads_may_stop_at_once(begin: Callable[..., server.Server]) -> None:
    running = begin()
    threads = [threading.Thread(target=running.stop) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not running.alive()


def test_ctrl_c_while_waiting_leaves_nothing(begin: Callable[..., server.Server]) -> None:
    def interrupt(phase: str, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin("--mood", "hang-loading", progress=interrupt)
    assert not server._SERVERS


# --------------------------------------------------------------------------- readiness


def failure(make: Callable[[], object]) -> server.StartFailed:
    with pytest.raises(server.StartFailed) as caught:
        make()
    first = str(caught.value).split("\n")[0]
    assert first == caught.value.sentence
    return caught.value


def lose_a_worker(begin: Callable[..., server.Server]) -> server.Server:
    """A server whose worker is killed while it loads."""
    running = begin("--mood", "hang-loading", "--tree", wait=False)

    def workers() -> list[procs.Stat]:
        below = procs.descendants(running.pid)
        return [one for one in below if one.name == "sglang::schedul" and not one.dead]

    until(workers)
    time.sleep(1.7)  # the warden mostly has seen it by then, and misses it
    os.kill(until(workers)[0].pid, signal.SIGKILL)
    running.wait_ready(time.monotonic() - running._began + 60)
    return running


def wait_a_little(
    begin: Callable[..., server.Server], mood: str, once: Callable[[server.Server], object]
) -> server.Server:
    """A server whose deadline comes a few seconds after `once` holds, however long that took."""
    running = begin("--mood", mood, wait=False)
    until(lambda: once(running))
    running.wait_ready(time.monotonic() - running._began + 8)
    return running


def answers(running: server.Server) -> bool:
    return readiness.status_of(running.port, "/model_info", {}) == 200


def loads(running: server.Server) -> bool:
    return running.log.exists() and "Load weight begin" in running.log.read_text()


# Starts that fail, and how. They mostly wait, so they wait at the same time.
FAILING: dict[str, Callable[[Callable[..., server.Server]], object]] = {
    "mute": lambda begin: wait_a_little(begin, "mute", answers),
    "empty": lambda begin: wait_a_little(begin, "empty", answers),
    "hang-loading": lambda begin: wait_a_little(begin, "hang-loading", loads),
    "dies-in-warmup": lambda begin: begin("--mood", "dies-in-warmup", "--after", "0.7"),
    "crash": lambda begin: begin("--mood", "crash", "--say", str(LOGS / "crash-extra.log")),
    "crash-with-key": lambda begin: begin("--mood", "crash", api_key=KEY),
    "no-auth": lambda begin: begin("--mood", "no-auth", api_key=KEY),
    "killed": lambda begin: begin("--mood", "killed"),
    "worker": lose_a_worker,
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, server.StartFailed]:
    folder = tmp_path_factory.mktemp("failing")

    def fail(name: str) -> server.StartFailed:
        def begin(*arguments: str, **settings: object) -> server.Server:
            settings = {"deadline_s": 120, "log": folder / name / "server.log", **settings}
            return server.start(launch(*arguments), python=PYTHON, **settings)

        return failure(lambda: FAILING[name](begin))

    with ThreadPoolExecutor(len(FAILING)) as pool:
        errors = dict(zip(FAILING, pool.map(fail, FAILING), strict=True))
    # A start that failed has been stopped.
    assert not server._SERVERS
    assert not list(folder.rglob(server.STATE_FOLDER))
    return errors


def test_case_11_health_without_tokens_is_wedged(failed: dict[str, server.StartFailed]) -> None:
    error = failed["mute"]
    said = r"wedged: HTTP answers, but within \d+ s no request produced a token"
    assert re.search(said, error.sentence)
    assert any("ready to roll" in one for one in error.tail)


def test_case_11_an_answer_without_a_token_is_wedged(failed: dict[str, server.StartFailed]) -> None:
    sentence = failed["empty"].sentence
    assert "wedged" in sentence and "without a token" in sentence


def test_case_11_not_ready_before_the_server_says_it_is_healthy(
    begin: Callable[..., server.Server],
) -> None:
    running = begin("--mood", "late-health", "--after", "1.5")
    assert running.ready_seconds > 1.5


def test_case_11_not_ready_before_its_own_warm_up_is_over(
    begin: Callable[..., server.Server],
) -> None:
    # Our token came, but SGLang's own warm-up may still fail and end the server.
    running = begin("--mood", "late-ready", "--after", "1.5")
    assert running.ready_seconds > 1.5


def test_case_11_a_ready_line_before_a_failing_warm_up_is_not_ready(
    failed: dict[str, server.StartFailed],
) -> None:
    error = failed["dies-in-warmup"]
    assert "the warm-up request got no answer" in error.sentence
    assert any("warmup error" in one for one in error.tail)


def test_case_11_a_server_that_hangs_later_is_noticed(begin: Callable[..., server.Server]) -> None:
    running = begin("--mood", "hangs-after", "--after", "3")
    running.generate_one(60)
    running.generate_one(60)
    with pytest.raises(ServerError, match="stopped answering after 1 s"):
        running.generate_one(1)


def test_case_15_old_log_lines_prove_nothing(
    begin: Callable[..., server.Server], place: Path
) -> None:
    log = place / "run" / "server.log"
    log.parent.mkdir(parents=True)
    old = (
        line("The server is fired up and ready to roll!")
        + "torch.OutOfMemoryError: CUDA out of memory\n"
    )
    log.write_text(old)
    error = failure(lambda: begin("--mood", "crash", "--say", str(LOGS / "crash-trunc.log")))
    assert "safetensors" in error.sentence and "memory" not in error.sentence
    assert not any("OutOfMemory" in one for one in error.tail)
    assert log.read_text().startswith(old)
    # Nor does an old cause explain a new failure that says nothing.
    silent = failure(lambda: begin("--mood", "crash", "--code", "3"))
    assert (
        "ended with exit code 3" in silent.sentence and "while loading weights" in silent.sentence
    )
    assert not any("Safetensor" in one for one in silent.tail)


def test_case_15_a_log_that_is_rotated_or_cut_goes_on(
    begin: Callable[..., server.Server], place: Path
) -> None:
    running = begin("--mood", "chatty", api_key=KEY)

    def quiet() -> None:
        deadline = time.monotonic() + 60
        while "Receive" not in running.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)

    quiet()
    running.log.rename(place / "run" / "server.log.1")
    running.log.touch()
    running.generate_one(60)
    quiet()
    assert "Receive: obj=GenerateReqInput(key='[redacted]')" in running.log.read_text()
    os.truncate(running.log, 0)
    running.generate_one(60)
    quiet()
    assert running.log.read_text().startswith("[2")
    assert running.tail()[-1].endswith("(key='[redacted]')")


def test_a_server_that_dies_while_loading_is_explained(
    failed: dict[str, server.StartFailed],
) -> None:
    error = failed["crash"]
    assert error.sentence.startswith(
        "The server did not start: the state cache strategy extra_buffer"
    )
    assert "no_buffer" in error.sentence and str(error.log) in error.sentence
    assert str(error).count("\n  | ") == len(error.tail) > 0


def test_a_killed_server_is_explained(failed: dict[str, server.StartFailed]) -> None:
    sentence = failed["killed"].sentence
    assert "SIGKILL" in sentence or "out of memory" in sentence


def test_a_server_that_hangs_while_loading_meets_its_deadline(
    failed: dict[str, server.StartFailed],
) -> None:
    sentence = failed["hang-loading"].sentence
    assert re.search(r"not ready within \d+ s: it has been loading weights for \d+ s", sentence)


def test_a_worker_that_dies_while_loading_is_named(failed: dict[str, server.StartFailed]) -> None:
    sentence = failed["worker"].sentence
    assert re.search(r"its process sglang::schedul \(pid \d+\) died", sentence)


def test_wait_ready_twice_is_harmless(begin: Callable[..., server.Server]) -> None:
    running = begin(wait=False)
    running.wait_ready(60)
    first = running.ready_seconds
    running.wait_ready(60)
    assert running.ready_seconds == first


def test_a_full_disk_is_named(begin: Callable[..., server.Server], place: Path) -> None:
    log = place / "run" / "full.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    error = failure(lambda: begin("--mood", "crash", log=log))
    assert "could not be written (No space left on device)" in error.sentence
    # What the disk did not take is still shown.
    assert any("Load weight begin" in one for one in error.tail)


def test_a_server_does_not_block_on_its_log(begin: Callable[..., server.Server]) -> None:
    running = begin("--mood", "flood")
    size = 0
    for _ in range(3):
        deadline = time.monotonic() + 60
        while running.log.stat().st_size <= size and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running.log.stat().st_size > size
        size = running.log.stat().st_size
        running.generate_one(60)
    with open(f"/proc/{procs.read_stat(running.pid).ppid}/status") as status:
        resident = next(int(one.split()[1]) for one in status if one.startswith("VmRSS"))
    assert resident < 100_000  # kB: nothing piles up in the warden


# --------------------------------------------------------------------------- refusals


def test_a_missing_interpreter_is_one_sentence(place: Path) -> None:
    with pytest.raises(
        UsageError, match=r"Python /nowhere/python is missing; run scripts/setup.sh"
    ):
        server.start(launch(), python=Path("/nowhere/python"), log=place / "x.log")


def test_a_missing_checkpoint_is_one_sentence(begin: Callable[..., server.Server]) -> None:
    with pytest.raises(UsageError, match="There is no checkpoint at /nowhere/ling"):
        begin("--model-path", "/nowhere/ling")


def test_a_model_hubs_name_is_no_path(begin: Callable[..., server.Server]) -> None:
    begin("--model-path", "inclusionAI/Ling-3.0-flash", wait=False).stop()


def test_a_log_that_cannot_be_kept_is_one_sentence(
    begin: Callable[..., server.Server], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"log cannot be kept in .*file/run: Not a directory"):
        begin(log=tmp_path / "file" / "run" / "x.log")
    (tmp_path / "runs" / "x.log").mkdir(parents=True)
    error = failure(lambda: begin(log=tmp_path / "runs" / "x.log"))
    assert "could not be started (Is a directory: " in error.sentence


def test_an_interpreter_that_is_no_program_is_one_sentence(place: Path, tmp_path: Path) -> None:
    bad = tmp_path / "python"
    bad.write_text("not a program")
    bad.chmod(0o755)
    with pytest.raises(server.StartFailed, match=r"could not be started .Exec format error"):
        server.start(launch(), python=bad, log=place / "x.log")


# --------------------------------------------------------------------------- ports


def test_free_port_names_the_holder_of_a_busy_one() -> None:
    with taken_port() as port:
        with pytest.raises(ServerError) as caught:
            server.free_port(port)
        message = str(caught.value)
        assert message.startswith(f"Port {port} on 127.0.0.1 is taken by ")
        assert f"(pid {os.getpid()})" in message and "\n" not in message
    assert server.free_port(port) == port
    assert server.free_port() in ports.PORTS


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_free_port_refuses_nonsense(port: int) -> None:
    with pytest.raises(UsageError, match="no port number"):
        server.free_port(port)


def test_an_explicit_busy_port_is_refused(begin: Callable[..., server.Server]) -> None:
    with taken_port() as port:
        with pytest.raises(
            ServerError, match=f"Port {port} on 127.0.0.1 is taken by .*choose another"
        ):
            begin(port=port)
        with begin(port=port, exact_port=False, wait=False) as running:
            assert running.port != port
            assert running.launch.port == running.port


def test_two_suites_at_once_get_two_ports(begin: Callable[..., server.Server], place: Path) -> None:
    made: list[server.Server] = []

    def one(number: int) -> None:
        made.append(begin(port=server.DEFAULT_PORT, log=place / f"run{number}" / "server.log"))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert len({running.port for running in made}) == 3
    assert all(running.alive() for running in made)
    # Two servers of one machine are told apart by their record.
    assert len(list((place / server.STATE_FOLDER).glob("*.json"))) == 3
    busy = made[0].port
    with pytest.raises(ServerError, match=f"Port {busy}"):
        server.free_port(busy)


def test_a_port_that_is_reserved_but_not_yet_bound_is_busy(
    begin: Callable[..., server.Server],
) -> None:
    running = begin("--mood", "hang-loading", wait=False)
    with pytest.raises(ServerError, match="another server of ours that is just starting"):
        server.free_port(running.port)
    assert server.free_port() != running.port
    running.stop()
    assert server.free_port(running.port) == running.port


def test_a_port_taken_while_loading_means_another_port(
    begin: Callable[..., server.Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # At once, not at the deadline: SGLang itself hangs for two minutes after this.
    monkeypatch.setattr(server.Waiting, "_too_late", lambda self: pytest.fail("too late"))
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # the server's loading ends when somebody has opened it for writing
    thief = socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    stolen = []

    def steal(phase: str, seconds: float) -> None:
        if not stolen:
            (loading,) = server._SERVERS
            thief.bind(("127.0.0.1", loading.port))
            thief.listen()
            stolen.append(loading.port)
            with gate.open("w"):
                gate.unlink()
                gate.touch()  # nothing holds the next start

    with thief:
        running = begin("--say", str(gate), progress=steal)
        assert running.port != stolen[0]
        assert running.alive()


def test_a_stranger_on_the_port_does_not_pass_for_the_server(
    begin: Callable[..., server.Server],
) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    running = begin("--mood", "hang-loading", wait=False)
    with HTTPServer(("127.0.0.1", running.port), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        error = failure(lambda: running.wait_ready(60))
        stranger.shutdown()
    assert (
        f"is answered by {procs.read_stat(os.getpid()).name} (pid {os.getpid()})" in error.sentence
    )


# --------------------------------------------------------------------------- environment


def test_case_41_loopback_is_never_proxied(
    begin: Callable[..., server.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    running = begin()
    running.generate_one(60)
    raw = Path(f"/proc/{running.pid}/environ").read_bytes().split(b"\0")
    env = dict(one.decode().split("=", 1) for one in raw if b"=" in one)
    assert env["NO_PROXY"].split(",") == ["example.org", "127.0.0.1", "localhost", "::1"]
    assert env["no_proxy"].split(",") == ["127.0.0.1", "localhost", "::1"]
    # Other hosts still go through the proxy.
    assert env["http_proxy"] == "http://127.0.0.1:9"


def test_the_childs_environment() -> None:
    base = {
        "PATH": "/usr/bin",
        "HOME": "/h",
        "OMP_NUM_THREADS": "7",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "FORCE_COLOR": "1",
        "NO_PROXY": "*",
        "no_proxy": "a, 127.0.0.1",
        "A": "base",
    }
    python = PYTHON
    env = server.child_environment(
        {"A": "recipe", "B": "recipe"}, python, extra={"B": "x"}, base=base
    )
    assert (env["A"], env["B"], env["HOME"]) == ("recipe", "x", "/h")
    # The server's own tools first, then ours and the caller's; a CUDA toolkit's at most after them.
    ahead = dict.fromkeys([str(python.parent), str(Path(sys.executable).parent), "/usr/bin"])
    assert env["PATH"].startswith(":".join(ahead))
    assert env["VIRTUAL_ENV"] == str(python.parent.parent)
    assert "MPLBACKEND" not in env and "FORCE_COLOR" not in env
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["NO_PROXY"] == "*"
    assert env["no_proxy"] == "a,127.0.0.1,localhost,::1"
    assert "OMP_NUM_THREADS" not in server.child_environment({}, python, base={})
    assert "VIRTUAL_ENV" not in server.child_environment(
        {}, Path("/usr/bin/python3"), base={"VIRTUAL_ENV": "/x"}
    )


def test_a_switch_of_the_caller_s_shell_reaches_no_stage():
    names = (
        "SPARKLING_FP8_LM_HEAD",
        "SGLANG_ENABLE_FP8_LM_HEAD",
        "SPARKLING_SHARE_HEAD",
        "SPARKLING_SWIGLU_CLAMP",
        "SPARKLING_TRAP",
    )
    base = dict.fromkeys(names, "1")
    assert not set(names) & server.child_environment({}, PYTHON, base=base).keys()
    env = server.child_environment({names[0]: "0"}, PYTHON, extra={names[2]: "0"}, base=base)
    assert {name: env[name] for name in names if name in env} == {names[0]: "0", names[2]: "0"}


@pytest.mark.parametrize(("device", "kept"), [("cpu", False), ("cuda", True)])
def test_compiled_kernels_outlive_a_server_on_a_gpu(
    begin: Callable[..., server.Server], monkeypatch: pytest.MonkeyPatch, device: str, kept: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    running = begin("--mood", "hang-loading", wait=False)
    running._on_cpu = device == "cpu"
    assert running._kept_caches() == (
        {"TORCHINDUCTOR_CACHE_DIR": "/cache/sparkling/torchinductor"} if kept else {}
    )
    env = Path(f"/proc/{running.pid}/environ").read_bytes()
    assert b"TORCHINDUCTOR" not in env
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert running._kept_caches() == {}


def test_the_recipes_environment_and_ours_reach_the_server(place: Path) -> None:
    asked = launch("--mood", "hang-loading", env={"SGLANG_X": "1", "OMP_NUM_THREADS": "3"})
    stale = place / "run" / "a.status.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    with server.start(
        asked, python=PYTHON, log=place / "run" / "a.log", wait=False, extra_env={"SGLANG_X": "2"}
    ) as running:
        env = Path(f"/proc/{running.pid}/environ").read_bytes().decode().split("\0")
        assert "SGLANG_X=2" in env and "OMP_NUM_THREADS=3" in env
        assert f"SPARKLING_STATUS_FILE={running.status_file}" in env
        assert running.status_file == stale and not stale.exists()
        (tmp,) = [one.removeprefix("TMPDIR=") for one in env if one.startswith("TMPDIR=")]
        assert os.path.isdir(tmp) and os.stat(tmp).st_mode & 0o777 == 0o700
        assert os.readlink(f"/proc/{running.pid}/cwd") == str(running.log.parent)
        assert "PYTHONSAFEPATH=1" in env  # or that folder would come first on its module path
        Path(tmp, "socket").touch()
    assert not os.path.exists(tmp)


# --------------------------------------------------------------------------- the API key


def test_the_api_key_is_demanded_and_nowhere_to_be_seen(
    begin: Callable[..., server.Server], place: Path, capfd: pytest.CaptureFixture
) -> None:
    running = begin("--mood", "chatty", api_key=KEY)
    running.generate_one(60)
    assert readiness.status_of(running.port, "/model_info", {}) == 401
    secret = KEY.encode()
    for one in (
        *running.processes(),
        running._warden,
        procs.identify(running._keeper.pid),
    ):
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{one.pid}/{name}").read_bytes()
    deadline = time.monotonic() + 60
    while "Receive" not in running.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    # The server did print it, twice; the log has it struck out.
    assert running.log.read_text().count("[redacted]") >= 2
    for path in [*place.rglob("*"), *Path(tempfile.gettempdir()).rglob("*")]:
        if path.is_file():
            assert path.is_symlink() or secret not in path.read_bytes(), path
    assert KEY not in repr(running) and KEY not in " ".join(running.tail())
    assert running.events()[0].args["api_key"] == "[redacted]"
    assert KEY not in str(running.launch.to_json())
    out = capfd.readouterr()
    assert KEY not in out.out + out.err


def test_a_server_that_ignores_the_api_key_is_not_ready(
    failed: dict[str, server.StartFailed],
) -> None:
    assert "answers 200 without the API key" in failed["no-auth"].sentence


def test_a_failed_start_does_not_show_the_key(failed: dict[str, server.StartFailed]) -> None:
    shown = str(failed["crash-with-key"])
    assert "[redacted]" in shown and KEY not in shown


@pytest.mark.parametrize(
    "key",
    [
        "",
        "short",
        "-starts-with-dash",
        "has space in it",
        "quote'in'it",
        "ümlaut-ümlaut",
        "x" * 201,
        "new\nline-in-it",
    ],
)
def test_keys_that_could_not_be_kept_out_of_logs_are_refused(
    begin: Callable[..., server.Server], key: str
) -> None:
    with pytest.raises(UsageError) as caught:
        begin(api_key=key)
    assert "The API key must be" in str(caught.value)
    assert not key or key not in str(caught.value)


def test_new_keys_are_acceptable_and_differ() -> None:
    keys = {server.new_api_key() for _ in range(10)}
    assert len(keys) == 10
    for key in keys:
        server._check_key(key)


def test_a_recipe_with_a_config_file_and_a_key_is_refused(
    begin: Callable[..., server.Server],
) -> None:
    with pytest.raises(UsageError, match="--config"):
        begin("--config", "x.yaml", api_key=KEY)


# --------------------------------------------------------------------------- sparkling stop


def test_stop_all_stops_what_is_recorded(begin: Callable[..., server.Server], place: Path) -> None:
    first = begin("--tree")
    second = begin("--mood", "stubborn", log=place / "other" / "x.log")
    lines = server.stop_all(place)
    assert sorted(lines) == sorted(
        f"Stopped the server on port {one.port} ({one.log})." for one in (first, second)
    )
    for one in (first, second):
        assert one.processes() == []
        assert not one.alive()
    assert server.stop_all(place) == []


def test_stop_all_of_an_unknown_folder_does_nothing(tmp_path: Path) -> None:
    assert server.stop_all(tmp_path / "nowhere") == []


def record(folder: Path, name: str, content: object) -> Path:
    path = folder / server.STATE_FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_case_29_records_of_strangers_are_removed_not_obeyed(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        who = procs.identify(stranger.pid).to_json()
        alien = {**who, "start": who["start"] - 100}
        earlier = {**who, "boot": "00000000-0000-0000-0000-000000000000"}
        first = procs.identify(1).to_json()
        for name, content in {
            "reused": {"id": "aa", "keeper": alien, "warden": alien, "server": alien},
            "before-reboot": {"id": "bb", "keeper": earlier, "server": earlier},
            "init": {"id": "cc", "keeper": first, "server": first},
            "empty": "",
            "half": '{"id": "dd", "keeper": {"pid": ',
            "list": [1, 2],
            "no-id": {"keeper": None},
            "no-mark": {"id": "", "server": {"pid": stranger.pid}},
        }.items():
            record(tmp_path, name, content)
        assert server.stop_all(tmp_path) == []
        assert stranger.poll() is None
        assert not (tmp_path / server.STATE_FOLDER).exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_case_29_a_zombie_is_a_stopped_server(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    who = procs.identify(process.pid).to_json()
    process.kill()
    while procs.read_stat(process.pid).state != "Z":
        time.sleep(0.01)
    record(tmp_path, "zombie", {"id": "ee", "server": who})
    began = time.monotonic()
    assert server.stop_all(tmp_path, timeout_s=120) == []
    assert time.monotonic() - began < 60  # it did not wait for the dead
    process.wait()


def test_the_record_lies_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server._runs_folder(tmp_path / "runs" / "id" / "nb" / "x.log") == tmp_path / "runs"
    assert server._runs_folder(tmp_path / "else" / "x.log") == tmp_path / "else"
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "mine"))
    assert server._runs_folder(tmp_path / "mine" / "id" / "x.log") == tmp_path / "mine"
    assert server._runs_folder(tmp_path / "runs" / "x.log") == tmp_path / "runs"


# --------------------------------------------------------------------------- memory, client


def test_stop_waits_for_the_memory_but_not_for_ever(
    begin: Callable[..., server.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin()
    running.stop()
    gigabyte = 1 << 30
    readings = iter([4, 5, 6, 7, 8, 9, 10, 10])
    monkeypatch.setattr(procs, "memory_available", lambda: next(readings) * gigabyte)
    running._memory_before = 10 * gigabyte
    running._wait_memory(4 * gigabyte, timeout_s=120)
    assert next(readings) == 10  # it ended at nine tenths of the six that were gone: 9.4
    # Somebody else took the memory: nothing comes back any more.
    monkeypatch.setattr(procs, "memory_available", lambda: 4 * gigabyte)
    began = time.monotonic()
    running._wait_memory(4 * gigabyte, timeout_s=120)
    assert 0.9 < time.monotonic() - began < 60


def test_the_client_has_the_url_and_hides_the_key(begin: Callable[..., server.Server]) -> None:
    running = begin("--mood", "hang-loading", wait=False, api_key=KEY)
    assert running.url in repr(running.client())
    assert KEY not in repr(running.client())


def test_failures_survive_being_sent_to_another_process(
    failed: dict[str, server.StartFailed],
) -> None:
    for error in failed.values():
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.tail, copy.diagnosis) == (str(error), error.tail, error.diagnosis)
