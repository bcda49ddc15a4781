"""Sparklet on one real server that is broken on purpose: answers stay right, drafts are useless, the
proof says so by name, and a streamed answer carries comments in its silences."""

from __future__ import annotations

import json

import pytest
from sparkling import proof, recipe, server
from sparkling.errors import NotLive

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]

PROBLEM = "Nora has 12 apples and buys 7 more. How many apples does Nora have now?"
STORY = "Write a long story about a hedgehog."


@pytest.fixture(scope="module")
def running(root, server_python, tmp_path_factory):
    book = recipe.load("sparklet", root=root)
    folder = tmp_path_factory.mktemp("runs") / "runs"
    launch = book.render("nextn", model=book.model, port=0, variant="trap")
    with server.start(
        launch,
        python=server_python,
        log=folder / "trap.log",
        extra_env={
            "SPARKLING_KEEP_ALIVE_S": "0.005"
        },  # shorter than a round: silence is easily had
        deadline_s=600,
        runs=folder,
    ) as one:
        yield one


def test_the_proof_finds_it_and_calls_it_by_its_name(running):
    got = proof.prove(running)
    nextn = next(v for v in got.verdicts if v.switch == "nextn")
    assert nextn.state == "not live"
    assert nextn.cause.startswith("the draft contributes nothing")
    assert "SPARKLING_TRAP=tensor-only" in nextn.cause
    assert {v.switch: v.state for v in got.verdicts if v.switch != "nextn"} == {
        "humming": "off",
        "fp8-head": "live",
    }
    with pytest.raises(NotLive, match="the draft contributes nothing"):
        got.require()
    length = got.probe.accept_length
    print(f"accept length of the probe in the trap: {length:.3f} over {got.probe.rounds} rounds")
    assert 1.0 <= length < 1.1 and got.probe.rounds > 100


def test_answers_are_right_all_the_same(running):
    reply = running.client().chat(PROBLEM, max_tokens=120).require()
    assert "#### 19" in reply.text


def test_it_says_so_where_nobody_can_miss_it(running):
    status = json.loads(running.status_file.read_text())
    assert status["switches"]["trap"] is True and status["draft"]["trap"] == "tensor-only"
    assert status["draft"]["head_shared"] is False
    log = running.log.read_text(errors="replace")
    assert log.count("THIS SERVER IS BROKEN ON PURPOSE") >= 2  # main process and scheduler


def test_silences_of_a_stream_carry_comments_and_change_nothing(running):
    client = running.client()
    whole = client.chat(STORY, max_tokens=64, thinking=False, stream=False).require()
    streamed = client.chat(STORY, max_tokens=64, thinking=False).require()
    print(f"{streamed.comments} comments in {streamed.e2e_s:.2f} s")
    assert streamed.text == whole.text and streamed.completion_tokens == 64
    assert streamed.comments > 0 and streamed.unknown_payloads == 0
    assert all(later >= earlier for earlier, later in zip(
        streamed.chunk_times_s, streamed.chunk_times_s[1:], strict=False
    ))  # fmt: skip
    raw = client.generate(PROBLEM, max_tokens=16, stream=True).require()
    assert raw.completion_tokens == 16
