"""Our figures against SGLang's own: its benchmark on the same streams, its counters to the last round.

One server (the tiny Ling, NEXTN) whose log reports every decode step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sparkling import acceptance, concurrency, log, metrics
from sparkling.assemble import Generate
from sparkling.client import Client
from sparkling.files import read_rows
from sparkling.sse import JsonEvents

sys.path.insert(0, str(Path(__file__).parent))
from recording_relay import relay

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PROMPTS = [
    "Why is the sky blue?",
    "Name three rivers.",
    "How does a bridge carry its deck?",
    "What is a queue?",
]
TOKENS = 128

# `datasets` is imported by modules of the benchmark that are not used here, and is not installed.
BENCHMARK = (
    "import runpy, sys, types\n"
    "stand_in = types.ModuleType('datasets')\n"
    "stand_in.load_dataset = None\n"
    "sys.modules['datasets'] = stand_in\n"
    "runpy.run_module('sglang.benchmark.serving', run_name='__main__', alter_sys=True)\n"
)


@pytest.fixture(scope="module")
def running(tiny_nextn):
    return tiny_nextn.running()


@pytest.fixture(scope="module")
def client(running):
    return Client(running.url, timeout_s=300)


# -- accept length, exactly ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted(running, client):
    """(replies, what each of SGLang's own places counted meanwhile)."""
    client.generate("warm", max_tokens=8)
    client.flush_cache()  # sets the server's average back
    lines = -1
    while lines < len(running.events()):  # until the log has what was before
        lines = len(running.events())
        time.sleep(1.0)
    with client.counting() as window:
        before = client.metrics()
        replies = [
            client.generate(p, max_tokens=TOKENS, ignore_eos=True).require() for p in PROMPTS
        ]
        after = client.metrics()
    grew = {k: v - before.get(k, 0.0) for k, v in after.items()}
    state = client.server_info()["internal_states"][0]
    rounds, limit = sum(r.spec.rounds for r in replies), time.monotonic() + 60
    steps: list[log.DecodeBatch] = []
    while len(steps) < rounds and time.monotonic() < limit:  # its log may lag
        time.sleep(0.1)
        steps = [e for e in running.events()[lines:] if isinstance(e, log.DecodeBatch)]
    return replies, grew, state, steps, window


def test_every_reply_counts_its_own_rounds(counted):
    for reply in counted[0]:
        meta, spec = reply.meta_info, reply.spec
        assert spec.rounds == meta["spec_verify_ct"]
        assert spec.tokens == meta["spec_num_correct_drafts"] + meta["spec_verify_ct"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == spec.rounds
        assert sum(i * n for i, n in enumerate(histogram)) == spec.tokens - spec.rounds
        # SGLang's own figure for a request counts the token that prefill made.
        assert meta["spec_accept_length"] == pytest.approx(TOKENS / spec.rounds)


def test_the_totals_in_metrics_are_the_sums_of_the_replies(counted):
    replies, grew, _, _, window = counted
    assert grew["sglang:spec_verify_calls_total"] == sum(r.spec.rounds for r in replies)
    assert grew["sglang:generation_tokens_total"] == len(PROMPTS) * TOKENS
    assert grew["sglang:num_requests_total"] == len(PROMPTS)
    assert window.spec.rounds == sum(r.spec.rounds for r in replies)
    assert window.spec.tokens == len(PROMPTS) * (TOKENS - 1)


def test_the_servers_average_and_its_log_are_our_accept_length(counted):
    replies, _, state, steps, _ = counted
    ours = metrics.accept_length(replies)
    assert state["avg_spec_accept_length"] == pytest.approx(ours, rel=1e-9)
    # One line a round, so each figure is a whole number of tokens and their mean is exact.
    lengths = [s.accept_len for s in steps]
    assert len(lengths) == sum(r.spec.rounds for r in replies)
    assert sum(lengths) / len(lengths) == pytest.approx(ours, rel=1e-9)


# -- rates, on the same streams ------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark(running, tiny_nextn, server_python, tmp_path_factory):
    """(SGLang's result, the streams that it read) for the prompts, one after the other."""
    folder, model = tmp_path_factory.mktemp("benchmark"), tiny_nextn.model
    data, out = folder / "prompts.jsonl", folder / "result.jsonl"
    talks = [{"conversations": [{"value": p}, {"value": "four words at least"}]} for p in PROMPTS]
    data.write_text("".join(json.dumps(t) + "\n" for t in talks))
    with relay(running.url) as between:
        words = [
            str(server_python), "-c", BENCHMARK, "--backend", "sglang",
            "--base-url", between.url, "--model", str(model), "--tokenizer", str(model),
            "--dataset-name", "custom", "--dataset-path", str(data),
            "--num-prompts", str(len(PROMPTS)), "--sharegpt-output-len", str(TOKENS),
            "--max-concurrency", "1", "--warmup-requests", "0", "--disable-tqdm",
            "--output-details", "--output-file", str(out),
        ]  # fmt: skip
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        streams = [s for s in between.streams if s.path == "/generate" and s.body.get("stream")]
    return json.loads(out.read_text().splitlines()[-1]), streams


@pytest.fixture(scope="module")
def read(benchmark):
    """Our replies from the streams that the benchmark measured."""
    assert len(benchmark[1]) == len(PROMPTS)
    replies = []
    for stream in benchmark[1]:
        into, events = Generate(max_tokens=TOKENS, ignore_eos=True, on_text=None), JsonEvents()
        for t, raw in stream.pieces:
            for payload in events.feed(raw):
                into.feed(payload, t)
        replies.append(into.finish(stream.pieces[-1][0], problem=None).require())
    return replies


def test_token_counts_are_sglangs(benchmark, read):
    result, _ = benchmark
    assert result["completed"] == len(PROMPTS)
    assert [r.completion_tokens for r in read] == result["output_lens"] == [TOKENS] * len(PROMPTS)
    assert [r.text for r in read] == result["generated_texts"]


def test_decode_rates_agree_with_sglangs_benchmark_within_two_percent(benchmark, read):
    result, _ = benchmark
    ratios = []
    for reply, gaps in zip(read, result["itls"], strict=True):
        assert len(gaps) == metrics.decode(reply).tokens  # the same tokens are timed
        ratios.append(metrics.decode_rate(reply) * sum(gaps) / len(gaps))
    # The median, since either reader may have been kept waiting once by a busy machine.
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.02)


def test_times_per_token_and_to_the_first_agree(benchmark, read):
    result, _ = benchmark
    ours = statistics.median(metrics.tpot_s(r) for r in read)
    assert result["median_tpot_ms"] / 1e3 == pytest.approx(ours, rel=0.02)
    # The first token: what lies between is one hop on loopback.
    apart = [theirs - r.ttft_s for theirs, r in zip(result["ttfts"], read, strict=True)]
    assert all(x > -0.002 for x in apart) and statistics.median(apart) < 0.1
    ends = statistics.median(r.e2e_s for r in read)
    assert result["median_e2e_latency_ms"] / 1e3 == pytest.approx(ends, rel=0.02, abs=0.02)


def test_our_own_client_gets_the_same_answers_at_the_same_order_of_speed(counted, read):
    """Requests of our own: the same tokens exactly. The speed of two runs apart in time differs by
    what the machine did meanwhile, so the bound only catches a wrong unit."""
    mine = counted[0]
    assert sorted(r.text for r in mine) == sorted(r.text for r in read)
    rates = [statistics.median(metrics.decode_rate(r) for r in group) for group in (mine, read)]
    assert 0.2 < rates[0] / rates[1] < 5


# -- places and users ----------------------------------------------------------------------------


def test_rounds_read_from_chunks_are_those_of_the_log(counted):
    """Where every chunk was one round, the rounds are the log's lines, one by one and in order."""
    replies, _, _, steps, _ = counted
    at = 0
    for i, reply in enumerate(replies):
        mine = steps[at : at + reply.spec.rounds]
        at += reply.spec.rounds
        row = {
            "prompt": str(i), "completion_tokens": reply.completion_tokens,
            "chunk_tokens": reply.chunk_tokens, "spec": reply.spec.to_json(),
        }  # fmt: skip
        rounds = acceptance.rounds_of(row)
        if rounds is not None:  # a busy machine puts several rounds into one chunk
            assert [n for _, n in rounds] == [round(s.accept_len) for s in mine][: len(rounds)]
    assert acceptance.histogram([{"spec": r.spec.to_json()} for r in replies]) == tuple(
        sum(round(s.accept_len) == i + 1 for s in steps) for i in range(4)
    )


def test_users_at_once(running, client, tmp_path):
    from sparkling.order import Block
    from sparkling.workloads import Prompt, Workload

    prompts = tuple(Prompt(str(i), text) for i, text in enumerate(PROMPTS))
    task = concurrency.Users(Workload("w", "", prompts, 24, thinking=False), (1, 4), each=1)
    task(running, Block(0, 0, "nextn"), tmp_path / "rows.jsonl", {"block": 0})
    rows = read_rows(tmp_path / "rows.jsonl")
    one, four = concurrency.levels(rows)
    assert (one.requests, four.requests) == (4, 4) and one.failed == four.failed == 0
    assert one.limit == four.limit == 4 and four.queued is False  # the recipe's own limit
    assert one.throughput > 0 and one.accept_length.value > 1
    # Greedy answers are the same tokens whoever else is asking.
    texts = [{r["prompt"]: r["output_hash"] for r in rows if r["users"] == u} for u in (1, 4)]
    assert texts[0] == texts[1]
