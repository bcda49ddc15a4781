"""Files that survive a kill at any moment and a full disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkling.errors import SparklingError, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def os_error(error: OSError, doing: str, path: Path) -> SparklingError:
    """One sentence for an operating-system error while `doing` something to `path`."""
    if error.errno in _FULL:
        return SparklingError(
            f"The disk is full: {doing} {path} failed; what was written before is intact, so free "
            "some space and run again."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(
            f"No permission for {doing} {path}; choose another folder or change its owner."
        )
    return SparklingError(
        f"{doing[0].upper()}{doing[1:]} {path} failed: {error.strerror or error}."
    )


def expanded(text: Path | str) -> Path:
    """The path with `~` replaced by the home folder. UsageError where there is no such home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{text} begins with a home folder that this machine does not know; write the whole path."
        ) from None


def working_folder() -> Path:
    """The working directory. UsageError when it was deleted under us."""
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(
            f"The working directory cannot be used ({error.strerror or error}); change to another one."
        ) from None


def absolute(text: Path | str) -> Path:
    """The path, its `~` replaced, taken from the working directory. Raises UsageError."""
    path = expanded(text)
    return path if path.is_absolute() else working_folder() / path


def plain(value: Any) -> Any:
    """`value` as JSON holds it: paths and others as text, dataclasses as objects, infinities and
    NaN as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    return str(value)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: a temporary file beside it, fsync, rename."""
    raw = data.encode() if isinstance(data, str) else data
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            os.fchmod(fd, 0o644)
            _write_all(fd, raw)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        raise os_error(error, "writing", path) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_json(path: Path) -> Any:
    """The JSON in `path`; FileNotFoundError passes through, anything else is one sentence."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise os_error(error, "reading", path) from error
    except (ValueError, RecursionError) as error:
        raise SparklingError(
            f"{path} is not JSON ({error}); move it away and run again."
        ) from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; [] if there is none. Lines that are no JSON object (a last line cut
    by a kill) are skipped. Never writes."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise os_error(error, "reading", path) from error
    return list(_rows(raw))


def _rows(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw.split(b"\n"):
        row = _row(line)
        if row is not None:
            yield row


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class Journal:
    """A JSONL file open for appending, by one process at a time.

    Opening it repairs a last line that a kill left half-written; `append` returns only when the
    row is on the disk, and if it cannot be, takes back what was written of it. `rows` is what the
    file held when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise os_error(error, "opening", path) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise UsageError(
                f"{path} is being written by another process; wait for it or use another run."
            ) from None
        try:
            self.rows = self._repair()
            _sync_folder(path.parent)
        except OSError as error:
            os.close(self._fd)
            raise os_error(error, "repairing", path) from error

    def _repair(self) -> list[dict[str, Any]]:
        raw = self.path.read_bytes()
        end = raw.rfind(b"\n") + 1
        tail = raw[end:]
        if tail:
            if _row(tail) is not None:
                _write_all(self._fd, b"\n")  # whole, only its newline is missing
            else:
                os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        return list(_rows(raw))

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")) + "\n"
        size = os.fstat(self._fd).st_size
        try:
            _write_all(self._fd, line.encode("utf-8", "surrogatepass"))
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise os_error(error, "appending to", self.path) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems refuse it; the rename is atomic anyway
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
