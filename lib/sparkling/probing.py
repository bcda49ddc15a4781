"""Asking a running server: one probe request, the plugin's status file, the process's environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparkling.errors import SparklingError
from sparkling.evidence import Probe
from sparkling.wanted_head import HEAD_FLAGS

PROBE_TOKENS = 128
"""Tokens of the probe: at most 4 a round (3 drafts and the bonus token) make 32 rounds."""

_COPIED = "The blue pack holds 28 crayons. A white bear runs through the park."
PROBE_PROMPT = f"{_COPIED} {_COPIED} The blue"
"""A text that repeats, the easiest there is for a draft: one that fails here contributes nothing. In
the words of the practice model, so that it goes on with them; on text that is strange to a model a
broken draft can be right by luck (on Sparklet the trap reached 1.97 so, and 1.00 on this)."""

STATUS_WAIT_S = 5.0
"""How long the plugin gets to write its counters after the probe."""


def run_probe(client: Any, tokens: int, reference: Mapping[str, Any] | None) -> Probe:
    """One greedy request; what it showed. Never raises for a refused request: that is evidence."""
    try:
        reply = client.generate(
            PROBE_PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=5, stream=True
        )
    except SparklingError as problem:
        return Probe(answered=False, note=f"the probe request failed: {problem}")
    return probe_of(reply, reference)


def probe_of(reply: Any, reference: Mapping[str, Any] | None = None) -> Probe:
    """A `reply.Reply` of /generate as a `Probe`."""
    spec = reply.spec
    top = None
    if reply.logprobs:
        # Keys as text: the probe is stored as JSON, and JSON has no other.
        top = [{str(token): value for token, value in p.top.items()} for p in reply.logprobs]
    return Probe(
        answered=bool(reply.completion_tokens) and reply.complete,
        tokens=reply.completion_tokens,
        rounds=spec.rounds if spec else None,
        correct=spec.tokens - spec.rounds if spec else None,
        proposed=spec.proposed if spec else None,
        reported_length=spec.reported if spec else None,
        reported_rate=spec.accept_rate if spec else None,
        top=top,
        output_ids=reply.output_ids,
        reference=reference,
        note=reply.problem or "",
    )


def read_status(path: Path | None, since: float | None = None) -> dict[str, Any] | None:
    """The plugin's status file; None when there is none to expect, {} when it was never written.

    A file older than the server's start (`since`, wall seconds) belongs to another server.
    """
    if path is None:
        return None
    path = Path(path)
    try:
        if since is not None and path.stat().st_mtime < since - 1.0:
            return {}
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def applied_of(status: Mapping[str, Any] | None) -> int | None:
    """The plugin's counter of FP8 head products, or None where it does not say."""
    head = status.get("head") if isinstance(status, Mapping) else None
    value = head.get("applied") if isinstance(head, Mapping) else None
    return value if isinstance(value, int) else None


def status_after(path, since, before, wait: bool | None) -> dict[str, Any] | None:
    """The status after the probe; waits a little where a counter is due to grow."""
    deadline = time.monotonic() + (STATUS_WAIT_S if wait and applied_of(before) is not None else 0)
    while True:
        status = read_status(path, since)
        now = applied_of(status)
        if time.monotonic() >= deadline or (now is not None and now > (applied_of(before) or 0)):
            return status
        time.sleep(0.2)


def process_environment(pid: int, wanted: Iterable[str]) -> dict[str, str] | None:
    """What the process really has of these variables (and of the FP8 head's), from /proc.

    /server_info's env_vars lists SGLang's own variables only, so ours are read here; the rest of
    the environment, which may hold secrets, is not kept.
    """
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    names = {*wanted, *HEAD_FLAGS}
    pairs = (item.split(b"=", 1) for item in raw.split(b"\0") if b"=" in item)
    found = {os.fsdecode(k): os.fsdecode(v) for k, v in pairs}
    return {k: v for k, v in found.items() if k in names}


def reference_of(path: Path | None) -> dict[str, Any] | None:
    """{top, output_ids, stage} of a stored proof, to compare log-probabilities with."""
    if path is None or not Path(path).is_file():
        return None
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except ValueError as problem:
        raise SparklingError(
            f"The stored proof {path} is not readable ({problem}); prove the baseline again."
        ) from problem
    probe = data.get("probe") or {}
    if not probe.get("top"):
        return None
    return {"top": probe["top"], "output_ids": probe.get("output_ids"), "stage": data.get("stage")}
