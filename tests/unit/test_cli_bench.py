"""`bench`, `ablation` and `concurrency`: refusals before anything starts, turns, resumption, output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import cli, metrics, notebook, power, recipe, store
from sparkling.client import Client
from sparkling.errors import NotLive
from sparkling.files import read_rows

sys.path.insert(0, str(Path(__file__).parent))
from paced_server import paced

SPEC = {
    "spec_verify_ct": 5,
    "spec_num_correct_drafts": 5,
    "spec_correct_drafts_histogram": [2, 1, 2, 0],
    "spec_num_proposed_drafts": 15,
}


class Session:
    """A session whose server is the paced one; writes down what it was asked."""

    def __init__(self, url, run, book):
        self.url, self.run, self.recipe = url, run, book
        self.asked: list[str] = []
        self.server = None
        self.fails_at: str | None = None

    def start(self, stage, variant=None):
        self.asked.append(f"start {stage}" + (f" {variant}" if variant else ""))
        launch = self.recipe.render(stage, model="/m", port=0, variant=variant)
        client = Client(self.url, model="paced")
        self.server = SimpleNamespace(launch=launch, client=lambda: client)
        return f"{stage} is ready"

    def prove(self):
        self.asked.append("prove")
        if self.fails_at in self.asked[-2:]:
            raise NotLive("The head is BF16.")
        switches = self.server.launch.switches
        states = [
            SimpleNamespace(switch=s, state="live" if on else "off") for s, on in switches.items()
        ]
        return SimpleNamespace(verdicts=states)

    def stop(self):
        if self.server is not None:
            self.asked.append("stop")
        self.server = None

    def ladder(self):
        return "the picture"


@pytest.fixture
def session(monkeypatch, tmp_path, root):
    monkeypatch.chdir(root)
    monkeypatch.setenv("SPARKLING_LANE", "cpu")
    monkeypatch.setenv("SPARKLING_RECIPE", "tiny-ling")
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", sys.executable)
    monkeypatch.setattr(
        power.sensors, "find", lambda: ([lambda: {"mem_available": 2**33}], ["there is no RAPL"])
    )
    # A busy machine may let this reader wait until all chunks are there.
    monkeypatch.setattr(metrics, "MOST_RATE", 1e12)
    monkeypatch.setattr(metrics, "LEAST_GAP_S", 1e-9)
    with paced(rate=2000, first_s=0.002, spec=SPEC) as server:
        made = Session(server.url, None, recipe.load("tiny-ling", root=root))

        def begin(name, lane, run_id):
            made.run = store.open_run(tmp_path / "runs", run_id or None, notebook=name)
            return made

        monkeypatch.setattr(notebook, "begin", begin)
        yield made


def run(capsys, *args):
    try:
        code = cli.main(args)
    except SystemExit as done:  # argparse
        code = done.code
    out, err = capsys.readouterr()
    return code, out, err


QUICK = ("--workload", "short-turn", "--idle", "0")


def turns(session):
    return [a.removeprefix("start ") for a in session.asked if a.startswith("start")]


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["bench", "nope"], "has no stage 'nope'"),
        (["bench", "humming"], "Stage 'humming' cannot run on the cpu lane"),
        (["bench", "nextn", "nextn"], "Arms must be named, each once"),
        (["bench", "--rounds", "0"], "at least one round, not 0"),
        (["bench", "--repeats", "0"], "A benchmark needs at least one repeat, not 0"),
        (["bench", "--variant", "yarn"], "has no variant 'yarn'"),
        (["bench", "--workload", "shapes"], "There is no workload 'shapes'"),
        (["bench", "--idle", "-1"], "invalid number of seconds from 0 to 600 value: '-1'"),
        (["bench", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["bench", "--prompts", "x", "--workload", "shape"], "either --workload or --prompts"),
        (["bench", "--thinking", "on"], "--thinking is for --prompts"),
        (
            ["ablation", "--switch", "humming"],
            "humming cannot be switched on here: Humming's kernels",
        ),
        (["ablation", "--switch", "turbo"], "'turbo' is no switch; there are humming"),
        (["ablation", "--workload", "shapes"], "There is no workload 'shapes'"),
        (["concurrency", "--levels", "4,1"], "rising, not 4, 1"),
        (["concurrency", "--levels", "a"], "--levels a is no list of whole numbers"),
        (["concurrency", "--each", "0"], "at least once, not 0 times"),
        (["concurrency", "--spec", "baseline"], "Stage 'baseline' runs without NEXTN"),
        (["concurrency", "--plain", "nextn"], "Stage 'nextn' runs with NEXTN"),
        (["concurrency", "--variant", "nope"], "has no variant 'nope'"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(capsys, session, tmp_path, args, said):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert session.asked == [] and not (tmp_path / "runs").exists()


# -- turns ---------------------------------------------------------------------------------------


def test_bench_takes_turns_and_proves_around_each(capsys, session):
    code, out, err = run(capsys, "bench", *QUICK)
    assert (code, err) == (0, "")
    order = turns(session)
    assert order[:3] == order[:2:-1] and sorted(order[:3]) == ["baseline", "fp8-head", "nextn"]
    assert session.asked == [
        what for stage in order for what in (f"start {stage}", "prove", "prove", "stop")
    ]
    rows = read_rows(session.run.folder / "rows.jsonl")
    prompts = session.recipe.sizes["prompts"]
    assert len(rows) == 3 * 2 * prompts * 2  # stages, rounds, repeats in a start (3 / 2, up)
    assert [r["arm"] for r in rows[:: prompts * 2]] == order
    for said in (
        "the picture",
        "by round",
        "Arms, short-turn",
        "Accepted drafts",
        "no sensor on this machine",
    ):
        assert said in out
    assert out.endswith(f"rows: {session.run.folder}/rows.jsonl\n")
    assert session.run.manifest["order"]["order"] == order
    samples = (session.run.folder / "power.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["missing"] == ["there is no RAPL"] and len(samples) >= 3


def test_one_stage_alone_has_no_gain(capsys, session):
    code, out, _ = run(capsys, "bench", "nextn", *QUICK, "--rounds", "1", "--repeats", "1")
    assert code == 0 and turns(session) == ["nextn"]
    assert "the picture" not in out and "gain" not in out and "accept length" in out


def test_a_failed_proof_ends_the_run_and_a_resumed_one_keeps_the_order(capsys, session):
    plan = ("--rounds", "2", "--repeats", "1", *QUICK)
    session.fails_at = "start nextn"
    code, _, err = run(capsys, "bench", *plan, "--run", "r1")
    assert (code, err) == (1, "error: The head is BF16.\n") and session.asked[-1] == "stop"
    first = turns(session)
    session.fails_at, session.asked = None, []
    assert run(capsys, "bench", *plan, "--run", "r1")[0] == 0
    whole = [*first[:-1], *turns(session)]
    assert whole == session.run.manifest["order"]["order"]
    rows = read_rows(session.run.folder / "rows.jsonl")
    assert [r["arm"] for r in rows[:: session.recipe.sizes["prompts"]]] == whole
    code, _, err = run(capsys, "bench", *plan, "--run", "r1", "--seed", "9")
    assert code == 2 and "was measured with other" in err


def test_own_prompts(capsys, session, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n')
    options = ("--prompts", str(mine), "--thinking", "on", "--idle", "0", "--rounds", "1")
    assert run(capsys, "bench", "nextn", *options)[0] == 0
    rows = read_rows(session.run.folder / "rows.jsonl")
    assert {(r["workload"], r["prompt"]) for r in rows} == {("prompts", "a"), ("prompts", "b")}
    assert all(r["settings"]["thinking"] is True for r in rows)


# -- the factorial -------------------------------------------------------------------------------


def test_ablation_measures_every_combination_that_this_lane_has(capsys, session):
    code, out, err = run(capsys, "ablation", *QUICK)
    assert (code, err) == (0, "")
    arms = ["baseline", "baseline+fp8-head", "baseline+nextn", "baseline+fp8-head+nextn"]
    order = turns(session)
    assert sorted(order) == sorted(arms * 2) and order[:4] == order[:3:-1]
    assert "fp8-head × nextn" in out and "interaction" in out and "Arms, short-turn" in out
    saved = session.run.load("ablation")
    prompts = session.recipe.sizes["prompts"]
    assert saved["switches"] == ["fp8-head", "nextn"]
    assert [r["arm"] for r in saved["all"]["ladder"]["rungs"]] == arms
    for effect in saved["all"]["effects"]:
        assert effect["ratio"]["n"] == prompts and len(effect["by_round"]) == 2
    rows = read_rows(session.run.folder / "rows.jsonl")
    assert len({(r["prompt"], r["case_hash"]) for r in rows}) == prompts


def test_ablation_of_one_switch_as_json(capsys, session):
    code, out, err = run(capsys, "ablation", "--switch", "nextn", "--json", *QUICK)
    result = json.loads(out)
    assert code == 0 and result["switches"] == ["nextn"] and len(result["all"]["effects"]) == 1
    assert "baseline+nextn is ready" in err  # progress does not get between the JSON
    assert result["no_sensor"] == ["there is no RAPL"] and result["energy"] == []
    assert result["machine"]["least_available"] == 2**33


# -- users at once -------------------------------------------------------------------------------


def test_concurrency_with_and_without_speculation(capsys, session):
    options = ("--levels", "1,2", "--each", "1", "--idle", "0")
    code, out, err = run(capsys, "concurrency", *options)
    assert (code, err) == (0, "")
    assert sorted(turns(session)) == ["fp8-head many-users"] * 2 + ["nextn many-users"] * 2
    assert "Users at once" in out and "What speculation gains" in out
    saved = session.run.load("concurrency")
    prompts = session.recipe.sizes["prompts"]
    assert [(x["users"], x["requests"]) for x in saved["levels"]] == [
        (1, 2 * prompts), (2, 2 * prompts), (1, 2 * prompts), (2, 2 * prompts)
    ]  # fmt: skip
    assert {x["arm"] for x in saved["levels"]} == {"fp8-head", "nextn"}
    assert {u["users"] for u in saved["pays"]["gains"]} == {1, 2}
    assert saved["pays"]["at"]["n"] == prompts
