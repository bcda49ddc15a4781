"""A real server with an FP8 head and NEXTN, through what asks its head for more than a greedy token.

`tests/engine/test_head_paths.py` holds the numbers of each path; here they meet verification of four
tokens, the grammar's mask and the sampler as a server runs them.
"""

from __future__ import annotations

import json
import re

import httpx
import pytest
from sparkling import head_live
from sparkling.client import Client

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PROMPT = "The question is"


@pytest.fixture(scope="module")
def running(tiny_nextn):
    return tiny_nextn.running()


@pytest.fixture(scope="module")
def client(running):
    return Client(running.url, running.api_key, timeout_s=300)


def head_of(running) -> dict:
    return json.loads(running.status_file.read_text())["head"]


def test_prefill_and_verification_read_the_same_head(client, running):
    """The log-probabilities of an answer, as it was made and as a prompt that is read again."""
    assert head_of(running)["dtype"] == "float8_e4m3fn"
    made = client.generate(PROMPT, max_tokens=40, logprobs=5, ignore_eos=True).require()
    assert made.spec.rounds < 40  # several tokens a round: verified four at a time
    (ids,) = head_live.texts(client, [PROMPT], max_tokens=40)
    (read,) = head_live.force(client, [ids])
    n = min(len(made.output_ids), len(ids) - 1)
    answer = ids[-len(made.output_ids) :]
    assert answer[:n] == made.output_ids[:n]
    for token, as_prompt in zip(made.logprobs, read.logprobs[-len(made.output_ids) :], strict=True):
        assert token.logprob == pytest.approx(as_prompt, abs=0.02)
    for token, as_prompt in zip(made.logprobs, read.top[-len(made.output_ids) :], strict=True):
        assert token.top.keys() & as_prompt.keys() and token.id in as_prompt


def test_a_grammar_binds_every_token_of_a_verified_round(client):
    pattern = "(yes|no), [0-9]{3}( and [0-9]{3}){2}"
    sampling = {"max_new_tokens": 60, "temperature": 0.0, "regex": pattern}
    for temperature in (0.0, 1.0):
        asked = {"sampling_params": {**sampling, "temperature": temperature}}
        reply = client.generate(PROMPT, max_tokens=60, extra=asked, stream=False).require()
        assert re.fullmatch(pattern, reply.text), reply.text
        assert reply.spec.rounds


def test_a_seeded_sample_repeats_and_differs_from_greedy(client):
    def ask(**more) -> list[int]:
        return client.generate(PROMPT, max_tokens=24, ignore_eos=True, **more).require().output_ids

    hot = [ask(temperature=1.0, logprobs=2) for _ in range(3)]
    assert len({tuple(ids) for ids in hot}) > 1
    assert ask() == ask() and len(ask(temperature=0.6, top_p=0.9, top_k=20)) == 24


def test_weights_cannot_be_changed_under_the_head(client, running):
    """SGLang's own answer, with our sentence in it; and the server serves on."""
    key = {"Authorization": f"Bearer {running.api_key}"} if running.api_key else {}
    model = client.server_info()["model_path"]
    answer = httpx.post(
        f"{running.url}/update_weights_from_disk",
        json={"model_path": model},
        headers=key,
        timeout=60,
    )
    assert answer.status_code == 400
    assert "quantized when the server started" in answer.json()["message"]
    assert client.generate(PROMPT, max_tokens=8).require().output_ids
    assert head_of(running)["dtype"] == "float8_e4m3fn"
