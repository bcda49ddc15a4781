"""An evaluation on a real server: killed and resumed, alone and several at once, cut and counted.

Sparklet on the nextn stage answers its own problems; accuracy and accept length are those of its
model card, within what so few questions can tell.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from sparkling import evaluation, gsm8k
from sparkling.evaluate import evaluate, read_tally
from sparkling.files import read_rows

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

N = 20


@pytest.fixture(scope="module")
def live(root, server_python, tmp_path_factory):
    from sparkling import recipe, server

    folder = tmp_path_factory.mktemp("eval")
    book = recipe.load("sparklet", root=root)
    launch = book.render("nextn", model=root / "models" / "sparklet", port=0)
    with server.start(
        launch, python=server_python, log=folder / "server.log", deadline_s=600
    ) as running:
        yield running


@pytest.fixture(scope="module")
def whole(live, tmp_path_factory):
    """(rows, sums) of greedy answers to the first N questions, asked without a break."""
    out = tmp_path_factory.mktemp("whole") / "sparklet.jsonl"
    task = gsm8k.sparklet()
    tally = evaluate(
        live,
        task,
        task.defaults.greedy(),
        arm="nextn",
        out=out,
        limit=N,
        facts=evaluation.facts_of(live.launch),
    )
    return read_rows(out), tally


def graded(rows):
    return {r["id"]: (r["answer"], r["rule"], r["correct"], r["status"]) for r in rows}


def test_answers_are_graded_and_counted(whole):
    rows, tally = whole
    assert [r["id"] for r in rows] == [f"{i:04d}" for i in range(N)]
    assert tally.states["ok"] == N and {r["rule"] for r in rows} == {"####"}
    # 90.7 % of 1,024 on the card; fewer than 13 of 20 would be less likely than one in a thousand.
    assert tally.right >= 13
    assert 3.0 < tally.accept_length <= 4.0  # 3.80 on the card
    for row in rows:
        assert row["finish_reason"] == "stop" and row["reasoning"] and row["reasoning_tokens"] > 0
        assert row["spec"]["source"] == "meta_info" and row["spec"]["rounds"] > 0
        assert 0 < row["ttft_s"] < row["e2e_s"] and row["prompt_tokens"] > 10
        assert row["decode_rate"] == pytest.approx(row["decode_tokens"] / row["decode_s"])


def test_killed_and_resumed_it_gives_the_same(live, whole, tmp_path, root):
    rows, tally = whole
    env = os.environ | {"SPARKLING_RUNS": str(tmp_path / "runs"), "SPARKLING_LANE": "cpu"}
    command = [sys.executable, "-m", "sparkling.cli", "eval", "--recipe", "sparklet", "--greedy",
               "--url", live.url, "--arm", "nextn", "--limit", str(N), "--run", "killed"]  # fmt: skip
    out = tmp_path / "runs" / "killed" / "nextn" / "sparklet.jsonl"
    kills = 0
    for grown in (3, 11):
        child = subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.DEVNULL)
        while child.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < grown):
            time.sleep(0.02)
        kills += child.poll() is None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        with out.open("ab") as file:
            file.write(b'{"id": "00')
    assert kills == 2
    done = subprocess.run([*command, "--json"], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout[done.stdout.index("[\n") :])[0]
    again = read_rows(out)
    assert [r["id"] for r in again] == [r["id"] for r in rows]
    assert graded(again) == graded(rows)
    assert (told["questions"], told["right"]) == (tally.done, tally.right)
    assert read_tally(out).right == tally.right


def test_several_at_once_are_graded_alike(live, whole, tmp_path):
    rows, _ = whole
    task = gsm8k.sparklet()
    tally = evaluate(
        live,
        task,
        task.defaults.greedy(),
        arm="nextn",
        out=tmp_path / "many.jsonl",
        limit=N,
        concurrency=4,
    )
    assert tally.done == N and tally.states["error"] == 0
    # Greedy answers of a batch may differ by rounding, and then seldom.
    mine = graded(read_rows(tmp_path / "many.jsonl"))
    assert sum(mine[i] == graded(rows)[i] for i in mine) >= N - 3


def test_thinking_that_was_cut_is_never_credited(live, tmp_path):
    """Cut within the thinking; SGLang's ling3 parser then sends all of it as content too."""
    task = gsm8k.sparklet()
    settings = evaluation.settings_of(task, greedy=True, max_tokens=24)
    tally = evaluate(
        live,
        task,
        settings,
        arm="nextn",
        out=tmp_path / "cut.jsonl",
        limit=8,
        truncated_limit=1.0,
    )
    rows = read_rows(tmp_path / "cut.jsonl")
    cut = [r for r in rows if r["status"] == "truncated"]
    assert len(cut) == tally.states["truncated"] >= 4
    assert all(r["finish_reason"] == "length" and not r["correct"] for r in cut)
    assert all(r["completion_tokens"] == 24 for r in cut)
    unfinished = [r for r in cut if not r["text"]]
    assert unfinished and all(r["answer"] is None and r["reasoning"] for r in unfinished)


def test_what_the_server_cannot_hold_is_refused_at_once(live, tmp_path):
    from sparkling.errors import UsageError

    task = gsm8k.sparklet()
    with pytest.raises(UsageError, match="do not fit the server's context of 4,096"):
        evaluate(live, task, evaluation.settings_of(task, max_tokens=5000), arm="a",
                 out=tmp_path / "a.jsonl")  # fmt: skip
    with pytest.raises(UsageError, match="takes 4 requests at once"):
        evaluate(live, task, task.defaults, arm="a", out=tmp_path / "a.jsonl", concurrency=5)
