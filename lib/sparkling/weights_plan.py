"""What a download has still to do, found out before a byte is fetched.

Each listed file is kept (hashed before and untouched since), checked (there, but never hashed:
reading it may spare fetching it), resumed (the first bytes are here, and are known to belong to
the same content) or fetched. The disk must hold what is missing before anything starts.

Unfinished files live in `.fetch` inside the checkpoint's folder, under other names, each with a
small state file that says which content it is the beginning of; so none can be taken for whole.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sparkling import weights_manifest
from sparkling.errors import SparklingError, UsageError
from sparkling.files import read_rows, write_atomic
from sparkling.hubs import TITLES, HubFile, Listing, gb
from sparkling.weights_manifest import Row

WORK = ".fetch"
DONE = "done.jsonl"
RESERVE = 256_000_000  # bytes of disk left free for everybody else
NEVER = (".gitattributes", ".gitignore")
_ACTIONS = ("keep", "check", "resume", "fetch")


def part_of(folder: Path, path: str) -> Path:
    """Where the unfinished bytes of a file are."""
    return folder / WORK / f"{quote(path, safe=' ')}.part"


def state_of(folder: Path, path: str) -> Path:
    """What those bytes are the beginning of."""
    return folder / WORK / f"{quote(path, safe=' ')}.json"


@dataclass(frozen=True)
class State:
    """Which content an unfinished file belongs to. `etag`: as the server gave it, for files of
    which the hub tells no checksum; `url` then says where."""

    path: str
    url: str
    size: int | None
    sha256: str | None
    git_sha1: str | None
    etag: str | None

    @classmethod
    def of(cls, file: HubFile, etag: str | None) -> State:
        return cls(file.path, file.url, file.size, file.sha256, file.git_sha1, etag)

    def belongs(self, file: HubFile) -> bool:
        """Whether those bytes are the beginning of what the hub lists now.

        By the hub's checksum where it gives one; otherwise the same address and an entity tag,
        which the server is then asked to honour.
        """
        if file.sha256:
            return self.sha256 == file.sha256
        if file.git_sha1:
            return self.git_sha1 == file.git_sha1
        return self.url == file.url and self.etag is not None

    def save(self, folder: Path) -> None:
        write_atomic(state_of(folder, self.path), json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path, path: str) -> State | None:
        """The state of a file; None where there is none or it cannot be read."""
        try:
            value = json.loads(state_of(folder, path).read_bytes())
            return cls(**value) if value.get("path") == path else None
        except (OSError, ValueError, TypeError, AttributeError):
            return None


@dataclass(frozen=True)
class Step:
    """What is done about one file; `have` of its bytes need not be fetched."""

    file: HubFile
    action: str
    have: int
    why: str
    row: Row | None = None

    @property
    def missing(self) -> int:
        """Bytes to fetch; 0 where the size is unknown."""
        return max(0, (self.file.size or 0) - self.have)


@dataclass(frozen=True, repr=False)
class Plan:
    """What a download will do; shows itself as a table."""

    listing: Listing
    folder: Path
    steps: tuple[Step, ...] = field(repr=False)
    excluded: tuple[str, ...]
    free: int

    @property
    def needs(self) -> int:
        """Bytes to fetch, as far as sizes are known."""
        return sum(step.missing for step in self.steps)

    @property
    def nothing_to_do(self) -> bool:
        return all(step.action == "keep" for step in self.steps)

    def count(self, action: str) -> int:
        return sum(step.action == action for step in self.steps)

    def require_disk(self) -> None:
        """Raise UsageError where the disk cannot hold what is missing."""
        if self.needs and self.needs + RESERVE > self.free:
            raise UsageError(
                f"Not enough disk for {self.listing.repo} in {self.folder}: {gb(self.needs)} are "
                f"missing and {gb(RESERVE)} stay in reserve, {gb(self.free)} are free; free some "
                "space or choose a folder on another disk (--to)."
            )

    def __str__(self) -> str:
        have = sum(step.have for step in self.steps)
        parts = [f"{self.count(action)} to {action}" for action in _ACTIONS if self.count(action)]
        return (
            f"{self.listing}. Into {self.folder}: {', '.join(parts)}; {gb(self.needs)} to fetch, "
            f"{gb(have)} here already, {gb(self.free)} of disk free."
        )

    def view(self) -> Any:
        """As a `show.View`."""
        from sparkling import show

        rows = [
            {
                "file": step.file.path,
                "size": gb(step.file.size),
                "checksum": "SHA-256"
                if step.file.sha256
                else "git"
                if step.file.git_sha1
                else "none",
                "action": step.action,
                "to fetch": gb(step.missing),
                "because": step.why,
            }
            for step in self.steps
        ]
        return show.table(rows, title=str(self))

    def __repr__(self) -> str:
        return str(self.view())

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def to_json(self) -> dict[str, Any]:
        return {
            "repo": self.listing.repo,
            "hub": self.listing.hub,
            "commit": self.listing.commit,
            "folder": str(self.folder),
            "bytes": self.listing.size,
            "to_fetch": self.needs,
            "free": self.free,
            "fits": not self.needs or self.needs + RESERVE <= self.free,
            "excluded": list(self.excluded),
            "files": [
                {
                    "path": step.file.path,
                    "size": step.file.size,
                    "action": step.action,
                    "have": step.have,
                    "why": step.why,
                }
                for step in self.steps
            ],
        }


def known_rows(folder: Path) -> dict[str, Row]:
    """Files hashed by the last finished download and by an unfinished one since."""
    manifest = weights_manifest.read(folder)
    rows = dict(manifest.rows) if manifest else {}
    rows.update(weights_manifest.rows_from(read_rows(folder / WORK / DONE)))
    return rows


def plan(
    listing: Listing,
    folder: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Plan:
    """What fetching `listing` into `folder` would do. Changes nothing on the disk.

    include, exclude: shell patterns of paths; an empty include means all. Raises UsageError when
    they leave nothing, or when the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder for the checkpoint (--to).")
    wanted, left = [], []
    for file in listing.files:
        taken = not include or any(fnmatch.fnmatch(file.path, p) for p in include)
        taken = taken and not any(fnmatch.fnmatch(file.path, p) for p in (*exclude, *NEVER))
        (wanted if taken else left).append(file)
    if not wanted:
        raise UsageError(
            f"No file of {listing.repo} on {TITLES[listing.hub]} is left by --include and "
            "--exclude; `sparkling weights list` shows their names."
        )
    try:
        rows: Mapping[str, Row] = known_rows(folder)
    except SparklingError:
        rows = {}  # a broken manifest: nothing is known, so everything is checked
    steps = [_step(file, folder, rows.get(file.path), listing.commit) for file in wanted]
    return Plan(listing, folder, tuple(steps), tuple(f.path for f in left), _free(folder))


def _step(file: HubFile, folder: Path, row: Row | None, commit: str | None) -> Step:
    target = folder / file.path
    size = target.stat().st_size if target.is_file() else None
    known = row is not None and row.untouched(folder)
    if known and row is not None and row.is_file(file, commit):
        return Step(file, "keep", row.size, "hashed before and untouched since", row)
    # A file that is known to be another one need not be read to find that out.
    if size is not None and not known and file.hashed and file.size in (None, size):
        return Step(file, "check", size, "there, but never hashed here")
    begun, why = resumable(file, folder)
    if begun:
        return Step(file, "resume", begun, why)
    if size is not None and not why:
        why = "the file here is another one: replaced when complete"
    return Step(file, "fetch", 0, why or "not here yet")


def resumable(file: HubFile, folder: Path) -> tuple[int, str]:
    """(bytes of an unfinished file that can be gone on with, why or why not; "" without any)."""
    part = part_of(folder, file.path)
    begun = part.stat().st_size if part.is_file() else 0
    if not begun:
        return 0, ""
    state = State.load(folder, file.path)
    if state is None:
        return 0, "a partial file without its state: starts over"
    if not state.belongs(file):
        return 0, "the hub has other content now: starts over"
    if file.size is not None and begun > file.size:
        return 0, "the partial file is too long: starts over"
    share = f" ({100 * begun / file.size:.0f} %)" if file.size else ""
    return begun, f"{gb(begun)} here already{share}"


def _free(folder: Path) -> int:
    """Bytes free where the folder is or would be."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return shutil.disk_usage(place).free
    return 0
