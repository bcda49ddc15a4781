"""Pretends to be SGLang's server as far as scripts/record_full_size.py asks: gate, health, stream.

Each token of a plain answer takes 2 ms, a round of NEXTN 4 ms. FAKE_DIE names an arm's switch
(NAME=VALUE) with which it ends at its start, FAKE_HANG one with which it is never ready.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

arguments = sys.argv[1:]
port = int(arguments[arguments.index("--port") + 1])
nextn = "--speculative-algorithm" in arguments
gate = Path(os.environ["FULL_SIZE_GATE"])
gate.with_suffix(".at").write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
while not gate.exists():
    time.sleep(0.02)
print(
    "[2026-01-01 00:00:00] Load weight end. elapsed=1.89 s, type=BailingMoeV3ForCausalLM, quant=fp8, "
)
print("Engine startup timings (s): load_weight=1.90, scheduler_e2e=13.12", flush=True)


def set_by(name: str) -> bool:
    key, _, value = os.environ.get(name, "=").partition("=")
    return bool(key) and os.environ.get(key) == value


if set_by("FAKE_DIE"):
    print('NotImplementedError: "addmm_cuda" not implemented', flush=True)
    sys.exit(1)
if set_by("FAKE_HANG"):
    time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"version": "0.5.23", "random_seed": 1, "api_key": "no"}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body if self.path == "/server_info" else b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        began = first = time.perf_counter()
        n = body["sampling_params"]["max_new_tokens"]
        meta = {"prompt_tokens": len(body["input_ids"]), "finish_reason": None}
        for token in range(1, n + 1):
            time.sleep(0.004 if nextn else 0.002)
            first = time.perf_counter() if token == 1 else first
            meta |= {"completion_tokens": token}
            if token == n:
                meta["finish_reason"] = {"type": "length"}
                meta["first_token_latency"] = first - began
                meta["e2e_latency"] = time.perf_counter() - began
                meta |= {"spec_verify_ct": n - 1} if nextn else {}
            line = json.dumps({"output_ids": [token], "meta_info": meta})
            self.wfile.write(f"data: {line}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


if status := os.environ.get("SPARKLING_STATUS_FILE"):
    Path(status).write_text(json.dumps({"switches": {"fp8-head": True}}))
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
