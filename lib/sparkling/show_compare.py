"""Comparisons to look at, in notebooks, terminals and the report."""

from __future__ import annotations

from typing import Any

from sparkling import compare as _compare
from sparkling.ladder import GAIN_DEFINITION
from sparkling.show import View, note, table
from sparkling.stats_paired import p_text, percent, points


def comparison(c: Any, *, head: bool = True) -> View:
    """A `compare.Comparison`: in what the arms differ, verdicts, tables with definitions and n."""
    view = note(f"{c.second} against {c.first}", strong=True) if head else View("", "")
    said = [str(d) for d in c.differs] or ["nothing that is recorded"]
    view += note("They differ in: " + "; ".join(said) + ".")
    for remark in c.remarks:
        view += note(f"Note: {remark}")
    if c.evaluation:
        view += evaluation(c.evaluation)
    if c.bench:
        view += bench(c.bench, c.labels)
    return view


def evaluation(e: Any) -> View:
    """Accuracy, McNemar's table, the difference and what it excludes; rates and lengths."""
    found, (first, second) = e.accuracy, e.outcomes
    c = found.counts
    view = note(found.sentence(), strong=True)
    if found.verdict:
        view += note(found.verdict.text, strong=True)
    if e.note:
        view += note(f"Note: {e.note}.")
    view += table(
        [_outcome(o) for o in (first, second)],
        title="How the questions ended",
        caption="Each arm over all that it answered. Cut off, not parsed and failed count as wrong.",
    )
    lines: list[list[Any]] = [
        ["questions right in both", c.both],
        [f"right in {first.arm} only", c.first_only],
        [f"right in {second.arm} only", c.second_only],
        ["right in neither", c.neither],
        ["pairs, joined by id", c.n],
        [f"accuracy of {first.arm} ({found.first.method})", percent(found.first)],
        [f"accuracy of {second.arm} ({found.second.method})", percent(found.second)],
        ["McNemar, exact, two-sided", f"p = {p_text(found.p)}"],
        [f"difference ({found.difference.method})", points(found.difference)],
    ]
    if found.score.method != found.difference.method:
        lines.append([f"difference ({found.score.method})", points(found.score)])
    view += table(
        lines,
        ["", "value"],
        title="The same questions, paired",
        caption=f"Difference = {second.arm} minus {first.arm}; intervals at 95 %. "
        + " ".join(found.limits()),
    )
    return view + ratios(e.ratios, "questions", (first.arm, second.arm))


def _outcome(o: Any) -> dict[str, Any]:
    length = o.accept_length
    return {
        "arm": o.arm,
        "n": o.rows,
        "right": o.correct,
        **{s: n for s, n in o.states.items() if s != "ok"},
        "accept length": length.text(2) if length else None,
    }


def ratios(found: Any, units: str, labels: tuple[str, str] = ("first", "second")) -> View:
    """Every quantity of both arms with its paired ratio, and the sentence on length drift."""
    if not found:
        return View("", "")
    rows = [
        {
            "quantity": r.name,
            labels[0]: f"{r.first:.4g} {r.unit}",
            labels[1]: f"{r.second:.4g} {r.unit}",
            "ratio": r.ratio.text(3),
            "definition": r.definition,
        }
        for r in found
    ]
    said = _compare.drift(found, labels)
    view = table(
        rows,
        title="Rates and lengths",
        caption=f"Ratio = {labels[1]} ÷ {labels[0]}: paired bootstrap over {units} that both arms answered, 95 %.",
    )
    return view + note(said) if said else view


def bench(b: Any, labels: tuple[str, str]) -> View:
    """Decode rates and the gain, over everything and by workload; times and lengths."""
    rows = []
    for ladder in dict.fromkeys((*b.by_workload, b.whole)):
        base, other = ladder.rungs[0].summary, ladder.rungs[1]
        verdict = {True: "faster", False: "slower", None: "not told apart"}[other.faster]
        rows.append(
            {
                "workload": ladder.workload,
                base.arm: base.decode_rate.text(1) if base.decode_rate else None,
                other.arm: other.summary.decode_rate.text(1) if other.summary.decode_rate else None,
                "gain": other.gain.text(2) if other.gain else None,
                "": verdict if other.steady else "machine not steady",
            }
        )
    view = table(
        rows,
        title="Decode rate, tokens per second",
        caption=f"{GAIN_DEFINITION[0].upper()}{GAIN_DEFINITION[1:]}.",
    )
    if b.whole.warning:
        view = note(b.whole.warning, strong=True) + view
    return view + ratios(b.ratios, "prompts", labels)
