"""What a server's log says, by itself: the log of any SGLang server, running, ended or crashed.

Facts are of the log's last start; a log that several servers wrote into says how many there were. A
log proves nothing that it does not say: `prove` asks the server, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from sparkling import log, show
from sparkling.crash import Diagnosis, diagnose
from sparkling.errors import UsageError
from sparkling.redact import mask_text

ARGUMENTS = (
    "model_path",
    "device",
    "load_format",
    "moe_runner_backend",
    "attention_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "enable_fp32_lm_head",
    "mem_fraction_static",
    "context_length",
    "max_running_requests",
)
_Event = TypeVar("_Event", bound=log.Event)


@dataclass(frozen=True)
class Reading:
    """A log read: facts as (what, found), how many starts it holds, and why the last one failed."""

    facts: tuple[tuple[str, str], ...]
    starts: int
    diagnosis: Diagnosis | None

    def view(self) -> show.View:
        """The facts as a table, then the cause of a failure."""
        many = f"It holds {self.starts} starts; this is the last. " if self.starts > 1 else ""
        shown = show.table(
            self.facts,
            ["what", "the log says"],
            caption=many
            + "What a log does not say is not shown; `sparkling prove` asks the server.",
        )
        if self.diagnosis is None:
            return shown + show.note("The log shows no failure that is known.")
        cause = f"{self.diagnosis}."
        shown += show.note(cause, strong=True)
        line = self.diagnosis.line
        return shown + show.note(f"Its line: {line}") if line else shown

    def to_json(self) -> dict[str, Any]:
        one = self.diagnosis
        return {
            "starts": self.starts,
            "facts": dict(self.facts),
            "failure": one
            and {"kind": one.kind, "cause": one.cause, "remedy": one.remedy, "line": one.line},
        }


def read(text: str) -> Reading:
    """Read a log's text. UsageError when no line of it is SGLang's."""
    lines = log.split_lines(text)
    begins = [
        n
        for n, one in enumerate(lines)
        if "server_args=" in one and isinstance(log.parse_line(one), log.ServerArgs)
    ]
    mine = lines[begins[-1] :] if begins else lines
    events = list(log.parse(mine))
    found = diagnose(mine)
    if not events and found is None:
        raise UsageError("No line of it is known as one of an SGLang server.")
    facts = tuple(
        (what, mask_text(said)) for what, said in _facts(events, lines if len(begins) < 2 else mine)
    )
    return Reading(facts, max(1, len(begins)), found and _masked(found))


def _masked(one: Diagnosis) -> Diagnosis:
    """Without secrets, and with the line cut short: it may repeat a command's arguments."""
    line = mask_text(one.line.strip())[:300]
    return Diagnosis(one.kind, mask_text(one.cause), mask_text(one.remedy), line)


def _facts(events: Sequence[log.Event], lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    """What to tell. The trap's banner stands in `lines`: before a start's arguments (where a log that
    holds one start has no other's) and again when the model was loaded."""
    if any("SPARKLING_TRAP" in one and "BROKEN ON PURPOSE" in one for one in lines):
        yield "trap", "SPARKLING_TRAP is set: this server is broken on purpose"
    if given := _last(events, log.ServerArgs):
        args = given.args
        asked = [
            f"{name} {args[name]}" for name in ARGUMENTS if args.get(name) not in (None, "", False)
        ]
        yield "arguments", ", ".join(asked)
    for one in _all(events, log.PluginLoaded):
        yield "plugin", f"{one.name} {'loaded' if one.ok else 'NOT loaded'}"
    if layers := _last(events, log.LayerMap):
        yield "layers", f"{layers.linear} with linear attention, {layers.softmax} with MLA"
    prepared = Counter(one.backend for one in _all(events, log.BackendPrepared))
    if prepared:
        yield "routed experts", ", ".join(f"{n} layers for {b}" for b, n in prepared.items())
    for loaded in _all(events, log.WeightsLoaded):
        size = "" if loaded.used_gb is None else f", {loaded.used_gb:.2f} GB (2^30)"
        yield "weights", f"{loaded.model_class} in {loaded.seconds:.1f} s{size}"
    for head in _all(events, log.HeadQuantized):
        yield "LM head", head.detail
    for draft in _all(events, log.DraftHead):
        yield "draft's head", f"the target's ({draft.detail})" if draft.shared else draft.detail
    if held := _last(events, log.Limits):
        yield (
            "holds",
            f"{held.max_total_tokens:,} tokens; requests at once: {held.max_running:,}; tokens of "
            f"context: {held.context:,}",
        )
    if times := _last(events, log.StartupTimings):
        yield "start-up", ", ".join(f"{name} {s:.1f} s" for name, s in times.seconds.items())
    yield "state", _state(events)
    yield from _work(events)


def _state(events: Sequence[log.Event]) -> str:
    """How far the start came, or how the server ended."""
    dead = _last(events, log.ChildDied)
    if dead is not None:
        return f"{dead.name} (pid {dead.pid}) ended with {dead.code}"
    if any(isinstance(one, log.Stopping) for one in events):
        return "stopped"
    if any(isinstance(one, log.Ready) for one in events):
        return "ready: its warm-up request was answered"
    if any(isinstance(one, log.HttpUp) for one in events):
        return "HTTP is up, nothing was generated yet"
    return "did not come as far as HTTP"


def _work(events: Sequence[log.Event]) -> Iterable[tuple[str, str]]:
    answers = Counter(one.status for one in _all(events, log.HttpRequest))
    if answers:
        yield "HTTP answers", ", ".join(f"{n:,} with {s}" for s, n in sorted(answers.items()))
    compiled = _all(events, log.KernelCompiled)
    if compiled:
        total = sum(one.seconds for one in compiled)
        yield "compiled while serving", f"{len(compiled)} kernels, {total:.1f} s"
    batches = _all(events, log.DecodeBatch)
    rates = [one.gen_tok_s for one in batches if one.gen_tok_s is not None]
    if rates:
        yield "generated tokens/s, idle time included", _spread(rates)
    lengths = [one.accept_len for one in batches if one.accept_len is not None]
    if lengths:
        yield "accept length of a report", _spread(lengths)


def _spread(values: Sequence[float]) -> str:
    return (
        f"median {median(values):.2f} [{min(values):.2f}, {max(values):.2f}] of {len(values)} "
        "decode reports"
    )


def _all(events: Iterable[log.Event], kind: type[_Event]) -> list[_Event]:
    return [one for one in events if isinstance(one, kind)]


def _last(events: Iterable[log.Event], kind: type[_Event]) -> _Event | None:
    found = _all(events, kind)
    return found[-1] if found else None
