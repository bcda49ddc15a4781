"""How a running server is asked. The server is a stand-in; its replies are of the real types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from sparkling import probing, proof, recipe
from sparkling.errors import RequestError, ServerError, SparklingError
from sparkling.reply import Reply, SpecCounts, TokenLogprob

LOADED = (
    "[2026-11-29 18:15:18] Load weight end. elapsed=1.89 s, type=BailingMoeV3ForCausalLM, "
    "avail mem=7.00 GB, mem usage=1.00 GB."
)


def reply(**more) -> Reply:
    tops = [{11: -0.1, 12: -2.5}, {13: -0.2, 11: -3.0}]
    logprobs = [TokenLogprob(11, None, -0.1, tops[0]), TokenLogprob(13, None, -0.2, tops[1])]
    return Reply(
        text="x", completion_tokens=2, complete=True, output_ids=[11, 13], logprobs=logprobs, **more
    )


class FakeClient:
    def __init__(self, server):
        self.server, self.asked = server, []

    def server_info(self):
        return {
            "moe_runner_backend": "auto",
            "speculative_algorithm": None,
            "enable_fp32_lm_head": False,
            "internal_states": [{"moe_runner_backend": "auto"}],
        }

    def generate(self, prompt, **options):
        self.asked.append((prompt, options))
        if self.server.problem:
            raise self.server.problem
        self.server.worked()
        return self.server.reply


class FakeServer:
    """A server whose plugin writes `head` once loaded, and counts up when it is asked."""

    def __init__(self, tmp_path, launch, head=None):
        self.launch, self.port, self.pid = launch, 31999, os.getpid()
        self.started = time.time()
        self.status_file = tmp_path / "x.status.json"
        self.reply, self.problem, self.living = reply(), None, True
        self.head, self.delay = head, 0.0
        self._client = FakeClient(self)
        if head:
            self.write(3)

    def write(self, applied):
        self.status_file.write_text(json.dumps({"head": self.head | {"applied": applied}}))

    def worked(self):
        if self.head and self.head["dtype"] == "float8_e4m3fn":
            threading.Timer(self.delay, self.write, (5,)).start()

    def client(self):
        return self._client

    def alive(self):
        return self.living

    def events(self):
        from sparkling import log

        return list(log.parse([LOADED]))


@pytest.fixture
def launch(root):
    return recipe.load("tiny-ling", root=root).render("baseline", model=root / "m")


def test_a_baseline_is_proved_with_one_greedy_request(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(probing, "STATUS_WAIT_S", 0.0)
    server = FakeServer(tmp_path, launch)
    got = proof.prove(server)
    assert {v.switch: v.state for v in got.verdicts} == dict.fromkeys(launch.switches, "off")
    ((prompt, options),) = server._client.asked
    assert prompt == proof.PROBE_PROMPT
    assert options["temperature"] == 0
    assert options["max_tokens"] == proof.PROBE_TOKENS
    assert options["ignore_eos"]
    assert got.probe.top == [{"11": -0.1, "12": -2.5}, {"13": -0.2, "11": -3.0}]
    stored = json.loads(json.dumps(got.to_json()))
    assert proof.Proof.from_json(stored).to_json() == got.to_json()


def test_the_counter_is_waited_for(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(probing, "STATUS_WAIT_S", 60.0)  # the writing thread may come late
    server = FakeServer(tmp_path, launch, {"dtype": "float8_e4m3fn"})
    server.delay = 0.6  # the plugin writes twice a second
    server.launch = launch.__class__(**{**vars(launch), "switches": {"fp8-head": True}})
    got = proof.prove(server)
    assert got.probe.applied == (3, 5)


def test_a_refused_probe_is_evidence_and_no_crash(tmp_path, launch):
    server = FakeServer(tmp_path, launch)
    server.problem = RequestError("the server refused")
    got = proof.prove(server)
    assert got.probe.answered is False
    assert "refused" in got.probe.note


def test_a_dead_server_is_one_sentence(tmp_path, launch):
    server = FakeServer(tmp_path, launch)
    server.living = False
    with pytest.raises(ServerError, match="port 31999 is not running"):
        proof.prove(server)


def test_speculation_counters_are_read_as_the_server_gives_them():
    meta = {
        "spec_verify_ct": 31,
        "spec_num_correct_drafts": 17,
        "spec_num_proposed_drafts": 93,
        "spec_accept_length": 1.5483870967741935,
        "spec_accept_rate": 0.1827956989247312,
    }
    got = probing.probe_of(reply(spec=SpecCounts.from_server(meta, 48)))
    assert (got.rounds, got.correct, got.proposed) == (31, 17, 93)
    assert got.accept_length == pytest.approx(48 / 31)
    assert got.reported_rate == pytest.approx(17 / 93)
    assert got.reported_length == pytest.approx(1.548387)
    none = probing.probe_of(reply())
    assert none.rounds is none.correct is none.accept_length is none.reported_length is None


def test_an_incomplete_reply_is_no_answer():
    assert (
        probing.probe_of(Reply(completion_tokens=3, complete=False, problem="cut")).answered
        is False
    )


def test_the_status_file_of_another_server_is_not_believed(tmp_path):
    path = tmp_path / "s.json"
    assert probing.read_status(None) is None
    assert probing.read_status(path) == {}
    path.write_text('{"head": {"applied": 3}}')
    written = path.stat().st_mtime
    assert probing.applied_of(probing.read_status(path, written)) == 3
    assert probing.read_status(path, written + 60) == {}
    path.write_text('{"head": ')
    assert probing.read_status(path) is None
    path.write_text("[1]")
    assert probing.read_status(path) is None


def test_of_the_environment_only_what_was_asked_for_is_kept():
    env = dict(os.environ) | {"SPARKLING_FP8_LM_HEAD": "1", "MY_SECRET": "s3cret", "ASKED": "yes"}
    child = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while (found := probing.process_environment(child.pid, ["ASKED"])) != {
            "SPARKLING_FP8_LM_HEAD": "1",
            "ASKED": "yes",
        } and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        child.kill()
        child.communicate()
    assert found == {"SPARKLING_FP8_LM_HEAD": "1", "ASKED": "yes"}
    assert probing.process_environment(2**22 + 1, []) is None


def test_what_to_compare_with_is_read_from_a_stored_proof(tmp_path):
    path = tmp_path / "proof-baseline.json"
    assert probing.reference_of(None) is None
    assert probing.reference_of(path) is None
    path.write_text(json.dumps({"stage": "baseline", "probe": {"top": [], "output_ids": []}}))
    assert probing.reference_of(path) is None
    path.write_text(
        json.dumps({"stage": "baseline", "probe": {"top": [{"1": -1.0}], "output_ids": [1]}})
    )
    assert probing.reference_of(path) == {
        "stage": "baseline",
        "top": [{"1": -1.0}],
        "output_ids": [1],
    }
    path.write_text("{")
    with pytest.raises(SparklingError, match=r"is not readable .* prove the baseline again"):
        probing.reference_of(path)
