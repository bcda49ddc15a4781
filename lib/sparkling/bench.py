"""Workloads times repeats against one running server, into a file that survives a kill."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparkling import gone, metrics
from sparkling.client import Client
from sparkling.errors import SparklingError, UsageError
from sparkling.files import Journal
from sparkling.ladder import Arm, Gain, Ladder, RoundCost, ladder, round_costs, summarise
from sparkling.reply import Reply
from sparkling.wire import Refused
from sparkling.workloads import Prompt, Workload, digest, repeats_of, workloads

SCHEMA = 1
WARMUP_TOKENS = 32

Progress = Callable[[int, int, dict[str, Any]], None]  # (rows done, rows in all, the newest row)


# -- who is measured -----------------------------------------------------------------------------


def arm_hash(launch: Any) -> str:
    """An arm's identity: the launch's argv and env without host, port and the folders in front of
    paths, and the checkpoint. Two launches with the same hash are the same arm."""
    argv: list[str] = []
    words = iter(launch.argv)
    for word in words:
        if word in ("--port", "--host"):
            next(words, None)
            continue
        argv.append(_base(word))
    env = {k: _base(v) for k, v in sorted(launch.env.items())}
    return digest([argv, env, model_identity(launch)])


def _base(word: str) -> str:
    """A path without the folders above its last part; anything else as it is."""
    name, eq, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return name + eq + (os.path.basename(value.rstrip("/")) if value.startswith("/") else value)


def model_identity(launch: Any) -> str:
    """Which weights: a hash over the checkpoint's configuration and its weight files' names and
    sizes when it is on this machine, otherwise its name."""
    folder = Path(_value(launch, "--model-path") or "")
    try:
        config = (folder / "config.json").read_bytes()
        files = sorted((p.name, p.stat().st_size) for p in folder.glob("*.safetensors"))
    except OSError:
        return digest(["name", folder.name or launch.served_name])
    return digest(["files", config.decode("utf-8", "replace"), files])


def _value(launch: Any, flag: str) -> str | None:
    argv = list(launch.argv)
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else None


def machine() -> dict[str, Any]:
    """What the numbers depend on and can be read here: processor, memory, GPUs."""
    from sparkling.lane import probe_gpus

    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        pages = 0
    return {
        "arch": platform.machine(),
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "gpus": [g.name for g in probe_gpus().gpus],
    }


# -- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row to be: a prompt, rendered, of a workload."""

    workload: Workload
    prompt: Prompt
    text: str | list[Mapping[str, Any]]
    hash: str


def run(
    server_or_client: Any,
    *,
    arm: str,
    launch: Any,
    workloads: Sequence[Workload],
    repeats: int | Sequence[int],
    out: Path,
    warmup: int = 1,
    stall_s: float = 120.0,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measure an arm; return its rows of these workloads, older ones of `out` included.

    Every row is appended to `out` (JSONL) and on the disk before the next request starts. Rows that
    `out` already holds, by (arm hash, workload, prompt, repeat) and unchanged prompt and settings,
    are not measured again. Requests are sent one at a time: repeat by repeat, workload by workload,
    with the prefix cache flushed before each workload of each repeat. `warmup` requests a workload
    are sent first and thrown away. `stall_s` is the longest silence allowed. `repeats`: how many, or
    their numbers. `facts` stand in every row; rows of `out` with other ones are left alone.

    Raises ServerError when the server stops answering or goes away (rows so far are kept);
    UsageError when `out` holds rows of another machine or is in use.
    """
    numbers = range(repeats_of({}, repeats)) if isinstance(repeats, int) else list(repeats)
    client = _client_of(server_or_client)
    tags = dict(facts or {})
    facts = {**facts_of(arm, launch), **tags}
    out = Path(out)
    with Journal(out) as journal:
        _same_machine(journal.rows, facts, out)
        bench = _Bench(client, server_or_client, launch, stall_s)
        cases = [c for w in workloads for c in bench.render(w)]
        same = [r for r in journal.rows if all(r.get(k) == v for k, v in tags.items())]
        done = {_key(r): r for r in same}
        wanted = [(repeat, c) for repeat in numbers for c in cases]
        keys = [_case_key(facts["arm_hash"], c, repeat) for repeat, c in wanted]
        block: tuple[int, str] | None = None
        warm: set[str] = set()
        finished = sum(key in done for key in keys)
        for (repeat, case), key in zip(wanted, keys, strict=True):
            if key in done:
                continue
            name = case.workload.name
            if name not in warm:
                warm.add(name)
                for _ in range(warmup):
                    bench.warm_up(case)
                block = None
            if block != (repeat, name):
                block = (repeat, name)
                flushed = bench.flush()
            row = {**facts, **bench.measure(case), "repeat": repeat, "flushed": flushed}
            journal.append(row)
            done[key] = row
            finished += 1
            if progress is not None:
                progress(finished, len(keys), row)
    return [done[key] for key in keys]


def rendered(client: Client, workload: Workload) -> list[Case]:
    """The cases of a workload, prompts cut to size with the server's tokenizer."""
    cases = []
    for prompt in workload.prompts:
        try:
            text = prompt.render(client.count_tokens)
        except Refused as error:
            if error.status != 404:
                raise
            text = prompt.render(None)  # no tokenizer: an estimate, the same for every arm
        cases.append(Case(workload, prompt, text, digest([text, workload.settings()])))
    return cases


class _Bench:
    def __init__(self, client: Client, server: Any, launch: Any, stall_s: float) -> None:
        self.client = client
        self.server = server
        self.stall_s = stall_s
        self.answered = 0
        self.speculates = bool(launch.switches.get("nextn"))
        self.use_counters = False
        self._can_flush = True

    def render(self, workload: Workload) -> list[Case]:
        return self._guard(partial(rendered, self.client, workload))

    def flush(self) -> bool:
        """Empty the prefix cache; false where the server cannot."""
        if not self._can_flush:
            return False
        try:
            self._guard(self.client.flush_cache)
        except Refused as error:
            if error.status != 404:
                raise
            self._can_flush = False
        return self._can_flush

    def warm_up(self, case: Case) -> None:
        reply = self._ask(case, min(case.workload.max_tokens, WARMUP_TOKENS))
        # Where a reply does not bring its own counters, the server's totals around it have to do.
        self.use_counters = self.speculates and reply.spec is None and self._has_counters()

    def _has_counters(self) -> bool:
        try:
            return "sglang:spec_verify_calls_total" in self.client.metrics()
        except SparklingError:
            return False

    def measure(self, case: Case) -> dict[str, Any]:
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with self.client.counting() if self.use_counters else nullcontext() as window:
            reply = self._ask(case, case.workload.max_tokens)
        if reply.spec is None and window is not None:
            reply.spec = window.spec
        return {
            "workload": case.workload.name,
            "prompt": case.prompt.id,
            "case_hash": case.hash,
            "settings": case.workload.settings(),
            "started": started,
            **reply_row(reply),
        }

    def _ask(self, case: Case, max_tokens: int) -> Reply:
        w = case.workload
        kwargs: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": w.ignore_eos,
            "timeout_s": self.stall_s,
            **w.sampling,
        }
        if w.api == "generate":
            ask = partial(self.client.generate, case.text, **kwargs)
        else:
            kwargs |= {"thinking": w.thinking, "extra": {"return_output_ids_in_sglext": True}}
            kwargs |= {"tools": list(w.tools)} if w.tools else {}
            ask = partial(self.client.chat, case.text, **kwargs)
        reply = self._guard(ask)
        self.answered += 1
        return reply

    def _guard(self, ask: Callable[[], Any]) -> Any:
        with gone.told(self.server, lambda: self.answered, "request", self.stall_s):
            return ask()


def reply_row(reply: Reply) -> dict[str, Any]:
    """The measured part of a row. Times in seconds; None where a number cannot be known. `sent_s` is
    when it was sent, on the machine's monotonic clock; other times are since then."""
    stretch = metrics.decode(reply)
    return {
        "complete": reply.complete,
        "problem": reply.problem,
        "warnings": [*reply.warnings, *([metrics.BURST] if metrics.burst(reply) else [])],
        "finish_reason": reply.finish_reason,
        "sent_s": reply.started,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "cached_tokens": reply.cached_tokens,
        "reasoning_tokens": reply.reasoning_tokens,
        "ttft_s": metrics.ttft_s(reply) if reply.complete else None,
        "e2e_s": reply.e2e_s if reply.complete else None,
        "decode_tokens": stretch.tokens if stretch else None,
        "decode_s": stretch.seconds if stretch else None,
        "decode_method": stretch.method if stretch else None,
        "decode_rate": stretch.rate if stretch else None,
        "tpot_s": metrics.tpot_s(reply),
        "peak_rate": metrics.peak_rate(reply),
        "chunk_times_s": [round(t, 6) for t in reply.chunk_times_s],
        "chunk_tokens": list(reply.chunk_tokens),
        "spec": reply.spec.to_json() if reply.spec else None,
        "output_hash": reply.fingerprint if reply.complete else None,
    }


def _client_of(server_or_client: Any) -> Client:
    return server_or_client.client() if hasattr(server_or_client, "client") else server_or_client


def facts_of(arm: str, launch: Any) -> dict[str, Any]:
    here = machine()
    return {
        "schema": SCHEMA,
        "arm": arm,
        "arm_hash": arm_hash(launch),
        "recipe": launch.recipe,
        "stage": launch.stage,
        "variant": launch.variant,
        "switches": dict(launch.switches),
        "regime": getattr(launch, "regime", ""),
        "model": launch.served_name,
        "model_id": model_identity(launch),
        "machine": here,
        "machine_id": digest(here),
    }


def _case_key(arm: str, case: Case, repeat: int) -> tuple[Any, ...]:
    return (arm, case.workload.name, case.prompt.id, repeat, case.hash)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(k) for k in ("arm_hash", "workload", "prompt", "repeat", "case_hash"))


def _same_machine(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], out: Path) -> None:
    for row in rows:
        other = row.get("machine_id")
        if other is not None and other != facts["machine_id"]:
            raise UsageError(
                f"{out} holds rows of another machine ({json.dumps(row.get('machine'))}); rows of "
                "different machines do not belong in one file, so use a new run."
            )


__all__ = [
    "Arm",
    "Gain",
    "Ladder",
    "Prompt",
    "RoundCost",
    "Workload",
    "arm_hash",
    "ladder",
    "machine",
    "model_identity",
    "reply_row",
    "round_costs",
    "run",
    "summarise",
    "workloads",
]
