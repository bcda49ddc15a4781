"""A server that another process of ours serves: remembered by `sparkling serve`, found by others.

What is written down is the launch and the identity of the process, never the API key.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import log as _log
from sparkling import procs
from sparkling.errors import UsageError
from sparkling.files import write_atomic
from sparkling.recipe import Launch

if TYPE_CHECKING:
    from sparkling.client import Client
    from sparkling.server import Server

FOLDER = "serve"


@dataclass(frozen=True)
class Served:
    """A running server of another process: to be asked and proved, not to be stopped, from here."""

    launch: Launch
    identity: procs.Identity
    log: Path
    offset: int
    started: float
    status_file: Path
    api_key: str | None = None

    @property
    def port(self) -> int:
        return self.launch.port

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def url(self) -> str:
        return f"http://{self.launch.host}:{self.port}"

    def alive(self) -> bool:
        """Whether it is still that process, by start time and boot too, that runs."""
        return procs.is_alive(self.identity)

    def events(self) -> list[_log.Event]:
        """The typed log events of its start."""
        return list(_log.parse(self.log, offset=self.offset)) if self.log.exists() else []

    def client(self, **settings: Any) -> Client:
        """A client for it."""
        from sparkling.client import Client

        return Client(self.url, api_key=self.api_key, **settings)

    def __repr__(self) -> str:
        return f"<Served {self.launch.stage} on {self.url}, pid {self.pid}>"


@contextlib.contextmanager
def remembered(server: Server, runs: Path) -> Iterator[Path]:
    """Write down a running server under `runs` while the block lasts."""
    identity = procs.identify(server.pid)
    path = runs / FOLDER / f"{server.port}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {
        "launch": server.launch.to_json(),
        "identity": identity.to_json() if identity else None,
        "log": str(server.log),
        "offset": server.offset,
        "started": server.started,
        "status_file": str(server.status_file),
    }
    write_atomic(path, json.dumps(note, indent=2) + "\n")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def served(runs: Path, *, api_key: str | None = None) -> list[Served]:
    """Every server remembered under `runs` that still runs, by port. Stale notes are removed."""
    found = []
    for path in (runs / FOLDER).glob("*.json"):
        if not path.stem.isdigit():
            continue  # a status file, beside its log
        try:
            note = json.loads(path.read_text("utf-8"))
            identity = procs.Identity.from_json(note["identity"])
            one = Served(
                launch=Launch.from_json(note["launch"]),
                identity=identity,  # type: ignore[arg-type]
                log=Path(note["log"]),
                offset=int(note["offset"]),
                started=float(note["started"]),
                status_file=Path(note["status_file"]),
                api_key=api_key,
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if identity is not None and one.alive():
            found.append(one)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda one: one.port)


def find(runs: Path, port: int | None = None) -> Served:
    """The one server that `sparkling serve` runs, or the one on `port`.

    The API key is read from SPARKLING_API_KEY. Raises UsageError when there is none, or several
    and no port to choose by.
    """
    every = served(runs, api_key=os.environ.get("SPARKLING_API_KEY") or None)
    chosen = [one for one in every if port in (None, one.port)]
    ports = ", ".join(str(one.port) for one in every)
    if not chosen:
        where = f" on port {port}" if port is not None else ""
        there = f" (there is one on {ports})" if every else ""
        raise UsageError(
            f"`sparkling serve` runs no server{where}{there}; start one, or name a stage."
        )
    if len(chosen) > 1:
        raise UsageError(f"There are servers on ports {ports}; choose one with --port.")
    return chosen[0]
