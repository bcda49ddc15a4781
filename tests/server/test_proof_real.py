"""Each switch broken for real, on a real server: the proof says not live, and why. And what the FP8
head does to the same tokens, read by a baseline and by an FP8 head.

Four starts: a baseline, the FP8 head, all switches, and all switches with the draft's head left
unshared. The first serves for dropped flags as well: declared on, started without. The first two
are asked by `head_live` too.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from sparkling import head_live, proof, recipe, server, tiny
from sparkling.client import Client
from sparkling.errors import NotLive, ServerError

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

READY_S = 600.0  # the machine may be busy with other tests


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("model") / "tiny-ling")


@pytest.fixture(scope="module")
def begin(model, root, server_python, tmp_path_factory):
    """start(stage, **env) → a ready server of that stage; one at a time, as on a small machine."""
    book = recipe.load("tiny-ling", root=root)
    folder = tmp_path_factory.mktemp("runs") / "runs"
    running = []

    def start(stage: str, **env: str):
        for old in running:
            old.stop()
        log = folder / f"{stage}-{len(running)}.log"
        launch = book.render(stage, model=model, port=0)
        one = server.start(
            launch, python=server_python, log=log, extra_env=env, deadline_s=READY_S, runs=folder
        )
        running.append(one)
        return one

    yield start
    for one in running:
        one.stop()
    shutil.rmtree(folder, ignore_errors=True)


def judge(running, ids=None):
    """(the tokens, judged twice, greedy answers), of new tokens if none are given."""
    prompts = head_live.PROMPTS[:3]
    with Client(running.url, running.api_key, timeout_s=300) as client:
        ids = ids or head_live.texts(client, prompts, max_tokens=32)
        twice = head_live.force(client, ids), head_live.force(client, ids)
        answers = [
            client.generate(p, max_tokens=32, stream=False).require().output_ids for p in prompts
        ]
    return ids, twice, answers


@pytest.fixture(scope="module")
def judged():
    """stage -> what `judge` says: `baseline` and `head` fill it in, in this order."""
    return {}


@pytest.fixture(scope="module")
def baseline(begin, judged, tmp_path_factory):
    """(a proved baseline, the same server declared to be the last stage, the stored proof)."""
    running = begin("baseline")
    healthy = proof.prove(running)
    judged["baseline"] = judge(running)
    stored = tmp_path_factory.mktemp("proof") / "proof-baseline.json"
    stored.write_text(json.dumps(healthy.to_json()))
    declared = dict.fromkeys(running.launch.switches, True)
    running.launch = dataclasses.replace(running.launch, stage="nextn", switches=declared)
    dropped = proof.prove(running)
    return healthy, dropped, stored


@pytest.fixture(scope="module")
def head(begin, baseline, judged):
    running = begin("fp8-head")
    proved = proof.prove(running, baseline=baseline[2])
    judged["fp8-head"] = judge(running, judged["baseline"][0])
    return proved


@pytest.fixture(scope="module")
def everything(begin, head):
    running = begin("nextn")
    return proof.prove(running), running


def states(got: proof.Proof) -> dict[str, str]:
    return {v.switch: v.state for v in got.verdicts}


def of(got: proof.Proof, switch: str) -> proof.Verdict:
    return next(v for v in got.verdicts if v.switch == switch)


def test_the_baseline_is_proved_off_switch_by_switch(baseline):
    healthy, _, _ = baseline
    assert states(healthy) == {"humming": "off", "fp8-head": "off", "nextn": "off"}
    healthy.require()
    assert healthy.probe.top
    assert len(healthy.probe.output_ids) == proof.PROBE_TOKENS


@pytest.mark.parametrize(
    ("switch", "why"),
    [
        ("humming", "runs its experts with auto"),  # the wrong backend
        ("fp8-head", "never reached the server's environment"),
        ("nextn", "never reached the server"),
    ],
)
def test_a_dropped_flag_is_not_live_and_says_so(baseline, switch, why):
    _, dropped, _ = baseline
    verdict = of(dropped, switch)
    assert verdict.state == "not live"
    assert why in verdict.cause
    against = {e.place for e in verdict.evidence if e.ok is False}
    assert {"arguments", "log"} <= against
    with pytest.raises(NotLive, match="not live"):
        dropped.require()


def test_the_fp8_head_is_live_by_all_three_places(head):
    verdict = of(head, "fp8-head")
    assert verdict.state == "live", verdict
    assert {e.place for e in verdict.evidence if e.ok} == {"arguments", "log", "probe"}
    found = {e.wanted: e.found for e in verdict.evidence}
    shift = next(v for k, v in found.items() if k.startswith("log-probabilities"))
    assert shift.startswith("mean difference 0.")
    assert states(head) == {"humming": "off", "fp8-head": "live", "nextn": "off"}


# Both servers have been asked by now; `head` is named so that this is so for one test alone.


def test_a_server_judges_the_same_tokens_alike_twice(head, judged):
    assert list(judged) == ["baseline", "fp8-head"]
    for _, (first, again), _ in judged.values():
        noise = head_live.compare_forced(first, again)[0]
        assert noise.first.value == 1.0 and noise.shift_max < 1e-3


def test_the_fp8_head_moves_log_probabilities_a_little(head, judged):
    (_, (plain, _), _), (_, (fp8, _), _) = judged["baseline"], judged["fp8-head"]
    found = head_live.compare_forced(plain, fp8)[0]
    assert found.n > 60
    assert 0 < found.shift_size < 0.2  # it does something, and not much
    assert found.first.value > 0.9 and found.overlap > 0.6
    assert found.kl < 0.05


def test_free_running_answers_are_paired(head, judged):
    found = head_live.compare_answers(judged["baseline"][2], judged["fp8-head"][2], max_tokens=32)
    assert found.n == 3 and 0 <= found.identical.value <= 1


def test_nextn_contributes_beside_the_fp8_head(everything):
    got, _ = everything
    assert states(got) == {"humming": "off", "fp8-head": "live", "nextn": "live"}
    assert got.probe.rounds >= 20
    assert 1.05 < got.probe.accept_length <= 4.0
    assert of(got, "nextn").readings


def test_declared_off_what_runs_is_not_off(everything):
    got, running = everything
    off = dict.fromkeys(running.launch.switches, False)
    running.launch = dataclasses.replace(running.launch, stage="baseline", switches=off)
    again = proof.prove(running)
    assert states(again) == {"humming": "off", "fp8-head": "not off", "nextn": "not off"}
    del got


def test_a_draft_without_the_target_s_scales_is_not_live(begin, everything):
    """The trap that costs the whole speed-up and changes no text: only the accept length tells."""
    try:
        running = begin("nextn", SPARKLING_SHARE_HEAD="0")
    except ServerError as refused:  # a build in which the bare FP8 product does not exist
        assert "lm_head" in str(refused) or "Float8" in str(refused)
        return
    got = proof.prove(running)
    verdict = of(got, "nextn")
    assert verdict.state == "not live"
    assert verdict.cause.startswith("the draft contributes nothing")
    assert "weights without the scales" in verdict.cause
    (told,) = [e for e in verdict.evidence if e.source == "status" and e.ok is False]
    assert "head of its own" in told.cause
    assert got.probe.accept_length < 1.05
    running.stop()
    with pytest.raises(ServerError, match="not running"):
        proof.prove(running)
