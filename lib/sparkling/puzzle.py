"""The published figures that do not seem to fit, and what bytes say of them.

One source's headline gains 185.1 % and another's full test set 42.5 %, with the same three switches
on the same kind of machine. Everything here is arithmetic on published figures (`published`) and on
the checkpoint's bytes (`inventory`); nothing was measured on a Spark by us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkling import costmodel
from sparkling.costmodel import Range
from sparkling.devices import device
from sparkling.inventory import FLASH, Inventory, inventory
from sparkling.published import value

GSM8K_CONTEXT = 1_100
"""Tokens in the cache in the published GSM8K run: five worked examples and half an answer. An estimate;
8 kB a token make it matter little."""
POST_CONTEXT = 33_000
"""32K tokens in and half of 2K out."""


@dataclass(frozen=True)
class Line:
    """One statement: what is published, what bytes give, and what follows."""

    question: str
    published: str
    bytes: str
    answer: str


@dataclass(frozen=True)
class Puzzle:
    """All numbers behind the lines, for tests and JSON. Costs are in steps of the stage before."""

    baseline_share: float  # of the stated bandwidth, from the published baseline step
    head_gain: Range  # per cent
    all_rate: float  # tokens/s predicted for GSM8K at its accept length, independent experts
    gsm8k_cost: Range  # bytes: equal experts to independent ones
    gsm8k_implied: float  # with the synthetic workload's per-step gain taken out
    gsm8k_implied_41: float  # against the published 41 tokens/s
    sampling_steps: float  # what sampling adds to a round, from its published share
    post_cost: Range
    post_implied: float
    post_union: float | None
    expected_union: float

    def to_json(self) -> dict[str, Any]:
        return {
            name: found.to_json() if isinstance(found, Range) else found
            for name, found in vars(self).items()
        }

    def lines(self) -> list[Line]:
        gap = self.gsm8k_implied - self.gsm8k_cost.high
        union = (
            "no possible number" if self.post_union is None else f"at most {self.post_union:.0f}"
        )
        return [
            Line(
                "How much of a Spark's bandwidth does the baseline use?",
                f"{value('gsm8k_baseline_rate'):.1f} tokens/s",
                f"{100 * self.baseline_share:.0f} % of the stated 273 GB/s",
                "Decoding there is bound by memory, so bytes should predict it.",
            ),
            Line(
                "What should the FP8 head gain by itself?",
                f"+{value('fp8_head_gain'):.0f} % alone, +{value('humming_fp8_gain'):.0f} % with "
                "Humming",
                f"+{self.head_gain.low:.1f} to +{self.head_gain.high:.1f} %",
                "Nine per cent is what the head's bytes give, which leaves about nothing for Humming "
                "alone at batch one; eleven is more than bytes explain.",
            ),
            Line(
                "What should all three give on GSM8K?",
                f"{value('gsm8k_all_rate'):.1f} tokens/s at accept length "
                f"{value('gsm8k_accept_length'):.2f}",
                f"{self.all_rate:.1f} tokens/s with independent experts",
                "Within one per cent, which is better than it deserves: sampling takes time that is "
                "no bytes, so the real union was probably smaller than that of independent choices.",
            ),
            Line(
                "What does a round cost in the sampled workload?",
                f"{self.gsm8k_implied_41:.2f} steps (against about 41 tokens/s) to "
                f"{self.gsm8k_implied:.2f} (per-step gain of the other source)",
                f"{self.gsm8k_cost.text()} steps",
                f"Independent experts give the upper end; the {gap:.2f} steps above it are near the "
                f"{self.sampling_steps:.2f} that the published cost of sampling makes.",
            ),
            Line(
                "Why is a round so cheap in the synthetic workload?",
                f"{self.post_implied:.2f} steps at accept length {value('post_accept_length'):.2f}",
                f"{self.post_cost.text()} steps; {self.post_implied:.2f} needs a union of {union} "
                f"of the {self.expected_union:.0f} experts expected",
                "Repeated text wakes overlapping experts, and greedy verification samples nothing.",
            ),
            Line(
                "Which base has the headline of 185.1 %?",
                f"{value('post_all_rate'):.2f} over {value('post_base_rate'):.2f} or over "
                f"{value('post_before_rate'):.2f} tokens/s",
                f"+{value('post_gain_over_base'):.1f} % and +{value('post_gain_over_before'):.1f} %",
                "Over the first: all three switches. NEXTN alone, over the stage before it, is "
                f"{value('post_nextn_ratio'):.2f} times.",
            ),
        ]


def settle(inv: Inventory | None = None) -> Puzzle:
    """Compute it all, for the full-size model unless another inventory is given."""
    inv = inv or inventory(FLASH)
    spark = device("spark")
    step_s = 1 / value("gsm8k_baseline_rate")
    plain = inv.step_bytes(context=GSM8K_CONTEXT)
    fp8 = inv.step_bytes(context=GSM8K_CONTEXT, head="FP8")
    head = costmodel.predict_head(inv, step_s, spark, context=GSM8K_CONTEXT).gain
    gsm8k = costmodel.byte_costs(inv, context=GSM8K_CONTEXT, head="FP8")
    post = costmodel.byte_costs(inv, context=POST_CONTEXT, head="FP8")
    faster = plain.total / fp8.total
    accept = value("gsm8k_accept_length")
    round_s = accept / value("gsm8k_all_rate")
    # The published step of the stage before NEXTN, with the other source's per-step gain.
    before_s = step_s / value("post_step_ratio")
    implied = value("post_implied_round_cost")
    return Puzzle(
        baseline_share=costmodel.effective(plain, step_s, spark).share,
        head_gain=Range(100 * (head.low - 1), 100 * (head.high - 1)),
        all_rate=value("gsm8k_baseline_rate") * faster * accept / gsm8k.high,
        gsm8k_cost=gsm8k,
        gsm8k_implied=value("gsm8k_round_cost_post"),
        gsm8k_implied_41=value("gsm8k_round_cost_41"),
        sampling_steps=value("sampling_cost") / 100 * round_s / before_s,
        post_cost=post,
        post_implied=implied,
        post_union=costmodel.implied_union(inv, implied, context=POST_CONTEXT, head="FP8"),
        expected_union=inv.step_bytes(costmodel.STEPS + 1).union,
    )
