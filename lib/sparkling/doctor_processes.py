"""Who holds memory: processes with their size and command, from /proc. Looked at, never ended."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkling import procs, redact

ENGINES = (
    "sglang",
    "vllm",
    "llama-server",
    "llama_server",
    "ollama",
    "trtllm",
    "text-generation",
    "lmdeploy",
    "tritonserver",
    "mlc_llm",
)
"""Words in a command line that mean "a model server"."""


@dataclass(frozen=True)
class Process:
    """One process. `resident` is bytes of ordinary memory; what it holds on a GPU is not in it."""

    pid: int
    name: str
    command: str  # secrets masked
    resident: int
    parent: int = 0
    group: int = 0

    @property
    def engine(self) -> str | None:
        """Which model server it looks like, None if none."""
        words = f"{self.name} {self.command}".lower()
        return next((word for word in ENGINES if word in words), None)


def processes() -> list[Process]:
    """Every process of this machine, as far as /proc shows it."""
    page = os.sysconf("SC_PAGE_SIZE")
    found = []
    for pid, stat in procs.table().items():
        if stat.dead or pid == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            told = " ".join(word.decode("utf-8", "replace") for word in words if word)
            command = redact.mask_text(told)
            found.append(Process(pid, stat.name, command, resident, stat.ppid, stat.pgrp))
    return found


def ours(runs: Path) -> dict[int, int]:
    """Main processes of servers recorded under `runs` that still run: pid → port."""
    found = {}
    for path in sorted((runs / ".servers").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text("utf-8"))
            who = procs.Identity.from_json(record["server"])
            if who is not None and procs.is_alive(who):
                found[who.pid] = int(record.get("port") or 0)
    return found


def family(root: int, everyone: Iterable[Process]) -> list[Process]:
    """A process and everything below it."""
    children: dict[int, list[Process]] = {}
    for one in everyone:
        children.setdefault(one.parent, []).append(one)
    found, queue = [one for one in everyone if one.pid == root], [root]
    while queue:
        below = children.pop(queue.pop(), [])
        found += below
        queue += [one.pid for one in below]
    return found


@dataclass(frozen=True)
class Holder:
    """A server, or anything large: `held` bytes in all its processes, on a GPU `on_gpu` besides
    (None: it is there, and the driver does not say how much)."""

    what: str
    pid: int
    held: int
    on_gpu: int | None = 0
    port: int | None = None  # of a server of ours


def holders(
    everyone: list[Process],
    own: Mapping[int, int],
    on_gpu: Mapping[int, int | None],
    least: int,
) -> list[Holder]:
    """Servers and whatever else holds `least` bytes or computes on a GPU, the largest first."""
    found, seen = [], set()
    for pid, port in own.items():
        members = family(pid, everyone)
        seen |= {one.pid for one in members}
        amounts = [on_gpu[one.pid] for one in members if one.pid in on_gpu]
        total = None if None in amounts else sum(a for a in amounts if a)
        found.append(Holder("our server", pid, sum(m.resident for m in members), total, port))
    for one in everyone:
        if one.pid in seen:
            continue
        here = on_gpu.get(one.pid, 0)
        if one.resident >= least or one.pid in on_gpu:
            found.append(Holder(one.engine or one.name, one.pid, one.resident, here))
    return sorted(found, key=lambda h: -(h.held + (h.on_gpu or 0)))
