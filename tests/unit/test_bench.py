"""The benchmark: same prompts for all, resumable after SIGKILL, stops when the server does."""

import dataclasses
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import bench, gone, metrics, show, wire
from sparkling.client import Client
from sparkling.errors import ServerError, UsageError
from sparkling.files import read_rows
from sparkling.workloads import DEFAULTS, NAMES, Prompt, Workload, workloads

sys.path.insert(0, str(Path(__file__).parent))
from paced_server import nobody, paced


def launch(*more, stage="baseline", env=None, model="/somewhere/tiny", port=30000, **switches):
    argv = ("-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1")
    return SimpleNamespace(
        argv=(*argv, "--port", str(port), *more),
        env=env or {},
        recipe="tiny-ling",
        stage=stage,
        variant=None,
        switches=switches,
        served_name="tiny",
        regime="",
    )


def small(name="w", prompts=3, max_tokens=6, **more):
    made = tuple(Prompt(f"{i:02d}", f"prompt {i}") for i in range(prompts))
    return Workload(name, "", made, max_tokens, **more)


@pytest.fixture
def server():
    with paced(rate=4000, first_s=0.002) as running:
        yield running


def run(server, out, *, works=None, arm="baseline", repeats=2, **more):
    options = {"arm": arm, "launch": launch(), "workloads": works or [small()], "repeats": repeats}
    return bench.run(Client(server.url, model="paced"), out=out, **{**options, **more})


# -- workloads ---------------------------------------------------------------------------------------


def test_named_workloads_follow_the_sizes():
    sizes = {
        "context": 4096,
        "short_output": 48,
        "shape_input": 512,
        "shape_output": 64,
        "prompts": 3,
    }
    made = {w.name: w for w in workloads(sizes)}
    assert tuple(made) == NAMES == ("short-turn", "long-answer", "repeated-text", "shape")
    assert [made[n].max_tokens for n in NAMES] == [
        48,
        DEFAULTS["long_output"],
        DEFAULTS["repeat_output"],
        64,
    ]
    assert all(len(w.prompts) == 3 and w.greedy and w.description for w in made.values())
    assert made["shape"].ignore_eos and made["shape"].prompts[0].tokens == 512
    assert (made["short-turn"].thinking, made["long-answer"].thinking) == (False, True)
    assert [w.name for w in workloads(sizes, ["shape", "short-turn"])] == ["shape", "short-turn"]


def test_wrong_workloads_and_sizes_are_refused():
    for sizes, names, said in (
        ({"shape_inptu": 1}, None, "'shape_inptu' is no size"),
        ({"short_output": 0}, None, "short_output must be a whole number"),
        ({"prompts": 99}, None, "has 12 prompts, not 99"),
        ({}, ["shap"], "There is no workload 'shap'; there are short-turn"),
    ):
        with pytest.raises(UsageError, match=said):
            workloads(sizes, names)


def test_prompts_are_the_same_in_every_process():
    script = (
        "from sparkling.workloads import workloads; "
        "print([w.prompts for w in workloads({'shape_input': 300, 'prompts': 12})])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    texts = [p.render() for w in workloads({"shape_input": 300, "prompts": 12}) for p in w.prompts]
    assert len(set(texts)) == 48
    shape = workloads({"prompts": 12}, ["shape"])[0].prompts
    assert len({p.render()[:12] for p in shape}) == 12  # no shared prefix for the cache to find


@pytest.mark.parametrize("per_word", [1, 3])
@pytest.mark.parametrize("tokens", [60, 500, 2048])
def test_a_shape_prompt_is_cut_to_its_tokens(per_word, tokens):
    asked = []

    def count(text):
        asked.append(text)
        return per_word * len(text.split())

    prompt = workloads({"shape_input": tokens, "prompts": 1}, ["shape"])[0].prompts[0]
    text = prompt.render(count)
    n = count(text)
    assert tokens - 60 * per_word < n <= tokens or tokens == 60  # within one sentence
    assert text.endswith("should be checked next.") and text == prompt.render(count)
    assert len(asked) < 60
    # One sentence more would be too long.
    k = next(k for k in range(len(prompt.body) + 1) if prompt._upto(k) == text)
    assert count(prompt._upto(k + 1)) > tokens


# -- identity ----------------------------------------------------------------------------------------


def test_arm_hash_ignores_port_and_folders_only(tmp_path):
    base = bench.arm_hash(launch())
    assert bench.arm_hash(launch(port=31000)) == base
    assert bench.arm_hash(launch(model="/elsewhere/tiny/")) == base
    assert bench.arm_hash(launch(env={"X": "/a/cache"})) == bench.arm_hash(
        launch(env={"X": "/b/cache"})
    )
    for other in (
        launch("--tp-size", "2"),
        launch(env={"SPARKLING_FP8_LM_HEAD": "1"}),
        launch(model="/somewhere/other"),
    ):
        assert bench.arm_hash(other) != base


def test_model_identity_sees_other_weights(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text('{"layers": 4}')
    (model / "model.safetensors").write_bytes(b"x" * 10)
    first = bench.arm_hash(launch(model=str(model)))
    assert bench.arm_hash(launch(model=str(model))) == first
    (model / "model.safetensors").write_bytes(b"x" * 11)
    assert bench.arm_hash(launch(model=str(model))) != first


# -- measuring ---------------------------------------------------------------------------------------


def test_rows_hold_what_was_measured(server, tmp_path):
    seen = []
    rows = run(
        server,
        tmp_path / "b.jsonl",
        works=[small("one", prompts=2), small("two", prompts=1, thinking=True)],
        progress=lambda done, total, row: seen.append((done, total, row["workload"])),
    )
    assert rows == read_rows(tmp_path / "b.jsonl") and len(rows) == 6
    assert [(r["repeat"], r["workload"], r["prompt"]) for r in rows] == [
        (0, "one", "00"), (0, "one", "01"), (0, "two", "00"),
        (1, "one", "00"), (1, "one", "01"), (1, "two", "00"),
    ]  # fmt: skip
    assert seen == [(i + 1, 6, r["workload"]) for i, r in enumerate(rows)]
    for r in rows:
        assert r["complete"] and r["completion_tokens"] == 6
        if r["decode_s"] is None:  # a busy machine let this reader wait
            assert r["warnings"] == [metrics.BURST] and r["decode_rate"] is None
        else:
            assert r["decode_method"] == "counted" and r["decode_tokens"] == 5
            assert r["decode_rate"] == pytest.approx(5 / r["decode_s"])
            assert r["ttft_s"] < r["e2e_s"]
        assert 0 < r["ttft_s"] <= r["e2e_s"] and len(r["chunk_times_s"]) == 6
        assert r["output_hash"] and r["arm_hash"] and r["case_hash"] and r["machine_id"]
        assert r["flushed"] is True and r["settings"]["max_tokens"] == 6
    state = server.state()
    assert state["posts"] == 6 + 2  # two workloads warmed up, once each, and thrown away
    assert state["flushes"] == 4  # before each workload of each repeat


def test_a_second_run_measures_only_what_is_missing(server, tmp_path):
    out = tmp_path / "b.jsonl"
    first = run(server, out, repeats=1)
    posts = server.state()["posts"]
    assert run(server, out, repeats=1) == first
    assert server.state()["posts"] == posts  # not even a warm-up
    more = run(server, out, repeats=2)
    assert more[:3] == first and len(more) == 6 == len(read_rows(out))
    changed = run(server, out, works=[small(max_tokens=7)], repeats=1)
    assert [r["completion_tokens"] for r in changed] == [7, 7, 7]
    other = run(
        server, out, arm="nextn", launch=launch("--speculative-algorithm", "NEXTN"), repeats=1
    )
    assert len(other) == 3 and len(read_rows(out)) == 12


def test_an_incomplete_answer_is_a_row_without_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "_SILENCE_S", 600.0)  # a pause of a busy machine is none
    with paced(rate=4000, cut="fin", at=3) as server:
        rows = run(server, tmp_path / "b.jsonl", repeats=1, warmup=0)
    for r in rows:
        assert not r["complete"] and "before any finish reason" in r["problem"]
        assert (
            r["decode_rate"] is r["ttft_s"] is r["e2e_s"] is r["tpot_s"] is r["output_hash"] is None
        )
    arm = bench.summarise(rows)[0]
    assert (arm.rows, arm.failed, arm.decode_rate) == (3, 3, None)


def test_case_11_4_a_server_that_hangs_after_80_requests(tmp_path):
    out = tmp_path / "b.jsonl"
    began = 0.0

    class Patient(Client):
        """The short limit is for the request that hangs: a busy machine may need longer for one."""

        def chat(self, prompt, *, timeout_s, **more):
            nonlocal began
            last = len(read_rows(out)) == 80
            began = time.monotonic()
            return super().chat(prompt, timeout_s=timeout_s if last else 60, **more)

    with paced(rate=20000, first_s=0.001, hang_after=80) as server:
        with pytest.raises(ServerError, match="stopped answering after 80 requests") as caught:
            bench.run(
                Patient(server.url, model="paced"),
                out=out,
                arm="baseline",
                launch=launch(),
                workloads=[small(prompts=100, max_tokens=2)],
                repeats=1,
                warmup=0,
                stall_s=2,
            )
        assert time.monotonic() - began < 60  # it hangs for 600 s
    assert len(read_rows(out)) == 80
    assert "rows so far are kept" in str(caught.value)


def test_a_server_that_is_gone_is_named_with_its_last_words(tmp_path):
    def measure(works, out):
        bench.run(lost, arm="a", launch=launch(), workloads=works, repeats=1, out=out)

    with nobody() as url:
        lost = SimpleNamespace(
            client=lambda: Client(url, model="m"), tail=lambda n: ["Killed: out of memory"]
        )
        with pytest.raises(
            ServerError, match=r"went away after 0 requests; its log ends with: Killed"
        ):
            measure([small()], tmp_path / "b")
        with pytest.raises(ServerError, match="went away after 0 requests"):  # prompts are cut
            measure(workloads({"prompts": 1}, ["shape"]), tmp_path / "c")


def test_a_server_that_dies_while_it_is_asked_for_anything_is_gone_too():
    """Its memory ran out while it emptied its cache: the connection is reset, not refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die():
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        threading.Thread(target=die, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        dying = SimpleNamespace(tail=lambda n: ["Killed"])
        with (
            pytest.raises(
                ServerError, match=r"went away after 1 request; .* Killed; the rows so far"
            ),
            gone.told(dying, lambda: 1, "request", 5),
        ):
            Client(url, model="m").flush_cache()


def test_a_server_without_a_tokenizer_gets_prompts_of_estimated_length(tmp_path):
    works = workloads({"shape_input": 100, "shape_output": 4, "prompts": 1}, ["shape"])
    rows = []
    for tokenizer in (True, False):
        with paced(rate=4000, tokenizer=tokenizer) as server:
            rows += run(server, tmp_path / f"{tokenizer}", works=works, repeats=1)
    assert rows[0]["case_hash"] != rows[1]["case_hash"] and all(r["complete"] for r in rows)


def test_speculation_counters_in_rows(tmp_path):
    spec = {"spec_verify_ct": 4, "spec_num_correct_drafts": 8, "spec_num_proposed_drafts": 12}
    with paced(rate=4000, spec=spec) as server:
        rows = run(server, tmp_path / "a", launch=launch(nextn=True))
        assert [r["spec"]["source"] for r in rows] == ["meta_info"] * 6
        assert bench.summarise(rows)[0].accept_length.value == 3.0
    with paced(rate=4000, rounds=2) as server:  # a server whose replies bring none
        rows = run(server, tmp_path / "b", launch=launch(nextn=True))
        assert [(r["spec"]["tokens"], r["spec"]["rounds"]) for r in rows] == [(5, 2)] * 6
        assert bench.summarise(rows)[0].accept_source == "counters"
        rows = run(server, tmp_path / "c")  # no speculation in this arm: nothing is made up
        assert [r["spec"] for r in rows] == [None] * 6


def test_rows_of_another_machine_are_not_mixed_in(server, tmp_path, monkeypatch):
    out = tmp_path / "b.jsonl"
    run(server, out, repeats=1)
    monkeypatch.setattr(bench, "machine", lambda: {"cpu": "another"})
    with pytest.raises(UsageError, match="rows of another machine"):
        run(server, out, repeats=2)


def test_bad_arguments(server, tmp_path):
    with pytest.raises(UsageError, match="at least one repeat"):
        run(server, tmp_path / "b", repeats=0)


CHILD = """
from pathlib import Path
from types import SimpleNamespace
from sparkling import bench
from sparkling.workloads import Prompt, Workload
from sparkling.client import Client
prompts = tuple(Prompt(str(i), f"prompt {{i}}") for i in range(6))
works = [Workload(name, "", prompts, 3) for name in ("one", "two")]
launch = SimpleNamespace(argv=("-m", "x"), env={{}}, recipe="r", stage="s", variant=None, switches={{}},
                         served_name="m")
bench.run(Client({url!r}, model="paced"), arm="baseline", launch=launch, workloads=works,
          repeats=3, out=Path({out!r}), warmup=1)
print("done", flush=True)
"""


def test_killed_at_random_moments_every_row_is_there_exactly_once(tmp_path):
    rng = random.Random(11)
    out = tmp_path / "b.jsonl"
    kills = 0
    with paced(rate=2000, first_s=0.01) as server:
        code = CHILD.format(url=server.url, out=str(out))
        for _ in range(60):
            # However late a busy machine sends the kill: less than a fifth is done until then.
            server.tell("/allow?8" if kills < 5 else "/allow")
            child = subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
            )
            if kills < 5:
                # At least one more row must come, so that the test ends; then die at any moment.
                have = out.stat().st_size if out.exists() else 0
                while child.poll() is None and (not out.exists() or out.stat().st_size == have):
                    time.sleep(0.001)
                time.sleep(rng.random() * 0.1)
                child.send_signal(signal.SIGKILL)
            said = child.communicate()[0]
            if said == "done\n":
                break
            kills += 1
            if rng.random() < 0.5 and out.stat().st_size:
                # What a kill of the whole machine may leave: the last line cut anywhere.
                tail = out.read_bytes().rstrip(b"\n").rfind(b"\n") + 1
                os.truncate(out, rng.randint(tail, out.stat().st_size))
    assert kills >= 3
    rows = read_rows(out)
    keys = Counter((r["arm_hash"], r["workload"], r["prompt"], r["repeat"]) for r in rows)
    assert len(keys) == 36 and set(keys.values()) == {1}
    assert all(line.endswith("}") for line in out.read_text().splitlines())


# -- ladder ------------------------------------------------------------------------------------------


def row(arm, prompt, rate, *, repeat=0, workload="w", tokens=100, output="x", **more):
    return {
        "arm": arm, "arm_hash": f"hash-{arm}", "workload": workload, "prompt": prompt, "repeat": repeat,
        "case_hash": f"{workload}/{prompt}", "settings": {"max_tokens": tokens, "sampling": {"temperature": 0}},
        "machine_id": "m", "model_id": "w", "regime": "", "recipe": "tiny", "complete": True,
        "decode_tokens": tokens, "decode_s": tokens / rate, "decode_rate": rate, "tpot_s": 1 / rate,
        "ttft_s": 0.1, "e2e_s": 0.1 + tokens / rate, "peak_rate": rate, "completion_tokens": tokens + 1,
        "cached_tokens": 0, "spec": None, "output_hash": output,
    } | more  # fmt: skip


def arms(gain=1.5, prompts=8, seed=0, **more):
    rng = random.Random(seed)
    rows = []
    for p in range(prompts):
        speed = rng.uniform(40, 160)  # prompts differ fourfold, arms by half
        for repeat in range(2):
            noise = rng.uniform(0.99, 1.01)
            rows.append(row("baseline", f"{p}", speed * noise, repeat=repeat))
            rows.append(row("nextn", f"{p}", speed * gain / noise, repeat=repeat, **more))
    return rows


def test_ladder_gives_the_gain_with_a_paired_interval():
    made = bench.ladder(arms())
    base, nextn = made.rungs
    assert (base.arm, base.gain, made.workload) == ("baseline", None, "w")
    assert nextn.gain.value == pytest.approx(1.5, rel=0.02)
    assert 1.47 < nextn.gain.low < nextn.gain.value < nextn.gain.high < 1.53
    assert nextn.gain.n == 8 and nextn.faster is True and base.faster is None
    assert nextn.summary.decode_rate.low < nextn.summary.decode_rate.value
    # Unpaired, the spread between prompts drowns it.
    assert base.summary.decode_rate.high - base.summary.decode_rate.low > 20
    assert bench.ladder(arms()) == made
    assert made["nextn"].gain == nextn.gain
    assert json.dumps(made.to_json()) and "paired bootstrap" in made.definition
    assert bench.ladder(arms(gain=0.8))["nextn"].faster is False
    assert bench.ladder(arms(gain=1.0))["nextn"].faster is None


def test_rates_are_pooled_not_averaged():
    rows = [row("baseline", "a", 100, tokens=900), row("baseline", "b", 10, tokens=10)]
    arm = bench.summarise(rows)[0]
    assert arm.decode_rate.value == pytest.approx(910 / 10)
    assert arm.decode_rate.low is None  # two prompts say nothing about an interval


def test_a_prompt_weighs_the_same_however_often_it_was_repeated():
    rows = [row("baseline", p, r) for p, r in (("a", 100), ("b", 50))]
    more = rows + [row("baseline", "a", 100, repeat=i) for i in (1, 2, 3)]
    rates = [bench.summarise(x)[0].decode_rate.value for x in (rows, more)]
    assert rates[0] == pytest.approx(rates[1])


def test_only_prompts_that_every_arm_answered_are_compared():
    rows = arms()
    for r in rows:
        if r["arm"] == "nextn" and r["prompt"] == "3":
            r.update(complete=False, decode_s=None, decode_tokens=None)
    assert bench.ladder(rows)["nextn"].gain.n == 7
    for r in rows:
        if r["arm"] == "nextn":
            r.update(complete=False, decode_s=None)
    with pytest.raises(UsageError, match="No prompt was answered completely by every arm"):
        bench.ladder(rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine_id": "m2"}, r"differ in the machine \(m, m2\)"),
        ({"model_id": "other"}, r"differ in the model \(other, w\)"),
        ({"regime": "two GPUs"}, "differ in the regime"),
        ({"recipe": "other"}, "differ in the recipe"),
        (
            {"settings": {"max_tokens": 100, "sampling": {"temperature": 0.6}}},
            "differ in sampling of w",
        ),
        (
            {"settings": {"max_tokens": 64, "sampling": {"temperature": 0}}},
            r"max_tokens of w \(100, 64\)",
        ),
        ({"case_hash": "another text"}, "differ in the text of prompt 0 of w"),
    ],
)
def test_what_differs_in_more_than_the_arm_is_refused(change, said):
    with pytest.raises(UsageError, match=said):
        bench.ladder(arms(**change))


def test_one_name_for_two_launches_is_refused():
    rows = arms()
    rows[-1]["arm_hash"] = "changed-recipe"
    for call in (bench.ladder, bench.summarise):
        with pytest.raises(UsageError, match="'nextn' was measured under 2 different launches"):
            call(rows)


def test_missing_baseline_and_no_rows():
    with pytest.raises(UsageError, match="'base' was not measured; there are baseline, nextn"):
        bench.ladder(arms(), "base")
    with pytest.raises(UsageError, match="no rows of shape"):
        bench.ladder(arms(), workload="shape")
    with pytest.raises(UsageError, match="No arm 'x'"):
        bench.ladder(arms())["x"]


def test_summaries_by_workload_and_over_all():
    rows = [row("baseline", str(p), 50, workload=w) for w in ("one", "two") for p in range(4)]
    found = bench.summarise(rows)
    assert [(a.workload, a.rows, a.prompts) for a in found] == [
        ("one", 4, 4),
        ("two", 4, 4),
        ("all", 8, 8),
    ]
    assert found[0].ttft_s.n == 4 and found[0].deterministic is None
    assert json.dumps([a.to_json() for a in found])
    assert bench.ladder(rows, workload="two").workload == "two"


def test_determinism_is_recorded():
    same = [row("baseline", "a", 50, repeat=i) for i in range(3)]
    assert bench.summarise(same)[0].deterministic is True
    differs = [*same, row("baseline", "a", 50, repeat=3, output="y")]
    assert bench.summarise(differs)[0].deterministic is False
    sampled = {"settings": {"max_tokens": 100, "sampling": {"temperature": 0.6}}}
    assert bench.summarise([r | sampled for r in differs])[0].deterministic is None


def test_rows_without_a_rate_are_in_no_average_and_are_counted():
    rows = arms()
    clean = bench.ladder(rows)
    gone = {"decode_s": None, "decode_tokens": None, "decode_rate": None, "tpot_s": None}
    older = {"decode_s": 1e-4, "decode_tokens": 15, "decode_rate": 150000, "tpot_s": 1e-4 / 15}
    for more in (gone, older):
        burst = [row("nextn", "0", 1, repeat=i, **more, peak_rate=None) for i in (2, 3)]
        made = bench.ladder([*rows, *burst])["nextn"]
        assert made.gain == clean["nextn"].gain
        assert made.summary.tpot_s == clean["nextn"].summary.tpot_s
        assert (made.summary.rows, made.summary.unrated, made.summary.failed) == (18, 2, 0)
        found = {a.arm: a for a in bench.summarise([*rows, *burst])}["nextn"]
        assert found.unrated == 2 and found.decode_rate == clean["nextn"].summary.decode_rate
    for r in rows:
        if r["arm"] == "nextn" and r["prompt"] == "3":
            r.update(gone)
    assert bench.ladder(rows)["nextn"].gain.n == 7
    assert bench.ladder(rows)["nextn"].summary.unrated == 2
    with pytest.raises(UsageError, match=r"with a decode rate \(16 answers have none\)"):
        bench.ladder([r | gone if r["arm"] == "nextn" else r for r in rows])


def test_a_machine_that_is_not_steady_gives_no_verdict():
    rows = arms(gain=3)
    steady = bench.ladder(rows)
    assert steady.warning is None and steady["nextn"].faster is True
    assert 1 < steady["nextn"].summary.spread < 1.03
    slow = [r["decode_rate"] for r in rows if r["arm"] == "baseline" and r["prompt"] == "5"]
    rows.append(row("baseline", "5", min(slow) / 4.7, repeat=2))
    for made in (bench.ladder(rows), bench.ladder(rows, workload="w")):
        assert made["nextn"].faster is None and made["nextn"].gain.excludes(1.0)
        assert made["nextn"].gain.n == 8
        assert re.match(
            r"Machine not steady: repeats of one prompt differ by ×4\.[78]", made.warning
        )
        assert made.to_json()["warning"] == made.warning


def test_the_spread_is_that_of_repeats_of_one_text():
    rows = [row("baseline", p, r) for p, r in (("a", 100), ("b", 10))]
    assert bench.summarise(rows)[0].spread is None  # prompts differ, nothing was repeated
    rows += [row("baseline", "a", 50, repeat=1, output="y")]
    assert bench.summarise(rows)[0].spread == pytest.approx(2)
    sampled = {"settings": {"max_tokens": 100, "sampling": {"temperature": 0.6}}}
    assert bench.summarise([r | sampled for r in rows])[0].spread is None


def test_the_cost_of_a_round_is_paired_over_common_prompts():
    spec = {"tokens": 150, "rounds": 60, "source": "meta_info"}
    rows = [r | ({"arm": "fp8-head"} if r["arm"] == "baseline" else {"spec": spec}) for r in arms()]
    (known,) = bench.round_costs(rows)
    assert known.gain.n == known.prompts == 8 and known.gain.low < known.gain.value
    assert known.gain.value == pytest.approx(1.5, rel=0.02)
    assert known.cost == pytest.approx(2.5 / known.gain.value)
    # Prompts and workloads that only one arm measured change nothing.
    lucky = {"tokens": 400, "rounds": 100, "source": "meta_info"}
    more = [row("nextn", p, 900, workload=w, spec=lucky) for w, p in (("w", "x"), ("other", "0"))]
    more += [row("fp8-head", "y", 5, arm_hash="hash-baseline"), row("humming", "0", 7)]
    assert bench.round_costs(rows + more) == [known]
    assert bench.round_costs([r for r in rows if r["arm"] == "nextn"]) == []
    text = show.round_costs([known]).text
    assert "verification cost" in text and "n prompts" in text and "not steady" not in text
    uneven = dataclasses.replace(known, spread=2.0)
    assert "differ by ×2.0; read no gain" in show.round_costs([uneven]).text.replace("\n", " ")


def test_sampled_workload_is_another_one():
    w = small().sampled(temperature=0.6, top_p=0.95, seed=1)
    assert w.name == "w/sampled" and not w.greedy and small().greedy
    assert dataclasses.replace(w, name="w").settings() != small().settings()
