"""`runs/<run id>/report.html`: one file, nothing loaded from elsewhere, made from what is on disk.

The ladder as a picture, what was proved, the notebooks with seconds and verdicts (linked to the
executed ones), and what it all ran on. It can be made at any time, also of a run that failed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkling import bench, show
from sparkling.errors import SparklingError, UsageError
from sparkling.files import read_json, write_atomic
from sparkling.live import clock
from sparkling.proof import Proof
from sparkling.report_rows import ROWS, ladder_rows, machine_of
from sparkling.show import esc
from sparkling.store import Run
from sparkling.suite_result import GOOD, last_lines

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c2430; background: #fff; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d7dde5; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid #e6eaf0; }
pre { background: #f4f6f9; padding: .7rem; overflow-x: auto; font-size: .85rem; }
img { max-width: 100%; } .good { color: #14713d; } .bad { color: #b3261e; } .dim { color: #5b6675; }
blockquote { border-left: 4px solid #d9a400; margin: .5rem 0; padding: .3rem .8rem; background: #fff8e1; }
@media (prefers-color-scheme: dark) {
  body { color: #e3e8ef; background: #14181f; } pre { background: #1e242d; }
  th, td { border-color: #2c3440; } h2 { border-color: #2c3440; } .good { color: #5fd38d; }
  .bad { color: #ff8a80; } .dim { color: #98a3b3; } img { background: #fff; }
  blockquote { background: #2a2410; }
}
"""
NAME = "report.html"


def build(run_dir: Path) -> Path:
    """Write the report of a run and return its path.

    Raises UsageError when the folder is no run. A part that cannot be made says why in its place.
    """
    if not (run_dir / "manifest.json").is_file():
        raise UsageError(f"{run_dir} is not a Sparkling run: it has no manifest.json.")
    run = Run(run_dir, None)
    timings = _timings(run_dir)
    parts = [
        _head(run, timings),
        _section("The ladder", lambda: _ladder(run)),
        _section("What was proved", lambda: _proofs(run_dir)),
        _section("Notebooks", lambda: _notebooks(run_dir, timings)),
        _section("What it ran on", lambda: _environment(run)),
    ]
    title = esc(f"Sparkling run {run.id}")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    target = run_dir / NAME
    write_atomic(target, page)
    return target


def _timings(run_dir: Path) -> dict[str, Any]:
    try:
        data = read_json(run_dir / "timings.json")
    except (FileNotFoundError, SparklingError):
        return {}
    return data if isinstance(data, dict) else {}


def _section(title: str, make: Any) -> str:
    """One section; whatever goes wrong inside it stays inside it and is told."""
    try:
        body = make()
    except Exception as problem:
        body = f"<p class='bad'>This part could not be made: {esc(problem)}</p>"
    return f"<h2>{esc(title)}</h2>{body}"


def _head(run: Run, timings: Mapping[str, Any]) -> str:
    lane = timings.get("lane") or run.manifest.get("lane") or "unknown"
    began = timings.get("started") or run.manifest.get("created", "")
    line = f"Run {run.id} · {lane} lane · {began}"
    if not timings:
        return f"<h1>Sparkling</h1><p class='dim'>{esc(line)}</p>"
    try:
        said, css = _outcome(timings)
    except (LookupError, TypeError, ValueError, AttributeError):
        said, css = "timings.json is damaged: how the notebooks ended is not known.", "bad"
    return (
        f"<h1>Sparkling</h1><p class='dim'>{esc(line)}</p><p class='{css}'><b>{esc(said)}</b></p>"
    )


def _outcome(timings: Mapping[str, Any]) -> tuple[str, str]:
    """How the suite ended, as one sentence and its style."""
    names = timings["notebooks"]
    good = sum(n["verdict"] in GOOD for n in names)
    state, css = (
        ("everything passed", "good") if timings["ok"] else ("NOT everything passed", "bad")
    )
    took = clock(timings["seconds"])
    return f"{good} of {len(names)} notebooks ran to their end in {took}; {state}.", css


def _ladder(run: Run) -> str:
    rows = ladder_rows(run)
    if not rows:
        return "<p class='dim'>Nothing was measured in this run.</p>"
    made = bench.ladder(rows)
    view = show.ladder(made, where=machine_of(rows))
    picture = base64.b64encode(view.png or b"").decode()
    alt = esc(view.text.splitlines()[0]) if view.text else "ladder"
    warning = f"<p class='bad'><b>{esc(made.warning)}</b></p>" if made.warning else ""
    image = f'<img alt="{alt}" src="data:image/png;base64,{picture}">'
    return f"{warning}{image}<pre>{esc(view.text)}</pre>"


def _proofs(run_dir: Path) -> str:
    found = sorted(run_dir.glob("*/proof-*.json"), key=lambda p: (p.parent.name, p.stat().st_mtime))
    if not found:
        return "<p class='dim'>No server was proved in this run.</p>"
    out = []
    for path in found:
        proof = Proof.from_json(read_json(path))
        css = "good" if proof.ok else "bad"
        verdicts = ", ".join(f"{v.switch} {v.state}" for v in proof.verdicts)
        out.append(
            f"<details><summary><b class='{css}'>{esc(proof.stage)}</b>: {esc(verdicts)} "
            f"<span class='dim'>({esc(path.parent.name)}, {esc(proof.made)})</span></summary>"
            f"{show.proof(proof).html}</details>"
        )
    return "".join(out)


def _notebooks(run_dir: Path, timings: Mapping[str, Any]) -> str:
    if not timings:
        return "<p class='dim'>The suite did not run in this run.</p>"
    rows, problems = [], []
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
        if n["verdict"] not in GOOD and n.get("said"):
            where = f"{n['name']}, cell {n['cell']}" if n.get("cell") is not None else n["name"]
            first = f" ({n['cell_first']})" if n.get("cell_first") else ""
            said = "\n".join(last_lines(n["said"]))
            problems.append(f"<p class='bad'>{esc(where + first)}</p><pre>{esc(said)}</pre>")
    problems += [f"<p class='bad'>left behind: {esc(leak)}</p>" for leak in timings["leaks"]]
    total = f"<tr><td>total</td><td>{timings['seconds']:.1f}</td><td></td><td></td></tr>"
    return (
        "<table><thead><tr><th>notebook</th><th>seconds</th><th>verdict</th><th>longest cell</th>"
        f"</tr></thead><tbody>{''.join(rows)}{total}</tbody></table>{''.join(problems)}"
    )


def _environment(run: Run) -> str:
    manifest = dict(run.manifest)
    launches = manifest.pop("launches", {})
    for key in ("kind", "schema", "notebooks", "created_s"):
        manifest.pop(key, None)
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    out = f"<pre>{esc(text)}</pre>"
    for stage, launch in launches.items():
        command = " ".join(["python", *launch.get("argv", ())])
        env = " ".join(f"{k}={v}" for k, v in (launch.get("env") or {}).items())
        out += (
            f"<details><summary>Command of {esc(stage)}</summary>"
            f"<pre>{esc(env)} {esc(command)}</pre></details>"
        )
    return out


__all__ = ["NAME", "ROWS", "build", "ladder_rows", "machine_of"]
