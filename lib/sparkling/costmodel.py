"""What a step and a round of speculation must cost, from bytes, and what they did cost.

At batch one decoding streams weights, so the bytes of a step over the device's read bandwidth bound
its time from below. Two readings of a measured step frame every prediction:

- *all bytes*: the whole step scales with its bytes, as where memory is the only limit;
- *ceiling*: only the difference in bytes counts, read at the device's full bandwidth, and the rest of
  the step (launches, sampling, small kernels) stays as it was.

The truth lies between them unless the switch also changes something that is not bytes; where a
measurement lies outside, that is worth knowing and `Prediction.verdict` says so.

Symbols: step S bytes, round R bytes, measured step T seconds, bandwidth B, accept length a.
round cost c = (time of a round) / (time of a step); gain of speculation = a / c; it pays when a > c.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparkling.devices import Device
from sparkling.errors import UsageError
from sparkling.inventory import Inventory, inventory
from sparkling.traffic import StepBytes

RECORDED = Path(__file__).parent / "facts" / "h200-dummy.json"
STEPS = 3  # draft steps of the published recipe
BOUND_SHARE = 0.4
"""From this share of the ceiling on, a step is called bound by memory (our choice of a word, not a
law): below it the "all bytes" reading is not to be trusted."""


@dataclass(frozen=True)
class Range:
    """The two readings, `low` <= `high`."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def text(self, digits: int = 2) -> str:
        return f"{self.low:.{digits}f} to {self.high:.{digits}f}"

    def to_json(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True)
class Effective:
    """A measured time against bytes: bytes/s really moved, and their share of the ceiling."""

    bandwidth: float
    share: float

    @property
    def bound(self) -> bool:
        """Whether memory can be called the limit."""
        return self.share >= BOUND_SHARE

    def text(self) -> str:
        return f"{self.bandwidth / 1e9:,.4g} GB/s, {100 * self.share:.0f} % of the ceiling"


def effective(step: StepBytes, seconds: float, on: Device) -> Effective:
    """Effective bandwidth of a step or round measured to take `seconds`. UsageError unless > 0."""
    if not seconds > 0:
        raise UsageError(f"A step cannot take {seconds:g} s.")
    moved = step.total / seconds
    return Effective(moved, moved / on.bandwidth)


def break_even(cost: float) -> float:
    """The accept length above which speculation is faster than plain steps: the round's cost."""
    if not cost > 0:
        raise UsageError(f"A round cannot cost {cost:g} steps.")
    return cost


def spec_gain(accept_length: float, cost: float) -> float:
    """How many times faster speculation decodes: a / c."""
    return accept_length / break_even(cost)


def byte_cost(
    inv: Inventory,
    *,
    union: float | None = None,
    steps: int = STEPS,
    context: int = 0,
    head: str = "BF16",
) -> float:
    """Round cost if bytes were all: R / S, the head alike in both."""
    plain = inv.step_bytes(context=context, head=head)
    return inv.round_bytes(steps, union, context=context, head=head).total / plain.total


def byte_costs(
    inv: Inventory, *, steps: int = STEPS, context: int = 0, head: str = "BF16"
) -> Range:
    """Round cost in bytes from every position choosing the same experts to independent choices."""
    same = float(inv.known().top_k)
    return Range(
        byte_cost(inv, union=same, steps=steps, context=context, head=head),
        byte_cost(inv, steps=steps, context=context, head=head),
    )


def implied_union(
    inv: Inventory, cost: float, *, steps: int = STEPS, context: int = 0, head: str = "BF16"
) -> float | None:
    """The union of experts at which bytes alone explain this round cost; None when none does.

    Bytes grow linearly with the union, so two of them give the line.
    """
    span = byte_costs(inv, steps=steps, context=context, head=head)
    if cost not in span:
        return None
    shape = inv.known()
    most = inv.step_bytes(steps + 1).union
    return shape.top_k + (cost - span.low) / (span.high - span.low) * (most - shape.top_k)


# -- predictions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A switch's gain as the two readings give it, and the measured one where there is one.

    gain: rate with the switch / rate without. `measured` has its own interval in `low`, `high`.
    """

    switch: str
    device: str
    gain: Range
    why: str
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    source: str = ""

    @property
    def verdict(self) -> str:
        """One word or sentence on measured against predicted."""
        if self.measured is None:
            return "not measured"
        low = self.measured if self.low is None else self.low
        high = self.measured if self.high is None else self.high
        if high < self.gain.low:
            return (
                "below: it costs something that is not bytes, or its kernel reads below the ceiling"
            )
        if low > self.gain.high:
            return "above: it changes more than bytes"
        return "within"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "gain": self.gain.to_json(), "verdict": self.verdict}


def predict_head(inv: Inventory, step_s: float, on: Device, *, context: int = 0) -> Prediction:
    """What an FP8 LM head gains on a step measured to take `step_s` with a BF16 head."""
    before, after = (inv.step_bytes(context=context, head=h) for h in ("BF16", "FP8"))
    saved = (before.total - after.total) / on.bandwidth
    if not saved < step_s:
        raise UsageError(
            f"A step of {1000 * step_s:.3g} ms is shorter than reading half the head takes on "
            f"{on.name}: the step or the device is wrong."
        )
    whole = before.total / after.total
    part = step_s / (step_s - saved)
    less, of = (before.total - after.total) / 1e6, before.total / 1e6
    digits = 0 if less >= 10 else 2
    why = f"{less:,.{digits}f} MB of {of:,.{digits}f} MB less a step"
    return Prediction("fp8-head", on.id, Range(min(whole, part), max(whole, part)), why)


def round_cost(
    inv: Inventory,
    step_s: float,
    on: Device,
    *,
    steps: int = STEPS,
    context: int = 0,
    head: str = "BF16",
) -> Range:
    """Cost of a round in steps: from equal experts with only the added bytes counted, at the ceiling,
    to independent experts with the whole step scaling by its bytes."""
    plain = inv.step_bytes(context=context, head=head)
    same = float(inv.known().top_k)
    least = inv.round_bytes(steps, same, context=context, head=head)
    most = inv.round_bytes(steps, context=context, head=head)
    ends = [
        1.0 + (least.total - plain.total) / on.bandwidth / step_s,
        1.0 + (most.total - plain.total) / on.bandwidth / step_s,
        least.total / plain.total,
        most.total / plain.total,
    ]
    return Range(min(ends), max(ends))


def predict_nextn(
    inv: Inventory,
    step_s: float,
    on: Device,
    accept_length: float,
    *,
    steps: int = STEPS,
    context: int = 0,
    head: str = "BF16",
) -> Prediction:
    """What NEXTN gains at this accept length, over a plain step measured to take `step_s`."""
    cost = round_cost(inv, step_s, on, steps=steps, context=context, head=head)
    gain = Range(accept_length / cost.high, accept_length / cost.low)
    why = f"a round costs {cost.text()} steps; it pays above that accept length"
    return Prediction("nextn", on.id, gain, why)


# -- what was recorded on an H200 --------------------------------------------------------------------


@cache
def _recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text("utf-8"))


def recorded() -> dict[str, Any]:
    """Step and round times of the full-size architecture with dummy weights on one H200."""
    return json.loads(json.dumps(_recorded()))


# -- what a run measured -----------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The benchmark rows of a run's folder that its ladder is made of. UsageError when there is no
    run, or it measured nothing one request at a time."""
    from sparkling import report_rows, store

    if not folder.is_dir():
        raise UsageError(f"There is no run at {folder}.")
    rows = report_rows.ladder_rows(store.Run(folder, None))
    if not rows:
        raise UsageError(
            f"The run in {folder} holds no benchmark rows, so nothing can be compared."
        )
    return rows


@dataclass(frozen=True)
class Measured:
    """One arm of a run: a step or a round, its bytes and the bandwidth they mean."""

    arm: str
    what: str  # "step" or "round"
    seconds: float
    accept_length: float | None
    bytes: float
    effective: Effective
    n: int  # prompts

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "effective": vars(self.effective)}


def measured(rows: Iterable[Mapping[str, Any]], inv: Inventory, on: Device) -> list[Measured]:
    """Every arm of a benchmark's rows (at batch one) against its bytes.

    A plain arm's step is 1 / decode rate; an arm with speculation has a round of accept length /
    decode rate. Bytes are those of the checkpoint as stored, at the rows' mean context.
    """
    from sparkling import ladder

    rows = list(rows)
    found = []
    for arm in ladder.summarise(rows):
        if arm.decode_rate is None or (arm.workload != ladder.ALL and _several(rows, arm.arm)):
            continue
        mine = [r for r in rows if r["arm"] == arm.arm]
        switches = mine[0].get("switches") or {}
        head = "FP8" if switches.get("fp8-head", "fp8" in arm.arm) else "BF16"
        context = _context(mine)
        if arm.accept_length is not None:
            length = arm.accept_length.value
            seconds, what = length / arm.decode_rate.value, "round"
            moved = inv.round_bytes(STEPS, context=context, head=head)
        else:
            length, seconds, what = None, 1 / arm.decode_rate.value, "step"
            moved = inv.step_bytes(context=context, head=head)
        spent = effective(moved, seconds, on)
        found.append(
            Measured(arm.arm, what, seconds, length, moved.total, spent, arm.decode_rate.n)
        )
    return found


def rows_near(run: Any, runs: Path) -> tuple[list[dict[str, Any]], str]:
    """Benchmark rows of this run (a `store.Run`), else of the newest run that measured anything, and
    the run's id; ([], "") when none did."""
    from sparkling import report_rows, store

    for found in (run, store.latest(runs, holding=("rows.jsonl", "*/rows.jsonl"))):
        if found is not None and (rows := report_rows.ladder_rows(found)):
            return rows, found.id
    return [], ""


def inventory_of(rows: Sequence[Mapping[str, Any]], lane: Any) -> Inventory:
    """The inventory of the checkpoint that these rows measured: the lane's own when they are of its
    recipe, else that of the recipe they name. Raises SparklingError when it cannot be read."""
    from sparkling import recipe

    book = recipe.load(lane.recipe_path, root=lane.root)
    named = rows[0].get("recipe") or book.name
    if named == book.name:
        return inventory(lane.model)
    return inventory(recipe.load(named, root=lane.root))


def run_predictions(
    rows: Iterable[Mapping[str, Any]], inv: Inventory, on: Device
) -> list[Prediction]:
    """For each switch of which a run measured both sides: predicted gain beside the measured one.

    Sides are arms that differ in this switch alone. Humming is left out: the bytes are the same, so
    bytes predict nothing for it.
    """
    from sparkling import ladder

    rows = list(rows)
    arms: dict[str, dict[str, bool]] = {}
    for row in rows:
        arms.setdefault(row["arm"], dict(row.get("switches") or {}))
    out = []
    for switch in ("fp8-head", "nextn"):
        for before, off in arms.items():
            for after, on_ in arms.items():
                if not off or on_ != {**off, switch: True} or off.get(switch):
                    continue
                pair = [r for r in rows if r["arm"] in (before, after)]
                rungs = ladder.ladder(pair, before)
                base, rung = rungs[before].summary, rungs[after]
                if base.decode_rate is None or rung.gain is None or base.accept_length is not None:
                    continue
                step_s, context = 1 / base.decode_rate.value, _context(pair)
                if switch == "fp8-head":
                    one = predict_head(inv, step_s, on, context=context)
                else:
                    length = rung.summary.accept_length
                    if length is None:
                        continue
                    head = "FP8" if off.get("fp8-head") else "BF16"
                    one = predict_nextn(inv, step_s, on, length.value, context=context, head=head)
                gain = rung.gain
                source = f"measured, {before} to {after}, n={gain.n} prompts"
                out.append(
                    Prediction(
                        switch, on.id, one.gain, one.why, gain.value, gain.low, gain.high, source
                    )
                )
    return out


def _several(rows: Sequence[Mapping[str, Any]], arm: str) -> bool:
    return len({r["workload"] for r in rows if r["arm"] == arm}) > 1


def _context(rows: Sequence[Mapping[str, Any]]) -> int:
    """Mean tokens in the cache while decoding: prompt and half of the answer."""
    known = [
        (r.get("prompt_tokens") or 0) + (r.get("completion_tokens") or 0) / 2
        for r in rows
        if r.get("complete")
    ]
    return round(sum(known) / len(known)) if known else 0
