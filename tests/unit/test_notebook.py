"""The session: what a notebook's cells call. The server is a stand-in; `tests/server` has a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sparkling import notebook, proof, show
from sparkling.errors import NotLive, SparklingError, UsageError
from sparkling.proof import Proof, Verdict


class FakeServer:
    def __init__(self, launch, log):
        self.launch, self.log = launch, log
        self.url, self.port, self.api_key = "http://127.0.0.1:31999", 31999, None
        self.ready_seconds, self.stopped = 3.2, 0

    def stop(self):
        self.stopped += 1


@pytest.fixture
def session(tmp_path, monkeypatch, root):
    monkeypatch.chdir(root)
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    started = []

    def start(launch, **kwargs):
        kwargs["progress"]("loading weights", 1.0)
        started.append(FakeServer(launch, kwargs["log"]))
        return started[-1]

    monkeypatch.setattr(notebook._server, "start", start)
    nb = notebook.begin("50_humming", lane="cpu")
    nb.started = started
    return nb


def test_begin_opens_a_run_and_starts_nothing(session):
    assert session.started == []
    assert session.run.manifest["lane"] == "cpu"
    assert session.run.manifest["recipe"]["name"] == "sparklet"
    mine = session.run.manifest["notebooks"]["50_humming"]
    assert mine["state"] == "running"
    assert "params" not in mine  # the parameters of a suite's run are in its timings.json
    assert "Humming expert kernels" in str(session.opening)
    other = notebook.begin("40_baseline", lane="cpu", run_id=session.run.id)
    assert other.run.dir == session.run.dir
    assert other.run.folder != session.run.folder


def test_wrong_names_are_one_sentence(session):
    with pytest.raises(UsageError, match=r"nextm"):
        session.start("nextm")
    with pytest.raises(UsageError, match="no recording"):
        session.recording("h100")
    for call in (session.prove, session.measure, session.endpoint, lambda: session.client):
        with pytest.raises(UsageError, match=r"no running server to .*; start a stage first"):
            call()
    with pytest.raises(UsageError, match="lane"):
        notebook.begin("50_humming", lane="gpuu")


def test_a_stage_that_runs_here_is_started_shown_and_stopped_once(session):
    said = session.start("fp8-head")
    (server,) = session.started
    assert "fp8-head is ready at http://127.0.0.1:31999 after 3 s" in str(said)
    assert session.server is server
    assert server.log.parent.parent == session.run.folder
    assert session.run.manifest["launches"]["fp8-head"]["stage"] == "fp8-head"
    assert "31999/v1" in str(session.endpoint())
    session.start("baseline")
    assert server.stopped == 1  # one server at a time
    assert "The server is stopped" in str(session.stop())
    assert session.started[1].stopped == 1
    assert "No server is running" in str(session.stop())
    assert "a server was started and answered; no switch was proved" in str(session.closing)


def test_a_stage_that_cannot_run_here_needs_no_if_in_the_cells(session):
    reason = session.unavailable("humming")
    assert "NVIDIA" in reason
    for view in (session.command("humming"), session.diff("humming"), session.wanted("humming")):
        assert str(view).startswith(f"Not on this lane: {reason}")
    assert "--moe-runner-backend humming" in str(session.command("humming"))
    assert "flashinfer_mxfp4" in str(session.diff("humming"))
    for said in (session.start("humming"), session.measure(), session.ask("x"), session.endpoint()):
        assert reason in str(said)
    got = session.prove()
    assert got.label is not None
    assert str(got).startswith("| RECORDING")
    assert {v.switch: v.state for v in got.verdicts}["humming"] == "live"
    assert session.started == []
    assert session.proofs == []
    with pytest.raises(UsageError, match=r"'humming' cannot run on the cpu lane: .*NVIDIA"):
        session.require("humming")
    session.require("nextn")
    assert "nothing was proved" in str(session.closing)


def test_the_diff_is_the_one_change_against_the_stage_before(session):
    text = str(session.diff("fp8-head"))
    assert "SPARKLING_FP8_LM_HEAD" in text
    assert text.startswith("baseline → fp8-head")
    assert "--speculative-algorithm" in str(session.diff("nextn", against="baseline"))
    assert "nothing before it" in str(session.diff("baseline"))


def proved(stage: str, state: str) -> Proof:
    verdict = Verdict("fp8-head", state in ("live", "not live"), state, [], "a cause", "a remedy")
    return Proof(stage, [verdict, Verdict("nextn", False, "off", [])])


def test_a_switch_that_is_not_live_stops_the_notebook_with_one_sentence(
    session, monkeypatch, capsys
):
    monkeypatch.setattr(proof, "prove", lambda *_a, **_k: proved("fp8-head", "not live"))
    session.start("fp8-head")
    with pytest.raises(NotLive) as caught:
        session.prove()
    assert caught.value._render_traceback_() == [
        "NotLive: Switch 'fp8-head' is not live: a cause; a remedy."
    ]
    assert "✗ not live" in capsys.readouterr().out  # the evidence is shown before the sentence
    stored = json.loads((session.run.folder / "proof-fp8-head.json").read_text())
    assert stored["ok"] is False


def test_proofs_are_stored_told_at_the_end_and_used_as_reference(session, monkeypatch):
    given = []

    def prove(_server, baseline=None):
        given.append(baseline)
        return proved(session.stage, "live" if session.stage == "fp8-head" else "off")

    monkeypatch.setattr(proof, "prove", prove)
    session.start("baseline")
    assert session.prove().ok
    other = notebook.begin("60_fp8_lm_head", lane="cpu", run_id=session.run.id)
    other.stage = "fp8-head"
    session.stage = "fp8-head"
    other.start("fp8-head")
    other.prove()
    assert given[0] is None
    assert given[1] == session.run.folder / "proof-baseline.json"
    assert "fp8-head: fp8-head live, nextn off" in str(other.closing)
    assert session.run.manifest["notebooks"]["60_fp8_lm_head"]["state"] == "done"


def test_needs_are_checked_and_the_first_unmet_one_is_told(session, monkeypatch, capsys):
    assert session.check("gpu").ok
    monkeypatch.setitem(notebook.needs.MEMORY_GIB, "cpu", 10**9)
    with pytest.raises(SparklingError, match=r"Not ready: .* GiB of free memory"):
        session.check("gpu", "memory")
    assert "✗" in capsys.readouterr().out


def test_everything_a_cell_ends_with_shows_itself(session):
    for view in (
        session.opening,
        session.command("nextn"),
        session.wanted("nextn"),
        session.check("gpu"),
        proved("x", "live"),
    ):
        assert view._repr_html_().startswith("<")
        assert str(view)
    assert isinstance(session.opening, show.View)


def test_measuring_uses_the_recipe_s_workloads_and_this_notebook_s_file(session, monkeypatch):
    seen = {}

    def run(server, **kwargs):
        seen.update(kwargs)
        kwargs["progress"](1, 1, {"arm": "baseline", "workload": "short-turn", "decode_rate": 9.0})
        return []

    monkeypatch.setattr(notebook.bench, "run", run)
    session.start("baseline")
    session.measure(["short-turn"], repeats=2)
    assert seen["arm"] == "baseline"
    assert [w.name for w in seen["workloads"]] == ["short-turn"]
    assert seen["repeats"] == 2
    assert seen["out"] == session.run.folder / "rows.jsonl"
    assert "Nothing is measured in this run yet" in str(session.ladder())
    assert "no prompt that both fp8-head and nextn measured" in str(session.round_cost())
    with pytest.raises(UsageError, match="at least one repeat, not 0"):
        session.measure(repeats=0)
    with pytest.raises(UsageError, match="no workload 'short'"):
        session.measure(["short"])
    assert seen["repeats"] == 2


CHILD = """
import os
from sparkling import notebook
notebook._server.start = lambda launch, **k: Fake()
class Fake:
    url, port, api_key, ready_seconds = "u", 1, None, 1.0
    def __init__(self): self.launch = nb.launch("baseline")
    def stop(self): print("stopped at exit")
nb = notebook.begin("40_baseline", lane="cpu")
nb.start("baseline")
"""


def test_a_session_stops_its_server_at_exit(tmp_path, root):
    env = dict(os.environ) | {"SPARKLING_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("stopped at exit")
    assert Path(tmp_path / "runs").is_dir()


def test_a_variant_is_an_arm_of_its_own(session, monkeypatch):
    monkeypatch.setattr(proof, "prove", lambda *_a, **_k: proved("nextn", "not live"))
    text = str(session.diff("nextn", variant="trap"))
    assert text.startswith("nextn → nextn-trap") and "--speculative" not in text
    assert re.search(r"SPARKLING_TRAP +— +tensor-only", text)
    assert "nextn-trap is ready" in str(session.start("nextn", variant="trap"))
    assert session.started[0].launch.env["SPARKLING_TRAP"] == "tensor-only"
    assert session.started[0].log.name.startswith("nextn-trap-")
    got = session.prove(broken=True)
    assert (got.stage, got.ok, session.proofs) == ("nextn-trap", False, [])
    assert (session.run.folder / "proof-nextn-trap.json").is_file()
    asked = []
    monkeypatch.setattr(
        notebook.bench, "run", lambda *_a, **given: asked.append(given["arm"]) or []
    )
    monkeypatch.setattr(notebook.bench, "summarise", lambda _rows: [])
    session.measure(["short-turn"])
    session.start("nextn")
    session.measure(["short-turn"])
    assert asked == ["nextn-trap", "nextn"]


def test_a_trap_that_did_not_take_is_an_error(session, monkeypatch):
    monkeypatch.setattr(proof, "prove", lambda *_a, **_k: proved("nextn", "live"))
    session.start("nextn", variant="trap")
    with pytest.raises(SparklingError, match="nextn-trap was to be broken, and its proof found"):
        session.prove(broken=True)
