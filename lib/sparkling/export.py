"""A run's rows for other tools: CSV, JSON, and the table that llama-benchy prints.

llama-benchy (github.com/eugr/llama-benchy, MIT) names a test by its tokens (`pp2048`: 2,048 tokens of
prompt processed; `tg32`: 32 generated) and shows mean ± standard deviation over repetitions of t/s and,
in ms, ttfr (first chunk of any kind), est_ppt (ttfr less the network's latency) and e2e_ttft (first
token). We time the first chunk that has text, which is its e2e_ttft; ttfr and est_ppt are not measured
and stay empty, and t/s of pp is uncached prompt tokens ÷ e2e_ttft, hence a lower bound.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparkling.errors import UsageError
from sparkling.files import plain
from sparkling.report_rows import ROWS, evaluations, kind_of, ladder_rows
from sparkling.store import Run

FORMATS = ("csv", "json", "llama-benchy")
_LONG = ("chunk_times_s", "chunk_tokens", "text", "reasoning", "machine")
"""Columns that a table of requests is better without; JSON has them."""


def export(run_dir: Path, form: str) -> str:
    """A run's measured requests (one at a time, or of several users at once) and evaluated
    questions as text.

    UsageError for another format, a folder that is no run and a run without rows.
    """
    if form not in FORMATS:
        raise UsageError(f"There is no format {form!r}; there are {', '.join(FORMATS)}.")
    run = Run(run_dir, None)
    manifest = run.manifest
    bench = [r for r in ladder_rows(run) if kind_of(r) == "bench"]
    users = [r for r in run.all_rows(ROWS) if kind_of(r) == "users"]
    tested = [
        {**row, "file": f"{path.parent.name}/{path.name}"}
        for path, rows in evaluations(run_dir).items()
        for row in rows
    ]
    if not bench and not users and not tested:
        raise UsageError(f"Run {run.id} has no measured requests and no evaluated questions.")
    if form == "json":
        data = {"manifest": manifest, "requests": bench, "of_users": users, "questions": tested}
        return json.dumps(plain(data), indent=1, ensure_ascii=False) + "\n"
    if form == "csv":
        return as_csv(
            [
                *({"kind": "request", **r} for r in bench),
                *({"kind": "request of a user", **r} for r in users),
                *({"kind": "question", **r} for r in tested),
            ]
        )
    if not bench:
        raise UsageError(
            f"Run {run.id} has no requests measured one at a time for a llama-benchy table."
        )
    return llama_benchy(bench)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of any kind as one table, a column a field (nested ones as `a.b`), empty where a row
    has none. Text that a spreadsheet would take for a formula is preceded by an apostrophe."""
    flat = [_flat("", row) for row in rows]
    columns = list(dict.fromkeys(k for row in flat for k in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in flat:
        writer.writerow([_cell(row.get(c)) for c in columns])
    return out.getvalue()


def _flat(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if not name and key in _LONG:
            continue
        full = f"{name}.{key}" if name else str(key)
        if isinstance(item, Mapping):
            out |= _flat(full, item)
        elif isinstance(item, list | tuple):
            out[full] = json.dumps(plain(item), ensure_ascii=False)
        else:
            out[full] = item
    return out


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        try:
            float(value)
        except ValueError:
            return "'" + value
    return value


def llama_benchy(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown in the shape of llama-benchy's: for each arm and workload a pp line and a tg line,
    mean ± standard deviation over n complete requests. The name of a test holds mean token counts."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["complete"]:
            key = (str(row.get("model", "")), row["arm"], row["workload"])
            groups.setdefault(key, []).append(row)
    lines: list[list[str]] = []
    for (model, arm, workload), group in groups.items():
        name = f"{model} ({arm}, {workload})"
        timed = [r for r in group if r.get("ttft_s") and r.get("prompt_tokens")]
        if timed:
            fresh = [r["prompt_tokens"] - (r.get("cached_tokens") or 0) for r in timed]
            speed = [k / r["ttft_s"] for k, r in zip(fresh, timed, strict=True) if k > 0]
            first = [1000 * r["ttft_s"] for r in timed]
            asked = round(float(np.mean([r["prompt_tokens"] for r in timed])))
            lines.append([name, f"pp{asked}", _spread(speed), "", "", _spread(first)])
        rated = [r for r in group if r.get("decode_rate")]
        if rated:
            wrote = round(float(np.mean([r["completion_tokens"] for r in rated])))
            speed = [r["decode_rate"] for r in rated]
            lines.append([name, f"tg{wrote}", _spread(speed), "", "", ""])
    if not lines:
        raise UsageError("No complete request has a time, so there is no llama-benchy table.")
    head = ["model", "test", "t/s", "ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)"]
    n = ", ".join(f"{arm} {workload} n={len(g)}" for (_, arm, workload), g in groups.items())
    note = (
        f"sparkling, in the manner of llama-benchy: mean ± standard deviation over n requests, one at a "
        f"time ({n}). t/s of pp = uncached prompt tokens ÷ e2e_ttft (a lower bound), of tg = tokens "
        "after the first chunk ÷ their seconds; ttfr and est_ppt are not measured."
    )
    return f"{_pipes(head, lines)}\n\n{note}\n"


def _spread(values: Sequence[float]) -> str:
    """numpy's standard deviation (divisor n), as llama-benchy takes it."""
    return f"{np.mean(values):.2f} ± {np.std(values):.2f}" if values else ""


def _pipes(head: list[str], lines: list[list[str]]) -> str:
    cells = [[c.replace("|", "\\|") for c in row] for row in (head, *lines)]
    sizes = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: list[str]) -> str:
        first = row[0].ljust(sizes[0])
        rest = [c.rjust(s) for c, s in zip(row[1:], sizes[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = f"|:{'-' * (sizes[0] + 1)}|" + "".join(f"{'-' * (s + 1)}:|" for s in sizes[1:])
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])
