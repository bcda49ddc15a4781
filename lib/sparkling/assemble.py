"""Payloads of a stream, one by one, into a Reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkling import think
from sparkling.reply import Reply, SpecCounts, TokenLogprob
from sparkling.tools import Assembler

OnText = Callable[[str, str], None]  # ("reasoning" | "text", new piece)

NO_ANSWER = (
    "the thinking never ended, so there is no answer; the server had put the thinking into content"
)


def error_message(payload: Mapping[str, Any]) -> str | None:
    """The message of an error object, in the shapes that SGLang, OpenAI and FastAPI use."""
    error = payload.get("error")
    if error is None and payload.get("object") == "error":
        error = payload
    if error is None and "detail" in payload and "choices" not in payload:
        error = payload["detail"]
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("detail") or str(dict(error))
    if error is None:
        return None
    return " ".join(str(error).split())


class _Base:
    def __init__(self, *, max_tokens: int | None, ignore_eos: bool, on_text: OnText | None) -> None:
        self.reply = Reply()
        self.error: str | None = None
        self._max_tokens = max_tokens
        self._ignore_eos = ignore_eos
        self._on_text = on_text
        self._finished_s: float | None = None

    @property
    def answered(self) -> bool:
        """Whether any token has arrived."""
        return bool(self.reply.chunk_times_s)

    @property
    def tokens_so_far(self) -> str:
        """How far the stream got, in words."""
        counts = [c for c in self.reply.chunk_tokens if c is not None]
        n = counts[-1] if counts else len(self.reply.chunk_times_s)
        unit = "token" if counts or not n else "chunk"
        return f"{n} {unit}{'' if n == 1 else 's'}"

    def _chunk(self, t: float, count: int | None) -> None:
        times, counts = self.reply.chunk_times_s, self.reply.chunk_tokens
        if counts and count is not None and count == counts[-1]:
            return  # the same step again: thinking and answer of one step, or a repetition
        times.append(t)
        counts.append(count)

    def _say(self, kind: str, piece: str) -> None:
        if self._on_text is not None and piece:
            self._on_text(kind, piece)

    def _finish_reason(self, reason: Any, t: float) -> None:
        if isinstance(reason, Mapping):
            reason = reason.get("type")
        if not reason:
            return
        if self._finished_s is None:
            self._finished_s = t
        # Some servers send several; the one that says the answer is cut wins.
        if self.reply.finish_reason is None or reason in ("length", "abort"):
            self.reply.finish_reason = str(reason)

    def finish(self, t: float, *, problem: str | None) -> Reply:
        """The reply as it stands. `problem`: what ended the stream, if not the server's own end."""
        reply = self.reply
        self._assemble()
        reply.e2e_s = self._finished_s if self._finished_s is not None else t
        n, asked = reply.completion_tokens, self._max_tokens
        if self.error is not None:
            reply.problem = f"the server reported an error after {self.tokens_so_far}: {self.error}"
        elif reply.finish_reason is None:
            reply.problem = problem or f"no finish reason after {self.tokens_so_far}"
        elif reply.finish_reason == "abort":
            reply.problem = f"the server aborted the request after {self.tokens_so_far}"
        elif (
            n is not None
            and asked is not None
            and n < asked
            and (self._ignore_eos or reply.finish_reason == "length")
        ):
            reply.problem = f"asked for {asked} tokens, got {n}"
        reply.complete = reply.problem is None
        if n is None and reply.complete:
            reply.warnings.append("the server sent no usage: tokens are not counted")
        return reply

    def _assemble(self) -> None:
        raise NotImplementedError


class Chat(_Base):
    """`/v1/chat/completions`, streamed (`feed`) or whole (`feed_whole`)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tools = Assembler()
        self._spec: Mapping[str, Any] | None = None

    def feed(self, payload: Mapping[str, Any], t: float) -> None:
        error = error_message(payload)
        if error is not None:
            self.error = error
            return
        self._shared(payload)
        for choice in payload.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            if self._take(choice.get("delta") or {}, choice):
                usage = payload.get("usage") or {}
                self._chunk(t, usage.get("completion_tokens"))
            self._finish_reason(choice.get("finish_reason"), t)

    def feed_whole(self, payload: Mapping[str, Any], t: float) -> None:
        self.error = error_message(payload)
        self.reply.streamed = False
        self._shared(payload)
        for choice in (payload.get("choices") or ())[:1]:
            self._take(choice.get("message") or {}, choice)
            self._finish_reason(choice.get("finish_reason"), t)
            self.reply.meta_info = choice.get("meta_info")
            self._spec = self.reply.meta_info or self._spec

    def _take(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
        reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        content = _text(delta.get("content"))
        called = self._tools.feed(delta.get("tool_calls"))
        self._reasoning.append(reasoning)
        self._content.append(content)
        self._say("reasoning", reasoning)
        self._say("text", content)
        logprobs = (choice.get("logprobs") or {}).get("content")
        if logprobs:
            self.reply.logprobs = (self.reply.logprobs or []) + [_chat_logprob(x) for x in logprobs]
        return bool(reasoning or content or called)

    def _shared(self, payload: Mapping[str, Any]) -> None:
        reply = self.reply
        reply.id = reply.id or payload.get("id")
        usage = payload.get("usage")
        if usage:
            _usage(reply, usage)
        extension = payload.get("sglext") or {}
        details = extension.get("spec_tokens_details")
        if isinstance(details, Mapping):
            self._spec = details
        ids = extension.get("output_ids")
        if ids and isinstance(ids[0], list):
            reply.output_ids = list(ids[0])

    def _assemble(self) -> None:
        reply = self.reply
        if self._spec is not None:
            reply.spec = SpecCounts.from_server(self._spec, reply.completion_tokens)
        reply.tool_calls, reply.broken_calls = self._tools.finish(reply.finish_reason)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        cut = reply.finish_reason in (None, "length")
        extra, text, tagged = think.split(content, parsed=bool(reasoning), cut=cut)
        if tagged:
            reply.warnings.append(think.WARNING)
        elif text and not self._tools and _is_thinking(reply, reasoning, text):
            # SGLang's ling3 parser hands unfinished thinking over as content too.
            reply.warnings.append(NO_ANSWER)
            reasoning, text = max(reasoning, text, key=len), ""
        reply.reasoning, reply.text = reasoning + extra, text


def _is_thinking(reply: Reply, reasoning: str, text: str) -> bool:
    """Whether `text` is thinking that never ended: the server counts every token as thinking."""
    if reply.reasoning_tokens is not None and reply.completion_tokens:
        return reply.reasoning_tokens >= reply.completion_tokens
    return bool(reasoning) and text == reasoning


class Generate(_Base):
    """SGLang's `/generate`, whose chunks repeat everything so far (or, with
    `--incremental-streaming-output`, bring only what is new)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._meta: dict[str, Any] = {}
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._top: list[Any] = []

    def feed(self, payload: Mapping[str, Any], t: float) -> None:
        error = error_message(payload)
        if error is not None:
            self.error = error
            return
        meta = payload.get("meta_info") or {}
        self._meta.update(meta)
        count = meta.get("completion_tokens")
        text, ids = payload.get("text") or "", payload.get("output_ids") or []
        # Cumulative chunks hold as many ids as tokens were generated.
        cumulative = (
            len(ids) == count if count is not None and ids else text.startswith(self.reply.text)
        )
        new = text[len(self.reply.text) :] if cumulative else text
        self.reply.text += new
        self._ids = list(ids) if cumulative else self._ids + list(ids)
        self._keep_logprobs(meta)
        self._say("text", new)
        if new or (self.answered and count != self.reply.chunk_tokens[-1]):
            self._chunk(t, count)
        self._finish_reason(meta.get("finish_reason"), t)

    def feed_whole(self, payload: Mapping[str, Any], t: float) -> None:
        self.feed(payload, t)
        self.reply.streamed = False
        self.reply.chunk_times_s, self.reply.chunk_tokens = [], []

    def _keep_logprobs(self, meta: Mapping[str, Any]) -> None:
        new = meta.get("output_token_logprobs")
        if not new:
            return
        top = meta.get("output_top_logprobs") or []
        if len(new) == meta.get("output_token_logprobs_length", len(new)):
            self._logprobs, self._top = list(new), list(top)
        else:
            self._logprobs += new
            self._top += top

    def _assemble(self) -> None:
        reply, meta = self.reply, self._meta
        reply.id, reply.meta_info = meta.get("id"), dict(meta)
        _usage(reply, meta)
        reply.output_ids = self._ids or None
        reply.spec = SpecCounts.from_server(meta, reply.completion_tokens)
        if self._logprobs:
            top = self._top + [None] * (len(self._logprobs) - len(self._top))
            reply.logprobs = [
                TokenLogprob(x[1], x[2], x[0], {y[1]: y[0] for y in likeliest or ()})
                for x, likeliest in zip(self._logprobs, top, strict=False)
            ]


def _usage(reply: Reply, usage: Mapping[str, Any]) -> None:
    reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
    reply.completion_tokens = usage.get("completion_tokens", reply.completion_tokens)
    details = usage.get("prompt_tokens_details") or {}
    reply.cached_tokens = details.get(
        "cached_tokens", usage.get("cached_tokens", reply.cached_tokens)
    )
    details = usage.get("completion_tokens_details") or {}
    reply.reasoning_tokens = usage.get(
        "reasoning_tokens", details.get("reasoning_tokens", reply.reasoning_tokens)
    )


def _text(value: Any) -> str:
    """Content as text: null is nothing, a list of parts is its texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(p.get("text") or "" for p in value if isinstance(p, Mapping))
    return ""


def _chat_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = {x.get("token"): x.get("logprob") for x in entry.get("top_logprobs") or ()}
    return TokenLogprob(None, entry.get("token"), entry.get("logprob"), top)
