"""Each switch broken for real, on a real server: the proof says not live, and why.

Four starts: a baseline, the FP8 head, all switches, and all switches with the draft's head left
unshared. The first serves for dropped flags as well: declared on, started without.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from sparkling import proof, recipe, server, tiny
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


@pytest.fixture(scope="module")
def baseline(begin, tmp_path_factory):
    """(a proved baseline, the same server declared to be the last stage, the stored proof)."""
    running = begin("baseline")
    healthy = proof.prove(running)
    stored = tmp_path_factory.mktemp("proof") / "proof-baseline.json"
    stored.write_text(json.dumps(healthy.to_json()))
    declared = dict.fromkeys(running.launch.switches, True)
    running.launch = dataclasses.replace(running.launch, stage="nextn", switches=declared)
    dropped = proof.prove(running)
    return healthy, dropped, stored


@pytest.fixture(scope="module")
def head(begin, baseline):
    return proof.prove(begin("fp8-head"), baseline=baseline[2])


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
