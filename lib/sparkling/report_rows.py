"""What a run holds to report of: its measured rows, by notebook and kind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparkling.errors import UsageError
from sparkling.files import read_rows
from sparkling.store import Run

ROWS = "rows"
"""Name of the file of measured rows in a notebook's run folder (`rows.jsonl`)."""
SAMPLES = "power.jsonl"
EVENTS = "memory-events.jsonl"


def kind_of(row: Mapping[str, Any]) -> str | None:
    """ "evaluation" for a row about one question, "bench" for a request measured alone, "users" for
    one among others, else None."""
    # "false" would count as right, and what is no name cannot be paired.
    if row.get("correct") in (True, False) and isinstance(row.get("id"), str | int):
        return "evaluation"
    if "arm_hash" in row and "workload" in row and "prompt" in row:
        return "users" if "users" in row else "bench"
    return None


def ladder_rows(run: Run) -> list[dict[str, Any]]:
    """The rows to make the run's ladder of: those of the notebook that measured most arms, since
    arms measured one after the other compare best; else all rows of the run."""
    best: list[dict[str, Any]] = []
    most = 1
    for folder in sorted(p for p in run.dir.iterdir() if p.is_dir()):
        rows = _alone(run.rows(ROWS, notebook=folder.name))
        arms = len({r.get("arm") for r in rows})
        if arms >= most and arms > 1:
            best, most = rows, arms
    return best or _alone(run.all_rows(ROWS))


def _alone(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without requests that ran beside others, which have no place on a ladder."""
    return [r for r in rows if "users" not in r]


def evaluations(folder: Path) -> dict[Path, list[dict[str, Any]]]:
    """The evaluation files of a run's folder (`<notebook>/*.jsonl` whose rows are about questions)
    with their rows."""
    found = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        # Questions that failed and were asked again are kept in `<task>.errors.jsonl`.
        if path.name == f"{ROWS}.jsonl" or path.name.endswith(".errors.jsonl"):
            continue
        if not _first_is(path, "evaluation"):
            continue
        found[path] = [r for r in read_rows(path) if kind_of(r) == "evaluation"]
    return found


def _first_is(path: Path, kind: str) -> bool:
    """Whether the first row is of a kind; a long file of samples is not read for that."""
    with path.open("rb") as file:
        line = file.readline()
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        return isinstance(row, dict) and kind_of(row) == kind
    return False


def machine_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The machine that rows were measured on, in a few words."""
    here = next((r["machine"] for r in rows if r.get("machine")), {})
    gpus = ", ".join(here.get("gpus") or ())
    cpu = f"{here.get('cpus', '?')} CPUs ({here.get('cpu', here.get('arch', '?'))})"
    return f"{gpus}; {cpu}" if gpus else cpu


def find(text: str, runs: Path) -> Path:
    """The folder of a run, given as a path or as an id. UsageError when there is none."""
    for folder in (runs / text, Path(text)):
        if (folder / "manifest.json").is_file():
            return folder
    raise UsageError(f"There is no run {text!r} in {runs}.")
