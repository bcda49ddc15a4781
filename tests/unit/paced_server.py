"""A paced HTTP server for tests only: it streams tokens at exact times and tells the truth after.

It runs as a process of its own, so that its work does not disturb the client under test. Behaviour
is asked for in the request body under "paced":

    n, k, rate     tokens in all, tokens a chunk, tokens/s (deadlines are absolute)
    first_k        tokens in the first chunk (default k); first_s: when it leaves (default 0.02)
    counts         usage with every chunk (default true); usage: a final usage chunk (default true)
    reasoning      so many of the chunks are reasoning deltas
    pings          keep-alive comments before the first token
    finish, done   the finish reason to send (null: none), and whether [DONE] follows
    spec           "sglext" counters to send; wait_s: silence before the cut
    cut            after "at" chunks: "fin", "rst", "chunked" (a proper end without a last event),
                   "stall" (keeps the line open), "ping" (keeps it open and sends comments)
    status, error  answer with this HTTP status, or with an error object inside a 200 stream
    raw            a list of text pieces to send as they are, `gap_s` apart
    hold           after so many chunks wait for `GET /go`, as "rst" does before it resets

`GET /truth` gives the last stream's [send time, tokens so far] pairs, taken just before each send.
`GET /allow?N`: streams after the Nth from now on wait; `GET /allow` lets all go on.
`GET /meet?N`: the next N streams wait for each other. Whoever waits does so for 60 s at most.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

STATE = {"truth": [], "posts": 0, "flushes": 0, "headers": {}, "spec": [0, 0, 0]}
GO = threading.Event()
GATE = {"allowed": None, "meet": threading.Barrier(1), "to_meet": 0}
LOCK = threading.Lock()


def sleep_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _json(self, value, status=200):
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        path, _, number = self.path.partition("?")
        if path == "/truth":
            return self._json(STATE)
        if path == "/go":
            GO.set()
        elif path == "/allow":
            GATE["allowed"] = STATE["posts"] + int(number) if number else None
        elif path == "/meet":
            GATE["meet"], GATE["to_meet"] = threading.Barrier(int(number)), int(number)
        if path in ("/go", "/allow", "/meet"):
            return self._json("{}")
        STATE["headers"] = dict(self.headers)
        if path == "/v1/models":
            self._json({"data": [{"id": "paced"}]})
        elif path == "/server_info":
            self._json(
                {"api_key": "sesame-1234", "launch_command": "x --api-key sesame-1234 --tp 1"}
            )
        elif path == "/metrics":
            requests, tokens, rounds = STATE["spec"]
            self._json(
                "# TYPE sglang:num_requests_total counter\n"
                f'sglang:num_requests_total{{a="1"}} {requests}\n'
                "# TYPE sglang:generation_tokens_total counter\n"
                f'sglang:generation_tokens_total{{is_streaming="true"}} {tokens}\n'
                'sglang:generation_tokens_total{is_streaming="false"} 7\n'
                f"sglang:spec_verify_calls_total {rounds}\n"
            )
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        STATE["headers"] = dict(self.headers)
        if self.path == "/flush_cache":
            STATE["flushes"] += 1
            return self._json("{}")
        if self.path == "/tokenize" and self.server.defaults.get("tokenizer", True):
            return self._json({"count": len(body["prompt"].split())})
        if self.path == "/tokenize":
            return self._json({"detail": "Not Found"}, 404)
        GO.clear()
        with LOCK:  # several may come at once
            STATE["posts"] += 1
            turn, meets = STATE["posts"], GATE["to_meet"] > 0
            GATE["to_meet"] -= meets
        end = time.monotonic() + 60
        while GATE["allowed"] is not None and turn > GATE["allowed"] and time.monotonic() < end:
            time.sleep(0.005)
        if meets:
            GATE["meet"].wait(60)
        p = {**self.server.defaults, **body.get("paced", {})}
        p["n"] = p.get("n") or body.get("max_tokens") or 16
        hang = p.get("hang_after")
        if hang is not None and turn > hang:
            time.sleep(600)
        if p.get("status"):
            return self._json(p.get("body", {"message": "no"}), p["status"])
        if not body.get("stream") or p.get("whole"):
            return self._json(p["whole"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(p)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _piece(self, text):
        data = text.encode() if isinstance(text, str) else text
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _event(self, payload):
        self._piece(
            "data: " + (payload if isinstance(payload, str) else json.dumps(payload)) + "\n\n"
        )

    def _stream(self, p):
        if "raw" in p:
            for text in p["raw"]:
                self._piece(text)
                time.sleep(p.get("gap_s", 0))
        elif "error" in p:
            self._event({"error": {"message": p["error"], "code": 400}})
            self._event("[DONE]")
        else:
            if not self._tokens(p):
                return
        self.wfile.write(b"0\r\n\r\n")

    def _tokens(self, p):
        n, k, rate = p["n"], p.get("k", 1), p.get("rate", 500.0)
        first_k = p.get("first_k", k)
        truth = STATE["truth"] = []
        usage = {
            "prompt_tokens": 5,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for _ in range(p.get("pings", 0)):
            self._piece(": ping\n\n")
            time.sleep(0.002)
        start = time.monotonic() + p.get("first_s", 0.02)
        sent = chunk = 0
        while sent < n:
            new = min(first_k if chunk == 0 else k, n - sent)
            kind = "reasoning_content" if chunk < p.get("reasoning", 0) else "content"
            delta = {kind: " tok" * new}
            payload = {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            if p.get("counts", True):
                payload["usage"] = {**usage, "completion_tokens": sent + new}
            raw = b"data: " + json.dumps(payload).encode() + b"\n\n"
            # A chunk leaves when its last token is due.
            sleep_until(start + (sent + new - first_k) / rate)
            truth.append([time.monotonic(), sent + new])
            self._piece(raw)
            sent, chunk = sent + new, chunk + 1
            if chunk == p.get("hold"):
                GO.wait(60)
            if p.get("cut") and chunk == p["at"]:
                return self._cut(p)
        if p.get("finish", "length"):
            choice = {"index": 0, "delta": {}, "finish_reason": p.get("finish", "length")}
            self._event({"choices": [choice]})
        if p.get("spec"):
            self._event(
                {"choices": [], "usage": None, "sglext": {"spec_tokens_details": p["spec"]}}
            )
        STATE["spec"][0] += 1
        STATE["spec"][1] += sent
        STATE["spec"][2] += p.get("rounds", 0)
        if p.get("usage", True):
            self._event(
                {"choices": [], "usage": {**usage, "completion_tokens": p.get("says", sent)}}
            )
        if p.get("done", True):
            self._event("[DONE]")
        return True

    def _cut(self, p):
        self.close_connection = True
        time.sleep(p.get("wait_s", 0))
        if p["cut"] == "chunked":
            return True
        if p["cut"] in ("stall", "ping"):
            for _ in range(2000):
                time.sleep(0.05)
                if p["cut"] == "ping":
                    self._piece(": ping\n\n")
        elif p["cut"] == "rst":
            GO.wait(60)  # what was sent must have been read: a reset throws it away
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.wfile = _Nothing()
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        return False


class _Nothing:
    closed = False

    def flush(self):
        pass

    def close(self):
        pass


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.defaults = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    print(server.server_address[1], flush=True)
    # Ends with the test process: its end of the pipe closes.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


class Paced:
    """A running paced server, seen from a test."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def state(self) -> dict:
        return self.tell("/truth")

    def tell(self, what: str) -> dict:
        """`GET /truth`, /go, /allow or /meet."""
        return httpx.get(self.url + what, trust_env=False, timeout=60).json()

    def true_rate(self) -> float:
        truth = self.state()["truth"]
        (t0, n0), (t1, n1) = truth[0], truth[-1]
        return (n1 - n0) / (t1 - t0)


@contextmanager
def paced(**defaults):
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(defaults)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Paced(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextmanager
def nobody():
    """An address that refuses: its port is held, so that no other test's server can take it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


if __name__ == "__main__":
    main()
