"""The measured parts of a report, each from what lies in the run's folder; see `report` and, for what
only some runs hold, `report_more`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkling import _rules, bench, compare, metrics, plots, show, show_compare
from sparkling.compare_sides import Side, by_task
from sparkling.errors import SparklingError
from sparkling.metrics import Summary
from sparkling.report_page import bad, dim, heading, picture
from sparkling.report_rows import evaluations, kind_of, ladder_rows, machine_of
from sparkling.show import View
from sparkling.stats import wilson
from sparkling.stats_paired import percent
from sparkling.store import Run

Rows = list[dict[str, Any]]


@dataclass
class Measured:
    """A run's rows, read once and shared by the sections of its report."""

    run: Run

    @cached_property
    def rows(self) -> Rows:
        """The rows of the ladder, arms in the order in which they were asked for."""
        rows = [r for r in ladder_rows(self.run) if kind_of(r) == "bench"]
        asked = (self.run.manifest.get("order") or {}).get("arms") or []
        place = {arm: i for i, arm in enumerate(asked)}
        return sorted(rows, key=lambda r: place.get(r["arm"], len(place)))

    @cached_property
    def tested(self) -> dict[Path, Rows]:
        """The evaluation files with their rows."""
        return evaluations(self.run.dir)

    @cached_property
    def sides(self) -> list[Side]:
        """Every evaluated arm, with each kind of questions that it was asked."""
        manifest, found = self.run.manifest, by_task(self.tested)
        return [
            Side(f"{self.run.id}:{arm}", arm, tuple(rows), (), manifest, task)
            for (arm, task), rows in found.items()
        ]

    def label(self, side: Side) -> str:
        """The arm, and the questions where the run has several kinds."""
        several = len({s.task for s in self.sides}) > 1
        return f"{side.arm}, {side.task}" if several else side.arm

    @cached_property
    def comparisons(self) -> list[compare.Comparison]:
        return compare.within(self.sides)

    @cached_property
    def ladder(self) -> Any:
        return bench.ladder(self.rows, base_of(self.rows))


def base_of(rows: Rows) -> str:
    """The baseline: the arm of that name, else the one measured first."""
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    return "baseline" if "baseline" in arms or not arms else arms[0]


# -- verdicts ------------------------------------------------------------------------------------


def verdicts(m: Measured, proofs: Sequence[Mapping[str, Any]]) -> View:
    """What a reader in a hurry needs, one sentence a line; every one has its details below."""
    lines: list[tuple[str, str]] = []
    lines += _said(lambda: _proved(proofs))
    if m.rows:
        lines += _said(lambda: _gains(m))
    lines += _said(lambda: _accuracies(m))
    lines += _said(lambda: [(_compared(c), "") for c in m.comparisons])
    if not lines:
        lines = [("Nothing was proved, measured or evaluated in this run.", "dim")]
    items = "".join(f"<li class='{css}'>{show.esc(text)}</li>" for text, css in lines)
    text = "\n".join(f"- {text}" for text, _ in lines)
    return View(f"<ul class='verdicts'>{items}</ul>", text)


def _said(make: Any) -> list[tuple[str, str]]:
    """The lines, or none where the section below tells why they cannot be made."""
    try:
        return list(make())
    except (SparklingError, LookupError, TypeError, ValueError, AttributeError):
        return []


def _proved(proofs: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    seen: dict[str, bool] = {}
    for p in proofs:
        ok = bool(p.get("ok")) and not p.get("label") and not p.get("only_wanted")
        seen[p["stage"]] = seen.get(p["stage"], True) and ok
    good, wrong = ([s for s, ok in seen.items() if ok is want] for want in (True, False))
    if good:
        yield (
            f"Proved on the running server, every switch live or off as declared: {', '.join(good)}.",
            "good",
        )
    trapped = {p["stage"] for p in proofs if f"{_rules.TRAP}=" in json.dumps(p.get("verdicts", []))}
    found = [s for s in wrong if s in trapped]
    if found:
        yield f"Set as a trap, and found by the proof, as it must be: {', '.join(found)}.", "good"
    if wrong := [s for s in wrong if s not in trapped]:
        yield f"Not proved here: {', '.join(wrong)}.", "bad"


def _gains(m: Measured) -> Iterable[tuple[str, str]]:
    made = m.ladder
    if made.warning:
        yield made.warning, "bad"
    for rung in made:
        rate = rung.summary.decode_rate
        if rung.gain is None or rate is None:
            if rate is not None:
                yield (
                    f"{rung.arm}: {rate.text(1)} tokens per second decoded, workload {made.workload}.",
                    "",
                )
            continue
        said = f"{rung.gain.text(2)} times the decode rate of {made.baseline}"
        if not rung.steady:
            yield f"{rung.arm}: {said}, but no gain can be read from it.", ""
        elif rung.faster is None:
            yield f"{rung.arm}: {said}; not told apart from it.", ""
        else:
            word = "faster" if rung.faster else "SLOWER"
            yield f"{rung.arm} is {word}: {said}.", "good" if rung.faster else "bad"


def _accuracies(m: Measured) -> Iterable[tuple[str, str]]:
    for side in m.sides:
        right, n = sum(bool(r["correct"]) for r in side.evaluation), len(side.evaluation)
        yield (
            f"{m.label(side)} answers {right} of {n} questions right: {percent(wilson(right, n))}.",
            "",
        )


def _compared(c: compare.Comparison) -> str:
    assert c.evaluation is not None
    return f"{c.labels[1]} against {c.labels[0]}: {c.evaluation.accuracy.sentence()}"


# -- the ladder and the whole distributions ------------------------------------------------------


def ladder(m: Measured) -> View:
    """The ladder as a picture, and its table."""
    if not m.rows:
        return dim("Nothing was measured in this run.")
    made = m.ladder
    view = show.ladder(made, where=machine_of(m.rows))
    out = bad(made.warning, strong=True) if made.warning else View("", "")
    if view.png:
        alt = view.text.splitlines()[0] if view.text else "ladder"
        out = View(out.html + picture(view.png, alt).html, out.text)
    return out + View(view.html, view.text)


QUANTITIES = (
    (
        "ttft_s",
        "first token",
        "ms",
        1000.0,
        "from sending the request to the first chunk with text",
    ),
    ("tpot_s", "time per output token", "ms", 1000.0, "1 ÷ decode rate, after the first chunk"),
    ("e2e_s", "whole reply", "s", 1.0, "from sending the request to its end"),
)


def times(m: Measured) -> View:
    """Percentiles with n, and the whole distribution as a curve, of every arm."""
    if not m.rows:
        return dim("Nothing was measured in this run.")
    arms: dict[str, Rows] = {}
    for row in m.rows:
        arms.setdefault(row["arm"], []).append(row)
    view = View("", "")
    for key, name, unit, scale, definition in QUANTITIES:
        values = {
            arm: [
                r.get(key) * scale if r.get(key) is not None else None
                for r in rows
                if r["complete"]
            ]
            for arm, rows in arms.items()
        }
        view += percentiles(values, f"{name}, {unit}", definition)
    replies = {a: [r.get("e2e_s") for r in rows if r["complete"]] for a, rows in arms.items()}
    return _with_curve(view, replies, "The whole distribution: time of a reply", machine_of(m.rows))


def percentiles(values: Mapping[str, Sequence[float | None]], name: str, definition: str) -> View:
    """A table with mean and percentiles, a row an arm, n with every one."""
    rows = []
    for arm, group in values.items():
        s = metrics.summary(group)
        if s is not None:
            rows.append({"arm": arm, **_percentile_cells(s), "n": s.n})
    if not rows:
        return View("", "")
    like_max = any(r["n"] < 100 for r in rows)
    caption = f"{definition[0].upper()}{definition[1:]}. Percentiles interpolate between values."
    if like_max:
        caption += " With fewer than 100 values the P99 is about the maximum."
    return show.table(rows, title=name, caption=caption)


def _percentile_cells(s: Summary) -> dict[str, str]:
    return {
        "mean": f"{s.mean:.4g}",
        "P50": f"{s.p50:.4g}",
        "P90": f"{s.p90:.4g}",
        "P95": f"{s.p95:.4g}",
        "P99": f"{s.p99:.4g}",
    }


def _with_curve(
    view: View, values: Mapping[str, Sequence[float | None]], title: str, where: str
) -> View:
    curve = plots.ecdf(values, label="time of a reply", unit="seconds", title=title, where=where)
    if curve is None or curve.png is None:
        return view
    shown = picture(curve.png, curve.text)
    return View(view.html + shown.html, view.text)


# -- evaluation ----------------------------------------------------------------------------------


def evaluation(m: Measured) -> View:
    """Accuracy of every arm with its interval, how the questions ended, how long they took."""
    if not m.tested:
        return dim("No questions were evaluated in this run.")
    rows = []
    for side in m.sides:
        group = side.evaluation
        right = sum(bool(r["correct"]) for r in group)
        outcome = compare.outcome(side.arm, group)
        rows.append(
            {
                "arm": m.label(side),
                "questions": len(group),
                "right": right,
                "accuracy": percent(wilson(right, len(group))),
                **{s: n for s, n in outcome.states.items() if s != "ok"},
                "accept length": outcome.accept_length.text(2) if outcome.accept_length else None,
            }
        )
    view = show.table(
        rows,
        caption="Accuracy = right ÷ questions, Wilson interval at 95 %. Cut off (truncated), not parsed "
        "and failed (error) questions count as wrong and are in n. Files: "
        + ", ".join(f"{p.parent.name}/{p.name}" for p in m.tested)
        + ".",
    )
    rules: dict[str, dict[str, Any]] = {}
    for side in m.sides:
        for row in side.evaluation:
            entry = rules.setdefault(
                str(row.get("rule") or "none"), {"rule": str(row.get("rule") or "none")}
            )
            entry[m.label(side)] = entry.get(m.label(side), 0) + 1
    order = ["rule", *(m.label(s) for s in m.sides)]
    filled = [{k: r.get(k, 0) for k in order} for r in rules.values()]
    view += show.table(filled, order, title="The rule that found the answer")
    by = {m.label(s): s.evaluation for s in m.sides}
    for key, name, definition in (
        ("e2e_s", "time of a reply, s", "from sending the request to its end"),
        ("completion_tokens", "tokens written", "the server's count, thinking included"),
        ("decode_rate", "decode rate, tokens/s", "tokens after the first chunk ÷ their seconds"),
    ):
        view += percentiles({a: [r.get(key) for r in g] for a, g in by.items()}, name, definition)
    replies = {a: [r.get("e2e_s") for r in g] for a, g in by.items()}
    return _with_curve(view, replies, "The whole distribution: time of an answer", "")


def comparison(m: Measured) -> View:
    """Every evaluated arm against the baseline of the run, question by question."""
    found = m.comparisons
    view = View("", "")
    for c in found:
        view += heading(f"{c.labels[1]} against {c.labels[0]}")
        view += show_compare.comparison(c, head=False)
    return view if found else dim("Fewer than two arms answered questions, so none is compared.")
