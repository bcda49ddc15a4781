"""Two running servers on the same text: teacher-forced log-probabilities, and free-running answers.

*Teacher-forced*: both servers read the very same token ids (`/generate` with `logprob_start_len` 0) and
say how likely each token was. Whatever differs between the arms shows, not the head alone. SGLang's
CUDA kernels are not exactly repeatable across batch shapes, so compare an arm with itself as well: that
is the noise.

*Free-running*: both answer the same prompts greedily. One token that differs early changes all that
follow, so the share of identical answers falls with length: the first difference is the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkling.errors import RequestError, UsageError
from sparkling.head import rare_positions
from sparkling.stats import Interval, wilson

TOP = 5
FREE_TOKENS = 64
PROMPTS = (
    "Why is the sky blue?",
    "Write a short reply to a customer whose parcel is late.",
    "List three uses of a paper clip.",
    "def fibonacci(n):",
    "A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive?",
    "Repeat: one two three one two three one two three",
)


@dataclass(frozen=True)
class Forced:
    """One text as a server judged it: ids, the log-probability of each but the first, and the `top`
    likeliest of each of these positions (id -> log-probability)."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]


@dataclass(frozen=True)
class ForcedAgreement:
    """The second server against the first over n positions of a group ("all" or "rare").

    first: how often the likeliest token is the same; overlap: mean share of the first server's top k
    among the second's; kl: mean of Σ p·(log p - log q) over the first's top k, the rest taken as one
    outcome, which is at most the true divergence (nats); shift: mean change of the read token's
    log-probability, its mean size, and the largest.
    """

    group: str
    n: int
    first: Interval
    overlap: float
    kl: float
    shift_mean: float
    shift_size: float
    shift_max: float

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "first": self.first.to_json()}


@dataclass(frozen=True)
class FreeRun:
    """Free-running answers of two servers: n prompts, how many identical, and for the others where
    they first differ (token positions from 0)."""

    identical: Interval
    n: int
    first_difference: tuple[int, ...]
    tokens: int  # compared in all, to the first difference or the end
    max_tokens: int

    @property
    def median_difference(self) -> float | None:
        return statistics.median(self.first_difference) if self.first_difference else None

    def to_json(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "identical": self.identical.to_json(),
            "first_difference": list(self.first_difference),
            "median_difference": self.median_difference,
            "tokens": self.tokens,
            "max_tokens": self.max_tokens,
        }


def texts(
    client: Any, prompts: Sequence[str] = PROMPTS, *, max_tokens: int = 96
) -> list[list[int]]:
    """Token ids of each prompt with this server's greedy answer: what both servers will read.

    Raises RequestError when an answer is not complete.
    """
    out = []
    for prompt in prompts:
        reply = client.generate(
            prompt,
            max_tokens=max_tokens,
            stream=False,
            logprobs=0,
            extra={"logprob_start_len": 0},
        ).require()
        read = (reply.meta_info or {}).get("input_token_logprobs") or []
        ids = [int(entry[1]) for entry in read] + list(reply.output_ids or ())
        if len(ids) < 2:
            raise RequestError("The server gave no token ids for a prompt, so nothing can be read.")
        out.append(ids)
    return out


def force(client: Any, ids: Sequence[Sequence[int]], *, top: int = TOP) -> list[Forced]:
    """Let a server judge these texts. Raises RequestError for an answer that is not as asked."""
    out = []
    for one in ids:
        reply = client.generate(
            input_ids=list(one),
            max_tokens=1,
            stream=False,
            logprobs=top,
            extra={"logprob_start_len": 0},
        ).require()
        meta = reply.meta_info or {}
        read = meta.get("input_token_logprobs") or []
        likeliest = meta.get("input_top_logprobs") or []
        if [int(entry[1]) for entry in read] != list(one) or len(likeliest) != len(read):
            raise RequestError(
                "The server did not return a log-probability for every token it read; is "
                "logprob_start_len supported by it?"
            )
        out.append(
            Forced(
                tuple(one),
                tuple(float(entry[0]) for entry in read[1:]),
                tuple({int(e[1]): float(e[0]) for e in row or ()} for row in likeliest[1:]),
            )
        )
    return out


def compare_forced(first: Sequence[Forced], second: Sequence[Forced]) -> list[ForcedAgreement]:
    """The second server's judgement against the first's, on all positions and on rare tokens.

    Raises UsageError when they judged different texts.
    """
    if [one.ids for one in first] != [one.ids for one in second] or not first:
        raise UsageError("The two servers read different texts, so they cannot be compared.")
    targets = np.array([token for one in first for token in one.ids[1:]])
    a = np.array([value for one in first for value in one.logprobs])
    b = np.array([value for one in second for value in one.logprobs])
    tops = [
        (p, q)
        for one, other in zip(first, second, strict=True)
        for p, q in zip(one.top, other.top, strict=True)
    ]
    groups = {"all": np.arange(len(targets))}
    rare = rare_positions(targets)
    if rare is not None:
        groups["rare"] = rare
    return [_forced(name, at, a, b, tops) for name, at in groups.items()]


def _forced(
    group: str,
    at: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    tops: Sequence[tuple[Mapping[int, float], Mapping[int, float]]],
) -> ForcedAgreement:
    same, overlap, kl = 0, [], []
    for i in at:
        p, q = tops[i]
        same += max(p, key=p.__getitem__) == max(q, key=q.__getitem__)
        overlap.append(len(p.keys() & q.keys()) / len(p))
        kl.append(_coarse_kl(p, q))
    shift = b[at] - a[at]
    return ForcedAgreement(
        group,
        len(at),
        wilson(int(same), len(at)),
        float(np.mean(overlap)),
        float(np.mean(kl)),
        float(shift.mean()),
        float(np.abs(shift).mean()),
        float(np.abs(shift).max()),
    )


def _coarse_kl(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Divergence over the tokens that both list, everything else as one outcome: merging outcomes
    never raises it, so this is a lower bound."""
    both = sorted(p.keys() & q.keys())
    mine = np.exp([p[token] for token in both])
    theirs = np.exp([q[token] for token in both])
    total = float((mine * (np.log(mine) - np.log(theirs))).sum()) if both else 0.0
    rest_p, rest_q = 1 - float(mine.sum()), 1 - float(theirs.sum())
    if rest_p > 1e-9 and rest_q > 1e-9:
        total += rest_p * float(np.log(rest_p / rest_q))
    return max(total, 0.0)


def answers(
    client: Any, prompts: Sequence[str] = PROMPTS, *, max_tokens: int = FREE_TOKENS
) -> list[list[int]]:
    """Token ids of a server's greedy answer to each prompt. Raises RequestError when one fails."""
    return [
        list(
            client.generate(prompt, max_tokens=max_tokens, stream=False).require().output_ids or ()
        )
        for prompt in prompts
    ]


def free_run(
    first: Any, second: Any, prompts: Sequence[str] = PROMPTS, *, max_tokens: int = FREE_TOKENS
) -> FreeRun:
    """Greedy answers of two servers to the same prompts. Raises RequestError when one fails."""
    both = [answers(client, prompts, max_tokens=max_tokens) for client in (first, second)]
    return compare_answers(*both, max_tokens=max_tokens)


def compare_answers(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]], *, max_tokens: int = 0
) -> FreeRun:
    """Where two arms' answers (token ids, by prompt) first differ. UsageError unless paired."""
    if len(first) != len(second) or not first:
        raise UsageError("Free-running answers must come in pairs, one of each arm for a prompt.")
    different, tokens = [], 0
    for a, b in zip(first, second, strict=True):
        shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if shared is None and len(a) != len(b):
            shared = min(len(a), len(b))
        if shared is not None:
            different.append(shared)
        tokens += len(a) if shared is None else shared
    n = len(first)
    return FreeRun(wilson(n - len(different), n), n, tuple(different), tokens, max_tokens)
