"""Arms measured by turns, each start proved before and after, in files that survive a kill.

    order.json       the order of the starts and what is measured; a resumed run keeps it
    blocks.jsonl     one row for each thing that happened to a start: "begun", "proved", "rested",
                     "measured", "good" (the proof after it holds too), "kept" or "failed"
    attempts.jsonl   every row that was measured, with `block`, `round` and `attempt`
    rows.jsonl       the rows that count: those of blocks that were proved before and after

A block is one start of one arm. A block that was cut short, by a kill or by a proof that failed, is
started and measured again as the next attempt; what the cut one left stays in attempts.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sparkling import bench, procs
from sparkling.errors import SparklingError, UsageError
from sparkling.files import Journal, plain, read_json, read_rows, write_atomic
from sparkling.order import Block, Order
from sparkling.workloads import Workload, digest

Start = Callable[[str], AbstractContextManager[Any]]
"""Starts an arm; what it yields has `.launch` and `.client()` (a `server.Server`)."""
Prove = Callable[[Any, str], Mapping[str, Any]]
"""Proves a server, "before" or "after" its block; returns what to note; raises NotLive."""
Say = Callable[[str], None]


class Task(Protocol):
    """What is measured in one block."""

    def plan(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it resumes."""

    def __call__(self, server: Any, block: Block, out: Path, facts: Mapping[str, Any]) -> None:
        """Measure, and append rows that hold `facts` to `out` (JSONL)."""


@dataclass(frozen=True)
class Bench:
    """The task of asking every prompt of some workloads `per_start` times, one after the other."""

    workloads: Sequence[Workload]
    per_start: int = 1
    warmup: int = 1
    stall_s: float = 120.0
    progress: bench.Progress | None = None

    def plan(self) -> dict[str, Any]:
        return {"per_start": self.per_start, "workloads": plan_of(self.workloads)}

    def __call__(self, server: Any, block: Block, out: Path, facts: Mapping[str, Any]) -> None:
        bench.run(
            server,
            arm=block.arm,
            launch=server.launch,
            workloads=self.workloads,
            repeats=range(block.round * self.per_start, (block.round + 1) * self.per_start),
            out=out,
            warmup=self.warmup,
            stall_s=self.stall_s,
            progress=self.progress,
            facts=facts,
        )


def plan_of(workloads: Sequence[Workload]) -> dict[str, Any]:
    """Settings and a hash of the prompts of each workload."""
    return {
        w.name: {**w.settings(), "prompts": digest([p.__dict__ for p in w.prompts])}
        for w in workloads
    }


def measure(
    order: Order,
    folder: Path,
    *,
    start: Start,
    prove: Prove,
    task: Task,
    rest: Callable[[Block], None] | None = None,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """Measure every block that is not kept yet; return the rows that count.

    `rest` is called between the first proof and the first request, with the server idle.

    Raises UsageError when `folder` holds another measurement, NotLive when a proof fails (the
    block's rows do not count) and what the task raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _same_plan(folder, {**order.to_json(), **task.plan()})
    with Journal(folder / "blocks.jsonl") as journal:
        events = list(journal.rows)

        def note(block: Block, attempt: int, event: str, **more: Any) -> None:
            row = {
                "block": block.index,
                "round": block.round,
                "arm": block.arm,
                "attempt": attempt,
                "event": event,
                "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "at_s": time.monotonic(),
                **more,
            }
            journal.append(row)
            events.append(row)

        for block in order:
            mine = [e for e in events if e["block"] == block.index]
            good = [e["attempt"] for e in mine if e["event"] == "good"]
            if good:
                if not any(e["event"] == "kept" for e in mine):
                    _keep(folder, block, good[0])
                    note(block, good[0], "kept")
                continue
            attempt = 1 + max((e["attempt"] for e in mine), default=-1)
            note(block, attempt, "begun", boot=procs.boot_id())
            if say:
                say(
                    f"{block.index + 1} of {len(order.blocks)}: {block.arm}, round {block.round + 1}"
                )
            try:
                with start(block.arm) as server:
                    note(block, attempt, "proved", **prove(server, "before"))
                    if rest is not None:
                        rest(block)
                        note(block, attempt, "rested")
                    facts = {"block": block.index, "round": block.round, "attempt": attempt}
                    task(server, block, folder / "attempts.jsonl", facts)
                    note(block, attempt, "measured")
                    note(block, attempt, "good", **prove(server, "after"))
            except SparklingError as error:
                note(block, attempt, "failed", problem=str(error))
                raise
            _keep(folder, block, attempt)
            note(block, attempt, "kept")
    return read_rows(folder / "rows.jsonl")


def _keep(folder: Path, block: Block, attempt: int) -> None:
    """Put the rows of a good block among those that count, each once however often this is cut."""
    measured = read_rows(folder / "attempts.jsonl")
    mine = [r for r in measured if (r["block"], r["attempt"]) == (block.index, attempt)]
    with Journal(folder / "rows.jsonl") as journal:
        there = {digest(r) for r in journal.rows}
        for row in mine:
            if digest(row) not in there:
                journal.append(row)


def read(folder: Path) -> tuple[Order, list[dict[str, Any]], int]:
    """(order, the rows that count, how many rows do not) of a measurement on the disk.

    Raises UsageError when there is none.
    """
    try:
        order = Order.from_json(read_json(folder / "order.json"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} holds no interleaved measurement (there is no order.json in it)."
        ) from None
    rows = read_rows(folder / "rows.jsonl")
    return order, rows, len(read_rows(folder / "attempts.jsonl")) - len(rows)


def idle_windows(folder: Path, boot: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """When each arm's server was loaded and idle (monotonic seconds), from "proved" to "rested".
    boot: only of blocks begun since that boot of the machine."""
    out: dict[str, list[tuple[float, float]]] = {}
    proved: dict[Any, float] = {}
    boots: dict[Any, str] = {}
    for event in read_rows(folder / "blocks.jsonl"):
        key = (event["block"], event["attempt"])
        if event["event"] == "begun":
            boots[key] = event.get("boot", "")
        elif event["event"] == "proved":
            proved[key] = event["at_s"]
        elif event["event"] == "rested" and boot in (None, boots.get(key)):
            out.setdefault(event["arm"], []).append((proved[key], event["at_s"]))
    return out


def _same_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan down, or refuse to go on under another one."""
    plan = plain(plan)
    path = folder / "order.json"
    try:
        old = read_json(path)
    except FileNotFoundError:
        write_atomic(path, json.dumps(plan, indent=1) + "\n")
        return
    for key in sorted(plan.keys() | old.keys()):
        a, b = old.get(key), plan.get(key)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            key = f"settings or prompts of {next(k for k in a if a[k] != b[k])}"
            a = b = None
        which = f" ({_short(a)} then, {_short(b)} now)" if a != b else ""
        raise UsageError(
            f"{folder} was measured with other {key}{which}; resume with the same, or use a new run."
        )


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        value = list(value)
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
