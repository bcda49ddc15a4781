"""What every picture begins and ends with: a figure with one set of axes, a title, a small PNG."""

from __future__ import annotations

import io
from typing import Any

from sparkling.errors import UsageError
from sparkling.show import View

MAX_BYTES = 60_000
"""A picture's size in a notebook, at most."""
COLOURS = 128
"""In a picture, at most: few hues, each with the shades of its edges."""


def axes(height: float, *, left: float = 0.08, grid: str = "x") -> tuple[Any, Any]:
    """A figure 8 inches wide, drawn without a display, and its axes.

    height: inches; left: where the axes begin, as a share of the width; grid: "x" for bars that lie,
    "y" for bars that stand.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), facecolor="white")
    FigureCanvasAgg(figure)
    made = figure.add_axes((left, 0.5 / height, 0.97 - left, 1.0 - 0.95 / height))
    made.tick_params(labelsize=8)
    made.grid(axis=grid, color="#e6eaf0", lw=0.7, zorder=0)
    for side in ("top", "right"):
        made.spines[side].set_visible(False)
    return figure, made


def patch(colour: str, label: str) -> Any:
    """A legend's entry for bars."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


def png(figure: Any) -> bytes:
    """The figure as PNG; drawn coarser until it fits into MAX_BYTES, or as coarse as can be read.

    With a palette: a third of the bytes, so that a picture full of text need not be coarse.
    """
    from PIL import Image  # matplotlib cannot write a PNG without it

    for dpi in (120, 100, 80, 60, 45):
        drawn, out = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
        with Image.open(drawn) as picture:
            picture.convert("RGB").quantize(COLOURS).save(out, format="PNG", optimize=True)
        if out.tell() <= MAX_BYTES:
            break
    return out.getvalue()


def picture(figure: Any, title: str, text: str, *, top: float | None = None) -> View:
    """The figure under its title, with `text` saying the same in words.

    top: where the axes end, as a share of the height, to leave room for a legend. Raises UsageError
    when it does not fit into MAX_BYTES.
    """
    if top is not None:
        box = figure.axes[0].get_position()
        figure.axes[0].set_position((box.x0, box.y0, box.width, top - box.y0))
    height = figure.get_size_inches()[1]
    figure.text(0.02, 1.0 - 0.26 / height, title, fontsize=11, weight="bold")
    drawn = png(figure)
    if len(drawn) > MAX_BYTES:
        raise UsageError(f"The picture {title!r} does not fit into {MAX_BYTES:,} bytes.")
    plain = f"{title}\n{text}"
    return View(f"<pre>{plain}</pre>", plain, drawn)
