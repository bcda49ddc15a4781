"""A server that hangs or is gone, in one sentence with its last words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparkling.errors import ServerError
from sparkling.wire import Stalled, Unreachable


@contextmanager
def told(server: Any, answered: Callable[[], int], what: str, stall_s: float) -> Iterator[None]:
    """Around one request of a run that keeps its rows. server: a `Server`, or anything else when
    there is no log to read; answered: how many of `what` ("request", "question") have come back,
    asked when it fails, since others may be under way; stall_s: the silence that was borne. Raises
    ServerError."""

    def so_far() -> str:
        count = answered()
        return f"{count} {what}{'' if count == 1 else 's'}"

    try:
        yield
    except Stalled as error:
        raise ServerError(
            f"The server stopped answering after {so_far()} ({stall_s:g} s without a token)"
            f"{_last_words(server)}; the rows so far are kept: restart it and resume."
        ) from error
    except Unreachable as error:
        raise ServerError(
            f"The server went away after {so_far()}{_last_words(server)}; the rows so far are kept: "
            "restart it and resume."
        ) from error


def _last_words(server: Any) -> str:
    try:
        tail = server.tail(1)
    except (AttributeError, OSError):
        return ""
    return f"; its log ends with: {tail[-1].strip()[:200]}" if tail else ""
