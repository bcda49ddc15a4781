"""What one request brought back: the answer, its times and its counts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkling.errors import RequestError
from sparkling.tools import ToolCall


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token: its id (None where the endpoint gives text only), its text (None where
    it gives ids only), its natural log-probability, and those of the likeliest tokens of its
    position, keyed by id (by text where the endpoint gives no ids)."""

    id: int | None
    text: str | None
    logprob: float
    top: Mapping[Any, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpecCounts:
    """Speculation counters of one request.

    `tokens`: tokens kept by verification rounds, the bonus token of each round included. The first
    token of a reply comes from prefill and is in no round. With SGLang's counters this is
    `spec_num_correct_drafts + spec_verify_ct`; it also holds what `max_tokens` then cut off, so it
    may exceed completion_tokens - 1 by a few.
    `rounds`: draft-and-verify rounds (`spec_verify_ct`).
    `histogram[i]`: rounds that kept i drafts. `proposed`: drafts proposed.
    `reported`: the server's own figure, completion_tokens / rounds, which counts prefill's token
    too and is therefore a little higher than `accept_length`.
    `source`: "meta_info" (this request's own counters) or "counters" (the server's totals before
    and after it, so whatever else ran meanwhile is in them).
    """

    tokens: int
    rounds: int
    histogram: tuple[int, ...] | None = None
    source: str = "meta_info"
    proposed: int | None = None
    reported: float | None = None

    @property
    def accept_length(self) -> float:
        """Tokens kept per round, 1.0 = the draft contributes nothing."""
        return self.tokens / self.rounds

    @property
    def accept_rate(self) -> float | None:
        """Drafts kept / drafts proposed; None when the number proposed is unknown."""
        return (self.tokens - self.rounds) / self.proposed if self.proposed else None

    @classmethod
    def from_server(
        cls, info: Mapping[str, Any], completion_tokens: int | None
    ) -> SpecCounts | None:
        """From SGLang 0.5.23's `meta_info` or `spec_tokens_details`.

        None when there are no rounds in it: a missing key is unknown, not zero.
        """
        rounds = info.get("spec_verify_ct") or 0
        if rounds <= 0:
            return None
        correct = info.get("spec_num_correct_drafts")
        if correct is not None:
            tokens = int(correct) + rounds
        elif completion_tokens is not None:
            tokens = completion_tokens - 1
        else:
            return None
        histogram = info.get("spec_correct_drafts_histogram")
        return cls(
            tokens=tokens,
            rounds=int(rounds),
            histogram=tuple(int(x) for x in histogram) if histogram else None,
            proposed=info.get("spec_num_proposed_drafts") or None,
            reported=info.get("spec_accept_length") or None,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "histogram": list(self.histogram) if self.histogram else None,
            "source": self.source,
            "proposed": self.proposed,
            "reported": self.reported,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> SpecCounts | None:
        if not data:
            return None
        histogram = data.get("histogram")
        return cls(
            data["tokens"],
            data["rounds"],
            tuple(histogram) if histogram else None,
            data.get("source", "meta_info"),
            data.get("proposed"),
            data.get("reported"),
        )


@dataclass
class Reply:
    """One answer.

    Times are seconds after `started` (time.perf_counter at the moment the request was sent), taken
    when the bytes left the socket, before they are parsed. `chunk_times_s` holds the chunks that
    brought new tokens: neither keep-alive comments, nor empty deltas, nor the role chunk, nor a
    chunk that repeats what was sent. `chunk_tokens[i]` is the server's count of completion tokens
    at chunk i (continuous usage), None where that chunk did not say.

    `complete` is true only if the server gave a finish reason other than "abort" and as many
    tokens as were asked for where that can be known; otherwise `problem` says what happened in one
    clause and no rate is computed from the reply. `truncated`: it ended by its length, so a graded
    answer may be cut. `tool_calls` are whole and may be run; `broken_calls` may not. `meta_info` is
    the server's own, where the endpoint gives it (/generate).
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    broken_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    started: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int | None] = field(default_factory=list)
    e2e_s: float | None = None
    spec: SpecCounts | None = None
    complete: bool = False
    problem: str | None = None
    warnings: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    output_ids: list[int] | None = None
    meta_info: dict[str, Any] | None = None
    streamed: bool = True
    comments: int = 0
    unknown_payloads: int = 0
    id: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first chunk with text (thinking counts); None if there was none or the
        reply was not streamed."""
        return self.chunk_times_s[0] if self.chunk_times_s else None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def fingerprint(self) -> str:
        """A short hash of what was generated: token ids where known, otherwise the text."""
        if self.output_ids is not None:
            what = ",".join(map(str, self.output_ids))
        else:
            what = "\x00".join((self.reasoning, self.text, *(c.raw for c in self.tool_calls)))
        return hashlib.sha256(what.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def require(self) -> Reply:
        """This reply if it is complete; RequestError with its problem otherwise."""
        if not self.complete:
            raise RequestError(f"The answer is not complete: {self.problem}.")
        return self
