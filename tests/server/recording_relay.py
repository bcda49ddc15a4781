"""An HTTP relay for tests: passes everything on, and notes when each piece of a stream came by.

With it two programs time one and the same stream: the client behind the relay, and whoever reads the
notes. What they disagree in is then their definitions, not the server's mood.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


@dataclass
class Stream:
    """One request: its path and body, when it came, and (seconds after that, bytes) pieces."""

    path: str
    body: dict
    started: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._pass("GET", b"")

    def do_POST(self):
        self._pass("POST", self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _pass(self, method, body):
        started = time.perf_counter()
        headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
        note = Stream(self.path, json.loads(body) if body else {}, started)
        with self.server.upstream.stream(method, self.path, content=body, headers=headers) as got:
            self.send_response(got.status_code)
            self.send_header("Content-Type", got.headers.get("content-type", "text/plain"))
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for raw in got.iter_raw():
                note.pieces.append((time.perf_counter() - started, raw))
                self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        self.server.streams.append(note)


@contextmanager
def relay(url: str) -> Iterator[ThreadingHTTPServer]:
    """A relay to `url`; `.url` is its own address, `.streams` what passed, in order of the ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.streams = []
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, trust_env=False, timeout=120, limits=limits) as upstream:
        server.upstream = upstream
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
