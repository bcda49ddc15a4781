"""Sizing: from measured work of the same kind only, with intervals; never from the synthetic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as theirs
from sparkling import cli, sizing
from sparkling.errors import UsageError
from sparkling.store import open_run
from sparkling.workloads import Prompt, digest

SETTINGS = {"max_tokens": 64, "sampling": {"temperature": 0.0}, "api": "chat"}


def request(workload: str, i: int, arm: str = "baseline", repeat: int = 0, **more) -> dict:
    tokens, rate = 40 + 10 * i, 40.0 if arm == "baseline" else 80.0
    return {
        "arm": arm, "arm_hash": arm, "workload": workload, "prompt": f"{i:02d}", "repeat": repeat,
        "case_hash": digest([f"question {i}", SETTINGS]), "settings": SETTINGS, "complete": True,
        "ttft_s": 0.2, "e2e_s": 0.2 + tokens / rate, "tpot_s": 1 / rate, "output_hash": f"o{i}",
        "completion_tokens": tokens + 1,
        "decode_tokens": tokens, "decode_s": tokens / rate, "machine": {"cpus": 2, "cpu": "a CPU"},
    } | more  # fmt: skip


def rows(workload: str, arms=("baseline", "nextn"), n: int = 8) -> list[dict]:
    return [request(workload, i, arm, k) for arm in arms for i in range(n) for k in range(2)]


def test_a_reply_and_a_day():
    source, chosen = sizing.chosen(rows("short-turn"), [], "short-turns")
    slow, fast = sizing.expect(chosen, source, per_day=500)
    times = np.array([0.2 + (40 + 10 * i) / 40 for i in range(8)])
    assert slow.reply.value == pytest.approx(times.mean()) and slow.reply.n == 8
    # Student's interval of the mean is close to ours
    half = theirs.sem(times) * theirs.t.ppf(0.975, 7)
    assert slow.reply.high - slow.reply.low == pytest.approx(2 * half, rel=0.15)
    assert slow.per_day.value == pytest.approx(86400 / times.mean())
    assert slow.per_day.low == pytest.approx(86400 / slow.reply.high)
    calls, hours = slow.day
    assert calls == 500 and hours.value == pytest.approx(500 * times.mean() / 3600)
    assert fast.reply.value < slow.reply.value and fast.arm == "nextn"
    assert slow.replies.p50 == pytest.approx(np.median(times)) and slow.replies.n == 16


def test_a_reply_of_so_many_tokens():
    (slow,) = sizing.expect(rows("short-turn", ("baseline",)), "x", tokens=401)
    n, time = slow.of_tokens
    assert n == 401 and time.value == pytest.approx(0.2 + 400 / 40)
    assert time.low == pytest.approx(time.high)  # every prompt has the same rate here
    (short,) = sizing.expect(rows("short-turn", ("baseline",)), "x", tokens=100)
    assert "(the longest has 111): its time is an extrapolation" in str(sizing.view([slow]))
    assert "extrapolation" not in str(sizing.view([short]))


def test_an_agents_loop():
    source, chosen = sizing.chosen(rows("tools") + rows("short-turn"), [], "agents")
    assert source == "tools"
    slow, _ = sizing.expect(chosen, source, calls=20)
    calls, mean, (p50, p90) = slow.loop
    times = np.array([0.2 + (40 + 10 * i) / 40 for i in range(8)])
    assert calls == 20 and mean.value == pytest.approx(20 * times.mean())
    spread = times.std() * np.sqrt(20)  # of the sum of 20 draws
    assert p50 == pytest.approx(mean.value, rel=0.01)
    assert p90 - p50 == pytest.approx(theirs.norm.ppf(0.9) * spread, rel=0.06)
    assert "not in it" in str(sizing.view([slow]))
    source, _ = sizing.chosen(rows("short-turn"), [], "agents")
    assert source == "short-turn"


@pytest.mark.parametrize(
    "only", [("shape",), ("repeated-text",), ("shape", "repeated-text/sampled")]
)
@pytest.mark.parametrize("kind", ["short-turns", "long-answers", "agents"])
def test_never_from_the_synthetic_headline(only, kind):
    bench = [r for w in only for r in rows(w)]
    with pytest.raises(UsageError, match="only synthetic workloads") as refused:
        sizing.chosen(bench, [], kind)
    assert str(refused.value).count(". ") == 0


def test_synthetic_rows_beside_real_ones_are_left_out():
    bench = rows("shape") + rows("short-turn") + rows("repeated-text")
    _, chosen = sizing.chosen(bench, [], "short-turns")
    assert {r["workload"] for r in chosen} == {"short-turn"}
    with pytest.raises(UsageError, match=r"nothing of the class long-answers .* it has short-turn"):
        sizing.chosen(bench, [], "long-answers")
    with pytest.raises(UsageError, match="no class 'huge'"):
        sizing.chosen(bench, [], "huge")
    with pytest.raises(UsageError, match="no questions"):
        sizing.chosen(bench, [], "questions")


def test_evaluated_questions_serve_as_well():
    asked = [
        {"id": i, "arm": "baseline", "correct": True, "status": "ok", "e2e_s": 5.0 + i, "ttft_s": 0.1,
         "completion_tokens": 100, "decode_rate": 40.0}
        for i in range(10)
    ] + [{"id": 10, "arm": "baseline", "correct": False, "status": "error", "e2e_s": 99.0}]  # fmt: skip
    source, chosen = sizing.chosen([], asked, "questions")
    (found,) = sizing.expect(chosen, source, tokens=41)
    assert found.requests == 10 and found.reply.value == pytest.approx(9.5)
    assert found.of_tokens[1].value == pytest.approx(0.1 + 40 / 40)
    with pytest.raises(UsageError, match="asked 4 at once"):
        sizing.chosen([], [q | {"concurrency": 4} for q in asked], "questions")


def test_own_prompts_are_known_by_what_was_sent():
    bench = rows("prompts", n=3)
    mine = [Prompt(f"{i:02d}", f"question {i}") for i in range(3)]
    source, chosen = sizing.chosen(bench, [], None, mine)
    assert source == "your own prompts" and len(chosen) == 12
    for changed in ([*mine[:2], Prompt("02", "another text")], [*mine, Prompt("03", "question 3")]):
        with pytest.raises(UsageError, match=r"1 of these . prompts was not measured"):
            sizing.chosen(bench, [], None, changed)


def test_what_cannot_be_said_is_not_said():
    few = sizing.expect(rows("short-turn", ("baseline",), n=3), "x", calls=2)
    assert few[0].reply.low is None and few[0].per_day.high is None
    assert "no interval can be given" in str(sizing.view(few))
    failed = [request("short-turn", i, complete=False) for i in range(5)]
    with pytest.raises(UsageError, match="ended completely"):
        sizing.expect(failed, "x")
    with pytest.raises(UsageError, match="Calls must be 1 or more"):
        sizing.expect(rows("short-turn"), "x", calls=0)


def test_a_machine_that_was_not_steady_is_told():
    one = [request("short-turn", 0, repeat=k, decode_s=1.0 + k) for k in range(2)]
    assert sizing.unsteady(rows("short-turn")) is None
    assert sizing.unsteady(one) == "Machine not steady: repeats of one prompt differ by ×2.0"


def test_command(tmp_path: Path, capsys, monkeypatch):
    run = open_run(tmp_path / "runs", "r", notebook="80")
    for row in rows("short-turn") + rows("shape"):
        run.append("rows", row)
    args = ["sizing", str(run.dir), "--calls", "5", "--per-day", "1000", "--tokens", "100"]
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert "What to expect" in out and "a loop of 5 calls" in out and "1000 replies" in out
    assert cli.main([*args, "--arm", "nextn", "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["arm"] == "nextn" and data["loop"]["calls"] == 5 and data["reply_s"]["n"] == 8
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "never measured"}\n')
    assert cli.main(["sizing", str(run.dir), "--prompts", str(file)]) == 2
    assert "not measured" in capsys.readouterr().err
    assert cli.main([*args, "--arm", "x"]) == 2
    assert "there are baseline, nextn" in capsys.readouterr().err


def test_calls_that_are_none_are_refused_and_many_fit_into_memory(tmp_path, capsys):
    run = open_run(tmp_path / "runs", "r", notebook="80")
    for row in rows("short-turn"):
        run.append("rows", row)
    assert cli.main(["sizing", str(run.dir), "--calls", "0", "--class", "agents"]) == 2
    assert capsys.readouterr().err == "error: Calls must be 1 or more, not 0.\n"
    source, found = sizing.chosen(rows("short-turn"), [], "agents")
    (many, *_) = sizing.expect(found, source, calls=10**8)
    calls, mean, (p50, p90) = many.loop
    assert calls == 10**8 and p50 == pytest.approx(mean.value, rel=1e-3) and p50 < p90
