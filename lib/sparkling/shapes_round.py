"""What the kernels alone explain of a round of speculation in the whole server, on the same device.

A round is longer than a step by what it does more of. Counted here, from kernels timed alone:

- the target's routed experts for four tokens instead of one, in every MoE layer;
- the NEXTN layer's routed experts: one pass over four tokens, then one over a single token for each
  further draft;
- the LM head: four rows instead of one, and one row more for each draft.

What remains is attention over four positions, the NEXTN layer's attention, small kernels and the gaps
between three draft passes; it is not measured apart. In a server, kernels can overlap or start late, so
this is an account, not a proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from sparkling import devices, fullsize, shapes
from sparkling.costmodel import STEPS
from sparkling.inventory import FLASH, inventory

FORMATS = {"bf16": "BF16", "fp8": "FP8"}


@dataclass(frozen=True)
class Account:
    """One arm's round against its step at one context; all in milliseconds.

    n: requests an arm of the server's record, the fewer of the two.
    """

    kernels: str  # whose experts: "humming" or "marlin"
    head: str
    context: int
    step: float
    round: float
    n: int
    experts: float
    draft_experts: float
    heads: float

    @property
    def added(self) -> float:
        """What a round takes more than a step."""
        return self.round - self.step

    @property
    def rest(self) -> float:
        """What of it the kernels timed alone do not explain."""
        return self.added - self.experts - self.draft_experts - self.heads


def same_device(record: shapes.Record, full: fullsize.Record) -> bool:
    """Whether both were recorded on the same kind of device."""
    one = devices.of_gpus([record.device])
    return one is not None and one.id == full.device


def accounts(record: shapes.Record, full: fullsize.Record) -> list[Account]:
    """One account for each runner of the experts, head and context that both records hold; empty when
    they are of different devices."""
    if not same_device(record, full):
        return []
    layers = inventory(FLASH).known().moe_layers
    verified = STEPS + 1
    found = []
    for kernels, (head, name) in product(fullsize.KERNELS, FORMATS.items()):
        experts = [record.expert_case(tokens, backend=kernels) for tokens in (1, verified)]
        heads = [
            next((c for c in record.head if (c.format, c.rows) == (name, rows)), None)
            for rows in (1, verified)
        ]
        for context in full.contexts:
            step, round_ = (
                full.cell(fullsize.arm_name(kernels, head, mode), context)
                for mode in fullsize.MODES
            )
            if None in (*experts, *heads) or step is None or round_ is None:
                continue
            one, four = (c.times.median / 1000 for c in experts if c is not None)
            head_one, head_four = (c.times.median / 1000 for c in heads if c is not None)
            found.append(
                Account(
                    kernels,
                    name,
                    context,
                    step.median,
                    round_.median,
                    min(step.n, round_.n),
                    layers * (four - one),
                    four + (STEPS - 1) * one,
                    head_four - head_one + STEPS * head_one,
                )
            )
    return found
