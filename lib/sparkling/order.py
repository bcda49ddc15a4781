"""In which order arms are started, so that a drift of the machine favours none of them.

A machine that warms up, or a neighbour that comes and goes, changes the speed of whatever runs at
that moment. Arms are therefore measured in *rounds*: every round starts every arm once. Rounds come
in pairs, a random order and then the same order backwards (ABCD DCBA): over a pair every arm stands
at the same mean position, so a drift that is linear in the position cancels exactly from every
comparison of two arms. An odd last round has an order of its own, and does not cancel.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkling.errors import UsageError


@dataclass(frozen=True)
class Block:
    """One start of one arm: the `index`th of all, in `round` (from 0)."""

    index: int
    round: int
    arm: str


@dataclass(frozen=True)
class Order:
    """All starts of a measurement, in their order."""

    arms: tuple[str, ...]
    rounds: int
    seed: int
    blocks: tuple[Block, ...]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def balanced(self) -> bool:
        """Whether every arm has the same mean position, so that a linear drift cancels."""
        return len(set(self.positions().values())) == 1

    def positions(self) -> dict[str, float]:
        """The mean position of each arm's starts."""
        where: dict[str, list[int]] = {}
        for block in self.blocks:
            where.setdefault(block.arm, []).append(block.index)
        return {arm: sum(x) / len(x) for arm, x in where.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "arms": list(self.arms),
            "rounds": self.rounds,
            "seed": self.seed,
            "order": [b.arm for b in self.blocks],
            "balanced": self.balanced,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Order:
        """The order that `to_json` wrote; it is read as written, not drawn again."""
        arms, order = tuple(data["arms"]), data["order"]
        blocks = tuple(Block(i, i // len(arms), arm) for i, arm in enumerate(order))
        return cls(arms, data["rounds"], data["seed"], blocks)


def balanced(arms: Sequence[str], rounds: int = 2, *, seed: int = 0) -> Order:
    """`rounds` rounds over `arms`; see the module. The same arguments give the same order.

    Raises UsageError for no arm, an arm that is named twice, or fewer than one round.
    """
    if not arms or len(set(arms)) != len(arms):
        raise UsageError(f"Arms must be named, each once, not {', '.join(arms) or 'none'}.")
    if rounds < 1:
        raise UsageError(f"There must be at least one round, not {rounds}.")
    draw = random.Random(f"sparkling order {seed}")
    order: list[str] = []
    row: list[str] = []
    for number in range(rounds):
        row = row[::-1] if number % 2 else draw.sample(list(arms), len(arms))
        order += row
    return Order.from_json({"arms": list(arms), "rounds": rounds, "seed": seed, "order": order})
