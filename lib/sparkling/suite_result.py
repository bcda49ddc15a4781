"""What became of a suite run, in words and as an exit code."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

GOOD = ("ok", "kept")


def last_lines(said: str, limit: int = 12) -> list[str]:
    """The end of what a failing cell said; an error's own sentence at the top is kept as well."""
    lines = said.strip().splitlines()
    if len(lines) <= limit + 1:
        return lines
    sentence = re.match(r"[A-Za-z_.]+: \S", lines[0]) is not None
    return [*lines[:1], "…", *lines[-limit:]] if sentence else lines[-limit:]


@dataclass
class CellTime:
    """Seconds that one cell took."""

    index: int
    first: str
    seconds: float


@dataclass
class NotebookResult:
    """What became of one notebook.

    verdict: "ok", "kept" (done by the run that is resumed), "failed", "skipped" (needs one that
    failed), "stopped" (the suite was), or "not run".
    """

    name: str
    verdict: str = "not run"
    seconds: float = 0.0
    cells: list[CellTime] = field(default_factory=list)
    kind: str | None = None
    cell: int | None = None
    cell_first: str | None = None
    said: str | None = None
    key: str = ""

    @property
    def problem(self) -> str | None:
        """Why it is not ok: notebook, cell and the last lines of what it said."""
        if self.verdict in GOOD or self.said is None:
            return None
        where = self.name
        if self.cell is not None:
            where += f", cell {self.cell}"
            where += f" ({self.cell_first})" if self.cell_first else ""
        return where + ":\n" + "\n".join("    " + line for line in last_lines(self.said))


@dataclass
class SuiteResult:
    """The outcome of a suite run."""

    run_id: str
    run_dir: Path
    lane: str
    notebooks: list[NotebookResult]
    started: str = ""
    seconds: float = 0.0
    report: Path | None = None
    leaks: list[str] = field(default_factory=list)
    stopped: int | None = None  # signal number

    @property
    def ok(self) -> bool:
        """True only if every notebook ran to its end, nothing was left behind and nothing stopped."""
        return (
            bool(self.notebooks)
            and all(n.verdict in GOOD for n in self.notebooks)
            and not self.leaks
            and self.stopped is None
        )

    @property
    def exit_code(self) -> int:
        """0, or 1 for a failure, or 128 + the signal that stopped it."""
        return 128 + self.stopped if self.stopped else (0 if self.ok else 1)

    def text(self) -> str:
        """The final table, what failed and where the report is."""
        width = max((len(n.name) for n in self.notebooks), default=9)
        lines = [f"{'notebook'.ljust(width)}  {'seconds':>8}  verdict"]
        for n in self.notebooks:
            took = f"{n.seconds:8.1f}" if n.seconds else " " * 8
            lines.append(f"{n.name.ljust(width)}  {took}  {n.verdict}")
        what = "this pass" if any(n.verdict == "kept" for n in self.notebooks) else "total"
        state = "ok" if self.ok else "NOT OK"
        lines.append(f"{what.ljust(width)}  {self.seconds:8.1f}  {state}")
        lines += ["", *(n.problem for n in self.notebooks if n.problem)]
        lines += [f"left behind: {leak}" for leak in self.leaks]
        if self.stopped:
            lines.append(
                f"stopped by {signal.Signals(self.stopped).name}; "
                "continue with `sparkling suite --resume`"
            )
        if self.report is not None:
            lines.append(f"report: {self.report}")
        return "\n".join(lines)
