"""A server that answers questions as a test plans it, over SSE; it counts what it was asked.

`answers(prompt, nth)` returns what to do for the nth time (from 0) that a prompt is asked: a text,
or a dict with `text`, `reasoning`, `finish`, `status` (an HTTP error), `cut` (close after so many
chunks), `hang` (say nothing more), `null` (content null), `wait_s`, `chunks`, `spec`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answers:
    def __init__(self, plan: Callable[[str, int], Any], info: dict[str, Any] | None = None) -> None:
        self.plan, self.info = plan, info or {}
        self.asked: list[dict[str, Any]] = []
        self.times: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.now = self.most = 0

    def __enter__(self) -> Answers:
        me = self

        class Handler(_Handler):
            server_of = me

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # a client that is killed hangs up

        self.http = Server(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]


class _Handler(BaseHTTPRequestHandler):
    server_of: Answers
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json({"data": [{"id": "fake"}]})
        elif self.path == "/server_info":
            self._json(self.server_of.info)
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        me = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._json({"count": len(body["prompt"].split())})
            return
        prompt = body["messages"][-1]["content"]
        with me.lock:
            me.asked.append(body)
            nth = me.times[prompt]
            me.times[prompt] += 1
            me.now, self.counted = me.now + 1, 1
            me.most = max(me.most, me.now)
        try:
            planned = me.plan(prompt, nth)
            do = {"text": planned} if isinstance(planned, str) else planned
            if do.get("wait_s"):
                time.sleep(do["wait_s"])
            if do.get("status"):
                self._leave()
                self._json({"message": "no"}, do["status"])
                return
            self._stream(do)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self._leave()

    def _leave(self) -> None:
        """Count it as over: before the end is sent, for the client may ask again at once."""
        with self.server_of.lock:
            self.server_of.now -= self.counted
            self.counted = 0

    def _event(self, payload: Any) -> None:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _stream(self, do: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        n = 0
        for kind in ("reasoning", "text"):
            words = (do.get(kind) or "").split(" ")
            for i, word in enumerate(words if do.get(kind) else ()):
                n += 1
                name = "reasoning_content" if kind == "reasoning" else "content"
                delta: dict[str, Any] = {name: (" " if i else "") + word}
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                self._event({"choices": [choice], "usage": {"completion_tokens": n}})
                if do.get("gap_s"):
                    time.sleep(do["gap_s"])
                if do.get("cut") == n:
                    self._leave()
                    self.close_connection = True
                    return
                if do.get("hang") == n:
                    self.server_of.over.wait(60)
                    self.close_connection = True
                    return
        if do.get("null"):
            delta = {"content": None, "reasoning_content": None}
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        finish = {"index": 0, "delta": {}, "finish_reason": do.get("finish", "stop")}
        n = do.get("tokens", n)
        usage = {"prompt_tokens": 7, "completion_tokens": n}
        if do.get("spec"):
            self._event({"choices": [], "sglext": {"spec_tokens_details": do["spec"]}})
        self._event({"choices": [finish], "usage": usage})
        self._leave()
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
