"""The cost model against whole servers at full size, as they were recorded on an H200.

`costmodel` predicts from bytes, `fullsize` holds what was recorded; neither knows the other.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from sparkling import fullsize
from sparkling.costmodel import Prediction, Range, predict_head, round_cost
from sparkling.devices import device
from sparkling.inventory import FLASH, inventory
from sparkling.stats import Interval


def predictions(record: fullsize.Record | None = None) -> list[Prediction]:
    """The FP8 head's gain on a step and NEXTN's on a round (BF16 head), predicted and recorded, for each
    choice of kernels and each context that the record holds.

    A draft with random weights is never right, so a round keeps one token and NEXTN's gain is 1 over
    the cost of a round.
    """
    record = record or fullsize.recorded()
    inv, on = inventory(FLASH), device(record.device)
    found = []
    for kernels in reversed(fullsize.KERNELS):
        for before in record.contexts:
            plain, head, nextn = (
                fullsize.arm_name(kernels, *rest)
                for rest in (("bf16", "plain"), ("fp8", "plain"), ("bf16", "nextn"))
            )
            step = record.cell(plain, before)
            if step is None:
                continue
            seconds, context = fmean(step.ms) / 1000, before + step.tokens // 2
            where = f"recorded, {kernels.capitalize()}, {before:,} tokens before"
            if gain := record.factor(plain, head, before):
                made = predict_head(inv, seconds, on, context=context)
                found.append(_with(made, gain, where))
            if gain := record.factor(plain, nextn, before):
                cost = round_cost(inv, seconds, on, context=context)
                why = f"accept length 1.00: a round costs {cost.text()} steps"
                made = Prediction("nextn", on.id, Range(1 / cost.high, 1 / cost.low), why)
                found.append(_with(made, gain, where))
    return found


def _with(one: Prediction, gain: Interval, where: str) -> Prediction:
    """The prediction with a recorded gain and its 95 % interval (single requests)."""
    source = f"{where}, n={gain.n} requests an arm, 95 %"
    return replace(one, measured=gain.value, low=gain.low, high=gain.high, source=source)
