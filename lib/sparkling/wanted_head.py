"""What is wanted as evidence for the FP8 LM head, on or off, and what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sparkling.evidence import (
    AGAIN,
    NO_LOG,
    READ_LOG,
    WITHOUT,
    Evidence,
    Findings,
    Info,
    LogFacts,
    Probe,
    arguments_of,
    count,
    environment_of,
)

MAX_SHIFT = 1.0
"""Mean |log-probability difference| (nats, top tokens) above which an FP8 head is broken: e4m3
rounds each weight by at most 1/16 of itself, which moves a logit by hundredths."""

ON = ("1", "true", "yes", "on")
"""What the plugin takes for on."""

HEAD_LINE = "Online FP8 quantization enabled for lm_head"
HEAD_FLAG, FORK_FLAG = HEAD_FLAGS = ("SPARKLING_FP8_LM_HEAD", "SGLANG_ENABLE_FP8_LM_HEAD")


def fp8_head(
    on: bool, info: Info, facts: LogFacts | None, status: Info, probe: Probe | None
) -> list[Evidence]:
    """Evidence for the FP8 LM head."""
    f = Findings("fp8-head")
    env = environment_of(info)
    flags = {k: env[k] for k in HEAD_FLAGS if env.get(k, "").strip().lower() in ON} if env else {}
    want = f"{HEAD_FLAG} = 1" if on else "no switch for an FP8 head in the environment"
    if env is None:
        f.add("arguments", want, "the server's environment could not be read", None)
    else:
        found = ", ".join(f"{k} = {v}" for k, v in flags.items()) or "not set"
        cause = (
            "the switch never reached the server's environment"
            if on
            else "the server was started with the switch on"
        )
        f.add("arguments", want, found, bool(flags) == on, cause, AGAIN)
    if on and arguments_of(info, "enable_fp32_lm_head")[1]:
        f.add(
            "arguments",
            "enable_fp32_lm_head not set",
            "True",
            False,
            "--enable-fp32-lm-head and the FP8 head exclude each other",
            "drop --enable-fp32-lm-head from the command",
        )

    _head_status(f, on, facts, status, forked=on and FORK_FLAG in flags)
    want = f"a line `{HEAD_LINE}`" if on else f"no line `{HEAD_LINE}`"
    if facts is None or not (facts.complete or facts.head_lines):
        f.add("log", want, NO_LOG, None)
    elif on:
        f.add(
            "log",
            want,
            count(facts.head_lines, "such line"),
            facts.head_lines > 0,
            "the server loaded its weights without quantizing the head",
            "stock SGLang ignores the switch without a word: it takes the Sparkling plugin, or "
            "the Spark fork",
        )
    else:
        f.add(
            "log",
            want,
            count(facts.head_lines, "such line"),
            facts.head_lines == 0,
            "the log says that the head was quantized",
            WITHOUT,
        )
    _head_probe(f, on, probe)
    return f.items


def _head_status(f: Findings, on: bool, facts: LogFacts | None, status: Info, *, forked: bool):
    head = status.get("head") if status else None
    dtype = head.get("dtype") if isinstance(head, Mapping) else None
    want = "head dtype float8_e4m3fn" if on else "head dtype not FP8"
    # The Spark fork quantizes the head itself: with its log line there, our plugin may be absent.
    forked = forked and facts is not None and facts.head_lines > 0
    if status is None or (forked and not dtype):
        f.add("status", want, "no status file of the plugin", None)
    elif not status:
        f.add(
            "status",
            want,
            "the plugin wrote nothing",
            False if on else None,
            "the Sparkling plugin did not run in the server, so nothing quantized the head",
            "install lib/sparkling_sglang into the server environment (scripts/setup.sh does it)",
        )
    elif dtype is None:
        f.add("status", want, "the plugin does not report the head", None)
    else:
        before, after = head.get("bytes_before"), head.get("bytes_after")
        size = f", {before / 1e6:.2f} → {after / 1e6:.2f} MB" if before and after else ""
        size += f", kernel {head['kernel']}" if on and head.get("kernel") else ""
        cause = f"the head was left in {dtype}" if on else f"the head is in {dtype}"
        f.add("status", want, f"{dtype}{size}", ("float8" in str(dtype)) == on, cause, READ_LOG)


def _head_probe(f: Findings, on: bool, probe: Probe | None) -> None:
    """Two questions: did the FP8 product run, and does it answer nearly like the BF16 head?"""
    if probe is None:
        if on:
            f.add("probe", "the count of FP8 head products grows with the probe", "no probe", None)
        return
    before, after = probe.applied
    if not on:
        if after is not None and after > (before or 0):
            f.add(
                "probe",
                "no FP8 head product runs",
                f"{after - (before or 0)} ran",
                False,
                "the FP8 head is at work",
                WITHOUT,
            )
        return
    want = "the count of FP8 head products grows with the probe"
    if after is None:
        f.add("probe", want, "not counted", None)
    else:
        f.add(
            "probe",
            want,
            f"{before or 0} → {after}",
            after > (before or 0),
            "the head is in FP8, but the probe did not run through it",
            READ_LOG,
        )
    shift = shift_from(probe)
    if shift is None:
        return
    want = "log-probabilities near the BF16 head's, but not the same"
    if shift == 0.0:
        f.add(
            "probe",
            want,
            "identical to the last bit",
            False,
            "the probe's log-probabilities are those of the BF16 head",
            "the quantized head is not the one in use: look at the status file",
        )
    else:
        f.add(
            "probe",
            want,
            f"mean difference {shift:.4f} nats",
            shift <= MAX_SHIFT,
            "the FP8 head answers unlike the BF16 head, so its scales are wrong",
            "do not measure this; compare the head's scales with its weights",
        )


def shift_from(probe: Probe) -> float | None:
    """Mean |difference| in nats between the probe's top log-probabilities and the reference's.

    Compared where both saw the same text: positions up to and including the first that chose
    another token. Tokens present in one list only are left out. None when nothing is comparable.
    """
    if not probe.top or not probe.reference or not probe.reference.get("top"):
        return None
    mine, theirs = list(probe.output_ids or ()), list(probe.reference.get("output_ids") or ())
    gaps: list[float] = []
    for i, (a, b) in enumerate(zip(probe.top, probe.reference["top"], strict=False)):
        other = {str(k): float(v) for k, v in b.items()}
        both = [(float(v), other[str(k)]) for k, v in a.items() if str(k) in other]
        gaps += [abs(x - y) for x, y in both if math.isfinite(x - y)]
        if i < min(len(mine), len(theirs)) and mine[i] != theirs[i]:
            break
    return sum(gaps) / len(gaps) if gaps else None
