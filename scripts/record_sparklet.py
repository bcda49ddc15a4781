#!/usr/bin/env python3
"""Records what a running SGLang server answers with Sparklet, to compare lanes with each other.

    python scripts/record_sparklet.py http://127.0.0.1:30000 MODEL OUT.json [--greedy 50 ...]

Greedy answers with log-probabilities, sampled answers and repetitive text, each with the server's
own speculation counters. Two recordings of the same prompts can be compared token by token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from sparklet import chat, evaluate, tokenizer

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy


def call(url: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with OPENER.open(request, timeout=timeout) as reply:
        return json.load(reply)


def wait(url: str, deadline: float) -> float:
    """Seconds until the server answers one token. Raises TimeoutError."""
    began = time.monotonic()
    while time.monotonic() - began < deadline:
        try:
            body = {"text": "1", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            call(f"{url}/generate", body, timeout=deadline)
            return time.monotonic() - began
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise TimeoutError(f"{url} did not answer within {deadline:.0f} s")


def ask(
    url: str, ids: list[int], sampling: dict[str, Any], logprobs: bool, timeout: float = 300
) -> dict[str, Any]:
    """One request by token ids; the answer's ids, counters and (greedy) top log-probabilities."""
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": -1}
    reply = call(f"{url}/generate", body, timeout)
    meta = reply["meta_info"]
    row = {
        "prompt": ids,
        "ids": reply["output_ids"],
        "rounds": meta.get("spec_verify_ct"),
        "histogram": meta.get("spec_correct_drafts_histogram"),
        "finish": (meta.get("finish_reason") or {}).get("type"),
        "seconds": round(meta.get("e2e_latency") or 0.0, 4),
    }
    if logprobs:
        row["logprobs"] = [round(x[0], 4) for x in meta.get("output_token_logprobs") or []]
        top = meta.get("output_top_logprobs") or []
        row["top"] = [[[round(x[0], 4), x[1]] for x in some or []] for some in top]
    return row


def accept_length(rows: list[dict[str, Any]]) -> float | None:
    """Sum of tokens (the first of each answer left out) over the sum of rounds."""
    rounds = sum(r["rounds"] or 0 for r in rows)
    return sum(len(r["ids"]) - 1 for r in rows) / rounds if rounds else None


KEPT = (
    "version",
    "dtype",
    "device",
    "quantization",
    "attention_backend",
    "moe_runner_backend",
    "fp8_gemm_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "kv_cache_dtype",
    "random_seed",
)


def record(
    url: str, model: Path, out: Path, greedy: int, sampled: int, repeated: int, budget: float
) -> dict[str, Any]:
    """The recording, written to `out` after every answer; stops when `budget` seconds are over.

    The first sampled request of a GPU server may compile its sampling kernels for minutes: the
    greedy answers and the repetitive texts come first.
    """
    info = call(f"{url}/server_info", timeout=30)
    tok = tokenizer.load(model / "tokenizer.json")
    began = time.monotonic()
    encode = lambda text: tok.encode(text, add_special_tokens=False).ids  # noqa: E731
    asked = evaluate.problems(max(greedy, sampled), 23)
    cold = {"temperature": 0, "max_new_tokens": 160}
    warm = {"temperature": 0.6, "top_p": 0.95, "top_k": 29, "max_new_tokens": 160}
    plain = {"temperature": 0, "max_new_tokens": 128}
    work = [("greedy", encode(q), cold, True, p.answer) for q, p, _ in asked[:greedy]]
    work += [("repeated", encode(q), plain, False, None) for q in evaluate.repetitive(repeated, 23)]
    work += [("sampled", encode(q), warm, False, p.answer) for q, p, _ in asked[:sampled]]
    rows: dict[str, list[dict[str, Any]]] = {"greedy": [], "repeated": [], "sampled": []}
    made: dict[str, Any] = {}
    for kind, ids, sampling, logprobs, answer in work:
        left = budget - (time.monotonic() - began)
        if left <= 0:
            break
        row = ask(url, ids, sampling, logprobs, timeout=left)
        if answer is not None:
            row["right"] = evaluate.extract(tok.decode(row["ids"])) == answer
        rows[kind].append(row)
        made = {
            "server": {k: info.get(k) for k in KEPT},
            "seconds": round(time.monotonic() - began, 1),
            "complete": sum(map(len, rows.values())) == len(work),
            "accept_length": {k: accept_length(v) for k, v in rows.items()},
            "right": {k: sum(r.get("right", 0) for r in rows[k]) for k in ("greedy", "sampled")},
            "end_token": tokenizer.token_id(tok, chat.END),
            **rows,
        }
        out.write_text(json.dumps(made) + "\n")
    return made


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Greedy texts of two recordings: how many are the same, and for each difference the gap
    (in nats, smaller of both lanes) between the two tokens chosen where the texts part."""
    same, gaps = 0, []
    for x, y in zip(a["greedy"], b["greedy"], strict=False):
        if x["prompt"] != y["prompt"]:
            raise ValueError("the recordings do not hold the same prompts")
        if x["ids"] == y["ids"]:
            same += 1
            continue
        at = next(
            (i for i, (p, q) in enumerate(zip(x["ids"], y["ids"], strict=False)) if p != q),
            min(len(x["ids"]), len(y["ids"])),
        )
        gap = []
        for row, mine, other in ((x, x, y), (y, y, x)):
            top = {token: value for value, token in row["top"][at]}
            value = top.get(other["ids"][at], float("-inf"))
            gap.append(top.get(mine["ids"][at], 0.0) - value)
        gaps.append(round(min(gap), 4))
    n = min(len(a["greedy"]), len(b["greedy"]))
    lengths = {
        k: (a["accept_length"][k], b["accept_length"][k])
        for k in a["accept_length"]
        if a["accept_length"][k] and b["accept_length"].get(k)
    }
    return {"n": n, "same": same, "gaps": gaps, "accept_length": lengths}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--greedy", type=int, default=50)
    parser.add_argument("--sampled", type=int, default=50)
    parser.add_argument("--repeated", type=int, default=16)
    parser.add_argument("--ready", type=float, default=300.0, help="seconds to wait for the server")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all requests")
    args = parser.parse_args(argv)
    ready = wait(args.url, args.ready)
    print(f"ready after {ready:.0f} s", flush=True)
    made = record(
        args.url, args.model, args.out, args.greedy, args.sampled, args.repeated, args.budget
    )
    print(
        json.dumps({k: made[k] for k in ("server", "seconds", "accept_length", "right")}, indent=1)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
