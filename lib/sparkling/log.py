"""SGLang's log lines as typed events.

A line counts only if it *begins* with SGLang's own prefix, `[2026-11-29 18:12:58] ` (with
milliseconds and a rank where SGLang adds them), followed by the text of a known kind. A request
that is logged with `--log-requests` quotes its prompt inside such a line, after other text, and so
proves nothing. A progress bar may stand before the prefix, because tqdm writes no line end.

Unknown lines are skipped. Texts are those of SGLang 0.5.23 (file and line in the research notes);
the fork's and older ones are read where they are known.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sparkling import crash
from sparkling.crash import Diagnosis, diagnose

__all__ = ["Diagnosis", "Follower", "diagnose", "parse", "parse_line", "split_lines"]

SECRET_ARGUMENTS = ("api_key", "admin_api_key", "ssl_keyfile_password")
REDACTED = "[redacted]"

# --------------------------------------------------------------------------- events


@dataclass(slots=True)
class Event:
    """What all events have: the line's number within what was parsed (from 1), stamp and rank."""

    line_no: int
    stamp: str
    rank: str

    @property
    def time(self) -> datetime | None:
        """The line's time as SGLang wrote it (local, no zone); None for unstamped lines."""
        return datetime.fromisoformat(self.stamp) if self.stamp else None


@dataclass(slots=True)
class ServerArgs(Event):
    """The resolved arguments that the server prints when it starts; secrets are masked."""

    text: str = field(repr=False)
    _args: dict[str, Any] | None = field(default=None, repr=False)
    complete: bool = True

    @property
    def args(self) -> dict[str, Any]:
        """Argument name to value. If the line cannot be read as a whole, what can be read."""
        if self._args is None:
            try:
                found = ast.literal_eval(self.text)
                self._args = found if isinstance(found, dict) else {}
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                self._args = _scalars(self.text)
                self.complete = False
            for name in SECRET_ARGUMENTS:
                if self._args.get(name) is not None:
                    self._args[name] = REDACTED
        return self._args


@dataclass(slots=True)
class CheckpointLayout(Event):
    """What kind of checkpoint SGLang recognised: "mxfp4-experts" or a quantization's name."""

    layout: str
    text: str


@dataclass(slots=True)
class LayerMap(Event):
    """Per layer 0 (KDA, linear) or 1 (MLA, softmax)."""

    layers: tuple[int, ...]

    @property
    def linear(self) -> int:
        return self.layers.count(0)

    @property
    def softmax(self) -> int:
        return self.layers.count(1)


@dataclass(slots=True)
class LinearLayers(Event):
    """How many layers have linear attention."""

    count: int


@dataclass(slots=True)
class BackendChosen(Event):
    """The MoE backend that SGLang chose by itself."""

    backend: str


@dataclass(slots=True)
class BackendPrepared(Event):
    """Routed experts of one layer prepared for `backend` (humming, marlin, flashinfer)."""

    backend: str
    layer: str
    detail: str


@dataclass(slots=True)
class MoeGemm(Event):
    """The kind of GEMM that Humming runs for the experts ("indexed" or "grouped")."""

    kind: str


@dataclass(slots=True)
class AttentionBackend(Event):
    """The attention backend that SGLang chose by itself."""

    backend: str


@dataclass(slots=True)
class LinearBackend(Event):
    """Kernels of the linear attention for decode, prefill and verification."""

    decode: str
    prefill: str
    verify: str


@dataclass(slots=True)
class KdaKernels(Event):
    """Classes of the KDA kernels; the name says little on a CPU, where a plugin replaces them."""

    decode: str
    verify: str
    extend: str
    packed_decode: bool


@dataclass(slots=True)
class RopeNative(Event):
    """RoPE without scaling: the native path, as wanted when YaRN is off."""

    text: str


@dataclass(slots=True)
class WeightsBegin(Event):
    """Loading begins. GB as SGLang counts them (GiB)."""

    avail_gb: float


@dataclass(slots=True)
class WeightsLoaded(Event):
    """One model's weights are in memory; with NEXTN the draft's class follows the target's."""

    model_class: str
    seconds: float
    quant: str | None
    fmt: str | None
    avail_gb: float | None
    used_gb: float | None


@dataclass(slots=True)
class HeadQuantized(Event):
    """The LM head was quantized to FP8 at load (our plugin's line and the fork's)."""

    detail: str


@dataclass(slots=True)
class DraftHead(Event):
    """Whether the NEXTN draft works with the target's LM head (our plugin's line)."""

    shared: bool
    detail: str


@dataclass(slots=True)
class PluginLine(Event):
    """Any other line of our plugin."""

    text: str


@dataclass(slots=True)
class PluginLoaded(Event):
    """SGLang loaded, or failed to load, a plugin."""

    name: str
    ok: bool


@dataclass(slots=True)
class MambaPool(Event):
    """State slots of the linear attention, sizes in GB."""

    slots: int
    conv_gb: float
    ssm_gb: float
    intermediate_ssm_gb: float | None
    intermediate_conv_gb: float | None


@dataclass(slots=True)
class KvPool(Event):
    """One KV pool; `gb` is K plus V. `upper_bound`: address space, not yet memory."""

    dtype: str
    tokens: int
    gb: float
    label: str | None
    upper_bound: bool


@dataclass(slots=True)
class PoolsReady(Event):
    """All pools of one worker are allocated."""

    avail_gb: float


@dataclass(slots=True)
class GraphCapture(Event):
    """Begin or end of one graph capture.

    which: "target decode", "target verify", "target prefill", "draft decode", "draft extend".
    """

    which: str
    phase: str
    device: str
    backend: str | None
    tokens_per_req: int | None
    bs: tuple[int, ...] | None
    seconds: float | None
    used_gb: float | None
    avail_gb: float | None


@dataclass(slots=True)
class GraphDisabled(Event):
    """A phase runs without a graph, and why."""

    phase: str
    reason: str


@dataclass(slots=True)
class Limits(Event):
    """What the server can hold: tokens in the pool, requests at once, context length."""

    max_total_tokens: int
    chunked_prefill: int
    max_prefill: int
    max_running: int
    context: int
    avail_gb: float


@dataclass(slots=True)
class StartupTimings(Event):
    """SGLang's own start-up times in seconds."""

    seconds: dict[str, float]


@dataclass(slots=True)
class KernelCompiled(Event):
    """A Triton kernel was compiled while the server was serving already."""

    kernel: str
    seconds: float


@dataclass(slots=True)
class Autotune(Event):
    """FlashInfer autotune runs."""

    cache: str


@dataclass(slots=True)
class ParserDetected(Event):
    """Reasoning and tool-call parser that SGLang suggests for the chat template."""

    reasoning: str | None
    tool_call: str | None


@dataclass(slots=True)
class HttpUp(Event):
    """The HTTP server listens; nothing was generated yet."""

    url: str


@dataclass(slots=True)
class Ready(Event):
    """SGLang's own warm-up request was answered."""


@dataclass(slots=True)
class HttpRequest(Event):
    """One request that was answered."""

    method: str
    path: str
    status: int


def _number(text: str) -> float | int | bool | str:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(slots=True)
class _Batch(Event):
    """Batch lines are by far the most frequent: they are taken apart when first asked."""

    text: str = field(repr=False)
    _values: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def values(self) -> dict[str, Any]:
        """Everything the line holds, by SGLang's own names."""
        if self._values is None:
            pairs = (part.partition(": ") for part in self.text.split(", ")[1:])
            self._values = {name: _number(value) for name, colon, value in pairs if colon}
        return self._values

    def _get(self, name: str, *kinds: type) -> Any:
        value = self.values.get(name)
        return (
            value
            if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
            else None
        )

    @property
    def running(self) -> int | None:
        """Requests in the batch (decode) or running beside it (prefill)."""
        return self._get("#running-req", int)

    @property
    def queued(self) -> int | None:
        return self._get("#queue-req", int)

    @property
    def graph(self) -> bool | None:
        """Whether a captured graph ran; SGLang names it after the device ("cuda", "cpu")."""
        for name, value in self.values.items():
            if name.endswith(" graph") and isinstance(value, bool):
                return value
        return None

    @property
    def full_usage(self) -> float | None:
        """Share of the KV pool in use, 0 to 1."""
        return self._get("full token usage", int, float)

    @property
    def mamba_usage(self) -> float | None:
        """Share of the state slots in use, 0 to 1."""
        return self._get("mamba usage", int, float)


@dataclass(slots=True)
class PrefillBatch(_Batch):
    """One prefill batch."""

    @property
    def new_seqs(self) -> int | None:
        return self._get("#new-seq", int)

    @property
    def new_tokens(self) -> int | None:
        return self._get("#new-token", int)

    @property
    def cached_tokens(self) -> int | None:
        return self._get("#cached-token", int)

    @property
    def tok_s(self) -> float | None:
        """Prompt tokens per second since the last prefill line, idle time included."""
        return self._get("input throughput (token/s)", int, float)


@dataclass(slots=True)
class DecodeBatch(_Batch):
    """One decode report: the last `--decode-log-interval` (40) steps, all requests together."""

    @property
    def full_tokens(self) -> int | None:
        return self._get("#full token", int)

    @property
    def accept_len(self) -> float | None:
        """Tokens kept per verification in the interval, bonus token included; None without
        speculation. Two decimals: a mean of these is not the accept length of a run."""
        return self._get("accept len", int, float)

    @property
    def accept_rate(self) -> float | None:
        """Correct drafts ÷ proposed drafts in the interval; None without speculation."""
        return self._get("accept rate", int, float)

    @property
    def gen_tok_s(self) -> float | None:
        """Generated tokens per second since the last decode line, idle time included."""
        return self._get("gen throughput (token/s)", int, float)


@dataclass(slots=True)
class CacheFlushed(Event):
    """/flush_cache was obeyed."""


@dataclass(slots=True)
class HealthFailed(Event):
    """The server's own health check got no token for `seconds`."""

    seconds: int


@dataclass(slots=True)
class Stopping(Event):
    """The server was asked to stop, or stops because a child failed."""

    text: str


@dataclass(slots=True)
class ChildDied(Event):
    """A worker process ended unexpectedly; `code` is negative for a signal."""

    name: str
    pid: int
    code: int


@dataclass(slots=True)
class Crash(Event):
    """A failure that ends the server, with what to do about it where that is known."""

    reason: str
    remedy: str
    kind: str


# --------------------------------------------------------------------------- one line

_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?)((?: [A-Z][A-Z_]*\d+)*)\] ")
# A progress bar, then the prefix without a line break.
_AFTER_BAR = re.compile(r"[^\[]*\d+%\|[^|]*\| *\d+/\d+ \[[^\]]*\](?=\[\d{4}-)")

_GB = r"(-?[\d.]+) ?GB"


def _optional(text: str | None, kind: Callable[[str], Any] = float) -> Any:
    return None if text is None else kind(text)


def _word(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _numbers(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(int(one) for one in re.findall(r"\d+", text))


def _scalars(text: str) -> dict[str, Any]:
    found = {}
    for name, value in re.findall(
        r"'(\w+)': (None|True|False|-?\d+(?:\.\d+)?(?=[,}])|'[^']*')", text
    ):
        found[name] = ast.literal_eval(value)
    return found


_Maker = Callable[[tuple[int, str, str], re.Match[str]], Event | None]


def _layers(head: tuple[int, str, str], match: re.Match[str]) -> Event:
    return LayerMap(*head, _numbers(match[1]) or ())


def _layout(head: tuple[int, str, str], match: re.Match[str]) -> Event:
    return CheckpointLayout(*head, "mxfp4-experts" if match[1] else match[2], match[0])


def _prepared(head: tuple[int, str, str], match: re.Match[str]) -> Event:
    detail = match[1]
    return BackendPrepared(*head, detail.split()[0].lower(), match[2], detail)


def _graph(head: tuple[int, str, str], match: re.Match[str]) -> Event:
    values = match[4]
    field_of = {
        name: (re.search(pattern, values) or [None, None])[1]
        for name, pattern in {
            "backend": r"backend=(\w+)",
            "tokens": r"num_tokens_per_req=(\d+)",
            "bs": r"(?:bs|num_tokens)=\[([^\]]*)\]",
            "seconds": r"elapsed=([\d.]+) s",
            "used": rf"mem usage={_GB}",
            "avail": rf"avail mem={_GB}",
        }.items()
    }
    return GraphCapture(
        *head,
        match[1],
        match[3],
        match[2],
        field_of["backend"],
        _optional(field_of["tokens"], int),
        _numbers(field_of["bs"]),
        _optional(field_of["seconds"]),
        _optional(field_of["used"]),
        _optional(field_of["avail"]),
    )


def _timings(head: tuple[int, str, str], match: re.Match[str]) -> Event:
    text = match[1]
    seconds = {}
    graphs = re.search(r"cuda_graph=\{([^}]*)\}", text)
    if graphs:
        for name, value in re.findall(r"(\w+)=([\d.]+)", graphs[1]):
            seconds[f"graph {name}"] = float(value)
        text = text.replace(graphs[0], "")
    seconds.update((name, float(value)) for name, value in re.findall(r"(\w+)=([\d.]+)", text))
    return StartupTimings(*head, seconds)


def _crash(head: tuple[int, str, str], match: re.Match[str]) -> Event:
    text = match[0].strip()
    found = crash.explain(text)
    if found is None:
        return Crash(*head, text, "the traceback below says why", "exception")
    return Crash(*head, found.cause, found.remedy, found.kind)


def _pattern(text: str, make: _Maker) -> tuple[re.Pattern[str], _Maker]:
    return re.compile(text, re.S), make


# Message patterns by the first five characters of the message: one look-up rejects other lines.
_KINDS: dict[str, tuple[tuple[re.Pattern[str], _Maker], ...]] = {
    "serve": (_pattern(r"server_args=(\{.*\})\s*$", lambda h, m: ServerArgs(*h, m[1])),),
    "Detec": (
        _pattern(
            r"Detected (?:(mixed checkpoint layout: routed experts are MXFP4)|(\w+) checkpoint)\.",
            _layout,
        ),
    ),
    "Auto-": (
        _pattern(
            r"Auto-detected template features: (.*)",
            lambda h, m: ParserDetected(
                *h, _word(r"reasoning_parser=(\w+)", m[1]), _word(r"tool_call_parser=(\w+)", m[1])
            ),
        ),
        _pattern(
            r"Auto-detected DSV4 routed-expert layout: is_fp4_experts=(True|False)",
            lambda h, m: CheckpointLayout(
                *h, "mxfp4-experts" if m[1] == "True" else "fp8-experts", m[0]
            ),
        ),
    ),
    "atten": (_pattern(r"attention type of layers: ?\[([\d, ]*)\]", _layers),),
    "linea": (_pattern(r"linear_layer_nums=(\d+)", lambda h, m: LinearLayers(*h, int(m[1]))),),
    "Baili": (
        _pattern(
            r"Bailing V3 mixed FP8/MXFP4 checkpoint: moe_runner_backend=(\w+)",
            lambda h, m: BackendChosen(*h, m[1]),
        ),
    ),
    "Prepa": (
        _pattern(r"Preparing [^(]*experts for (.+?)(?: backend)? \(layer: ([^)]*)\)", _prepared),
    ),
    "Using": (_pattern(r"Using (\w+) gemm for humming moe", lambda h, m: MoeGemm(*h, m[1])),),
    "Atten": (
        _pattern(
            r"Attention backend not specified\. Use (\w+) backend by default",
            lambda h, m: AttentionBackend(*h, m[1]),
        ),
    ),
    "Linea": (
        _pattern(
            r"Linear attention kernel backend: decode=(\w+), prefill=(\w+), verify=(\w+)",
            lambda h, m: LinearBackend(*h, m[1], m[2], m[3]),
        ),
    ),
    "KDA k": (
        _pattern(
            r"KDA kernel dispatcher: decode=(\w+), verify=(\w+), extend=(\w+)"
            r" packed_decode=(True|False)",
            lambda h, m: KdaKernels(*h, m[1], m[2], m[3], m[4] == "True"),
        ),
    ),
    "rope_": (
        _pattern(
            r"rope_scaling missing 'factor', defaulting to 1\.0",
            lambda h, m: RopeNative(*h, m.string[m.start() :].rstrip()),
        ),
    ),
    "Load ": (
        _pattern(
            rf"Load weight begin\. avail mem={_GB}", lambda h, m: WeightsBegin(*h, float(m[1]))
        ),
        _pattern(
            r"Load weight end\. ?elapsed=([\d.]+) s, type=(\w+)(?:, quant=([^,]+))?"
            rf"(?:, fmt=([^,]+))?(?:.*?avail mem={_GB})?(?:, mem usage={_GB})?",
            lambda h, m: WeightsLoaded(
                *h, m[2], float(m[1]), m[3], m[4], _optional(m[5]), _optional(m[6])
            ),
        ),
    ),
    "Onlin": (
        _pattern(
            r"Online FP8 quantization enabled for lm_head(.*)",
            lambda h, m: HeadQuantized(*h, m[1].strip(" .:\n")),
        ),
    ),
    "The N": (
        _pattern(
            r"The NEXTN draft uses the target's lm_head(.*)",
            lambda h, m: DraftHead(*h, True, m[1].strip(" .()\n")),
        ),
        _pattern(
            r"The NEXTN draft's lm_head is not the target's: (.*)",
            lambda h, m: DraftHead(*h, False, m[1].strip()),
        ),
    ),
    "spark": (_pattern(r"(sparkling.*)", lambda h, m: PluginLine(*h, m[1].strip())),),
    "plugi": (_pattern(r"(plugin: .*)", lambda h, m: PluginLine(*h, m[1].strip())),),
    "Loade": (
        _pattern(r"Loaded plugin (\S+) from group", lambda h, m: PluginLoaded(*h, m[1], True)),
    ),
    "Faile": (
        _pattern(
            r"Failed to (?:load|execute) plugin (\S+)",
            lambda h, m: PluginLoaded(*h, m[1].rstrip(".:"), False),
        ),
    ),
    "Mamba": (
        _pattern(
            rf"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), conv_state size: {_GB},"
            rf" ssm_state size: {_GB}(?:,? intermediate_ssm_state_cache size: {_GB})?"
            rf"(?:,? intermediate_conv_window_cache size: {_GB})?",
            lambda h, m: MambaPool(
                *h, int(m[1]), float(m[2]), float(m[3]), _optional(m[4]), _optional(m[5])
            ),
        ),
    ),
    "Memor": (
        _pattern(rf"Memory pool end\. avail mem={_GB}", lambda h, m: PoolsReady(*h, float(m[1]))),
    ),
    "Captu": (_pattern(r"Capture ((?:target|draft) \w+) (\w+) graph (begin|end)\.(.*)", _graph),),
    "Disab": (
        _pattern(
            r"Disable (\w+) CUDA graph because (.*)",
            lambda h, m: GraphDisabled(*h, m[1], m[2].strip()),
        ),
    ),
    "max_t": (
        _pattern(
            r"max_total_num_tokens=(\d+), chunked_prefill_size=(-?\d+), max_prefill_tokens=(\d+),"
            rf" max_running_requests=(\d+), context_len=(\d+), available_\w+_mem={_GB}",
            lambda h, m: Limits(
                *h, int(m[1]), int(m[2]), int(m[3]), int(m[4]), int(m[5]), float(m[6])
            ),
        ),
    ),
    "Engin": (_pattern(r"Engine startup timings \(s\): (.*)", _timings),),
    "Trito": (
        _pattern(
            r"Triton kernel '([^']+)' took ([\d.]+) s to compile after serving started",
            lambda h, m: KernelCompiled(*h, m[1], float(m[2])),
        ),
    ),
    "Runni": (
        _pattern(
            r"Running FlashInfer autotune with cache: (.*)",
            lambda h, m: Autotune(*h, m[1].strip()),
        ),
    ),
    "INFO:": (
        _pattern(
            r'INFO: +\S+ - "([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})',
            lambda h, m: HttpRequest(*h, m[1], m[2], int(m[3])),
        ),
        _pattern(r"INFO: +Uvicorn running on (\S+)", lambda h, m: HttpUp(*h, m[1])),
    ),
    "The s": (_pattern(r"The server is fired up and ready to roll!\s*$", lambda h, m: Ready(*h)),),
    "Prefi": (
        _pattern(
            r"Prefill batch(?: \[\d+\])?, #", lambda h, m: PrefillBatch(*h, m.string[m.start() :])
        ),
    ),
    "Decod": (
        _pattern(
            r"Decode batch(?: \[\d+\])?, #", lambda h, m: DecodeBatch(*h, m.string[m.start() :])
        ),
    ),
    "Cache": (_pattern(r"Cache flushed successfully!", lambda h, m: CacheFlushed(*h)),),
    "Healt": (
        _pattern(
            r"Health check failed\. Server couldn't get a response from detokenizer for last (\d+)",
            lambda h, m: HealthFailed(*h, int(m[1])),
        ),
    ),
    "SIGTE": (_pattern(r"SIGTERM received.*", lambda h, m: Stopping(*h, m[0].strip())),),
    "SIGQU": (_pattern(r"SIGQUIT received.*", lambda h, m: Stopping(*h, m[0].strip())),),
    "Recei": (
        _pattern(
            r"Received sigquit from a child process.*", lambda h, m: Stopping(*h, m[0].strip())
        ),
    ),
    "Grace": (_pattern(r"Gracefully exiting\.\.\.", lambda h, m: Stopping(*h, m[0])),),
    "Subpr": (
        _pattern(
            r"Subprocess (\w+) \(pid=(\d+)\) crashed with exit code (-?\d+)",
            lambda h, m: ChildDied(*h, m[1], int(m[2]), int(m[3])),
        ),
    ),
    "ERROR": (_pattern(r"ERROR: +\[Errno \d+\].*", _crash),),
    "Sched": (_pattern(r"Scheduler hit an exception", _crash),),
    "Token": (_pattern(r"TokenizerManager hit an exception", _crash),),
    "Deto": (),
    "Initi": (_pattern(r"Initialization failed\. warmup error", _crash),),
}
# Messages whose first five characters vary.
_KV = re.compile(
    r"(?:(\w[\w ]*?) )?KV Cache (is allocated|VA upper bound)\. dtype: (\S+), #tokens: (\d+), "
    rf"(?:KV size: {_GB}|K size: {_GB}, V size: {_GB})"
)


def _message(head: tuple[int, str, str], text: str) -> Event | None:
    for pattern, make in _KINDS.get(text[:5], ()):
        match = pattern.match(text)
        if match:
            return make(head, match)
    if "KV Cache " in text[:40]:
        match = _KV.match(text)
        if match:
            size = match[5] or match[6]
            total = float(size) + (float(match[7]) if match[7] else 0.0)
            return KvPool(
                *head, match[3], int(match[4]), total, match[1], match[2] != "is allocated"
            )
    return None


def parse_line(line: str, line_no: int = 1) -> Event | None:
    """The event on one line, or None for a line of no known kind."""
    if "\r" in line:
        # A progress bar redraws itself: what counts follows its last redraw.
        line = line.rstrip("\r")
        line = line[line.rfind("\r") + 1 :]
    if not line.startswith("[2"):
        bar = _AFTER_BAR.match(line)
        if bar is None:
            return _unstamped(line, line_no)
        line = line[bar.end() :]
    match = _PREFIX.match(line)
    if match is None:
        return None
    return _message((line_no, match[1], match[2].strip()), line[match.end() :])


# Lines without a prefix that end a server: what Python and argparse print.
_UNSTAMPED = re.compile(
    r"(?:\w[\w ]*: error: |(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Refused)\b|sparkling-sglang |/\S+: No module named |[^ ]*python\S*: )"
)


def _unstamped(line: str, line_no: int) -> Event | None:
    if not _UNSTAMPED.match(line):
        return None
    if line.startswith("sparkling-sglang "):
        return PluginLine(line_no, "", "", line.rstrip())
    found = crash.explain(line)
    if found is not None:
        return Crash(line_no, "", "", found.cause, found.remedy, found.kind)
    return None


# --------------------------------------------------------------------------- many lines

_BLOCK = 1 << 20
_STEP = 1 << 26  # what a follower takes in at once
_LINE_LIMIT = 1 << 24  # a longer "line" is not one of SGLang's


def _blocks(path: Path, offset: int) -> Iterator[list[bytes]]:
    with open(path, "rb") as file:
        # Up to its present size: a file that grows, or a device, must not make this endless.
        size = os.fstat(file.fileno()).st_size
        left = size - file.seek(offset if offset <= size else 0)
        rest = b""
        while block := file.read(min(_BLOCK, left)):
            left -= len(block)
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            if len(rest) > _LINE_LIMIT:
                lines.append(rest)
                rest = b""
            yield lines
        if rest:
            yield [rest]


_HEADS = frozenset(head.encode() for head in _KINDS)


_PLAIN = re.compile(
    rb"\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\] "
    rb"(?:(Decode batch, #)|(Prefill batch, #)"
    rb'|INFO: +\S+ - "([A-Z]+) (\S+) HTTP/[\d.]+" (\d\d\d))'
)


def _parse_block(lines: list[bytes], first: int) -> Iterator[Event]:
    heads, plain = _HEADS, _PLAIN.match
    for number, raw in enumerate(lines, first):
        # Short cuts for what logs consist of; `parse_line` gives the same answers. A stamp
        # without milliseconds or rank is 22 bytes long.
        if raw[:2] == b"[2":
            if raw[20:22] == b"] ":
                if raw[22:27] not in heads:
                    if b"KV Ca" not in raw[22:62]:
                        continue
                elif (match := plain(raw)) and b"\r" not in raw:
                    text = raw.decode("utf-8", "replace")
                    if match[1]:
                        yield DecodeBatch(number, text[1:20], "", text[22:])
                    elif match[2]:
                        yield PrefillBatch(number, text[1:20], "", text[22:])
                    else:
                        method, path, status = match.group(3, 4, 5)
                        yield HttpRequest(
                            number,
                            text[1:20],
                            "",
                            method.decode(),
                            path.decode("utf-8", "replace"),
                            int(status),
                        )
                    continue
        elif (not raw or raw[:1] == b" ") and b"][2" not in raw:
            continue
        event = parse_line(raw.decode("utf-8", "replace"), number)
        if event is not None:
            yield event


def parse(source: str | os.PathLike[str] | Iterable[str], offset: int = 0) -> Iterator[Event]:
    """The events of a log file, or of lines.

    Args:
        source: a path, or an iterable of lines.
        offset: where to begin in the file, in bytes; line numbers count from there. An offset
            beyond the end means that the file was cut: everything in it is new.
    """
    if isinstance(source, (str, os.PathLike)):
        number = 1
        for lines in _blocks(Path(source), offset):
            yield from _parse_block(lines, number)
            number += len(lines)
        return
    for number, line in enumerate(source, 1):
        event = parse_line(line.rstrip("\n"), number)
        if event is not None:
            yield event


def split_lines(text: str) -> list[str]:
    """Lines as a reader would see them: of a progress bar only its last state."""
    lines = []
    for line in text.split("\n"):
        line = line.rstrip("\r")
        lines.append(line[line.rfind("\r") + 1 :])
    if lines and not lines[-1]:
        lines.pop()
    return lines


class Follower:
    """Reads what a log file gains. Survives its truncation and its replacement.

    Args:
        path: the file; it need not exist yet.
        offset: where this start began, in bytes: nothing before it is ever read.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = Path(path)
        self._offset = offset
        self._file_id: tuple[int, int] | None = None
        self._rest = b""
        self._line_no = 0

    def lines(self) -> list[str]:
        """Complete lines that came since the last call."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                file_id = (status.st_dev, status.st_ino)
                moved = self._file_id is not None and file_id != self._file_id
                if moved or status.st_size < self._offset:
                    # Another file, or the same one cut: all that is in it came afterwards.
                    self._offset, self._rest = 0, b""
                self._file_id = file_id
                file.seek(self._offset)
                data = file.read(min(status.st_size - self._offset, _STEP))
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def poll(self) -> list[Event]:
        """Events that came since the last call."""
        events = []
        for line in self.lines():
            self._line_no += 1
            event = parse_line(line, self._line_no)
            if event is not None:
                events.append(event)
        return events
