"""What is known of a checkpoint's files: the manifest, written last and only when all is there.

`sparkling.json` beside the weights says where they came from, at which commit, and for every file
its size, time and SHA-256; its presence means that the download ended. A file whose size and time
are those of its row has not been touched since it was hashed, so later checks need not read it.
`sha256` in it is what `weightcheck` reads, also from the manifests of our own models, which have
nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparkling.errors import SparklingError
from sparkling.files import os_error, read_json, write_atomic
from sparkling.hubs import HubFile
from sparkling.weightcheck import MANIFEST

FORMAT = 1
_PIECE = 8 << 20


@dataclass(frozen=True)
class Row:
    """One file that was hashed whole. compared: which of the hub's checksums its content equalled,
    "sha256" or "git-sha1"; None: the hub gave none. mtime_ns 0: unknown."""

    path: str
    size: int
    mtime_ns: int
    sha256: str
    git_sha1: str | None = None
    compared: str | None = None
    commit: str | None = None

    def untouched(self, folder: Path) -> bool:
        """Whether the file has still the size and time that it had when it was hashed."""
        try:
            stat = (folder / self.path).stat()
        except OSError:
            return False
        return (stat.st_size, stat.st_mtime_ns) == (self.size, self.mtime_ns)

    def is_file(self, file: HubFile, commit: str | None) -> bool:
        """Whether this content is what the hub lists: by checksum, else by size and commit."""
        if file.sha256:
            return self.sha256 == file.sha256
        if file.git_sha1:
            return self.git_sha1 == file.git_sha1
        return commit is not None and self.commit == commit and self.size == file.size


def digests(
    path: Path, *, git: bool = False, progress: Callable[[int], None] | None = None
) -> tuple[str, str | None]:
    """(SHA-256, git blob SHA-1 if asked for) of the whole file, in hex. Raises OSError."""
    sha, blob = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as file:
        blob.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while piece := file.read(_PIECE):
            sha.update(piece)
            if git:
                blob.update(piece)
            if progress is not None:
                progress(len(piece))
    return sha.hexdigest(), blob.hexdigest() if git else None


def row_of(
    folder: Path,
    name: str,
    *,
    path: Path | None = None,
    file: HubFile | None = None,
    commit: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Row:
    """Hash `folder/name` (or `path`, which is to become it) whole. Raises SparklingError."""
    place = path or folder / name
    want_git = bool(file and file.git_sha1 and not file.sha256)
    try:
        before = place.stat()
        sha, git = digests(place, git=want_git, progress=progress)
        if place.stat().st_mtime_ns != before.st_mtime_ns:
            raise SparklingError(f"{place} was changed while it was checked; run again.")
    except OSError as error:
        raise os_error(error, "reading", place) from error
    compared = None
    if file is not None and file.sha256 == sha:
        compared = "sha256"
    elif want_git and file is not None and file.git_sha1 == git:
        compared = "git-sha1"
    return Row(name, before.st_size, before.st_mtime_ns, sha, git, compared, commit)


def rows_from(values: Iterable[Any]) -> dict[str, Row]:
    """Rows as JSON holds them, by path; what is no row is left out."""
    rows = {}
    for value in values:
        with contextlib.suppress(TypeError, KeyError, ValueError):
            row = Row(**{key: value[key] for key in Row.__dataclass_fields__ if key in value})
            numbers = (row.size, row.mtime_ns)
            if isinstance(row.path, str) and all(type(number) is int for number in numbers):
                rows[row.path] = row
    return rows


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder; `about` holds everything but the rows."""

    about: Mapping[str, Any]
    rows: Mapping[str, Row]

    @property
    def compared(self) -> int:
        """How many files equalled a checksum of the hub."""
        return sum(row.compared is not None for row in self.rows.values())

    def to_json(self) -> dict[str, Any]:
        rows = sorted(self.rows.values(), key=lambda row: row.path)
        kept = {k: v for k, v in self.about.items() if k not in ("files", "sha256")}
        return {
            **kept,
            "files": [asdict(row) for row in rows],
            "sha256": {row.path: row.sha256 for row in rows},
        }


def read(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none. Raises SparklingError for a broken one."""
    path = folder / MANIFEST
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise SparklingError(f"{path} is no manifest; move it away and check the folder again.")
    listed = value.get("files")
    rows = rows_from(listed) if isinstance(listed, list) else {}
    hashes = value.get("sha256")
    for name, digest in (hashes if isinstance(hashes, dict) else {}).items():
        if name not in rows:  # a manifest of ours without sizes and times
            rows[name] = Row(name, -1, 0, str(digest))
    about = {k: v for k, v in value.items() if k not in ("files", "sha256")}
    return Manifest(about, rows)


def write(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest atomically; its path."""
    path = folder / MANIFEST
    write_atomic(path, json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n")
    return path


def refreshed(folder: Path, manifest: Manifest, hashed: Mapping[str, Row]) -> Manifest:
    """The manifest with the sizes and times of files that were hashed again and found equal."""
    rows = dict(manifest.rows)
    for name, row in hashed.items():
        rows[name] = replace(rows[name], size=row.size, mtime_ns=row.mtime_ns)
    return Manifest(manifest.about, rows)
