"""`runs/`: one folder a run, with everything that was measured in it.

    runs/<run-id>/manifest.json       what, where, when; secrets masked
    runs/<run-id>/<notebook>/...      rows (JSONL), saved objects (JSON) and logs of one notebook

A run id is `YYYYmmdd-HHMMSS-xxxx`. The notebooks of one suite share a run.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import secrets as _random
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sparkling
from sparkling.errors import SparklingError, UsageError
from sparkling.files import Journal, os_error, plain, read_json, read_rows, write_atomic
from sparkling.redact import environment_secrets, mask_text, redact

SCHEMA = 1
KIND = "sparkling-run"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PACKAGES = ("numpy", "httpx", "papermill", "nbclient", "ipykernel", "matplotlib")


class Run:
    """One run, seen from one notebook (or from none). Make it with `open_run`."""

    def __init__(self, folder: Path, notebook: str | None, secrets: Iterable[str] = ()) -> None:
        self.dir = folder
        self.id = folder.name
        self.notebook = notebook
        self._secrets = [*secrets]

    def __repr__(self) -> str:
        return f"Run({self.id!r}{f', notebook={self.notebook!r}' if self.notebook else ''})"

    @property
    def folder(self) -> Path:
        """Where this notebook's files go: the run's folder itself when there is no notebook."""
        return self.dir / self.notebook if self.notebook else self.dir

    def path(self, *parts: str) -> Path:
        """A path inside `folder`; the folders above it exist afterwards."""
        return _inside(self.folder, parts)

    def shared(self, *parts: str) -> Path:
        """A path inside the run's own folder, which all its notebooks see."""
        return _inside(self.dir, parts)

    def add_secret(self, value: str | None) -> None:
        """From now on `value` (an API key) is masked in whatever this Run writes."""
        if value:
            self._secrets.append(value)

    # -- manifest --------------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as it is on the disk now."""
        return _manifest(self.dir)

    def update(self, facts: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Merge facts into the manifest (mappings into mappings, anything else replaces), safely
        against other processes of the same run. Returns the manifest written."""
        with _lock(self.dir):
            merged = _merge(_manifest(self.dir), self._clean({**(facts or {}), **more}))
            write_atomic(self.dir / "manifest.json", _dump(merged))
        return merged

    def finish(self, state: str = "done", **facts: Any) -> None:
        """Note in the manifest that this notebook (or the run) ended: "done", "failed", …"""
        entry = {"ended": _now(), "state": state, **facts}
        self.update({"notebooks": {self.notebook: entry}} if self.notebook else entry)

    # -- rows and objects ------------------------------------------------------------------------

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append one row to `<name>.jsonl`; it is on the disk when this returns."""
        with Journal(self.path(_with(name, ".jsonl"))) as journal:
            journal.append(self._clean(row))

    def rows(self, name: str, *, notebook: str | None = None) -> list[dict[str, Any]]:
        """The rows of `<name>.jsonl` of this notebook, or of another one of the run; [] if none."""
        folder = self.dir / notebook if notebook else self.folder
        return read_rows(_inside(folder, (_with(name, ".jsonl"),), make=False))

    def all_rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of `<name>.jsonl` from every notebook of the run, in the notebooks' order."""
        return [
            row for folder in self._folders() for row in read_rows(folder / _with(name, ".jsonl"))
        ]

    def save(self, name: str, obj: Any) -> Path:
        """Write an object (`to_json`, dataclass or plain) as `<name>.json`."""
        path = self.path(_with(name, ".json"))
        write_atomic(path, _dump(self._clean(obj)))
        return path

    def load(self, name: str, *, notebook: str | None = None) -> Any:
        """What `save` wrote: by this notebook, else by the run itself, else by whichever other
        notebook of the run has it. UsageError if nobody has."""
        file = _with(name, ".json")
        places = [self.dir / notebook] if notebook else [self.folder, *self._folders()]
        for folder in places:
            try:
                return read_json(folder / file)
            except FileNotFoundError:
                continue
        raise UsageError(
            f"Run {self.id} has no {file}{f' of {notebook}' if notebook else ''}; run the notebook "
            "that makes it first."
        )

    def _folders(self) -> list[Path]:
        return [self.dir, *sorted(p for p in self.dir.iterdir() if p.is_dir())]

    def _clean(self, value: Any) -> Any:
        known = [*self._secrets, *environment_secrets()]
        return redact(plain(value), known)

    def mask(self, text: str) -> str:
        """`text` with this run's secrets masked, for logs and command lines."""
        return mask_text(text, [*self._secrets, *environment_secrets()])


def open_run(
    runs: Path,
    run_id: str | None = None,
    *,
    notebook: str | None = None,
    params: Mapping[str, Any] | None = None,
    secrets: Iterable[str] = (),
) -> Run:
    """A new run, or the one called `run_id` (made if it does not exist).

    Raises UsageError for an id that is no folder name, a folder that is not ours, and a place that
    cannot be written.
    """
    for what, value in (("run id", run_id), ("notebook name", notebook)):
        if value and not _ID.fullmatch(value):
            raise UsageError(
                f"{value!r} is no {what}: use letters, digits, dots, dashes and underscores."
            )
    runs = Path(runs)
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(
            f"{runs} is a file, not a folder for runs; choose another place."
        ) from None
    except OSError as error:
        raise os_error(error, "making", runs) from error
    folder = _claim(runs, run_id)
    run = Run(folder, notebook, secrets)
    with _lock(folder):
        if not (folder / "manifest.json").exists():
            write_atomic(folder / "manifest.json", _dump(run._clean(_new_manifest(folder.name))))
    _manifest(folder)  # refuses what is not ours
    if notebook:
        run.path()
        entry = {"started": _now(), "params": dict(params or {}), "state": "running"}
        run.update({"notebooks": {notebook: entry}})
    elif params:
        run.update({"params": dict(params)})
    return run


def latest(runs: Path, holding: Iterable[str] = ()) -> Run | None:
    """The run that was made last; None if there is none. Folders that are not ours are ignored.

    holding: patterns of files; a run that has one of them comes before any that has none.
    """
    wanted = [*holding]
    best: tuple[bool, float, str, Path] | None = None
    for folder, manifest in _ours(Path(runs)):
        has = any(True for pattern in wanted for _ in folder.glob(pattern))
        key = (has, float(manifest.get("created_s") or 0.0), folder.name, folder)
        best = max(best, key) if best else key
    return Run(best[3], None) if best else None


def list_runs(runs: Path) -> list[Run]:
    """All runs, oldest first."""
    found = sorted(_ours(Path(runs)), key=lambda x: (float(x[1].get("created_s") or 0), x[0].name))
    return [Run(folder, None) for folder, _ in found]


def _ours(runs: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    try:
        folders = [p for p in runs.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except FileNotFoundError:
        return
    except OSError as error:
        raise os_error(error, "reading", runs) from error
    for folder in folders:
        try:
            yield folder, _manifest(folder)
        except SparklingError:
            continue


def _claim(runs: Path, run_id: str | None) -> Path:
    """The folder of the run: the named one, or a new one that nobody else got."""
    try:
        if run_id:
            folder = runs / run_id
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is a file, not a run; choose another run id.")
            if folder.is_dir() and not (folder / "manifest.json").exists():
                strangers = [p.name for p in folder.iterdir() if p.name != ".lock"]
                if strangers:
                    raise UsageError(
                        f"{folder} exists and is not a Sparkling run (it has no manifest.json but "
                        f"{strangers[0]}); choose another run id."
                    )
            folder.mkdir(exist_ok=True)
            return folder
        while True:
            folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{_random.token_hex(2)}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise os_error(error, "making a run folder in", runs) from error


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a Sparkling run: it has no manifest.json.") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(f"{folder} is not a Sparkling run: its manifest.json is of another kind.")
    if data.get("schema") != SCHEMA:
        raise UsageError(
            f"{folder} was written by another version of Sparkling (schema {data.get('schema')!r}, "
            f"this one reads {SCHEMA}); use a new run."
        )
    return data


def _new_manifest(run_id: str) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "sparkling": sparkling.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "run_id": run_id,
        "created": _now(),
        "created_s": time.time(),
        "versions": versions,
        "machine": {
            "system": platform.system(),
            "release": platform.release(),
            "arch": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "git": git_commit(Path(__file__).parent),
        "notebooks": {},
    }


def git_commit(folder: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository around `folder`; None without one (or without git)."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True,
                text=True,
                timeout=5,
                env=env,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise os_error(error, "locking", folder) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(old)
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = _merge(out[key], value)
        else:
            out[key] = value
    return out


def _inside(folder: Path, parts: Iterable[str], *, make: bool = True) -> Path:
    for part in parts:
        if Path(part).is_absolute() or ".." in Path(part).parts:
            raise UsageError(f"{part!r} leads out of the run's folder.")
    path = folder.joinpath(*parts)
    if make:
        parent = path.parent if path != folder else path
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise os_error(error, "making", parent) from error
    return path


def _with(name: str, suffix: str) -> str:
    return name if name.endswith(suffix) else name + suffix


def _dump(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
