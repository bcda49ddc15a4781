#!/usr/bin/env python3
"""Records what an SGLang server answers with Sparklet, and compares two such recordings.

    python scripts/record_sparklet.py record OUT.json --url http://127.0.0.1:30000
    python scripts/record_sparklet.py record OUT.json --start --recipe sparklet-gpu
    python scripts/record_sparklet.py compare tests/data/sparklet/cpu-nextn.json OUT.json

Greedy answers with log-probabilities, repetitive text and sampled answers, each with the server's
own speculation counters; what was recorded is on the disk after every answer. `--start` starts the
server itself, with the Python that runs this script and nothing installed but SGLang: Humming (where
the recipe has it) and NEXTN, the LM head in BF16, so that no plugin of ours is needed on a GPU. Its
log becomes OUT.log. `record_sparklet_gpu.py` starts several on a GPU, for what tests/data/sparklet
holds of one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from sparklet import chat, questions, tokenizer
from sparkling import recipe

ROOT = Path(__file__).resolve().parent.parent
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy


def call(url: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with OPENER.open(request, timeout=timeout) as reply:
        return json.load(reply)


def wait(url: str, deadline: float, process: subprocess.Popen[bytes] | None = None) -> float:
    """Seconds until the server answers one token.

    Raises TimeoutError, and RuntimeError when `process`, the server, has ended.
    """
    began = time.monotonic()
    body = {"text": "1", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    while (left := deadline - (time.monotonic() - began)) > 0:
        try:
            call(f"{url}/generate", body, timeout=left)
            return time.monotonic() - began
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}") from None
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
    url: str,
    model: Path,
    out: Path,
    greedy: int,
    sampled: int,
    repeated: int,
    budget: float,
    facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The recording, written to `out` after every answer; stops when `budget` seconds are over.
    `facts` are kept with it: how the server was started.

    The first sampled request of a GPU server may compile its sampling kernels for minutes: the
    greedy answers and the repetitive texts come first.
    """
    info = call(f"{url}/server_info", timeout=30)
    tok = tokenizer.load(model / "tokenizer.json")
    began = time.monotonic()
    encode = lambda text: tok.encode(text, add_special_tokens=False).ids  # noqa: E731
    asked = questions.problems(max(greedy, sampled), 23)
    cold = {"temperature": 0, "max_new_tokens": 160}
    warm = {"temperature": 0.6, "top_p": 0.95, "top_k": 29, "max_new_tokens": 160}
    plain = {"temperature": 0, "max_new_tokens": 128}
    work = [("greedy", encode(q), cold, True, p.answer) for q, p, _ in asked[:greedy]]
    work += [
        ("repeated", encode(q), plain, False, None) for q in questions.repetitive(repeated, 23)
    ]
    work += [("sampled", encode(q), warm, False, p.answer) for q, p, _ in asked[:sampled]]
    rows: dict[str, list[dict[str, Any]]] = {"greedy": [], "repeated": [], "sampled": []}
    made: dict[str, Any] = {}
    for kind, ids, sampling, logprobs, answer in work:
        left = budget - (time.monotonic() - began)
        if left <= 0:
            break
        row = ask(url, ids, sampling, logprobs, timeout=left)
        if answer is not None:
            row["right"] = questions.extract(tok.decode(row["ids"])) == answer
        rows[kind].append(row)
        made = {
            "made": {"date": time.strftime("%Y-%m-%d"), **(facts or {})},
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


NEAR_TIE = 0.1
"""Nats. Where two lanes' greedy texts part, the two tokens are a near-tie if one lane at least gives
them log-probabilities this close: BF16 sums in another order moved Sparklet's by up to 0.07."""

LEAST_SAME, MOST_APART = 45, 0.05


def verdict(found: dict[str, Any]) -> list[str]:
    """What of a comparison breaks the model's goals, as sentences: greedy text the same on 45 of 50
    prompts, every difference a near-tie, accept lengths within 5 %. Empty: all is met."""
    out = []
    if found["same"] * 50 < LEAST_SAME * found["n"]:
        out.append(f"greedy text is the same on {found['same']} of {found['n']} prompts only")
    far = [gap for gap in found["gaps"] if not gap <= NEAR_TIE]
    if far:
        out.append(f"{len(far)} differences are no near-ties: {far} nats")
    for kind, (mine, other) in found["accept_length"].items():
        if abs(mine - other) > MOST_APART * mine:
            out.append(f"the accept length of {kind} text is {mine:.2f} here and {other:.2f} there")
    return out


@contextlib.contextmanager
def started(
    name: str,
    model: Path,
    port: int,
    log: Path,
    switches: Sequence[str] = ("humming", "nextn"),
    variant: str | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, dict[str, Any], subprocess.Popen[bytes]]]:
    """A server of a recipe with these switches, as far as the recipe has them, and more flags and
    variables; yields (url, facts, process)."""
    book = recipe.load(name, root=ROOT)
    on = [s for s in switches if s == "nextn" or book.available(s) is None]
    launch = book.render(book.combination(on), model=model, port=port, variant=variant)
    launch = replace(launch, argv=(*launch.argv, *flags), env={**launch.env, **(env or {})})
    command = [sys.executable, *launch.argv]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        facts = {"recipe": name, "stage": launch.stage, "command": launch.shell()}
        yield f"http://127.0.0.1:{port}", facts, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _record(args: argparse.Namespace) -> int:
    log = args.out.with_suffix(".log")
    with contextlib.ExitStack() as stack:
        url, facts, process = args.url, {}, None
        if args.start:
            server = started(args.recipe, args.model, args.port, log, flags=shlex.split(args.flags))
            url, facts, process = stack.enter_context(server)
        print(f"ready after {wait(url, args.ready, process):.0f} s", flush=True)
        made = record(
            url, args.model, args.out, args.greedy, args.sampled, args.repeated, args.budget, facts
        )
    kept = ("server", "seconds", "complete", "accept_length", "right")
    print(json.dumps({k: made[k] for k in kept}, indent=1))
    return 0 if made["complete"] else 1


def _compare(args: argparse.Namespace) -> int:
    found = compare(*(json.loads(path.read_text()) for path in (args.first, args.second)))
    against = verdict(found)
    print(json.dumps(found, indent=1))
    print("\n".join(against) or "all goals of conformance are met")
    return 1 if against else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="record a server's answers")
    one.set_defaults(handler=_record)
    one.add_argument("out", type=Path)
    which = one.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="a server that runs")
    which.add_argument("--start", action="store_true", help="start one, and stop it")
    one.add_argument("--recipe", default="sparklet-gpu", help="for --start (sparklet-gpu)")
    one.add_argument("--port", type=int, default=30790, help="for --start (30790)")
    one.add_argument("--flags", default="", help="for --start: more flags, as one word")
    one.add_argument("--model", type=Path, default=ROOT / "models" / "sparklet")
    one.add_argument("--greedy", type=int, default=50)
    one.add_argument("--sampled", type=int, default=50)
    one.add_argument("--repeated", type=int, default=16)
    one.add_argument("--ready", type=float, default=400.0, help="seconds to wait for the server")
    one.add_argument("--budget", type=float, default=3600.0, help="seconds for all requests")
    two = commands.add_parser("compare", help="compare two recordings")
    two.set_defaults(handler=_compare)
    two.add_argument("first", type=Path)
    two.add_argument("second", type=Path)
    args = parser.parse_args(argv)
    return args.handler(args)


if __name__ == "__main__":
    raise SystemExit(main())
