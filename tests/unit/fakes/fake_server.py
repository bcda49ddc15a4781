"""A stand-in for SGLang's process tree and HTTP routes, in every mood a server can be in.

Standard library only; run as `python fake_server.py --port P [--mood M] ...`. It prints lines in
SGLang's format, so that what reads the log reads this one.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--device", default="cpu")
parser.add_argument("--model-path")
parser.add_argument("--config")
parser.add_argument("--mood", default="ok")
parser.add_argument("--after", type=float, default=1.0, help="seconds or requests, by mood")
parser.add_argument("--say", help="file whose content is printed while loading")
parser.add_argument("--code", type=int, default=1)
parser.add_argument("--tree", action="store_true", help="start workers that resist a stop")
parser.add_argument("--spawn", type=float, help="start a child of multiprocessing, for so long")
parser.add_argument("--shm", help="name of a file in /dev/shm to map and to leave behind")
parser.add_argument("--hold-mb", type=int, default=0)
args = parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", file=sys.stderr, flush=True)


api_key = None
if args.config:
    with open(args.config) as file:
        api_key = json.load(file)["api-key"]

if args.mood == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def rename(name: bytes) -> None:
    """As setproctitle does it: the new name also overwrites arguments and environment in memory."""
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    with open("/proc/self/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[48])  # arg_start, env_end
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, name, len(name))


def worker(listen: bool, own_session: bool) -> None:
    """A process that ignores polite signals, has another name, and may hold memory and a port."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if own_session:
        os.setsid()
        if os.fork():
            os._exit(0)
    # Not before: the parent that ends here must not pass for a lost worker.
    rename(b"sglang::schedul")
    held = bytearray(args.hold_mb << 20)
    for i in range(0, len(held), 4096):
        held[i] = 1
    if listen:
        extra = socket.socket()
        extra.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        extra.bind(("127.0.0.1", args.port + 1))
        extra.listen()
    while True:
        time.sleep(60)


if args.tree:
    # One ordinary worker, and one that leaves the session and loses its parent.
    for listen, own_session in ((False, False), (True, True)):
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                worker(listen, own_session)
            os._exit(0)

if args.spawn is not None:
    # As multiprocessing starts its children: known by these words only. It is never waited for.
    code = f"'from multiprocessing.spawn import spawn_main'; import time; time.sleep({args.spawn})"
    subprocess.Popen([sys.executable, "-S", "-c", code])
if args.mood == "stillborn":
    # A worker that is killed at once, and that nobody waits for.
    subprocess.Popen(["sleep", "60"]).kill()

print("a line on standard output", flush=True)
say(f"server_args={{'model_path': '/m', 'port': {args.port}, 'api_key': {api_key!r}}}")
say("Load weight begin. avail mem=21.50 GB")
if args.say:
    with open(args.say) as file:
        sys.stderr.write(file.read())
    sys.stderr.flush()

if args.shm:
    with open(f"/dev/shm/{args.shm}", "wb+") as file:
        file.truncate(4096)
        shared = mmap.mmap(file.fileno(), 4096)

if args.mood == "crash":
    sys.exit(args.code)
if args.mood == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if args.mood in ("hang-loading", "stillborn"):
    time.sleep(3600)

started = time.monotonic()
served = 0
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, pattern: str, *values: object) -> None:
        pass

    def answer(self, status: int, body: object = None) -> None:
        data = json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        if api_key is None or args.mood == "no-auth":
            return False
        if self.headers.get("Authorization") == f"Bearer {api_key}":
            return False
        self.answer(401, {"error": "Unauthorized"})
        return True

    def warm(self) -> bool:
        return args.mood != "late-health" or time.monotonic() - started > args.after

    def do_GET(self) -> None:
        if self.path in ("/health", "/ready"):
            up = self.warm() and (
                args.mood != "late-ready" or time.monotonic() - started > args.after
            )
            self.answer(200 if up else 503)
        elif self.refused():
            pass
        elif self.path in ("/model_info", "/v1/models", "/server_info"):
            self.answer(200, {"model_path": "/m", "api_key": api_key})
        else:
            self.answer(404)

    def do_POST(self) -> None:
        global served
        if self.refused():
            return
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with lock:
            served += 1
            number = served
        if args.mood == "mute" or (args.mood == "hangs-after" and number > args.after):
            time.sleep(3600)
        if not self.warm():
            self.answer(503)
        elif args.mood == "empty":
            self.answer(200, {"text": "", "meta_info": {"completion_tokens": 0}})
        else:
            self.answer(200, {"text": "x", "meta_info": {"completion_tokens": 1}})
        if args.mood == "chatty":
            say(f"Receive: obj=GenerateReqInput(key={api_key!r})")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


try:
    http = Server((args.host, args.port), Handler)
except OSError:
    say(
        f"ERROR:    [Errno 98] error while attempting to bind on address ('{args.host}', "
        f"{args.port}): address already in use"
    )
    time.sleep(3600)
say(f"INFO:     Uvicorn running on http://{args.host}:{args.port} (Press CTRL+C to quit)")
if args.mood == "dies-in-warmup":
    # The HTTP server is never served: nothing answers, yet the line is there.
    say("The server is fired up and ready to roll!")
    time.sleep(args.after)
    say("Initialization failed. warmup error: Traceback (most recent call last):")
    print("RuntimeError: the warm-up request got no answer", file=sys.stderr, flush=True)
    sys.exit(1)
if args.mood == "flood":
    threading.Thread(target=lambda: [say("x" * 200) for _ in iter(int, 1)], daemon=True).start()
say("The server is fired up and ready to roll!")
http.serve_forever()
