"""HTTP to one server: addresses, failures in one sentence, streams that may break anywhere."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from sparkling.assemble import Chat, Generate, error_message
from sparkling.errors import RequestError
from sparkling.reply import Reply
from sparkling.sse import JsonEvents

# A cut after this much silence, and many times longer than the gaps before it, smells of an idle
# limit between us and the server rather than of the server itself.
_SILENCE_S = 1.0


class Stalled(RequestError):
    """The server took the request and then said nothing more within the time allowed.

    `reply` holds what had arrived.
    """

    def __init__(self, message: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.reply = reply


class Unreachable(RequestError):
    """Nothing accepts connections at the address."""


class BrokenOff(Unreachable):
    """The connection ended before an answer: whoever was there has just gone."""


class Refused(RequestError):
    """The server answered with an error; `status` is its HTTP code (200 if it came in a stream)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str | None) -> bool:
    """Whether `host` names this machine, so that no proxy may stand between."""
    host = (host or "").rstrip(".").lower()
    if host in ("localhost", "ip6-localhost") or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


class Wire:
    """The connection behind a `client.Client`, which says what it promises."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        url = base_url if "://" in base_url else f"http://{base_url}"
        self.base_url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.key = api_key or None
        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            self._http = httpx.Client(
                base_url=self.base_url,
                headers=headers,
                verify=self.base_url.startswith("https:"),  # no TLS set-up for plain HTTP
                trust_env=not is_loopback(urlsplit(self.base_url).hostname),
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise RequestError(
                self._safe(f"Cannot use {self.base_url} as an address: {error}.")
            ) from None

    def close(self) -> None:
        self._http.close()

    def send(
        self, path: str, body: dict[str, Any], into: Chat | Generate, timeout_s: float | None
    ) -> Reply:
        """POST `body` and let `into` put the answer together, streamed if the body asks for it."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        timeout = httpx.Timeout(limit, connect=min(10.0, limit))
        reply = into.reply
        reply.started = time.perf_counter()
        if not body.get("stream"):
            response = self.whole("POST", path, limit, json=body, model=str(body.get("model")))
            t = time.perf_counter() - reply.started
            into.feed_whole(self.decode(response), t)
            return self._finish(into, t, None)
        events = JsonEvents()
        problem: str | None = None
        broken: Exception | None = None
        last_byte = last_news = 0.0
        try:
            with (
                self._errors(),
                self._http.stream("POST", path, json=body, timeout=timeout) as response,
            ):
                if response.status_code != 200:
                    text = response.read().decode("utf-8", "replace")
                    self._check(response, text, str(body.get("model")))
                if "json" in response.headers.get("content-type", ""):
                    # A server that does not stream answers whole.
                    response.read()
                    t = time.perf_counter() - reply.started
                    into.feed_whole(self.decode(response), t)
                    return self._finish(into, t, None)
                for raw in response.iter_bytes():
                    last_byte = time.perf_counter() - reply.started
                    for payload in events.feed(raw):
                        last_news = last_byte
                        into.feed(payload, last_byte)
                    if events.done:
                        break
                    if last_byte - last_news > limit:
                        raise Stalled("only keep-alive comments")
        except (Stalled, httpx.ReadTimeout) as error:
            self._drain(into, events, last_byte)
            if reply.finish_reason is not None:
                return self._finish(into, last_byte, None)
            silent = f" ({error})" if isinstance(error, Stalled) else ""
            raise Stalled(
                f"The server at {self.base_url} stopped answering: nothing for {limit:g} s after "
                f"{into.tokens_so_far}{silent}.",
                self._finish(into, last_byte, f"stalled after {into.tokens_so_far}"),
            ) from None
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            broken = error
        self._drain(into, events, last_byte)
        if not events.done and reply.finish_reason is None:
            problem = self._cut(into, broken, last_byte, time.perf_counter() - reply.started)
        return self._finish(into, last_byte, problem)

    def _drain(self, into: Chat | Generate, events: JsonEvents, t: float) -> None:
        """Take what an unfinished last event holds, and the counts of the stream."""
        for payload in events.close():
            into.feed(payload, t)
        into.reply.comments = events.comments
        into.reply.unknown_payloads = events.unknown

    def _finish(self, into: Chat | Generate, t: float, problem: str | None) -> Reply:
        if into.error is not None and not into.answered:
            raise Refused(
                self._safe(f"The server at {self.base_url} refused the request: {into.error}"), 200
            )
        reply = into.finish(t, problem=problem)
        if reply.problem:
            reply.problem = self._safe(reply.problem)
        return reply

    def _cut(
        self, into: Chat | Generate, error: Exception | None, last_byte: float, now: float
    ) -> str:
        """How a stream ended that had no finish reason yet."""
        how = "closed" if error is None else "broken off"
        if error is not None and "reset" in str(error).lower():
            how = "reset"
        said = into.tokens_so_far
        silence = now - last_byte
        times = into.reply.chunk_times_s
        usual = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        if silence >= max(_SILENCE_S, 10 * usual):
            return (
                f"the connection was {how} after {silence:.1f} s of silence, {said} in "
                "(an idle limit of a proxy?)"
            )
        return f"the connection was {how} after {said}, before any finish reason"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            why = "connection refused" if "refused" in str(error).lower() else str(error)
            raise Unreachable(
                self._safe(
                    f"No server answers at {self.base_url} ({why or type(error).__name__}): start "
                    "one, or check the address and the port."
                )
            ) from None
        except (httpx.WriteError, httpx.WriteTimeout, httpx.ProxyError) as error:
            kind = RequestError if isinstance(error, httpx.ProxyError) else BrokenOff
            raise kind(
                self._safe(f"The request to {self.base_url} could not be sent: {error}.")
            ) from None

    def whole(
        self, method: str, path: str, limit: float, *, json: Any = None, model: str | None = None
    ) -> httpx.Response:
        """A request whose answer comes in one piece."""
        timeout = httpx.Timeout(limit, connect=min(10.0, limit))
        try:
            with self._errors():
                response = self._http.request(method, path, json=json, timeout=timeout)
        except httpx.ReadTimeout:
            raise Stalled(
                f"The server at {self.base_url} stopped answering: no answer to {path} in {limit:g} s."
            ) from None
        except httpx.TransportError as error:
            raise BrokenOff(
                self._safe(
                    f"The server at {self.base_url} broke off while answering {path}: {error}."
                )
            ) from None
        self._check(response, response.text, model)
        return response

    def decode(self, response: httpx.Response) -> dict[str, Any]:
        try:
            data = response.json()
        except ValueError:
            data = None
        if not isinstance(data, dict):
            path = response.request.url.path
            raise RequestError(
                f"What {self.base_url}{path} answered is no JSON object: is it SGLang?"
            )
        return data

    def _check(self, response: httpx.Response, text: str, model: str | None = None) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        path = response.request.url.path
        try:
            answer = response.json()
            said = error_message(answer) or " ".join(str(answer["message"]).split())
        except (ValueError, AttributeError, LookupError, TypeError):
            said = ""
        said = said or " ".join(text.split())[:200]
        where = f"the server at {self.base_url}"
        if status == 401 or status == 403:
            key = (
                "does not accept the API key given"
                if self.key
                else "wants an API key: none was given"
            )
            message = f"{where} {key} ({status} for {path})."
        elif status == 404 and model and "model" in said.lower():
            message = f"{where} does not serve the model {model!r} (404): {said}"
        elif status == 404:
            message = (
                f"{where} has no {path} (404): is it SGLang, started with the flags this needs?"
            )
        elif status in (502, 504):
            message = (
                f"a gateway before {self.base_url} gave up ({status}): {said or 'no reason given'}"
            )
        elif status == 503:
            message = f"{where} is not ready or overloaded (503): {said or 'no reason given'}"
        else:
            message = f"{where} refused the request ({status}): {said or 'no reason given'}"
        raise Refused(self._safe(message[0].upper() + message[1:]), status)

    def _safe(self, message: str) -> str:
        return message.replace(self.key, "***") if self.key else message
