"""The client, the metrics and the benchmark against a real SGLang server with NEXTN.

SPARKLING_TEST_URL points them at a server that runs already (tiny Ling, NEXTN 3/1/4, --enable-metrics
--enable-cache-report, both ling3 parsers); otherwise one is started.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from sparkling import bench, metrics
from sparkling.assemble import NO_ANSWER
from sparkling.client import Client
from sparkling.wire import Refused, Stalled

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

QUESTION = "Why is the sky blue?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def live(tiny_nextn):
    """(client, launch) of a server on the nextn stage."""
    url = os.environ.get("SPARKLING_TEST_URL")
    if url:
        argv = ("-m", "sglang.launch_server", "--model-path", "tiny")
        launch = SimpleNamespace(
            argv=argv, env={}, recipe="tiny-ling", stage="nextn", variant=None,
            switches={"nextn": True}, served_name="tiny", regime="",
        )  # fmt: skip
        return Client(url, timeout_s=300), launch
    running = tiny_nextn.running()
    return Client(running.url, running.api_key, timeout_s=300), running.launch


@pytest.fixture
def client(live):
    return live[0]


def test_streamed_and_whole_chat_agree(client):
    extra = {"return_output_ids_in_sglext": True}
    for thinking in (True, False):
        said = []
        streamed = client.chat(
            QUESTION,
            max_tokens=150,
            thinking=thinking,
            extra=extra,
            on_text=lambda kind, piece, said=said: said.append((kind, piece)),
        ).require()
        whole = client.chat(QUESTION, max_tokens=150, thinking=thinking, extra=extra, stream=False)
        assert whole.require().output_ids == streamed.output_ids
        assert (whole.text, whole.reasoning) == (streamed.text, streamed.reasoning)
        assert streamed.text and bool(streamed.reasoning) == thinking and streamed.warnings == []
        assert "".join(p for kind, p in said if kind == "text") == streamed.text
        assert "".join(p for kind, p in said if kind == "reasoning") == streamed.reasoning
        assert streamed.completion_tokens == whole.completion_tokens == len(streamed.output_ids)
        assert (
            streamed.spec.tokens == whole.spec.tokens and streamed.spec.rounds == whole.spec.rounds
        )
        assert streamed.fingerprint == whole.fingerprint


def test_every_chunk_is_counted(client):
    reply = client.chat(QUESTION, max_tokens=100, thinking=False, ignore_eos=True).require()
    counts = reply.chunk_tokens
    assert None not in counts and len(counts) == len(reply.chunk_times_s)
    assert all(a < b for a, b in itertools.pairwise(counts))
    assert any(b - a > 1 for a, b in itertools.pairwise(counts))  # several tokens a chunk: NEXTN
    # A busy machine puts several rounds into one chunk, the first one too.
    assert 1 <= counts[0] < counts[-1] <= reply.completion_tokens == 100
    assert metrics.decode(reply).method == "counted"
    assert 0 < reply.ttft_s < reply.chunk_times_s[-1] <= reply.e2e_s


def test_speculation_counters_add_up(client):
    reply = client.generate("The question is", max_tokens=120, ignore_eos=True).require()
    spec, meta = reply.spec, reply.meta_info
    assert sum(spec.histogram) == spec.rounds
    assert sum((i + 1) * n for i, n in enumerate(spec.histogram)) == spec.tokens
    assert spec.proposed == 3 * spec.rounds and 1 < spec.accept_length <= 4
    # Prefill gives the first token; max_tokens may cut up to three of the last round.
    assert 0 <= spec.tokens + 1 - reply.completion_tokens <= 3
    assert spec.reported == pytest.approx(reply.completion_tokens / spec.rounds)
    assert spec.accept_rate == pytest.approx(meta["spec_accept_rate"])


def test_counters_before_and_after_agree_with_the_replies(client):
    with client.counting() as window:
        replies = [client.chat(f"{i}?", max_tokens=40, thinking=False) for i in range(3)]
    assert window.requests == 3 and window.spec.source == "counters"
    assert window.spec.rounds == sum(r.spec.rounds for r in replies)
    assert window.spec.tokens == sum(r.completion_tokens - 1 for r in replies)
    assert window.spec.accept_length == pytest.approx(metrics.accept_length(replies), rel=0.1)


def test_generate_streamed_whole_and_by_ids(client):
    kwargs = {"max_tokens": 24, "logprobs": 3}
    streamed = client.generate("A small draft", **kwargs).require()
    whole = client.generate("A small draft", stream=False, **kwargs).require()
    assert streamed.output_ids == whole.output_ids and streamed.text == whole.text
    for reply in (streamed, whole):
        assert [x.id for x in reply.logprobs] == reply.output_ids
        for x in reply.logprobs:
            assert len(x.top) == 3 and x.logprob == pytest.approx(max(x.top.values()))
    n = client.count_tokens("A small draft")
    assert streamed.prompt_tokens == n
    ids = client.generate(input_ids=streamed.output_ids[:4], max_tokens=4).require()
    assert ids.prompt_tokens == 4


def test_thinking_that_max_tokens_cuts_is_no_answer(client):
    for stream in (True, False):
        reply = client.chat(QUESTION, max_tokens=6, thinking=True, stream=stream)
        assert reply.text == "" and reply.reasoning and reply.truncated
        assert reply.warnings == [NO_ANSWER]


def test_tool_call_and_its_cut_twin(client):
    ask = {"tools": [TOOL], "thinking": False}
    for stream in (True, False):
        reply = client.chat("What is the weather in Paris?", max_tokens=80, stream=stream, **ask)
        assert [(c.name, c.arguments) for c in reply.tool_calls] == [
            ("get_weather", {"city": "Paris"})
        ]
    for n in range(3, 10):
        assert client.chat("What is the weather in Paris?", max_tokens=n, **ask).tool_calls == []


def test_the_cache_is_seen_and_flushed(client):
    # A state of the linear-attention layers is kept at the end of an answer, so what continues an
    # earlier answer finds it, and what merely repeats the question does not.
    text = "A long enough beginning, the same for all requests. " * 6
    client.flush_cache()
    first = client.generate(text, max_tokens=8).require()
    text += first.text + " and so on."
    second = client.generate(text, max_tokens=4)
    client.flush_cache()
    third = client.generate(text, max_tokens=4)
    assert (first.cached_tokens, third.cached_tokens) == (0, 0)
    assert second.cached_tokens >= first.prompt_tokens
    assert second.output_ids == third.output_ids


def test_refusals_carry_the_servers_message(client):
    with pytest.raises(Refused, match="maximum context length"):
        client.generate("x", max_tokens=10**6)
    with pytest.raises(Refused, match=r"\(400\).*max_new_tokens"):
        client.chat("x", max_tokens=-5)


def test_giving_up_on_a_request_leaves_the_server_usable(client):
    with pytest.raises(Stalled):
        client.generate("x", max_tokens=400, ignore_eos=True, timeout_s=0.001)
    client.flush_cache(timeout_s=120)  # waits until the abandoned request is gone
    assert client.generate("x", max_tokens=3).complete


def test_four_at_once(client):
    alone = client.chat(QUESTION, max_tokens=60, thinking=False).require()
    with ThreadPoolExecutor(4) as pool:
        replies = list(
            pool.map(lambda _: client.chat(QUESTION, max_tokens=60, thinking=False), range(4))
        )
    assert all(r.complete and r.completion_tokens == alone.completion_tokens for r in replies)
    assert all(r.spec is not None for r in replies)


def test_a_benchmark_of_the_named_workloads(live, tmp_path):
    client, launch = live
    sizes = {
        "short_output": 16, "long_output": 24, "repeat_output": 16, "shape_input": 200,
        "shape_output": 8, "prompts": 2,
    }  # fmt: skip
    works = bench.workloads(sizes)
    out = tmp_path / "bench.jsonl"
    rows = bench.run(
        client, arm="nextn", launch=launch, workloads=works, repeats=2, out=out, stall_s=300
    )
    assert len(rows) == 16 and all(r["complete"] and r["flushed"] for r in rows)
    assert all(r["decode_method"] == "counted" and r["spec"]["rounds"] > 0 for r in rows)
    shape = [r for r in rows if r["workload"] == "shape"]
    # The text fits the size to one sentence; the chat template comes on top.
    assert all(200 - 60 <= r["prompt_tokens"] <= 200 + 60 for r in shape)
    assert all(r["completion_tokens"] == 8 for r in shape)
    overall = bench.summarise(rows)[-1]
    assert overall.workload == "all" and overall.prompts == 8 and overall.failed == 0
    assert overall.deterministic is True
    assert 1 < overall.accept_length.low <= overall.accept_length.value <= 4
    again = bench.run(
        client, arm="nextn", launch=launch, workloads=works, repeats=2, out=out, stall_s=300
    )
    assert again == rows
