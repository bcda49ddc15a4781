"""Notebook parameters: found in the cell tagged `parameters`, typed by their defaults.

papermill only warns about an unknown parameter and turns `-p flag true` into the text 'true'. Here
an unknown one is refused, and a value must be of its default's type.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkling._toml import closest
from sparkling.errors import UsageError
from sparkling.workloads import repeats_of, workloads

SET_BY_SUITE = {"lane": "--lane", "run_id": "--run", "edition": "--edition"}
"""Parameters that the suite gives to its notebooks, by value or through their environment."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list, as 1,2 or [1, 2]",
    dict: 'a JSON object, as {"a": 1}',
}


def defaults_of(notebook: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """The parameters that a notebook declares, with their default values.

    notebook: the notebook as JSON. Raises UsageError when there is not exactly one cell tagged
    `parameters` or when a default is not a plain literal, since nothing could be typed by it.
    """
    tagged = [
        c
        for c in notebook.get("cells", ())
        if c.get("cell_type") == "code" and "parameters" in c.get("metadata", {}).get("tags", ())
    ]
    if len(tagged) != 1:
        raise UsageError(
            f"{shown} has {len(tagged)} cells tagged 'parameters'; it must have exactly one."
        )
    source = tagged[0].get("source", "")
    source = source if isinstance(source, str) else "".join(source)
    try:
        body = ast.parse(source).body
    except SyntaxError as problem:
        raise UsageError(
            f"{shown}: the parameters cell does not parse (line {problem.lineno}: {problem.msg})."
        ) from None
    found: dict[str, Any] = {}
    for node in body:
        target, value = _assignment(node)
        if target is None:
            continue
        try:
            found[target] = ast.literal_eval(value)
        except ValueError:
            raise UsageError(
                f"{shown}: the default of {target} must be a plain value (text, number, true or "
                "false, list), so that what is given for it can be checked."
            ) from None
    return found


def _assignment(node: ast.stmt) -> tuple[str | None, Any]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return None, None
    return (target.id, value) if isinstance(target, ast.Name) else (None, None)


def typed(name: str, default: Any, value: Any) -> Any:
    """`value` as the type of `default`: "true" → True, "007" → 7, "1,2" → [1, 2].

    Text is read as the command line gives it; a value that is already typed must fit. A default of
    None takes JSON, or text that is no JSON. Raises UsageError in one sentence.
    """
    kind = type(default)
    try:
        if default is None:
            return _json_or_text(value)
        if kind is bool:
            return _bool(value)
        if kind is int:
            return _int(value)
        if kind is float:
            return _float(value)
        if kind is str:
            return _str(value)
        if kind in (list, tuple):
            return _list(name, list(default), value)
        if kind is dict:
            return _dict(value)
    except (ValueError, TypeError):
        pass
    want = _WORDS.get(kind, kind.__name__)
    if kind is tuple:
        want = _WORDS[list]
    raise UsageError(
        f"Parameter {name} must be {want}, like its default {default!r}; {value!r} is not."
    )


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise ValueError


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value, 10) if isinstance(value, str) else value


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError
    return number


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _list(name: str, default: list[Any], value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            value = json.loads(text)
        else:
            value = [part.strip() for part in text.split(",")] if text else []
    if not isinstance(value, list | tuple):
        raise ValueError
    if default and all(type(d) is type(default[0]) for d in default):
        return [typed(name, default[0], item) for item in value]
    return [_json_or_text(item) for item in value]


def _dict(value: Any) -> dict[str, Any]:
    data = json.loads(value) if isinstance(value, str) else value
    if not isinstance(data, dict):
        raise ValueError
    return data


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def assign(
    declared: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
    suite: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """What each notebook gets: notebook name → {parameter: typed value}.

    declared: notebook name → its defaults. given: what the user asked for; each must be declared
    by at least one notebook of the suite. suite: values of `SET_BY_SUITE`. Raises UsageError.
    """
    known = sorted({p for defaults in declared.values() for p in defaults} - set(SET_BY_SUITE))
    for name in given:
        if name in SET_BY_SUITE:
            raise UsageError(
                f"Parameter {name} is set by the suite itself; use {SET_BY_SUITE[name]} instead."
            )
        if name not in known:
            hint = closest(name, known) or (
                f"; there are {', '.join(known)}" if known else "; they declare none"
            )
            raise UsageError(f"No notebook of this suite has a parameter {name!r}{hint}.")
    out: dict[str, dict[str, Any]] = {}
    for notebook, defaults in declared.items():
        mine = {k: v for k, v in suite.items() if k in defaults}
        mine |= {
            k: _measurable(k, typed(k, defaults[k], v)) for k, v in given.items() if k in defaults
        }
        out[notebook] = mine
    return out


def _measurable(name: str, value: Any) -> Any:
    """`value`, once what it says to measure exists: better told now than after a server's start."""
    if name == "workloads":
        workloads({}, value)
    elif name == "repeats":
        repeats_of({}, value)
    return value


def load_notebook(path: Path) -> dict[str, Any]:
    """A notebook file as JSON. Raises UsageError when it cannot be read as one."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as problem:
        raise UsageError(f"{path.name} cannot be read ({problem.strerror}).") from None
    except ValueError as problem:
        raise UsageError(f"{path.name} is not a notebook: {problem}.") from None
    if not isinstance(data, dict) or not isinstance(data.get("cells"), list):
        raise UsageError(f"{path.name} is not a notebook: it has no list of cells.")
    return data
