"""What is wanted as evidence for each switch, on or off, and what was found; no verdicts here.

Pure: /server_info, `LogFacts`, the plugin's status and a `Probe` in, `Evidence` out. A rule that
contradicts gives the cause and the remedy. Order matters: the first contradiction is the one told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkling.evidence import (
    AGAIN,
    NO_LOG,
    WITHOUT,
    Evidence,
    Findings,
    Info,
    LogFacts,
    Probe,
    arguments_of,
    count,
)
from sparkling.wanted_draft import nextn
from sparkling.wanted_head import fp8_head


def humming(
    on: bool, info: Info, facts: LogFacts | None, status: Info, probe: Probe | None
) -> list[Evidence]:
    """Evidence for the Humming MoE kernels."""
    f = Findings("humming")
    known, backend = arguments_of(info, "moe_runner_backend")
    want = f"moe_runner_backend {'=' if on else '≠'} humming"
    if known:
        cause = (
            f"the server runs its experts with {backend}, so --moe-runner-backend humming never "
            "reached it"
            if on
            else "the server was started with --moe-runner-backend humming"
        )
        f.add("arguments", want, f"{backend}", (backend == "humming") == on, cause, AGAIN)
    else:
        f.add("arguments", want, "the server does not report moe_runner_backend", None)

    want = (
        "experts prepared for Humming, layer by layer" if on else "no expert prepared for Humming"
    )
    mine = facts.prepared.get("humming", []) if facts else []
    others = {k: v for k, v in facts.prepared.items() if k != "humming"} if facts else {}
    if facts is None or not (facts.complete or mine or others):
        f.add("log", want, NO_LOG, None)
    elif on:
        _humming_layers(f, want, mine, others, facts)
    else:
        found = count(len(mine), "layer") + " prepared for Humming" if mine else _others(others)
        f.add("log", want, found, not mine, "the log shows Humming at work", WITHOUT)

    gemm = facts.humming_gemm if facts else None
    if on:
        found = f"{gemm} gemm" if gemm else "not seen"
        f.add("log", "a line `Using … gemm for humming moe`", found, True if gemm else None)
        if probe is None or probe.answered is None:
            f.add("probe", "an answer through these experts", "no probe", None)
        else:
            found = f"{probe.tokens} tokens" if probe.answered else probe.note or "no answer"
            cause = "the server did not answer the probe request"
            f.add(
                "probe",
                "an answer through these experts",
                found,
                probe.answered,
                cause,
                "read the end of the server's log",
            )
    elif gemm:
        f.add(
            "log",
            "no line `Using … gemm for humming moe`",
            f"{gemm} gemm",
            False,
            "the log shows Humming at work",
            WITHOUT,
        )
    _humming_kernels(f, on, status)
    return f.items


def _humming_kernels(f: Findings, on: bool, status: Info) -> None:
    """What was asked of Humming's compiler, which works only where its experts run."""
    told = status.get("humming") if status else None
    if not isinstance(told, Mapping):
        return
    compiled, cached = (told.get(key) or 0 for key in ("compiled", "cached"))
    found = f"{compiled} compiled in {told.get('compile_s') or 0:.1f} s, {cached} from the cache"
    if on:
        # None counted proves nothing: they are counted through a hook of their own.
        want = "kernels of Humming, compiled or from its cache"
        f.add("status", want, found, True if compiled + cached else None)
    elif compiled + cached:
        cause = "kernels of Humming were made"
        f.add("status", "no kernel asked of Humming", found, False, cause, WITHOUT)


def _others(others: Mapping[str, list[str]]) -> str:
    listed = ", ".join(f"{count(len(v), 'layer')} for {k}" for k, v in sorted(others.items()))
    return f"none; {listed}" if listed else "none"


def _humming_layers(f: Findings, want: str, mine: list[str], others, facts: LogFacts) -> None:
    """Every MoE layer on Humming, without a gap, and none on another backend."""
    if not mine:
        f.add(
            "log",
            want,
            _others(others),
            False,
            "no expert layer was prepared for Humming, so the backend fell back without an error",
            "check that humming-kernels is in the server environment and that the checkpoint's "
            "experts are MXFP4",
        )
        return
    numbers = sorted({int(part) for name in mine for part in name.split(".") if part.isdigit()})
    if facts.layers:  # a draft's layer has the number after the last
        numbers = [n for n in numbers if n < facts.layers]
    span = count(len(mine), "layer") + (f", {numbers[0]} to {numbers[-1]}" if numbers else "")
    last = facts.layers or (numbers[-1] + 1 if numbers else 0)
    gaps = sorted(set(range(numbers[0], last)) - set(numbers)) if numbers else []
    where = "look at the `Preparing …` lines of the log for the layers that differ"
    if others:
        f.add(
            "log",
            want,
            f"{span}; {_others(others)}",
            False,
            "some expert layers run on another backend",
            where,
        )
    elif gaps:
        missing = ", ".join(map(str, gaps[:6]))
        f.add(
            "log",
            want,
            f"{span}, without {missing}",
            False,
            f"layer {gaps[0]} was not prepared for Humming",
            where,
        )
    else:
        f.add("log", want, span, True)


def declared(switch: str, expect: Any, info: Info, have: list[Evidence]) -> list[Evidence]:
    """The arguments that a recipe's stage declares beside those the rule already looked at.

    expect: `recipe.Expect`. One evidence for each.
    """
    f = Findings(switch)
    seen = " ".join(e.wanted for e in have if e.source == "arguments")
    wants = {**expect.arguments, **dict.fromkeys(expect.arguments_unset)}
    for name, value in wants.items():
        known, found = arguments_of(info, name)
        if not known or (name in seen and value in (None, found)):
            continue
        want = f"{name} not set" if value is None else f"{name} = {value}"
        if (not found) if value is None else found == value:
            if name not in seen:
                f.add("arguments", want, f"{found}", True)
        else:
            f.add(
                "arguments",
                want,
                f"{found}",
                False,
                f"the server has {name} = {found}, and the recipe says {value}",
                AGAIN,
            )
    return f.items


RULES: dict[str, Callable[..., list[Evidence]]] = {
    "humming": humming,
    "fp8-head": fp8_head,
    "nextn": nextn,
}
"""Switch id -> its rule: (on, /server_info, LogFacts, status, Probe) -> Evidence list."""


_TALKATIVE = (
    {
        "moe_runner_backend": "",
        "speculative_algorithm": "",
        "enable_fp32_lm_head": True,
        "process_env": {},
    },
    LogFacts(complete=True, humming_gemm="any", draft_head=(True, ""), accept=[(1.0, None)]),
    {
        "head": {"dtype": "any"},
        "draft": {"class": "any", "head_shared": True},
        "humming": {"compiled": 1},
    },
    Probe(
        answered=True,
        tokens=1,
        rounds=1,
        applied=(0, 1),
        top=[{0: 0.0}],
        reference={"top": [{"0": 0.0}]},
    ),
)
"""A server that says something about everything, so that a rule leaves none of its questions out."""


def asked(switch: str, on: bool, expect: Any = None) -> list[Evidence]:
    """Every question that the rule of a switch and its recipe ask, once each and without answers."""
    have = RULES[switch](on, *_TALKATIVE)
    if expect is not None:
        other = dict.fromkeys([*expect.arguments, *expect.arguments_unset], "another value")
        have += declared(switch, expect, other, [])
    questions = dict.fromkeys((e.source, e.wanted) for e in have)
    return [Evidence(switch, source, wanted, "", None) for source, wanted in questions]
