"""Ling-3.0-flash at full size with random weights on one GPU: every switch with every other, read back.

`scripts/record_full_size.py` made the record (see there how): eight servers, {Marlin, Humming} x
{BF16, FP8 LM head} x {plain, NEXTN 3/1/4}, and a few extras. Definitions:

- *step*, *round*: time between the first and the last token of one answer, divided by the tokens
  after the first, or by NEXTN's rounds. One number a request; the prompt is in neither.
- *effect* of a switch: the factor on the time, `time without / time with`, as the difference of the
  mean logarithms over the arms with and without it; above 1 is faster. Averaged over those settings of
  the other switch at which both sides were measured. 95 % interval from the spread of single requests
  within each arm (Welch's t on the contrast). It says nothing of what differs from start to start, and
  where there are two GPUs Marlin runs on another one than Humming (`swap` shows how far apart they are).
- *cost of a round*: time of a round / time of a step, same kernels and head.
- *bytes' worth* of the FP8 head: the bytes it saves each step or round (as the plugin's status file
  tells, times the products in one), at the read bandwidth measured on that GPU.

Random weights: outputs mean nothing and drafts are not accepted. Rates of a real model need its weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from sparkling.costmodel import STEPS
from sparkling.errors import UsageError
from sparkling.stats import Interval, t_quantile

RECORDED = Path(__file__).parent / "facts" / "h200-full-size.json"
SCHEMA = "sparkling-full-size/1"
KERNELS, HEADS, MODES = ("marlin", "humming"), ("bf16", "fp8"), ("plain", "nextn")
SWITCHES = ("humming", "fp8-head")
LEAST = 2  # requests an arm, for a spread
WORTH = 0.8
"""The share of the bytes' worth that the FP8 head has to save (a goal of ours)."""


def arm_name(kernels: str, head: str, mode: str) -> str:
    return f"{kernels}-{head}-{mode}"


@dataclass(frozen=True)
class Cell:
    """One arm at one context: each request's milliseconds for a step or a round."""

    context: int  # tokens of the prompt
    tokens: int  # of the answer
    of: str  # "step" or "round"
    ms: tuple[float, ...]
    accept_length: float | None = None

    @property
    def median(self) -> float:
        return median(self.ms)

    @property
    def n(self) -> int:
        return len(self.ms)

    def text(self, digits: int = 3) -> str:
        """`6.559 [6.558, 6.561] (n=3)`: median, least and most of single requests."""
        span = f"[{min(self.ms):.{digits}f}, {max(self.ms):.{digits}f}]"
        return f"{self.median:.{digits}f} {span} (n={self.n})"


@dataclass(frozen=True)
class Arm:
    """One server of the record. `facts`: all else that was kept of it (start, memory, head, draft,
    moe, gpu, env, error)."""

    name: str
    cells: Mapping[int, Cell]
    facts: Mapping[str, Any]

    @property
    def gpu(self) -> str:
        return str(self.facts.get("gpu"))

    @property
    def error(self) -> str | None:
        return self.facts.get("error")


@dataclass(frozen=True)
class Saving:
    """What the FP8 head saves at one context for one choice of kernels and mode."""

    kernels: str
    mode: str
    context: int
    saved_ms: Interval
    products: int  # of the head in a step or round
    bytes: int  # saved in one
    worth_ms: float

    @property
    def share(self) -> Interval:
        """Time saved over the bytes' worth of time; the bandwidth is taken as exact."""
        one, worth = self.saved_ms, self.worth_ms
        low, high = (None if x is None else x / worth for x in (one.low, one.high))
        return Interval(one.value / worth, low, high, one.n, one.method, one.level)

    @property
    def enough(self) -> bool | None:
        """Whether the share is at least `WORTH`, by its whole interval; None if that is open."""
        share = self.share
        if share.low is None or share.high is None or share.low < WORTH <= share.high:
            return None
        return share.low >= WORTH


@dataclass(frozen=True)
class Record:
    """A whole record."""

    device: str
    date: str
    conditions: str
    command: str
    versions: Mapping[str, str]
    bandwidth: Mapping[str, float]  # bytes/s by GPU: the fastest reading measured there
    arms: Mapping[str, Arm]
    contexts: tuple[int, ...]
    unmeasured: Mapping[str, str]  # arms that were tried in vain, and why

    def cell(self, name: str, context: int) -> Cell | None:
        """An arm at a context, or None where it was not measured."""
        arm = self.arms.get(name)
        return arm.cells.get(context) if arm else None

    @property
    def missing(self) -> list[str]:
        """Which of the eight arms, at which context, the record lacks."""
        return [
            f"{name} at {context:,}"
            for name in map(lambda x: arm_name(*x), product(KERNELS, HEADS, MODES))
            for context in self.contexts
            if self.cell(name, context) is None
        ]

    def effect(self, switch: str, mode: str, context: int) -> Interval | None:
        """The factor by which `switch` ("humming", "fp8-head") shortens a step (`mode` plain) or a
        round (nextn), over the `settings` of the other; None where there are none."""
        sides, share = [], self.settings(switch, mode, context)
        for other in share:
            for on in (False, True):
                cell = self.cell(_arm(switch, on, other, mode), context)
                assert cell is not None  # settings() looked
                sides.append(((-1.0 if on else 1.0) / len(share), cell))
        return _factor(sides or None)

    def settings(self, switch: str, mode: str, context: int) -> list[str]:
        """The other switch's settings ("bf16", "fp8" or "marlin", "humming") at which this one was
        measured on and off. UsageError for another switch."""
        if switch not in SWITCHES:
            raise UsageError(f"There is no switch {switch}: {', '.join(SWITCHES)} are recorded.")
        return [
            other
            for other in (HEADS if switch == "humming" else KERNELS)
            if all(self.cell(_arm(switch, on, other, mode), context) for on in (False, True))
        ]

    def interaction(self, mode: str, context: int) -> Interval | None:
        """What the gain of Humming and the FP8 head together is to the product of their gains."""
        weights = [(1.0, k, h) for k, h in (("marlin", "fp8"), ("humming", "bf16"))]
        weights += [(-1.0, k, h) for k, h in (("marlin", "bf16"), ("humming", "fp8"))]
        found = [(w, self.cell(arm_name(k, h, mode), context)) for w, k, h in weights]
        return _factor([(w, c) for w, c in found if c] if all(c for _, c in found) else None)

    def round_cost(self, kernels: str, head: str, context: int) -> Interval | None:
        """Time of a round in steps, with its interval."""
        step, round_ = (self.cell(arm_name(kernels, head, m), context) for m in MODES)
        if step is None or round_ is None:
            return None
        return _factor([(1.0, round_), (-1.0, step)])

    def factor(self, without: str, with_: str, context: int) -> Interval | None:
        """Time of the arm `without` over time of the arm `with_`: above 1, the second is faster."""
        a, b = self.cell(without, context), self.cell(with_, context)
        return _factor([(1.0, a), (-1.0, b)]) if a and b else None

    def savings(self) -> list[Saving]:
        """What the FP8 head saves, wherever both sides were measured."""
        found = []
        for mode, kernels, context in product(MODES, KERNELS, self.contexts):
            names = [arm_name(kernels, head, mode) for head in HEADS]
            before, after = (self.cell(name, context) for name in names)
            if before is None or after is None:
                continue
            arm = self.arms[names[1]]
            head, read = arm.facts.get("head") or {}, self.bandwidth.get(arm.gpu)
            if not read or "bytes_after" not in head:
                continue
            products = 1 if mode == "plain" else 1 + STEPS  # verification, and each draft
            saved = products * (head["bytes_before"] - head["bytes_after"])
            time = _difference([(1.0, before), (-1.0, after)])
            found.append(Saving(kernels, mode, context, time, products, saved, 1e3 * saved / read))
        return found


def _arm(switch: str, on: bool, other: str, mode: str) -> str:
    """The arm with `switch` on or off, at the other switch's setting `other`."""
    if switch == "humming":
        return arm_name(KERNELS[on], other, mode)
    return arm_name(other, HEADS[on], mode)


def _difference(sides: Sequence[tuple[float, Cell]], *, log: bool = False) -> Interval:
    """Weighted sum of the cells' mean milliseconds (or of the mean logarithms) with Welch's interval:
    variances of the means add up, degrees of freedom after Satterthwaite, rounded down."""
    values = [(w, [math.log(x) if log else x for x in cell.ms]) for w, cell in sides]
    total = sum(w * fmean(x) for w, x in values)
    n = min(len(x) for _, x in values)
    method = "Welch, single requests"
    if n < LEAST:
        return Interval(total, None, None, n, method)
    parts = [(w * w * variance(x) / len(x), len(x) - 1) for w, x in values]
    spread = sum(v for v, _ in parts)
    if spread == 0:  # alike to the record's last digit: that is no certainty
        return Interval(total, None, None, n, method)
    df = max(1, int(spread**2 / sum(v * v / d for v, d in parts)))
    half = t_quantile(0.975, df) * math.sqrt(spread)
    return Interval(total, total - half, total + half, n, method)


def _factor(sides: Sequence[tuple[float, Cell]] | None) -> Interval | None:
    """exp of the weighted sum of mean logarithms: a factor, with its interval. n: the fewest requests
    of an arm."""
    if sides is None:
        return None
    one = _difference(sides, log=True)
    low, high = (None if x is None else math.exp(x) for x in (one.low, one.high))
    return Interval(math.exp(one.value), low, high, one.n, one.method)


@cache
def recorded() -> Record:
    """The record that comes with the library, made on an NVIDIA H200."""
    return read(RECORDED)


def read(path: Path | str) -> Record:
    """A record from its file. UsageError when it cannot be read or is none."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read the record {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"The record {path} is no JSON: {error}.") from error
    try:
        return of(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"The record {path} is not one of {SCHEMA}: {type(error).__name__} {error}."
        ) from error


def of(data: Mapping[str, Any]) -> Record:
    """A record from its JSON. KeyError, TypeError or ValueError when it is none."""
    if data["schema"] != SCHEMA:
        raise ValueError(f"its schema is {data['schema']}")
    arms = {}
    for name, found in data["arms"].items():
        cells = {
            int(context): Cell(
                int(context),
                cell["tokens"],
                cell["of"],
                tuple(map(float, cell["ms"])),
                cell.get("accept_length"),
            )
            for context, cell in found["contexts"].items()
        }
        if any(not c.ms or not all(0 < x < math.inf for x in c.ms) for c in cells.values()):
            raise ValueError(f"{name} holds no times")
        facts = {key: value for key, value in found.items() if key != "contexts"}
        arms[name] = Arm(name, cells, facts)
    contexts = sorted({context for arm in arms.values() for context in arm.cells})
    return Record(
        data["device"],
        data["date"],
        data["conditions"],
        data["command"],
        data["versions"],
        {gpu: float(read_) for gpu, read_ in data["bandwidth"].items()},
        arms,
        tuple(contexts),
        dict(data.get("unmeasured") or {}),
    )
