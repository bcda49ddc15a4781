"""The record of `fullsize` as tables and a picture, for notebooks and terminals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from sparkling import canvas, fullsize
from sparkling.costmodel import STEPS
from sparkling.fullsize import HEADS, KERNELS, MODES, SWITCHES, WORTH, Record, arm_name
from sparkling.plots import COLOURS
from sparkling.show import View
from sparkling.show import table as _table
from sparkling.stats import Interval

EXTRAS = {
    "swap": "humming-bf16-plain again, on the GPU that measured Marlin",
    "stock": "humming-bf16-plain with none of our switches set",
    "clamp-off": "humming-fp8-plain without the SwiGLU clamp",
    "clamp-off-nextn": "humming-fp8-nextn without the SwiGLU clamp",
    "unshared": "humming-fp8-nextn, the draft left with what SGLang gives it",
    "trap": "humming-fp8-nextn with SPARKLING_TRAP=tensor-only",
}
"""The arms beside the eight, and what each repeats with one thing changed."""
SWAPPED = {kernels: arm_name(kernels, "bf16", "plain") for kernels in KERNELS}
"""What `swap` is compared with: itself on the other GPU, and Marlin on the same."""


def _label(name: str) -> str:
    kernels, head, mode = name.split("-")
    kind = "NEXTN 3/1/4" if mode == "nextn" else "plain"
    return f"{kernels.capitalize()}, {head.upper()} head, {kind}"


def table(record: Record | None = None) -> View:
    """All eight arms: step or round at each context, accept length, start and memory."""
    record = record or fullsize.recorded()
    rows = []
    for mode, kernels, head in product(MODES, KERNELS, HEADS):
        name = arm_name(kernels, head, mode)
        arm = record.arms.get(name)
        row: dict[str, Any] = {"arm": _label(name)}
        for context in record.contexts:
            cell = record.cell(name, context)
            row[f"ms at {context:,}"] = f"{cell.text()} a {cell.of}" if cell else "not measured"
        facts = arm.facts if arm else {}
        start = (facts.get("start") or {}).get("start_s")
        row["ready, s"] = None if start is None else f"{start:.0f}"
        weights = facts.get("weights_gb") or {}
        row["weights, GiB"] = f"{sum(weights.values()):.2f}" if weights else None
        used = facts.get("memory_mib")
        row["GPU memory, MiB"] = f"{used:,}" if used else None
        kept = facts.get("kv_tokens")
        row["KV cache, tokens"] = f"{kept:,}" if kept else None
        rows.append(row)
    caption = (
        f"Recorded {record.date}: {record.conditions}. Median [least, most] of single requests. "
        "Ready: imports and load until /health answers, the first start of each kernel with its "
        "compiling; weights as the server's log counts them, before the head was quantized; KV cache: "
        "what fits into the same share of memory." + _why(record)
    )
    return _table(rows, title="Full size, random weights, batch 1", caption=caption, width=150)


def _why(record: Record) -> str:
    """Which arms were tried in vain, in a sentence to append."""
    if not record.unmeasured:
        return ""
    said = "; ".join(f"{name} ({why.rstrip('.')})" for name, why in record.unmeasured.items())
    return f" Tried and not measured: {said}."


def extras_table(record: Record | None = None) -> View:
    """The arms beside the eight: what one more change did."""
    record = record or fullsize.recorded()
    rows = []
    for name, what in EXTRAS.items():
        if (arm := record.arms.get(name)) is None:
            continue
        against = "humming-fp8-nextn" if "nextn" in what.split()[0] else what.split()[0]
        row: dict[str, Any] = {"arm": name, "what": what}
        for context in record.contexts:
            cell, factor = (
                record.cell(name, context),
                record.factor(against, name, context),
            )
            row[f"ms at {context:,}"] = cell and cell.text()
            row[f"rate, {context:,}"] = factor and _times(factor)
        row["ended with"] = arm.facts.get("raised") or arm.error or ""
        rows.append(row)
    caption = (
        "ms: median [least, most] of single requests. rate: time of the arm it repeats / its time, 95 % "
        "interval from single requests; above 1 it is faster. n/a: it ended before it was measured."
    )
    return _table(rows, title="One more change each", caption=caption, width=150)


def effects_table(record: Record | None = None) -> View:
    """What each switch does to a step and to a round, and what a round costs in steps."""
    record = record or fullsize.recorded()
    rows: list[dict[str, Any]] = []
    for switch, mode in product((*SWITCHES, "both"), MODES):
        row: dict[str, Any] = {"what": _what(switch, mode)}
        for context in record.contexts:
            if switch == "both":
                found, at = record.interaction(mode, context), ""
            else:
                found = record.effect(switch, mode, context)
                settings = record.settings(switch, mode, context)
                at = f", {settings[0]} alone" if len(settings) == 1 else ""
            row[f"at {context:,}"] = _times(found) + at if found else "not measured"
        rows.append(row)
    rows += _two_gpus(record)
    for kernels, head in product(KERNELS, HEADS):
        row = {"what": f"cost of a round in steps, {kernels.capitalize()}, {head.upper()} head"}
        for context in record.contexts:
            cost = record.round_cost(kernels, head, context)
            row[f"at {context:,}"] = cost.text(3) if cost else "not measured"
        rows.append(row)
    caption = (
        "Factors on the rate (time without / time with), 95 % interval from single requests (n: the "
        "fewest an arm): nothing of what differs from start to start, nor, for Humming, of what differs between "
        "two GPUs (the rows with a GPU say how much that is). NEXTN pays where the "
        "accept length is above the cost of a round. What grows with the context is attention's: the "
        "Triton kernels that this server verifies with (inferred, not profiled), so the cost of a round "
        "in a long context is theirs and not NEXTN's."
    )
    return _table(rows, title="What the switches do", caption=caption, width=120)


def _two_gpus(record: Record) -> list[dict[str, Any]]:
    """What of Humming against Marlin is the GPUs', where each had its own and `swap` was measured."""
    swap, marlin = record.arms.get("swap"), record.arms.get(SWAPPED["marlin"])
    if swap is None or marlin is None or swap.gpu != marlin.gpu:
        return []
    return [
        {"what": what}
        | {
            f"at {context:,}": _times(found)
            if (found := record.factor(SWAPPED[kernels], "swap", context))
            else "not measured"
            for context in record.contexts
        }
        for kernels, what in (
            ("humming", f"GPU {swap.gpu} instead of the other: the same server, a step"),
            ("marlin", f"Humming with both on GPU {swap.gpu}, BF16 head, a step"),
        )
    ]


def head_table(record: Record | None = None) -> View:
    """Time that the FP8 head saves against the time that its bytes are worth."""
    record = record or fullsize.recorded()
    answer = {True: "yes", False: "no", None: "open"}
    rows = [
        {
            "arm": f"{s.kernels.capitalize()}, {'NEXTN' if s.mode == 'nextn' else 'plain'}",
            "context": f"{s.context:,}",
            "products": s.products,
            "MB less": f"{s.bytes / 1e6:,.1f}",
            "worth, ms": f"{s.worth_ms:.4f}",
            "saved, ms": s.saved_ms.text(4),
            "share": s.share.text(2),
            f">= {WORTH:.0%}": answer[s.enough],
        }
        for s in record.savings()
    ]
    reads = ", ".join(f"GPU {g} {r / 1e9:,.0f} GB/s" for g, r in sorted(record.bandwidth.items()))
    caption = (
        f"{record.device.upper()}, recorded {record.date}, random weights. Brackets: 95 %, Welch's interval over "
        "single requests. Saved: the BF16 head's time less the FP8 head's, each step or round. "
        f"Worth: bytes saved over the fastest measured reading ({reads}), taken as exact: the share's "
        "interval is the time's alone. Products of the head: one a step; a round has one of "
        f"{1 + STEPS} rows to verify and one for each of {STEPS} drafts. {WORTH:.0%}: yes or no where the "
        "interval of the share lies on one side of it, open where it does not."
    )
    return _table(rows, title="The FP8 head against its bytes", caption=caption, width=130)


def picture(record: Record | None = None, context: int | None = None) -> View:
    """Step and round of every arm at one context (default: the shortest), as bars."""
    record = record or fullsize.recorded()
    context = record.contexts[0] if context is None else context
    names = [arm_name(k, h, m) for m, k, h in product(MODES, KERNELS, HEADS)]
    found = [(n, c) for n in names if (c := record.cell(n, context))]
    figure, axes = canvas.axes(0.9 + 0.36 * len(found), left=0.34)
    for i, (name, cell) in enumerate(found):
        axes.barh(i, cell.median, height=0.6, color=COLOURS[names.index(name) % 4], zorder=2)
        axes.text(cell.median, i, f" {cell.median:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [_label(name) for name, _ in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max((c.median for _, c in found), default=1.0))
    axes.set_xlabel("ms a step (plain) or a round (NEXTN), median of single requests", fontsize=8)
    lines = _lines(record, names, context)
    title = f"{record.device.upper()}, full size, random weights, batch 1, {context:,} tokens of context"
    return canvas.picture(figure, title, "\n".join(lines))


def _lines(record: Record, names: Sequence[str], context: int) -> list[str]:
    cells = ((name, record.cell(name, context)) for name in names)
    return [f"{_label(name)}: {cell.text()} ms a {cell.of}" for name, cell in cells if cell]


def _what(switch: str, mode: str) -> str:
    unit = "a round" if mode == "nextn" else "a step"
    if switch == "both":
        return f"Humming x FP8 head, {unit}: gain of both / product of their gains"
    return f"{'Humming' if switch == 'humming' else 'FP8 head'}, {unit}"


def _times(found: Interval) -> str:
    return f"x {found.text(4)}"
