"""Pictures, drawn without a display (Agg) and small enough to live in a notebook.

Measured numbers only: a published or recorded number never stands in the same picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sparkling import canvas, stats
from sparkling.show import View, esc, rows_of, table

COLOURS = ("#5b6675", "#2f6f9f", "#3a8f5c", "#c9772b", "#8a5aa8", "#a33f4b")
"""The baseline first. Distinguishable in grey and by the common forms of colour blindness; the
labels carry the meaning anyway."""


def ladder(summary: Any, *, where: str = "") -> View:
    """Decode rate of every arm with its interval, the gain beside it, definitions below.

    summary: `ladder.Ladder`. where: the machine, for the caption.
    """
    rungs = list(summary)
    text = _table(summary, where)
    drawn = [r for r in rungs if r.summary.decode_rate is not None]
    if not drawn:
        return View(text.html, text.text)
    return View(text.html, text.text, _bars(drawn, summary, where))


def _bars(rungs: list[Any], summary: Any, where: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    caption = textwrap.wrap(_caption(rungs, summary, where), 138)
    height = 1.1 + 0.5 * len(rungs) + 0.15 * len(caption)
    figure = Figure(figsize=(8.0, height), facecolor="white")
    FigureCanvasAgg(figure)
    bottom = (0.15 * len(caption) + 0.62) / height
    axes = figure.add_axes((0.15, bottom, 0.81, 1.0 - bottom - 0.42 / height))
    ends = []
    for i, rung in enumerate(rungs):
        rate = rung.summary.decode_rate
        axes.barh(i, rate.value, height=0.62, color=COLOURS[i % len(COLOURS)], zorder=2)
        end = rate.value
        if rate.low is not None:
            span = [[rate.value - rate.low], [rate.high - rate.value]]
            axes.errorbar(
                rate.value, i, xerr=span, fmt="none", ecolor="#1c2430", capsize=3, lw=1.1, zorder=3
            )
            end = rate.high
        ends.append(end)
    labels = [_label(r) for r in rungs]
    # 9-point text is about 0.066 inch a character, and the axes are 6.5 inches wide: leave room
    # to the right of each bar for its own label.
    room = max(
        end / max(0.2, 0.97 - len(label) * 0.066 / 6.5)
        for end, label in zip(ends, labels, strict=True)
    )
    for i, label in enumerate(labels):
        axes.text(ends[i] + 0.012 * room, i, label, va="center", fontsize=9)
    axes.set_yticks(range(len(rungs)), [r.arm for r in rungs], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, room)
    axes.set_xlabel("decode rate, tokens per second", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#e6eaf0", lw=0.7, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    title = f"Decode rate by stage · workload: {summary.workload}"
    figure.text(0.02, 1.0 - 0.26 / height, title, fontsize=11, weight="bold")
    figure.text(0.02, 0.08 / height, "\n".join(caption), fontsize=7.5, color="#3d4754", va="bottom")
    return canvas.png(figure)


def ecdf(
    groups: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    unit: str,
    title: str,
    where: str = "",
) -> View | None:
    """The whole distribution of each group as a curve: how large a share is at most so large.

    groups: values by arm, in the order to draw. None when there is no value at all. The axis is
    logarithmic where the largest value is more than twenty times the smallest.
    """
    curves = {arm: stats.ecdf(values) for arm, values in groups.items()}
    curves = {arm: curve for arm, curve in curves.items() if curve[0]}
    if not curves:
        return None
    counts = {arm: sum(v is not None for v in groups[arm]) for arm in curves}
    n = ", ".join(f"{arm} n={count}" for arm, count in counts.items())
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.235, 0.87, 0.63))
    low = min(curve[0][0] for curve in curves.values())
    high = max(curve[0][-1] for curve in curves.values())
    for i, (arm, (values, share)) in enumerate(curves.items()):
        style = ("-", "--", "-.", ":")[i % 4]
        colour = COLOURS[i % len(COLOURS)]
        drawn = _thin([values[0], *values], [0.0, *share])
        axes.step(*drawn, where="post", ls=style, color=colour, lw=1.8, label=arm)
    for share in (0.5, 0.9, 0.99):
        axes.axhline(share, color="#e6eaf0", lw=0.7, zorder=0)
    axes.set_yticks([0, 0.5, 0.9, 0.99], ["0", "P50", "P90", "P99"], fontsize=8)
    axes.set_ylim(0, 1.01)
    if low > 0 and high > 20 * low:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel(f"{label}, {unit}", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.text(0.02, 0.92, title, fontsize=11, weight="bold")
    caption = textwrap.wrap(f"Measured{' on ' + where if where else ' here'}. {n}.", 138)
    figure.text(0.02, 0.02, "\n".join(caption[:2]), fontsize=7.5, color="#3d4754", va="bottom")
    text = f"{title}: {label} by arm, {n}"
    return View(f"<p>{esc(text)}</p>", text, canvas.png(figure))


def _thin(
    values: list[float], share: list[float], most: int = 1500
) -> tuple[list[float], list[float]]:
    """At most about `most` points of a curve, its ends kept: more than a picture can show."""
    step = max(1, len(values) // most)
    keep = sorted({*range(0, len(values), step), len(values) - 1})
    return [values[i] for i in keep], [share[i] for i in keep]


def _label(rung: Any) -> str:
    rate = rung.summary.decode_rate
    text = rate.text(1).split(" (n=")[0]
    if rung.gain is not None:
        text += f"   ×{rung.gain.text(2).split(' (n=')[0]}"
        if not rung.steady:
            text += ", machine not steady"
        elif rung.faster is None:
            text += ", not told apart"
    return text


def _caption(rungs: list[Any], summary: Any, where: str) -> str:
    failed = sum(r.summary.failed for r in rungs)
    unrated = sum(r.summary.unrated for r in summary)
    parts = [
        *([summary.warning] if summary.warning else []),
        f"Measured{' on ' + where if where else ' here'}.",
        summary.definition[0].upper() + summary.definition[1:] + ".",
        f"n: {_counts(rungs)}.",
    ]
    if failed:
        parts.append(f"{failed} rows that were not complete are left out.")
    if unrated:
        parts.append(
            f"{unrated} complete rows without a decode rate (one chunk, or chunks that arrived in one "
            "burst) are left out."
        )
    if any(r.summary.decode_rate.low is None for r in rungs):
        parts.append("No interval: fewer than four prompts.")
    return " ".join(parts)


def _counts(rungs: list[Any]) -> str:
    counts = {r.arm: f"{r.summary.decode_rate.n} prompts, {r.summary.rows} rows" for r in rungs}
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} for each"
    return "; ".join(f"{arm} {text}" for arm, text in counts.items())


def _table(summary: Any, where: str) -> View:
    rows = []
    for rung in summary:
        arm = rung.summary
        length = arm.accept_length
        rows.append(
            {
                "arm": rung.arm,
                "tokens/s": arm.decode_rate.text(1) if arm.decode_rate else None,
                f"× {summary.baseline}": rung.gain.text(2).split(" (n=")[0] if rung.gain else "1",
                "accept length": length.text(2).split(" (n=")[0] if length else None,
                "first token": f"{arm.ttft_s.p50:.3f} s (p50)" if arm.ttft_s else None,
                "rows": rows_of(arm),
            }
        )
    unsteady = ", machine not steady" if summary.warning else ""
    title = f"Decode rate by stage, workload: {summary.workload}{unsteady}"
    return table(rows, title=title, caption=_caption_of(summary, where))


def _caption_of(summary: Any, where: str) -> str:
    drawn = [r for r in summary if r.summary.decode_rate is not None]
    return _caption(drawn, summary, where)
