"""Comments in the silences of a stream: between events only, and nothing else changed."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from sparkling_sglang import keep_alive, switches
from sparkling_sglang.keep_alive import COMMENT, KeepAlive

SILENCE = 0.02
UNTIL_A_COMMENT = object()  # in a script: a silence that a busy machine cannot make too short
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


def body(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


def play(script, asked=b'{"stream": true}', method="POST", pieces=1):
    """What a client gets when the application sends `script`: messages, and seconds of silence."""

    async def run():
        seen, requests = [], []
        step = max(1, -(-len(asked) // pieces))
        parts = [asked[i : i + step] for i in range(0, len(asked), step)] or [b""]
        incoming = [
            {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
            for i, part in enumerate(parts)
        ]

        async def receive():
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message):
            seen.append(message)

        async def app(scope, receive, send):
            got = b""
            while True:
                message = await receive()
                got += message.get("body", b"")
                if not message.get("more_body"):
                    break
            requests.append(got)
            for item in script:
                if isinstance(item, float):
                    await asyncio.sleep(item)
                elif item is UNTIL_A_COMMENT:
                    limit = time.monotonic() + 60
                    while COMMENT not in text(seen) and time.monotonic() < limit:
                        await asyncio.sleep(SILENCE)
                elif isinstance(item, Exception):
                    raise item
                else:
                    await send(item)

        await KeepAlive(app, SILENCE)({"type": "http", "method": method}, receive, send)
        assert requests == [asked]  # the application got the whole request
        return seen

    return asyncio.run(run())


def text(seen) -> bytes:
    return b"".join(m.get("body", b"") for m in seen)


def test_a_lively_stream_is_untouched():
    script = [START, body(b"data: a\n\n"), body(b"data: b\n\n"), body(b"", more=False)]
    assert play(script, pieces=5) == script


def test_a_silence_between_events_gets_comments_and_no_empty_event():
    seen = play([START, body(b"data: a\n\n"), UNTIL_A_COMMENT, body(b"data: b\n\n", more=False)])
    said = text(seen)
    assert said.startswith(b"data: a\n\n" + COMMENT) and said.endswith(COMMENT + b"data: b\n\n")
    assert b"\n\n\n" not in said and COMMENT + b"\n" not in said
    assert said.replace(COMMENT, b"") == b"data: a\n\ndata: b\n\n"
    assert [m["type"] for m in seen].count("http.response.start") == 1
    assert seen[-1]["more_body"] is False


def test_a_silence_before_the_headers_sends_them_and_drops_the_second():
    seen = play([SILENCE * 5, START, body(b"data: a\n\n"), body(b"", more=False)])
    assert seen[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in seen[0]["headers"]
    assert [m["type"] for m in seen].count("http.response.start") == 1
    assert text(seen).startswith(COMMENT) and text(seen).endswith(COMMENT + b"data: a\n\n")


def test_an_event_that_is_being_sent_is_never_cut():
    seen = play([START, body(b"data: a"), SILENCE * 5, body(b"bc\n\n", more=False)])
    assert text(seen) == b"data: abc\n\n"


def test_a_quick_refusal_keeps_its_status():
    refused = {**START, "status": 400, "headers": [(b"content-type", b"application/json")]}
    script = [refused, SILENCE * 3, body(b'{"error": {"message": "too long"}}', more=False)]
    assert play(script) == [refused, script[2]]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', {"message": "too long", "code": 400}),
        (b'{"message": "no"}', {"message": "no"}),
        (b"Internal Server Error", {"message": "Internal Server Error"}),
    ],
)
def test_a_refusal_after_a_long_silence_is_an_event(said, error):
    refused = {**START, "status": 400, "headers": [(b"content-type", b"application/json")]}
    halves = [body(said[:5]), SILENCE * 3, body(said[5:], more=False)]
    seen = play([SILENCE * 3, refused, *halves])
    assert seen[0]["status"] == 200
    lines = text(seen).replace(COMMENT, b"").decode().split("\n\n")
    assert json.loads(lines[0].removeprefix("data: ")) == {"error": error}
    assert lines[1:] == ["data: [DONE]", ""] and seen[-1]["more_body"] is False


@pytest.mark.parametrize(
    ("asked", "method"),
    [
        (b'{"stream": false}', "POST"),
        (b'{"prompt": "\\"stream\\": true"}', "POST"),
        (b'["stream", true]', "POST"),
        (b'{"stream": true', "POST"),
        (b"", "POST"),
        (b"", "GET"),
    ],
)
def test_what_does_not_stream_is_passed_through(asked, method):
    script = [{**START, "headers": []}, SILENCE * 3, body(b"{}", more=False)]
    assert play(script, asked, method) == [script[0], script[2]]


def test_an_error_of_the_application_is_raised_as_before():
    with pytest.raises(RuntimeError, match="broken"):
        play([START, RuntimeError("broken")])


def test_a_client_that_goes_away_ends_the_application():
    ended = []

    async def run():
        async def receive():
            return {"type": "http.request", "body": b'{"stream": true}', "more_body": False}

        async def app(scope, receive, send):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        async def send(message):
            raise OSError("gone")

        await KeepAlive(app, SILENCE)({"type": "http", "method": "POST"}, receive, send)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(run())
    assert ended == [True]


def test_other_protocols_are_left_alone():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(KeepAlive(app, SILENCE)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_a_wrong_number_is_one_sentence(value):
    with pytest.raises(ValueError, match="is no number of seconds above 0") as caught:
        keep_alive.register_main(None, value)
    assert "\n" not in str(caught.value)
    assert switches.read({"SPARKLING_KEEP_ALIVE_S": value}).keep_alive == value


def test_it_is_off_unless_asked_for():
    assert switches.read({}).keep_alive is None and switches.read({}).idle
    assert not switches.read({"SPARKLING_KEEP_ALIVE_S": "15"}).idle


def test_sglang_s_own_application_takes_it(monkeypatch):
    from sglang.srt.entrypoints import http_server
    from sparkling_sglang.patches import Patches

    hooks = {}
    monkeypatch.setattr(
        Patches, "hook", lambda self, name, target, fn, kind: hooks.update({target: fn})
    )
    keep_alive.register_main(Patches(), "15")
    (target,) = hooks
    assert callable(getattr(http_server, target.rpartition(".")[2]))
    monkeypatch.setattr(http_server.app, "user_middleware", list(http_server.app.user_middleware))
    monkeypatch.setattr(http_server.app, "middleware_stack", None)
    hooks[target]()
    first = http_server.app.user_middleware[0]
    assert first.cls is KeepAlive and first.kwargs == {"silence_s": 15.0}
