"""Fields of a JSON record, each checked, with a clause that says which one is wrong and how.

The reader of a record catches `Wrong` and makes one sentence of it, with the file's name.
"""

from __future__ import annotations

import math
from typing import Any


class Wrong(Exception):
    """What is wrong with a record, as a clause."""


def table_of(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong(f"{where} is {'missing' if value is None else 'no table'}")
    return value


def list_of(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise Wrong(f"{where} is {'missing' if value is None else 'no list'}")
    return value


def text_of(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise Wrong(f"{where} is {'missing' if value is None else 'no text'}")
    return value


def number_of(value: Any, where: str, *, least: float | None = None) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (value <= 0 if least is None else value < least):
        raise Wrong(
            f"{where} is {'missing' if value is None else f'not a number that can be: {value!r}'}"
        )
    return float(value)


def count_of(value: Any, where: str) -> int:
    number = number_of(value, where)
    if number != int(number):
        raise Wrong(f"{where} is {value!r} and must be a whole number")
    return int(number)
