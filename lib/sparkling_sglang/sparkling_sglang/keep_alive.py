"""Comment lines during silence on streamed answers, so that no proxy cuts a long prefill off.

``SPARKLING_KEEP_ALIVE_S=15``: whoever streams gets ``: keep-alive`` after that many seconds without
anything, which every reader of server-sent events ignores. SGLang 0.5.23 sends none, and even holds
the response's headers back until the first token is there (it wants to be able to answer 400), so a
long prompt is silent for the whole of its prefill. After the silence the headers are sent from here;
a refusal that comes later than that arrives as an event with the error in it.

A comment is one line without a blank one behind it: some clients make an empty event of that. It is
sent between events only, never inside one. Requests that do not stream are passed through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sparkling_sglang.switches import KEEP_ALIVE

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

COMMENT = b": keep-alive\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]

logger = logging.getLogger("sparkling_sglang")


class KeepAlive:
    """ASGI middleware.

    Args:
        app: the application behind it.
        silence_s: seconds without a byte after which a comment is sent.
    """

    def __init__(self, app: Any, silence_s: float) -> None:
        self.app, self.silence_s = app, silence_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST":
            await self.app(scope, receive, send)
            return
        kept, body = await _whole_body(receive)

        async def again() -> Message:
            return kept.pop(0) if kept else await receive()

        if _streams(body):
            await _Stream(send, self.silence_s).run(self.app, scope, again)
        else:
            await self.app(scope, again, send)


async def _whole_body(receive: Receive) -> tuple[list[Message], bytes]:
    """The messages up to the end of the request's body, and the body."""
    kept: list[Message] = []
    while True:
        message = await receive()
        kept.append(message)
        if message["type"] != "http.request" or not message.get("more_body"):
            return kept, b"".join(m.get("body", b"") for m in kept)


def _streams(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    with contextlib.suppress(ValueError):
        asked = json.loads(body)
        return isinstance(asked, dict) and asked.get("stream") is True
    return False


class _Stream:
    """One streamed answer: what the application sends, with comments in its silences."""

    def __init__(self, send: Send, silence_s: float) -> None:
        self.send, self.silence_s = send, silence_s
        self.queue: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)
        self.started = self.committed = False  # headers sent; headers sent by us
        self.events = True  # what is sent is a stream of events
        self.tail = b"\n\n"  # the last bytes sent: a comment fits only after a blank line
        self.refusal: list[bytes] | None = None

    async def run(self, app: Any, scope: Message, receive: Receive) -> None:
        task = asyncio.ensure_future(app(scope, receive, self.queue.put))
        try:
            while True:
                message = await self._next(task)
                if message is None:
                    break
                await self._forward(message)
            await task  # its exception, if it ended with one
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _next(self, task: asyncio.Future[None]) -> Message | None:
        """The next message, with comments while there is none; None when the application ended."""
        getting = asyncio.ensure_future(self.queue.get())
        try:
            while True:
                await asyncio.wait(
                    {getting, task},
                    timeout=self.silence_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if getting.done():
                    return getting.result()
                if task.done():
                    return self.queue.get_nowait() if not self.queue.empty() else None
                await self._comment()
        finally:
            if not getting.done():
                getting.cancel()

    async def _comment(self) -> None:
        if not self.started:
            self.started = self.committed = True
            await self.send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if self.events and self.refusal is None and self.tail.endswith((b"\n\n", COMMENT)):
            await self._body(COMMENT)

    async def _body(self, body: bytes, more: bool = True) -> None:
        self.tail = (self.tail + body)[-len(COMMENT) :]
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers") or ()).get(b"content-type", b"")
            self.events = kind.startswith(b"text/event-stream")
            if self.committed:
                # Too late for a status: what is no stream of events becomes one event.
                self.refusal = None if self.events else []
                return
            self.started = True
            await self.send(message)
        elif message["type"] != "http.response.body":
            await self.send(message)
        elif self.refusal is not None:
            self.refusal.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._body(_event(b"".join(self.refusal)), more=False)
        else:
            await self._body(message.get("body", b""), bool(message.get("more_body")))


def _event(body: bytes) -> bytes:
    """A refusal's body as an event that OpenAI's clients raise, and the end of the stream."""
    try:
        said = json.loads(body)
    except ValueError:
        said = body.decode("utf-8", "replace")
    error = said.get("error", said) if isinstance(said, dict) else {"message": str(said)}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"


def seconds(value: str) -> float:
    """The switch's value. Raises ValueError for what is no number of seconds above 0."""
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(value)
    return number


def register_main(patches: Patches, value: str) -> None:
    """Put the middleware around SGLang's application before it serves (main process).

    Raises:
        ValueError: ``value`` is no number of seconds above 0.
    """
    try:
        silence_s = seconds(value)
    except ValueError:
        raise ValueError(
            f"{KEEP_ALIVE}={value} is no number of seconds above 0: set one, or unset it."
        ) from None

    def add(*_args: Any, **_given: Any) -> None:
        from sglang.srt.entrypoints.http_server import app

        app.add_middleware(KeepAlive, silence_s=silence_s)
        logger.info("Streams get a keep-alive comment after %g s of silence.", silence_s)

    patches.hook(
        "keep-alive",
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        add,
        "before",
    )
