"""`sparkling eval` and `sparkling extract`: what they print, keep, resume and refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sparkling import cli, evaluation, gsm8k, notebook, proof, recipe, store
from sparkling.client import Client
from sparkling.errors import UsageError
from sparkling.files import read_rows
from sparkling.proof import Proof, Verdict
from sparkling.tally import Tally

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
from answer_server import Answers


@pytest.fixture(autouse=True)
def _here(monkeypatch, root, tmp_path):
    monkeypatch.chdir(root)
    monkeypatch.setenv("SPARKLING_LANE", "cpu")
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", sys.executable)


def run(capsys, *args):
    try:
        code = cli.main(args)
    except SystemExit as done:
        code = done.code
    out, err = capsys.readouterr()
    return code, out, err


GOLD = {q.text: q.solution for q in gsm8k.sparklet().questions}


def solved(prompt, _nth):
    return GOLD[prompt]


def rows_in(folder):
    return {p.parent.name: read_rows(p) for p in sorted(folder.glob("runs/*/*/*.jsonl"))}


# -- extract -------------------------------------------------------------------------------------


def texts(tmp_path, *lines):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return str(path)


def test_extract_prints_answer_and_rule(capsys, tmp_path):
    path = texts(
        tmp_path,
        {"text": r"\boxed{\frac{3}{4}}", "id": 7},
        {"text": "It is $1,234.00"},
        {"text": r"\boxed{18"},
        {"text": None},
        {"text": [{"type": "text", "text": "#### "}, {"type": "text", "text": "5"}]},
        {"text": "12</think>The answer is 18."},
        {"text": [{"type": "reasoning", "text": "#### 17"}, {"type": "text", "text": "18"}]},
    )
    code, out, err = run(capsys, "extract", path)
    assert (code, err) == (0, "")
    assert [line.split("\t")[:2] for line in out.splitlines()] == [
        ["1", "3/4"], ["2", "1234"], ["3", "-"], ["4", "-"], ["5", "5"], ["6", "18"],
        ["7", "18"],
    ]  # fmt: skip
    assert "unparsed  (unclosed box)" in out and "reasoning parser seems off" in out
    code, out, _ = run(capsys, "extract", path, "--json")
    found = json.loads(out)
    assert [(f["line"], f["answer"], f["rule"]) for f in found] == [
        (1, "3/4", "boxed"),
        (2, "1234", "last number"),
        (3, None, "unparsed"),
        (4, None, "unparsed"),
        (5, "5", "####"),
        (6, "18", "the answer is"),
        (7, "18", "last number"),
    ]


def test_extract_names_bad_lines_and_reads_the_good_ones(capsys, tmp_path):
    path = texts(
        tmp_path,
        {"text": "#### 3"},
        "{",
        '["x"]',
        {"t": "1"},
        {"text": 5},
        "[" * 99_999,
        {"text": "4"},
    )
    code, out, err = run(capsys, "extract", path)
    assert code == 2 and [x.split("\t")[1] for x in out.splitlines()] == ["3", "4"]
    assert err.startswith("error: ") and err.count("\n") == 1
    for said in (
        "line 2 is not JSON",
        "line 3 has no",
        "line 4 has no `text`",
        "line 5 has a",
        "line 6 is not",
    ):
        assert said in err
    assert run(capsys, "extract", str(tmp_path / "none"))[2].startswith("error: There is no file")


# -- eval of a server that runs --------------------------------------------------------------------


def test_eval_of_a_url(capsys, tmp_path):
    with Answers(solved) as server:
        code, out, err = run(capsys, "eval", "--url", server.url, "--limit", "7", "--arm", "mine")
        assert (code, err) == (0, "")
        assert len(server.asked) == 7
        assert "nothing is proved of this server" in out
        assert "7 of 7 · right 100.0 % [64.6, 100.0]" in out
        run_id = out.partition("run: ")[2].split()[0]
        # The same run again asks what is new only; --resume finds it.
        code, out, _ = run(capsys, "eval", "--url", server.url, "--arm", "mine", "--limit", "9",
                           "--resume", "--json")  # fmt: skip
        assert code == 0 and len(server.asked) == 9
        assert json.loads(out[out.index("[\n") :])[0]["right"] == 9
    rows = rows_in(tmp_path)["mine"]
    assert [r["id"] for r in rows] == [f"{i:04d}" for i in range(9)]
    assert {r["dataset"] for r in rows} == {"sparklet"} and {r["model"] for r in rows} == {"fake"}
    assert store.Run(tmp_path / "runs" / run_id, None).manifest["evaluations"]["mine"]["right"] == 9


@pytest.mark.parametrize("arm", ["a/b", ".", "..", "../x", "a:b"])
def test_an_arm_that_is_no_name_is_refused(capsys, arm):
    code, _, err = run(capsys, "eval", "--url", "http://127.0.0.1:9", "--arm", arm)
    assert code == 2 and err.startswith(f"error: --arm {arm!r} names a folder")


def test_a_server_that_does_not_answer_leaves_no_run(capsys, tmp_path):
    code, _, err = run(capsys, "eval", "--url", "http://127.0.0.1:9", "--limit", "3")
    assert code == 1 and err.startswith("error: ") and "127.0.0.1:9" in err
    assert not list(tmp_path.rglob("manifest.json"))


def test_eval_of_a_file_of_ones_own_with_examples(capsys, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n"
                            for i in range(8)))  # fmt: skip
    with Answers(lambda prompt, _: "#### 1") as server:
        args = ("eval", "--url", server.url, "--data", str(path), "--training", str(path))
        code, _, _ = run(capsys, *args, "--max-tokens", "50", "--thinking", "off", "--greedy",
                         "--concurrency", "4", "--limit", "8")  # fmt: skip
    assert code == 0
    assert all(p.count("Question: ") == 6 for p in server.prompts)
    assert {b["max_tokens"] for b in server.asked} == {50}
    assert {b["temperature"] for b in server.asked} == {0}
    assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    rows = rows_in(tmp_path)["served"]
    assert {r["dataset"] for r in rows} == {"own"} and sum(r["correct"] for r in rows) == 1
    assert len(rows[0]["shots"]) == 5 and rows[0]["mode"] == "5-shot"


def test_eval_stops_with_a_sentence(capsys):
    cut = {"text": "and so on", "finish": "length", "tokens": 512}
    with Answers(lambda *_: cut) as server:
        code, _, err = run(capsys, "eval", "--url", server.url)
        assert code == 1 and "3 of 3 answers were cut off at max_tokens = 512" in err
        code, _, err = run(
            capsys, "eval", "--url", server.url, "--allow-truncated", "100", "--limit", "4"
        )
        assert code == 0
    hang = {"text": "well now", "hang": 1}
    with Answers(lambda *_: hang) as server:
        code, _, err = run(capsys, "eval", "--url", server.url, "--stall", "0.4")
    assert code == 1 and "stopped answering after 0 questions (0.4 s" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--url", "http://127.0.0.1:9", "baseline"], "not both"),
        (["--mode", "5-shot"], "5-shot needs 5 training questions and there are 0"),
        (["--problems", "aime"], "There are no questions 'aime'"),
        (["--data", "/none.jsonl"], "There is no file /none.jsonl"),
        (["--limit", "0"], "--limit"),
        (["--url", "http://127.0.0.1:9"], "No server answers"),
        (["--resume"], "There is no evaluation to resume"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["nope"], "has no stage 'nope'"),
        (["humming"], "Stage 'humming' cannot run on the cpu lane"),
        (["--allow-truncated", "101"], "--allow-truncated"),
    ],
)
def test_eval_refuses_before_anything_is_started(capsys, args, said):
    code, _, err = run(capsys, "eval", *args)
    assert code == (1 if said == "No server answers" else 2), err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1


# -- eval of stages --------------------------------------------------------------------------------


class Stage:
    """A stage's server, whose answers a test plans."""

    ready_seconds, api_key = 1.0, None

    def __init__(self, launch, answers):
        self.launch, self.answers, self.url = launch, answers, answers.url
        self.stopped = 0

    def client(self, **_):
        return Client(self.url, model="fake")

    def tail(self, n):
        return ["a last word"]

    def stop(self):
        self.stopped += 1


@pytest.fixture
def stages(monkeypatch):
    """Stages that answer right, but for every fifth question of the second one; `proofs` is what
    was proved, `bad` names the proof (its number) that fails."""
    world = type("World", (), {"started": [], "proofs": [], "bad": None})()

    def wrong_now_and_then(prompt, nth):
        spoiled = len(world.started) > 1 and len(world.answers.asked) % 5 == 0
        return "#### 123456" if spoiled else solved(prompt, nth)

    def prove(server, **_):
        world.proofs.append(server.launch.stage)
        state = "not live" if world.bad == len(world.proofs) else "off"
        return Proof(server.launch.stage, [Verdict("nextn", False, state, [])])

    def start(launch, **_):
        world.started.append(Stage(launch, world.answers))
        return world.started[-1]

    monkeypatch.setattr(proof, "prove", prove)
    monkeypatch.setattr(notebook._server, "start", start)
    with Answers(wrong_now_and_then) as world.answers:
        yield world


def test_eval_proves_each_stage_before_and_after(capsys, stages, tmp_path):
    code, out, err = run(capsys, "eval", "--limit", "10")
    assert (code, err) == (0, "")
    assert [s.launch.stage for s in stages.started] == ["baseline", "nextn"]
    assert stages.proofs == ["baseline", "baseline", "nextn", "nextn"]
    assert all(s.stopped for s in stages.started)
    assert "McNemar, exact, two-sided" in out and "right in baseline only" in out
    rows = rows_in(tmp_path)
    assert sorted(rows) == ["baseline", "nextn"]
    one, two = ({r["id"]: r for r in rows[a]} for a in ("baseline", "nextn"))
    assert one.keys() == two.keys() and len(one) == 10
    assert all(one[i]["prompt_hash"] == two[i]["prompt_hash"] for i in one)
    assert one["0000"]["arm_hash"] != two["0000"]["arm_hash"]
    (folder,) = (tmp_path / "runs").iterdir()
    names = sorted(p.name for p in (folder / "eval").glob("proof-*.json"))
    assert names == [f"proof-{a}{b}.json" for a in ("baseline", "nextn") for b in ("-after", "")]
    assert store.Run(folder, None).manifest["evaluations"]["nextn"]["task"] == "sparklet"


def test_eval_says_so_when_the_arm_has_changed_meanwhile(capsys, stages, tmp_path):
    stages.bad = 2
    code, _, err = run(capsys, "eval", "baseline", "--limit", "3")
    assert code == 1 and "is not live" in err
    assert stages.started[0].stopped and len(rows_in(tmp_path)["baseline"]) == 3


def test_eval_asks_nothing_of_an_arm_that_is_not_proved(capsys, stages, tmp_path):
    stages.bad = 1
    assert run(capsys, "eval", "baseline")[0] == 1
    assert stages.answers.asked == [] and rows_in(tmp_path) == {}
    assert stages.started[0].stopped


def test_eval_resumes_a_stopped_run(capsys, stages, tmp_path):
    run(capsys, "eval", "baseline", "--limit", "4")
    code, out, _ = run(capsys, "eval", "baseline", "--resume", "--limit", "6")
    assert code == 0 and len(stages.answers.asked) == 6 and "6 of 6" in out
    code, _, err = run(capsys, "eval", "baseline", "--resume", "--limit", "6", "--greedy")
    assert code == 2 and "another sampling" in err and len(stages.answers.asked) == 6


def test_eval_asks_failed_questions_again_when_told_to(capsys, stages, tmp_path):
    stages.answers.plan = lambda prompt, nth: solved(prompt, nth)
    run(capsys, "eval", "baseline", "--limit", "3")
    (path,) = (tmp_path / "runs").glob("*/baseline/sparklet.jsonl")
    rows = read_rows(path)
    rows[1] |= {"status": "error", "correct": False, "problem": "cut"}
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    code, out, _ = run(capsys, "eval", "baseline", "--resume", "--retry-errors", "--limit", "3")
    assert code == 0 and "1 failed questions will be asked again" in out
    assert len(stages.answers.asked) == 4 and all(r["correct"] for r in read_rows(path))
    (kept,) = read_rows(path.with_name("sparklet.errors.jsonl"))
    assert kept["problem"] == "cut"


# -- in a notebook ---------------------------------------------------------------------------------


def test_a_notebook_evaluates_the_recipes_number_of_questions(stages, tmp_path):
    nb = notebook.begin("80_live_evaluation", lane="cpu")
    assert "Fewer than two arms" in str(evaluation.compared(nb.run))
    for stage in ("baseline", "nextn"):
        nb.start(stage)
        nb.prove()
        shown = str(nb.evaluate())
        assert f"{stage}" in shown and "24 of 24" in shown and "####  24" in shown
    assert len(stages.answers.asked) == 48
    said = str(evaluation.compared(nb.run, margin=5))
    assert "a margin of 5.00 points" in said and "right in neither" in said
    assert evaluation.times(nb.run).png
    nb.start("humming")
    assert str(nb.evaluate()).startswith("Nothing is evaluated: ")
    nb.stop()


def test_the_published_counts_are_read_as_they_should_be():
    said = str(evaluation.published())
    assert said.startswith("PUBLISHED, not measured here: ")
    assert "both right 1264, baseline only 14, all three only 13, neither 28" in said
    assert "p = 1.0" in said and "a loss above about 0.85 points is excluded" in said


# -- choices ---------------------------------------------------------------------------------------


def test_the_recipe_chooses_the_questions(root, tmp_path, monkeypatch):
    from sparkling import gsm8k_fetch, lane

    where = lane.detect("cpu")
    asked = []
    monkeypatch.setattr(gsm8k_fetch, "ensure", lambda split, *_, **__: asked.append(split) or split)
    monkeypatch.setattr(gsm8k, "gsm8k", lambda test, train: ("GSM8K", test, train))
    practice, flash = (recipe.load(n, root=root) for n in ("sparklet", "ling-3.0-flash"))
    assert evaluation.task_of(where, practice).name == "sparklet"
    assert evaluation.task_of(where, flash) == ("GSM8K", "test", "train")
    assert evaluation.task_of(where, flash, shots=False) == ("GSM8K", "test", None)
    assert asked == ["test", "train", "test"]
    assert evaluation.limit_of(practice) == 24 and evaluation.limit_of(flash) == 100
    assert evaluation.limit_of(practice, 5) == 5


def test_settings_are_the_tasks_with_what_was_asked_for():
    task = gsm8k.sparklet()
    s = evaluation.settings_of(task, greedy=True, thinking=False, max_tokens=9)
    assert (s.thinking, s.max_tokens, s.sampling) == (False, 9, {"temperature": 0.0})
    assert evaluation.settings_of(task) == task.defaults
    with pytest.raises(UsageError):
        evaluation.settings_of(task, mode="5-shot")


# -- sums ------------------------------------------------------------------------------------------


def row(status="ok", correct=True, **more):
    return {"status": status, "correct": correct, "rule": "####", **more}


def test_a_tally_adds_up_and_says_what_is_left():
    now = [100.0]
    tally = Tally(total=10, arm="a", clock=lambda: now[0])
    assert tally.accuracy is tally.decode_rate is tally.accept_length is tally.left_s is None
    tally.add(row(), here=False)
    assert tally.left_s is None  # nothing was done in this session yet
    now[0] = 106.0
    tally.add(row(decode_tokens=100, decode_s=2.0, spec={"tokens": 90, "rounds": 30}))
    tally.add(row(decode_tokens=10, decode_s=1.0, spec={"tokens": 5, "rounds": 5}))
    tally.add(row("error", False))
    # 6 s for three questions of this session, six to go.
    assert tally.left_s == pytest.approx(12.0)
    assert tally.decode_rate == pytest.approx(110 / 3) != (50 + 10) / 2
    assert tally.accept_length == pytest.approx(95 / 35) != (3 + 1) / 2
    line = tally.line()
    assert line.startswith("4 of 10 · right 75.0 % [30.1, 95.4]")
    assert "36.7 tokens/s" in line and "accept 2.71" in line and "1 error" in line
    assert line.endswith("0:12 left")
    told = tally.to_json()
    assert told["states"] == {"ok": 3, "truncated": 0, "unparsed": 0, "error": 1}
    assert told["accuracy"]["n"] == 4 and told["rounds"] == 35
