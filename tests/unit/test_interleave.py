"""Arms by turns: a balanced order that a resumed run keeps, and rows that count only when proved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import interleave, order
from sparkling.client import Client
from sparkling.errors import NotLive, UsageError
from sparkling.files import read_rows
from sparkling.order import Order, balanced
from sparkling.workloads import Prompt, Workload

sys.path.insert(0, str(Path(__file__).parent))
from paced_server import paced

ARMS = ("a", "b", "c")


def launch(arm):
    argv = ("-m", "sglang.launch_server", "--model-path", "/m", "--port", "1", "--arm", arm)
    return SimpleNamespace(
        argv=argv, env={}, recipe="tiny", stage=arm, variant=None, switches={}, served_name="tiny"
    )


def work(prompts=2, **more):
    made = tuple(Prompt(f"{i:02d}", f"prompt {i}") for i in range(prompts))
    return Workload("w", "", made, 4, **more)


class Stage:
    """Starts and proofs that are written down; `fails` = {(arm, when): how often}."""

    def __init__(self, url, fails=()):
        self.url, self.log, self.fails = url, [], dict(fails)

    @contextmanager
    def start(self, arm):
        self.log.append(("start", arm))
        client = Client(self.url, model="paced")
        yield SimpleNamespace(launch=launch(arm), client=lambda: client, arm=arm)
        self.log.append(("stop", arm))

    def prove(self, server, when):
        self.log.append((when, server.arm))
        if self.fails.get((server.arm, when), 0) > 0:
            self.fails[server.arm, when] -= 1
            raise NotLive(f"{server.arm} is not live")
        return {"live": when}


@pytest.fixture(scope="module")
def server():
    with paced(rate=4000, first_s=0.002) as running:
        yield running


def measure(server, folder, plan=None, fails=(), **more):
    stage = Stage(server.url, fails)
    options = {"workloads": [work()], "per_start": 1, "warmup": 0, **more}
    rest = options.pop("rest", None)
    try:
        rows = interleave.measure(
            plan or balanced(ARMS, 2, seed=3),
            folder,
            start=stage.start,
            prove=stage.prove,
            task=interleave.Bench(**options),
            rest=rest,
        )
    except NotLive:
        rows = None
    return rows, stage


# -- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", range(1, 9))
def test_every_pair_of_rounds_cancels_a_linear_drift(arms):
    names = [f"arm{i}" for i in range(arms)]
    for rounds in (2, 4, 6):
        plan = balanced(names, rounds, seed=rounds)
        assert plan.balanced and len(plan.blocks) == arms * rounds
        for r in range(rounds):
            assert sorted(b.arm for b in plan if b.round == r) == sorted(names)
        # A speed that falls with the position gives every arm the same mean.
        drift = {a: sum(100 - b.index for b in plan if b.arm == a) / rounds for a in names}
        assert len(set(drift.values())) == 1
    assert arms == 1 or not balanced(names, 3).balanced


def test_the_order_is_the_seeds_and_survives_json():
    plan = balanced(ARMS, 4, seed=7)
    assert plan == balanced(ARMS, 4, seed=7)
    assert len({tuple(b.arm for b in balanced(ARMS, 2, seed=s)) for s in range(20)}) > 1
    assert Order.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [b.index for b in plan] == list(range(12))


@pytest.mark.parametrize(
    ("arms", "rounds", "said"),
    [((), 2, "not none"), (("a", "a"), 2, "each once"), (("a",), 0, "at least one round, not 0")],
)
def test_orders_that_make_no_sense(arms, rounds, said):
    with pytest.raises(UsageError, match=said):
        order.balanced(arms, rounds)


# -- measuring -----------------------------------------------------------------------------------


def test_arms_take_turns_and_are_proved_around_their_rows(server, tmp_path):
    rested = []
    rows, stage = measure(server, tmp_path, rest=rested.append, per_start=2)
    plan = balanced(ARMS, 2, seed=3)
    turns = [b.arm for b in plan]
    assert turns[:3] == turns[:2:-1] and [b.arm for b in rested] == turns
    assert stage.log == [
        (what, arm) for arm in turns for what in ("start", "before", "after", "stop")
    ]
    assert [r["arm"] for r in rows[::4]] == turns and len(rows) == 6 * 2 * 2
    for block in plan:
        mine = [r for r in rows if r["block"] == block.index]
        assert [r["repeat"] for r in mine] == [2 * block.round] * 2 + [2 * block.round + 1] * 2
        assert all(r["round"] == block.round and r["attempt"] == 0 for r in mine)
    # The same prompts for every arm, byte for byte.
    assert len({(r["prompt"], r["case_hash"]) for r in rows}) == 2
    found, again, uncounted = interleave.read(tmp_path)
    assert (found, again, uncounted) == (plan, rows, 0)
    windows = interleave.idle_windows(tmp_path)
    assert {arm: len(w) for arm, w in windows.items()} == dict.fromkeys(ARMS, 2)
    assert all(start <= end for w in windows.values() for start, end in w)
    first = [r["sent_s"] for r in rows if r["block"] == 0]
    assert windows[turns[0]][0][1] <= first[0]  # idle until the first request
    assert interleave.idle_windows(tmp_path, boot="another boot") == {}


def test_a_finished_measurement_is_not_measured_again(server, tmp_path):
    rows, _ = measure(server, tmp_path)
    again, stage = measure(server, tmp_path)
    assert again == rows and stage.log == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_whose_proof_fails_does_not_count_and_is_tried_again(server, tmp_path, when):
    rows, stage = measure(server, tmp_path, fails={("b", when): 1})
    assert rows is None and stage.log[-1] == (when, "b")
    order_of = [b.arm for b in balanced(ARMS, 2, seed=3)]
    before = read_rows(tmp_path / "rows.jsonl")
    assert "b" not in {r["arm"] for r in before}
    rows, stage = measure(server, tmp_path)
    started = [arm for what, arm in stage.log if what == "start"]
    assert started == order_of[order_of.index("b") :]  # goes on where it stopped, in the same order
    assert rows[: len(before)] == before and len(rows) == 12
    assert {r["attempt"] for r in rows if r["block"] == order_of.index("b")} == {1}
    _, _, uncounted = interleave.read(tmp_path)
    assert uncounted == (2 if when == "after" else 0)
    events = read_rows(tmp_path / "blocks.jsonl")
    assert [e["problem"] for e in events if e["event"] == "failed"] == ["b is not live"]


def test_a_kill_between_good_and_kept_loses_and_repeats_nothing(server, tmp_path):
    rows, _ = measure(server, tmp_path)
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    events = (tmp_path / "blocks.jsonl").read_bytes().splitlines(keepends=True)
    assert b'"kept"' in events[-1]
    (tmp_path / "blocks.jsonl").write_bytes(b"".join(events[:-1]))
    again, stage = measure(server, tmp_path)
    assert again == rows and stage.log == []


def test_a_killed_measurement_goes_on_in_its_order(server, tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from types import SimpleNamespace\n"
        "import test_interleave as t\n"
        "t.measure(SimpleNamespace(url=sys.argv[2]), Path(sys.argv[3]),\n"
        "          progress=lambda *_: (print('row', flush=True), input()))\n"
    )
    here = str(Path(__file__).parent)
    words = [sys.executable, "-c", script, here, server.url, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True) as child:
        for n in range(5):
            assert child.stdout.readline() == "row\n"
            if n < 4:  # after the fifth row, the first of the third start, it waits for its end
                child.stdin.write("\n")
                child.stdin.flush()
        os.kill(child.pid, signal.SIGKILL)
    rows, stage = measure(server, tmp_path)
    turns = [b.arm for b in balanced(ARMS, 2, seed=3)]
    started = [arm for what, arm in stage.log if what == "start"]
    assert started == turns[2:]
    assert [r["arm"] for r in rows] == [arm for arm in turns for _ in range(2)]
    assert len({(r["block"], r["prompt"]) for r in rows}) == 12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plan": balanced(ARMS, 2, seed=4)}, "other order"),
        ({"plan": balanced(ARMS, 4, seed=3)}, "other order"),
        ({"per_start": 2}, r"other per_start \(1 then, 2 now\)"),
        ({"workloads": [work(thinking=True)]}, "other settings or prompts of w;"),
        ({"workloads": [work(prompts=3)]}, "other settings or prompts of w;"),
    ],
)
def test_a_measurement_is_resumed_with_the_same_plan_only(server, tmp_path, change, said):
    measure(server, tmp_path)
    with pytest.raises(UsageError, match=said):
        measure(server, tmp_path, **change)


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"no order\.json"):
        interleave.read(tmp_path)
