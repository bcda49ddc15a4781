"""Tables of what `ablation`, `acceptance`, `power` and `concurrency` found, definitions below each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparkling.ablation import Ablation
from sparkling.acceptance import Acceptance
from sparkling.ladder import GAIN_DEFINITION, RATE_DEFINITION
from sparkling.metrics import shown
from sparkling.power import NO_SENSOR, ArmEnergy, Machine
from sparkling.show import View, note, rows_of, table


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def arms(found: Any, by_round: Mapping[str, Sequence[float]] | None = None) -> View:
    """The arms of a `ladder.Ladder`: rates, times and gains over the baseline; `by_round` as
    `ablation.gains_by_round` gives it."""
    rows = []
    for rung in found:
        arm = rung.summary
        rows.append(
            {
                "arm": arm.arm,
                "tokens/s": arm.decode_rate.text(1) if arm.decode_rate else None,
                "gain": _bare(rung.gain) if rung.gain else "1 (baseline)",
                **({"by round": _values(by_round.get(arm.arm, ()))} if by_round else {}),
                "token": shown(arm.tpot_s.p50 * 1e3, 2, "ms") if arm.tpot_s else None,
                "first token": shown(arm.ttft_s.p50, 3, "s") if arm.ttft_s else None,
                "whole reply": shown(arm.e2e_s.p50, 2, "s") if arm.e2e_s else None,
                "accept length": _bare(arm.accept_length) if arm.accept_length else None,
                "rows": rows_of(arm),
            }
        )
    text = f"{_first_upper(RATE_DEFINITION)}. n = prompts. {_first_upper(GAIN_DEFINITION)}. "
    if by_round:
        text += "By round: the gain from the starts of each round alone. "
    text += "Token, first token and whole reply are medians over the rows."
    return table(rows, title=f"Arms, {found.workload}", caption=_warned(found.warning, text))


def ablation(found: Ablation) -> View:
    """The arms, then main effects and interactions."""
    rows = [
        {
            "switches": e.name,
            "effect": "main" if len(e.switches) == 1 else "interaction",
            "factor": e.ratio.text(3),
            "by round": ", ".join(f"{v:.3f}" for v in e.by_round),
            "clear": e.clear,
        }
        for e in found.effects
    ]
    pace = ", ".join(f"{p:.3f}" for p in found.pace)
    caption = (
        f"{_first_upper(found.definition)}. Clear: the interval excludes 1, every round lies on the same "
        f"side, and the machine was steady. All arms' pace by round, relative to the first: {pace}."
    )
    warned = _warned(found.ladder.warning, caption)
    return arms(found.ladder) + table(rows, title="Effects on the decode rate", caption=warned)


def acceptance(found: Iterable[Acceptance]) -> View:
    """Accept length by workload, its histogram, and where in the answer it falls."""
    rows, places = [], []
    for a in found:
        total = sum(a.histogram or ())
        shares = [f"{i}: {100 * n / total:.0f} %" for i, n in enumerate(a.histogram or ())]
        verdict = {True: "falls", False: "rises", None: "not clear"}[a.falls]
        rows.append(
            {
                "arm": a.arm,
                "workload": a.workload,
                "accept length": a.length.text(2) if a.length else "unknown",
                "rounds": a.rounds,
                "drafts kept": ", ".join(shares) or "unknown",
                "later / earlier half": f"{_bare(a.later)}, {verdict}" if a.later else "unknown",
                "placed": f"{a.placed} of {a.requests}",
                "source": a.source,
            }
        )
        places += [
            {
                "arm": a.arm,
                "workload": a.workload,
                "tokens of the answer": f"{s.start} to {s.end - 1}",
                "accept length": s.length.text(2),
                "rounds": s.rounds,
            }
            for s in a.by_place
        ]
    if not rows:
        return note("No arm speculated, so there is no accept length.")
    caption = (
        "Accept length = Σ tokens kept / Σ rounds, bonus token included; n = prompts. Drafts kept: "
        "share of rounds. Later / earlier half: of the tokens of each answer, 95 % paired bootstrap "
        "interval over prompts. Placed: requests whose every chunk was one round, which alone tell "
        "where in the answer a round was."
    )
    view = table(rows, title="Accepted drafts", caption=caption)
    return view + table(places, title="By place in the answer") if places else view


def energy(found: Sequence[ArmEnergy], machine: Machine, missing: Sequence[str] = ()) -> View:
    """Joules per token by arm and source, then memory, temperature, clocks and throttling."""
    gib = 2**30
    state = {
        "available memory": None
        if machine.least_available is None
        else f"{machine.least_available / gib:.2f} to {machine.most_available / gib:.2f} GiB",  # type: ignore[operator]
        "hottest": _pairs({k: f"{v:.0f} °C" for k, v in machine.hottest.items()}),
        "clocks": _pairs({k: f"{a:.0f} to {b:.0f} MHz" for k, (a, b) in machine.clocks.items()}),
        "throttled": _pairs(
            {k: f"{v} of {machine.samples} samples" for k, v in machine.throttled.items()}
        ),
        "samples": f"{machine.samples} over {machine.seconds:.0f} s",
    }
    below = table([state], title="The machine over the run")
    if not found:
        why = f" ({'; '.join(missing)})" if missing else ""
        return note(f"Power: {NO_SENSOR}{why}, so there are no joules per token.") + below
    rows = [
        {
            "arm": e.arm,
            "source": e.source,
            "J/token": e.per_token.text(3),
            "net of idle": e.net_per_token,
            "W while answering": shown(e.watts, 1),
            "W idle": shown(e.idle_watts, 1),
            "requests": f"{e.rows}" + (f", {e.uncovered} not covered" if e.uncovered else ""),
        }
        for e in found
    ]
    caption = (
        "J/token = Σ joules of the requests / Σ their tokens, prefill included; 95 % bootstrap interval "
        "over prompts. Idle: the arm's server loaded, nobody asking. Sources overlap and are not added."
    )
    return table(rows, title="Energy", caption=caption) + below


def concurrency(levels: Sequence[Any], pays: Any | None = None) -> View:
    """Every arm at every number of users, and where speculation stops paying."""
    rows = [
        {
            "arm": x.arm,
            "users": f"{x.users}" + (" (queued)" if x.queued else ""),
            "tokens/s, all": x.throughput,
            "by round": ", ".join(f"{v:.0f}" for v in x.by_round),
            "tokens/s, each": _bare(x.per_user, 1) if x.per_user else None,
            "first token p50": shown(x.ttft_s.p50, 3, "s") if x.ttft_s else None,
            "p95": shown(x.ttft_s.p95, 3, "s") if x.ttft_s else None,
            "accept length": _bare(x.accept_length) if x.accept_length else None,
            "requests": f"{x.requests}" + (f", {x.failed} failed" if x.failed else ""),
        }
        for x in levels
    ]
    limits = sorted({x.limit for x in levels if x.limit is not None})
    said = f"The server runs {', '.join(map(str, limits))} at once. " if limits else ""
    caption = (
        f"{said}All: tokens that arrived while all users were busy / that time. Each: Σ tokens after the "
        "first chunk / Σ seconds, 95 % bootstrap interval over prompts. First token: the queue included; "
        "n = requests."
    )
    view = table(rows, title="Users at once", caption=caption)
    if pays is None:
        return view
    gains = [{"users": u, "gain": _bare(g), "prompts": g.n} for u, g in pays.gains]
    text = (
        f"Gain = (Σ tokens / Σ end-to-end seconds) of {pays.spec} / the same of {pays.plain}; 95 % paired "
        "bootstrap interval over prompts."
    )
    return view + table(gains, title="What speculation gains", caption=text) + note(pays.text)


def _bare(interval: Any, digits: int = 2) -> str:
    """An interval without its n, where the table has it already."""
    return interval.text(digits).split(" (n=")[0]


def _values(values: Iterable[float]) -> str:
    return ", ".join(f"{v:.2f}" for v in values)


def _pairs(values: dict[str, str]) -> str | None:
    return ", ".join(f"{k} {v}" for k, v in values.items()) or None


def _warned(warning: str | None, caption: str) -> str:
    return f"{warning} {caption}" if warning else caption


__all__ = ["ablation", "acceptance", "arms", "concurrency", "energy"]
