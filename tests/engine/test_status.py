"""The status file: atomic, throttled, and its last change never lost."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.version
from sparkling_sglang import head_choice, status, switches
from sparkling_sglang.patches import Patches


class Clock:
    """A clock and the timers that wait on it, moved by hand."""

    def __init__(self):
        self.now, self.timers = 100.0, []

    def __call__(self) -> float:
        return self.now

    def timer(self, wait, call):
        made = SimpleNamespace(at=self.now + wait, call=call, start=lambda: None, daemon=False)
        self.timers.append(made)
        return made

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        due = [t for t in self.timers if t.at <= self.now]
        self.timers = [t for t in self.timers if t.at > self.now]
        for one in due:
            one.call()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def kept(tmp_path, clock):
    return status.Status(tmp_path / "status.json", {"pid": 1}, clock=clock, timer=clock.timer)


def read(kept) -> dict:
    return json.loads(kept.path.read_text())


@pytest.fixture
def writes(monkeypatch):
    """How often a file was written."""
    seen, real = [], status.replace_file
    monkeypatch.setattr(status, "replace_file", lambda *a: (seen.append(a), real(*a)))
    return seen


def test_the_first_change_is_written_at_once(kept):
    assert not kept.path.exists()
    kept.update(device="cpu")
    assert read(kept)["device"] == "cpu" and read(kept)["pid"] == 1
    assert "updated" in read(kept)


def test_a_change_that_comes_too_early_is_written_later_and_not_lost(kept, clock, writes):
    kept.update(step=1)
    for step in range(2, 50):
        clock.pass_(0.005)
        kept.update(step=step)
    assert len(writes) == 1 and read(kept)["step"] == 1
    assert len(clock.timers) == 1 and clock.timers[0].daemon
    clock.pass_(0.5)
    assert len(writes) == 2 and read(kept)["step"] == 49


def test_writes_are_at_least_half_a_second_apart(kept, clock, writes):
    times = []
    for step in range(1000):
        kept.update(step=step)
        clock.pass_(0.01)
        if len(writes) > len(times):
            times.append(clock.now)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) >= 0.49 and max(gaps) <= 0.52
    assert 18 <= len(writes) <= 21


def test_dicts_are_merged_and_other_values_replaced(kept, clock):
    kept.update(head={"dtype": "bfloat16", "kernel": None}, draft=None)
    kept.update(head={"dtype": "float8_e4m3fn"}, draft={"head_shared": True})
    clock.pass_(1)
    assert read(kept)["head"] == {"dtype": "float8_e4m3fn", "kernel": None}
    assert read(kept)["draft"] == {"head_shared": True}


def test_the_counter_is_read_after_batches_only_and_its_last_value_is_written(kept, clock, writes):
    count, reads = 0, []

    def counter() -> int:
        reads.append(count)
        return count

    kept.update(head={"dtype": "float8_e4m3fn"})
    kept.count_head(counter)
    clock.pass_(1)
    kept.update(draft={})  # while graphs are captured, say
    clock.pass_(1)
    assert not reads and read(kept)["head"]["applied"] == 0
    for count in range(1, 400):  # noqa: B007  (the counter reads it)
        kept.tick()
        clock.pass_(0.005)
    assert len(reads) <= 5
    clock.pass_(1)  # the server is idle now: no tick
    assert read(kept)["head"] == {"dtype": "float8_e4m3fn", "applied": 399}
    before = len(writes)
    kept.tick()
    clock.pass_(1)
    assert len(writes) == before, "nothing changed, so nothing is written"


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "status.json"
    status.replace_file(path, json.dumps({"value": 0, "filler": "x" * 100_000}))
    stop, seen = threading.Event(), []

    def reader():
        while not stop.is_set():
            seen.append(json.loads(path.read_text())["value"])

    thread = threading.Thread(target=reader)

    def wait_for_more():  # the two threads run as the machine likes
        before, limit = len(seen), time.monotonic() + 60
        while len(seen) == before and thread.is_alive() and time.monotonic() < limit:
            time.sleep(0.001)

    thread.start()
    wait_for_more()
    for value in range(200):
        status.replace_file(path, json.dumps({"value": value, "filler": "y" * 100_000}))
    wait_for_more()
    stop.set()
    thread.join()
    assert seen == sorted(seen) and len(seen) > 1
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_folder_that_cannot_be_written_is_said_once_and_stops_nothing(kept, clock, caplog):
    kept.path = kept.path.parent / "missing" / "status.json"
    for step in range(3):
        kept.update(step=step)
        clock.pass_(1)
    assert len(caplog.messages) == 1 and "Cannot write the status file" in caplog.text
    kept.path.parent.mkdir()
    kept.tick()
    kept.update(step=9)
    assert read(kept)["step"] == 9


def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    status.replace_file(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        status.replace_file(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["status.json"]


def test_without_the_variable_nothing_is_hooked(monkeypatch):
    monkeypatch.setattr(status, "current", None)
    patches = Patches()
    status.start(patches, switches.read({}))
    assert status.current is None and not patches.names
    status.update(anything=1)
    status.moe_used("model.layers.1.experts", 2.5, None)


def test_start_hooks_loading_and_batches(engine_context, monkeypatch, tmp_path):
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(status, "current", None)
    monkeypatch.setattr(ModelRunner, "load_model", lambda self: None)
    monkeypatch.setattr(Scheduler, "process_batch_result", lambda self, batch, result: None)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    path = tmp_path / "status.json"
    patches = Patches()
    wanted = switches.read({"SPARKLING_STATUS_FILE": str(path), "SPARKLING_FP8_LM_HEAD": "1"})
    status.start(patches, wanted)
    patches.apply()

    import torch

    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(8, 20, bias=False, dtype=torch.bfloat16)
    ModelRunner.load_model(SimpleNamespace(model=model, is_draft_worker=False, device="cpu"))
    said = json.loads(path.read_text())
    assert said["pid"] == os.getpid() and said["device"] == "cpu"
    assert said["sglang"] == sglang.version.__version__
    assert said["versions"].items() >= {"cuda": torch.version.cuda}.items()
    assert said["humming"] is None
    assert said["switches"]["fp8-head"] is True and said["patched"] == ["status"]
    clock = status.current._clock() + 1
    monkeypatch.setattr(status.current, "_clock", lambda: clock)
    status.current.count_head(lambda: 17)
    clock += 1
    Scheduler.process_batch_result(None, None, None)
    said = json.loads(path.read_text())
    assert said["head"] == {
        "dtype": "bfloat16",
        "bytes_before": 320,
        "bytes_after": 320,
        "applied": 17,
    }


def test_versions_are_those_of_the_kernels_packages(monkeypatch):
    from importlib import metadata

    def version(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return f"{name}-1"

    monkeypatch.setattr(status.metadata, "version", version)
    found = status.versions()
    assert found["humming-kernels"] == "humming-kernels-1" and "triton" not in found
    assert set(found) == set(status.KERNEL_PACKAGES) - {"triton"}


@pytest.mark.parametrize(
    ("tp", "dp", "writes"), [(0, None, True), (0, 0, True), (1, None, False), (0, 1, False)]
)
def test_one_file_has_one_writer(engine_context, monkeypatch, tp, dp, writes):
    from sglang.srt import runtime_context

    here = SimpleNamespace(tp_rank=tp, dp_rank=dp)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: here)
    assert status.first() is writes


def keys_of(tree: ast.AST) -> set[str]:
    """The constant keys of every dict literal that is given to ``update`` or to ``Status``."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    named = [c for c in calls if getattr(c.func, "attr", getattr(c.func, "id", "")) in GIVEN]
    found = {word.arg for call in named for word in call.keywords if word.arg}
    for one in (n for call in named for n in ast.walk(call) if isinstance(n, ast.Dict)):
        found |= {k.value for k in one.keys if isinstance(k, ast.Constant)}
    return found


GIVEN = ("update", "Status")


def test_the_design_names_every_field(root):
    text = (root / "docs" / "design.md").read_text()
    table = text.partition("### The status file")[2].partition("\n###")[0]
    documented = {word.rpartition(".")[2] for word in re.findall(r"`([\w.]+)`", table)}
    written = set()
    for path in Path(status.__file__).parent.rglob("*.py"):
        written |= keys_of(ast.parse(path.read_text()))
    written |= set(re.findall(r'"(kernel\w*)"', Path(head_choice.__file__).read_text()))
    assert {"patched", "head", "bytes_after", "kernel_from", "head_shared", "compile_s"} <= written
    assert written - documented == set()
