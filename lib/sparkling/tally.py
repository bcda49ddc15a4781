"""Rows of an evaluation, added up as they come: accuracy, how they ended, rates, time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkling.stats import Interval, wilson

STATES = ("ok", "truncated", "unparsed", "error")
DEFINITION = (
    "Accuracy = right ÷ questions, Wilson interval at 95 %; cut off, not parsed and failed questions "
    "count as wrong. Decode rate = Σ tokens after the first chunk ÷ their seconds. Accept length = Σ "
    "tokens kept ÷ Σ rounds."
)


@dataclass
class Tally:
    """Sums over the rows of one arm; `total` is how many there will be. `here`: rows of this
    session, the others were there when it began."""

    total: int
    arm: str = ""
    done: int = 0
    right: int = 0
    here: int = 0
    states: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    decode_tokens: float = 0.0
    decode_s: float = 0.0
    spec_tokens: int = 0
    spec_rounds: int = 0
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def add(self, row: Mapping[str, Any], *, here: bool = True) -> None:
        """Count one row."""
        self.done += 1
        self.here += here
        self.right += bool(row["correct"])
        self.states[row["status"]] += 1
        self.rules[row.get("rule") or "none"] += 1
        self.warnings.update(row.get("warnings") or ())
        self.tokens += row.get("completion_tokens") or 0
        if row.get("decode_s"):
            self.decode_tokens += row["decode_tokens"]
            self.decode_s += row["decode_s"]
        spec = row.get("spec")
        if spec:
            self.spec_tokens += spec["tokens"]
            self.spec_rounds += spec["rounds"]

    @property
    def accuracy(self) -> Interval | None:
        """Right ÷ questions so far, with its Wilson interval; None before the first."""
        return wilson(self.right, self.done) if self.done else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens/s of one request, pooled."""
        return self.decode_tokens / self.decode_s if self.decode_s else None

    @property
    def accept_length(self) -> float | None:
        """Σ tokens ÷ Σ rounds; None without rounds."""
        return self.spec_tokens / self.spec_rounds if self.spec_rounds else None

    @property
    def truncated_share(self) -> float:
        """Share of the questions so far whose answer was cut off."""
        return self.states["truncated"] / self.done if self.done else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left at this session's pace; None before its first row."""
        if not self.here:
            return None
        return (self.clock() - self.began) / self.here * (self.total - self.done)

    def row(self) -> dict[str, Any]:
        """As a row of a table, every number with what it is of."""
        known = self.accuracy
        assert known is None or (known.low is not None and known.high is not None)
        row: dict[str, Any] = {
            "arm": self.arm,
            "questions": f"{self.done} of {self.total}",
            "right": self.right,
            "accuracy": f"{100 * known.value:.2f} % [{100 * known.low:.2f}, {100 * known.high:.2f}]"  # type: ignore[operator]
            if known
            else "n/a",
        }
        row |= {state: self.states[state] for state in STATES if state != "ok"}
        rate, length = self.decode_rate, self.accept_length
        row["tokens"] = f"{self.tokens:,}"
        row["decode rate"] = f"{rate:.1f} tokens/s" if rate else "n/a"
        row["accept length"] = f"{length:.2f} ({self.spec_rounds:,} rounds)" if length else "n/a"
        return row

    def line(self) -> str:
        """In one line, for a live view."""
        from sparkling.live import clock

        known = self.accuracy
        parts = [f"{self.done} of {self.total}"]
        if known and known.low is not None and known.high is not None:
            span = f"[{100 * known.low:.1f}, {100 * known.high:.1f}]"
            parts.append(f"right {100 * known.value:.1f} % {span}")
        if self.decode_rate:
            parts.append(f"{self.decode_rate:.1f} tokens/s")
        if self.accept_length:
            parts.append(f"accept {self.accept_length:.2f}")
        parts += [f"{n} {s}" for s in STATES if s != "ok" and (n := self.states[s])]
        if self.left_s is not None and self.done < self.total:
            parts.append(f"{clock(self.left_s)} left")
        return " · ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """For a run's folder and --json."""
        known = self.accuracy
        return {
            "arm": self.arm,
            "questions": self.done,
            "of": self.total,
            "right": self.right,
            "accuracy": known.to_json() if known else None,
            "states": {state: self.states[state] for state in STATES},
            "rules": dict(self.rules),
            "warnings": dict(self.warnings),
            "completion_tokens": self.tokens,
            "decode_rate": self.decode_rate,
            "accept_length": self.accept_length,
            "rounds": self.spec_rounds or None,
        }
