"""One file of a hub, fetched in ranges: whatever breaks, only what is missing is asked for again.

Bytes are appended to the file's `.part`; its length is all that has to be known to go on. The
server must continue where we stopped (206, and a Content-Range that says so), must not have other
content meanwhile (the hub's checksum, or else the entity tag through If-Range), and what came must
have the announced length. Then the whole file is hashed from the disk, from its first byte on, and
only after that it gets its name.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkling import weights_manifest
from sparkling.errors import SparklingError
from sparkling.files import os_error
from sparkling.hubs import TITLES, HubError, HubFile, HubRefusal, gb, refused
from sparkling.weights_manifest import Row
from sparkling.weights_plan import State, Step, part_of, resumable, state_of

TRIES = 6  # failures in a row without a single new byte before a file is given up
LONGEST_PAUSE_S = 60.0
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class Cancelled(Exception):
    """The download was called off; nothing is lost."""


class DiskFull(SparklingError):
    """The disk takes no more; every other file would fail as well."""


class _Again(Exception):
    """Worth another request. after_s: when the server said so."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


@dataclass
class Job:
    """What all files of one download share."""

    hub: str
    folder: Path
    commit: str | None
    http: Any
    headers: dict[str, str]
    cancel: threading.Event = field(default_factory=threading.Event)
    backoff_s: float = 1.0
    on_bytes: Callable[[str, int], None] = lambda path, count: None  # fetched
    on_state: Callable[[str, str], None] = lambda path, what: None  # "fetching", "hashing", …
    on_note: Callable[[str], None] = lambda text: None

    def check(self) -> None:
        if self.cancel.is_set():
            raise Cancelled

    def pause(self, seconds: float) -> None:
        if self.cancel.wait(seconds):
            raise Cancelled


def obtain(job: Job, step: Step) -> Row:
    """Bring one file into the folder, hashed whole. Raises HubError, HubRefusal, SparklingError."""
    file = step.file
    if step.action == "check":
        job.on_state(file.path, "hashing")
        row = _hashed(job, file, job.folder / file.path)
        if row.compared:
            return row
        job.on_note(f"{file.path} is there with other content; it is fetched.")
    if not resumable(file, job.folder)[0]:
        _drop(job, file)
    for attempt in (1, 2):
        job.on_state(file.path, "fetching")
        _stream(job, file)
        job.on_state(file.path, "hashing")
        part = part_of(job.folder, file.path)
        row = _hashed(job, file, part)
        if row.compared or not file.hashed:
            return _settle(job, file, part, row)
        _drop(job, file)
        if attempt == 1:
            job.on_note(f"{file.path} came with a wrong checksum; it starts over, once.")
    raise HubError(
        f"{TITLES[job.hub]} served {file.path} twice with a content whose checksum is not the one "
        "that it lists; nothing of it is kept: try the other hub, or later."
    )


def _hashed(job: Job, file: HubFile, path: Path) -> Row:
    return weights_manifest.row_of(
        job.folder,
        file.path,
        path=path,
        file=file,
        commit=job.commit,
        progress=lambda count: job.check(),
    )


def _settle(job: Job, file: HubFile, part: Path, row: Row) -> Row:
    target = job.folder / file.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)
        state_of(job.folder, file.path).unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, "moving into place", target) from error
    return row


def _drop(job: Job, file: HubFile) -> None:
    try:
        part_of(job.folder, file.path).unlink(missing_ok=True)
        state_of(job.folder, file.path).unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, "removing", part_of(job.folder, file.path)) from error


def _have(job: Job, file: HubFile) -> int:
    try:
        return part_of(job.folder, file.path).stat().st_size
    except FileNotFoundError:
        return 0


def _stream(job: Job, file: HubFile) -> None:
    """Ask until all bytes are here; give up after TRIES failures in a row that brought nothing."""
    import httpx

    failures = 0
    while True:
        job.check()
        before = _have(job, file)
        if (
            file.size is not None
            and before == file.size
            and part_of(job.folder, file.path).exists()
        ):
            return
        try:
            _once(job, file, before)
            return
        except _Again as error:
            why, after_s = str(error), error.after_s
        except httpx.TooManyRedirects:
            raise HubError(f"{TITLES[job.hub]} sends {file.path} in circles; try later.") from None
        except httpx.HTTPError as error:
            job.check()
            why, after_s = f"{type(error).__name__} after {gb(_have(job, file))}", None
        failures = 0 if _have(job, file) > before else failures + 1
        if failures >= TRIES:
            raise HubError(
                f"{TITLES[job.hub]} does not deliver {file.path}: {failures} requests in a row "
                f"brought nothing (the last: {why}); run it again later to go on where it stopped."
            )
        delay = job.backoff_s * 2**failures if after_s is None else after_s
        job.on_state(file.path, f"waiting: {why}")
        job.pause(min(delay, LONGEST_PAUSE_S))
        job.on_state(file.path, "fetching")


def _once(job: Job, file: HubFile, have: int) -> None:
    """One request for what is missing. Returns when the file is complete; raises otherwise."""
    state = State.load(job.folder, file.path) if have else None
    headers = {**job.headers, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        # Where the hub gives a checksum, that decides, and no server has to know an old tag.
        if not file.hashed and state and state.etag:
            headers["If-Range"] = state.etag
    with job.http.stream("GET", file.url, headers=headers, follow_redirects=True) as reply:
        status = reply.status_code
        if status == 416 and have:
            _refused_range(job, file, have, reply)
            return
        if status not in (200, 206):
            raise _said_no(job, file, reply)
        start, total = _extent(reply)
        _check_page(job, file, total, reply)
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise _Again("the answer came compressed")
        etag = _strong(reply.headers.get("ETag"))
        changed = not file.hashed and state is not None and etag != state.etag
        if status == 206 and (start != have or changed):
            _drop(job, file)
            raise _Again("the server went on elsewhere or has other content; starts over")
        _check_length(job, file, total)
        if status == 200 and have:
            job.on_note(f"{file.path} starts over: the server sent all of it, not the rest.")
            have = 0
        if not have:
            _drop(job, file)
            State.of(file, etag).save(job.folder)
        expected = file.size if file.size is not None else total
        got = _append(job, file, reply, have, expected)
    if expected is not None and got < expected:
        raise _Again(f"the connection ended after {got:,} of {expected:,} bytes")


def _append(job: Job, file: HubFile, reply: Any, have: int, expected: int | None) -> int:
    """Write the body behind the bytes that are here; how many there are then."""
    part = part_of(job.folder, file.path)
    got = have
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _disk(error, part) from error
    try:
        for piece in reply.iter_raw():
            job.check()
            if expected is not None and got + len(piece) > expected:
                os.ftruncate(fd, 0)
                raise HubError(
                    f"{TITLES[job.hub]} sends more of {file.path} than the {expected:,} bytes that "
                    "it announced; nothing of it is kept: try the other hub, or later."
                )
            try:
                _write(fd, piece)
            except OSError as error:
                raise _disk(error, part) from error
            got += len(piece)
            job.on_bytes(file.path, len(piece))
    finally:
        os.close(fd)
    return got


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _disk(error: OSError, part: Path) -> SparklingError:
    said = os_error(error, "writing", part)
    return DiskFull(str(said)) if "disk is full" in str(said) else said


def _extent(reply: Any) -> tuple[int, int | None]:
    """(first byte, total bytes or None) of a 200 or 206."""
    if reply.status_code == 206:
        found = _RANGE.fullmatch(reply.headers.get("Content-Range", "").strip())
        if not found or found[1] is None:
            return -1, None
        return int(found[1]), None if found[3] == "*" else int(found[3])
    length = reply.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _strong(etag: str | None) -> str | None:
    """An entity tag that may be used for ranges; weak ones may not."""
    return etag if etag and etag.startswith('"') else None


def _check_page(job: Job, file: HubFile, total: int | None, reply: Any) -> None:
    """Refuse a web page in place of the file. Such pages often come in chunks or compressed, so
    that no length gives them away."""
    page = reply.headers.get("Content-Type", "").lower().startswith("text/html")
    named = file.path.lower().endswith((".html", ".htm"))
    if page and not named and (total is None or total != file.size):
        raise HubRefusal(
            f"A web page came instead of {file.path} (often a sign-in page, of the hub or of a "
            "proxy on the way): open the repository's page in a browser, log in, and run again."
        )


def _check_length(job: Job, file: HubFile, total: int | None) -> None:
    if total is None:
        if file.size is None and not file.hashed:
            raise HubError(
                f"{TITLES[job.hub]} tells neither the size nor a checksum of {file.path}, so nobody "
                "could say whether it is whole; it is not fetched: try the other hub."
            )
        return
    if file.size is None or total == file.size:
        return
    raise HubError(
        f"{TITLES[job.hub]} lists {file.path} with {file.size:,} bytes and serves {total:,}; "
        "it is not fetched: try the other hub, or later."
    )


def _refused_range(job: Job, file: HubFile, have: int, reply: Any) -> None:
    """416: all of it is here already, or these bytes are not of this file."""
    found = _RANGE.fullmatch(reply.headers.get("Content-Range", "").strip())
    total = int(found[3]) if found and found[3] != "*" else None
    if total == have and file.size in (None, have):
        return
    _drop(job, file)
    raise _Again(f"the server has nothing behind byte {have:,}; starts over")


def _said_no(job: Job, file: HubFile, reply: Any) -> Exception:
    status = reply.status_code
    elsewhere = urlsplit(str(reply.url)).netloc != urlsplit(file.url).netloc
    if status in (408, 425, 429) or status >= 500 or (elsewhere and status in (401, 403)):
        # Behind a redirect, 401 and 403 mean that the signed address has expired: ask for a new one.
        after = reply.headers.get("Retry-After", "")
        return _Again(f"HTTP {status}", float(after) if after.isdecimal() else None)
    return refused(job.hub, file.path, status)
