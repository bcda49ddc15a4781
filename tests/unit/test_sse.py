"""Events out of bytes: case 3 (line separators in text) and case 43 (keep-alive comments)."""

import json
import random

import pytest
from sparkling.sse import Event, JsonEvents, Splitter

TEXT = "a\u2028b\u0085c ✅\u2029\x0b\x0c\x1c"


def feed(stream: bytes, cuts=()):
    """Everything a splitter makes of `stream`, fed in pieces cut at `cuts`."""
    splitter, events, start = Splitter(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        events += splitter.feed(stream[start:cut])
        start = cut
    return events + list(splitter.close()), splitter


def delta(text):
    return json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("space", [" ", ""])
def test_case_03_unicode_line_separators_do_not_cut_an_event(newline, space):
    stream = f"data:{space}{delta(TEXT)}{newline}{newline}".encode() * 2
    for cut in range(len(stream)):
        events, _ = feed(stream, [cut])
        assert [json.loads(e.data)["choices"][0]["delta"]["content"] for e in events] == [TEXT] * 2


def test_case_03_one_event_over_two_data_lines():
    first, second = delta(TEXT).split(": [", 1)
    stream = f"data: {first}: [\ndata: {second}\n\n".encode()
    events, _ = feed(stream)
    assert len(events) == 1
    assert json.loads(events[0].data)["choices"][0]["delta"]["content"] == TEXT


def test_case_03_same_counts_as_the_ascii_twin():
    twins = [TEXT, "a-b-c x----"]
    counts = []
    for text in twins:
        events = JsonEvents()
        found = list(events.feed((f"data: {delta(text)}\n\n" * 5 + "data: [DONE]\n\n").encode()))
        counts.append((len(found), events.unknown, events.done, len(text)))
    assert counts[0] == counts[1] == (5, 0, True, len(TEXT))


def test_case_43_comments_empty_events_and_unknown_payloads():
    stream = (
        b": ping\n\n:\n\n: ping\r\n\r\ndata:\n\ndata\n\nid: 1\n\nretry: 10\n\nevent: ping\n\n"
        b"data: : PROCESSING\n\ndata: 7\n\n"
        + f"data: {delta('x')}\n\n".encode()
        + b"data: [DONE]\n\n"
    )
    events = JsonEvents()
    found = list(events.feed(stream))
    assert [p["choices"][0]["delta"]["content"] for p in found] == ["x"]
    assert events.comments == 3
    assert events.unknown == 2
    assert events.splitter.empty == 5
    assert events.done


def test_fields():
    events, splitter = feed(
        b"\xef\xbb\xbfid: 1\nevent: sglext_ids\ndata:  two\n\ndata: x\n\n: c\n\n"
    )
    assert events == [Event(b" two", "sglext_ids", "1"), Event(b"x", "message", "1")]
    assert splitter.comments == 1


def test_last_event_without_blank_line_counts_if_it_is_whole():
    whole = JsonEvents()
    assert list(whole.feed(b'data: {"a": 1}')) == []
    assert list(whole.close()) == [{"a": 1}]
    half = JsonEvents()
    assert list(half.feed(b'data: {"a": 1}\n\ndata: {"a"')) == [{"a": 1}]
    assert list(half.close()) == []
    assert half.unknown == 1


def test_nothing_counts_after_done():
    events = JsonEvents()
    assert list(events.feed(b'data: [DONE]\n\ndata: {"a": 1}\n\n')) == []
    assert events.done and events.unknown == 0


def test_crlf_cut_between_its_two_bytes_is_one_line_end():
    stream = b"data: a\r\ndata: b\r\n\r\n"
    for cut in range(len(stream)):
        events, _ = feed(stream, [cut])
        assert [e.data for e in events] == [b"a\nb"]


def test_any_cutting_gives_the_same_events():
    rng = random.Random(7)
    bits = [
        b"data: x",
        b"data:y ",
        b": c",
        b"event: e",
        b"id: 9",
        b"",
        b"",
        b"data",
        "é\u2028".encode(),
    ]
    for _ in range(300):
        stream = b"".join(rng.choice(bits) + rng.choice([b"\n", b"\r\n", b"\r"]) for _ in range(12))
        want, _ = feed(stream)
        cuts = sorted(rng.sample(range(len(stream)), k=min(6, len(stream))))
        assert feed(stream, cuts)[0] == want
        assert feed(stream, range(len(stream)))[0] == want
