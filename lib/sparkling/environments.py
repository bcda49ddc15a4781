"""The server's own virtual environment: built from an edition's pins, verified, and written down.

    build(root, edition)            make it, or go on where a stopped build was; about as long as the
                                    downloads take. uv installs where there is one, else pip
    state(root, edition, python)    whether it is there, whole, and made of today's pins
    installed(python)               what is really in it, read from its own metadata, for manifests

`<environment>/sparkling-lock.json` is written last, after every import that the server makes at start
has worked and `pip check` has found no conflict: an environment without it is unfinished. A build of
the fork compiles; its jobs are bounded by memory (see `kernels_jobs`) and Rust is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import commands
from sparkling import environments_run as _run
from sparkling.errors import SparklingError, UsageError
from sparkling.files import write_atomic
from sparkling.recipe import Edition

if TYPE_CHECKING:
    from sparkling.store import Run

LOCK = "sparkling-lock.json"
SCHEMA = 1
PYTHON = "3.12"  # what the pins were resolved for
PLUGIN = "lib/sparkling_sglang"

IMPORTS = (
    "torch",
    "transformers",
    "flashinfer",
    "humming",
    "sgl_kernel",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.bailing_moe_v3",
    "sglang.srt.models.bailing_moe_nextn",
)
"""What a server of this model imports before it looks at a GPU, and what its stages add."""

DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1", "No CUDA", "NVIDIA driver")
"""What an import says that fails for want of a driver, not of a package."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class State:
    """Whether an environment is whole and of today's pins, and that in words."""

    current: bool
    told: str


@dataclass(frozen=True)
class Built:
    """A finished build: where, what, and the imports that could not be judged here."""

    folder: Path
    lock: dict[str, Any]
    unjudged: tuple[str, ...] = ()
    fresh: bool = True  # False: it was up to date already

    def __str__(self) -> str:
        packages = len(self.lock["packages"])
        head = f"{self.folder} is {'built' if self.fresh else 'up to date'}: {packages} packages"
        commit = self.lock.get("commits", {}).get("sglang")
        head += f", SGLang at {commit}" if commit else ""
        tail = f"; without a driver {', '.join(self.unjudged)} could not be imported here"
        return head + (tail if self.unjudged else "") + "."


def folder_of(root: Path, edition: Edition) -> Path:
    """The environment's folder."""
    return root / edition.environment


def pins(root: Path, edition: Edition) -> Path:
    """The edition's requirements file. Raises UsageError when it has none."""
    if edition.requirements is None:
        raise UsageError(
            "This lane's server environment is .venv-server, which ./scripts/setup.sh makes; "
            "`sparkling setup` builds those of the lanes spark and gpu."
        )
    return root / edition.requirements


def made_of(root: Path, edition: Edition) -> str:
    """A digest of everything the environment is made of: pins, plugin, and which edition."""
    digest = hashlib.sha256(f"{edition.name} {SCHEMA}\n".encode())
    files = [pins(root, edition)]
    if edition.build is None:
        files += sorted((root / PLUGIN).rglob("*.toml"))
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def installed(python: Path) -> dict[str, Any]:
    """What is in the environment of `python`, without running it.

    Returns {"python": "3.12", "packages": {name: version}, "commits": {name: commit}}; empty
    mappings where there is nothing. `commits` holds what was installed from a repository.
    """
    packages, commits = {}, {}
    for site in sorted((python.parent.parent / "lib").glob("python3.*/site-packages")):
        for one in importlib.metadata.distributions(path=[str(site)]):
            name = (one.metadata["Name"] or "").lower().replace("_", "-")
            if not name:
                continue
            packages[name] = one.version
            with contextlib.suppress(ValueError):
                origin = json.loads(one.read_text("direct_url.json") or "{}")
                commit = origin.get("vcs_info", {}).get("commit_id")
                if commit:
                    commits[name] = commit
    found = sorted((python.parent.parent / "lib").glob("python3.*"))
    version = found[0].name.removeprefix("python") if found else None
    return {"python": version, "packages": dict(sorted(packages.items())), "commits": commits}


def note(run: Run, python: Path, *, again: bool = False) -> None:
    """Write what is installed into a run's manifest, once (`again`: anew, after a build)."""
    if again or not run.manifest.get("server_environment"):
        found = installed(python)
        run.update(server_environment=found if found["packages"] else None)


def read_lock(folder: Path) -> dict[str, Any] | None:
    """The lock of a finished build, None when there is none that can be read."""
    try:
        lock = json.loads((folder / LOCK).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return lock if isinstance(lock, dict) and lock.get("schema") == SCHEMA else None


def state(root: Path, edition: Edition, python: Path) -> State:
    """Whether the environment that `python` runs in is whole and made of today's pins."""
    folder = folder_of(root, edition)
    if python.parent.parent != folder:
        return State(True, f"an environment of your own, {python.parent.parent}; nothing checked")
    if not python.exists():
        return State(False, f"there is no {folder}")
    lock = read_lock(folder)
    if lock is None:
        return State(False, "begun and not finished, or not verified")
    if lock["made_of"] != made_of(root, edition):
        return State(False, f"of other pins than {edition.requirements} has now")
    if installed(python)["packages"] != lock["packages"]:
        return State(False, "changed since it was verified")
    head = (
        f"{len(lock['packages'])} packages with {lock['installer']}, verified {lock['made'][:10]}"
    )
    commit = lock.get("commits", {}).get("sglang")
    return State(True, head + (f", SGLang at {commit[:12]}" if commit else ""))


def verify(python: Path, modules: tuple[str, ...]) -> dict[str, str | None]:
    """Import each module with `python`: None where that works, else the last thing it said.

    All of them in one process, as the server has them; each takes seconds, and most of that is what
    they share. Where that fails, each in a process of its own, which tells the one from the other.
    """

    def failure(code: str) -> str | None:
        answer = commands.ask((str(python), "-c", code), 120.0, stderr=True)
        if isinstance(answer, str):
            return answer
        lines = answer[1].strip().splitlines() or ["no message"]
        return None if answer[0] == 0 else lines[-1]

    together = failure(f"import {', '.join(modules)}") if modules else None
    if together is None:
        return dict.fromkeys(modules)
    found = {module: failure(f"import {module}") for module in modules}
    if not any(found.values()):
        found[modules[-1]] = together
    return found


# -- building ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """One build of an environment at a time; a second one waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress("Another build of this environment is running; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(
    root: Path,
    edition: Edition,
    *,
    python: str | None = None,
    installer: str = "auto",
    env: Mapping[str, str] = os.environ,
    progress: Progress = print,
    imports: tuple[str, ...] = IMPORTS,
) -> Built:
    """Build the edition's environment, or finish a stopped build; nothing is done twice.

    Args:
        python: the interpreter to make it with, a Python 3.12 (default: the one on PATH, else what
            uv finds).
        installer: "uv", "pip", or "auto" for uv where there is one.
        progress: called with a line now and then.
        imports: what must be importable in the end.

    Raises:
        UsageError: no such Python or installer, a Python of another version, or no pins.
        SparklingError: a step failed; the log that the sentence names says why. Run it again and it
            goes on from there.
    """
    folder, file = folder_of(root, edition), pins(root, edition)
    server = folder / "bin" / "python"
    tool = _run.installer(installer, env)
    log = root / ".cache" / "setup" / f"{folder.name.removeprefix('.')}.log"
    with _alone(log.with_suffix(".lock"), progress):
        if state(root, edition, server).current:
            return Built(folder, read_lock(folder) or {}, fresh=False)
        steps = _run.Steps(root, log, _run.environment(edition, tool, env), progress)
        lock_path = folder / LOCK
        lock_path.unlink(missing_ok=True)
        _make(steps, folder, tool, _python(python, tool, env))
        _install(steps, edition, file, server, tool)
        unjudged = _verify(steps, server, imports)
        steps.run("checking for conflicts", tool.check(server), "pip check finds a conflict")
        lock = {
            "schema": SCHEMA,
            "edition": edition.name,
            "requirements": edition.requirements,
            "made_of": made_of(root, edition),
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": platform.machine(),
            "installer": str(tool),
            "unjudged": list(unjudged),
            **installed(server),
        }
        write_atomic(lock_path, json.dumps(lock, indent=1) + "\n")
    return Built(folder, lock, unjudged)


def _python(told: str | None, tool: _run.Installer, env: Mapping[str, str]) -> str:
    """The interpreter to make the environment with: one that runs, and is what the pins are for."""
    if told is None:
        if _minor(sys.version_info) == PYTHON:
            return sys.executable
        found = shutil.which(f"python{PYTHON}", path=env.get("PATH"))
        if found is None and tool.name == "uv":
            return PYTHON  # uv brings it
        told = found
    elif tool.name == "uv" and re.fullmatch(r"\d+(\.\d+)*", told):  # a version, as uv takes it
        _right(told, told)
        return told
    if told is None or shutil.which(told, path=env.get("PATH")) is None:
        what = f"There is no Python {told!r}" if told else f"Python {PYTHON} was not found"
        raise UsageError(
            f"{what}; install python{PYTHON} with its venv package, or name one with --python."
        )
    code = "import sys; print('python', *sys.version_info[:3], sep='.')"
    answer = commands.ask((told, "-c", code), 30.0, env=env)
    found = re.fullmatch(r"python\.([\d.]+)", "" if isinstance(answer, str) else answer[1].strip())
    if found is None:
        why = answer if isinstance(answer, str) else f"it answers with code {answer[0]}"
        raise UsageError(f"--python {told} is no Python that runs ({why}); name python{PYTHON}.")
    _right(found[1], told)
    return told


def _minor(version: Sequence[int]) -> str:
    return f"{version[0]}.{version[1]}"


def _right(version: str, told: str) -> None:
    """Raise UsageError for a Python that the pins were not resolved for."""
    if version != PYTHON and not version.startswith(f"{PYTHON}."):
        raise UsageError(
            f"{told} is Python {version}, and the server's packages are pinned for {PYTHON}; name "
            f"python{PYTHON} with --python, or leave it out."
        )


def _make(steps: _run.Steps, folder: Path, tool: _run.Installer, python: str) -> None:
    """A venv whose Python runs and is the right one; another one (moved, its Python gone, or of
    another version) is made anew."""
    server = folder / "bin" / "python"
    code = "import sys; print(sys.prefix, '%d.%d' % sys.version_info[:2])"
    if server.exists() and steps.quiet((str(server), "-c", code)) == f"{folder} {PYTHON}":
        return
    if folder.exists():
        shutil.rmtree(folder)
    why = "the environment could not be made"
    steps.run("making the environment", tool.venv(folder, python), why)


def _install(
    steps: _run.Steps, edition: Edition, file: Path, server: Path, tool: _run.Installer
) -> None:
    lines = file.read_text("utf-8").splitlines()
    wanted = sum("==" in line for line in lines if not line.startswith("#"))
    what = f"installing {wanted} pinned packages" if edition.build is None else "building the fork"
    why = f"what {edition.requirements} pins could not be installed"
    steps.run(what, tool.install(server, ("-r", str(file))), why)
    if edition.build is None:
        plugin = ("--no-deps", "-e", str(steps.root / PLUGIN))
        steps.run("installing the plugin", tool.install(server, plugin), "no plugin")


def _verify(steps: _run.Steps, server: Path, imports: tuple[str, ...]) -> tuple[str, ...]:
    """Import everything; return what could not be judged for want of a driver."""
    unjudged = []
    whole = (str(server), "-c", f"import {', '.join(imports)}")
    if steps.attempt("importing what the server imports", whole) is None:
        return ()
    for module in imports:
        said = steps.attempt(f"importing {module}", (str(server), "-c", f"import {module}"))
        if said is None:
            continue
        if any(word in said for word in DRIVER):
            unjudged.append(module)
            continue
        last = said.strip().splitlines()[-1] if said.strip() else "no message"
        raise SparklingError(
            f"{module} cannot be imported by {server}: {last} (log: {steps.log}); it is installed, "
            "so a system library may be missing."
        )
    return tuple(unjudged)
