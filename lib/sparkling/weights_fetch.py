"""A checkpoint from a hub: listed once, fetched in parallel, hashed, checked, signed off last.

Stopping it in any way loses nothing that arrived; running it again asks for the rest only. The
manifest is written when every file is here and hashed, so its presence means that the download
ended, and a folder without one is not complete. One process at a time fetches into a folder.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkling import hubs, weights_manifest, weights_orphans
from sparkling.errors import SparklingError, UsageError
from sparkling.files import Journal, absolute, os_error
from sparkling.hubs import HubRefusal, Listing, gb
from sparkling.live import clock
from sparkling.weightcheck import MANIFEST
from sparkling.weights_manifest import Manifest, Row
from sparkling.weights_plan import DONE, WORK, Plan, Step, known_rows, part_of, plan
from sparkling.weights_stream import Cancelled, DiskFull, Job, obtain

JOBS = 4
MOST_JOBS = 16
RATE_WINDOW_S = 10.0
CONNECT_S, READ_S = 20.0, 60.0


@dataclass(frozen=True)
class Progress:
    """One moment of a download. rate: bytes/s over the last 10 s; left_s: seconds, at that rate."""

    done: int
    total: int
    fetched: int
    rate: float | None
    left_s: float | None
    active: tuple[tuple[str, str, int, int | None], ...]  # path, what, bytes here, size

    def __str__(self) -> str:
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        rate = f"{gb(self.rate)}/s" if self.rate else "no bytes yet"
        left = f", {clock(self.left_s)} left" if self.left_s is not None else ""
        return f"{gb(self.done)} of {gb(self.total)}{share} · {rate}{left}"

    def rows(self) -> list[dict[str, str]]:
        """The files that are worked on, for a live table."""
        return [
            {"file": path, "": what, "here": gb(here), "of": gb(size)}
            for path, what, here, size in self.active
        ]


@dataclass(frozen=True, repr=False)
class Fetched:
    """What a download did. fetched: bytes that came over the network now."""

    folder: Path
    listing: Listing
    fetched: int
    kept: int
    seconds: float
    files: int
    compared: int
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        rate = f" at {gb(self.fetched / self.seconds)}/s" if self.fetched and self.seconds else ""
        depth = (
            "every file equals the hub's checksum"
            if self.compared == self.files
            else f"{self.compared} of {self.files} files equal the hub's checksum, for the others "
            "it gives none"
        )
        lines = (
            f"{self.listing}.",
            f"{self.folder} is complete: {gb(self.fetched)} fetched in {clock(self.seconds)}{rate}, "
            f"{gb(self.kept)} were here already; {depth}.",
            *self.notes,
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from sparkling import show

        return show.note(str(self).replace("\n", " "))._repr_html_()

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "repo": self.listing.repo,
            "hub": self.listing.hub,
            "commit": self.listing.commit,
            "files": self.files,
            "compared": self.compared,
            "fetched": self.fetched,
            "kept": self.kept,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def possible(folder: Path, jobs: int) -> None:
    """Raise UsageError for what no hub need be asked about: the job count, a file for a folder."""
    if not 1 <= jobs <= MOST_JOBS:
        raise UsageError(
            f"{jobs} files at a time are not possible; give 1 to {MOST_JOBS} (--jobs)."
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give the folder that the checkpoint is to lie in.")


def fetch(
    listing: Listing,
    folder: Path | str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int = JOBS,
    progress: Callable[[Progress], None] | None = None,
    interval_s: float = 0.5,
    backoff_s: float = 1.0,
) -> Fetched:
    """Bring a listed repository into `folder`, or finish what is there; write the manifest last.

    jobs: files at a time (1 to 16); progress: called every `interval_s` in the calling thread.
    Raises UsageError (full disk foreseen, folder in use), HubRefusal, HubError, SparklingError.
    """
    place = absolute(folder)
    possible(place, jobs)
    first = plan(listing, place, include=include, exclude=exclude)
    first.require_disk()
    try:
        (place / WORK).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(error, "making", place / WORK) from error
    began = time.monotonic()
    with Journal(place / WORK / DONE) as journal:  # held by one process at a time
        made = plan(listing, place, include=include, exclude=exclude)
        made.require_disk()
        download = _Download(made, journal, jobs, progress, interval_s, backoff_s)
        download.prepare()
        rows = download.run()
        manifest = _manifest(made, {**_beside(made), **rows})
        weights_manifest.write(place, manifest)
        notes = [*download.notes, *_strangers(made)]
    shutil.rmtree(place / WORK, ignore_errors=True)
    return Fetched(
        folder=place,
        listing=listing,
        fetched=download.fetched,
        kept=sum(step.have for step in made.steps),
        seconds=time.monotonic() - began,
        files=len(rows),
        compared=manifest.compared,
        notes=tuple(notes),
    )


def _beside(made: Plan) -> dict[str, Row]:
    """Files of this commit that were left out this time and are here, hashed, from another."""
    known = known_rows(made.folder)
    found = {}
    for file in made.listing.files:
        row = known.get(file.path)
        if file.path not in made.excluded or row is None:
            continue
        if row.untouched(made.folder) and row.is_file(file, made.listing.commit):
            found[file.path] = row
    return found


def _manifest(made: Plan, rows: dict[str, Row]) -> Manifest:
    listing = made.listing
    about = {
        "format": weights_manifest.FORMAT,
        "what": f"{listing.repo} from {hubs.TITLES[listing.hub]}",
        "repo": listing.repo,
        "hub": listing.hub,
        "revision": listing.asked,
        "commit": listing.commit,
        "excluded": [path for path in made.excluded if path not in rows],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return Manifest(about, rows)


def _strangers(made: Plan) -> list[str]:
    """Weight files beside those of this commit: nobody reads them, and they take space."""
    known = {step.file.path for step in made.steps}
    others = [p.name for p in sorted(made.folder.glob("*.safetensors")) if p.name not in known]
    if not others:
        return []
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [f"Not of this commit, left alone: {', '.join(others[:3])}{more}."]


class _Download:
    """The threads of one download, and what they count."""

    def __init__(
        self,
        made: Plan,
        journal: Journal,
        jobs: int,
        progress: Callable[[Progress], None] | None,
        interval_s: float,
        backoff_s: float,
    ) -> None:
        self.made, self.journal, self.jobs = made, journal, jobs
        self.progress, self.interval_s = progress, interval_s
        self.notes: list[str] = []
        self.fetched = 0
        self.rows: dict[str, Row] = {}
        self.failures: list[SparklingError] = []
        self.unforeseen: BaseException | None = None
        self._lock = threading.Lock()
        self._here = {step.file.path: step.have for step in made.steps}
        self._doing: dict[str, str] = {}
        self._rates: deque[tuple[float, int]] = deque()
        self._job = Job(
            hub=made.listing.hub,
            folder=made.folder,
            commit=made.listing.commit,
            http=None,
            headers={},
            backoff_s=backoff_s,
            on_bytes=self._bytes,
            on_state=self._state,
            on_note=self.notes.append,
        )

    def prepare(self) -> None:
        """Say and remove what nothing goes on with; take the manifest away if anything changes."""
        left = weights_orphans.ours(self.made.folder, self.made.steps)
        parts = [orphan for orphan in left if orphan.path.suffix == ".part"]
        freed = weights_orphans.clean(left)
        if parts:
            self.notes.append(
                f"Removed {len(parts)} partial file{'s' if len(parts) > 1 else ''} of earlier tries "
                f"that nothing could go on with ({gb(freed)})."
            )
        manifest = self.made.folder / MANIFEST
        if manifest.exists() and not self.made.nothing_to_do:
            with contextlib.suppress(SparklingError):  # a broken one has no rows to save
                for row in known_rows(self.made.folder).values():
                    self.journal.append(row.__dict__)
            manifest.unlink()

    def run(self) -> dict[str, Row]:
        """Work off every step; the rows of all files. Raises the first failure."""
        todo: queue.SimpleQueue[Step] = queue.SimpleQueue()
        for step in self.made.steps:
            if step.action == "keep" and step.row is not None:
                self.rows[step.file.path] = step.row
            else:
                todo.put(step)
        if not todo.empty():
            import httpx

            timeout = httpx.Timeout(READ_S, connect=CONNECT_S, pool=None)
            limits = httpx.Limits(max_connections=2 * self.jobs)
            with hubs.client(timeout=timeout, limits=limits) as http:
                self._job.http, self._job.headers = http, hubs.headers(self._job.hub)
                self._work(todo)
        self._raise()
        return self.rows

    def _work(self, todo: queue.SimpleQueue[Step]) -> None:
        threads = [
            threading.Thread(target=self._thread, args=(todo,), daemon=True)
            for _ in range(min(self.jobs, todo.qsize()))
        ]
        for thread in threads:
            thread.start()
        try:
            shown = float("-inf")
            while alive := [thread for thread in threads if thread.is_alive()]:
                alive[0].join(0.05)
                if time.monotonic() - shown >= self.interval_s:
                    shown = time.monotonic()
                    self._tell()
            self._tell()
        except BaseException:
            self._job.cancel.set()
            self._job.http.close()  # ends reads that wait for bytes
            for thread in threads:
                thread.join(2)
            raise

    def _thread(self, todo: queue.SimpleQueue[Step]) -> None:
        while not self._job.cancel.is_set():
            try:
                step = todo.get_nowait()
            except queue.Empty:
                return
            try:
                row = obtain(self._job, step)
                with self._lock:
                    self.journal.append(row.__dict__)
                    self.rows[step.file.path] = row
                    self._here[step.file.path] = row.size
            except Cancelled:
                return
            except SparklingError as error:
                with self._lock:
                    self.failures.append(error)
                if isinstance(error, DiskFull):
                    self._job.cancel.set()
            except BaseException as error:  # a fault of ours: raised in the calling thread
                self.unforeseen = error
                self._job.cancel.set()
            finally:
                with self._lock:
                    self._doing.pop(step.file.path, None)

    def _raise(self) -> None:
        if self.unforeseen is not None:
            raise self.unforeseen
        if not self.failures:
            return
        # A full disk explains the others; a refusal is something the user can act on.
        order = sorted(
            self.failures,
            key=lambda e: (not isinstance(e, DiskFull), not isinstance(e, HubRefusal)),
        )
        first, count, total = order[0], len(self.rows), len(self.made.steps)
        also = f" {len(order) - 1} more failed." if len(order) > 1 else ""
        said = f"{first}{also} {count} of {total} files are complete; run it again for the rest."
        kind = type(first) if isinstance(first, UsageError) else SparklingError
        raise kind(said)

    # -- counting --------------------------------------------------------------------------------

    def _bytes(self, path: str, count: int) -> None:
        with self._lock:
            self.fetched += count
            self._here[path] = self._here.get(path, 0) + count

    def _state(self, path: str, what: str) -> None:
        with self._lock:
            self._doing[path] = what
            if what == "fetching":
                with contextlib.suppress(OSError):
                    self._here[path] = 0
                    self._here[path] = part_of(self.made.folder, path).stat().st_size

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.moment(time.monotonic()))

    def moment(self, now: float) -> Progress:
        """The progress at a moment of the monotonic clock."""
        sizes = {step.file.path: step.file.size for step in self.made.steps}
        with self._lock:
            here, fetched = dict(self._here), self.fetched
            doing = sorted(self._doing.items())
        self._rates.append((now, fetched))
        while len(self._rates) > 2 and now - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()
        then, before = self._rates[0]
        span = now - then
        rate = (fetched - before) / span if span > 0 and fetched > before else None
        done, total = sum(here.values()), sum(size or 0 for size in sizes.values())
        left = max(0, total - done)
        return Progress(
            done=done,
            total=total,
            fetched=fetched,
            rate=rate,
            left_s=left / rate if rate else None,
            active=tuple((p, what, here.get(p, 0), sizes.get(p)) for p, what in doing),
        )
