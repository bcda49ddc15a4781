"""One model at a time on a GPU; on a CPU as many as fit; notes of the dead do not count."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sparkling import claims, machine, procs, recipe, server, tiny
from sparkling.errors import SparklingError
from sparkling.machine import Memory
from sparkling.memory import NoMemory

GIB = 2**30
FAKE = Path(__file__).resolve().parent / "fakes" / "fake_server.py"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKLING_CLAIMS", str(tmp_path / "sparkling"))
    return tmp_path / "sparkling"


@pytest.fixture
def other():
    """A living process that is not ours to count as anything else."""
    process = subprocess.Popen(["sleep", "600"])
    yield procs.identify(process.pid)
    process.kill()
    process.wait()


def claim(who: procs.Identity, need: float = 3, *, device: bool = False, name: str = "a") -> Path:
    with claims.table() as held:
        return held.add(name, who, "x, stage y", int(need * GIB), device=device)


def test_a_gpu_is_held_by_one_model_at_a_time(other: procs.Identity) -> None:
    path = claim(other, device=True)
    with claims.table() as held:
        with pytest.raises(NoMemory, match=rf"x, stage y \(pid {other.pid}\) has held the GPU's"):
            held.require("z", GIB, device=True, available=900 * GIB)
        # A server on the CPU is another matter, and so is one whose need nobody knows.
        held.require("z", GIB, device=False, available=900 * GIB)
        held.require("z", 0, device=False, available=None)
    claims.release(path)
    with claims.table() as held:
        held.require("z", GIB, device=True, available=900 * GIB)


def test_what_another_server_will_still_take_counts(other: procs.Identity) -> None:
    path = claim(other, 3)
    with claims.table() as held:
        held.require("z", 4 * GIB, device=False, available=8 * GIB)
        with pytest.raises(NoMemory, match=r"needs 4\.0 GiB, 6\.0 are available and 3\.0 of them"):
            held.require("z", 4 * GIB, device=False, available=6 * GIB)
    claims.ready(path)  # now the available memory shows it
    with claims.table() as held:
        held.require("z", 4 * GIB, device=False, available=6 * GIB)


def test_what_it_holds_already_is_not_counted_twice() -> None:
    code = "import sys; x = bytearray(b'x' * (200 << 20)); print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    claim(procs.identify(holder.pid), 1)
    with claims.table() as held:
        (one,) = held.living()
        assert GIB - (300 << 20) < one.outstanding() < GIB - (190 << 20)
    holder.kill()
    holder.communicate()


def test_notes_of_the_dead_the_reused_and_the_rebooted_are_removed(
    other: procs.Identity, place: Path
) -> None:
    dead = subprocess.Popen(["true"])
    gone = procs.identify(dead.pid)
    dead.wait()
    claim(gone, device=True, name="dead")
    claim(procs.Identity(other.pid, other.start + 1, other.boot), device=True, name="reused")
    claim(procs.Identity(other.pid, other.start, "before"), device=True, name="reboot")
    (place / "half.json").write_text('{"who": {"pid": 1')
    (place / "list.json").write_text("[]")
    with claims.table() as held:
        held.require("z", GIB, device=True, available=GIB)
        assert held.living() == []
    assert not place.exists()  # an empty folder is not left behind


def test_a_login_session_and_a_service_see_the_same_notes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("SPARKLING_CLAIMS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    in_a_session = claims.folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert claims.folder() == in_a_session


def test_a_folder_of_somebody_else_is_not_used(place: Path, monkeypatch) -> None:
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    with pytest.raises(SparklingError, match="belongs to somebody else"):
        with claims.table():
            pass
    place.rmdir()
    place.symlink_to(place.parent)
    with pytest.raises(SparklingError, match="cannot be used"):
        with claims.table():
            pass


def _bid(number: int, results) -> None:
    try:
        with claims.table() as held:
            held.require(f"bid {number}", GIB, device=True, available=99 * GIB)
            held.add(str(number), procs.identify(os.getpid()), f"bid {number}", GIB, device=True)
        results.put(number)
    except NoMemory:
        results.put(None)
    results.join()


def test_of_many_at_once_one_wins() -> None:
    context = multiprocessing.get_context("fork")
    results = context.JoinableQueue()
    bids = [context.Process(target=_bid, args=(n, results)) for n in range(8)]
    for one in bids:
        one.start()
    won = [results.get(timeout=60) for _ in bids]
    for _ in bids:
        results.task_done()
    for one in bids:
        one.join(60)
    assert sum(one is not None for one in won) == 1


# -- through server.start ------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.build(tmp_path / "tiny")


def begin(tmp_path: Path, model: Path, *arguments: str, name: str = "a") -> server.Server:
    """The fake server, with the tiny Ling's recipe, whose need is known."""
    launch = recipe.load("tiny-ling").render("baseline", model=model, port=0)
    words = [str(FAKE), "--port", "0", "--device", "cpu", "--model-path", str(model), *arguments]
    fake = launch.__class__(**{**vars(launch), "argv": ("-u", *words)})
    return server.start(
        fake, python=Path(sys.executable), log=tmp_path / "runs" / f"{name}.log", deadline_s=60
    )


def available(monkeypatch: pytest.MonkeyPatch, gib: float, **more: object) -> None:
    here = Memory(int(24 * GIB), int(gib * GIB), "/proc/meminfo", **more)
    monkeypatch.setattr(machine, "memory", lambda: here)
    monkeypatch.setattr(server.memory.machine, "host_memory", lambda *_: here)


def test_a_server_whose_need_does_not_fit_is_not_started(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, 3)
    with pytest.raises(NoMemory, match=r"baseline is not started: it needs 3\.5 GiB"):
        begin(tmp_path, model)
    assert not server._SERVERS


def test_two_run_side_by_side_when_memory_allows(
    tmp_path: Path, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, 20)
    with begin(tmp_path, model, name="a") as first, begin(tmp_path, model, name="b") as second:
        notes = [json.loads(path.read_text()) for path in sorted(place.glob("*.json"))]
        assert len(notes) == 2 and all(note["ready"] for note in notes)
        assert {note["who"]["pid"] for note in notes} == {first._keeper.pid, second._keeper.pid}
        assert first.need.total > 3 * GIB
    assert not place.exists()


def test_while_one_is_loading_another_must_fit_beside_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, 6)
    launch = recipe.load("tiny-ling").render("baseline", model=model, port=0)
    words = ("--port", "0", "--device", "cpu", "--model-path", str(model), "--mood", "hang-loading")
    fake = launch.__class__(**{**vars(launch), "argv": ("-u", str(FAKE), *words)})
    loading = server.start(
        fake, python=Path(sys.executable), log=tmp_path / "runs" / "l.log", wait=False
    )
    try:
        with pytest.raises(NoMemory, match="will be taken by tiny-ling, stage baseline, on port"):
            begin(tmp_path, model)
    finally:
        loading.stop()
    begin(tmp_path, model).stop()


def test_the_note_goes_with_a_killed_server(
    tmp_path: Path, model: Path, place: Path, monkeypatch
) -> None:
    available(monkeypatch, 20)
    running = begin(tmp_path, model)
    os.kill(running._keeper.pid, 9)
    running._keeper.wait()
    with claims.table() as held:
        assert held.living() == []
    running.stop()
    assert not place.exists()


def test_a_spark_does_not_compile_beside_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, 115, unified=True, gpu="NVIDIA GB10")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    model = tmp_path / "model"
    model.mkdir()
    flash = recipe.load("ling-3.0-flash").render("baseline", model=model, port=0)
    # Never the real thing: a program that ends at once.
    fake = flash.__class__(**{**vars(flash), "argv": ("-c", "pass", *flash.argv[2:])})

    def start() -> None:
        server.start(fake, python=Path(sys.executable), log=tmp_path / "runs" / "s.log").stop()

    with pytest.raises(
        NoMemory, match=r"CUTLASS kernels are not compiled.*sparkling kernels build"
    ):
        start()
    built = tmp_path / ".cache/sglang/.cache/flashinfer/0.7.2/121a/cached_ops/fused_moe_120"
    built.mkdir(parents=True)
    (built / "fused_moe_120.so").touch()
    with pytest.raises(server.StartFailed):
        start()
