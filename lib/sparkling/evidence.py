"""Evidence: its types, and how the three places where it is found are read.

Three places are independent of each other: the arguments and environment as the running server
has them, what the server wrote while it loaded and worked (its log and our plugin's status file),
and a probe request. A key that is missing means unknown, never 0, 1.00 or off.

What each switch asks for is in `wanted`, the verdicts are in `proof`. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkling import log as _log

Info = Mapping[str, Any] | None
"""A /server_info answer, or the plugin's status file."""

PLACES = {"arguments": "arguments", "log": "log", "status": "log", "probe": "probe"}
"""Evidence source -> independent place. The log and the status file come from one process."""


@dataclass(frozen=True)
class Evidence:
    """One thing looked for. `ok`: True confirms, False contradicts, None says nothing either way."""

    switch: str
    source: str  # "arguments" | "log" | "status" | "probe"
    wanted: str
    found: str
    ok: bool | None
    cause: str | None = None
    remedy: str | None = None

    @property
    def place(self) -> str:
        """The independent place this came from: "arguments", "log" or "probe"."""
        return PLACES[self.source]


@dataclass(frozen=True)
class Reading:
    """One number that several sources report differently, with what makes it differ."""

    name: str
    value: float | None
    source: str
    window: str
    definition: str
    remark: str = ""

    @property
    def text(self) -> str:
        """The value with two decimals, or "unknown"."""
        return "unknown" if self.value is None else f"{self.value:.2f}"


@dataclass(frozen=True)
class Probe:
    """What one probe request showed. Every field may be unknown (None).

    tokens / rounds / correct: completion tokens, verification rounds and kept drafts of this
    request. reported_length / reported_rate: what the reply itself calls its accept length and
    rate. applied: (before, after) of the plugin's counter of FP8 head products. top: per position
    {token id: log-probability} of the most likely tokens; reference: the same from the stored
    probe of the stage without the FP8 head.
    """

    answered: bool | None = None
    tokens: int | None = None
    rounds: int | None = None
    correct: int | None = None
    proposed: int | None = None
    reported_length: float | None = None
    reported_rate: float | None = None
    applied: tuple[int | None, int | None] = (None, None)
    top: Sequence[Mapping[int, float]] | None = None
    output_ids: Sequence[int] | None = None
    reference: Mapping[str, Any] | None = None
    note: str = ""

    @property
    def accept_length(self) -> float | None:
        """Tokens kept per round, bonus token included: 1 + kept drafts / rounds.

        SGLang's own figure is completion tokens / rounds; it counts the first token, which prefill
        made, and so reads 1.0039 where not a single draft was kept (256 tokens, 255 rounds).
        Where kept drafts are not reported, (tokens - 1) / rounds; unknown without rounds.
        """
        if not self.rounds:
            return None
        if self.correct is not None:
            return 1.0 + self.correct / self.rounds
        if self.tokens is None:
            return None
        return (self.tokens - 1) / self.rounds


@dataclass
class LogFacts:
    """What the log of this start says, reduced to what the switches ask for."""

    complete: bool = False  # the target's weights were loaded: absence now means something
    layers: int | None = None
    prepared: dict[str, list[str]] = field(default_factory=dict)  # backend -> layer names
    humming_gemm: str | None = None
    classes: list[str] = field(default_factory=list)
    head_lines: int = 0
    draft_head: tuple[bool, str] | None = None  # (shared, what the plugin said of it)
    accept: list[tuple[float, float | None]] = field(default_factory=list)  # (length, rate)


def read_log(events: Iterable[Any] | None) -> LogFacts | None:
    """Reduce typed log events to facts; None in, None out (no log could be read)."""
    if events is None:
        return None
    facts = LogFacts()
    for event in events:
        if isinstance(event, _log.BackendPrepared):
            facts.prepared.setdefault(event.backend.lower(), []).append(event.layer)
        elif isinstance(event, _log.WeightsLoaded):
            facts.classes.append(event.model_class)
            facts.complete = True
        elif isinstance(event, _log.HeadQuantized):
            facts.head_lines += 1
        elif isinstance(event, _log.DraftHead):
            facts.draft_head = (event.shared, event.detail)
        elif isinstance(event, _log.DecodeBatch):
            if event.accept_len is not None:
                facts.accept.append((event.accept_len, event.accept_rate))
        elif isinstance(event, _log.LayerMap):
            facts.layers = len(event.layers)
        elif isinstance(event, _log.MoeGemm):
            facts.humming_gemm = event.kind
    return facts


def arguments_of(info: Mapping[str, Any] | None, key: str) -> tuple[bool, Any]:
    """(known, value) of a resolved argument in a /server_info answer.

    The scheduler's own view (internal_states) wins where it has the key, because it reflects
    values changed after the start.
    """
    if not info:
        return False, None
    for state in info.get("internal_states") or ():
        if isinstance(state, Mapping) and key in state:
            return True, state[key]
    return (True, info[key]) if key in info else (False, None)


def environment_of(info: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Environment variables of the server: /server_info's `env_vars` (SGLang's own variables,
    with SGLANG_EXPOSE_OWN_ENV_VARS=1) and `process_env` (read by `proof.prove` from the process).
    None when neither is there.
    """
    if not info:
        return None
    found: dict[str, str] = {}
    known = False
    for state in info.get("internal_states") or ():
        if isinstance(state, Mapping) and isinstance(state.get("env_vars"), Mapping):
            known = True
            found.update(state["env_vars"])
    if isinstance(info.get("process_env"), Mapping):
        known = True
        found.update(info["process_env"])
    return found if known else None


AGAIN = "start the stage again from its recipe (sparkling render shows the command)"
READ_LOG = "read the plugin's lines in the server's log"
WITHOUT = "start the stage again without it"
NO_LOG = "no log of a finished load"


class Findings:
    """The evidence for one switch as it is collected."""

    def __init__(self, switch: str) -> None:
        self.switch = switch
        self.items: list[Evidence] = []

    def add(
        self,
        source: str,
        wanted: str,
        found: str,
        ok: bool | None,
        cause: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Note one thing; cause and remedy are kept only where it contradicts."""
        told = (cause, remedy) if ok is False else (None, None)
        self.items.append(Evidence(self.switch, source, wanted, found, ok, *told))
