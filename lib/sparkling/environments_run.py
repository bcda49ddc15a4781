"""What a build of an environment runs: uv or pip, with a log, progress, and an end on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkling import commands, kernels_jobs, machine, redact
from sparkling.errors import SparklingError, UsageError
from sparkling.recipe import Edition

TELL_S = 15.0  # how often a long step says where it is
_PACKAGE = re.compile(
    r"^(Collecting|Using cached|Downloading|Downloaded|Building|Built|Prepared| \+)"
)
_INDEX = re.compile(r"^(?:global|install|:env:)\.index[-_]url='([^']+)'", re.MULTILINE)


@dataclass(frozen=True)
class Installer:
    """uv or pip, as command lines."""

    name: str
    program: str = ""

    def __str__(self) -> str:
        return self.name

    def venv(self, folder: Path, python: str) -> tuple[str, ...]:
        """Make a venv."""
        if self.name == "uv":
            return (self.program, "venv", "--seed", "--python", python, str(folder))
        return (python, "-m", "venv", str(folder))

    def install(self, server: Path, what: Sequence[str]) -> tuple[str, ...]:
        """Install requirements into the environment of `server`."""
        if self.name == "uv":
            return (self.program, "pip", "install", "--python", str(server), *what)
        quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        return (str(server), "-m", "pip", "install", *quiet, *what)

    def check(self, server: Path) -> tuple[str, ...]:
        """Look for packages whose requirements are not met."""
        if self.name == "uv":
            return (self.program, "pip", "check", "--python", str(server))
        return (str(server), "-m", "pip", "check", "--disable-pip-version-check")


def installer(wanted: str, env: Mapping[str, str] = os.environ) -> Installer:
    """uv or pip. "auto": uv where there is one. Raises UsageError."""
    if wanted not in ("auto", "uv", "pip"):
        raise UsageError(
            f"There is no installer {wanted!r}; the installers are uv and pip, or auto."
        )
    here = Path(sys.executable).parent
    path = os.pathsep.join([str(here), env.get("PATH", os.defpath)])
    found = shutil.which("uv", path=path) if wanted != "pip" else None
    if found:
        return Installer("uv", found)
    if wanted == "uv":
        raise UsageError("uv is not installed; install it, or let pip do it with --installer pip.")
    return Installer("pip")


def environment(
    edition: Edition,
    tool: Installer,
    env: Mapping[str, str] = os.environ,
    *,
    available: int | None = None,
    cpus: int | None = None,
) -> dict[str, str]:
    """The environment of a build: few jobs for what is compiled, no Rust, the index pip is told.

    uv does not read pip's settings, so the index they name is handed to it; in a variable, because
    it may hold a password.
    """
    out = {name: value for name, value in env.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if available is None:
        available = machine.host_memory().available
    cores = machine.cpus() if cpus is None else cpus
    jobs = kernels_jobs.beside(available, 0, cores, env)  # the caller's lower MAX_JOBS wins
    for name in ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL", "NINJA_NUM_JOBS"):
        out[name] = jobs
    if edition.build is not None:
        out["SGLANG_BUILD_RUST_EXTS"] = "none"
    if tool.name == "uv":
        out.setdefault("UV_LINK_MODE", "copy")  # the cache may lie on another file system
        told = pip_index(out)
        if told and not any(name in out for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
            out["UV_DEFAULT_INDEX"] = told
    return out


def pip_index(env: Mapping[str, str]) -> str | None:
    """The package index that pip's own settings name; None when they leave pip its default."""
    if env.get("PIP_INDEX_URL"):
        return env["PIP_INDEX_URL"]
    answer = commands.ask((sys.executable, "-m", "pip", "config", "list"), 20.0, env=env)
    found = _INDEX.search(answer[1]) if not isinstance(answer, str) else None
    return found[1] if found else None


class Steps:
    """Runs one command after the other, each into the log; a failure is one sentence."""

    def __init__(
        self, root: Path, log: Path, env: Mapping[str, str], progress: Callable[[str], None]
    ) -> None:
        self.root, self.log, self.env, self.progress = root, log, dict(env), progress
        self.began = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)

    def run(self, what: str, command: Sequence[str], failure: str) -> None:
        """Run a step, telling now and then how many packages it has come to. Raises SparklingError."""
        self.progress(f"{what} (log: {self.log})")
        code, text = self._logged(command, what)
        if code != 0:
            raise SparklingError(
                f"{failure[0].upper()}{failure[1:]}: {self._why(text)} (log: {self.log}); run it "
                "again and it goes on from there."
            )

    def attempt(self, what: str, command: Sequence[str]) -> str | None:
        """Run a step that may fail; None when it did not, else what it printed."""
        self.progress(what)
        code, text = self._logged(command, what)
        return None if code == 0 else text

    def quiet(self, command: Sequence[str]) -> str | None:
        """What a command prints, None when it fails."""
        answer = commands.ask(command, 30.0, env=self.env)
        return answer[1].strip() if not isinstance(answer, str) and answer[0] == 0 else None

    def _logged(self, command: Sequence[str], what: str) -> tuple[int, str]:
        with self.log.open("ab") as out:
            start = out.tell()
            out.write(f"\n$ {redact.mask_text(' '.join(command))}\n".encode())
            out.flush()
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    cwd=self.root,
                    start_new_session=True,
                )
            except OSError as error:
                return 127, f"{command[0]}: {error.strerror or error}"
            try:
                self._wait(child, what, start)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGTERM)
                child.wait()
                raise
        return child.returncode, self._since(start)

    def _wait(self, child: subprocess.Popen[bytes], what: str, start: int) -> None:
        while True:
            try:
                child.wait(TELL_S)
                return
            except subprocess.TimeoutExpired:
                lines = self._since(start).splitlines()
                seen = sum(bool(_PACKAGE.match(line)) for line in lines)
                told = f": {seen} lines about packages so far" if seen else ""
                self.progress(f"[{time.monotonic() - self.began:.0f} s] {what}{told}")

    def _since(self, start: int) -> str:
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace")

    @staticmethod
    def _why(text: str) -> str:
        """The line of a failed step that says most."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        marks = ("error", "ERROR", "No space left", "Killed", "×", "cause:")
        telling = [line for line in lines if line.lstrip("× ").startswith(marks)]
        return redact.mask_text((telling or lines or ["it said nothing"])[-1]).rstrip(".")[:300]
