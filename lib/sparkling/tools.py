"""Tool calls put together from the pieces of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class ToolCall:
    """One call. `arguments` is None unless the call is whole; only whole calls may be run."""

    name: str
    id: str | None = None
    arguments: dict[str, Any] | None = None
    raw: str = ""
    problem: str | None = None

    @property
    def complete(self) -> bool:
        return self.arguments is not None


@dataclass
class _Draft:
    index: int | None
    id: str | None = None
    name: str = ""
    raw: str = ""


class Assembler:
    """Joins tool-call deltas: by `index`, by `id` where a server sends no index, and otherwise to
    the call that was written last.

    Several entries for one call in one chunk are merged; an entry that reuses an index with
    another id and a name of its own starts another call. `arguments` may come as text, as an
    object, or as null.
    """

    def __init__(self) -> None:
        self._calls: list[_Draft] = []
        self._last: _Draft | None = None

    def __bool__(self) -> bool:
        return bool(self._calls)

    def feed(self, entries: list[Any] | None) -> bool:
        """Take the `tool_calls` list of one delta or message; true if it held anything."""
        seen = False
        for entry in entries or []:
            if not isinstance(entry, dict):
                continue
            seen = True
            function = entry.get("function") or {}
            name = function.get("name") or ""
            call = self._find(entry.get("index"), entry.get("id") or None, name)
            call.name = call.name or name
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                call.raw += arguments
            elif arguments is not None:
                call.raw += json.dumps(arguments)
            self._last = call
        return seen

    def _find(self, index: int | None, id_: str | None, name: str) -> _Draft:
        if index is not None:
            # The latest call at an index is the one that later pieces belong to.
            for call in reversed(self._calls):
                if call.index == index:
                    other = id_ and call.id and id_ != call.id and name and call.name
                    if other:
                        break
                    call.id = call.id or id_
                    return call
        elif id_ is not None:
            for call in self._calls:
                if call.id == id_:
                    return call
        elif self._last is not None and not name:
            return self._last
        call = _Draft(index, id_)
        self._calls.append(call)
        return call

    def finish(self, finish_reason: str | None) -> tuple[list[ToolCall], list[ToolCall]]:
        """(whole calls, broken calls), in the order in which they were begun.

        When generation ended by its length, or was cut off (no finish reason at all), the last
        call is broken even if its JSON happens to parse: a parser may have closed the braces of
        half a value.
        """
        whole: list[ToolCall] = []
        broken: list[ToolCall] = []
        cut = finish_reason in (None, "length", "abort")
        for call in self._calls:
            made = ToolCall(call.name, call.id, raw=call.raw)
            if not call.name:
                made.problem = "the call has no name"
            elif cut and call is self._last:
                made.problem = f"generation ended ({finish_reason or 'cut off'}) inside the call"
            else:
                made.arguments, made.problem = _parse(call.raw)
            (whole if made.complete else broken).append(made)
        return whole, broken


def _parse(raw: str) -> tuple[dict[str, Any] | None, str | None]:
    if not raw.strip():
        return {}, None
    try:
        value = json.loads(raw)
        if isinstance(value, str) and value.strip():
            value = json.loads(value)  # arguments encoded twice
    except ValueError as error:
        return None, f"the arguments are not JSON ({error})"
    if value in (None, ""):
        return {}, None
    if not isinstance(value, dict):
        return None, "the arguments are not a JSON object"
    return value, None
