"""What a failed server's log is taken to mean: real logs of real failures, and known texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkling import log
from sparkling.crash import RULES, Diagnosis, diagnose, explain

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
STAMP = "[2026-01-01 00:00:00] "
# SGLang's own advice, printed whatever made the capture fail.
ADVICE = """Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)"""


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_bytes().decode().split("\n")


def found(text: str, code: int | None = 1, **more: bool) -> Diagnosis:
    diagnosis = diagnose(text.split("\n"), code, **more)
    assert diagnosis is not None
    return diagnosis


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("crash-flag", "flag", "unrecognized arguments: --no-such-flag 3"),
        ("crash-choice", "flag", "invalid choice: 'hummingbird'"),
        ("crash-missing", "no-checkpoint", "no checkpoint at /models/nowhere"),
        ("crash-noconf", "no-config", "no usable config.json"),
        ("crash-extra", "extra-buffer", "extra_buffer"),
        ("crash-trunc", "safetensors", "cut short (incomplete metadata, file not fully covered)"),
        ("crash-port", "port", "port 30421 on 127.0.0.1 is already in use"),
        # A full-size server on an H200, SPARKLING_FP8_LM_HEAD=1 with SPARKLING_SHARE_HEAD=0.
        ("crash-fp8-draft-head", "fp8-draft-head", "without its scales and method"),
    ],
)
def test_real_failures(name: str, kind: str, words: str) -> None:
    diagnosis = diagnose(lines_of(name), 1)
    assert diagnosis is not None
    assert diagnosis.kind == kind
    assert words in diagnosis.cause
    assert diagnosis.remedy and "\n" not in str(diagnosis)
    assert diagnosis.line in "\n".join(lines_of(name))


@pytest.mark.parametrize(
    "name",
    ["cpu-nextn", "cpu-nospec", "h200-humming", "h200-humming-fp8-head", "h200-humming-fp8-nextn"],
)
def test_a_healthy_log_is_not_diagnosed(name: str) -> None:
    healthy = [line for line in lines_of(name) if "crashed with exit code" not in line]
    assert diagnose(healthy) is None


def test_the_real_fp8_draft_head_is_told_in_its_events_and_against_sglangs_advice() -> None:
    lines = lines_of("crash-fp8-draft-head")
    assert any(line.startswith("1. set --mem-fraction-static") for line in lines)
    events = list(log.parse(lines))
    (shared,) = [e for e in events if isinstance(e, log.DraftHead)]
    assert not shared.shared and "it lacks the scales" in shared.detail
    last = [e for e in events if isinstance(e, log.Crash)][-1]
    assert last.kind == "fp8-draft-head" and "nothing to do with it" in last.remedy


def test_the_fp8_draft_head_is_not_blamed_on_memory() -> None:
    text = (
        f"{STAMP}Capture draft decode CUDA graph begin. backend=full\n"
        f"{STAMP}Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "Exception: Capture cuda graph failed: \"addmm_cuda\" not implemented for 'Float8_e4m3fn'\n"
        + ADVICE
    )
    diagnosis = found(text)
    assert diagnosis.kind == "fp8-draft-head"
    assert "without its scales and method, which stock SGLang does" in diagnosis.cause
    assert "whole head module" in diagnosis.remedy and "SPARKLING_SHARE_HEAD=0" in diagnosis.remedy
    assert "memory fraction that SGLang names has nothing to do with it" in diagnosis.remedy
    # The plugin saw it coming, where it was told to let the draft be: still the same cause.
    warned = (
        f"{STAMP}The NEXTN draft's lm_head is not the target's: it lacks the scales of the quantized "
        "weight, so its drafts would not be accepted: leave SPARKLING_SHARE_HEAD unset or at 1.\n"
    )
    assert found(warned + text) == diagnosis
    # By itself it names the switch that did it.
    assert "SPARKLING_SHARE_HEAD" in found(warned).remedy
    trapped = warned.partition("leave SPARKLING")[0] + "unset SPARKLING_TRAP, which does this.\n"
    assert found(trapped).kind == "draft-head"
    assert found(trapped).remedy.startswith("unset SPARKLING_TRAP")
    # One event of the log, too, beside SGLang's own sentence about the exception.
    told = [e for e in log.parse(text.split("\n")) if isinstance(e, log.Crash)]
    assert "fp8-draft-head" in {e.kind for e in told}
    # The same on the CPU, where torch names another operation; and after a memory line.
    cpu = (
        text.replace("addmm_cuda", "addmm_impl_cpu_")
        + "\ntorch.OutOfMemoryError: CUDA out of memory."
    )
    assert found(cpu).kind == "fp8-draft-head"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2 GiB\n" + ADVICE,
            "oom-capture",
            "while the CUDA graphs were captured",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "oom", "memory ran out"),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under "
            "--mem-fraction-static=0.65. Raise --mem-fraction-static above 0.712 (minimum viable",
            "kv-memory",
            "--mem-fraction-static=0.65 the weights leave no memory",
        ),
        ("ModuleNotFoundError: No module named 'sgl_kernel'", "no-module", "sgl_kernel"),
        ("ModuleNotFoundError: No module named 'einops'", "no-module", "einops"),
        ("/v/bin/python: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang')", "no-sglang", "not installed"),
        ("/v/bin/python: No module named sglang", "no-sglang", "not installed"),
        ("pynvml.NVMLError_NotSupported: Not Supported", "nvml", "memory clock"),
        ("AssertionError: extra_buffer requires platform support for Mamba cache", "extra-buffer", "extra_buffer"),
        ("sparkling-sglang 0.1.0: found SGLang 0.6.0, knows 0.5.23; nothing patched.", "plugin-version", "does not know SGLang 0.6.0 (it knows 0.5.23)"),
        (STAMP + "Failed to load plugin sparkling from group sglang.srt.plugins", "plugin-broken", "sparkling"),
        ("OSError: [Errno 28] No space left on device", "disk-full", "disk is full"),
        ("ValueError: EAGLE is not supported in decode attention backend torch_native", "spec-backend", "torch_native"),
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision", "torchvision"),
        ("AttributeError: 'enable_dp_lm_head' is a parallel config leaf, not live topology", "parallel-leaf", "enable_dp_lm_head"),
        (STAMP + "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 31000): address already in use", "port", "31000"),
        ("OSError: [Errno 98] Address already in use", "port", "already in use"),
        (STAMP + "Subprocess scheduler_0 (pid=77) crashed with exit code -9. Triggering", "worker", "scheduler process (pid 77) was killed"),
        ("requests.exceptions.ProxyError: HTTPConnectionPool(host='127.0.0.1', port=9)", "proxy", "proxy"),
        (STAMP + "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.", "health", "generates nothing"),
        ("RuntimeError: No CUDA GPUs are available", "no-gpu", "no NVIDIA GPU"),
        ("sglang.head.HeadNotShared: The NEXTN draft's lm_head is not the target's: dtype bfloat16, so its drafts would not be accepted", "draft-head", "dtype bfloat16"),
    ],
)  # fmt: skip
def test_known_texts(text: str, kind: str, words: str) -> None:
    diagnosis = found(text)
    assert (diagnosis.kind, words in diagnosis.cause) == (kind, True), diagnosis
    assert explain(text.split("\n")[0]) == diagnosis


def test_kv_memory_passes_on_what_sglang_asks_for() -> None:
    text = (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under "
        "--mem-fraction-static=0.65. Raise --mem-fraction-static above 0.712 (minimum"
    )
    assert "above 0.712" in found(text).remedy


@pytest.mark.parametrize(
    "line",
    [
        STAMP + "Receive: obj=GenerateReqInput(text='torch.OutOfMemoryError: CUDA out of memory')",
        STAMP + "Finish: obj=GenerateReqInput(text='x'), out={'text': 'No space left on device'}",
        STAMP + "Receive OpenAI: obj={'messages': \"ModuleNotFoundError: No module named 'sgl_kernel'\"}",
        '{"event": "request.received", "obj": {"text": "address already in use"}}',
        STAMP + "server_args={'x': 'CUDA out of memory'}",
        STAMP + "Ignore import error when loading sglang.srt.models.x: No module named 'cutlass'",
        STAMP + "OpenAI Responses API (/v1/responses) disabled: init failed (ModuleNotFoundError: No module named 'openai_harmony')",
    ],
)  # fmt: skip
def test_case_15_quoted_and_harmless_lines_are_not_diagnosed(line: str) -> None:
    assert diagnose([line], 1) is None
    assert explain(line) is None


def test_source_code_in_a_traceback_is_not_diagnosed() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "    raise OSError(\"No module named 'sgl_kernel'\")  # or: No space left on device\n"
        "ZeroDivisionError: division by zero"
    )
    assert found(text).kind == "exception"


def test_the_specific_rule_wins_wherever_it_stands() -> None:
    kernel = "ModuleNotFoundError: No module named 'sgl_kernel'"
    worker = STAMP + "Subprocess scheduler_0 (pid=7) crashed with exit code -9."
    for order in ([kernel, worker], [worker, kernel]):
        assert diagnose(order, 1).kind == "no-module"


def test_without_a_rule_the_last_exception_is_told() -> None:
    text = "KeyError: 'a'\n\nDuring handling\n\nmy.mod.WeirdError: it went wrong"
    diagnosis = found(text)
    assert (diagnosis.kind, diagnosis.cause) == (
        "exception",
        "SGLang raised WeirdError: it went wrong",
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "SIGKILL"),
        (-11, "SIGSEGV"),
        (-4, "SIGILL"),
        (-7, "SIGBUS"),
        (-64, "signal 64"),
        (-65, "signal 65"),
    ],
)
def test_a_signal_is_named(code: int, words: str) -> None:
    diagnosis = found("nothing of interest", code)
    if code != -64:
        assert words in diagnosis.cause
    assert diagnosis.kind == "signal"


@pytest.mark.parametrize("code", [None, 0, 1, 2])
def test_an_exit_code_alone_says_nothing(code: int | None) -> None:
    assert diagnose(["hello"], code) is None
    assert diagnose([], code) is None


def test_the_kernels_out_of_memory_killer_is_named() -> None:
    assert found("x", -9, out_of_memory=True).kind == "oom-killer"
    worker = STAMP + "Subprocess scheduler_0 (pid=7) crashed with exit code -9."
    assert found(worker, -9, out_of_memory=True).kind == "oom-killer"
    stalled = (
        STAMP + "Health check failed. Server couldn't get a response from detokenizer for last 20 s"
    )
    assert found(stalled, -9, out_of_memory=True).kind == "oom-killer"
    assert found(stalled, 1, out_of_memory=True).kind == "health"
    # It may have struck elsewhere: a cause of its own stays the cause.
    assert (
        found("ModuleNotFoundError: No module named 'x'", 1, out_of_memory=True).kind == "no-module"
    )


def test_every_rule_has_a_cause_and_a_remedy_in_one_line() -> None:
    for rule in RULES:
        for part in (rule.cause, rule.remedy):
            assert callable(part) or (part and "\n" not in part and not part.endswith("."))
