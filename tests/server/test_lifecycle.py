"""Start, secrets, failure and death of the real server. One server runs at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sparkling import log, procs, readiness, recipe, server, tiny
from sparkling.errors import ServerError

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

READY_S = 400  # a busy machine needs many times what a quiet one does
# Nothing takes 10 s on a quiet machine; SGLang alone would take 65 s to follow a dead detokenizer.
LIMIT_S = 45.0
KEY = "sk-Real.Key_0123456789"

# What a notebook's kernel does, as a process that can be killed.
NOTEBOOK = """
import json, sys, time
from pathlib import Path
from sparkling import recipe, server
python, model, log, wait = sys.argv[1:]
launch = recipe.load("tiny-ling").render("nextn", model=model, port=0)
running = server.start(launch, python=Path(python), log=Path(log), wait=wait == "ready", deadline_s=400)
people = [running._identity, running._warden, *running.processes()]
print(json.dumps([running.id, running.port, running._pipe, [p.to_json() for p in people]]), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model") / "tiny-ling")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, so that what a server leaves there is seen."""
    folder = tempfile.mkdtemp(prefix="spk")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield Path(folder)
    for one in list(server._SERVERS):
        one.stop()
    os.rmdir(folder)


@pytest.fixture
def begin(
    own: Path, model: Path, server_python: Path, tmp_path: Path
) -> Callable[..., server.Server]:
    def make(stage: str = "nextn", *more: str, **settings: object) -> server.Server:
        launch = recipe.load("tiny-ling").render(stage, model=settings.pop("model", model), port=0)
        if more:
            launch = launch.__class__(**{**vars(launch), "argv": (*launch.argv, *more)})
        settings = {"deadline_s": READY_S, "log": tmp_path / "runs" / "server.log", **settings}
        return server.start(launch, python=server_python, **settings)

    return make


def shared_memory(people: list[procs.Identity]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped (other servers have theirs)."""
    found = set()
    for one in people:
        for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines():
            if " /dev/shm/" in line and not line.endswith("(deleted)"):
                found.add(Path(line.split(None, 5)[-1]))
    assert not people or any(one.name.startswith("sglang_") for one in found)
    return found


def bound(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def left(running: server.Server, own: Path, runs: Path) -> list[str]:
    """What of a server still exists, in words."""
    found = [f"{one.pid} {procs.read_stat(one.pid)}" for one in running.processes()]
    found += ["the warden"] if procs.is_alive(running._warden) else []
    found += [f"port {running.port}"] if bound(running.port) else []
    found += [str(one) for one in own.rglob("*")]
    return found + [str(one) for one in runs.rglob(f"{server.STATE_FOLDER}/*")]


def seconds_until_nothing_is_left(check: Callable[[], list[str]]) -> tuple[float, list[str]]:
    began = time.monotonic()
    while (found := check()) and time.monotonic() - began < LIMIT_S:
        time.sleep(0.1)
    return time.monotonic() - began, found


def workers(running: server.Server) -> list[procs.Identity]:
    """SGLang's worker processes, also before they have their names; none of its brief helpers."""
    found = []
    for one in procs.descendants(running.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{one.pid}/cmdline").read_bytes()
            if b"multiprocessing.spawn" in words or words.startswith(b"sglang::"):
                found.append(procs.identify(one.pid))
    return [one for one in found if procs.is_alive(one)]


def named(running: server.Server, name: str) -> procs.Identity:
    """A worker of SGLang by the name that it gave itself."""
    (one,) = [one for one in procs.descendants(running.pid) if one.name.startswith(name)]
    return procs.identify(one.pid)


def test_the_key_is_demanded_and_in_no_argument_environment_file_or_log(
    begin: Callable[..., server.Server], own: Path, tmp_path: Path
) -> None:
    running = begin(api_key=KEY)
    memory = shared_memory(running.processes())
    secret = KEY.encode()

    # Every process of the server, as SGLang renamed them.
    people = [*running.processes(), running._warden]
    names = {procs.read_stat(one.pid).name for one in people}
    assert {"sglang::schedul", "sglang::detoken"} <= names
    for one in people:
        for name in ("cmdline", "environ", "comm"):
            assert secret not in Path(f"/proc/{one.pid}/{name}").read_bytes(), (one, name)

    # SGLang prints all its arguments: they are in the log, the key is not.
    (arguments,) = [one for one in running.events() if isinstance(one, log.ServerArgs)]
    assert arguments.args["api_key"] == "[redacted]"
    assert "'api_key': '[redacted]'" in running.log.read_text()
    for path in [*tmp_path.rglob("*"), *own.rglob("*")]:
        if path.is_file() and not path.is_symlink():
            assert secret not in path.read_bytes(), path

    assert readiness.status_of(running.port, "/model_info", {}) == 401
    assert readiness.status_of(running.port, "/server_info", {}) == 401
    info = running.client().server_info()
    # SGLang itself hands it to whoever has it: whoever stores this answer must redact it.
    assert info.get("api_key") in (KEY, "***", "[redacted]")
    assert KEY not in " ".join(running.tail(200)) + repr(running)

    # What the log says of a healthy start.
    kinds = {type(one) for one in running.events()}
    assert {
        log.WeightsLoaded,
        log.KvPool,
        log.MambaPool,
        log.Limits,
        log.HttpUp,
        log.Ready,
    } <= kinds
    classes = [one.model_class for one in running.events() if isinstance(one, log.WeightsLoaded)]
    assert classes == ["BailingMoeV3ForCausalLM", "BailingMoeForCausalLMNextN"]
    assert json.loads(running.status_file.read_text())["pid"] > 0

    # Its detokenizer dies. SGLang itself would wait 65 s before it ends.
    procs.send(named(running, "sglang::detoken"), signal.SIGKILL)
    took, found = seconds_until_nothing_is_left(lambda: left(running, own, tmp_path))
    assert not found, found
    print(f"detokenizer killed: all gone after {took:.1f} s")
    assert not running.alive()
    running.stop()
    assert not [one for one in memory if one.exists()]


def test_a_stopped_server_is_gone_and_its_port_can_be_used_at_once(
    begin: Callable[..., server.Server], own: Path, tmp_path: Path
) -> None:
    running = begin("baseline")
    memory = shared_memory(running.processes())
    assert len(running.processes()) >= 3
    running.stop()
    # At the moment stop returns, not a little later.
    assert not left(running, own, tmp_path)
    assert not [one for one in memory if one.exists()]
    assert not bound(running.port)
    assert not [one for one in running.events() if isinstance(one, log.Crash)]


@pytest.mark.parametrize("victim", ["sglang::schedul", "server", "warden", "keeper"])
def test_killing_a_process_of_a_ready_server_leaves_nothing(
    begin: Callable[..., server.Server], own: Path, tmp_path: Path, victim: str
) -> None:
    running = begin()
    memory = shared_memory(running.processes())
    who = {
        "server": running._identity,
        "warden": running._warden,
        "keeper": procs.identify(running._keeper.pid),
    }.get(victim) or named(running, victim)
    time.sleep(3.0)  # the warden is noting what shared memory to remove, and tells nobody
    assert procs.send(who, signal.SIGKILL)
    took, found = seconds_until_nothing_is_left(lambda: left(running, own, tmp_path))
    assert not found, found
    print(f"{victim} killed: all gone after {took:.1f} s")
    running.stop()
    # A killed warden knew of the shared memory; nobody else does.
    assert victim == "warden" or not [one for one in memory if one.exists()]
    for one in memory:
        one.unlink(missing_ok=True)


@pytest.mark.parametrize("victim", ["child", "server", "warden", "keeper"])
def test_killing_a_process_of_a_loading_server_leaves_nothing(
    begin: Callable[..., server.Server], own: Path, tmp_path: Path, victim: str
) -> None:
    running = begin(wait=False)
    # As soon as its workers exist; they protect themselves only when they have imported torch.
    deadline = time.monotonic() + READY_S
    while len(workers(running)) < 2 and time.monotonic() < deadline:
        assert running.alive()
        time.sleep(0.1)
    time.sleep(0.5)
    who = {
        "server": running._identity,
        "warden": running._warden,
        "keeper": procs.identify(running._keeper.pid),
        "child": workers(running)[-1],
    }[victim]
    assert procs.send(who, signal.SIGKILL)
    took, found = seconds_until_nothing_is_left(lambda: left(running, own, tmp_path))
    assert not found, found
    print(f"{victim} killed while loading: all gone after {took:.1f} s")
    with pytest.raises(server.StartFailed):
        running.wait_ready(READY_S)


@pytest.mark.parametrize("moment", ["ready", "loading"])
def test_killing_the_notebook_leaves_nothing(
    own: Path, model: Path, server_python: Path, tmp_path: Path, moment: str
) -> None:
    arguments = [str(server_python), str(model), str(tmp_path / "runs" / "server.log"), moment]
    kernel = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(own)},
    )
    try:
        mark, port, pipe, people = json.loads(kernel.stdout.readline())
        main, warden, *workers = [procs.Identity.from_json(one) for one in people]
        session = procs.read_stat(warden.pid).session

        def members() -> list[procs.Identity]:
            found = server._members(mark, session, main, pipe)
            return [one for one in found if one != warden]

        if moment == "loading":
            deadline = time.monotonic() + READY_S
            while len(members()) < 4 and time.monotonic() < deadline:
                time.sleep(0.1)
        assert len(members()) >= 3
        memory = shared_memory(members()) if moment == "ready" else set()
        kernel.kill()

        def remains() -> list[str]:
            living = [one for one in (*members(), warden, *workers) if procs.is_alive(one)]
            files = [*own.rglob("*"), *tmp_path.rglob(f"{server.STATE_FOLDER}/*")]
            return [*map(str, living), *map(str, files), *([f"port {port}"] if bound(port) else [])]

        took, found = seconds_until_nothing_is_left(remains)
        assert not found, found
        print(f"notebook killed while {moment}: all gone after {took:.1f} s")
        assert not [one for one in memory if one.exists()]
    finally:
        kernel.kill()
        kernel.communicate()


def test_a_checkpoint_that_is_cut_short_is_named(
    begin: Callable[..., server.Server], model: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in model.iterdir():
        (cut / path.name).write_bytes(path.read_bytes())
    (weights,) = cut.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(server.StartFailed) as caught:
        begin("baseline", model=cut)
    assert caught.value.diagnosis.kind == "safetensors"
    assert "damaged or cut short" in caught.value.sentence


def test_a_flag_that_sglang_does_not_know_is_named(begin: Callable[..., server.Server]) -> None:
    with pytest.raises(ServerError, match="unrecognized arguments: --no-such-flag"):
        begin("baseline", "--no-such-flag")
