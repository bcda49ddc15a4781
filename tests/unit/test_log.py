"""Log lines as events: five real logs of SGLang 0.5.23, and lines that must prove nothing."""

from __future__ import annotations

import os
import re
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
from sparkling import log

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"

# What each captured log holds, kind by kind: a line that is no longer recognised shows here.
COUNTS = {
    "cpu-nextn": {
        "ServerArgs": 1, "WeightsBegin": 2, "LayerMap": 1, "RopeNative": 2, "LinearLayers": 1,
        "WeightsLoaded": 2, "MambaPool": 1, "KvPool": 2, "PoolsReady": 2, "LinearBackend": 2,
        "KdaKernels": 2, "GraphDisabled": 2, "Limits": 1, "StartupTimings": 1, "HttpUp": 1,
        "HttpRequest": 20, "PrefillBatch": 7, "Ready": 1, "DecodeBatch": 6,
    },
    "cpu-nospec": {
        "ServerArgs": 1, "WeightsBegin": 1, "LayerMap": 1, "RopeNative": 1, "LinearLayers": 1,
        "WeightsLoaded": 1, "MambaPool": 1, "KvPool": 1, "PoolsReady": 1, "LinearBackend": 1,
        "KdaKernels": 1, "GraphDisabled": 1, "Limits": 1, "StartupTimings": 1, "HttpUp": 1,
        "HttpRequest": 25, "PrefillBatch": 10, "Ready": 1, "DecodeBatch": 15,
    },
    "h200-humming": {
        "CheckpointLayout": 5, "ServerArgs": 1, "WeightsBegin": 1, "LayerMap": 1, "RopeNative": 7,
        "LinearLayers": 1, "BackendPrepared": 40, "WeightsLoaded": 1, "PluginLine": 1,
        "MambaPool": 1, "KvPool": 1, "PoolsReady": 1, "LinearBackend": 1, "KdaKernels": 1,
        "GraphDisabled": 1, "GraphCapture": 2, "MoeGemm": 1, "Limits": 1, "StartupTimings": 1,
        "HttpUp": 1, "HttpRequest": 19, "PrefillBatch": 6, "Ready": 1, "KernelCompiled": 10,
        "DecodeBatch": 20, "Stopping": 2, "ChildDied": 1,
    },
    "h200-humming-fp8-head": {
        "CheckpointLayout": 5, "ServerArgs": 1, "WeightsBegin": 1, "LayerMap": 1, "RopeNative": 7,
        "LinearLayers": 1, "BackendPrepared": 40, "WeightsLoaded": 1, "PluginLine": 1,
        "HeadQuantized": 1, "MambaPool": 1, "KvPool": 1, "PoolsReady": 1, "LinearBackend": 1,
        "KdaKernels": 1, "GraphDisabled": 1, "GraphCapture": 2, "MoeGemm": 1, "Limits": 1,
        "StartupTimings": 1, "HttpUp": 1, "HttpRequest": 19, "PrefillBatch": 6, "Ready": 1,
        "DecodeBatch": 20, "Stopping": 2, "ChildDied": 1,
    },
    "h200-humming-nextn": {
        "CheckpointLayout": 9, "ServerArgs": 1, "WeightsBegin": 2, "LayerMap": 1, "RopeNative": 8,
        "LinearLayers": 1, "BackendPrepared": 41, "WeightsLoaded": 2, "PluginLine": 3,
        "MambaPool": 1, "KvPool": 2, "PoolsReady": 2, "LinearBackend": 2, "KdaKernels": 2,
        "GraphDisabled": 2, "GraphCapture": 6, "MoeGemm": 1, "Limits": 1, "StartupTimings": 1,
        "HttpUp": 1, "HttpRequest": 20, "PrefillBatch": 6, "Ready": 1, "DecodeBatch": 20,
        "Stopping": 2, "ChildDied": 1,
    },
}  # fmt: skip

# Stamped lines of these captures that are left untyped on purpose, by their first two words.
UNTYPED = {
    "Cannot detect", "Endpoint '/get_model_info'", "Endpoint '/get_server_info'", "Fail to",
    "Failed to", "INFO: Application", "INFO: Started", "INFO: Waiting", "Ignore import",
    "Init Unified", "Init parallel", "Memory baseline", "No HuggingFace", "No chat", "No live",
    "Non-overlap (synchronous)", "Only Bailing", "Sleeping 5", "Tree cache", "Using default",
    "Using fallback", "Warmed fused", "init_cpu_threads_env and", "init_threads_binding: numa_index=0,",
    "kill_process_tree called:", "rope_scaling (type=deepseek_yarn)", "skip_tokenizer_init=True: string-based",
}  # fmt: skip


def text(name: str) -> str:
    return (LOGS / f"{name}.log").read_bytes().decode()  # as it is: bars use carriage returns


def events(name: str, kind: type | None = None) -> list:
    found = list(log.parse(LOGS / f"{name}.log"))
    return found if kind is None else [one for one in found if type(one) is kind]


@pytest.mark.parametrize("name", COUNTS)
def test_every_known_line_of_a_capture_is_typed(name: str) -> None:
    assert Counter(type(one).__name__ for one in events(name)) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_untyped_lines_are_only_the_pinned_ones(name: str) -> None:
    stamp = re.compile(r"^.*?\[\d{4}-\d\d-\d\d [\d:]{8}\] (\S+)\s+(\S+)")
    untyped = set()
    for line in text(name).split("\n"):
        match = stamp.match(line)
        if match and log.parse_line(line) is None:
            untyped.add(f"{match[1]} {match[2]}")
    assert untyped <= UNTYPED
    # Nothing that looks like a kind of ours is among them.
    assert not {one for one in untyped if one.startswith(("Load", "Capture", "Decode", "Prefill"))}


def test_the_pinned_untyped_lines_all_occur() -> None:
    everything = "\n".join(re.sub(r"\s+", " ", text(name)) for name in COUNTS)
    assert {one for one in UNTYPED if f"] {one}" not in everything} == set()


@pytest.mark.parametrize("name", COUNTS)
def test_the_fast_path_agrees_with_the_line_parser(name: str) -> None:
    by_file = list(log.parse(LOGS / f"{name}.log"))
    with open(LOGS / f"{name}.log", newline="\n", encoding="utf-8") as file:
        by_line = list(log.parse(file))
    assert [repr(one) for one in by_file] == [repr(one) for one in by_line]


def test_line_numbers_and_times_are_the_files() -> None:
    lines = text("cpu-nextn").split("\n")
    for one in events("cpu-nextn"):
        assert one.stamp in lines[one.line_no - 1]
    first = events("cpu-nextn", log.ServerArgs)[0]
    assert first.time == datetime(2026, 11, 29, 18, 12, 58)


def test_arguments_are_read_and_secrets_masked() -> None:
    (found,) = events("h200-humming-nextn", log.ServerArgs)
    assert len(found.args) == 546 and found.complete
    assert found.args["moe_runner_backend"] == "humming"
    assert found.args["speculative_algorithm"] == "EAGLE"
    assert found.args["api_key"] is None
    line = "[2026-01-01 00:00:00] server_args={'port': 1, 'api_key': 'sk-abcdefgh', 'x': None}"
    assert log.parse_line(line).args == {"port": 1, "api_key": "[redacted]", "x": None}


def test_arguments_that_are_no_literal_are_read_as_far_as_possible() -> None:
    line = (
        "[2026-01-01 00:00:00] server_args={'a': 1, 'b': <object at 0x1>, 'c': 'd', 'e': 2.5, "
        "'api_key': 'sk-abcdefgh'}"
    )
    found = log.parse_line(line)
    assert found.args == {"a": 1, "c": "d", "e": 2.5, "api_key": "[redacted]"}
    assert not found.complete


def test_layers_backends_and_weights() -> None:
    (layers,) = events("h200-humming-nextn", log.LayerMap)
    assert (len(layers.layers), layers.linear, layers.softmax) == (42, 35, 7)
    prepared = events("h200-humming-nextn", log.BackendPrepared)
    assert {one.backend for one in prepared} == {"humming"}
    assert {one.layer for one in prepared} >= {f"model.layers.{i}.experts" for i in range(2, 42)}
    target, draft = events("h200-humming-nextn", log.WeightsLoaded)
    assert (target.model_class, draft.model_class) == (
        "BailingMoeV3ForCausalLM",
        "BailingMoeForCausalLMNextN",
    )
    assert (target.quant, target.fmt, target.seconds, target.avail_gb, target.used_gb) == (
        "fp8", "e4m3", 1.89, 73.91, 65.13,
    )  # fmt: skip
    tiny = events("cpu-nextn", log.WeightsLoaded)[1]
    assert (tiny.quant, tiny.seconds, tiny.used_gb) == (None, 0.02, -0.0)
    assert events("h200-humming", log.MoeGemm)[0].kind == "indexed"
    assert {one.layout for one in events("h200-humming", log.CheckpointLayout)} == {
        "mxfp4-experts",
        "fp8",
    }
    assert len(events("h200-humming-fp8-head", log.HeadQuantized)) == 1


def test_pools_limits_and_timings() -> None:
    (pool,) = events("cpu-nextn", log.MambaPool)
    assert (pool.slots, pool.conv_gb, pool.ssm_gb, pool.intermediate_ssm_gb) == (
        8135,
        0.05,
        0.37,
        0.0,
    )
    assert events("cpu-nospec", log.MambaPool)[0].intermediate_ssm_gb is None
    target, draft = events("h200-humming-nextn", log.KvPool)
    assert (target.tokens, target.gb, draft.gb, target.dtype) == (
        4023488, 30.22, 4.32, "torch.bfloat16",
    )  # fmt: skip
    (limits,) = events("h200-humming-nextn", log.Limits)
    assert (limits.max_total_tokens, limits.max_running, limits.context) == (4023488, 1, 65536)
    (timings,) = events("h200-humming-nextn", log.StartupTimings)
    assert timings.seconds["graph target_verify"] == 4.10
    assert timings.seconds["tokenizer_e2e"] == 42.93
    assert "cuda_graph" not in timings.seconds


def test_graph_captures_of_target_draft_and_draft_extend() -> None:
    found = events("h200-humming-nextn", log.GraphCapture)
    assert [(one.which, one.phase) for one in found] == [
        ("target verify", "begin"),
        ("target verify", "end"),
        ("draft decode", "begin"),
        ("draft decode", "end"),
        ("draft extend", "begin"),
        ("draft extend", "end"),
    ]
    assert (found[0].backend, found[0].tokens_per_req, found[0].avail_gb) == ("full", 4, 36.26)
    assert (found[1].bs, found[1].seconds, found[1].used_gb) == ((1,), 4.10, 0.25)
    assert found[4].bs == (1,)


def test_batches() -> None:
    batch = events("cpu-nextn", log.DecodeBatch)[0]
    assert (batch.running, batch.full_tokens, batch.accept_len, batch.accept_rate) == (
        1,
        79,
        1.68,
        0.23,
    )
    assert (batch.graph, batch.gen_tok_s, batch.queued) == (False, 14.20, 0)
    plain = events("h200-humming", log.DecodeBatch)[0]
    assert (plain.accept_len, plain.accept_rate, plain.graph) == (None, None, True)
    prefill = events("cpu-nextn", log.PrefillBatch)[1]
    assert (prefill.new_seqs, prefill.new_tokens, prefill.cached_tokens, prefill.running) == (
        1,
        27,
        0,
        1,
    )
    assert (prefill.tok_s, prefill.full_usage, prefill.mamba_usage) == (53.70, 0.0, 0.0)


def test_batches_with_more_or_fewer_fields_are_still_read() -> None:
    line = (
        "[2026-01-01 00:00:00.123 DP0 TP1] Decode batch [77], #running-req: 2, #full token: 9, "
        "full token usage: 0.00, accept len: 2.50, accept rate: 0.50, cap len: 3.00, "
        "npu graph: True, gen throughput (token/s): 1.00, #queue-req: 3, est. decode TFLOPS/s "
        "(per GPU): 0.10"
    )
    batch = log.parse_line(line)
    assert isinstance(batch, log.DecodeBatch)
    assert (batch.rank, batch.running, batch.accept_len, batch.graph) == ("DP0 TP1", 2, 2.5, True)
    assert batch.time.microsecond == 123000
    assert batch.mamba_usage is None
    assert batch.values["cap len"] == 3.0


def test_case_37_a_missing_accept_length_is_unknown_not_zero() -> None:
    line = "[2026-01-01 00:00:00] Decode batch, #running-req: 1, gen throughput (token/s): 5.00"
    batch = log.parse_line(line)
    assert (batch.accept_len, batch.accept_rate, batch.graph, batch.queued) == (None,) * 4
    full = log.parse_line(line + ", accept len: 4.00, accept rate: 1.00")
    assert (full.accept_len, full.accept_rate) == (4.0, 1.0)
    # A length of zero, if a build printed one, is a value and not "absent".
    assert log.parse_line(line + ", accept len: 0.00").accept_len == 0.0


def test_a_record_behind_a_progress_bar_is_seen() -> None:
    (found,) = events("h200-humming", log.MoeGemm)
    bar = "\r  0%|          | 0/1 [00:00<?, ?it/s]\rCapturing batches (bs=1 avail_mem=34.74 GB):   0%|          | 0/1 [00:00<?, ?it/s]"
    line = bar + "[2026-11-29 18:16:59] Using indexed gemm for humming moe"
    assert log.parse_line(line).kind == found.kind
    assert [type(one) for one in log.parse([line])] == [log.MoeGemm]


READY = "The server is fired up and ready to roll!"
BATCH = "Decode batch, #running-req: 1, accept len: 9.99, accept rate: 1.00, #queue-req: 0"


@pytest.mark.parametrize(
    "line",
    [
        f"[2026-01-01 00:00:00] Receive: obj=GenerateReqInput(text='{READY}')",
        f"[2026-01-01 00:00:00] Receive: obj=GenerateReqInput(text='[2026-01-01 00:00:00] {READY}')",
        f"[2026-01-01 00:00:00] Finish: obj=GenerateReqInput(text='x'), out={{'text': '{BATCH}'}}",
        f"[2026-01-01 00:00:00] Receive OpenAI: obj={{'messages': '] [2026-01-01 00:00:00] {BATCH}'}}",
        f'{{"event": "request.received", "obj": {{"text": "[2026-01-01 00:00:00] {READY}"}}}}',
        READY,
        BATCH,
        f" [2026-01-01 00:00:00] {READY}",
        f"[2nd attempt] [2026-01-01 00:00:00] {READY}",
        f"[2026-01-01] {READY}",
        f"[2026-01-01 00:00:00] {READY} said the user",
        f"[2026-01-01 00:00:00] INFO:     1.2.3.4:5 - \"GET /{READY.replace(' ', '%20')} HTTP/1.1\" 404 Not Found",
        f"user says 50%| x |[2026-01-01 00:00:00] {READY}",
    ],
)  # fmt: skip
def test_case_15_a_quoted_line_proves_nothing(line: str) -> None:
    for found in (log.parse_line(line), *log.parse([line])):
        assert not isinstance(found, (log.Ready, log.DecodeBatch, log.Crash))


def test_unknown_and_broken_lines_are_skipped() -> None:
    lines = ["", "[", "[2", "[2026-01-01 00:00:00]", "[2026-01-01 00:00:00] ", "\x00\xff", "a" * 10_000,
             "[2026-01-01 00:00:00] Load weight end. nonsense", "\r", "]", "[2026-13-99 99:99:99] x"]  # fmt: skip
    assert list(log.parse(lines)) == []
    for line in lines:
        assert log.parse_line(line) is None


def test_bytes_that_are_no_text_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"\xff\xfe\n[2026-01-01 00:00:00] " + READY.encode() + b"\n\x80[2026")
    assert [type(one) for one in log.parse(path)] == [log.Ready]


def test_other_kinds_of_line() -> None:
    def one(message: str) -> object:
        return log.parse_line("[2026-01-01 00:00:00] " + message)

    marlin = one("Preparing MXFP4 experts for Marlin backend (layer: model.layers.3.experts)...")
    assert (marlin.backend, marlin.layer) == ("marlin", "model.layers.3.experts")
    cutlass = one("Preparing DSv4 MXFP4 experts for FlashInfer SM120 CUTLASS W4A8 (layer: a.b)...")
    assert (cutlass.backend, cutlass.detail) == ("flashinfer", "FlashInfer SM120 CUTLASS W4A8")
    assert (
        one(
            "Bailing V3 mixed FP8/MXFP4 checkpoint: moe_runner_backend=flashinfer_mxfp4 for X."
        ).backend
        == "flashinfer_mxfp4"
    )
    assert (
        one("Attention backend not specified. Use triton backend by default.").backend == "triton"
    )
    pool = one(
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 7, K size: 1.50 GB, V size: 2.00 GB"
    )
    assert (pool.gb, pool.upper_bound, pool.label) == (3.5, False, None)
    swa = one("SWA KV Cache VA upper bound. dtype: x, #tokens: 7, KV size: 1.00 GB")
    assert (swa.label, swa.upper_bound) == ("SWA", True)
    head = one(
        "Online FP8 quantization enabled for lm_head. bfloat16 -> float8_e4m3fn with 448 row scales."
    )
    assert isinstance(head, log.HeadQuantized) and head.detail.startswith("bfloat16")
    assert one("The NEXTN draft uses the target's lm_head (float8_e4m3fn).").shared is True
    assert one("The NEXTN draft's lm_head is not the target's: dtype.").shared is False
    assert one("Loaded plugin sparkling from group sglang.srt.plugins").ok is True
    assert one("Failed to load plugin sparkling from group sglang.srt.plugins").ok is False
    assert one("Cache flushed successfully!").line_no == 1
    parsers = one(
        "Auto-detected template features: reasoning_config=ReasoningToggleConfig(toggle_param='enable_thinking', default_enabled=True), reasoning_parser=ling3, tool_call_parser=ling3"
    )
    assert (parsers.reasoning, parsers.tool_call) == ("ling3", "ling3")
    assert one("Auto-detected template features: tool_call_parser=glm45").reasoning is None
    assert (
        one(
            "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic"
        ).seconds
        == 20
    )
    assert one("Running FlashInfer autotune with cache: /c").cache == "/c"
    assert (
        one("Auto-detected DSV4 routed-expert layout: is_fp4_experts=True").layout
        == "mxfp4-experts"
    )
    assert log.parse_line(
        "sparkling-sglang 0.1.0: found SGLang 0.6, knows 0.5.23; nothing patched."
    ).text.endswith("patched.")
    dead = one(
        "Subprocess scheduler_0 (pid=3825) crashed with exit code -15. Triggering SIGQUIT for cleanup..."
    )
    assert (dead.name, dead.pid, dead.code) == ("scheduler_0", 3825, -15)


def test_crashes_are_events_with_a_remedy() -> None:
    (port,) = [one for one in events("crash-port") if isinstance(one, log.Crash)]
    assert port.kind == "port" and "30421" in port.reason
    kinds = [one.kind for one in events("crash-trunc") if isinstance(one, log.Crash)]
    assert "safetensors" in kinds


# --------------------------------------------------------------------------- files that change


def line(message: str) -> str:
    return f"[2026-01-01 00:00:00] {message}\n"


def test_case_15_nothing_before_the_offset_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(line(READY) + line(BATCH))
    offset = path.stat().st_size
    with open(path, "a") as file:
        file.write(line("linear_layer_nums=3"))
    assert [type(one) for one in log.parse(path, offset)] == [log.LinearLayers]
    assert [type(one) for one in log.Follower(path, offset).poll()] == [log.LinearLayers]


def test_case_15_a_followed_log_may_be_truncated_or_rotated(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(line(READY) * 3)
    follower = log.Follower(path, path.stat().st_size)
    assert follower.poll() == []
    with open(path, "a") as file:
        file.write(line("linear_layer_nums=1"))
    assert [one.count for one in follower.poll()] == [1]
    os.truncate(path, 0)
    with open(path, "a") as file:
        file.write(line("linear_layer_nums=2"))
    assert [one.count for one in follower.poll()] == [2]
    path.rename(tmp_path / "x.log.1")
    assert follower.poll() == []
    path.write_text(line("linear_layer_nums=3") * 2)
    assert [one.count for one in follower.poll()] == [3, 3]
    assert follower.poll() == []


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    follower = log.Follower(path)
    assert follower.poll() == []
    with open(path, "w") as file:
        file.write("[2026-01-01 00:00:00] linear_lay")
        file.flush()
        assert follower.poll() == []
        file.write("er_nums=12\n")
        file.flush()
        assert [(one.count, one.line_no) for one in follower.poll()] == [(12, 1)]


def test_offset_beyond_a_cut_file_means_all_is_new(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(line("linear_layer_nums=3"))
    assert [one.count for one in log.parse(path, 10_000)] == [3]


def test_blocks_do_not_split_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [repr(one) for one in log.parse(LOGS / "cpu-nextn.log")]
    for size in (7, 1000, 4096):
        monkeypatch.setattr(log, "_BLOCK", size)
        assert [repr(one) for one in log.parse(LOGS / "cpu-nextn.log")] == whole


def test_progress_bars_show_only_their_last_state() -> None:
    assert log.split_lines("a\r 10%\r 100%\r\nb\n\n") == [" 100%", "b", ""]


def test_parse_speed(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """Printed, not judged (`-rA` shows it): a busy machine's clock proves nothing. A parser that is
    quadratic in a file's size would not come to an end here."""
    import time

    data = b"".join((LOGS / f"{name}.log").read_bytes() for name in COUNTS)
    data *= 12_000_000 // len(data)
    path = tmp_path / "big.log"
    path.write_bytes(data)
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        found = sum(1 for _ in log.parse(path))
        best = max(best, len(data) / 1e6 / (time.process_time() - began))
    assert found > 20_000
    record_property("MB_per_s", round(best, 1))
    print(f"{best:.0f} MB/s")
