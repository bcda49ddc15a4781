"""Why a server failed: the lines SGLang leaves behind, turned into a cause and a remedy.

Each rule names one known failure by text that only this failure prints. Rules are ordered from
the specific to the general, and the first that matches anywhere in the lines wins, not the last
line of the log: SGLang often adds advice of its own that points elsewhere. (When a draft head is
handed an FP8 tensor without its scales, graph capture fails and SGLang blames the memory fraction.)
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# A request that is logged (--log-requests) quotes its prompt: it proves nothing.
_STAMPED = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] (.*)", re.S)
_QUOTES = re.compile(r"(?:Receive|Finish)\b[^:]*: ?obj=|\{.*\"(?:request\.|event\")", re.S)
# Lines that tell of failures which SGLang expects and goes on from.
_HARMLESS = ("server_args=", "Ignore import error when loading", "OpenAI Responses API")
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Refused)): (.+)"
)


@dataclass(frozen=True)
class Diagnosis:
    """What happened, what to do, and the log line that says so."""

    kind: str
    cause: str
    remedy: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


@dataclass(frozen=True)
class _Rule:
    kind: str
    pattern: re.Pattern[str]
    cause: str | Callable[[re.Match[str]], str]
    remedy: str | Callable[[re.Match[str]], str]

    def apply(self, match: re.Match[str], line: str) -> Diagnosis:
        cause, remedy = (
            part(match) if callable(part) else match.expand(part)
            for part in (self.cause, self.remedy)
        )
        return Diagnosis(self.kind, cause, remedy, line.strip())


def _rule(kind: str, pattern: str, cause: object, remedy: object) -> _Rule:
    return _Rule(kind, re.compile(pattern), cause, remedy)  # type: ignore[arg-type]


def _kv_remedy(match: re.Match[str]) -> str:
    wanted = match.group(2)
    if wanted is None:
        return "raise --mem-fraction-static a little or shorten --context-length"
    return (
        f"SGLang asks for --mem-fraction-static above {wanted}; on a machine with one memory pool "
        "stay at or below 0.75 and rather lower --max-mamba-cache-size or --max-running-requests"
    )


RULES: tuple[_Rule, ...] = (
    _rule(
        # Our own watchdog (memwatch.sentence): whatever else the log says came of it.
        "memory-guard",
        r"^\[sparkling\] memory: (.+: the server was ended before the machine ran out.*)$",
        r"\1",
        "stop what else uses memory and start it again",
    ),
    _rule(
        # Our plugin's own refusals: one sentence, the remedy after its last colon.
        "plugin-refused",
        r"(?:sparkling_sglang: error|\b(?:(?:Draft)?Head|Clamp)Error): (.+): ([^:]+)\.\s*$",
        r"\1",
        r"\2",
    ),
    _rule(
        "fp8-draft-head",
        r"\"\w+\" not implemented for 'Float8_e4m3fn'",
        "the draft model was given the FP8 LM-head tensor without its scales and method, which stock "
        "SGLang does, and torch cannot multiply with the bare tensor",
        "let the draft take over the target's whole head module (the sparkling-sglang plugin does, "
        "unless SPARKLING_SHARE_HEAD=0 forbids it) or start without NEXTN; the memory fraction that "
        "SGLang names has nothing to do with it",
    ),
    _rule(
        "draft-head",
        r"The NEXTN draft's lm_head is not the target's: (.+?), so its drafts(?:.*(unset SPARKLING_TRAP))?",
        r"the NEXTN draft does not use the target's LM head (\1)",
        lambda match: (
            f"{match[2]}, which does this on purpose"
            if match[2]
            else "leave SPARKLING_SHARE_HEAD unset or at 1, or start without NEXTN"
        ),
    ),
    _rule(
        "plugin-version",
        r"sparkling-sglang \S+: found SGLang (\S+), knows ([^;]+); nothing patched",
        r"the sparkling-sglang plugin does not know SGLang \1 (it knows \2) and patched nothing",
        "make the server environment again (scripts/setup.sh)",
    ),
    _rule(
        "plugin-broken",
        r"Failed to (?:load|execute) plugin (\S*sparkling\S*)",
        r"SGLang could not load the plugin \1",
        "make the server environment again (scripts/setup.sh)",
    ),
    _rule(
        "kv-memory",
        r"Loaded weights leave no GPU memory for the KV cache under "
        r"--mem-fraction-static=(\d+(?:\.\d+)?)"
        r"(?:\. Raise --mem-fraction-static above (\d+(?:\.\d+)?))?",
        r"at --mem-fraction-static=\1 the weights leave no memory for the KV cache",
        _kv_remedy,
    ),
    _rule(
        "kv-memory",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the memory fraction leaves no room for the caches",
        "raise --mem-fraction-static a little or lower --max-mamba-cache-size",
    ),
    _rule(
        "port",
        r"\[Errno 98\] .*?\('?([^',]+)'?, (\d+)\)|[Aa]ddress already in use",
        lambda m: (
            f"port {m.group(2)} on {m.group(1)} is already in use"
            if m.group(2)
            else "a port the server needs is already in use"
        ),
        "stop what listens there (`sparkling stop` for a server of ours) or choose another port",
    ),
    _rule(
        "disk-full",
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        "the disk is full",
        "free some space (runs/ and caches are safe to delete) and start again",
    ),
    _rule(
        "no-module",
        r"No module named '?sgl_kernel'?|ModuleNotFoundError: .*sgl_kernel",
        "the module sgl_kernel is missing from the server environment",
        "make the server environment again (scripts/setup.sh)",
    ),
    _rule(
        "no-sglang",
        r"No module named '?sglang'?(?:\.\w+)*'?$|Error while finding module specification for 'sglang",
        "SGLang is not installed in the server environment",
        "make the server environment (scripts/setup.sh)",
    ),
    _rule(
        "torchvision",
        r"operator torchvision::nms does not exist",
        "torchvision was built for another torch than the one in the server environment",
        "make the server environment again (scripts/setup.sh)",
    ),
    _rule(
        "nvml",
        r"NVMLError_NotSupported",
        "the driver does not report the memory clock that this humming-kernels version asks for",
        "use humming-kernels 0.1.11 or newer in the server environment",
    ),
    _rule(
        "flashinfer-version",
        r"flashinfer[-_]cubin version|FLASHINFER_DISABLE_VERSION_CHECK",
        "the flashinfer packages have different versions",
        "install flashinfer-cubin in the version of flashinfer-python",
    ),
    _rule(
        "extra-buffer",
        r"extra_buffer (?:requires|is not supported)",
        "the state cache strategy extra_buffer does not work on this platform",
        "start with --mamba-radix-cache-strategy no_buffer and --disable-overlap-schedule",
    ),
    _rule(
        "replay-ring",
        r"[Rr]eplay[Ss][Ss][Mm].*(?:ring|cache[_-]len)",
        "the replay ring of the linear attention is shorter than the speculation window needs",
        "raise --linear-replayssm-cache-len (32 for DSpark)",
    ),
    _rule(
        "spec-backend",
        r"EAGLE is not supported in (\w+) attention backend (\w+)",
        r"speculation does not work with the attention backend \2",
        "use another attention backend, or a stage without NEXTN",
    ),
    _rule(
        "parallel-leaf",
        r"'enable_dp_lm_head' is a parallel config leaf",
        "this SGLang build reads enable_dp_lm_head from the wrong place",
        "use SGLang 0.5.23 (scripts/setup.sh)",
    ),
    _rule(
        "safetensors",
        r"SafetensorError: Error while deserializing header: (.+)",
        r"a safetensors file of the checkpoint is damaged or cut short (\1)",
        "download or build the checkpoint again",
    ),
    _rule(
        "no-weights",
        r"Cannot find any model weights with|Error no file named .*safetensors",
        "the checkpoint's folder holds no weights",
        "download or build the checkpoint",
    ),
    _rule(
        "no-checkpoint",
        r"(?:Repo id must be in the form|is not a local folder and is not a valid model identifier"
        r"|Incorrect path_or_model_id)"
        r"(?:.*?: ?'(/[^']+)')?",
        lambda m: f"there is no checkpoint at {m.group(1) or 'the given path'}",
        "download or build it, or point SPARKLING_MODEL at it",
    ),
    _rule(
        "no-config",
        r"Unrecognized model in (\S+?)\. Should have a `model_type`"
        r"|(?:does not appear to have a file named|Can't load the configuration of).*",
        "the checkpoint's folder has no usable config.json",
        "download or build the checkpoint again",
    ),
    _rule(
        "flag",
        r"error: (unrecognized arguments: .+|argument [^:]+: .{0,120})",
        r"SGLang refused its command line: \1",
        "correct the recipe (`sparkling render` shows the command)",
    ),
    _rule(
        "context",
        r"context_length \((\d+)\) is greater than the derived",
        r"--context-length \1 is longer than the checkpoint allows",
        "lower it, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
    ),
    _rule(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected",
        "no NVIDIA GPU is visible",
        "check nvidia-smi, or use the cpu lane (SPARKLING_LANE=cpu)",
    ),
    _rule(
        "oom-compiler",
        r"(?:cudafe\+\+|nvcc|cicc|ptxas).*(?:oom-killer|Killed)",
        "a kernel compiler ran out of memory while the model was resident",
        "stop the server and compile the kernels first (notebook 30_kernels)",
    ),
    _rule(
        "oom-capture",
        r"[Cc]apture (?:\w+ )?(?:cuda|CUDA) graph failed: (?:CUDA out of memory|.*OutOfMemory)",
        "the GPU ran out of memory while the CUDA graphs were captured",
        "lower --mem-fraction-static (0.75 to 0.70, say)",
    ),
    _rule(
        "oom",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory"
        r"|can't allocate memory|^MemoryError|DefaultCPUAllocator",
        "memory ran out",
        "stop what else uses it, or lower --mem-fraction-static",
    ),
    _rule(
        "proxy",
        r"ProxyError|Cannot connect to proxy|Unable to connect to proxy",
        "the server's own warm-up request was sent to a proxy",
        "add 127.0.0.1 and localhost to NO_PROXY",
    ),
    _rule(
        "no-module",
        r"^(?:ModuleNotFoundError|ImportError): No module named '([\w.]+)'",
        r"the module \1 is missing from the server environment",
        "make the server environment again (scripts/setup.sh)",
    ),
    _rule(
        "worker",
        r"Subprocess (\w+?)_?\d* \(pid=(\d+)\) crashed with exit code -9\b",
        r"the \1 process (pid \2) was killed",
        "if nobody did it by hand, the machine ran out of memory: stop what else uses it",
    ),
    _rule(
        "health",
        r"Health check failed\. Server couldn't get a response from detokenizer",
        "the server accepts requests but generates nothing any more",
        "stop it and start it again",
    ),
)

# One search that rejects nearly every line before the rules are tried.
_ANY = re.compile("|".join(f"(?:{rule.pattern.pattern})" for rule in RULES))


def _message(line: str) -> str | None:
    """The text of a line that may be believed, or None: for one that quotes a request, one that
    tells of a failure SGLang expects, and one of source code in a traceback."""
    if line.startswith("  "):
        return None
    stamped = _STAMPED.match(line)
    text = stamped.group(1) if stamped else line
    return None if _QUOTES.match(text) or text.startswith(_HARMLESS) else text


def explain(line: str) -> Diagnosis | None:
    """The first rule that one line matches."""
    text = _message(line)
    if text is None or not _ANY.search(text):
        return None
    for rule in RULES:
        match = rule.pattern.search(text)
        if match:
            return rule.apply(match, line)
    return None


def diagnose(
    lines: Iterable[str], code: int | None = None, *, out_of_memory: bool = False
) -> Diagnosis | None:
    """The cause of a failure.

    Args:
        lines: the log of the failed start, of this start only.
        code: the main process's exit code, negative for a signal (as `subprocess` has it).
        out_of_memory: whether the kernel's out-of-memory killer struck in the meantime.

    Returns:
        A diagnosis, or None if neither the lines nor the code explain anything.
    """
    best: tuple[int, Diagnosis] | None = None
    last_exception = None
    for line in lines:
        text = _message(line)
        if text is None:
            continue
        if _ANY.search(text):
            for rank, rule in enumerate(RULES):
                if best is not None and rank >= best[0]:
                    break
                match = rule.pattern.search(text)
                if match:
                    best = (rank, rule.apply(match, line))
                    break
        match = _EXCEPTION.match(text)
        if match:
            last_exception = (match, line)
    killed = code is not None and code == -signal.SIGKILL
    if best is not None and best[1].kind == "memory-guard":
        return best[1]
    if out_of_memory and (killed or best is None or best[1].kind in ("worker", "oom")):
        return Diagnosis(
            "oom-killer",
            "the kernel ended the server because the machine ran out of memory",
            "stop what else uses memory, or lower --mem-fraction-static",
            best[1].line if best else "",
        )
    if best is not None:
        return best[1]
    if last_exception is not None:
        match, line = last_exception
        return Diagnosis(
            "exception",
            f"SGLang raised {match.group(1).rsplit('.', 1)[-1]}: {match.group(2).strip()[:200]}",
            "the log has the whole traceback",
            line.strip(),
        )
    return explain_exit(code)


def explain_exit(code: int | None) -> Diagnosis | None:
    """What an exit code alone says; None for a plain non-zero exit, which says nothing."""
    if code is None or code >= 0:
        return None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": "if nobody did it by hand, the machine ran out of memory: stop what else uses it",
        "SIGILL": "the installed torch needs CPU instructions this machine does not have",
        "SIGSEGV": "native code crashed; the log's last lines say where",
        "SIGBUS": "shared memory ran out: free /dev/shm, or give the container more of it",
    }.get(name, "the log's last lines may say who sent it")
    return Diagnosis("signal", f"the server was killed by {name}", hint)
