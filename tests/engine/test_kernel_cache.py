"""Humming's kernels are counted as compiled or cached, with a compiler that stands for its own."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from sparkling_sglang import kernel_cache, status


@pytest.fixture
def compiler(tmp_path):
    """A class that behaves as `humming.jit.compiler.Compiler`: base, classmethod, cache by code."""

    class Compiler:
        asked: list[type] = []  # noqa: RUF012

        @classmethod
        def compile(cls, code, sm_version, kernel_expr, disable_fast_math=False):
            cls.asked.append(cls)
            if code == "broken":
                raise RuntimeError(f"{cls} run failed")
            file = tmp_path / "cache" / f"{code:0>16}" / "kernel.cubin"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"x")
            return file.as_posix()

    return Compiler


@pytest.fixture
def kept(monkeypatch, tmp_path):
    made = status.Status(tmp_path / "status.json", {"humming": None})
    monkeypatch.setattr(status, "current", made)
    return made


def age(path: str) -> None:
    os.utime(path, (1e9, 1e9))


def test_a_kernel_is_compiled_once_and_cached_after_that(compiler, kept, tmp_path):
    class NVRTCCompiler(compiler):
        pass

    kernel_cache.watch(compiler, kernel_cache.Counts())
    first = NVRTCCompiler.compile("a", sm_version="121a", kernel_expr="k")
    assert kept.get("humming")["compiled"] == 1 and kept.get("humming")["cached"] == 0
    age(first)
    assert NVRTCCompiler.compile("a", "121a", "k") == first
    NVRTCCompiler.compile("b", "121a", "k", disable_fast_math=True)
    said = kept.get("humming")
    assert (said["compiled"], said["cached"], said["failed"]) == (2, 1, 0)
    assert said["cache"] == str(tmp_path / "cache") and said["compile_s"] >= 0
    assert set(compiler.asked) == {NVRTCCompiler}  # the compiler in use, not its base


def test_a_kernel_that_fails_is_counted_and_fails_still(compiler, kept):
    kernel_cache.watch(compiler, kernel_cache.Counts())
    with pytest.raises(RuntimeError, match="run failed"):
        compiler.compile("broken", "121a", "k")
    assert kept.get("humming")["failed"] == 1


def test_watching_twice_counts_once(compiler, kept):
    for _ in range(2):
        kernel_cache.watch(compiler, kernel_cache.Counts())
    compiler.compile("a", "121a", "k")
    assert kept.get("humming")["compiled"] == 1


def test_seconds_are_those_of_compiling(compiler, kept):
    times = iter([0.0, 2.5, 10.0, 10.1])
    counts = kernel_cache.Counts(clock=lambda: next(times))
    kernel_cache.watch(compiler, counts)
    age(compiler.compile("a", "121a", "k"))  # written now, which is after second 0
    times = iter([4e9, 4e9 + 1])
    compiler.compile("a", "121a", "k")
    assert (counts.compiled, counts.cached, counts.seconds) == (1, 1, 2.5)


def test_threads_that_compile_together_are_all_counted(compiler, kept):
    counts = kernel_cache.Counts()
    kernel_cache.watch(compiler, counts)
    threads = [
        threading.Thread(target=compiler.compile, args=(f"{n}", "121a", "k")) for n in range(24)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert counts.compiled == 24


@pytest.mark.parametrize(
    ("backend", "there", "counted"),
    [("humming", True, True), ("humming", False, False), ("triton", True, False)],
)
def test_only_a_server_that_runs_humming_is_watched(
    compiler, kept, monkeypatch, engine_context, backend, there, counted
):
    module = ModuleType("humming.jit.compiler")
    module.Compiler = compiler
    for name in ("humming", "humming.jit"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "humming.jit.compiler", module if there else None)
    plain = compiler.compile.__func__
    kernel_cache._loading(SimpleNamespace(server_args=SimpleNamespace(moe_runner_backend=backend)))
    assert (compiler.compile.__func__ is not plain) is counted
    assert (kept.get("humming") is not None) is counted
    if counted:
        assert kept.get("humming")["compiled"] == 0
