"""What the numbers mean. One definition each, taken from a Reply (or from a row of `bench`).

n is the server's count of completion tokens (`usage`), never a count of chunks: under speculation
one chunk carries several tokens. t_first and t_last are the arrivals of the first and the last
chunk that brought tokens; thinking counts. A number that cannot be known is None, shown as n/a:
never 0, never infinite. Replies that are not complete have no rates.

    ttft_s       t_first - start
    decode_rate  (n - k) / (t_last - t_first) tokens/s, k = tokens in the first chunk
    tpot_s       1 / decode_rate
    e2e_s        finish - start;  e2e_rate = n / e2e_s, prefill included
    chunk_gap_s  the times between chunks: per chunk, not per token
    peak_rate    the most tokens in any window of one second, never below decode_rate
    accept_length  Σ tokens kept / Σ rounds over requests, bonus token included, prefill's token not
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sparkling.reply import Reply, SpecCounts
from sparkling.stats import Interval, bootstrap_ratio_of_sums

NA = "n/a"


@dataclass(frozen=True)
class Decode:
    """The measured stretch of one reply: `tokens` arrived in `seconds`, between the first and the
    last chunk that say how many tokens there were so far. `method` is "counted" (they say so, hence
    k and the count at t_last are exact) or "k=1" (no such counts: one token is taken for the first chunk,
    and n at the last, which is too high by (k-1)/(n-k) if the first chunk held k)."""

    tokens: int
    seconds: float
    method: str

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def decode(reply: Reply) -> Decode | None:
    """The decode stretch, or None: one chunk, no usage, not streamed, or not complete."""
    times, n = reply.chunk_times_s, reply.completion_tokens
    if not reply.complete or n is None or len(times) < 2 or times[-1] <= times[0]:
        return None
    counted = [(t, c) for t, c in zip(times, reply.chunk_tokens, strict=True) if c is not None]
    if counted:
        (t0, first), (t1, last) = counted[0], counted[-1]
        return Decode(last - first, t1 - t0, "counted") if last > first and t1 > t0 else None
    return Decode(n - 1, times[-1] - times[0], "k=1") if n > 1 else None


def ttft_s(reply: Reply) -> float | None:
    """Seconds from sending the request to the first chunk with text. Includes opening the
    connection (0.1 to 0.3 ms on loopback) and, on a busy server, the queue."""
    return reply.ttft_s


def decode_rate(reply: Reply) -> float | None:
    """Tokens/s after the first chunk; see `Decode` for what is counted."""
    stretch = decode(reply)
    return stretch.rate if stretch else None


def tpot_s(reply: Reply) -> float | None:
    """Seconds per output token after the first chunk, 1 / decode_rate (with k = 1 the classic
    (t_last - t_first) / (n - 1))."""
    stretch = decode(reply)
    return stretch.seconds / stretch.tokens if stretch else None


def e2e_rate(reply: Reply) -> float | None:
    """Tokens/s over the whole request, prefill and queue included."""
    if not reply.complete or not reply.completion_tokens or not reply.e2e_s:
        return None
    return reply.completion_tokens / reply.e2e_s


def chunk_gap_s(reply: Reply) -> list[float]:
    """Times between consecutive chunks with tokens. A gap is a verification round under
    speculation and a step otherwise; it is not the latency between tokens."""
    times = reply.chunk_times_s
    return [b - a for a, b in pairwise(times)]


def peak_rate(reply: Reply, window_s: float = 1.0) -> float | None:
    """Tokens/s of the fullest window that begins with a chunk. Where chunks are not counted their
    tokens are taken to be equal. At least decode_rate: a reply shorter than the window is its own
    window."""
    stretch = decode(reply)
    if stretch is None:
        return None
    times = np.asarray(reply.chunk_times_s)
    counts = reply.chunk_tokens
    if all(c is not None for c in counts):
        arrived = np.asarray(counts, dtype=float)
    else:
        arrived = np.linspace(0.0, stretch.tokens, len(times))
    ends = np.searchsorted(times, times + window_s, side="right") - 1
    inside = times + window_s <= times[-1]
    full = (arrived[ends] - arrived)[inside] / window_s
    return float(max([stretch.rate, *full]))


# -- acceptance ----------------------------------------------------------------------------------


def _spec(item: Any) -> SpecCounts | None:
    if isinstance(item, SpecCounts):
        return item
    if isinstance(item, Mapping):
        return SpecCounts.from_json(item.get("spec"))
    return getattr(item, "spec", None)


def accept_length(items: Iterable[Any]) -> float | None:
    """Σ tokens / Σ rounds over replies, rows or SpecCounts. None when none of them has rounds:
    unknown is not 1.0. Never an average of averages, which would weigh short replies too much."""
    counts = [c for c in map(_spec, items) if c is not None]
    rounds = sum(c.rounds for c in counts)
    return sum(c.tokens for c in counts) / rounds if rounds else None


def accept_interval(items: Iterable[Any], *, seed: int = 0) -> Interval | None:
    """`accept_length` with a bootstrap interval. The units are requests; rows of `bench` that
    repeat one prompt are one unit, since a greedy repeat says nothing new."""
    units: dict[Any, list[int]] = {}
    for i, item in enumerate(items):
        counts = _spec(item)
        if counts is None or not counts.rounds:
            continue
        key = (item.get("workload"), item.get("prompt")) if isinstance(item, Mapping) else i
        unit = units.setdefault(key, [0, 0])
        unit[0] += counts.tokens
        unit[1] += counts.rounds
    if not units:
        return None
    tokens, rounds = zip(*units.values(), strict=True)
    return bootstrap_ratio_of_sums(tokens, rounds, seed=seed)


@dataclass(frozen=True)
class AcceptReading:
    """One place's figure for the accept length. `value` None: the place does not say."""

    source: str  # "log", "reply", "server_info", "metrics", …
    value: float | None
    definition: str
    window: str
    rounds: int | None = None


@dataclass(frozen=True)
class AcceptVerdict:
    """`state`: "speculating", "draft contributes nothing", "sources disagree" or "unknown"."""

    state: str
    value: float | None
    source: str | None
    text: str
    readings: tuple[AcceptReading, ...]


NOTHING_ROUNDS = 20  # fewer rounds at 1.00 may be bad luck
TOLERANCE = 0.15  # relative; windows and prefill's token make honest sources differ by a few %


def accept_verdict(readings: Sequence[AcceptReading]) -> AcceptVerdict:
    """Judge several sources together.

    A missing figure is unknown and decides nothing. A figure below 1 is no accept length (each
    round keeps its bonus token), so SGLang's 0 for "not counted yet" is unknown as well. The figure
    with the most rounds behind it leads; one that differs by more than TOLERANCE is named.
    """
    known = [r for r in readings if r.value is not None and r.value >= 1.0]
    if not known:
        return AcceptVerdict(
            "unknown", None, None, "no source gives an accept length", tuple(readings)
        )
    lead = max(known, key=lambda r: r.rounds or 0)
    assert lead.value is not None
    said = f"{lead.value:.2f} ({lead.source}: {lead.definition}; {lead.window})"
    others = [
        r for r in known if r is not lead and abs(r.value - lead.value) > TOLERANCE * lead.value
    ]  # type: ignore[operator]
    odd = [r for r in readings if r.value is not None and r.value < 1.0]
    notes = [f"{r.source} says {r.value:.2f} ({r.window})" for r in others]
    notes += [f"{r.source} says {r.value:g}, which is no accept length" for r in odd]
    tail = f"; but {', '.join(notes)}" if notes else ""
    if others:
        state = "sources disagree"
    elif lead.value <= 1.005 and (lead.rounds or 0) >= NOTHING_ROUNDS:
        state = "draft contributes nothing"
    elif lead.value <= 1.005:
        state = "unknown"
    else:
        state = "speculating"
    return AcceptVerdict(state, lead.value, lead.source, said + tail, tuple(readings))


# -- summaries -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Mean and percentiles of n values. Percentiles interpolate linearly between order statistics
    (numpy's default; the tools differ here: the same 20 values give four different p99s). Below
    100 values the p99 is about the maximum, and `p99_like_max` says so."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    n: int

    @property
    def p99_like_max(self) -> bool:
        return self.n < 100

    def text(self, scale: float = 1.0, digits: int = 1, unit: str = "") -> str:
        """One line, n with it: `mean 9.4, p50 9.1, p90 12.0, p99 14.1 (like max) ms (n=20)`."""
        parts = [
            f"{name} {getattr(self, name) * scale:.{digits}f}"
            for name in ("mean", "p50", "p90", "p95")
        ]
        last = f"p99 {self.p99 * scale:.{digits}f}" + (" (like max)" if self.p99_like_max else "")
        return f"{', '.join([*parts, last])}{' ' + unit if unit else ''} (n={self.n})"

    def to_json(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "p50": self.p50,
            "p90": self.p90,
            "p95": self.p95,
            "p99": self.p99,
            "n": self.n,
            "p99_like_max": self.p99_like_max,
        }


def summary(values: Iterable[float | None]) -> Summary | None:
    """Summary of the values that are known; None when none is."""
    known = np.asarray([v for v in values if v is not None], dtype=float)
    if not len(known):
        return None
    p50, p90, p95, p99 = (float(x) for x in np.percentile(known, [50, 90, 95, 99]))
    return Summary(float(known.mean()), p50, p90, p95, p99, len(known))


def shown(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A number for a table; what is not known is n/a."""
    if value is None:
        return NA
    return f"{value:.{digits}f}{' ' + unit if unit else ''}"
