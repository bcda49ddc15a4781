"""`runs/<run id>/report.html`: one file, nothing loaded from elsewhere, made from what is on disk.

Verdicts first, then the ladder as a picture, distributions, what was proved, what was evaluated and
compared, energy and memory, the notebooks, what it all ran on and the commands that make it again.
`report.md` beside it says the same without pictures. It can be made at any time, also of a run that
failed, and a part that cannot be made says why in its place.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sparkling import report_more as more
from sparkling import report_sections as parts
from sparkling import show
from sparkling.errors import SparklingError, UsageError
from sparkling.files import read_json, write_atomic
from sparkling.live import clock
from sparkling.proof import Proof
from sparkling.recipe import Launch
from sparkling.report_page import Section, bad, dim, folded, markdown, page
from sparkling.report_rows import ROWS, ladder_rows, machine_of
from sparkling.show import View, esc
from sparkling.store import Run
from sparkling.suite_result import GOOD, last_lines

NAME = "report.html"
MARKDOWN = "report.md"


def build(run_dir: Path) -> Path:
    """Write the report of a run, as HTML and as Markdown, and return the path of the HTML.

    Raises UsageError when the folder is no run. A part that cannot be made says why in its place.
    """
    if not (run_dir / "manifest.json").is_file():
        raise UsageError(f"{run_dir} is not a Sparkling run: it has no manifest.json.")
    run = Run(run_dir, None)
    timings = _timings(run_dir)
    measured = parts.Measured(run)
    proofs = more.proofs_of(run_dir)
    wanted: list[tuple[str, Callable[[], View | None]]] = [
        ("Verdicts", partial(parts.verdicts, measured, proofs)),
        ("The ladder", partial(parts.ladder, measured)),
        ("Each switch alone and together", partial(more.ablation, measured)),
        ("Speculation", partial(more.drafts, measured)),
        ("Users at once", partial(more.users, measured)),
        ("Times, whole distributions", partial(parts.times, measured)),
        ("What was proved", partial(_proofs, run_dir)),
        ("Evaluation", partial(parts.evaluation, measured)),
        ("Arms compared on the same questions", partial(parts.comparison, measured)),
        ("Energy and memory", partial(more.energy, measured)),
        ("Notebooks", partial(_notebooks, run_dir, timings)),
        ("What it ran on", partial(_environment, run)),
        ("Doing it again", partial(more.redo, run, timings)),
    ]
    sections = [s for title, make in wanted if (s := _section(title, make)) is not None]
    title, head = f"Sparkling run {run.id}", _head(run, timings)
    write_atomic(run_dir / MARKDOWN, markdown(title, head, sections))
    target = run_dir / NAME
    write_atomic(target, page(title, head, sections))
    return target


def _timings(run_dir: Path) -> dict[str, Any]:
    try:
        data = read_json(run_dir / "timings.json")
    except (FileNotFoundError, SparklingError):
        return {}
    return data if isinstance(data, dict) else {}


def _section(title: str, make: Callable[[], View | None]) -> Section | None:
    """One section; whatever goes wrong inside it stays inside it and is told. None: nothing to
    say."""
    try:
        view = make()
    except Exception as problem:
        view = bad(f"This part could not be made: {problem}")
    return None if view is None else Section(title, view)


def _head(run: Run, timings: Mapping[str, Any]) -> View:
    lane = timings.get("lane") or run.manifest.get("lane") or "unknown"
    began = timings.get("started") or run.manifest.get("created", "")
    line = f"Run {run.id} · {lane} lane · {began}"
    view = View(f"<h1>Sparkling</h1><p class='dim'>{esc(line)}</p>", line)
    if timings:
        try:
            said, css = _outcome(timings)
        except (LookupError, TypeError, ValueError, AttributeError):
            said, css = "timings.json is damaged: how the notebooks ended is not known.", "bad"
        view += View(f"<p class='{css}'><b>{esc(said)}</b></p>", said)
    claim = "Measured on this machine only; published and recorded figures are never mixed in."
    return view + dim(claim)


def _outcome(timings: Mapping[str, Any]) -> tuple[str, str]:
    """How the suite ended, as one sentence and its style."""
    names = timings["notebooks"]
    good = sum(n["verdict"] in GOOD for n in names)
    state, css = (
        ("everything passed", "good") if timings["ok"] else ("NOT everything passed", "bad")
    )
    took = clock(timings["seconds"])
    kept = sum(n["verdict"] == "kept" for n in names)
    before = f", {kept} of them before the run was resumed; the rest took {took}"
    how = before if kept else f" in {took}"
    return f"{good} of {len(names)} notebooks ran to their end{how}; {state}.", css


def _proofs(run_dir: Path) -> View:
    found = sorted(run_dir.glob("*/proof-*.json"), key=lambda p: (p.parent.name, p.stat().st_mtime))
    if not found:
        return dim("No server was proved in this run.")
    out = View("", "")
    for path in found:
        proof = Proof.from_json(read_json(path))
        css = "good" if proof.ok else "bad"
        states = ", ".join(f"{v.switch} {v.state}" for v in proof.verdicts)
        where = f"({path.parent.name}, {proof.made})"
        summary = (
            f"<b class='{css}'>{esc(proof.stage)}</b>: {esc(states)} "
            f"<span class='dim'>{esc(where)}</span>"
        )
        text = f"{proof.stage}: {states} {where}"
        out += View(folded(summary, show.proof(proof)).html, f"{text}\n\n{show.proof(proof).text}")
    return out


def _notebooks(run_dir: Path, timings: Mapping[str, Any]) -> View:
    if not timings:
        return dim("The suite did not run in this run.")
    rows, lines, problems = [], [], View("", "")
    for n in timings["notebooks"]:
        file = run_dir / "notebooks" / f"{n['name']}.ipynb"
        name = esc(n["name"])
        if file.is_file():
            name = f'<a href="notebooks/{name}.ipynb">{name}</a>'
        slow = max(n["cells"], key=lambda c: c["seconds"], default=None)
        most = f"{slow['seconds']:.1f} s in <code>{esc(slow['first'])}</code>" if slow else ""
        css = "good" if n["verdict"] in GOOD else "bad"
        rows.append(
            f"<tr><td>{name}</td><td>{n['seconds']:.1f}</td>"
            f"<td class='{css}'>{esc(n['verdict'])}</td><td>{most}</td></tr>"
        )
        longest = f"{slow['seconds']:.1f} s in {slow['first']}" if slow else ""
        lines.append([n["name"], f"{n['seconds']:.1f}", n["verdict"], longest])
        if n["verdict"] not in GOOD and n.get("said"):
            where = f"{n['name']}, cell {n['cell']}" if n.get("cell") is not None else n["name"]
            first = f" ({n['cell_first']})" if n.get("cell_first") else ""
            said = "\n".join(last_lines(n["said"]))
            problems += bad(where + first) + View(f"<pre>{esc(said)}</pre>", said)
    for leak in timings["leaks"]:
        problems += bad(f"left behind: {leak}")
    heads = ["notebook", "seconds", "verdict", "longest cell"]
    what = "this pass" if any(n["verdict"] == "kept" for n in timings["notebooks"]) else "total"
    total = f"<tr><td>{what}</td><td>{timings['seconds']:.1f}</td><td></td><td></td></tr>"
    html = (
        f"<table><thead><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr></thead>"
        f"<tbody>{''.join(rows)}{total}</tbody></table>"
    )
    lines.append([what, f"{timings['seconds']:.1f}", "", ""])
    return View(html, show.table(lines, heads).text) + problems


def _environment(run: Run) -> View:
    manifest = dict(run.manifest)
    launches = manifest.pop("launches", {})
    # The evaluations have a section of their own.
    for key in ("kind", "schema", "notebooks", "created_s", "evaluations"):
        manifest.pop(key, None)
    server = manifest.get("server_environment")
    packages = None
    if isinstance(server, Mapping):
        packages = server.get("packages")
        manifest["server_environment"] = {k: v for k, v in server.items() if k != "packages"}
    facts = [[name, value] for name, value in _facts("", manifest)]
    view = show.table(facts, ["", "value"], title="From the run's manifest")
    if isinstance(packages, Mapping) and packages:
        heading = f"All {len(packages)} packages of the server's environment"
        listed = show.table(_facts("", packages), ["package", "version"])
        view += View(folded(heading, listed).html, f"### {heading}\n\n{listed.text}")
    for stage, launch in launches.items():
        text = _command(launch)
        made = folded(f"Command of {esc(stage)}", View(f"<pre>{esc(text)}</pre>", ""))
        view += View(made.html, f"### Command of {stage}\n\n{text}")
    return view


def _command(launch: Mapping[str, Any]) -> str:
    try:
        return Launch.from_json(launch).shell()
    except (KeyError, TypeError, ValueError):  # an older or damaged launch: its words as they are
        env = [f"{k}={shlex.quote(str(v))}" for k, v in (launch.get("env") or {}).items()]
        return " \\\n".join([*env, shlex.join(["python", *map(str, launch.get("argv", ()))])])


def _facts(name: str, value: Any) -> list[tuple[str, str]]:
    """A manifest's entries as (dotted name, value)."""
    if isinstance(value, Mapping):
        return [
            fact for k, v in value.items() for fact in _facts(f"{name}.{k}" if name else str(k), v)
        ]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [(name, text)]


__all__ = ["MARKDOWN", "NAME", "ROWS", "build", "ladder_rows", "machine_of"]
