"""What to expect of this machine for the user's own work: a reply, a day, an agent's loop.

Everything comes from requests that a run has measured one at a time, of the kind that is asked about;
never from the synthetic ones (a filler of a given length, text to copy), whose rates flatter or shame
an arm. Intervals are bootstraps over prompts at 95 %: they say how well the mean of such work is
known. How much one reply or one loop differs from the next is told apart from that, as percentiles.

    a reply        mean and percentiles of the time from sending to the end
    of N tokens    mean first token + (N - 1) × Σ decode seconds / Σ decode tokens
    a day          how many such replies fit into 24 h, one after the other; and the hours N replies take
    a loop         n calls one after the other: n × the mean; percentiles of 10,000 loops drawn from the
                   measured requests. The tools' own time and a context that grows are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkling import ladder
from sparkling.errors import UsageError
from sparkling.metrics import Summary, summary
from sparkling.report_rows import kind_of
from sparkling.show import View, note, table
from sparkling.stats import Interval, bootstrap, bootstrap_mean
from sparkling.workloads import Prompt, digest

SYNTHETIC = ("shape", "repeated-text")
CLASSES = {
    "short-turns": ("short-turn", "business", "thinking-off"),
    "long-answers": ("long-answer", "thinking-on", "code"),
    "agents": ("tools",),
    "questions": (),  # the evaluated ones
}
DAY_S = 86_400.0
LOOPS = 10_000

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Expected:
    """What one arm's measured requests let expect; times in seconds."""

    arm: str
    source: str  # which workloads, or which file
    requests: int
    reply: Interval
    replies: Summary
    first: Summary | None
    tokens: float | None  # mean tokens written
    longest: int | None  # most tokens written by a measured reply
    of_tokens: tuple[int, Interval] | None  # (N, time of a reply of N tokens)
    per_day: Interval  # replies that fit into a day
    day: tuple[int, Interval] | None  # (replies asked for, hours they take)
    loop: tuple[int, Interval, tuple[float, float]] | None  # (calls, mean, (P50, P90) of one loop)

    def to_json(self) -> dict[str, Any]:
        named: dict[str, Any] = {
            "arm": self.arm,
            "source": self.source,
            "requests": self.requests,
            "reply_s": self.reply.to_json(),
            "replies_s": self.replies.to_json(),
            "first_token_s": self.first.to_json() if self.first else None,
            "tokens_written": self.tokens,
            "longest_reply_tokens": self.longest,
            "replies_a_day": self.per_day.to_json(),
        }
        if self.of_tokens:
            named["reply_of_tokens"] = {
                "tokens": self.of_tokens[0],
                "seconds": self.of_tokens[1].to_json(),
            }
        if self.day:
            named["day"] = {"replies": self.day[0], "hours": self.day[1].to_json()}
        if self.loop:
            calls, mean, (p50, p90) = self.loop
            named["loop"] = {"calls": calls, "seconds": mean.to_json(), "p50_s": p50, "p90_s": p90}
        return named


def chosen(
    bench: Rows,
    questions: Rows,
    kind: str | None,
    prompts: Sequence[Prompt] | None = None,
) -> tuple[str, list[Mapping[str, Any]]]:
    """(what they are, the rows) of a class of work, or of the user's own prompts.

    kind: one of CLASSES. prompts: the user's instead, found by the hash of what was sent. UsageError
    when the run has measured nothing of that kind, saying what it has.
    """
    there = list(dict.fromkeys(r["workload"] for r in bench))
    base = {w: w.partition("/")[0] for w in there}
    if prompts is not None:
        return _own(bench, prompts)
    if kind not in CLASSES:
        raise UsageError(f"There is no class {kind!r}; there are {', '.join(CLASSES)}.")
    if kind == "questions":
        most = max((r.get("concurrency") or 1 for r in questions), default=1)
        if most > 1:
            raise UsageError(
                f"These questions were asked {most} at once, so their times are not those of one reply; "
                "evaluate with --concurrency 1."
            )
        if questions:
            return "evaluated questions", list(questions)
        raise UsageError("This run has evaluated no questions; `sparkling eval` does.")
    real = [w for w in there if base[w] not in SYNTHETIC]
    if not real and not questions:
        raise UsageError(
            f"This run has only synthetic workloads ({', '.join(there) or 'none at all'}), and what "
            "they show says nothing about your work; measure a real one: sparkling bench --workload "
            f"{(CLASSES[kind] or ('short-turn',))[0]}, or your own prompts with --prompts."
        )
    names = [w for w in real if base[w] in CLASSES[kind]]
    if not names and kind == "agents":  # calls of an agent are short turns at the least
        names = [w for w in real if base[w] in CLASSES["short-turns"]]
    if not names:
        raise UsageError(
            f"This run has nothing of the class {kind} ({', '.join(CLASSES[kind])}); it has "
            f"{', '.join(real) or 'evaluated questions only'}."
        )
    return ", ".join(names), [r for r in bench if r["workload"] in names]


def _own(bench: Rows, prompts: Sequence[Prompt]) -> tuple[str, list[Mapping[str, Any]]]:
    texts = {p.id: p.render() for p in prompts}
    rows = [
        r
        for r in bench
        if r["prompt"] in texts and r["case_hash"] == digest([texts[r["prompt"]], r["settings"]])
    ]
    missing = len(texts.keys() - {r["prompt"] for r in rows})
    if missing:
        raise UsageError(
            f"{missing} of these {len(texts)} prompts {'was' if missing == 1 else 'were'} not measured in "
            "this run as they stand in the file; measure them first: sparkling bench --prompts FILE."
        )
    return "your own prompts", rows


def expect(
    rows: Iterable[Mapping[str, Any]],
    source: str,
    *,
    calls: int | None = None,
    per_day: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> list[Expected]:
    """What to expect of every arm, in the order of the rows. Rows of `bench` or of an evaluation.

    Raises UsageError for numbers below 1, and when no request ended completely.
    """
    for name, value in (("calls", calls), ("replies a day", per_day), ("tokens", tokens)):
        if value is not None and value < 1:
            raise UsageError(f"{name[0].upper()}{name[1:]} must be 1 or more, not {value}.")
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("complete", row.get("status") != "error") and row.get("e2e_s"):
            arms.setdefault(str(row["arm"]), []).append(row)
    if not arms:
        raise UsageError("No request of this kind ended completely, so nothing can be expected.")
    return [_of(arm, source, group, calls, per_day, tokens, seed) for arm, group in arms.items()]


def _of(
    arm: str,
    source: str,
    rows: list[Mapping[str, Any]],
    calls: int | None,
    per_day: int | None,
    tokens: int | None,
    seed: int,
) -> Expected:
    units: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        units.setdefault((row.get("workload"), row.get("prompt", row.get("id"))), []).append(row)
    means = np.array([np.mean([r["e2e_s"] for r in group]) for group in units.values()])
    reply = bootstrap_mean(means.tolist(), seed=seed)
    wrote = [r["completion_tokens"] for r in rows if r.get("completion_tokens")]
    n = len(means)
    loop = None
    if calls is not None:
        mean = _scaled(reply, float(calls))
        # Every prompt is drawn as often as any other, with the mean of its repeats.
        rng = np.random.default_rng(seed)
        if calls <= n:
            draws = means[rng.integers(0, n, (LOOPS, calls))].sum(axis=1)
        else:  # the same distribution, in memory that does not grow with the calls
            draws = rng.multinomial(calls, np.full(n, 1 / n), LOOPS) @ means
        p50, p90 = np.percentile(draws, [50, 90])
        loop = (calls, mean, (float(p50), float(p90)))
    day = None if per_day is None else (per_day, _scaled(reply, per_day / 3600))
    return Expected(
        arm=arm,
        source=source,
        requests=len(rows),
        reply=reply,
        replies=_known(summary(r["e2e_s"] for r in rows)),
        first=summary(r.get("ttft_s") for r in rows),
        tokens=float(np.mean(wrote)) if wrote else None,
        longest=max(wrote, default=None),
        of_tokens=None if tokens is None else (tokens, _of_tokens(units.values(), tokens, seed)),
        per_day=_inverse(reply, DAY_S),
        day=day,
        loop=loop,
    )


def _known(found: Summary | None) -> Summary:
    assert found is not None
    return found


def _scaled(i: Interval, by: float) -> Interval:
    low, high = (None if x is None else x * by for x in (i.low, i.high))
    return Interval(i.value * by, low, high, i.n, i.method, i.level)


def _inverse(i: Interval, top: float) -> Interval:
    """top / i; the ends change places."""
    low, high = (None if not x else top / x for x in (i.high, i.low))
    return Interval(top / i.value, low, high, i.n, i.method, i.level)


def _of_tokens(groups: Iterable[Rows], tokens: int, seed: int) -> Interval:
    first, seconds, counted = [], [], []
    for group in groups:
        rated = [(r, _stretch(r)) for r in group if r.get("ttft_s") is not None]
        rated = [(r, s) for r, s in rated if s is not None]
        if rated:
            first.append(np.mean([r["ttft_s"] for r, _ in rated]))
            counted.append(np.mean([s[0] for _, s in rated]))
            seconds.append(np.mean([s[1] for _, s in rated]))
    if not first:
        raise UsageError("No request has a decode rate, so a reply of so many tokens has no time.")
    f, s, t = (np.asarray(x, dtype=float) for x in (first, seconds, counted))
    return bootstrap(
        lambda w: (w @ f) / w.sum(axis=-1) + (tokens - 1) * (w @ s) / (w @ t), len(f), seed=seed
    )


def _stretch(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """(tokens, seconds) of a row's decode stretch."""
    if row.get("decode_s"):
        return row["decode_tokens"], row["decode_s"]
    rate, wrote = row.get("decode_rate"), row.get("completion_tokens")
    return (wrote, wrote / rate) if rate and wrote else None


def unsteady(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """One sentence when the machine was not steady while these requests of `bench` were measured."""
    measured = [r for r in rows if kind_of(r) == "bench"]
    spreads = [a.spread for a in ladder.summarise(measured)]
    return (ladder.unsteady(spreads) or "").partition(";")[0] or None


# -- to look at ----------------------------------------------------------------------------------


def view(found: Sequence[Expected], where: str = "") -> View:
    """One table, an arm a column, definitions and what is not in it below."""
    cells: dict[str, dict[str, str | None]] = {}
    for e in found:
        for name, value in _cells(e).items():
            cells.setdefault(name, {"": name})[e.arm] = value
    caption = (
        f"From {found[0].source}, measured one request at a time{' on ' + where if where and '?' not in where else ''}. A reply: "
        "mean from sending to its end, 95 % bootstrap interval over n prompts. A day: 24 h of replies one "
        "after the other."
    )
    if found[0].loop:
        caption += (
            " A loop: calls one after the other; P50 and P90 over 10,000 loops drawn from the prompts. The "
            "tools' own time, and a context that grows with every call, are not in it."
        )
    made = table(list(cells.values()), title="What to expect", caption=caption)
    beyond = [e for e in found if e.of_tokens and e.of_tokens[0] > (e.longest or 0)]
    if beyond:
        made += note(
            f"No reply as long as {beyond[0].of_tokens[0]} tokens was measured (the longest has "  # type: ignore[index]
            f"{max(e.longest or 0 for e in beyond)}): its time is an extrapolation."
        )
    few = [e.arm for e in found if e.reply.low is None]
    if few:
        made += note(f"Fewer than four prompts ({', '.join(few)}): no interval can be given.")
    return made


def _cells(e: Expected) -> dict[str, str | None]:
    out: dict[str, str | None] = {
        "a reply": e.reply.text(2, "s"),
        "replies, P50 and P90": f"{e.replies.p50:.2f} and {e.replies.p90:.2f} s (n={e.replies.n})",
        "first token, P50": f"{e.first.p50:.2f} s (n={e.first.n})" if e.first else None,
        "tokens written, mean": f"{e.tokens:.0f}" if e.tokens is not None else None,
    }
    if e.of_tokens:
        out[f"a reply of {e.of_tokens[0]} tokens"] = e.of_tokens[1].text(2, "s")
    if e.loop:
        calls, mean, (p50, p90) = e.loop
        out[f"a loop of {calls} calls"] = mean.text(1, "s")
        out["one loop, P50 and P90"] = f"{p50:.1f} and {p90:.1f} s"
    out["replies that fit into a day"] = e.per_day.text(0)
    if e.day:
        out[f"{e.day[0]} replies take"] = e.day[1].text(2, "h")
    return out
