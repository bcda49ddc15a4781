"""The flags and environment variables that one version of SGLang knows, from a data file.

`flags-<version>.txt` is written by `scripts/dump_flags.py` from the installed server environment,
so that a recipe can be checked here, where SGLang is not installed.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkling._toml import closest

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Flag:
    """One flag: first name without dashes, all names, argparse's arity, value type, choices."""

    name: str
    names: tuple[str, ...]
    arity: str  # "0" a switch, "1" one value, "+" or "*" several, "?" at most one
    kind: str = "str"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """What one SGLang version accepts."""

    version: str
    flags: dict[str, Flag] = field(repr=False)  # under every name, without dashes
    env: frozenset[str] = field(repr=False)

    def find(self, name: str) -> Flag | None:
        return self.flags.get(name)

    def help_for(self, name: str) -> str:
        if name.startswith("-"):
            return f"; write it without dashes: {name.lstrip('-')}"
        if name.replace("_", "-") in self.flags:
            return f"; did you mean {name.replace('_', '-')}?"
        return closest(name, self.flags)


def versions() -> list[str]:
    return sorted(p.stem.removeprefix("flags-") for p in FOLDER.glob("flags-*.txt"))


@functools.lru_cache(maxsize=4)
def known(version: str) -> Known | None:
    """Return what SGLang `version` knows, or None when there is no list of it."""
    if version not in versions():
        return None
    flags: dict[str, Flag] = {}
    env = set()
    for line in (FOLDER / f"flags-{version}.txt").read_text("utf-8").splitlines():
        word, _, rest = line.partition(" ")
        if word == "env":
            env.add(rest)
        elif word == "flag":
            names, arity, *more = rest.split(" ")
            bare = tuple(name.removeprefix("--") for name in names.split(","))
            choices = tuple(more[1].split("|")) if len(more) > 1 else ()
            flag = Flag(bare[0], bare, arity, more[0] if more else "str", choices)
            flags.update(dict.fromkeys(bare, flag))
    return Known(version, flags, frozenset(env))


def words(flag: Flag, value: Any) -> tuple[str, ...]:
    """Return the words that follow the flag on the command line, none for a switch.

    `value` is TOML: `true` for a switch, a scalar, a list for flags of several values, a table or
    list for a flag of one value that holds JSON.

    Raises:
        ValueError: with the reason, a clause.
    """
    if flag.arity == "0":
        if value is True:
            return ()
        if value is False:
            raise ValueError("is false; leave a switch out, or name it in unset_flags")
        raise ValueError(f"is a switch and takes true, not {value!r}")
    if isinstance(value, list) and flag.arity in "+*":
        if not value and flag.arity == "+":
            raise ValueError("needs at least one value")
        return tuple(_word(flag, item) for item in value)
    return (_word(flag, value),)


def _word(flag: Flag, value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError(f"takes {_A[flag.kind]}, not {str(value).lower()}")
    if isinstance(value, dict) and flag.kind == "str" and not flag.choices:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if isinstance(value, list):
        raise ValueError(f"takes one value, not the list {value!r}")
    if not isinstance(value, _ACCEPTS[flag.kind]):
        raise ValueError(f"takes {_A[flag.kind]}, not {value!r}")
    text = str(value)
    if flag.choices and text not in flag.choices:
        help_ = closest(text, flag.choices) or f"; it knows {', '.join(flag.choices)}"
        raise ValueError(f"has no choice {text!r}{help_}")
    if text.startswith("-") and flag.kind == "str":
        raise ValueError(f"has the value {text!r}, which the command line would read as a flag")
    if any(ord(char) < 32 for char in text):
        raise ValueError("has a control character in its value")
    return text


_A = {"str": "a string", "int": "a whole number", "float": "a number", "size": "a whole number"}
_ACCEPTS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "size": (int,),
}
