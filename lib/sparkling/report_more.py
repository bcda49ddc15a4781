"""The parts of a report that only some runs have: factorial, drafts, users at once, energy, redo."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkling import (
    ablation as factorial,
)
from sparkling import (
    acceptance,
    break_even,
    concurrency,
    interleave,
    memwatch,
    power,
    show,
    show_bench,
)
from sparkling.errors import SparklingError
from sparkling.files import read_json, read_rows
from sparkling.report_page import heading
from sparkling.report_rows import EVENTS, SAMPLES, kind_of
from sparkling.report_sections import Measured, base_of
from sparkling.show import View
from sparkling.store import Run


def ablation(m: Measured) -> View | None:
    """Main effects and interactions, where a folder of the run holds a full factorial."""
    view = View("", "")
    for folder in _turns(m.run):
        rows = [r for r in read_rows(folder / "rows.jsonl") if kind_of(r) == "bench"]
        base = base_of(rows)
        names = list(dict.fromkeys(r["arm"] for r in rows))
        switches = [n.removeprefix(f"{base}+") for n in names if n.startswith(f"{base}+")]
        switches = [s for s in switches if "+" not in s]
        if len(switches) > 1 and len(names) == 2 ** len(switches):
            view += show_bench.ablation(factorial.ablation(rows, switches, baseline=base))
    return view if view.html else None


def drafts(m: Measured) -> View | None:
    """Accept length by workload with its histogram, where an arm speculated."""
    found = acceptance.acceptance(m.rows)
    return show_bench.acceptance(found) if found else None


def users(m: Measured) -> View | None:
    """Several users at once, and where speculation stops paying, where that was measured."""
    view = View("", "")
    for folder in _turns(m.run):
        rows = [r for r in read_rows(folder / "rows.jsonl") if kind_of(r) == "users"]
        arms = list(dict.fromkeys(r["arm"] for r in rows))
        if not rows:
            continue
        plan = read_json(folder / "order.json")
        named = [a for a in plan.get("arms", arms) if a in arms]
        pays = break_even.pays(rows, named[0], named[1]) if len(named) == 2 else None
        view += show_bench.concurrency(concurrency.levels(rows), pays)
    return view if view.html else None


def _turns(run: Run) -> Iterator[Path]:
    """The folders in which arms were measured by turns."""
    for plan in sorted(run.dir.glob("*/order.json")):
        yield plan.parent


def energy(m: Measured) -> View | None:
    """Joules per token and the machine's state, where they were sampled; memory events."""
    view = View("", "")
    for path in _each(m.run, SAMPLES):
        boots = [r.get("boot") for r in read_rows(path) if "head" in r]
        boot = boots[-1] if boots else None  # stamps of two boots do not compare
        samples = power.read(path, boot)
        rows = [r for r in read_rows(path.parent / "rows.jsonl") if kind_of(r) == "bench"]
        idle = interleave.idle_windows(path.parent, boot)
        missing = [w for r in read_rows(path) if "head" in r for w in r.get("missing") or ()]
        found = power.per_arm(rows, samples, idle)
        made = show_bench.energy(found, power.machine(samples), list(dict.fromkeys(missing)))
        view += heading(path.parent.name) + made
    events = [e for path in _each(m.run, EVENTS) for e in read_rows(path)]
    if events:
        told = [
            {"what": e.get("level"), "said": memwatch.sentence(e), "time": _clock(e.get("time"))}
            for e in events
        ]
        view += show.table(told, title="Memory: warnings, and servers that were ended in time")
    return view if view.html else None


def _clock(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float):
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _each(run: Run, name: str) -> list[Path]:
    return sorted([*run.dir.glob(name), *run.dir.glob(f"*/{name}")])


# -- doing it again ------------------------------------------------------------------------------


def redo(run: Run, timings: Mapping[str, Any]) -> View:
    """The commands that make this run again, from its manifest."""
    manifest = run.manifest
    git = manifest.get("git") or {}
    lane = f" --lane {manifest['lane']}" if manifest.get("lane") else ""
    name = (manifest.get("recipe") or {}).get("name")
    recipe = f" --recipe {shlex.quote(str(name))}" if name else ""
    lines = []
    if git.get("commit"):
        dirty = "   # and changes that were not committed" if git.get("dirty") else ""
        lines.append(f"git checkout {git['commit']}{dirty}")
    lines.append("./scripts/setup.sh")
    if manifest.get("lane") not in (None, "cpu"):
        built = (manifest.get("recipe") or {}).get("edition")
        edition = f" --edition {shlex.quote(str(built))}" if built else ""
        lines.append(f".venv/bin/sparkling setup{lane}{recipe}{edition}")
    books = manifest.get("notebooks") or {}
    params: dict[str, Any] = dict(manifest.get("params") or {})
    for entry in books.values():
        params |= entry.get("params") or {}
    given = "".join(f" -p {k}={shlex.quote(str(v))}" for k, v in params.items())
    if timings:
        chosen = "".join(f" --notebook {n}" for n in sorted(books)) if len(books) < 8 else ""
        lines.append(f".venv/bin/sparkling suite{lane}{recipe}{chosen}{given}")
    if "eval" in books:
        arms = " ".join((manifest.get("evaluations") or {}).keys())
        said = {e.get("settings") for e in (manifest.get("evaluations") or {}).values()} - {None}
        note = f"   # {'; '.join(sorted(said))}" if said else ""
        lines.append(f".venv/bin/sparkling eval {arms}{lane}{recipe}{note}".replace("  --", " --"))
    order = manifest.get("order") or {}
    turns = "".join(f" --{k} {order[k]}" for k in ("rounds", "seed") if k in order)
    for name in ("bench", "ablation", "concurrency"):
        if name in books:
            rows = read_rows(run.dir / name / "rows.jsonl")
            stages = " ".join(order.get("arms", ())) if name == "bench" else ""
            works = "".join(
                f" --workload {w}" if w != "prompts" else " --prompts FILE"
                for w in dict.fromkeys(str(r.get("workload")) for r in rows)
            )
            said = f".venv/bin/sparkling {name} {stages}".rstrip()
            lines.append(f"{said}{lane}{recipe}{works}{turns}")
    lines.append(f".venv/bin/sparkling report {run.id}   # this page again, from the same rows")
    text = "\n".join(lines)
    return View(f"<pre>{show.esc(text)}</pre>", text)


def proofs_of(folder: Path) -> list[dict[str, Any]]:
    """What the proofs of a run say, those that can be read."""
    out = []
    for path in sorted(folder.glob("*/proof-*.json"), key=lambda p: p.stat().st_mtime):
        try:
            data = read_json(path)
        except (SparklingError, FileNotFoundError):
            continue
        if isinstance(data, dict) and data.get("stage"):
            out.append(data)
    return out
