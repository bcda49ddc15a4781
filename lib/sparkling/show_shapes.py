"""The decode kernels to look at: tables with n and spread, and pictures against the byte limit.

A picture holds one record's measurements and the least times that follow from its own limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkling import canvas
from sparkling.shapes import ExpertCase, HeadCase, Record
from sparkling.show import View, note, table

MEASURE = "sparkling shapes --measure"
_GREY, _BLUE, _GREEN, _ORANGE = "#5b6675", "#2f6f9f", "#3a8f5c", "#c9772b"
_FORMATS = {"BF16": _GREY, "FP32-out": _BLUE, "FP8": _GREEN}
_ROUTINGS = {"random": _BLUE, "repeated": _ORANGE}
_TIMES = "µs a call: median, quartiles and minimum over n replays of a CUDA graph"
_WIDE = 150


def where(record: Record, *, live: bool) -> View:
    """What was measured, when, with what; and whether it was here."""
    facts = record.facts
    sizes = f"{facts.get('sms')} SMs, compute capability {facts.get('capability')}"
    rows = [
        {"": "device", "what": f"{record.device}, {sizes}"},
        {"": "measured", "what": f"{record.taken}, {'on this machine' if live else 'elsewhere'}"},
        {"": "limit", "what": f"{record.limit / 1e9:,.0f} GB/s read, by {record.reader}"},
        {"": "versions", "what": ", ".join(f"{k} {v}" for k, v in record.versions.items())},
        {"": "clocks", "what": _clocks(record)},
        {"": "command", "what": record.command},
    ]
    # A remark, made after the run, corrects what the run said of the same part.
    mended = {remark.split(",")[0] for remark in record.remarks}
    rows += [
        {
            "": "failed, but see the remark" if reason.split(":")[0] in mended else "failed",
            "what": reason,
        }
        for reason in record.missing
    ]
    rows += [{"": "remark", "what": remark} for remark in record.remarks]
    title = f"Kernels alone on {record.device}"
    if not live:
        title = f"Recorded on {record.device}, not on this machine"
    return table(rows, title=title, caption="" if live else f"`{MEASURE}` measures a GPU of yours.")


def limit(record: Record) -> View:
    """Every way of reading the memory that was tried; the fastest is the limit."""
    rows = [
        {
            "reader": name,
            "median, GB/s": record.read_bytes / times.median / 1e3,
            "slowest": record.read_bytes / max(times.us) / 1e3,
            "fastest": record.read_bytes / min(times.us) / 1e3,
            "n": times.n,
            "": "the limit" if name == record.reader else "",
        }
        for name, times in sorted(record.readers.items(), key=lambda item: item[1].median)
    ]
    caption = f"{record.read_bytes / 2**30:.2f} GiB read once; GB are 10^9 bytes. n replays."
    return table(rows, title="How fast this device reads its memory", caption=caption)


def head(record: Record) -> View:
    """The LM head in its formats."""
    if not record.head:
        return note("This record holds no measurement of the LM head.")
    bf16 = {case.rows: case for case in record.head if case.format == "BF16"}
    rows = [
        {
            "format": case.format,
            "rows": str(case.rows),
            "kernel": case.kernel,
            **_times(case),
            "MB": case.bytes / 1e6,
            **_against(record, case),
            "x BF16": _faster(bf16.get(case.rows), case),
            "error": f"{case.error:.2g}",
        }
        for case in record.head
    ]
    caption = (
        f"{_TIMES}. MB: the head's weights with their scales, from rotating copies, so none of it is in the "
        "cache. At the limit: these bytes over it. Error: root mean square distance of 4,096 logits "
        "from float32 over their size, random weights. FP8 is the product as served, through the plugin's "
        f"method.{_launches(record.head)}"
    )
    vocabulary, hidden = record.head_shape
    return table(
        rows, title=f"The LM head, {vocabulary:,} × {hidden:,}", caption=caption, width=_WIDE
    )


def head_picture(record: Record) -> View:
    """Time of the head by rows and format, the least times as ticks."""
    counts = sorted({case.rows for case in record.head})
    if not counts:
        return head(record)
    figure, axes = canvas.axes(3.0, grid="y")
    formats = [name for name in _FORMATS if any(c.format == name for c in record.head)]
    width = 0.8 / len(formats)
    for case in record.head:
        place = counts.index(case.rows) + (formats.index(case.format) + 0.5) * width - 0.4
        axes.bar(place, case.times.median, 0.92 * width, color=_FORMATS[case.format], zorder=2)
        least = record.least_us(case)
        axes.plot([place - 0.46 * width, place + 0.46 * width], [least] * 2, color="black", lw=1.4)
        axes.text(
            place,
            case.times.median,
            f"{100 * record.share(case):.0f} %",
            ha="center",
            va="bottom",
            fontsize=7,
        )
    axes.set_xticks(range(len(counts)), [str(c) for c in counts], fontsize=8)
    axes.set_xlabel("rows (tokens) at once", fontsize=8.5)
    axes.set_ylabel("µs a product", fontsize=8.5)
    axes.set_ylim(0, 1.3 * max(case.times.median for case in record.head))
    marks = [canvas.patch(_FORMATS[name], name) for name in formats]
    marks.append(_line("black", "its bytes at the measured limit"))
    axes.legend(handles=marks, fontsize=8, frameon=False, ncols=4, loc="upper left")
    return canvas.picture(
        figure, f"LM head on {record.device}: share of the byte limit reached", head(record).text
    )


def experts(record: Record, *, part: str = "layer", backend: str = "humming") -> View:
    """Routed experts of one layer: unions, times, costs, bandwidth."""
    cases = [c for c in record.experts if (c.part, c.backend) == (part, backend)]
    what = {"layer": "one layer of routed experts", "products": "its two products alone"}[part]
    if not cases:
        return note(f"This record holds no measurement of {backend}, {what}.")
    rows = [
        {
            "tokens": str(case.tokens),
            "routing": case.routing if case.tokens > 1 else "one token",
            "union": f"{case.union:.2f} ({case.union_span[0]} to {case.union_span[1]})",
            **_times(case),
            "cost": _cost(record, case),
            "MB": record.moved(case) / 1e6,
            **_against(record, case),
        }
        for case in cases
    ]
    error = record.expert_errors[backend]
    doubt = "" if record.shown_right(backend) else ", which is more than rounding"
    caption = (
        f"{_TIMES} of {cases[0].times.calls} calls, each with its own route and layer. Union: "
        "experts read, mean and span over the calls timed. Cost: in times of one token, 95 % interval "
        f"from resampled replays. MB: the union's weights and scales. At the limit: the µs of these bytes at "
        f"the fastest reading measured on {record.device}; share: that over the µs. One token's output is "
        f"{error:.2g} away from float32{doubt}.{_launches(cases)}"
    )
    title = f"{backend.capitalize()}, {what}: {record.experts_of} experts, top {record.top_k}"
    title += unproved(record, backend)
    return table(rows, title=title, caption=caption, width=_WIDE)


def experts_picture(record: Record, *, backend: str = "humming") -> View:
    """Time of one layer by tokens, for both routings, the least times dashed."""
    cases = [c for c in record.experts if (c.part, c.backend) == ("layer", backend)]
    if not cases:
        return experts(record, backend=backend)
    figure, axes = canvas.axes(3.1, grid="y")
    for routing, colour in _ROUTINGS.items():
        line = [c for c in cases if c.routing == routing or c.tokens == 1]
        line.sort(key=lambda case: case.tokens)
        tokens = [case.tokens for case in line]
        middle = [case.times.median for case in line]
        spread = [
            [m - c.times.quartiles[0] for m, c in zip(middle, line, strict=True)],
            [c.times.quartiles[1] - m for m, c in zip(middle, line, strict=True)],
        ]
        axes.errorbar(
            tokens, middle, yerr=spread, color=colour, marker="o", ms=4, lw=1.4, label=routing
        )
        least = [record.least_us(case) for case in line]
        axes.plot(tokens, least, color=colour, ls="--", lw=1.1, label=f"{routing}: bytes at limit")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens at once", fontsize=8.5)
    axes.set_ylabel("µs a layer", fontsize=8.5)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    title = f"Routed experts on {record.device}, {backend}{unproved(record, backend)}"
    return canvas.picture(figure, title, experts(record, backend=backend).text)


def unproved(record: Record, *backends: str) -> str:
    """What a table's title must say of backends whose output was not shown to be right; or nothing."""
    names = [one.capitalize() for one in backends if not record.shown_right(one)]
    return f" ({' and '.join(names)}: output not shown to be right in this run)" if names else ""


# -- pieces --------------------------------------------------------------------------------------


def _times(case: HeadCase | ExpertCase) -> dict[str, Any]:
    low, high = case.times.quartiles
    return {
        "µs": f"{case.times.median:,.1f}",
        "quartiles": f"{low:,.1f} to {high:,.1f}",
        "min": f"{min(case.times.us):,.1f}",
        "n": case.times.n,
    }


def _against(record: Record, case: HeadCase | ExpertCase) -> dict[str, Any]:
    rate = record.moved(case) / case.times.median / 1e3
    return {
        "at the limit": f"{record.least_us(case):,.1f}",
        "GB/s": f"{rate:,.0f}",
        "share": f"{100 * record.share(case):.0f} %",
    }


def _faster(bf16: HeadCase | None, case: HeadCase) -> str | None:
    return None if bf16 is None else f"{bf16.times.median / case.times.median:.2f}"


def _cost(record: Record, case: ExpertCase) -> str | None:
    if case.tokens == 1:
        return "1"
    cost = record.cost(case)
    if cost is None:
        return None
    if cost.low is None or cost.high is None:
        return f"{cost.value:.2f}"
    return f"{cost.value:.2f} [{cost.low:.2f}, {cost.high:.2f}]"


def _clocks(record: Record) -> str | None:
    parts = []
    for when, facts in record.clocks.items():
        if facts:
            sm, memory = facts.get("clocks.sm"), facts.get("clocks.mem")
            parts.append(f"{when}: SM {sm}, memory {memory}")
    return "; ".join(parts) or None


def _launches(cases: Sequence[HeadCase | ExpertCase]) -> str:
    bare = [case for case in cases if not case.times.graph]
    return f" {len(bare)} cases could not be captured: theirs hold the launches." if bare else ""


def _line(colour: str, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, lw=1.4, label=label)
