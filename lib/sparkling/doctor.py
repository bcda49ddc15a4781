"""The doctor: what this machine has for the lane, each thing with what is needed, why, and a remedy.

It only looks: nothing is installed, dropped, freed or ended. It runs on any Linux machine and says of
each check that does not apply there why not ("n/a"). A check that cannot find something out warns and
says so; none can fail the others. Everything it looks at comes through a `Scene`, which a test can
fill. Published figures carry their source where they stand; none was measured on a Spark by us.

    doctor.run(Scene.here(lane, book))     -> Findings, which show themselves as a table
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkling import cgroup, commands, doctor_processes, machine
from sparkling import gpus as _gpus
from sparkling.commands import Ask
from sparkling.doctor_processes import Process
from sparkling.errors import SparklingError
from sparkling.lane import Lane
from sparkling.recipe import Recipe

OK, WARN, FAIL, NOT_HERE = VERDICTS = ("ok", "warn", "fail", "n/a")
ANSWERS = "have nvidia-smi answer: a driver that hangs needs a reboot"
MARKS = {OK: "✓", WARN: "!", FAIL: "✗", NOT_HERE: "–"}


@dataclass(frozen=True)
class Finding:
    """One check. `remedy` is empty where there is nothing to do."""

    id: str  # "memory.available"
    title: str
    found: str
    needed: str
    verdict: str  # one of VERDICTS
    why: str = ""
    remedy: str = ""


def ok(id: str, title: str, found: str, needed: str, why: str = "") -> Finding:
    """A finding that is as it should be."""
    return Finding(id, title, found, needed, OK, why)


def not_here(id: str, title: str, why: str) -> Finding:
    """A check that does not apply on this machine."""
    return Finding(id, title, "", "", NOT_HERE, why)


class Findings(list[Finding]):
    """What the doctor found; shows itself as a table."""

    @property
    def ok(self) -> bool:
        """True unless something fails."""
        return all(one.verdict != FAIL for one in self)

    def of(self, id: str) -> Finding:
        """The finding called `id`. Raises KeyError."""
        for one in self:
            if one.id == id:
                return one
        raise KeyError(id)

    def summary(self) -> str:
        """One line: how many of each verdict."""
        counts = {v: sum(one.verdict == v for one in self) for v in VERDICTS}
        names = {
            OK: "as needed",
            WARN: "to look at",
            FAIL: "failing",
            NOT_HERE: "not for this lane",
        }
        told = ", ".join(f"{counts[v]} {names[v]}" for v in VERDICTS if counts[v])
        return f"{len(self)} checks: {told}."

    def view(self, *, everything: bool = True) -> Any:
        """As a `show.View`; without `everything`, what is as needed or does not apply is left out."""
        from sparkling import show

        kept = [f for f in self if everything or f.verdict in (WARN, FAIL)]
        rows = [
            {
                "": MARKS[f.verdict],
                "check": f.title,
                "found": f.found if f.verdict != NOT_HERE else "does not apply",
                "needed": f.needed,
                "why, and what to do": " ".join(_sentence(p) for p in (f.why, f.remedy) if p),
            }
            for f in kept
        ]
        columns = ["", "check", "found", "needed", "why, and what to do"]
        if not rows:
            return show.note(self.summary())
        return show.table(rows, columns, title=self.summary(), width=120)

    def to_json(self) -> list[dict[str, str]]:
        """A list of checks, each with id, title, found, needed, verdict, why and remedy."""
        return [asdict(one) for one in self]

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def __str__(self) -> str:
        return str(self.view())

    __repr__ = __str__


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


# -- what it looks at ----------------------------------------------------------------------------


def _hubs() -> dict[str, float | str]:
    from sparkling import hubs

    return hubs.reachable(timeout_s=3.0)


def _token(hub: str) -> bool:
    from sparkling import hubs

    return bool(hubs.token(hub))


@dataclass
class Scene:
    """Everything a check may look at, replaceable piece by piece."""

    lane: Lane
    book: Recipe
    gpus: _gpus.Gpus
    memory: machine.Memory
    cpus: int = 1
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    ask: Ask = commands.ask
    processes: Callable[[], list[Process]] = doctor_processes.processes
    holders: Callable[[], _gpus.Holders] = _gpus.holders
    disk: Callable[[Path], machine.Disk] = machine.disk
    limits: Callable[[], dict[str, int | None]] = machine.limits
    hubs: Callable[[], dict[str, float | str]] = _hubs
    token: Callable[[str], bool] = _token

    @classmethod
    def here(cls, lane: Lane, book: Recipe) -> Scene:
        """This machine as it is. Raises SparklingError where /proc does not tell the memory."""
        seen = _gpus.look()
        memory = machine.memory(cgroup.read_text, seen)
        return cls(lane, book, seen, memory, machine.cpus())

    @property
    def spark(self) -> bool:
        """Whether the lane is a DGX Spark's."""
        return self.lane.kind == "spark"

    @property
    def gpu(self) -> bool:
        """Whether the lane needs a GPU."""
        return self.lane.kind != "cpu"


Check = Callable[[Scene], Finding | Iterable[Finding]]


def run(scene: Scene, checks: Mapping[str, Check] | None = None) -> Findings:
    """Run every check (or these), in order. A check that breaks becomes a warning of its own."""
    if checks is None:
        from sparkling import doctor_gpu, doctor_machine, doctor_software

        checks = {
            "lane": doctor_software.CHECKS["lane"],  # first
            **doctor_gpu.CHECKS,
            **doctor_machine.CHECKS,
            **doctor_software.CHECKS,
        }
    out = Findings()
    for name, check in checks.items():
        try:
            found = check(scene)
            out += [found] if isinstance(found, Finding) else list(found)
        except Exception as error:  # whatever a driver or a program answers
            known = isinstance(error, (SparklingError, OSError, ValueError))
            said = str(error) if known else f"{type(error).__name__}: {error}"
            why = "This could not be found out, which stops nobody."
            out.append(Finding(name, name, said.rstrip("."), "", WARN, why))
    return out
