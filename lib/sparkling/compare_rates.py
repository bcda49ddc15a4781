"""Rates, times and lengths of two arms over the same units, as paired ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkling.stats import Interval, bootstrap_gains, bootstrap_quantile_ratio

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Ratio:
    """Second ÷ first of one quantity over common units, with the two values behind it."""

    name: str
    first: float
    second: float
    unit: str
    ratio: Interval
    definition: str

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "ratio": self.ratio.to_json()}


def _known(row: Row, key: str) -> float | None:
    """A finite number, or None: rows of a file may hold anything."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _decode(row: Row) -> tuple[float, float] | None:
    seconds, made = _known(row, "decode_s"), _known(row, "decode_tokens")
    if seconds and made is not None:
        return made, seconds
    rate, tokens = _known(row, "decode_rate"), _known(row, "completion_tokens")
    return (tokens, tokens / rate) if rate and tokens else None


def _one(key: str) -> Callable[[Row], tuple[float, float] | None]:
    return lambda row: None if (value := _known(row, key)) is None else (value, 1.0)


def _per_token(row: Row) -> tuple[float, float] | None:
    seconds, tokens = _known(row, "e2e_s"), _known(row, "completion_tokens")
    return (seconds, tokens) if seconds is not None and tokens else None


_QUANTITIES = (
    ("decode rate", "tokens/s", _decode, "Σ tokens ÷ Σ decode seconds"),
    ("time of a reply", "s", _one("e2e_s"), "mean from request to end"),
    ("time per token", "s", _per_token, "Σ seconds from request to end ÷ Σ tokens written"),
    ("first token", "s", _one("ttft_s"), "mean from request to first chunk"),
    ("length", "tokens", _one("completion_tokens"), "mean tokens written, thinking included"),
)


def ratios(first: Sequence[Row], second: Sequence[Row], *, seed: int = 0) -> Iterable[Ratio]:
    """Second ÷ first of every quantity that both know, first[i] and second[i] being the same
    question, with paired bootstrap intervals over questions."""
    found: list[tuple[Any, ...]] = []
    for name, unit, of, definition in _QUANTITIES:
        both = [(of(x), of(y)) for x, y in zip(first, second, strict=True)]
        known = [i for i, (x, y) in enumerate(both) if x is not None and y is not None]
        if not known:
            continue
        (ta, ba), (tb, bb) = (
            zip(*(both[i][side] for i in known), strict=True)  # type: ignore[misc]
            for side in (0, 1)
        )
        if sum(ta) and sum(ba) and sum(bb):
            found.append((tuple(known), (tb, bb, ta, ba), name, unit, definition))
    gains: dict[int, Interval] = {}
    for units in dict.fromkeys(f[0] for f in found):  # those of the same questions in one go
        mine = [i for i, f in enumerate(found) if f[0] == units]
        made = bootstrap_gains([found[i][1] for i in mine], seed=seed)
        gains |= dict(zip(mine, made, strict=True))
    for i, (_, (tb, bb, ta, ba), name, unit, definition) in enumerate(found):
        yield Ratio(name, sum(ta) / sum(ba), sum(tb) / sum(bb), unit, gains[i], definition)
        if name == "time of a reply":
            yield _median(ta, tb, seed)


def _median(first: Sequence[float], second: Sequence[float], seed: int) -> Ratio:
    middle = bootstrap_quantile_ratio(second, first, 0.5, seed=seed)
    low, high = (sorted(x) for x in (first, second))
    values = [(x[(len(x) - 1) // 2] + x[len(x) // 2]) / 2 for x in (low, high)]
    return Ratio("time of a reply, p50", *values, "s", middle, "median from request to end")


def drift(
    found: Iterable[Ratio], labels: tuple[str, str] = ("the first", "the second")
) -> str | None:
    """Did the faster arm write more? One sentence from the ratio of lengths; None without one."""
    by_name = {r.name: r for r in found}
    length, rate = by_name.get("length"), by_name.get("decode rate")
    if length is None:
        return None
    said = f"{length.ratio.text(3)} times as much as {labels[0]}"
    if not length.ratio.excludes(1.0):
        return f"No length drift is shown: {labels[1]} wrote {said}."
    more = "more" if length.ratio.value > 1 else "less"
    faster = ""
    if rate is not None and rate.ratio.excludes(1.0):
        faster = f" ({'faster' if rate.ratio.value > 1 else 'slower'} per token)"
    return (
        f"Length drift: {labels[1]}{faster} wrote {more}, {said}; compare times per token, not per "
        "reply."
    )
