"""Figures that others published, each with source and conditions: `facts/published.toml`.

Nothing here was measured by us, and no figure of this module may stand in one picture with a measured
one. Where sources differ, all figures are kept under one `topic`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparkling._toml import Table, closest, read
from sparkling.errors import UsageError

FILE = Path(__file__).parent / "facts" / "published.toml"
_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Source:
    """Where figures come from. `url` is empty where there is none, and `no_url` says why."""

    name: str
    title: str
    url: str
    no_url: str
    read: str


@dataclass(frozen=True)
class Figure:
    """One published figure, or one derived from published ones (`formula` is not empty then)."""

    id: str
    value: float
    unit: str
    what: str
    source: str  # a name in `sources`; of a derived figure: those of its parts
    conditions: str
    date: str
    topic: str
    formula: str = ""
    digits: int | None = None  # decimals as quoted; None: those that `value` has

    def text(self) -> str:
        """`37.8115 tokens/s`, as the source prints it."""
        number = f"{self.value:,.{self.digits}f}" if self.digits is not None else _plain(self.value)
        return f"{number} {self.unit}"


@dataclass(frozen=True)
class Published:
    """The whole file."""

    sources: Mapping[str, Source]
    figures: Mapping[str, Figure]  # derived ones among them

    def topics(self) -> dict[str, list[Figure]]:
        """What sources disagree about: all figures of each topic."""
        found: dict[str, list[Figure]] = {}
        for one in self.figures.values():
            if one.topic:
                found.setdefault(one.topic, []).append(one)
        return found


def load(path: Path = FILE) -> Published:
    """Read the file. Raises UsageError naming table and key for anything that does not fit."""
    shown = path.name
    raw = read(path, shown)
    top = Table(shown, "", raw)
    sources = {name: _source(name, table) for name, table in top.table("sources").tables()}
    figures: dict[str, Figure] = {}
    for kind in ("figure", "derived"):
        for number, entry in enumerate(top.take(kind, list, []), 1):
            table = Table(shown, f"{kind} {entry.get('id', number)}", entry)
            one = _figure(table, sources) if kind == "figure" else _derived(table, figures)
            if one.id in figures:
                raise UsageError(f"{shown}: the id {one.id} is given twice.")
            figures[one.id] = one
    top.close()
    return Published(sources, figures)


@cache
def all_() -> Published:
    """The package's own file, read once."""
    return load()


def figure(name: str) -> Figure:
    """One figure by its id. Raises UsageError when there is none."""
    figures = all_().figures
    if name not in figures:
        raise UsageError(f"There is no published figure {name!r}{closest(name, figures)}.")
    return figures[name]


def value(name: str) -> float:
    """One figure's value, as quoted: a derived one is recomputed and not rounded."""
    one = figure(name)
    return compute(one.formula, all_().figures) if one.formula else one.value


def rows(names: Iterable[str]) -> list[dict[str, Any]]:
    """Figures as rows for a table: what, figure, source, conditions."""
    return [
        {
            "published": one.what,
            "figure": one.text(),
            "source": source_text(one),
            "conditions": one.conditions or f"derived: {one.formula}",
        }
        for one in map(figure, names)
    ]


def source_text(one: Figure) -> str:
    """Title and address of a figure's source; of a derived figure its parts' sources."""
    sources = all_().sources
    if one.formula:
        return "derived from " + ", ".join(dict.fromkeys(one.source.split(", ")))
    source = sources[one.source]
    return f"{source.title} ({source.url or source.no_url}; {one.date})"


def compute(formula: str, figures: Mapping[str, Figure]) -> float:
    """The value of an arithmetic formula over figures' ids. Raises UsageError for anything else."""
    try:
        return _compute(ast.parse(formula, mode="eval").body, figures)
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"The formula {formula!r} cannot be computed: {error}.") from None


def _compute(node: ast.AST, figures: Mapping[str, Figure]) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.Name):
        if node.id not in figures:
            raise UsageError(f"A formula names {node.id!r}, which is no figure given before it.")
        one = figures[node.id]
        return compute(one.formula, figures) if one.formula else one.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _compute(node.left, figures), _compute(node.right, figures)
        return _OPERATIONS[type(node.op)](left, right)
    raise UsageError("A formula may hold numbers, ids and + - * / ** only.")


def _source(name: str, table: Table) -> Source:
    url, no_url = table.take("url", str, ""), table.take("no_url", str, "")
    if bool(url) == bool(no_url):
        raise table.refuse("url", "give either url or no_url, the reason why there is none")
    source = Source(name, table.take("title", str), url, no_url, table.take("read", str))
    table.close()
    return source


def _number(table: Table, key: str) -> float:
    found = table.data.get(key)
    if type(found) not in (int, float):
        raise table.refuse(key, f"must be a number, not {found!r}")
    return table.take(key, type(found))


def _figure(table: Table, sources: Mapping[str, Source]) -> Figure:
    source = table.take("source", str)
    if source not in sources:
        raise table.refuse("source", f"there is no source {source!r}{closest(source, sources)}")
    one = Figure(
        id=table.take("id", str),
        value=_number(table, "value"),
        unit=table.take("unit", str),
        what=table.take("what", str),
        source=source,
        conditions=table.take("conditions", str),
        date=table.take("date", str),
        topic=table.take("topic", str, ""),
        digits=table.take("digits", int, None),
    )
    table.close()
    return one


def _derived(table: Table, before: Mapping[str, Figure]) -> Figure:
    formula = table.take("formula", str)
    used = [n.id for n in ast.walk(ast.parse(formula, mode="eval")) if isinstance(n, ast.Name)]
    parts = [before[name] for name in used if name in before]
    one = Figure(
        id=table.take("id", str),
        value=_number(table, "value"),
        unit=table.take("unit", str),
        what=table.take("what", str),
        source=", ".join(
            dict.fromkeys(source for part in parts for source in part.source.split(", "))
        ),
        conditions="",
        date="",
        topic=table.take("topic", str, ""),
        formula=formula,
        digits=table.take("digits", int),
    )
    compute(formula, before)  # refuses what it cannot compute
    table.close()
    return one


def _plain(number: float) -> str:
    """37.8115, 1,319, 0.65: no digit that the source does not have."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"
