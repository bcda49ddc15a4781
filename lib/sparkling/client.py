"""One request in, one timed Reply out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from sparkling import prom
from sparkling.assemble import Chat, Generate, OnText
from sparkling.errors import RequestError
from sparkling.redact import redact
from sparkling.reply import Reply, SpecCounts
from sparkling.wire import Refused, Wire


class Client:
    """HTTP client of one SGLang server.

    Requests to this machine ignore proxy settings of the environment; others honour them. Every
    request opens its own connection, so none can fail on a stale one; on loopback that is 0.1 to
    0.3 ms of each TTFT. The key travels in the Authorization header and appears nowhere else.

    `timeout_s` is the longest silence allowed: time without a new token (keep-alive comments do not
    count), or, for requests that are not streamed, without the answer. After it: Stalled.
    A Client may be used from several threads at once.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        *,
        model: str | None = None,
    ) -> None:
        self._wire = Wire(base_url, api_key, timeout_s)
        self._model = model

    @property
    def base_url(self) -> str:
        return self._wire.base_url

    def __repr__(self) -> str:
        return f"Client({self.base_url!r}{', with a key' if self._wire.key else ''})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._wire.close()

    # -- generation ------------------------------------------------------------------------------

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stream: bool = True,
        ignore_eos: bool = False,
        extra: Mapping[str, Any] | None = None,
        on_text: OnText | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """`/v1/chat/completions`. A string is one user message. `extra` is merged into the request.

        `thinking` sets the chat template's `enable_thinking`. `on_text("reasoning" | "text",
        piece)` is called for every piece as it arrives. Speculation counters are asked for
        (`return_spec_tokens_details`; streamed replies bring them in `sglext`), and a token count
        with every chunk (`continuous_usage_stats`).

        Raises Unreachable, Refused, Stalled; an answer that was cut short is returned with
        `complete` false.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stream": stream,
            "return_spec_tokens_details": True,
        }
        if stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if top_k is not None:
            body["top_k"] = top_k
        if seed is not None:
            body["seed"] = seed
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        if tools:
            body["tools"] = list(tools)
        if ignore_eos:
            body["ignore_eos"] = True
        body.update(extra or {})
        into = Chat(max_tokens=max_tokens, ignore_eos=ignore_eos, on_text=on_text)
        return self._wire.send("/v1/chat/completions", body, into, timeout_s)

    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        stream: bool = True,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        extra: Mapping[str, Any] | None = None,
        on_text: OnText | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """`/generate`: raw text (or token ids) in, raw text out, no chat template.

        `logprobs`: None asks for none; 0 for those of the tokens generated; k > 0 also for the k
        likeliest of every position. Raises what `chat` raises.
        """
        if (prompt is None) == (input_ids is None):
            raise RequestError("Give generate() either a prompt or input_ids, not both or neither.")
        sampling: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
        }
        if top_k is not None:
            sampling["top_k"] = top_k
        if seed is not None:
            sampling["sampling_seed"] = seed
        if ignore_eos:
            sampling["ignore_eos"] = True
        body: dict[str, Any] = {"sampling_params": sampling, "stream": stream}
        if prompt is not None:
            body["text"] = prompt
        else:
            body["input_ids"] = list(input_ids or ())
        if logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": logprobs, "logprob_start_len": -1}
        body.update(extra or {})
        into = Generate(max_tokens=max_tokens, ignore_eos=ignore_eos, on_text=on_text)
        return self._wire.send("/generate", body, into, timeout_s)

    # -- facts -----------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The name sent with requests: the one given, else the first that the server lists."""
        if self._model is None:
            names = self.models()
            if not names:
                raise RequestError(f"The server at {self.base_url} lists no model.")
            self._model = names[0]
        return self._model

    def models(self) -> list[str]:
        """Names in `/v1/models`."""
        return [str(m.get("id")) for m in self._json("/v1/models").get("data") or ()]

    def server_info(self) -> dict[str, Any]:
        """`/server_info`, with keys and passwords masked (the server would show them)."""
        return redact(self._json("/server_info"), secrets=[self._wire.key])

    def model_info(self) -> dict[str, Any]:
        """`/model_info`: cheap, no generation; good for polling."""
        return self._json("/model_info")

    def count_tokens(self, text: str) -> int:
        """How many tokens the server's tokenizer makes of `text` (`/tokenize`), no chat template."""
        body = {"model": self.model, "prompt": text}
        answer = self._wire.decode(self._get("/tokenize", method="POST", json=body))
        return int(answer.get("count") or len(answer.get("tokens") or ()))

    def metrics_text(self) -> str:
        """`/metrics` as it is; Refused when the server runs without `--enable-metrics`."""
        return self._get("/metrics").text

    def metrics(self) -> dict[str, float]:
        """`/metrics`, one number a name (see prom.flatten)."""
        return prom.flatten(self.metrics_text())

    def flush_cache(self, timeout_s: float = 10.0) -> None:
        """Empty the prefix cache, waiting for running requests up to `timeout_s`.

        This also sets SGLang's average accept length back. Raises Refused if it stays busy.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._get("/flush_cache", method="POST", timeout_s=timeout_s + 10)
                return
            except Refused as error:
                # 400: a request is still running (one that was just cut off, for instance).
                if error.status != 400 or time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)

    @contextmanager
    def counting(self) -> Iterator[Counting]:
        """Speculation by the server's own totals, before and after a block: for endpoints that
        give no counters of a single request. Needs `--enable-metrics` and a server that does
        nothing else meanwhile."""
        window = Counting(self.metrics())
        yield window
        window.close(self.metrics())

    def _get(
        self, path: str, *, method: str = "GET", timeout_s: float | None = None, json: Any = None
    ) -> httpx.Response:
        limit = timeout_s or min(30.0, self._wire.timeout_s)
        return self._wire.whole(method, path, limit, json=json)

    def _json(self, path: str) -> dict[str, Any]:
        return self._wire.decode(self._get(path))


class Counting:
    """Speculation counters of a window: what `/metrics` counted between its two ends."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self._before = before
        self.spec: SpecCounts | None = None
        self.requests = 0

    def close(self, after: Mapping[str, float]) -> None:
        """SGLang adds a request's tokens and rounds when it finishes; prefill's one token of each
        request is not a round's, hence it is taken off."""

        def grew(name: str) -> int | None:
            if name not in after:
                return None
            return int(after[name] - self._before.get(name, 0.0))

        tokens, rounds = (
            grew("sglang:generation_tokens_total"),
            grew("sglang:spec_verify_calls_total"),
        )
        requests = grew("sglang:num_requests_total")
        self.requests = requests or 0
        if tokens and rounds and requests is not None:
            self.spec = SpecCounts(tokens - requests, rounds, source="counters")
