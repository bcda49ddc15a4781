"""Waiting until a server really generates, and what it means when it does not."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import log as _log
from sparkling import procs
from sparkling.crash import Diagnosis, diagnose
from sparkling.errors import ServerError
from sparkling.ports import HOST, holder

if TYPE_CHECKING:
    from sparkling.server import Server

POLL_S = 0.25

Progress = Callable[[str, float], None]
"""Called with a phase ("loading weights") and the seconds since the start."""


class StartFailed(ServerError):
    """The server did not become ready. The first line says why; the log's last lines follow."""

    def __init__(
        self, sentence: str, *, tail: list[str], log: Path, diagnosis: Diagnosis | None = None
    ) -> None:
        self.sentence, self.tail, self.log, self.diagnosis = sentence, tail, log, diagnosis
        quoted = "".join(f"\n  | {line}" for line in tail)
        super().__init__(sentence + quoted)

    def __reduce__(self) -> tuple[Any, ...]:
        # The notebook's runner hands exceptions between processes.
        return _failed, (self.sentence, self.tail, self.log, self.diagnosis)


def _failed(sentence: str, tail: list[str], log: Path, found: Diagnosis | None) -> StartFailed:
    return StartFailed(sentence, tail=tail, log=log, diagnosis=found)


class TokenProbe(threading.Thread):
    """Asks for one token. Runs beside, so that the process can be watched meanwhile."""

    def __init__(self, server: Server, timeout_s: float = 3600.0) -> None:
        super().__init__(daemon=True)
        self.done = False
        self.problem: str | None = None
        self.status: int | None = None
        self._server = server
        self._connection = http.client.HTTPConnection(HOST, server.port, timeout=timeout_s)

    def run(self) -> None:
        # Token ids rather than text: this works without a tokenizer in the server, too.
        body = json.dumps(
            {
                "input_ids": [10, 11, 12],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            }
        )
        headers = {"Content-Type": "application/json", **_authorization(self._server)}
        try:
            self._connection.request("POST", "/generate", body, headers)
            response = self._connection.getresponse()
            data = response.read()
            self.status = response.status
            if response.status != 200:
                self.problem = f"/generate answered {response.status}: {data[:200]!r}"
                return
            reply = json.loads(data)
            reply = reply[0] if isinstance(reply, list) and reply else reply
            made = reply.get("meta_info", {}).get("completion_tokens", 0)
            self.done = isinstance(made, int) and made >= 1
            if not self.done:
                self.problem = "/generate answered without a token"
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()

    def abandon(self) -> None:
        """Let go of a request that nobody answers."""
        handle = self._connection.sock
        if handle is not None:
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)


def _authorization(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}


def status_of(
    port: int, path: str, headers: Mapping[str, str], timeout_s: float = 5.0
) -> int | None:
    """HTTP status of a GET on loopback, never through a proxy; None if nobody answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


_PHASES: dict[type, str] = {
    _log.ServerArgs: "starting its processes",
    _log.WeightsBegin: "loading weights",
    _log.WeightsLoaded: "allocating caches",
    _log.PoolsReady: "preparing kernels and graphs",
    _log.GraphCapture: "capturing graphs",
    _log.Limits: "starting HTTP",
    _log.HttpUp: "warming up",
    _log.Ready: "answering",
}


class Waiting:
    """One wait for readiness: what has been seen so far, and what it means at the deadline."""

    def __init__(self, server: Server, deadline_s: float, progress: Progress | None) -> None:
        self.server, self.progress = server, progress
        self.deadline_s = deadline_s
        self.end = server._began + deadline_s
        self.follower = _log.Follower(server.log, server.offset)
        self.lines: list[str] = []
        self.phase = "importing SGLang"
        self.phase_since = time.monotonic()
        self.http = False
        self.probe: TokenProbe | None = None
        self.problem: str | None = None
        self.crashed = False

    def run(self) -> None:
        """Returns when the server is ready; raises StartFailed otherwise."""
        told = 0.0
        while True:
            self._read_log()
            if self.progress is not None and time.monotonic() - told >= 1.0:
                told = time.monotonic()
                self.progress(self.phase, told - self.server._began)
            if not self.server.alive():
                raise self._died()
            if time.monotonic() >= self.end:
                raise self._too_late()
            if self._is_ready():
                return
            self.server._hear(POLL_S)

    def _read_log(self, *, dead: bool = False) -> None:
        for line in self.follower.lines():
            self.lines.append(line)
            event = _log.parse_line(line)
            phase = _PHASES.get(type(event))
            if phase is not None and phase != self.phase:
                self.phase, self.phase_since = phase, time.monotonic()
            if isinstance(event, _log.Crash):
                self.crashed = True
                if event.kind == "port" and not dead:
                    # SGLang goes on waiting for its own warm-up for two minutes after this.
                    raise self._failure(diagnose([line]))
        del self.lines[:-20000]

    def _is_ready(self) -> bool:
        server = self.server
        if not self.http:
            status = status_of(server.port, "/model_info", _authorization(server))
            if status is not None:
                self._check_listener()
            if status != 200:
                return False
            if server.api_key:
                self._check_key()
            self.http = True
        if self.probe is None:
            self.probe = TokenProbe(server)
            self.probe.start()
        self.probe.join(POLL_S)
        if self.probe.is_alive():
            return False
        if not self.probe.done:
            # Refused for now (503) or cut off: ask again.
            self.problem, self.probe = self.probe.problem, None
            return False
        # The token is there. SGLang's own warm-up may still fail and end the server: wait until
        # it says that it is up. Builds without /ready do not answer 200 or 503.
        return status_of(server.port, "/ready", _authorization(server)) not in (None, 503)

    def _check_listener(self) -> None:
        """A stranger that answers on our port must not pass for our server."""
        found = procs.listeners(self.server.port)
        if not found:
            return
        ours = {self.server.pid, *(one.pid for one in procs.descendants(self.server.pid))}
        if not any(one.pid in ours for one in found):
            raise self._failure(
                Diagnosis(
                    "port",
                    f"port {self.server.port} is answered by {holder(self.server.port)}, not by "
                    "this server",
                    "stop it or choose another port",
                )
            )

    def _check_key(self) -> None:
        status = status_of(self.server.port, "/model_info", {})
        if status not in (401, 403):
            raise self._failure(
                Diagnosis(
                    "no-auth",
                    f"the server answers {status} without the API key it was given",
                    "do not serve with this SGLang build",
                )
            )

    # -- failures ------------------------------------------------------------------------------

    def _failure(self, found: Diagnosis | None, sentence: str | None = None) -> StartFailed:
        server = self.server
        if sentence is None:
            what = f"{found.cause}; {found.remedy}" if found else "its log does not say why"
            sentence = f"The server did not start: {what}. Log: {server.log}"
        return StartFailed(sentence, tail=server.tail(12), log=server.log, diagnosis=found)

    def _died(self) -> StartFailed:
        server = self.server
        # The keeper reports the exit code after everything is buried and the log is complete.
        limit = time.monotonic() + 15.0
        while not server._keeper.stdout.closed and time.monotonic() < limit:
            server._hear(0.2)
        self._read_log(dead=True)  # the phase, too: it may have died between two looks
        ended = server._ended or {}
        if not self.lines and ended.get("recent"):
            self.lines = ended["recent"].splitlines()
        code = ended.get("code")
        out_of_memory = procs.oom_kills() > server._oom_before
        found = diagnose(self.lines, code, out_of_memory=out_of_memory)
        ended = server.ended_for_memory()
        if ended:  # told by the warden, whatever became of the log
            found = Diagnosis("memory-guard", ended, "stop what else uses memory")
        if server._log_error and (found is None or found.kind in ("exception", "signal")):
            found = _disk(server)
        if found is None and server._lost is not None:
            found = Diagnosis(
                "worker",
                f"its process {server._lost['name']} (pid {server._lost['pid']}) died",
                "the log's last lines may say why",
            )
        took = time.monotonic() - server._began
        if found is None:
            how = "" if code is None else f" with exit code {code}"
            return self._failure(
                None,
                f"The server ended{how} after {took:.0f} s while {self.phase}, and its log does "
                f"not say why: {server.log}",
            )
        return self._failure(found)

    def _too_late(self) -> StartFailed:
        server, limit = self.server, f"{self.deadline_s:.0f} s"
        found = diagnose(self.lines)
        if found is not None and found.kind == "exception" and not self.crashed:
            found = None  # a traceback that SGLang went on from
        if found is None and server._log_error:
            found = _disk(server)
        if found is not None:
            return self._failure(found)
        if self.http:
            detail = f" ({self.problem})" if self.problem else ""
            sentence = (
                f"The server is wedged: HTTP answers, but within {limit} no request produced a "
                f"token{detail}; stop what else uses the machine and start it again. "
                f"Log: {server.log}"
            )
        else:
            since = time.monotonic() - self.phase_since
            sentence = (
                f"The server was not ready within {limit}: it has been {self.phase} for "
                f"{since:.0f} s; give it a longer deadline if the machine is slow, or read its "
                f"log: {server.log}"
            )
        return self._failure(None, sentence)


def _disk(server: Server) -> Diagnosis:
    return Diagnosis(
        "disk-full",
        f"its log could not be written ({server._log_error})",
        "free some space on that disk and start again",
    )
