"""The kernels beside each other, beside the cost model, and beside the whole server."""

from __future__ import annotations

from typing import Any

from sparkling import shapes, shapes_round
from sparkling.shapes import Record
from sparkling.show import View, note, table
from sparkling.show_shapes import unproved


def backends(record: Record, a: str = "humming", b: str = "marlin") -> View:
    """Two backends on the same shapes, one layer each; a sentence where one was not measured."""
    rows = []
    for case in record.experts:
        other = record.expert_case(case.tokens, case.routing, "layer", b)
        if (case.backend, case.part) != (a, "layer") or other is None:
            continue
        rows.append(
            {
                "tokens": str(case.tokens),
                "routing": case.routing if case.tokens > 1 else "one token",
                f"{a}, µs": f"{case.times.median:,.1f}",
                f"{b}, µs": f"{other.times.median:,.1f}",
                "n": min(case.times.n, other.times.n),
                f"{a} / {b}": f"{case.times.median / other.times.median:.2f}",
                f"share, {a}": f"{100 * record.share(case):.0f} %",
                f"share, {b}": f"{100 * record.share(other):.0f} %",
            }
        )
    if not rows:
        return note(f"This record does not hold both {a} and {b}, so they are not compared.")
    caption = (
        "Medians of one layer's time, the same routes and layers for both; share: of the limit."
    )
    doubt = unproved(record, a, b)
    if doubt:
        caption += " Why it was not shown, and what of it stands: see under what was measured."
    title = f"{a.capitalize()} and {b.capitalize()} on {record.device}{doubt}"
    return table(rows, title=title, caption=caption)


def consistency(record: Record, *, backend: str = "humming") -> View:
    """Measured cost of several tokens beside what the cost model says from bytes."""
    rows = []
    for case in record.experts:
        cost, span = record.cost(case), record.predicted(case)
        if case.tokens == 1 or case.backend != backend or cost is None or span is None:
            continue
        rows.append(
            {
                "tokens": str(case.tokens),
                "routing": case.routing,
                "of": "the layer" if case.part == "layer" else "the products",
                "predicted cost": span.text(),
                "measured cost": cost.text(2),
                "verdict": shapes.verdict(cost, span),
            }
        )
    if not rows:
        return note(f"This record holds no measurement of {backend} to compare with the model.")
    caption = (
        "In times of one token. Predicted from bytes alone: lower end, only the added experts count, read at "
        "the limit; upper end, all time is proportional to bytes. The model expects the union of "
        "independent choices for random routing and the top k for repeated. Within: to 2 %."
    )
    return table(rows, title="The cost model against these kernels", caption=caption)


def of_a_round(record: Record, full: Any) -> View:
    """What these kernels explain of a round in the whole server; a sentence where they are of another
    device. full: `fullsize.Record`."""
    found = shapes_round.accounts(record, full)
    if not found:
        return note(
            f"The full-size servers were recorded on another device than {record.device}, so their rounds "
            "are not compared with these kernels."
        )
    rows = [
        {
            "experts": one.kernels.capitalize(),
            "head": one.head,
            "context": f"{one.context:,}",
            "step": one.step,
            "round": one.round,
            "n": one.n,
            "added": one.added,
            "target's experts": f"{one.experts:.2f}",
            "draft's experts": f"{one.draft_experts:.2f}",
            "LM heads": f"{one.heads:.2f}",
            "rest": f"{one.rest:.2f}, {100 * one.rest / one.added:.0f} %",
        }
        for one in found
    ]
    caption = (
        "Milliseconds, medians; n requests an arm of the server's record. Added: round less step. The next "
        "three follow from the kernels timed alone: random routing, four tokens verified, three drafts. "
        "Rest: attention over four positions, the NEXTN layer's own, small kernels, gaps; not measured "
        "apart."
    )
    return table(rows, title="What of a round these kernels explain", caption=caption)
