"""Measure the decode kernels on this machine's GPU: the benchmark as a child of the server's Python.

It must have the GPU to itself, so it is refused while anything else computes on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import gpu_child, gpus, shapes
from sparkling.errors import SparklingError, UsageError
from sparkling.lane import Lane

MODULE = "sparkling_sglang.bench_shapes"
PARTS = ("bandwidth", "head", "experts", "marlin")
NEEDED = "bandwidth"  # the limit: without it no case can be judged
LIMIT_S = 300.0
GRACE_S = 30.0  # for the child to see its own limit

Holders = Callable[[], gpus.Holders]


def refusal(lane: Lane, holders: Holders = gpus.holders) -> str | None:
    """Why the kernels cannot be measured here now, in one sentence, or None."""
    if lane.kind == "cpu":
        return "The kernels need an NVIDIA GPU, and lane cpu has none to use."
    if not lane.server_python.exists():
        return f"There is no server environment at {lane.server_python}; run {lane.set_up}."
    return gpus.not_alone(holders(), "the kernels must have it to themselves")


def parts(text: str) -> str:
    """Comma-separated parts of the benchmark, as it takes them. Raises UsageError."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in PARTS]
    if unknown or not asked:
        raise UsageError(
            f"{unknown[0] if unknown else text!r} is no part of the kernels' benchmark; the parts are "
            f"{', '.join(PARTS)}."
        )
    if NEEDED not in asked:
        raise UsageError(
            f"A record needs the device's {NEEDED}, which every time is put against: add it, as in "
            f"--only {','.join([NEEDED, *asked])}."
        )
    return ",".join(asked)


def _place(out: Path) -> None:
    """Make room for a record at `out`; whatever else lies there stays. Raises UsageError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise UsageError(f"{out} is a folder; name a file for the record.")
        if out.exists():
            kept = json.loads(out.read_text("utf-8"))
            if not isinstance(kept, dict) or kept.get("schema") != shapes.SCHEMA:
                raise ValueError
            out.unlink()
    except ValueError:
        raise UsageError(
            f"{out} exists and is no record of the kernels, so it is left alone; name another file."
        ) from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror or error}).") from None


def measure(
    lane: Lane,
    out: Path,
    *,
    only: str = "",
    limit_s: float = LIMIT_S,
    holders: Holders = gpus.holders,
) -> shapes.Record:
    """Run the benchmark and read the record that it leaves at `out` (its output beside it, .log).
    An older record there is replaced. only: its parts, comma-separated (default: all but Marlin).

    A record that lacks cases is returned with them named in `missing`; the child never outlives this
    call.

    Raises:
        UsageError: it cannot run here (see `refusal`), or not write there, or `only` is wrong.
        SparklingError: it ended without a usable record.
    """
    only = parts(only) if only else ""
    reason = refusal(lane, holders)
    if reason:
        raise UsageError(reason)
    out = out.absolute()
    _place(out)
    command = [str(lane.server_python), "-m", MODULE, "--out", str(out)]
    command += ["--limit-s", f"{limit_s:g}"] + (["--only", only] if only else [])
    last = gpu_child.run(
        lane,
        command,
        out.with_name(out.name + ".log"),
        limit_s=limit_s,
        grace_s=GRACE_S,
        cwd=out.parent,
    )
    if not out.exists():
        raise SparklingError(f"The kernels were not measured; the benchmark said: {last}")
    return shapes.read(out)


@dataclass(frozen=True)
class Found:
    """What a notebook shows: a record, whether it was measured here just now, and if not, why not."""

    record: shapes.Record
    live: bool
    why: str = ""

    def view(self) -> Any:
        """As a `show.View`."""
        from sparkling import show, show_shapes

        view = show_shapes.where(self.record, live=self.live)
        return view if self.live else show.note(self.why, strong=True) + view

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def __repr__(self) -> str:
        return self.view().text


def here_or_recorded(nb: Any, holders: Holders = gpus.holders) -> Found:
    """Measure on this machine's GPU, into the run's folder; the recorded H200 where that cannot be.

    nb: the notebook's session. Raises SparklingError when a measurement that began gave no record.
    """
    reason = refusal(nb.lane, holders)
    if reason:
        return Found(shapes.recorded(), False, reason)
    path = nb.run.path("kernel-shapes.json")
    return Found(measure(nb.lane, path, holders=holders), True)
