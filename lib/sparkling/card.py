"""The two cards of a notebook: what it opens with, and what it closes with.

Their text is data, `notebooks/cards.toml`, one table per notebook::

    [50_humming]
    title = "Humming expert kernels"
    have = "what the reader holds at the end, one or two sentences"
    needs = ["server", "checkpoint", "memory"]     # names of checks, see `needs.CHECKS`
    risks = "what can go wrong on this machine"
    undo = "how to take it back"
    after = ["40_baseline"]                        # skipped by the suite if one of these failed
    next = "60_fp8_lm_head"                        # "" for the last

Minutes are never written by hand: they come from the last run of this lane under `runs/`, else
from `notebooks/minutes.json`, which `sparkling suite --record-minutes` writes::

    {"cpu": {"50_humming": {"minutes": 0.8, "date": "2026-11-29", "machine": "2 CPUs, x86_64"}}}
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import _toml
from sparkling.errors import UsageError
from sparkling.files import write_atomic
from sparkling.lane import Lane
from sparkling.show import View, esc, prose

FILE = "cards.toml"
MINUTES = "minutes.json"
_KEYS = {"title", "have", "needs", "risks", "undo", "after", "next"}


@dataclass(frozen=True)
class Card:
    """The text of one notebook's cards."""

    name: str
    title: str
    have: str
    needs: tuple[str, ...]
    risks: str
    undo: str
    after: tuple[str, ...]
    next: str


def load(folder: Path) -> dict[str, Card]:
    """All cards of a notebooks folder; none where there is no file. Raises UsageError."""
    path = folder / FILE
    if not path.is_file():
        return {}
    shown = f"{folder.name}/{FILE}"
    cards = {}
    for name, table in _toml.read(path, shown).items():
        if not isinstance(table, dict):
            raise UsageError(f"{shown}: {name} must be a table, one per notebook.")
        unknown = set(table) - _KEYS
        if unknown:
            key = sorted(unknown)[0]
            raise UsageError(f"{shown}, [{name}]: unknown key {key}{_toml.closest(key, _KEYS)}.")
        missing = {"title", "have", "risks", "undo"} - set(table)
        if missing:
            raise UsageError(f"{shown}, [{name}]: {sorted(missing)[0]} is missing.")
        for key, value in table.items():
            listed = key in ("needs", "after")
            fits = isinstance(value, list if listed else str)
            if not fits or (listed and not all(isinstance(v, str) for v in value)):
                want = "a list of names" if listed else "text"
                raise UsageError(f"{shown}, [{name}]: {key} must be {want}.")
        cards[name] = Card(
            name,
            table["title"],
            table["have"],
            tuple(table.get("needs", ())),
            table["risks"],
            table["undo"],
            tuple(table.get("after", ())),
            table.get("next", ""),
        )
    for card in cards.values():
        for other in (*card.after, *filter(None, [card.next])):
            if other not in cards:
                hint = _toml.closest(other, cards)
                raise UsageError(f"{shown}, [{card.name}]: there is no notebook {other}{hint}.")
    return cards


def one(name: str, lane: Lane) -> Card:
    """One notebook's card. Raises UsageError when it has none."""
    cards = load(lane.root / "notebooks")
    if name not in cards:
        raise UsageError(f"notebooks/{FILE} has no table [{name}]{_toml.closest(name, cards)}.")
    return cards[name]


def after(cards: Mapping[str, Card], name: str) -> tuple[str, ...]:
    """The notebooks that this one needs done; none where nothing is known of it."""
    return cards[name].after if name in cards else ()


# -- minutes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minutes:
    """How long a notebook took, and where that is known from."""

    seconds: float
    source: str

    @property
    def text(self) -> str:
        """As "0.8 minutes (…)"."""
        return f"{self.seconds / 60:.1f} minutes ({self.source})"


def measured(lane: Lane, folder: Path | None = None) -> dict[str, Minutes]:
    """Notebook → how long it takes on this lane; those never measured are left out."""
    found: dict[str, Minutes] = {}
    recorded = _recorded(folder or lane.root / "notebooks").get(lane.kind, {})
    for name, entry in recorded.items():
        where = ", ".join(str(entry[k]) for k in ("date", "machine") if entry.get(k))
        found[name] = Minutes(float(entry["minutes"]) * 60, f"measured {where}")
    for path in sorted(lane.runs.glob("*/timings.json")):  # run ids sort by time
        try:
            data = json.loads(path.read_text("utf-8"))
            if data["lane"] != lane.kind:
                continue
            for entry in data["notebooks"]:
                if entry["verdict"] == "ok":
                    source = f"measured here, run {data['run']}"
                    found[entry["name"]] = Minutes(float(entry["seconds"]), source)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def seconds(lane: Lane, folder: Path | None = None) -> dict[str, float]:
    """Notebook → seconds expected on this lane, where they were ever measured."""
    return {name: m.seconds for name, m in measured(lane, folder).items()}


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / MINUTES).read_text("utf-8"))
        return {k: v for k, v in data.items() if isinstance(v, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as problem:
        raise UsageError(
            f"notebooks/{MINUTES} is not readable ({problem}); write it again with "
            "`sparkling suite --record-minutes`."
        ) from None


def record_minutes(folder: Path, lane: str, seconds_of: Mapping[str, float]) -> Path:
    """Write measured seconds of one lane to `minutes.json`; the other lanes stay as they are."""
    data = _recorded(folder)
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}"
    mine = data.setdefault(lane, {})
    for name, took in seconds_of.items():
        mine[name] = {
            "minutes": round(took / 60, 2),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
        }
    data[lane] = dict(sorted(mine.items()))
    path = folder / MINUTES
    write_atomic(path, json.dumps(data, indent=1, sort_keys=True) + "\n")
    return path


# -- the cards -----------------------------------------------------------------------------------


def opening(name: str, lane: Lane) -> View:
    """What you will have, how long it takes here, what it needs, what it risks and how to undo it."""
    card = one(name, lane)
    took = measured(lane).get(name)
    time_text = (
        took.text
        if took
        else (f"not measured yet on the {lane.kind} lane; run `sparkling suite --record-minutes`")
    )
    rows = [
        ("You will have", card.have),
        ("Minutes", time_text),
        ("Needs", ", ".join(card.needs) + " (checked by nb.check())" if card.needs else "nothing"),
        ("Risks", card.risks),
        ("Undo", card.undo),
        ("Lane", lane.reason),
    ]
    return _card(card.title, rows)


def closing(
    name: str, lane: Lane, proved: Iterable[str] = (), note: str = "", *, answered: bool = False
) -> View:
    """What was proved here, and what to do next. answered: a server was started and answered."""
    card = one(name, lane)
    done = list(proved)
    follow = "this was the last notebook; the appendices stand each for itself"
    if name.startswith("appendix"):
        follow = "nothing: an appendix stands for itself"
    if card.next:
        cards = load(lane.root / "notebooks")
        follow = f"{card.next}: {cards[card.next].title}"
    nothing = (
        "a server was started and answered; no switch was proved"
        if answered
        else "nothing was started, so nothing was proved"
    )
    rows = [("Proved here", "\n".join(done) or nothing)]
    if note:
        rows.append(("Note", note))
    rows.append(("Next", follow))
    return _card(f"Done: {card.title}", rows)


def _card(title: str, rows: list[tuple[str, str]]) -> View:
    body = "".join(
        f"<tr><th align='left'>{esc(k)}</th><td align='left'>{prose(v)}</td></tr>" for k, v in rows
    )
    width = max(len(k) for k, _ in rows)
    pad = "\n" + " " * (width + 2)
    text = "\n".join(f"{k.ljust(width)}  {v.replace(chr(10), pad)}" for k, v in rows)
    return View(f"<p><b>{esc(title)}</b></p><table>{body}</table>", f"{title}\n{text}")
