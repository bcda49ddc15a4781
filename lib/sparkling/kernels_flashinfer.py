"""FlashInfer's CUTLASS MXFP4 experts: where the compiled ones are, and how to build them unloaded.

The server builds them at its first start, while CUDA graphs are captured and the model is resident.
FlashInfer's own generator writes the same build rules in seconds without a model, a server or a GPU;
ninja then builds them, and the server's ninja finds that nothing is left to do. That holds only if
folder, command lines and ninja's log are the server's to the letter, so the rules are written by the
server's Python, in the server's environment, after `import sglang`: SGLang 0.5.23 moves FlashInfer's
cache to its own (`sglang/srt/environ.py`, redirect_third_party_caches), and kernels built in
`~/.cache/flashinfer` would be compiled again beside the loaded model. Checked with SGLang 0.5.23 and
FlashInfer 0.7.2 on a machine without a GPU: written twice, the rules are the same to the byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import kernels_elf, kernels_ninja
from sparkling.errors import SparklingError, UsageError
from sparkling.kernels_elf import gpu_codes

MODULE = "fused_moe_120"
"""What SGLang's flashinfer_mxfp4 backend loads on compute capability 12.x (FlashInfer's
`get_cutlass_fused_moe_module`, backend "120" or "121")."""
GENERATOR = "gen_cutlass_fused_moe_sm120_module"
ARCH_LIST = "FLASHINFER_CUDA_ARCH_LIST"
SPARK_ARCH = "12.1a"
"""What SGLang sets on a GB10 (`set_cuda_arch`): the capability with an a."""
FUNCTIONS = ("init", "set_deepgemm_jit_include_dirs")
"""What FlashInfer calls of the library (`get_cutlass_fused_moe_module` in fused_moe/core.py of 0.7.2);
TVM's FFI exports a function under PREFIX and its name."""
PREFIX = "__tvm_ffi_"
TARGETS = 97
"""Build targets of FlashInfer 0.7.2, the library itself among them (counted here)."""

HEADERS = ("cuda_runtime.h", "cublasLt.h", "curand_kernel.h", "nvrtc.h")
LIBRARIES = ("cudart", "cuda", "nvrtc")
"""What the sources include and the library is linked with (read from FlashInfer 0.7.2); a toolkit
without them fails at the first file, or after the last."""

_MARK = "sparkling-flashinfer:"
_ASK = f"""
import json, os, sys
out = {{"python": sys.version.split()[0]}}
try:
    import sglang  # only for what it does to the environment
except Exception as error:
    out["sglang_error"] = f"{{type(error).__name__}}: {{error}}"
try:
    from importlib.metadata import version
    out["sglang"] = version("sglang")
except Exception:
    out["sglang"] = None
try:
    import flashinfer
    from flashinfer.jit import env, fused_moe
    out["version"] = flashinfer.__version__
    make = getattr(fused_moe, {GENERATOR!r}, None)
    if make is not None:
        spec = make()
        spec.write_ninja()
        out["name"] = spec.name
        out["ninja"] = str(spec.ninja_path)
        out["folder"] = str(spec.build_dir)
        out["library"] = str(spec.jit_library_path)
        out["lock"] = str(spec.lock_path)
        out["ready_made"] = [str(one.path) for one in getattr(spec, "aot_artifacts", ())]
except Exception as error:
    out["error"] = f"{{type(error).__name__}}: {{error}}"
out["base"] = os.environ.get("FLASHINFER_WORKSPACE_BASE")
print("\\n{_MARK}" + json.dumps(out))
"""
ASK_S = 300.0  # a first import on a slow disk


@dataclass(frozen=True)
class Rules:
    """The build rules as the server will write them. Paths are absolute."""

    version: str  # FlashInfer's
    sglang: str | None
    name: str
    ninja: Path
    folder: Path
    library: Path
    lock: Path
    ready_made: tuple[Path, ...] = ()  # from a wheel with compiled kernels: nothing to build then
    sglang_error: str = ""  # why SGLang could not be imported before FlashInfer was

    @property
    def targets(self) -> int:
        return len(kernels_ninja.outputs(self.ninja))

    def flags(self) -> list[str]:
        """The GPU architectures that nvcc compiles for."""
        found = re.findall(r"-gencode=\S+", self.ninja.read_text())
        return sorted(set(found))

    def variable(self, name: str) -> str:
        """A variable of the build file, "" when it is not there."""
        found = re.search(rf"^{name} = *(.*)$", self.ninja.read_text(), re.M)
        return found[1].strip() if found else ""

    def problems(self, arch: str = SPARK_ARCH) -> list[str]:
        """What is not as the server will look for it; [] when all is."""
        short = arch.replace(".", "")
        found = []
        if self.name != MODULE:
            found.append(f"the module is called {self.name}, and SGLang loads {MODULE}")
        tail = (self.version, short, "cached_ops", self.name)
        if self.folder.parts[-4:] != tail:
            found.append(f"the folder {self.folder} does not end in {'/'.join(tail)}")
        if self.library != self.folder / f"{self.name}.so":
            found.append(f"the library would be {self.library}, not in the build's folder")
        wanted = f"-gencode=arch=compute_{short},code=sm_{short}"
        if self.flags() != [wanted]:
            found.append(f"nvcc would be given {' '.join(self.flags()) or 'no GPU'}, not {wanted}")
        named = kernels_ninja.outputs(self.ninja)
        if str(self.library) not in named:
            found.append(f"the rules do not build {self.library}")
        if self.sglang is None:
            found.append("SGLang is not in that environment, so its cache may be another one")
        elif self.sglang_error:
            found.append(f"SGLang does not import there ({self.sglang_error})")
        return found


class NoGenerator(SparklingError):
    """This FlashInfer cannot write the rules by itself: a short-lived server has to."""


def rules(
    python: Path, env: Mapping[str, str], *, arch: str | None = SPARK_ARCH, timeout_s: float = ASK_S
) -> Rules:
    """Have FlashInfer write its build rules, in a child process of the server's Python.

    Args:
        python: the server environment's interpreter.
        env: the server's environment (`server.child_environment` of its launch).
        arch: what to compile for; None where a GPU is there and SGLang will ask it.

    Raises:
        NoGenerator: FlashInfer is too old to have the generator.
        SparklingError: FlashInfer is missing, or does not import.
    """
    env = {**env, **({ARCH_LIST: arch} if arch else {})}
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SparklingError(
            f"FlashInfer was not imported within {timeout_s:.0f} s by {python}; try again."
        ) from None
    except OSError as error:
        raise UsageError(
            f"The server environment's Python {python} cannot be run ({error.strerror}); run "
            "`sparkling setup`, or set SPARKLING_SERVER_PYTHON."
        ) from error
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise SparklingError(f"FlashInfer could not be asked by {python}: {last[:300]}.")
    return _rules(json.loads(answers[-1].removeprefix(_MARK)), python)


def _rules(told: Mapping[str, Any], python: Path) -> Rules:
    error = told.get("error")
    if error and "No module named" in error:
        raise SparklingError(
            f"FlashInfer is not whole in the server environment of {python} ({error}); the CUTLASS "
            "experts need the GPU's: make it with `sparkling setup --lane spark` and add `--lane spark` "
            "to the command."
        )
    if error:
        raise SparklingError(f"FlashInfer does not write its build rules: {error}.")
    if "name" not in told:
        raise NoGenerator(
            f"FlashInfer {told.get('version')} has no {GENERATOR}; a short-lived server has to write "
            "the rules (`sparkling kernels build` does it)."
        )
    return Rules(
        version=told["version"],
        sglang=told.get("sglang"),
        name=told["name"],
        ninja=Path(told["ninja"]),
        folder=Path(told["folder"]),
        library=Path(told["library"]),
        lock=Path(told["lock"]),
        ready_made=tuple(map(Path, told.get("ready_made", ()))),
        sglang_error=told.get("sglang_error", ""),
    )


def toolkit_problems(home: Path, library_folders: tuple[Path, ...] = ()) -> list[str]:
    """What a CUDA toolkit lacks that the build needs: found in a moment, not after minutes."""
    found = []
    missing = [name for name in HEADERS if not (home / "include" / name).is_file()]
    if missing:
        found.append(
            f"{home}/include lacks {', '.join(missing)}: install the whole toolkit "
            "(cuda-toolkit-13-0), not only its compiler"
        )
    places = (home / "lib64", home / "lib64" / "stubs", *library_folders)
    # The linker asks for lib<name>.so; a driver's own libcuda counts as well.
    lost = [
        name for name in LIBRARIES if not any((one / f"lib{name}.so").exists() for one in places)
    ]
    if lost:
        names = ", ".join(f"lib{name}.so" for name in lost)
        found.append(
            f"the linker would not find {names} in {home}/lib64: install the whole toolkit"
        )
    return found


SYSTEM_LIBRARIES = tuple(
    Path(one)
    for one in ("/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
)


# -- caches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A compiled library that was found, and whether the server would take it."""

    path: Path
    version: str  # "" in the oldest layout, which had none
    arch: str
    bytes: int
    fits: bool | None  # None: cannot be told without FlashInfer's rules
    why: str


def roots(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Every folder that has been FlashInfer's cache: its own default, SGLang's (0.5.23), and what
    the environment names."""
    home = Path(env.get("HOME") or Path.home())
    bases = [env.get("FLASHINFER_WORKSPACE_BASE"), env.get("SGLANG_CACHE_DIR")]
    bases += [str(home / ".cache" / "sglang"), str(home)]
    found = [Path(base).expanduser() / ".cache" / "flashinfer" for base in bases if base]
    return list(dict.fromkeys(found))


def built(
    where: list[Path], wanted: Rules | None = None, pending: int | None = None
) -> list[Built]:
    """Every compiled CUTLASS experts' library below these caches, newest layout first.

    Layouts so far: VERSION/ARCH/cached_ops/NAME/NAME.so, and without VERSION in the oldest.

    Args:
        wanted: the rules that the server will write.
        pending: how many of their targets ninja would still build (`kernels_ninja.pending`).
    """
    found = []
    for root in where:
        for pattern in ("*/*/cached_ops", "*/cached_ops"):
            for path in sorted(root.glob(f"{pattern}/fused_moe_1*/*.so")):
                parts = path.relative_to(root).parts
                version, arch = ("", *parts)[-5:-3] if len(parts) == 4 else parts[:2]
                fits, why = _fits(path, version, arch, wanted, pending)
                found.append(Built(path, version, arch, path.stat().st_size, fits, why))
    return found


def _fits(
    path: Path, version: str, arch: str, wanted: Rules | None, pending: int | None
) -> tuple[bool | None, str]:
    if wanted is None:
        return None, "FlashInfer's own rules are not known here"
    if wanted.library == path:
        if pending is None:
            return None, "ninja was not asked"
        if pending == 0:
            return True, "ninja has nothing left to do"
        return False, f"ninja would build {pending} of {wanted.targets} targets again"
    if version != wanted.version:
        return (
            False,
            f"of FlashInfer {version or 'before versions stood there'}, not {wanted.version}",
        )
    if arch != wanted.folder.parts[-3]:
        return False, f"for {arch}, not {wanted.folder.parts[-3]}"
    return False, f"the server looks in {wanted.folder}"


def compiled_somewhere(python: Path, env: Mapping[str, str], arch: str = SPARK_ARCH) -> bool:
    """Whether a compiled library for this GPU lies in any cache, or came with a package: a look at
    file names only, for a server that is about to start. `check` in `kernels` is the real answer."""
    short = arch.replace(".", "")
    for site in python.parent.parent.glob("lib/python3*/site-packages"):
        if any(site.glob("flashinfer_jit_cache*")):
            return True
    return any(one.arch == short and one.path.stem == MODULE for one in built(roots(env)))


@contextlib.contextmanager
def locked(rules: Rules) -> Iterator[None]:
    """FlashInfer's own lock (a flock on this file), so that no server builds at the same time.

    Raises:
        SparklingError: somebody builds these kernels already.
    """
    rules.lock.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(rules.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SparklingError(
                f"Another process builds {rules.name} already ({rules.lock} is locked); wait for it, "
                "or stop the server that does it."
            ) from None
        yield
    finally:
        os.close(handle)


# -- the proof -----------------------------------------------------------------------------------

_LOAD = """
import sys
try:
    import torch  # as the server does: it brings libcudart where no system library is
except Exception:
    pass
import tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
for name in sys.argv[2:]:
    getattr(module, name)
print("loaded", type(module).__name__)
"""


WITHOUT_GPU = ("libcuda.so", "libcudart.so", "libnvrtc.so", "No module named 'tvm_ffi'")
"""What loading says that fails for want of a driver or of a GPU's environment, not of the library."""


@dataclass(frozen=True)
class Proof:
    """Whether a built library is what the server will load, and how that was found out."""

    path: Path
    ok: bool
    how: str


def prove(rules: Rules, python: Path, env: Mapping[str, str], *, gpu: bool) -> Proof:
    """Look at the library's GPU code and exports, and load it as FlashInfer does. Linked on Linux
    with what the toolkit has, it needs no driver to load; where it does, or where TVM's FFI is
    missing, a machine without a GPU (`gpu` false) is no reason against it.
    """
    path = rules.library
    if not path.is_file():
        return Proof(path, False, "it is not there")
    short = rules.folder.parts[-3]
    codes = gpu_codes(path)
    wanted = f"sm_{re.sub('[^0-9]', '', short)}"
    shown = ", ".join(f"{count} for {name}" for name, count in sorted(codes.items())) or "none"
    if set(codes) != {wanted}:
        return Proof(path, False, f"its GPU code is {shown}, and {wanted} is wanted")
    inside = kernels_elf.read(path)
    lost = [name for name in FUNCTIONS if inside is None or PREFIX + name not in inside.exports]
    if lost:
        why = "it is cut short, or no library" if inside is None else f"it lacks {', '.join(lost)}"
        return Proof(path, False, f"{why}, so FlashInfer cannot call it")
    done = subprocess.run(
        [str(python), "-c", _LOAD, str(path), *FUNCTIONS],
        env=dict(env),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ASK_S,
        check=False,
    )
    if done.returncode == 0:
        here = "" if gpu else "; no GPU is here to run it"
        return Proof(path, True, f"it loads, and its GPU code is {shown}{here}")
    last = (done.stderr.strip() or "no word").splitlines()[-1][:300]
    if not gpu and any(word in last for word in WITHOUT_GPU):
        how = f"its GPU code is {shown}, and it exports what FlashInfer calls"
        return Proof(path, True, f"{how}; it was not loaded here ({last})")
    return Proof(path, False, f"it does not load: {last}")
