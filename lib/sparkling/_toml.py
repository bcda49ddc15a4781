"""Reading TOML so that every mistake is one sentence naming file, table and key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparkling.errors import UsageError

_MISSING: Any = object()
_WORDS = {str: "a string", int: "a whole number", bool: "true or false", dict: "a table"}


def read(path: Path, shown: str) -> dict[str, Any]:
    """Return the parsed file; `shown` is what error sentences call it. Raises UsageError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{shown}: there is no such file.") from None
    except IsADirectoryError:
        raise UsageError(f"{shown}: this is a directory, not a TOML file.") from None
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read ({error.strerror or error}).") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UsageError(f"{shown}: line {line} is not UTF-8, which TOML must be.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = str(error)
        if told.startswith("Cannot overwrite a value"):
            told = "the same key is given twice" + told.removeprefix("Cannot overwrite a value")
        elif told.startswith("Cannot declare"):
            names = ".".join(re.findall(r"'([^']*)'", told))
            told = f"table [{names}] is given twice" + told[told.rfind(" (at ") :]
        raise UsageError(f"{shown}: broken TOML, {told}.") from None
    except RecursionError:
        raise UsageError(f"{shown}: broken TOML, nested too deeply.") from None


def closest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`-style help, or nothing when no known name is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else text + "."


class Table:
    """One table of a file, read key by key; `close` refuses what nobody asked for."""

    def __init__(self, shown: str, name: str, data: dict[str, Any]) -> None:
        self.shown, self.name, self.data = shown, name, data
        self._asked: set[str] = set()

    def refuse(self, key: str | None, why: str) -> UsageError:
        table = f"table [{self.name}]" if self.name else "top level"
        at = f", key {key}" if key is not None else ""
        return UsageError(sentence(f"{self.shown}, {table}{at}: {why}"))

    def take(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """Return the value of `key`, of exactly this type (a bool is no int)."""
        self._asked.add(key)
        if key not in self.data:
            if default is _MISSING:
                raise self.refuse(key, f"it is missing and must be {_WORDS[kind]}")
            return default
        value = self.data[key]
        if type(value) is not kind:
            raise self.refuse(key, f"must be {_WORDS[kind]}, not {value!r}")
        if kind is str and not value.strip():
            raise self.refuse(key, "must not be empty")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty when absent."""
        self._asked.add(key)
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, f"must be a list of strings, not {value!r}")
        repeated = sorted({item for item in value if value.count(item) > 1})
        if repeated:
            raise self.refuse(key, f"names {repeated[0]} twice")
        return tuple(value)

    def table(self, key: str) -> Table:
        """Return a sub-table, empty when absent."""
        return Table(self.shown, self.path(key), self.take(key, dict, {}))

    def tables(self) -> list[tuple[str, Table]]:
        """Return every entry of this table as a table of its own."""
        return [(key, self.table(key)) for key in self.data]

    def path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def close(self) -> None:
        for key in self.data:
            if key not in self._asked:
                help_ = closest(key, self._asked) or (
                    f"; known here: {', '.join(sorted(self._asked))}"
                )
                raise self.refuse(key, f"this key is unknown{help_}")
