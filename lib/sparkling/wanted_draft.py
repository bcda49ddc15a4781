"""What is wanted as evidence for NEXTN speculative decoding, on or off, and what was found."""

from __future__ import annotations

from collections.abc import Mapping

from sparkling.evidence import (
    AGAIN,
    NO_LOG,
    WITHOUT,
    Evidence,
    Findings,
    Info,
    LogFacts,
    Probe,
    Reading,
    arguments_of,
    count,
)
from sparkling.stats import wilson

MIN_ROUNDS = 20
"""Rounds below which an accept length says nothing."""

MIN_ACCEPT = 1.3
"""An accept length below this means that the draft contributes nothing worth its price.

Not 1.00, because a broken draft still hits by chance: on Sparklet, the draft that reads an FP8 head
without its scales (`SPARKLING_TRAP`) keeps 1.03 to 1.10 tokens a round. And a round of 3/1/4 costs at
least 1.6 plain steps wherever one was measured (1.62 on an H200, about 2 derived for a Spark), so a
draft below 1.3 pays nowhere. Sound drafts were at 2.2 or more (published for a Spark: 2.68).
"""

DRAFTS = 3
"""Drafts of a round where the reply does not say how many were proposed."""

NEXTN_CLASS = "BailingMoeForCausalLMNextN"


def nextn(
    on: bool, info: Info, facts: LogFacts | None, status: Info, probe: Probe | None
) -> list[Evidence]:
    """Evidence for NEXTN speculative decoding."""
    f = Findings("nextn")
    known, algorithm = arguments_of(info, "speculative_algorithm")
    want = "speculative_algorithm " + ("= EAGLE (what NEXTN resolves to)" if on else "not set")
    if known:
        right = ("EAGLE", "NEXTN") if on else (None, "NONE")
        cause = (
            "--speculative-algorithm NEXTN never reached the server"
            if on
            else f"the server was started with speculation ({algorithm})"
        )
        f.add("arguments", want, f"{algorithm}", algorithm in right, cause, AGAIN)
    else:
        f.add("arguments", want, "the server does not report speculative_algorithm", None)

    _draft_head(f, on, facts, status)
    want = f"weights of {NEXTN_CLASS}" if on else f"no weights of {NEXTN_CLASS}"
    loaded = [c for c in facts.classes if c.endswith("NextN")] if facts else []
    if facts is None or not facts.complete:
        f.add("log", want, NO_LOG, None)
    else:
        cause = "the draft model was never loaded" if on else "a draft model is loaded"
        remedy = "check num_nextn_predict_layers in the checkpoint's config.json" if on else WITHOUT
        f.add("log", want, ", ".join(loaded) or "not loaded", bool(loaded) == on, cause, remedy)
    (_accepts if on else _no_rounds)(f, facts, status, probe)
    return f.items


UNSHARED = (
    "the draft has a head of its own, without the weights and scales that fit",
    "let the plugin hand the target's head over (leave SPARKLING_SHARE_HEAD unset)",
)


def _draft_head(f: Findings, on: bool, facts: LogFacts | None, status: Info) -> None:
    """Does the draft use the target's head? The plugin says so in its status file and in the log."""
    draft = status.get("draft", ...) if status else ...
    if isinstance(draft, Mapping):
        shared, dtype = draft.get("head_shared"), draft.get("head_dtype")
        words = {True: "shared", False: "not shared", None: "sharing not reported"}[shared]
        found = f"{draft.get('class')}, head {words}" + (f" ({dtype})" if dtype else "")
        found += f", SPARKLING_TRAP={draft['trap']}" if draft.get("trap") else ""
        if on:
            f.add("status", "the draft uses the target's whole head", found, shared, *UNSHARED)
        else:
            f.add("status", "no draft model", found, False, "a draft model is loaded", WITHOUT)
    elif draft is None and not on:
        f.add("status", "no draft model", "none", True)
    if on and facts and facts.draft_head is not None:
        shared, detail = facts.draft_head
        found = ("shared" if shared else "not shared") + (f": {detail}" if detail else "")
        f.add("log", "the draft uses the target's head", found, shared, *UNSHARED)


def _no_rounds(f: Findings, facts: LogFacts | None, status: Info, probe: Probe | None) -> None:
    if probe is not None and probe.rounds:
        f.add(
            "probe",
            "no verification round",
            count(probe.rounds, "round"),
            False,
            "the reply was made with speculation",
            WITHOUT,
        )
    elif probe is not None and probe.answered:
        f.add("probe", "no verification round", "the reply has no speculation counters", None)
    if facts and facts.accept:
        f.add(
            "log",
            "decode lines without an accept length",
            f"{facts.accept[-1][0]:.2f}",
            False,
            "the log shows speculation at work",
            WITHOUT,
        )


NOTHING = (
    "the draft contributes nothing: a round keeps hardly more than the token that plain decoding "
    "would give",
    "check that the draft shares the target's head and that the checkpoint's NEXTN layer is trained",
)


def accept_bounds(length: float, rounds: int, drafts: int = DRAFTS) -> tuple[float, float]:
    """A 95 % interval of an accept length over `rounds` rounds of `drafts` drafts.

    Wilson's interval of the kept share of drafts with n = rounds: the drafts of one round stand or
    fall together, and a share that lies between 0 and 1 varies at most as much as a yes or no of
    the same mean, so the true interval is hardly wider.
    """
    kept = min(max((length - 1.0) / drafts, 0.0), 1.0)
    share = wilson(round(kept * rounds), rounds)
    return 1.0 + drafts * share.low, 1.0 + drafts * share.high


def _accepts(f: Findings, facts: LogFacts | None, status: Info, probe: Probe | None) -> None:
    """Does the draft contribute? The probe's own counters decide; the log's decode lines beside."""
    length = probe.accept_length if probe else None
    rounds = (probe.rounds or 0) if probe else 0
    decided = length is not None and rounds >= MIN_ROUNDS
    cause, remedy = _why(status)
    if facts and facts.accept:
        useful = max(a for a, _ in facts.accept) >= MIN_ACCEPT
        found = f"{facts.accept[-1][0]:.2f} in the last of {len(facts.accept)}"
        # Other requests and other windows: they confirm, but never overrule the probe.
        verdict = True if useful else (None if decided else False)
        want = f"accept length of at least {MIN_ACCEPT:g} in the decode lines"
        f.add("log", want, found, verdict, cause, remedy)
    want = f"accept length of at least {MIN_ACCEPT:g} over at least {MIN_ROUNDS} rounds"
    if probe is None:
        f.add("probe", want, "no probe", None)
    elif length is None:
        raw = probe.reported_length
        found = probe.note or "the reply has no speculation counters"
        if raw is not None:
            found = f"the reply says {raw:g} without rounds, which counts nothing"
        f.add("probe", want, found, None)
    elif not decided:
        f.add("probe", want, f"{length:.2f} over only {count(rounds, 'round')}", None)
    else:
        drafts = round(probe.proposed / rounds) if probe.proposed else DRAFTS
        low, high = accept_bounds(length, rounds, max(drafts, 1))
        found = f"{length:.2f} [{low:.2f}, {high:.2f}] over {rounds} rounds"
        f.add("probe", want, found, length >= MIN_ACCEPT, cause, remedy)


def _why(status: Info) -> tuple[str, str]:
    """Cause and remedy of a draft that contributes nothing, as far as the status file knows them."""
    cause, remedy = NOTHING
    draft, head = ((status or {}).get(key) for key in ("draft", "head"))
    if isinstance(draft, Mapping) and draft.get("trap"):
        cause += f" (SPARKLING_TRAP={draft['trap']}: it got the head's tensor without its scales)"
        return cause, "start the stage without the variant that sets the trap"
    if isinstance(head, Mapping) and "float8" in str(head.get("dtype")):
        cause += " (with an FP8 head, usually a draft that got its weights without the scales)"
    return cause, remedy


def accept_readings(info: Info, facts: LogFacts | None, probe: Probe | None) -> list[Reading]:
    """Every accept length and rate that was reported, with its source, window and definition."""
    out = []
    add = lambda *a: out.append(Reading(*a))  # noqa: E731
    if probe is not None:
        over = f"this request: {_n(probe.tokens)} tokens, {_n(probe.rounds)} rounds"
        low = probe.reported_length is not None and probe.reported_length < 1
        add(
            "accept length",
            probe.accept_length,
            "reply's counters",
            over,
            "1 + kept drafts ÷ rounds",
        )
        add(
            "accept length",
            probe.reported_length,
            "reply's own figure",
            over,
            "completion tokens ÷ rounds; counts the first token too, which prefill made",
            "below 1 is impossible: nothing was counted" if low else "",
        )
        add(
            "accept rate",
            probe.reported_rate,
            "reply's own figure",
            over,
            "kept drafts ÷ proposed drafts",
        )
    if facts is not None:
        length, rate = facts.accept[-1] if facts.accept else (None, None)
        over = "last decode line: every request of one log interval (40 steps by default)"
        add(
            "accept length",
            length,
            "log",
            over,
            "tokens kept, bonus token included, ÷ verification steps",
        )
        add("accept rate", rate, "log", over, "kept drafts ÷ (steps × (draft tokens − 1))")
    if info is not None:
        add(
            "accept length",
            arguments_of(info, "avg_spec_accept_length")[1],
            "/server_info",
            "since the start or the last /flush_cache, whole log intervals only",
            "tokens kept, bonus token included, ÷ verification steps",
        )
    return out


def _n(value: int | None) -> str:
    return "unknown" if value is None else str(value)
