"""Stages of a session measured by turns, with power sampled: what the commands have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkling import interleave, order, power, procs

IDLE_S = 5.0
SAMPLES = "power.jsonl"


def measure(
    session: Any,
    stages: Sequence[str],
    task: interleave.Task,
    *,
    rounds: int = 2,
    seed: int = 0,
    variant: str | None = None,
    idle_s: float = IDLE_S,
    say: Callable[[str], None] | None = None,
    sampler: power.Sampler | None = None,
) -> list[dict[str, Any]]:
    """Start every stage `rounds` times in a balanced order, prove it, measure it, prove it again.

    session: a `notebook.Session`. Everything goes into its folder of the run; a run that was cut
    short goes on where it was, in the same order. idle_s: how long a proved server is left idle
    first, for the idle floor. Raises as `interleave.measure` does.
    """
    folder: Path = session.run.folder
    plan = order.balanced(stages, rounds, seed=seed)
    session.run.update({"order": plan.to_json()})

    @contextlib.contextmanager
    def start(stage: str) -> Iterator[Any]:
        try:
            told = session.start(stage, variant=variant)
            if say:
                say(str(told))
            yield session.server
        finally:
            session.stop()

    def prove(_server: Any, when: str) -> Mapping[str, Any]:
        proof = session.prove()
        return {"when": when, "switches": {v.switch: v.state for v in proof.verdicts}}

    with sampler or power.Sampler(folder / SAMPLES):
        return interleave.measure(
            plan,
            folder,
            start=start,
            prove=prove,
            task=task,
            rest=(lambda _block: time.sleep(idle_s)) if idle_s > 0 else None,
            say=say,
        )


def energy(
    folder: Path, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[power.ArmEnergy], power.Machine]:
    """Joules per token of the rows, and the machine over the run, from what `measure` left."""
    samples = power.read(folder / SAMPLES, procs.boot_id())
    idle = interleave.idle_windows(folder, procs.boot_id())
    return power.per_arm(rows, samples, idle), power.machine(samples)
