"""FlashInfer's build rules, the caches, the gate around a build, and the commands; no GPU, no model.

`fake_environment` is a Python path with a `flashinfer` that writes rules in the real one's layout
(0.7.2), whose compilers are this Python. The real generator runs in `test_the_real_generator` where
the server environment has it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from sparkling import (
    cli,
    gpus,
    kernels,
    kernels_elf,
    kernels_flashinfer,
    kernels_humming,
    kernels_plan,
    kernels_probe,
    kernels_show,
    memory,
    toolpath,
)
from sparkling import kernels_measured as measured
from sparkling import lane as lanes
from sparkling.errors import SparklingError, UsageError
from sparkling.gpus import GpuFacts, Gpus
from sparkling.kernels_ninja import Gate
from sparkling.memory import NoMemory

GIB = 2**30
GB10 = Gpus((GpuFacts("NVIDIA GB10", "12.1"),))
H200 = Gpus((GpuFacts("NVIDIA H200", "9.0", memory_total=140 * GIB, memory_used=0),))
NONE = Gpus()

# A library that exports what FlashInfer calls, by the tables of the gABI, and holds a fat binary with
# one part for an architecture, as nvcc writes its headers.
FATBIN = """
import struct, sys
names = sys.argv[3:] or ["__tvm_ffi_init", "__tvm_ffi_set_deepgemm_jit_include_dirs"]
strings, symbols = b"\\0libcuda.so.1\\0", bytes(24)
for name in names:
    symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 1, 64, 8)
    strings += name.encode() + b"\\0"
needed = struct.pack("<qQ", 1, 1) + bytes(16)
entry = struct.pack("<HHIQIIHHI", 2, 0x101, 64, 8, 0, 0, 0, 0, int(sys.argv[2])) + bytes(32) + bytes(8)
body = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
at, sections = 64, [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
for kind, part, link, each in ((3, strings, 0, 0), (11, symbols, 1, 24), (6, needed, 1, 16), (1, body, 0, 0)):
    sections.append(struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, len(part), link, 0, 8, each))
    at += len(part)
head = b"\\x7fELF\\2\\1\\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, 5, 1)
open(sys.argv[1], "wb").write(head + strings + symbols + needed + body + b"".join(sections))
"""

FUSED_MOE = """
import os, sys
from pathlib import Path
from . import env

class Spec:
    name = os.environ.get("FAKE_NAME", "fused_moe_120")
    build_dir = env.FLASHINFER_JIT_DIR / name
    ninja_path = build_dir / "build.ninja"
    jit_library_path = build_dir / f"{name}.so"
    lock_path = env.FLASHINFER_JIT_DIR / "tmp" / f"{name}.lock"
    aot_artifacts = ()

    def write_ninja(self):
        self.build_dir.mkdir(parents=True, exist_ok=True)
        gpu = os.environ.get("FAKE_GPU", "121a")
        lines = [f"cuda_home = {os.environ['CUDA_HOME']}",
                 f"cuda_cflags = -O3 -gencode=arch=compute_{gpu},code=sm_{gpu}",
                 "rule cuda_compile", f"  command = {sys.executable} -S -c pass && touch $out",
                 "rule link", f"  command = {sys.executable} -S {os.environ['FAKE_LINK']} $out 121"]
        objects = [f"{self.build_dir}/{i}.cuda.o" for i in range(3)]
        lines += [f"build {one}: cuda_compile" for one in objects]
        lines.append(f"build {self.jit_library_path}: link " + " ".join(objects))
        text = "\\n".join(lines) + "\\n"
        if not self.ninja_path.exists() or self.ninja_path.read_text() != text:
            self.ninja_path.write_text(text)

def gen_cutlass_fused_moe_sm120_module():
    return Spec()
"""

ENV = """
import os
from pathlib import Path
base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", os.environ["HOME"]))
arch = os.environ["FLASHINFER_CUDA_ARCH_LIST"].replace(".", "")
FLASHINFER_JIT_DIR = base / ".cache" / "flashinfer" / "0.7.2" / arch / "cached_ops"
"""

SGLANG = """
import os
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", os.path.expanduser("~/.cache/sglang"))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a toolkit and a server environment of this test's own."""
    site = tmp_path / "site"
    (site / "flashinfer" / "jit").mkdir(parents=True)
    (site / "sglang").mkdir()
    (site / "sglang" / "__init__.py").write_text(SGLANG)
    (site / "sglang-0.5.23.dist-info").mkdir()
    (site / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    (site / "flashinfer" / "__init__.py").write_text('__version__ = "0.7.2"\n')
    (site / "flashinfer" / "jit" / "__init__.py").touch()
    (site / "flashinfer" / "jit" / "env.py").write_text(ENV)
    (site / "flashinfer" / "jit" / "fused_moe.py").write_text(FUSED_MOE)
    cuda = tmp_path / "cuda"
    for name in kernels_flashinfer.HEADERS:
        (cuda / "include").mkdir(parents=True, exist_ok=True)
        (cuda / "include" / name).touch()
    (cuda / "lib64" / "stubs").mkdir(parents=True)
    for name in kernels_flashinfer.LIBRARIES:
        (cuda / "lib64" / "stubs" / f"lib{name}.so").touch()
    (cuda / "bin").mkdir()
    nvcc(cuda, "13.0")
    monkeypatch.setattr(toolpath, "ASK_S", 60.0)  # for the fake nvcc, on a busy machine
    (tmp_path / "link.py").write_text(FATBIN)
    (tmp_path / "home").mkdir()
    for name, value in {
        "PYTHONPATH": str(site),
        "HOME": str(tmp_path / "home"),
        "CUDA_HOME": str(cuda),
        "FAKE_LINK": str(tmp_path / "link.py"),
        "SPARKLING_CLAIMS": str(tmp_path / "claims"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR", "MAX_JOBS", "HUMMING_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def nvcc(cuda: Path, version: str) -> None:
    program = cuda / "bin" / "nvcc"
    program.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n"
    )
    program.chmod(0o755)


@pytest.fixture
def spark(home: Path, tmp_path: Path) -> lanes.Lane:
    here = lanes.detect("spark")
    return dataclasses.replace(here, server_python=Path(sys.executable), runs=tmp_path / "runs")


def gate(gib: float = 100) -> Gate:
    return Gate(lambda: int(gib * GIB), 2)


def build(lane: lanes.Lane, **more: object) -> kernels.Report:
    settings = {"look": lambda: NONE, "holders": dict, "gate": gate(), "arch": "12.1a", **more}
    return kernels.build(lane, **settings)


needs_tools = pytest.mark.skipif(
    importlib.util.find_spec("ninja") is None
    and not any(Path(one, "ninja").exists() for one in os.environ["PATH"].split(os.pathsep)),
    reason="ninja is not installed",
)


# -- the rules -----------------------------------------------------------------------------------


def test_the_rules_are_where_the_server_looks_not_where_flashinfer_would(
    spark: lanes.Lane, home: Path
) -> None:
    env = kernels.environment(spark, kernels.stage_launch(spark, "baseline"))
    found = kernels_flashinfer.rules(spark.server_python, env)
    # SGLang moves the cache when it is imported.
    assert (
        found.folder == home / ".cache/sglang/.cache/flashinfer/0.7.2/121a/cached_ops/fused_moe_120"
    )
    assert (found.version, found.sglang, found.targets) == ("0.7.2", "0.5.23", 4)
    assert found.problems() == []
    assert not (home / ".cache" / "flashinfer").exists()


def test_rules_that_the_server_would_not_take_are_told(
    spark: lanes.Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = kernels.environment(spark, kernels.stage_launch(spark, "baseline"))

    def problems(**change: str) -> str:
        return " ".join(kernels_flashinfer.rules(spark.server_python, {**env, **change}).problems())

    assert "is called fused_moe_100" in problems(FAKE_NAME="fused_moe_100")
    assert "not -gencode=arch=compute_121a,code=sm_121a" in problems(FAKE_GPU="120f")
    found = kernels_flashinfer.rules(spark.server_python, env, arch="12.0a")
    assert "0.7.2/121a/cached_ops" in found.problems()[0]
    with pytest.raises(SparklingError, match="not those that the server will look for"):
        monkeypatch.setenv("FAKE_GPU", "120f")
        build(spark)


def test_a_flashinfer_that_is_missing_broken_or_too_old_is_one_sentence(
    spark: lanes.Lane, tmp_path: Path
) -> None:
    jit = tmp_path / "site" / "flashinfer" / "jit"

    def ask() -> kernels_flashinfer.Rules:
        return kernels_flashinfer.rules(spark.server_python, dict(os.environ))

    (jit / "fused_moe.py").write_text("gen_other = 1\n")
    with pytest.raises(
        kernels_flashinfer.NoGenerator, match=r"FlashInfer 0\.7\.2 has no gen_cutlass"
    ):
        ask()
    (jit / "fused_moe.py").write_text("raise RuntimeError('SM 12.1+ requires CUDA >= 12.9')\n")
    with pytest.raises(
        SparklingError, match=r"does not write its build rules: RuntimeError: SM 12"
    ):
        ask()
    (jit / "fused_moe.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(
        SparklingError, match=r"is not whole in the server environment.*--lane spark"
    ):
        ask()
    with pytest.raises(UsageError, match="cannot be run"):
        kernels_flashinfer.rules(tmp_path / "none", {})
    with pytest.raises(SparklingError, match="could not be asked"):
        kernels_flashinfer.rules(Path("/bin/false"), {})


def test_the_real_generator(tmp_path: Path) -> None:
    """FlashInfer 0.7.2 itself, in the server environment, where it is installed."""
    python = lanes.detect("cpu").server_python
    probe = [str(python), "-c", "import flashinfer.jit.fused_moe"]
    env = {**os.environ, "HOME": str(tmp_path), "CUDA_HOME": "/usr/local/cuda"}
    there = python.exists() and subprocess.run(
        probe, env={**env, "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}, capture_output=True, check=False
    )
    if not there or there.returncode != 0:
        pytest.skip("FlashInfer is not in the server environment (it is on a GPU's)")
    found = kernels_flashinfer.rules(python, env)
    assert found.problems() == [] and found.targets == kernels_flashinfer.TARGETS


# -- building ------------------------------------------------------------------------------------


@needs_tools
def test_it_builds_with_nothing_loaded_and_the_server_has_nothing_left_to_do(
    spark: lanes.Lane, home: Path
) -> None:
    before = kernels.check(spark, arch="12.1a", look=lambda: NONE)
    assert not before.ok and "ninja would build 4 of 4" in before.how
    ticks = []
    report = build(spark, progress=ticks.append)
    assert report.result.complete and report.proof.ok and ticks[-1].done == 4
    assert "1 for sm_121" in report.proof.how
    assert kernels.check(spark, arch="12.1a", look=lambda: NONE).ok
    again = build(spark)
    assert again.result.complete and again.result.targets == {}
    # Another command line, another build: what the server would do, and what the check says.
    os.environ["FAKE_LINK"] += ""
    (report.rules.folder / "1.cuda.o").unlink()
    after = kernels.check(spark, arch="12.1a", look=lambda: NONE)
    assert not after.ok and "ninja would build 2 of 4" in after.how
    json.dumps(report.to_json(), default=str)


@needs_tools
def test_without_the_generator_a_short_lived_server_writes_the_rules(
    spark: lanes.Lane, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is a stand-in that writes the file as SGLang's would, and then would build."""
    from sparkling import server

    env = kernels.environment(spark, kernels.stage_launch(spark, "baseline"))
    rules = kernels_flashinfer.rules(spark.server_python, env)
    text = rules.ninja.read_text()
    (tmp_path / "site" / "flashinfer" / "jit" / "fused_moe.py").write_text("gen_other = 1\n")
    started = []

    def start(launch: object, **settings: object) -> object:
        # Those of an earlier try would be left alone by FlashInfer, and never counted.
        assert not rules.ninja.exists()
        started.append((launch, settings))

        class Running:
            @staticmethod
            def alive() -> bool:
                # It is asked this while the rules are waited for: they come after the start.
                if not rules.ninja.exists():
                    rules.ninja.write_text(text)
                return True

            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda self, *_: started.append("stopped")  # noqa: E731

        return Running()

    monkeypatch.setattr(server, "start", start)
    lane = dataclasses.replace(spark, root=tmp_path, model=tmp_path / "none")
    monkeypatch.setattr(kernels, "stage_launch", lambda *_: kernels_launch(spark))
    report = build(lane)
    assert report.proof.ok and report.result.complete and started[-1] == "stopped"
    launch, settings = started[0]
    assert launch.value("load-format") == "dummy" and settings["extra_env"]["MAX_JOBS"] == "1"


def kernels_launch(lane: lanes.Lane) -> object:
    from sparkling import recipe

    return recipe.load("ling-3.0-flash").render("baseline", model=lane.model)


@needs_tools
def test_a_library_for_another_gpu_is_no_proof(spark: lanes.Lane, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.write_text(FATBIN.replace("int(sys.argv[2])", "120"))
    report = build(spark)
    assert not report.proof.ok and "1 for sm_120, and sm_121 is wanted" in report.proof.how


def test_an_edition_builds_with_its_own_switches(spark: lanes.Lane, monkeypatch, capsys) -> None:
    stock = kernels.stage_launch(spark, "fp8-head").env
    fork = kernels.stage_launch(dataclasses.replace(spark, edition="fork"), "fp8-head").env
    assert stock["SPARKLING_FP8_LM_HEAD"] == fork["SGLANG_ENABLE_FP8_LM_HEAD"] == "1"
    assert "SPARKLING_FP8_LM_HEAD" not in fork and "SGLANG_ENABLE_FP8_LM_HEAD" not in stock
    for name in ("SPARKLING_EDITION", "SPARKLING_SERVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    cli.main(["kernels", "check", "--lane", "spark", "--arch", "12.1a", "--edition", "fork"])
    assert ".venv-server-spark-fork/bin/python" in capsys.readouterr().err


@needs_tools
def test_the_rehearsal_runs_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first compiler does not end by itself: it is in work whenever the gate comes to look.
    real = shutil.which("c++") or pytest.skip("no C++ compiler")
    program = tmp_path / "bin" / "c++"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$1" in --version) ;; *) mkdir "$0-once" 2>/dev/null && sleep 600 ;; esac\n'
        f'exec "{real}" "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    text = str(kernels_show.rehearse(tmp_path / "my notebooks: $1"))
    assert "4 of 4 built" in text and "ended for memory and continued once" in text


def test_a_desktop_on_the_gpu_stops_no_build(spark: lanes.Lane) -> None:
    drawing = {os.getpid(): 180 << 20}
    kernels._nobody(0, lambda: drawing, {})
    for used in (None, 600 << 20):
        with pytest.raises(SparklingError, match="holds the GPU's memory"):
            kernels._nobody(0, lambda used=used: {**drawing, os.getppid(): used}, {})


def test_nothing_is_built_while_nobody_knows_who_holds_the_gpu(spark: lanes.Lane) -> None:
    silent = lambda: "nvidia-smi did not answer within 2 s"  # noqa: E731
    with pytest.raises(SparklingError, match="did not answer within 2 s, so nobody knows whether"):
        build(spark, holders=silent)
    kernels._nobody(0, silent, {memory.I_KNOW: "1"})


def test_nothing_is_built_while_a_server_holds_the_gpu(spark: lanes.Lane, tmp_path: Path) -> None:
    from sparkling import claims, procs

    look = lambda: GB10  # noqa: E731
    with pytest.raises(SparklingError, match=rf"\(pid {os.getpid()}\) holds the GPU's memory"):
        build(spark, look=look, holders=lambda: {os.getpid(): None})
    other = subprocess.Popen(["sleep", "600"])
    try:
        with claims.table() as held:
            held.add("s", procs.identify(other.pid), "a server", GIB, device=True)
        with pytest.raises(NoMemory, match=r"a server .* has held the GPU's memory since"):
            build(spark)
    finally:
        other.kill()
        other.wait()
    assert not (tmp_path / "home" / ".cache").exists()


@needs_tools
def test_a_server_is_not_started_while_kernels_are_built(spark: lanes.Lane) -> None:
    from sparkling import claims

    seen = []

    def progress(tick: object) -> None:
        with claims.table() as held:
            seen.extend(one.what for one in held.living())

    build(spark, progress=progress)
    assert "the kernel build" in seen
    with claims.table() as held:
        assert held.living() == []


def test_flashinfers_own_lock_is_respected(spark: lanes.Lane) -> None:
    env = kernels.environment(spark, kernels.stage_launch(spark, "baseline"))
    rules = kernels_flashinfer.rules(spark.server_python, env)
    rules.lock.parent.mkdir(parents=True)
    with open(rules.lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SparklingError, match="Another process builds fused_moe_120 already"):
            with kernels_flashinfer.locked(rules):
                pass
    with kernels_flashinfer.locked(rules):
        pass


def test_what_would_fail_after_minutes_is_refused_at_once(
    spark: lanes.Lane, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = tmp_path / "cuda"
    (cuda / "include" / "cublasLt.h").unlink()
    with pytest.raises(UsageError, match=r"include lacks cublasLt\.h: install the whole toolkit"):
        build(spark)
    (cuda / "include" / "cublasLt.h").touch()
    nvcc(cuda, "12.8")
    with pytest.raises(UsageError, match=r"is CUDA 12\.8, which does not know 12\.1a"):
        build(spark)
    with pytest.raises(UsageError, match=r"for compute capability 12\.x, not 9\.0a"):
        build(spark, arch=None, look=lambda: H200)
    with pytest.raises(SparklingError, match=r"Nothing is compiled: 3\.0 GiB"):
        nvcc(cuda, "13.0")
        build(spark, gate=gate(3))
    monkeypatch.setenv("MAX_JOBS", "0")
    with pytest.raises(UsageError, match="MAX_JOBS='0'"):
        build(spark)
    monkeypatch.delenv("MAX_JOBS")
    # Case 35: a value that is a list of folders.
    monkeypatch.setenv("CUDA_HOME", f":{cuda}")
    with pytest.raises(UsageError, match="CUDA_HOME"):
        build(spark)
    with pytest.raises(UsageError, match="cpu lane compiles no kernels"):
        kernels.build(lanes.detect("cpu"))


# -- caches and GPU code -------------------------------------------------------------------------


def test_gpu_code_of_files_that_nvcc_made(data: Path, tmp_path: Path) -> None:
    # nvcc 13.0: compute_90 kept as PTX, sm_90a and sm_121a compiled, compressed.
    found = kernels_flashinfer.gpu_codes(data / "kernels" / "sm90-sm121.o")
    assert found == {"sm_90": 1, "sm_121": 1, "compute_90": 1}
    other = tmp_path / "x"
    for raw in (b"", struct.pack("<I", 0xBA55ED50), struct.pack("<I", 0xBA55ED50) + b"\xff" * 40):
        other.write_bytes(raw)
        assert kernels_flashinfer.gpu_codes(other) == {}


def test_what_a_library_exports_and_needs(tmp_path: Path) -> None:
    made = tmp_path / "made.so"

    def make(*names: str) -> kernels_elf.Library | None:
        argv = [sys.executable, "-S", "-c", FATBIN, str(made), "121", *names]
        subprocess.run(argv, check=True)
        return kernels_elf.read(made)

    assert make("one", "two") == kernels_elf.Library(frozenset({"one", "two"}), ("libcuda.so.1",))
    data = made.read_bytes()
    for cut in (0, 3, 64, 100, len(data) - 1):
        made.write_bytes(data[:cut])
        assert kernels_elf.read(made) is None
    assert kernels_elf.read(tmp_path / "none") is kernels_elf.read(tmp_path) is None
    # A real one, made by a linker.
    numpy = Path(importlib.util.find_spec("numpy").origin).parent
    path = next(numpy.rglob("_multiarray_umath*.so"))
    real = kernels_elf.read(path)
    assert real is not None and "PyInit__multiarray_umath" in real.exports
    assert any(name.startswith("libc.so") for name in real.needs)


@needs_tools
def test_a_library_without_what_the_server_calls_is_no_proof(spark: lanes.Lane) -> None:
    rules = build(spark).rules
    for names, told in (
        (("__tvm_ffi_init",), "it lacks set_deepgemm_jit_include_dirs"),
        (("init", "set_deepgemm_jit_include_dirs"), "it lacks init, set_deepgemm"),
    ):
        argv = [sys.executable, "-S", "-c", FATBIN, str(rules.library), "121", *names]
        subprocess.run(argv, check=True)
        found = kernels_flashinfer.prove(rules, spark.server_python, {}, gpu=False)
        assert not found.ok and found.how.startswith(told)
    rules.library.write_bytes(rules.library.read_bytes()[:-1])
    found = kernels_flashinfer.prove(rules, spark.server_python, {}, gpu=False)
    assert not found.ok and "cut short" in found.how


@needs_tools
@pytest.mark.parametrize(
    ("body", "here", "there", "told"),
    [
        ("return object_with(names)", True, True, "it loads, and its GPU code is 1 for sm_121"),
        ("raise OSError('libcuda.so.1: cannot open it')", True, False, "not loaded here (OSError"),
        ("raise OSError('undefined symbol: x')", False, False, "it does not load: OSError: undef"),
        ("return object()", False, False, "has no attribute 'init'"),
    ],
)
def test_a_library_is_loaded_as_the_server_does(
    spark: lanes.Lane, tmp_path: Path, body: str, here: bool, there: bool, told: str
) -> None:
    """`here`, `there`: the verdict on a machine without a GPU, and with one."""
    (tmp_path / "site" / "tvm_ffi.py").write_text(
        "import types\n"
        "names = ('init', 'set_deepgemm_jit_include_dirs')\n"
        "def object_with(names): return types.SimpleNamespace(**dict.fromkeys(names))\n"
        f"def load_module(path): {body}\n"
    )
    report = build(spark)
    assert report.proof.ok is here and told in report.proof.how
    env = kernels.environment(spark, kernels.stage_launch(spark, "baseline"))
    found = kernels_flashinfer.prove(report.rules, spark.server_python, env, gpu=True)
    assert found.ok is there


def test_a_cache_is_found_in_every_place_it_has_lived(
    spark: lanes.Lane, home: Path, tmp_path: Path
) -> None:
    env = kernels.environment(spark, kernels.stage_launch(spark, "baseline"))
    rules = kernels_flashinfer.rules(spark.server_python, env)
    places = {
        rules.library: "ninja has nothing left to do",
        home / ".cache/flashinfer/0.7.2/121a/cached_ops/fused_moe_120/fused_moe_120.so": "the server looks in",
        home / ".cache/flashinfer/0.6.17/121a/cached_ops/fused_moe_120/fused_moe_120.so": "of FlashInfer 0.6.17",
        home / ".cache/flashinfer/0.7.2/120f/cached_ops/fused_moe_120/fused_moe_120.so": "for 120f, not 121a",
        home / ".cache/flashinfer/121a/cached_ops/fused_moe_120/fused_moe_120.so": "before versions",
    }  # fmt: skip
    for path in places:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    roots = kernels_flashinfer.roots(env)
    found = {one.path: one for one in kernels_flashinfer.built(roots, rules, 0)}
    assert set(found) == set(places)
    for path, why in places.items():
        assert why in found[path].why and found[path].fits is (path == rules.library)
    (one,) = [b for b in kernels_flashinfer.built(roots, rules, 3) if b.path == rules.library]
    assert one.fits is False and "3 of 4 targets again" in one.why
    assert {b.fits for b in kernels_flashinfer.built(roots)} == {None}


def humming_entry(
    cache: Path,
    name: str,
    headers: dict[str, float],
    *,
    done: bool = True,
    shape: tuple[int, int] = (1536, 2560),
) -> None:
    folder = cache / name
    folder.mkdir(parents=True)
    # As humming/kernel/humming.py of 0.1.12 writes it.
    expression = (
        f"humming<\n    MmaOpClass,\n    Shape<0, {shape[0]}, {shape[1]}>,\n"
        "    Shape<16, 128, 64>,\n    Shape<16, 32, 64>,\n    Shape<0, 0, 0>,\n"
        "    FloatingPointType<16, 8, 7>,\n    FloatingPointType<4, 2, 1>,\n"
        "    FloatingPointType<16, 8, 7>,\n    FloatingPointType<8, 8, 0>,\n"
        "    LayerConfig,\n    ComputeConfig,\n    TuningConfig>"
    )
    flags = ["--gpu-architecture=sm_121a", "-std=c++17"]
    text = f"NVRTCCompiler$$nvrtc+13.0$${flags}$${expression}$$code$$x$${json.dumps(headers)}"
    (folder / "signature.txt").write_text(text)
    if done:
        (folder / "kernel.cubin").write_bytes(b"x" * 2000)


def test_hummings_cache_names_what_is_stale(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    header = site / "humming" / "include" / "humming" / "a.cuh"
    header.parent.mkdir(parents=True)
    header.touch()
    (site / "humming_kernels-0.1.12.dist-info").mkdir()
    now = {str(header): header.stat().st_mtime}
    cache = tmp_path / "cache"
    humming_entry(cache, "0" * 16, now)
    humming_entry(cache, "1" * 16, {str(header): 1.0})
    humming_entry(cache, "2" * 16, {"/gone/humming/include/humming/a.cuh": 1.0})
    humming_entry(cache, "3" * 16, now, done=False)
    humming_entry(cache, "4" * 16, {})
    (cache / "nvrtc_compile").mkdir()
    (cache / ("5" * 16)).mkdir()
    entries = kernels_humming.inventory(cache)
    assert [one.folder.name[0] for one in entries if one.current] == ["0"]
    best = entries[0]
    assert (best.arch, best.shape, best.compiler) == ("sm_121a", (1536, 2560), "nvrtc 13.0")
    assert best.types == ("bfloat16", "float4e2m1", "bfloat16", "float8e8m0")
    assert kernels_humming._type("Integer", "false, 4") == "uint4"
    assert kernels_humming._type("Integer", "true, 8") == "int8"
    assert (best.version, best.bytes) == ("0.1.12", 2000)
    why = {one.folder.name[0]: one.why for one in kernels_humming.stale(entries)}
    assert "older than the installation" in why["1"] and "is gone (/gone)" in why["2"]
    assert "not finished" in why["3"] and "does not tell" in why["4"]
    assert len(kernels_humming.rows(entries)) == 5
    assert kernels_humming.inventory(tmp_path / "none") == []


def test_only_kernels_of_the_models_own_shapes_count_as_built(
    spark: lanes.Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "a.cuh"
    header.touch()
    now = {str(header): header.stat().st_mtime}
    cache = tmp_path / "cache"
    of = kernels.stage_launch(spark, "humming")
    of = dataclasses.replace(of, env={**of.env, "HUMMING_CACHE_DIR": str(cache)})
    wanted = kernels_plan._shapes(of)
    assert wanted == {(1536, 2560): "gate and up", (2560, 768): "down"}

    def item() -> kernels.Item:
        return kernels_plan._humming("humming", kernels_humming.inventory(cache), "12.1", wanted)

    # Another model's, as an H200's cache had them after Sparklet: the plan called that built.
    humming_entry(cache, "1" * 16, now, shape=(256, 256))
    humming_entry(cache, "2" * 16, now, shape=(256, 128))
    assert item().state == "not built" and "2 for other models" in item().detail
    humming_entry(cache, "3" * 16, now)
    assert item().state == "not built" and "0 for 2560 × 768 (down)" in item().detail
    humming_entry(cache, "4" * 16, now, shape=(2560, 768))
    assert item().state == "built" and item().remedy == ""
    found = kernels_plan._humming("humming", kernels_humming.inventory(cache), "9.0", wanted)
    assert found.state == "not built"


def test_a_tilde_that_humming_does_not_expand_is_refused() -> None:
    assert kernels_humming.cache_folder({"HOME": "/h"}) == Path("/h/.humming/cache")
    assert kernels_humming.cache_folder({"HUMMING_CACHE_DIR": "/c"}) == Path("/c")
    with pytest.raises(UsageError, match="does not expand"):
        kernels_humming.cache_folder({"HUMMING_CACHE_DIR": "~/c"})


# -- the probe -----------------------------------------------------------------------------------


def test_the_probe_has_few_layers_of_every_kind_and_the_same_shapes() -> None:
    from sparkling import architecture, inventory

    full = {
        **inventory.flash_config(),
        "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
        "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
    }
    small = kernels_probe.shrink(full)
    before, after = architecture.shape(full), architecture.shape(small)
    assert after.layers == 6 and after.moe_layers >= 1 and after.kda_layers >= 1 and after.mla
    for name in (
        "hidden",
        "experts",
        "expert_width",
        "heads",
        "head_dim",
        "kv_lora",
        "nextn",
        "top_k",
    ):
        assert getattr(before, name) == getattr(after, name)
    assert len(small["expert_swiglu_limit_list"]) == 6 and 4 in small["expert_swiglu_limit_list"]
    # Weights of a seventh: it fits beside what 66 GB would not.
    assert inventory.inventory(small).bytes_total < 10 * GIB


def test_the_probe_is_the_stages_own_command_with_another_model(tmp_path: Path) -> None:
    from sparkling import recipe

    of = recipe.load("ling-3.0-flash").render("nextn", model="/full")
    probe = kernels_probe.launch(of, tmp_path)
    changes = {change.name: change.after for change in recipe.diff(of, probe)}
    assert changes == {
        "--model-path": str(tmp_path),
        "--speculative-draft-model-path": str(tmp_path),
        "--context-length": "16384",
        "--max-total-tokens": "16384",
        "--reasoning-parser": None,
        "--tool-call-parser": None,
        "--load-format": "dummy",
        "--skip-tokenizer-init": "",
    }
    assert probe.env == of.env


def test_rules_count_once_they_are_whole_and_new(tmp_path: Path) -> None:
    old = tmp_path / "a" / "fused_moe_120" / "build.ninja"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    os.utime(old, (1, 1))
    fresh = tmp_path / "b" / "fused_moe_120" / "build.ninja"
    fresh.parent.mkdir(parents=True)
    # What is there at each look: nothing yet, then a file that grows, with pauses.
    sizes = iter((0, 0, 1000, 1000, 1000, 2000, 4000, 4000))

    def alive() -> bool:
        if size := next(sizes, 6000):
            fresh.write_text("x" * size)
        return True

    found = kernels_probe.wait_for_rules(
        [tmp_path], "fused_moe_120", alive, limit_s=60, poll_s=0.01
    )
    assert found == fresh and fresh.stat().st_size == 6000
    with pytest.raises(SparklingError, match="wrote no build rules"):
        kernels_probe.wait_for_rules([tmp_path / "c"], "x", lambda: False)


def test_a_warm_up_says_how_many_kernels_it_compiled(
    spark: lanes.Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparkling import server

    header = tmp_path / "site" / "humming" / "include" / "humming" / "a.cuh"
    header.parent.mkdir(parents=True)
    header.touch()
    now = {str(header): header.stat().st_mtime}
    new = iter(["1" * 16, "2" * 16, None, None, None])

    class Probe:
        ready_seconds = 3.0

        def __enter__(self) -> Probe:
            for name in (next(new), *([next(new)] if not (tmp_path / "cache").exists() else [])):
                if name:
                    humming_entry(tmp_path / "cache", name, now)
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(server, "start", lambda *_, **__: Probe())
    of = kernels.stage_launch(spark, "humming")
    of = dataclasses.replace(of, env={**of.env, "HUMMING_CACHE_DIR": str(tmp_path / "cache")})
    first = kernels_probe.warm(of, spark, tmp_path / "probe")
    assert first.compiled == (2, 0) and first.to_json()["saved_s"] == 0
    assert "2 of Humming's kernels were compiled at the first and 0 at the next" in str(first)
    again = kernels_probe.warm(of, spark, tmp_path / "probe")
    assert again.compiled == (0, 0) and "in its cache already" in str(again)
    other = kernels_probe.Warm("baseline", 2.0, 1.0)
    assert str(other).endswith("dummy weights)") and other.to_json()["saved_s"] == 1.0


# -- the plan, the data, the command -------------------------------------------------------------


@needs_tools
def test_the_plan_says_what_applies_on_each_lane(spark: lanes.Lane, tmp_path: Path) -> None:
    plan = kernels.plan(spark, look=lambda: GB10)
    states = {item.stage: (item.state, item.remedy) for item in plan.items}
    assert states == {
        "baseline": ("not built", "sparkling kernels build"),
        "humming": ("not built", "sparkling kernels warm humming"),
    }
    assert not plan.ready and plan.problems == () and "4 to build" in plan.items[0].detail
    build(spark)
    plan = kernels.plan(spark, look=lambda: GB10)
    assert plan.items[0].state == "built" and [one.fits for one in plan.found] == [True]
    assert "fused_moe_120" in str(plan) and json.dumps(plan.to_json(), default=str)
    other = kernels.plan(dataclasses.replace(spark, kind="gpu"), look=lambda: H200)
    assert other.items[0].state == "not here" and "capability 9.0" in other.items[0].detail
    cpu = kernels.plan(lanes.detect("cpu"), look=lambda: NONE)
    assert cpu.ready and {item.state for item in cpu.items} == {"not here"}


def test_the_recorded_starts_begin_with_those_that_compiled() -> None:
    from sparkling import fullsize

    text = " ".join(str(kernels_show.recorded_starts()).split())
    arms = [a for a in fullsize.recorded().arms.values() if a.facts["start"]]
    starts = sorted((a.facts["date"], a.name, a.facts["start"]["load_to_ready_s"]) for a in arms)
    first = {"humming-bf16-plain", "marlin-bf16-plain"}
    assert {name for _, name, _ in starts[:2]} == first
    assert text.count("none yet") == 2 and text.count("compiled before") == len(starts) - 2
    assert all(
        f"{name} {gpu} none yet" in text for name, gpu in zip(sorted(first), "01", strict=True)
    )
    assert "n=1 each" in text and all(f"{seconds:.2f}" in text for *_, seconds in starts)
    assert min(s for *_, s in starts[:2]) > 2 * max(s for *_, s in starts[2:])
    # What the table calls compiled before had nothing left to compile.
    made = {a.name: a.facts["humming"]["compiled"] for a in arms if a.facts.get("humming")}
    assert made.pop("humming-bf16-plain") > 0 and set(made.values()) == {0}


def test_the_measured_targets_are_those_of_the_generator_and_honest_about_their_number() -> None:
    data = measured.facts()
    assert len(data["targets"]) == kernels_flashinfer.TARGETS - 1  # all but the library
    names = {row["target"] for row in data["rows"]}
    assert names <= set(data["targets"]) and len(names) == len(data["rows"])
    assert data["measured"] == len(data["rows"]) and data["of"] == len(data["targets"])
    # Linked of all of them, and holding GPU code for a Spark alone.
    made = data["library"]
    assert names == set(data["targets"]) and set(made["gpu_codes"]) == {"sm_121"}
    wanted = {kernels_flashinfer.PREFIX + name for name in kernels_flashinfer.FUNCTIONS}
    assert wanted <= set(made["exports"])
    found = measured.families()
    assert sum(one.targets for one in found) == len(data["targets"])
    assert sum(one.measured for one in found) == len(data["rows"]) > 0
    for row in data["rows"]:
        assert row["cpu_s"] > 0 and row["peak_tree_bytes"] >= row["largest_process_bytes"] * 0.9
    for one in found:
        if one.measured:
            assert one.least_s <= one.mean_s <= one.most_s
    # Another record of the same targets, on another machine, in a table of its own.
    other = measured.together()
    seen = {row["target"] for row in other["rows"]}
    assert seen <= set(data["targets"]) and len(seen) == other["measured"] <= other["asked"]
    apart = measured.families(measured=other["rows"])
    assert sum(one.measured for one in apart) == len(seen)
    assert sum(one.measured for one in measured.families()) == len(data["rows"])
    text = " ".join(str(kernels_show.measured()).split())
    assert f"{data['measured']} of {data['of']} targets" in text and "Not a Spark" in text
    assert f"{other['measured']} of {other['asked']} targets that were asked for" in text
    assert measured.together({}) is None
    two = [
        dataclasses.replace(f, targets=n, mean_peak=p)
        for f, n, p in zip(found, (2, 9), (5, 3), strict=False)
    ]
    assert [measured.at_once(jobs, two) for jobs in (1, 2, 4, 99)] == [5, 10, 16, 37]
    assert measured.total_s([dataclasses.replace(found[0], mean_s=None)]) is None
    assert measured.total_s([dataclasses.replace(found[0], targets=3, mean_s=2.0)]) == 6.0


def run(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_on_a_machine_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "kernels", "plan", "--lane", "cpu", "--json")
    assert code == 0 and json.loads(out)["ready"] is True
    code, out, _ = run(capsys, "kernels", "plan", "--lane", "cpu")
    assert code == 0 and "compilers at once" in out
    for what in ("build", "check"):
        code, out, err = run(capsys, "kernels", what, "--lane", "cpu")
        assert (code, out) == (2, "") and err.startswith("error: The cpu lane compiles no kernels")
    code, out, err = run(capsys, "kernels", "warm", "humming", "--lane", "cpu")
    assert (code, out) == (2, "") and "Stage 'humming' cannot run on the cpu lane" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "nextn"), "looks at every stage of the lane; leave 'nextn' out"),
        (("plan", "--arch", "banana"), "--arch 'banana' is not written as FlashInfer wants it"),
        (("build", "--arch", "sm_121a", "--lane", "spark"), "--arch 'sm_121a' is not written"),
        (("check", "--arch", "12.1", "--lane", "spark"), "--arch '12.1' is not written"),
        (("build", "humming", "--lane", "spark"), "runs its experts with humming, not with"),
        (("check", "nextn", "--lane", "spark"), "runs its experts with humming, not with"),
        (("build", "nope", "--lane", "spark"), "has no stage 'nope'"),
        (("warm", "--arch", "12.1a", "--lane", "spark"), "leave --arch out"),
        (("warm", "--lane", "cpu"), "The cpu lane compiles no kernels"),
    ],
)
def test_what_would_be_ignored_or_useless_is_refused(
    capsys: pytest.CaptureFixture, words: tuple[str, ...], told: str
) -> None:
    code, out, err = run(capsys, "kernels", *words)
    assert (code, out) == (2, "") and told in err and len(err.splitlines()) == 1


@needs_tools
def test_the_command_builds_and_checks(
    spark: lanes.Lane, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", sys.executable)
    monkeypatch.setattr(gpus, "look", lambda: NONE)
    monkeypatch.setattr(kernels, "Gate", lambda *_: gate())
    words = ("--lane", "spark", "--arch", "12.1a")
    code, out, _ = run(capsys, "kernels", "check", *words)
    assert code == 1 and out.startswith("not ok") and "would build 4 of 4" in out
    code, out, err = run(capsys, "kernels", "build", *words)
    if code:  # the default gate sees this machine's own memory
        assert "Nothing is compiled" in err
    else:
        assert "4 of 4 targets are built" in out and "4/4 building" in err
