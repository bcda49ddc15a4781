"""Recordings: what a real server said elsewhere, kept as data and always shown with their label.

One JSON file each: `label` (what, where, when, versions, caveat), `stage`, `switches`,
`arguments` (the part of /server_info that the switches ask for), `log` (the lines of that start
that matter, verbatim), `meta_info` (of one reply), `timing` (milliseconds per step or round, each
repeat) and `status` (of the plugin, or null).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sparkling import log as _log
from sparkling.errors import UsageError

_HERE = Path(__file__).parent
LABEL = ("what", "where", "when", "versions", "caveat")


def names() -> list[str]:
    """Names of the recordings, sorted."""
    return sorted(p.stem for p in _HERE.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """One recording. Raises UsageError for an unknown name."""
    path = _HERE / f"{name}.json"
    if name not in names():
        near = get_close_matches(name, names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names())}."
        raise UsageError(f"There is no recording {name!r}; {hint}")
    return json.loads(path.read_text("utf-8"))


def events(data: Mapping[str, Any]) -> list[Any] | None:
    """The recording's log lines as typed events; None when it has no log."""
    return list(_log.parse(data["log"])) if data.get("log") else None


def for_stage(stage: str, switches: Mapping[str, bool]) -> str | None:
    """The recording that shows a stage's own switch at work, or None.

    Exactly the same switches first, then the first whose stage has that name.
    """
    exact = [n for n in names() if load(n)["switches"] == dict(switches)]
    named = [n for n in names() if load(n)["stage"] == stage]
    return next(iter([n for n in exact if n.startswith("h200")] or exact or named), None)
