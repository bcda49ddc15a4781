"""A view that changes while something runs and still reads well when it has ended.

In a kernel it is one output, updated in place (`display_id`), so an executed notebook keeps the
final state only. In a terminal it is one line rewritten; in a pipe a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float | None], width: int = 24) -> str:
    """The last `width` values as a row of bars; equal values are a level line."""
    known = [v for v in values if v is not None][-width:]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low
    return "".join(BARS[3 if span == 0 else round((v - low) / span * 7)] for v in known)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


class Live:
    """`with Live("Measuring") as live: live.update(rows, note="…")`.

    rows: a list of dicts (a table). `min_interval_s` throttles: updates that come faster are kept
    and shown by the next one or by the end. A step that raises leaves a final state that says so.
    """

    def __init__(
        self,
        title: str,
        *,
        min_interval_s: float = 0.5,
        pipe_interval_s: float = 15.0,
        out: TextIO | None = None,
        kernel: bool | None = None,
    ) -> None:
        self.title = title
        self.min_interval_s = max(0.5, min_interval_s)
        self.pipe_interval_s = pipe_interval_s
        self._out = out
        self._kernel = in_kernel() if kernel is None else kernel
        self._rows: list[Mapping[str, Any]] = []
        self._note = ""
        self._began = time.monotonic()
        self._shown = float("-inf")
        self._handle: Any = None
        self._line_open = False
        self._ended = False
        self._rates: dict[tuple[Any, Any], list[float | None]] = {}

    def update(
        self, rows: Sequence[Mapping[str, Any]] | None = None, *, note: str | None = None
    ) -> None:
        """Take a new state; show it unless the last one was shown a moment ago."""
        if rows is not None:
            self._rows = list(rows)
        if note is not None:
            self._note = note
        self._show(force=False)

    def progress(self, done: int, total: int, row: Mapping[str, Any]) -> None:
        """What `bench.run` calls after every row: one line a workload, the newest rates as bars."""
        key = (row.get("arm"), row.get("workload"))
        rates = self._rates.setdefault(key, [])
        rates.append(row.get("decode_rate"))
        rows = [
            {
                "arm": arm,
                "workload": workload,
                "rows": len(values),
                "newest": "n/a" if values[-1] is None else f"{values[-1]:.1f} tokens/s",
                "rates": spark(values),
            }
            for (arm, workload), values in self._rates.items()
        ]
        self.update(rows, note=f"{done} of {total}")

    def end(self, note: str | None = None) -> None:
        """Show the final state; later updates are ignored."""
        if self._ended:
            return
        if note is not None:
            self._note = note
        self._show(force=True, final=True)
        self._ended = True

    def __enter__(self) -> Live:
        self._show(force=True)
        return self

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        if kind is None:
            self.end()
        else:
            self.end(f"stopped by {kind.__name__}: {problem}")

    def state(self, *, final: bool = False) -> Any:
        """The current state as a `show.View`."""
        from sparkling import show

        head = f"{self.title} · {clock(time.monotonic() - self._began)}"
        head += "" if final else " …"
        if self._note:
            head += f" · {self._note}"
        if not self._rows:
            return show.note(head)
        return show.table(self._rows, title=head)

    def _show(self, *, force: bool, final: bool = False) -> None:
        if self._ended:
            return
        now = time.monotonic()
        stream = self._out or sys.stdout
        tty = bool(getattr(stream, "isatty", lambda: False)())
        gap = self.min_interval_s if self._kernel or tty else self.pipe_interval_s
        if not force and now - self._shown < gap:
            return
        self._shown = now
        view = self.state(final=final)
        if self._kernel:
            self._show_in_kernel(view)
        elif tty and not final:
            first = view.text.split("\n", 1)[0]
            stream.write("\r\x1b[K" + first[:118])
            stream.flush()
            self._line_open = True
        else:
            stream.write(
                ("\r\x1b[K" if self._line_open else "")
                + (view.text if final else view.text.split("\n", 1)[0])
                + "\n"
            )
            stream.flush()
            self._line_open = False

    def _show_in_kernel(self, view: Any) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(view, display_id=True)
        else:
            self._handle.update(view)


def in_kernel() -> bool:
    """Whether this runs in a Jupyter kernel (and not in a terminal IPython or a script)."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None
