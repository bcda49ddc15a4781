"""The ordered notebooks under papermill: parameters, resume, timings, and an exit code that is true.

Each notebook runs in a child process (`suite_child`) that dies with this one. Everything a run
leaves is in `runs/<run id>/`: `notebooks/` (executed), `timings.json`, `report.html`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkling import card, needs, recipe, store
from sparkling._toml import closest
from sparkling.errors import SparklingError, UsageError
from sparkling.lane import Lane
from sparkling.params import assign, defaults_of, load_notebook
from sparkling.suite_result import CellTime, NotebookResult, SuiteResult
from sparkling.suite_run import Pass, Progress
from sparkling.tidy import leaks

CELL_S = 600.0
"""Seconds a cell may take where the recipe does not say."""


def ordered(folder: Path) -> list[Path]:
    """The numbered notebooks of a folder, in order, then its appendices."""
    return [*sorted(folder.glob("[0-9][0-9]_*.ipynb")), *sorted(folder.glob("appendix_*.ipynb"))]


def choose(folder: Path, names: Sequence[str] | None) -> list[Path]:
    """The notebooks to run, in the suite's order. Raises UsageError for an unknown name."""
    every = {p.stem: p for p in sorted(folder.glob("*.ipynb"))}
    if not names:
        chosen = ordered(folder)
        if not chosen:
            raise UsageError(
                f"There are no notebooks in {folder}; run this in a Sparkling checkout."
            )
        return chosen
    for name in names:
        if name.removesuffix(".ipynb") not in every:
            hint = closest(name, every) or f"; there are {', '.join(every)}"
            raise UsageError(f"There is no notebook {name!r}{hint}.")
    wanted = {n.removesuffix(".ipynb") for n in names}
    return [p for stem, p in every.items() if stem in wanted]


def in_turn(
    lane: Lane, chosen: Sequence[Path], cards: Mapping[str, card.Card], brings: str = "20_weights"
) -> list[Path]:
    """`chosen`, but what asks a model before the notebook that brings it comes last, where a GPU's
    lane has no checkpoint yet."""
    early = [
        path
        for path in chosen
        if path.stem < brings and path.stem in cards and "checkpoint" in cards[path.stem].needs
    ]
    fetched = lane.kind != "cpu" and any(path.stem == brings for path in chosen)
    if not early or not fetched or needs.check(["checkpoint"], lane).ok:
        return list(chosen)
    return [path for path in chosen if path not in early] + early


def run_suite(
    lane: Lane,
    *,
    notebooks: Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    run_id: str | None = None,
    resume: bool = False,
    cell_timeout_s: float | None = None,
    progress: Progress | None = print,
    record_minutes: bool = False,
    folder: Path | None = None,
) -> SuiteResult:
    """Run the notebooks in order and write timings and report; never raises for a failing notebook.

    resume: continue `run_id`, or the newest run of this lane, with the notebooks and parameters
    that it recorded where none are given; notebooks that are done and whose source and parameters
    are unchanged are kept. record_minutes: write the measured minutes of
    this lane to `notebooks/minutes.json`. Raises UsageError for a wrong request, before anything
    is started, and SparklingError when the run is being executed by another suite.
    """
    folder = folder or lane.root / "notebooks"
    run_id = run_id or (_resumable(lane.runs, lane.kind) if resume else None)
    if resume and run_id and not (lane.runs / run_id).is_dir():
        raise UsageError(f"There is no run {run_id!r} in {lane.runs} to continue.")
    names, before = _asked(lane.runs / run_id) if resume and run_id else (None, {})
    chosen = choose(folder, notebooks or names)
    sources = {p.stem: load_notebook(p) for p in chosen}
    text = card.load(folder)
    chosen = in_turn(lane, chosen, text)
    declared = {p.stem: defaults_of(sources[p.stem], p.name) for p in chosen}
    known = {name for defaults in declared.values() for name in defaults}
    values = {k: v for k, v in before.items() if k in known} | dict(params or {})
    given = assign(declared, values, {"lane": lane.kind})  # refuse before a run exists
    run = store.open_run(lane.runs, run_id)
    for name, defaults in declared.items():
        if "run_id" in defaults:
            given[name]["run_id"] = run.id
    suite = Pass(
        lane,
        run.dir,
        chosen,
        sources,
        given,
        text,
        cell_timeout_s or _cell_limit(lane),
        progress or (lambda _line: None),
        {"notebooks": [p.stem for p in chosen] if notebooks or names else None, "params": values},
    )
    if resume and run_id:
        suite.progress(_continuing(run.id, (names, before), (notebooks, params or {})))
    with _sole(run.dir):
        result = suite.run(keep=resume)
    if record_minutes:
        done = {n.name: n.seconds for n in result.notebooks if n.verdict == "ok"}
        card.record_minutes(folder, lane.kind, done)
    return result


def _cell_limit(lane: Lane) -> float:
    book = recipe.load(lane.recipe_path, root=lane.root)
    return float(book.timeouts.get("cell_s", CELL_S))


def _resumable(runs: Path, lane: str) -> str | None:
    """The newest run of this lane that a suite has begun."""
    for path in sorted(runs.glob("*/timings.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(path.read_text("utf-8"))["lane"] == lane:
                return path.parent.name
    return None


def _asked(run_dir: Path) -> tuple[list[str] | None, dict[str, Any]]:
    """The notebooks (None: all) and parameters that a run recorded when it began."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        asked = json.loads((run_dir / "timings.json").read_text("utf-8"))["asked"]
        return asked["notebooks"], dict(asked["params"])
    return None, {}


def _continuing(
    run_id: str,
    recorded: tuple[Sequence[str] | None, Mapping[str, Any]],
    now: tuple[Sequence[str] | None, Mapping[str, Any]],
) -> str:
    """One line: what a resumed run takes from its record, and what is given now instead."""

    def words(names: Sequence[str] | None, params: Mapping[str, Any]) -> list[str]:
        return [*(names or ()), *(f"{k}={v}" for k, v in params.items())]

    text = f"Continuing run {run_id}, which began with "
    text += ", ".join(words(recorded[0] or ["all notebooks"], recorded[1]))
    instead = words(*now)
    return text + (f"; given now instead: {', '.join(instead)}" if instead else "")


@contextlib.contextmanager
def _sole(run_dir: Path) -> Iterator[None]:
    """Only one suite works in a run folder; the lock goes with the process."""
    with open(run_dir / "suite.lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SparklingError(
                f"Run {run_dir.name} is being executed by another suite; wait for it, or start "
                "a new run (leave out --resume and --run)."
            ) from None
        yield


__all__ = [
    "CellTime",
    "NotebookResult",
    "SuiteResult",
    "choose",
    "leaks",
    "ordered",
    "run_suite",
]
