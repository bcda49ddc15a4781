"""Several users at once: windows by hand, break-even on known curves, a real closed loop."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import bench, concurrency
from sparkling.break_even import pays
from sparkling.client import Client
from sparkling.concurrency import Users, levels, limit_of
from sparkling.errors import ServerError, UsageError
from sparkling.files import read_rows
from sparkling.order import Block
from sparkling.workloads import Prompt, Workload

sys.path.insert(0, str(Path(__file__).parent))
from paced_server import paced


def work(prompts=4, max_tokens=6):
    made = tuple(Prompt(f"{i:02d}", f"prompt {i}") for i in range(prompts))
    return Workload("w", "", made, max_tokens)


def row(arm, users, user, sent, *, tokens=11, ttft=0.5, step=0.1, prompt="00", block=0, **more):
    times = [ttft + step * i for i in range(tokens)]
    return {
        "arm": arm, "users": users, "user": user, "turn": 0, "prompt": prompt, "workload": "w",
        "case_hash": f"text of {prompt}", "machine_id": "m", "model_id": "w", "block": block,
        "complete": True, "sent_s": sent, "chunk_times_s": times, "ttft_s": ttft,
        "chunk_tokens": list(range(1, tokens + 1)), "e2e_s": times[-1], "completion_tokens": tokens,
        "decode_tokens": tokens - 1, "decode_s": step * (tokens - 1), "spec": None, "limit": 4, **more,
    }  # fmt: skip


# -- windows -------------------------------------------------------------------------------------


def test_throughput_counts_what_arrived_while_all_were_busy():
    # User 0 works from 0.0 to 1.5, user 1 from 0.75 to 2.25: both are busy for 0.75 s.
    rows = [row("a", 2, 0, 0.0), row("a", 2, 1, 0.75)]
    got = levels(rows)[0]
    assert got.window_s == pytest.approx(0.75)
    # User 0: chunks at 0.8 … 1.5 are 8 tokens; user 1: 1.25, 1.35, 1.45 are 3.
    assert got.throughput == pytest.approx(11 / 0.75)
    assert got.per_user.value == pytest.approx(10.0) and got.per_user.low is None
    assert (got.requests, got.failed, got.ttft_s.p50, got.ttft_s.n) == (2, 0, 0.5, 2)
    assert json.dumps(got.to_json())


def test_rounds_are_pooled_and_told_apart():
    rows = [row("a", 1, 0, 0.0, step=0.1), row("a", 1, 0, 50.0, step=0.2, block=3)]
    got = levels(rows)[0]
    assert got.by_round == pytest.approx((11 / 1.5, 11 / 2.5))
    assert got.throughput == pytest.approx(22 / 4.0) and got.window_s == pytest.approx(4.0)


def test_what_cannot_be_known_is_unknown():
    apart = levels([row("a", 2, 0, 0.0), row("a", 2, 1, 9.0)])[0]
    assert apart.throughput is None and apart.by_round == () and apart.window_s is None
    cut = levels([row("a", 2, 0, 0.0), row("a", 2, 1, 0.1, complete=False)])[0]
    assert cut.throughput is None and cut.failed == 1
    uncounted = [None] * 11
    assert levels([row("a", 1, 0, 0.0, chunk_tokens=uncounted)])[0].throughput is None


def test_levels_beyond_the_servers_limit_are_marked():
    rows = [row("a", u, k, 0.0) for u in (1, 4, 8) for k in range(u)]
    assert [(x.users, x.queued) for x in levels(rows)] == [(1, False), (4, False), (8, True)]
    assert levels([row("a", 1, 0, 0.0, limit=None)])[0].queued is None


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        ({"internal_states": [{"effective_max_running_requests_per_dp": 4}]}, 4),
        ({"internal_states": [], "max_running_requests": 16}, 16),
        ({"internal_states": [{"max_running_requests": None}]}, None),
        ({}, None),
    ],
)
def test_the_limit_is_what_the_server_says(info, limit):
    assert limit_of(SimpleNamespace(server_info=lambda: info)) == limit

    def gone():
        raise ServerError("gone")

    assert limit_of(SimpleNamespace(server_info=gone)) is None


# -- break-even ----------------------------------------------------------------------------------


def both(gain, used=(1, 2, 4, 8, 16), prompts=6, noise=lambda p: 1.0):
    rows = []
    for users in used:
        for p in range(prompts):
            base = 2.0 + 0.3 * p
            for arm, seconds in (("plain", base), ("spec", base / gain(users) * noise(p))):
                one = row(arm, users, 0, 0.0, prompt=f"{p:02d}")
                rows.append({**one, "e2e_s": seconds, "completion_tokens": 40 + p})
    return rows


def test_the_crossing_of_a_line_in_logs_is_found():
    # log2 gain = 1 - log2(users) / 2.5: it is 0 at 2^2.5 = 5.66 users, between two levels.
    got = pays(both(lambda u: 2 ** (1 - math.log2(u) / 2.5)), "plain", "spec")
    assert got.at.value == pytest.approx(2**2.5) and got.at.n == 6
    assert got.at.low == pytest.approx(got.at.high)  # every prompt agrees
    assert [u for u, _ in got.gains] == [1, 2, 4, 8, 16]
    assert got.gains[0][1].value == pytest.approx(2.0)
    assert got.text == (
        "Speculation stops paying at about 5.7 users (between 5.7 and 5.7; 95 % bootstrap over 6 prompts; by round: 5.7)."
    )
    assert json.dumps(got.to_json())


def test_prompts_that_disagree_widen_the_interval():
    noise = lambda p: 1.25 if p % 2 else 0.8  # noqa: E731
    got = pays(both(lambda u: 2 ** (1 - math.log2(u) / 2.5), noise=noise), "plain", "spec")
    assert got.at.low < 2**2.5 < got.at.high and got.at.high > 1.3 * got.at.low


def test_rounds_tell_what_the_interval_does_not():
    first = both(lambda u: 2 ** (1 - math.log2(u) / 2.5))
    second = [{**r, "round": 1} for r in both(lambda u: 2 ** (1 - math.log2(u) / 2.0))]
    got = pays(first + second, "plain", "spec")
    assert got.by_round == pytest.approx((2**2.5, 4.0)) and 4.0 < got.at.value < 2**2.5
    assert got.text.endswith("by round: 5.7, 4.0).")
    half = [r for r in second if r["users"] < 4]  # a round that was cut short says nothing
    assert len(pays(first + half, "plain", "spec").by_round) == 1


@pytest.mark.parametrize(
    ("gain", "at", "said"),
    [
        (lambda u: 1.5, 32.0, "Speculation pays at every level measured, up to 16 users (between above 16"),
        (lambda u: 0.8, 0.5, "Speculation pays at no level measured, from 1 user on (between below 1"),
    ],
)  # fmt: skip
def test_no_crossing_is_said_and_not_made_up(gain, at, said):
    got = pays(both(gain), "plain", "spec")
    assert got.at.value == at and got.text.startswith(said)


def test_few_prompts_give_no_interval_and_no_common_level_no_answer():
    got = pays(both(lambda u: 1.2 if u < 4 else 0.9, prompts=3), "plain", "spec")
    assert got.at.low is None and "interval unknown" in got.text
    rows = [r for r in both(lambda u: 1.2) if (r["arm"] == "spec") == (r["users"] > 2)]
    assert pays(rows, "plain", "spec") is None
    split = [
        r for r in both(lambda u: 1.2, used=(1, 2)) if (r["prompt"] < "03") == (r["users"] == 1)
    ]
    assert pays(split, "plain", "spec").at is None
    assert "unknown" in pays(split, "plain", "spec").text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine_id": "other"}, "differ in machine_id"),
        ({"case_hash": "other"}, "the text of prompt 00"),
    ],
)
def test_arms_that_differ_in_more_are_refused(change, said):
    rows = [{**r, **change} if r["arm"] == "spec" else r for r in both(lambda u: 1.0)]
    with pytest.raises(UsageError, match=said):
        pays(rows, "plain", "spec")


# -- a closed loop -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"levels": (2, 1)}, "not 2, 1"),
        ({"levels": (0, 1)}, "from 1 to 256"),
        ({"levels": (1, 1)}, "each once"),
        ({"levels": ()}, "not none"),
        ({"each": 0}, "not 0 times"),
    ],
)
def test_levels_that_make_no_sense(options, said):
    with pytest.raises(UsageError, match=said):
        Users(work(), **options)


def launch():
    argv = ("-m", "sglang.launch_server", "--model-path", "/m", "--port", "1")
    return SimpleNamespace(
        argv=argv, env={}, recipe="r", stage="s", variant=None, switches={}, served_name="paced"
    )


def test_users_ask_at_once_and_every_prompt_at_every_level(tmp_path):
    done = []
    with paced(rate=100, first_s=0.02) as running:
        client = Client(running.url, model="paced")
        server = SimpleNamespace(client=lambda: client, launch=launch())

        def progress(*level):
            done.append(level)
            if level[0] == 1:
                running.tell("/meet?3")  # else a busy machine may start them one by one

        task = Users(work(), levels=(1, 3, 8), each=2, progress=progress)
        task(server, Block(0, 0, "a"), tmp_path / "r.jsonl", {"block": 0, "attempt": 0})
        flushes = running.state()["flushes"]
    rows = read_rows(tmp_path / "r.jsonl")
    assert done == [(1, 4), (3, 6), (8, 16)] and flushes == 3
    for users, requests in done:
        mine = [r for r in rows if r["users"] == users]
        assert len(mine) == requests and {r["prompt"] for r in mine} == {"00", "01", "02", "03"}
        assert {r["user"] for r in mine} == set(range(users))
        assert all(r["complete"] and r["block"] == 0 and r["arm"] == "a" for r in mine)
    # At a level of three, three requests are under way at once.
    three = [(r["sent_s"], r["sent_s"] + r["e2e_s"]) for r in rows if r["users"] == 3]
    at_once = max(sum(a <= t < b for a, b in three) for t, _ in three)
    assert at_once == 3
    got = levels(rows)
    assert [x.users for x in got] == [1, 3, 8] and got[0].throughput > 0
    assert [x.requests for x in got] == [4, 6, 16] and got[2].ttft_s.n == 16
    assert got[0].limit is None  # the paced server does not say


def test_a_server_that_goes_away_is_one_sentence(tmp_path):
    with paced(rate=4000, hang_after=3) as running:
        client = Client(running.url, model="paced")
        with pytest.raises(ServerError, match=r"With 2 users at once: The server at .* stopped"):
            concurrency.ask(client, bench.rendered(client, work()), 2, 3, 0.4)
