"""The client over HTTP: cases 3, 9, 19, 21, 25, 27, 41, 43, failures in one sentence, real streams."""

import json
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import metrics, wire
from sparkling.assemble import NO_ANSWER, Chat, Generate
from sparkling.client import Client
from sparkling.errors import RequestError, SparklingError
from sparkling.sse import JsonEvents
from sparkling.wire import Refused, Stalled, Unreachable, is_loopback

sys.path.insert(0, str(Path(__file__).parent))
from paced_server import nobody, paced

STREAMS = Path(__file__).parents[1] / "data" / "streams"


@pytest.fixture(scope="module")
def server():
    with paced() as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.url, timeout_s=60) as made:
        yield made


@pytest.fixture
def unhurried(monkeypatch):
    """No pause of a busy machine is taken for a silence before a cut."""
    monkeypatch.setattr(wire, "_SILENCE_S", 600.0)


def with_longer_limits(limit, asked):
    """asked(limit), and again with longer limits while a busy machine keeps it from being True."""
    limits = (limit, 5.0, 20.0)
    assert any(asked(one) for one in limits), f"not with any of the limits {limits}"


def ask(client, *, max_tokens=1024, **options):
    how = {
        k: options.pop(k) for k in ("timeout_s", "ignore_eos", "on_text", "stream") if k in options
    }
    return client.chat("x", max_tokens=max_tokens, extra={"paced": options}, **how)


def chunk(delta, finish=None, usage=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"choices": [choice]} | ({"usage": usage} if usage else {})


def sse(*payloads, done=True):
    lines = [f"data: {json.dumps(p, ensure_ascii=False)}\n\n" for p in payloads]
    return "".join(lines) + ("data: [DONE]\n\n" if done else "")


def stream_of(*deltas, finish="stop"):
    usage = {"prompt_tokens": 3, "completion_tokens": len(deltas)}
    payloads = [chunk(d) for d in deltas] + [chunk({}, finish), {"choices": [], "usage": usage}]
    return sse(*payloads)


def replay(path, assembler, dt=0.01):
    """A captured stream through the assembler, one event every `dt` seconds."""
    events = JsonEvents()
    payloads = list(events.feed((STREAMS / path).read_bytes()))
    assert events.done and events.unknown == 0
    for i, payload in enumerate(payloads):
        assembler.feed(payload, dt * (i + 1))
    return assembler.finish(dt * len(payloads), problem=None)


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("pieces", [1, 7])
def test_case_03_separators_in_text_over_http(client, newline, pieces):
    text = "a\u2028b\u0085c ✅"
    stream = stream_of({"content": text}, {"content": text}).replace("\n", newline)
    step = -(-len(stream) // pieces)
    reply = ask(client, raw=[stream[i : i + step] for i in range(0, len(stream), step)])
    assert reply.text == text * 2
    assert (reply.complete, reply.unknown_payloads, reply.completion_tokens) == (True, 0, 2)


@pytest.mark.parametrize(
    ("cut", "said"), [("fin", "broken off"), ("rst", "reset"), ("chunked", "closed")]
)
def test_case_09_a_stream_that_ends_early_is_not_complete(client, server, unhurried, cut, said):
    read = []

    def on_text(_kind, piece):
        read.append(piece)
        if len(read) == 10:
            server.tell("/go")  # all that was sent is here: it may be reset

    reply = ask(client, cut=cut, at=10, on_text=on_text)
    assert not reply.complete
    assert reply.problem == f"the connection was {said} after 10 tokens, before any finish reason"
    assert reply.text == " tok" * 10
    assert metrics.decode_rate(reply) is metrics.tpot_s(reply) is metrics.e2e_rate(reply) is None
    with pytest.raises(RequestError, match="not complete: the connection was"):
        reply.require()


def test_case_09_asked_1024_got_10(client):
    early = ask(client, n=10)  # finish_reason "length" long before the limit
    assert (early.complete, early.problem) == (False, "asked for 1024 tokens, got 10")
    stopped = ask(client, n=10, finish="stop", ignore_eos=True)
    assert (stopped.complete, stopped.problem) == (False, "asked for 1024 tokens, got 10")
    natural = ask(client, n=10, finish="stop")
    assert (natural.complete, natural.problem) == (True, None)
    full = ask(client, n=10, max_tokens=10, ignore_eos=True)
    assert full.complete and full.truncated


def test_case_09_finish_reason_without_done_or_usage_is_complete_but_uncounted(client):
    reply = ask(client, n=10, max_tokens=10, finish="stop", done=False, usage=False, counts=False)
    assert reply.complete and reply.completion_tokens is None
    assert metrics.decode_rate(reply) is None
    assert "no usage" in reply.warnings[0]


def test_case_09_last_event_without_blank_line_is_read(client):
    stream = sse(chunk({"content": "hi"}), done=False) + "data: " + json.dumps(chunk({}, "stop"))
    reply = ask(client, raw=[stream])
    assert (reply.text, reply.complete, reply.finish_reason) == ("hi", True, "stop")


def test_case_09_done_without_a_finish_reason_is_not_complete(client):
    reply = ask(client, n=10, max_tokens=10, finish=None)
    assert not reply.complete and reply.problem == "no finish reason after 10 tokens"


def test_case_09_aborted_by_the_server(client):
    reply = ask(client, n=10, finish="abort")
    assert (reply.complete, reply.problem) == (
        False,
        "the server aborted the request after 10 tokens",
    )


def test_case_09_error_in_the_middle_of_a_stream(client):
    stream = sse(
        chunk({"content": "a"}, usage={"completion_tokens": 1}),
        {"error": {"message": "out of\nmemory"}},
    )
    reply = ask(client, raw=[stream])
    assert not reply.complete
    assert reply.problem == "the server reported an error after 1 token: out of memory"
    with pytest.raises(Refused, match="refused the request: too long") as caught:
        ask(client, error="too long")
    assert caught.value.status == 200


def test_case_21_a_call_in_a_stream(client):
    deltas = [
        {"tool_calls": [{"index": 0, "id": "A", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
    ]
    reply = ask(client, raw=[stream_of(*deltas, finish="tool_calls")])
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("f", {"x": 1})]
    assert reply.ttft_s is not None and len(reply.chunk_times_s) == 2
    cut = ask(client, raw=[stream_of(*deltas, finish="length")])
    assert cut.tool_calls == [] and cut.broken_calls[0].name == "f"


def test_case_21_real_calls_of_sglang_0_5_23():
    def made(path, max_tokens):
        return replay(path, Chat(max_tokens=max_tokens, ignore_eos=False, on_text=None))

    whole = made("sglang-tool-call.txt", 60)
    assert [(c.name, c.arguments) for c in whole.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert whole.finish_reason == "tool_calls" and metrics.decode(whole).method == "counted"
    cut = made("sglang-tool-call-cut.txt", 8)
    assert cut.tool_calls == [] and cut.broken_calls[0].raw == '{"city": '
    # Here SGLang closed the braces itself, so what max_tokens cut off looks like a whole call.
    closed = made("sglang-tool-call-closed.txt", 6)
    assert closed.tool_calls == [] and closed.broken_calls[0].raw == "{}"


@pytest.mark.parametrize(
    "deltas",
    [
        ["work 17", " so 18</thi", "nk>The answer is 18."],
        ["<think>work 17 so 18</think>The answer is 18."],
        ["work 17 so 18<", "/", "think", ">The answer is 18."],
    ],
)
def test_case_25_thinking_that_arrives_as_content(client, deltas):
    reply = ask(client, raw=[stream_of(*({"content": d} for d in deltas))])
    assert reply.text == "The answer is 18."
    assert reply.reasoning == "work 17 so 18"
    assert "reasoning parser seems off" in reply.warnings[0]


@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": None}, {"reasoning_content": ""}])
def test_case_25_no_warning_without_a_tag(client, reasoning):
    reply = ask(client, raw=[stream_of({"content": "Write `</think>`: 18.", **reasoning})])
    assert (reply.text, reply.reasoning, reply.warnings) == ("Write `</think>`: 18.", "", [])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_both_names_of_reasoning_are_read(client, field):
    said = []
    deltas = [{field: "hm "}, {field: "17"}, {"content": "18"}]
    reply = ask(client, raw=[stream_of(*deltas)], on_text=lambda *piece: said.append(piece))
    assert (reply.reasoning, reply.text) == ("hm 17", "18")
    assert said == [("reasoning", "hm "), ("reasoning", "17"), ("text", "18")]


WHOLE = {"usage": {"prompt_tokens": 1, "completion_tokens": 64}}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}, {"content": []}])
def test_case_27_null_content_is_no_answer(client, content):
    message = {"role": "assistant", "reasoning_content": "… so 18", **content}
    whole = WHOLE | {"choices": [{"message": message, "finish_reason": "length"}]}
    reply = client.chat("x", max_tokens=64, stream=False, extra={"paced": {"whole": whole}})
    assert (reply.text, reply.reasoning) == ("", "… so 18")
    assert reply.truncated and reply.complete


def test_case_27_content_as_a_list_of_parts(client):
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    whole = WHOLE | {"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}
    assert (
        client.chat("x", max_tokens=64, stream=False, extra={"paced": {"whole": whole}}).text
        == "ab"
    )


def test_case_27_unfinished_thinking_handed_over_as_content_is_no_answer():
    # What SGLang 0.5.23 really does with its ling3 parser when max_tokens cuts the thinking.
    streamed = replay(
        "sglang-chat-thinking.txt", Chat(max_tokens=12, ignore_eos=False, on_text=None)
    )
    whole = Chat(max_tokens=24, ignore_eos=False, on_text=None)
    whole.feed_whole(json.loads((STREAMS / "sglang-chat.json").read_text()), 1.0)
    assert streamed.chunk_tokens == [1, 2, 6, 7, 11, 12]  # the repetition is no chunk of its own
    for reply in (streamed, whole.finish(1.0, problem=None)):
        assert reply.text == "" and reply.reasoning.startswith(" dog while seven")
        assert reply.reasoning.count("dog") == 1
        assert reply.warnings == [NO_ANSWER]
        assert reply.complete and reply.truncated


def test_case_41_loopback_ignores_the_proxy_of_the_environment(server, monkeypatch):
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert Client(server.url).models() == ["paced"]
    assert Client(f"http://localhost:{server.port}").models() == ["paced"]


def test_case_41_other_hosts_still_go_through_the_proxy(server, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    # A proxy is asked for the whole address; the paced server, no proxy, then knows no such path.
    with pytest.raises(Refused, match="404"):
        Client("http://sparkling.invalid:30000").models()
    assert server.state()["headers"]["Host"] == "sparkling.invalid:30000"


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("LOCALHOST.", True),
        ("::1", True), ("0.0.0.0", True), ("10.0.0.1", False), ("spark.local", False),
        ("127.0.0.1.example.org", False), (None, False),
    ],
)  # fmt: skip
def test_case_41_what_loopback_is(host, here):
    assert is_loopback(host) is here


def test_case_43_keep_alives_are_not_the_first_token(client):
    reply = ask(client, n=5, max_tokens=5, pings=40, first_s=0.3)
    assert reply.comments == 40 and reply.unknown_payloads == 0
    assert len(reply.chunk_times_s) == 5
    assert reply.ttft_s >= 0.3
    assert reply.text == " tok" * 5


def test_case_43_comments_and_empty_events_between_tokens(client):
    token = sse(chunk({"content": "x"}), done=False)
    noise = "id: 1\n\n: ping\n\n:\n\ndata:\n\ndata: : PROCESSING\n\n"
    reply = ask(client, raw=[noise, token, noise, token, noise, sse(chunk({}, "stop"))])
    assert (reply.text, reply.complete) == ("xx", True)
    assert (reply.comments, reply.unknown_payloads, len(reply.chunk_times_s)) == (6, 3, 2)


def test_case_43_a_cut_after_silence_names_the_proxy(client, monkeypatch):
    now, read = [0.0], []  # a clock of its own: 1 ms a look, 1.2 s after the third token

    def look():
        now[0] += 0.001
        return now[0]

    def on_text(_kind, piece):
        read.append(piece)
        now[0] += 1.2 if len(read) == 3 else 0

    monkeypatch.setattr(wire, "time", SimpleNamespace(perf_counter=look))
    reply = ask(client, cut="fin", at=3, on_text=on_text)
    assert not reply.complete
    said = "after 1.2 s of silence, 3 tokens in (an idle limit of a proxy?)"
    assert said in reply.problem


@pytest.mark.parametrize(("cut", "note"), [("stall", ""), ("ping", " (only keep-alive comments)")])
def test_case_11_a_server_that_goes_silent_is_said_to_have_stopped(client, cut, note):
    def all_tokens_came_in_time(limit):
        began = time.monotonic()
        with pytest.raises(Stalled) as caught:
            ask(client, cut=cut, at=4, timeout_s=limit)
        assert time.monotonic() - began < 60  # the server is silent for 100 s
        said = f"stopped answering: nothing for {limit:g} s after 4 tokens{note}."
        assert not caught.value.reply.complete
        return str(caught.value).endswith(said) and caught.value.reply.text == " tok" * 4

    with_longer_limits(1.0, all_tokens_came_in_time)


def test_case_11_silence_after_the_finish_reason_takes_nothing_away(client):
    stream = sse(chunk({"content": "hi"}), chunk({}, "stop"), done=False)

    def came_in_time(limit):
        try:
            reply = ask(client, raw=[stream], gap_s=3 * limit, timeout_s=limit)
        except Stalled:
            return False
        assert reply.complete and reply.text == "hi"
        return True

    with_longer_limits(0.5, came_in_time)


def test_case_11_a_request_that_gets_no_byte_at_all(client):
    with pytest.raises(Stalled, match=r"nothing for 0\.3 s after 0 tokens"):
        ask(client, timeout_s=0.3, first_s=30)
    with pytest.raises(Stalled, match=r"no answer to /v1/chat/completions in 0\.3 s"):
        ask(client, timeout_s=0.3, stream=False, hang_after=0)


# -- counts and times ------------------------------------------------------------------------------


def test_times_are_of_chunks_with_new_tokens(client, server):
    # The second chunk leaves when the first has been read, so their times differ.
    reply = ask(
        client, n=10, k=2, rate=200, max_tokens=10, reasoning=2, hold=1,
        on_text=lambda *_: server.tell("/go"),
    )  # fmt: skip
    assert reply.chunk_tokens == [2, 4, 6, 8, 10]
    assert reply.reasoning == " tok" * 4 and reply.text == " tok" * 6
    assert reply.chunk_times_s == sorted(reply.chunk_times_s)
    assert reply.ttft_s == reply.chunk_times_s[0] < reply.chunk_times_s[-1] <= reply.e2e_s
    assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (5, 0, 10)


def test_speculation_counters_of_a_streamed_chat(client):
    spec = {
        "spec_verify_ct": 43, "spec_num_correct_drafts": 62, "spec_num_proposed_drafts": 129,
        "spec_accept_length": 2.465, "spec_correct_drafts_histogram": [10, 10, 17, 6],
    }  # fmt: skip
    reply = ask(client, n=106, max_tokens=106, rate=5000, spec=spec)
    assert (reply.spec.tokens, reply.spec.rounds, reply.spec.source) == (105, 43, "meta_info")
    assert reply.spec.accept_length == pytest.approx(105 / 43)
    assert reply.spec.accept_rate == pytest.approx(62 / 129)
    assert reply.spec.reported == 2.465
    assert ask(client, n=4, max_tokens=4).spec is None
    assert (
        ask(client, n=4, max_tokens=4, spec={"spec_verify_ct": 0, "spec_accept_length": 0}).spec
        is None
    )


def test_counters_before_and_after_when_replies_have_none(client):
    with client.counting() as window:
        ask(client, n=41, max_tokens=41, rate=5000, rounds=16)
    assert (window.spec.tokens, window.spec.rounds, window.spec.source) == (40, 16, "counters")
    assert window.requests == 1
    with client.counting() as window:
        ask(client, n=5, max_tokens=5)
    assert window.spec is None


def test_replays_of_sglang_0_5_23():
    reply = replay("sglang-chat-answer.txt", Chat(max_tokens=12, ignore_eos=False, on_text=None))
    assert reply.complete and reply.warnings == [] and reply.finish_reason == "length"
    assert reply.text == " dog while seven tiny engines draft several tokens ahead and one verifier"
    assert reply.chunk_tokens == [1, 2, 6, 7, 11, 12]
    assert (reply.spec.tokens, reply.spec.rounds, reply.spec.histogram) == (12, 5, (2, 1, 0, 2))
    assert reply.output_ids[:3] == [288, 293, 298] and len(reply.output_ids) == 12

    old = replay("sglang-chat-no-counts.txt", Chat(max_tokens=24, ignore_eos=False, on_text=None))
    assert old.completion_tokens == 24 and set(old.chunk_tokens) == {None} and old.spec is None
    assert old.text == "" and len(old.reasoning.split()) == 24

    raw = replay("sglang-generate.txt", Generate(max_tokens=8, ignore_eos=False, on_text=None))
    assert raw.text == " fox jumps over a lazy dog while seven" and raw.complete
    assert raw.chunk_tokens == [1, 3, 5, 7, 8] and len(raw.output_ids) == 8
    assert (raw.spec.tokens, raw.spec.rounds) == (10, 4)
    assert [x.id for x in raw.logprobs] == raw.output_ids
    assert raw.logprobs[0].top == pytest.approx({271: -0.64063, 351: -4.51563}, abs=1e-4)
    assert raw.meta_info["spec_num_proposed_drafts"] == 12

    other = replay("llama-cpp-chat.txt", Chat(max_tokens=24, ignore_eos=False, on_text=None))
    assert other.complete and other.completion_tokens == 24 and other.cached_tokens == 22


def test_generate_in_increments_equals_generate_in_full():
    steps = [(" a", [1], 1), (" b c", [2, 3], 3), (" d", [4], 4)]
    full, part = (Generate(max_tokens=4, ignore_eos=False, on_text=None) for _ in range(2))
    text, ids = "", []
    for i, (new, tokens, count) in enumerate(steps):
        text, ids = text + new, ids + tokens
        finish = {"type": "length"} if count == 4 else None
        logprobs = [[-0.1 * t, t, None] for t in ids]
        meta = {
            "completion_tokens": count,
            "finish_reason": finish,
            "output_token_logprobs_length": count,
        }
        full.feed(
            {
                "text": text,
                "output_ids": ids,
                "meta_info": {**meta, "output_token_logprobs": logprobs},
            },
            i,
        )
        new_logprobs = logprobs[-len(tokens) :]
        part.feed(
            {
                "text": new,
                "output_ids": tokens,
                "meta_info": {**meta, "output_token_logprobs": new_logprobs},
            },
            i,
        )
    a, b = full.finish(3, problem=None), part.finish(3, problem=None)
    assert a.text == b.text == " a b c d"
    assert a.output_ids == b.output_ids == [1, 2, 3, 4]
    assert a.chunk_tokens == b.chunk_tokens == [1, 3, 4]
    assert a.logprobs == b.logprobs and len(a.logprobs) == 4


def test_a_server_that_does_not_stream(client):
    whole = WHOLE | {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    reply = ask(client, whole=whole)
    assert (reply.text, reply.complete, reply.streamed, reply.ttft_s) == ("hi", True, False, None)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, {"object": "error", "message": "max_new_tokens must\nbe positive"}, "(400): max_new_tokens must be positive"),
        (400, {"error": {"message": "bad"}}, "(400): bad"),
        (404, {"message": "The model `x` does not exist"}, "does not serve the model 'paced' (404)"),
        (404, {"detail": "Not Found"}, "has no /v1/chat/completions (404)"),
        (503, {"message": "still loading"}, "not ready or overloaded (503): still loading"),
        (502, "<html>Bad gateway</html>", "gateway before"),
        (500, "Internal Server Error", "(500): Internal Server Error"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_http_errors_in_one_sentence(client, status, body, said, stream):
    with pytest.raises(Refused) as caught:
        ask(client, status=status, body=body, stream=stream)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.status == status


def test_nobody_there():
    with nobody() as url:
        for call in (lambda c: c.models(), lambda c: c.generate("x", max_tokens=1)):
            with pytest.raises(
                Unreachable, match=r"No server answers at .* \(connection refused\)"
            ):
                call(Client(url))


def test_a_server_that_hangs_up_without_an_answer(unhurried):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up():
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", model="m")
        reply = client.chat("x", max_tokens=4)
        assert not reply.complete and "after 0 tokens" in reply.problem
        with pytest.raises(SparklingError, match="broke off while answering /v1/models"):
            client.models()


def test_the_key_is_in_the_header_and_nowhere_else(server):
    key = "sesame-1234"
    client = Client(server.url, key, model="paced")
    ask(client, n=2, max_tokens=2)
    assert server.state()["headers"]["Authorization"] == f"Bearer {key}"
    assert key not in repr(client) and key not in str(vars(client))
    info = client.server_info()
    assert info["api_key"] == "***" and key not in json.dumps(info)
    for status in (400, 401, 500):
        with pytest.raises(Refused) as caught:
            ask(client, status=status, body={"message": f"Bearer {key} is wrong"})
        assert key not in str(caught.value)
    stream = sse(chunk({"content": "a"}), {"error": {"message": f"bad key {key}"}})
    assert key not in ask(client, raw=[stream]).problem


def test_401_says_whether_a_key_was_given(server):
    with pytest.raises(Refused, match="wants an API key: none was given"):
        ask(Client(server.url), status=401)
    with pytest.raises(Refused, match="does not accept the API key given"):
        ask(Client(server.url, "wrong-key"), status=401)


def test_generate_wants_one_kind_of_prompt(client):
    for kwargs in ({}, {"prompt": "x", "input_ids": [1]}):
        with pytest.raises(RequestError, match="either a prompt or input_ids"):
            client.generate(max_tokens=1, **kwargs)


def test_metrics_page_and_token_count(client):
    numbers = client.metrics()
    assert numbers["sglang:generation_tokens_total"] >= 7  # added up over labels
    assert client.count_tokens("a b c") == 3
    with pytest.raises(Refused, match="404"):
        client.model_info()


def test_base_url_spellings(server):
    for url in (
        server.url + "/",
        server.url + "/v1",
        server.url + "/v1/",
        f"127.0.0.1:{server.port}",
    ):
        assert Client(url).models() == ["paced"]
