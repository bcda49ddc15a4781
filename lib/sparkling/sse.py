"""Server-sent events, split on bytes.

Text splitters that follow `str.splitlines` cut a JSON string in half at U+2028, U+0085 and others;
here only CR, LF and CRLF end a line, as the HTML standard's event-stream section says, and UTF-8 is
decoded only after an event is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_EOL = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its `data` lines joined by LF, and the two other fields that may come along."""

    data: bytes
    event: str = "message"
    id: str | None = None


class Splitter:
    """Turns arbitrary pieces of an event stream into events.

    `feed` takes the bytes as they arrive, cut anywhere; `close` yields what an unfinished last
    event holds (a server that closes without the final blank line still said it).
    `comments` counts comment lines (keep-alives), `empty` events without any data.
    """

    def __init__(self) -> None:
        self.comments = 0
        self.empty = 0
        self._pieces: list[bytes] = []  # of the line that is not finished yet
        self._data: list[bytes] = []
        self._event = ""
        self._id: str | None = None
        self._fields = 0
        self._skip_lf = False
        self._first_line = True

    def feed(self, chunk: bytes) -> Iterator[Event]:
        if self._skip_lf and chunk:
            # The previous piece ended in CR, which ended the line; an LF now belongs to it.
            self._skip_lf = False
            if chunk[0] == 0x0A:
                chunk = chunk[1:]
        if not chunk:
            return
        start = 0
        for match in _EOL.finditer(chunk):
            line = chunk[start : match.start()]
            start = match.end()
            if self._pieces:
                self._pieces.append(line)
                line = b"".join(self._pieces)
                self._pieces.clear()
            event = self._line(line)
            if event is not None:
                yield event
        if start < len(chunk):
            self._pieces.append(chunk[start:])
        self._skip_lf = chunk.endswith(b"\r")

    def close(self) -> Iterator[Event]:
        line = b"".join(self._pieces)
        self._pieces.clear()
        if line:
            self._line(line)
        event = self._dispatch()
        if event is not None:
            yield event

    def _line(self, line: bytes) -> Event | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        if line[0] == 0x3A:  # ":"
            self.comments += 1
            return None
        name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        self._fields += 1
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> Event | None:
        data = b"\n".join(self._data)
        event, fields = self._event, self._fields
        self._data.clear()
        self._event, self._fields = "", 0
        if not data:
            self.empty += fields > 0
            return None
        return Event(data, event or "message", self._id)


class JsonEvents:
    """The JSON objects of an event stream; anything else is counted in `unknown` and skipped.

    `done` turns true at the `[DONE]` payload that ends OpenAI-style streams; what follows it is
    ignored.
    """

    def __init__(self) -> None:
        self.splitter = Splitter()
        self.unknown = 0
        self.done = False

    @property
    def comments(self) -> int:
        return self.splitter.comments

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        for event in self.splitter.feed(chunk):
            payload = self._decode(event)
            if payload is not None:
                yield payload

    def close(self) -> Iterator[dict[str, Any]]:
        for event in self.splitter.close():
            payload = self._decode(event)
            if payload is not None:
                yield payload

    def _decode(self, event: Event) -> dict[str, Any] | None:
        if self.done:
            return None
        if event.data.strip() == b"[DONE]":
            self.done = True
            return None
        try:
            payload = json.loads(event.data)
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            self.unknown += 1
            return None
        return payload
