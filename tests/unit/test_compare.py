"""Comparisons: pairs by id (case 39), refusals that say in what, length drift, frozen baselines."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as theirs
from sparkling import cli, compare, recipe, show_compare
from sparkling.compare_sides import choose, sides
from sparkling.errors import UsageError
from sparkling.store import open_run

N = 200


def question(arm: str, i: int, correct: bool, **more) -> dict:
    tokens = 200 + i
    rate = 40.0 if arm == "baseline" else 60.0
    return {
        "id": i,
        "arm": arm,
        "correct": correct,
        "answer": "1",
        "rule": "boxed",
        "gold": str(i),
        "finish_reason": "stop",
        "status": "ok",
        "prompt_tokens": 900 + i,
        "completion_tokens": tokens,
        "ttft_s": 0.2,
        "e2e_s": 0.2 + tokens / rate,
        "decode_rate": rate,
        "spec": {"tokens": 30, "rounds": 10} if arm == "nextn" else None,
        "text": "It is <b>1</b>.",
        "reasoning": "",
        "attempt": 1,
    } | more


def questions(arm: str, n: int = N, **more) -> list[dict]:
    """Right but for every seventh (baseline) or every eighth (the other)."""
    step = 7 if arm == "baseline" else 8
    return [question(arm, i, i % step != 0, **more) for i in range(n)]


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def make_run(runs: Path, run_id: str, stage: str, root: Path, rows: list[dict], **facts) -> None:
    run = open_run(runs, run_id, notebook="80_live_evaluation")
    book = recipe.load("tiny-ling", root=root)
    launch = book.render(stage, model=Path("/models/tiny")).to_json()
    run.update(
        {
            "lane": "cpu",
            "recipe": {"name": book.name, "sha256": book.sha256},
            "launches": {stage: launch},
            **facts,
        }
    )
    write(run.path("gsm8k.jsonl"), rows)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_accuracy_is_paired_by_id_whatever_the_order():
    a, b = questions("baseline"), questions("nextn")
    plain = compare.evaluations(a, b)
    shuffled = b[:]
    random.Random(4).shuffle(shuffled)
    assert compare.evaluations(a, shuffled).to_json() == plain.to_json()
    c = plain.accuracy.counts
    wrong_a, wrong_b = set(range(0, N, 7)), set(range(0, N, 8))
    assert (c.first_only, c.second_only) == (len(wrong_b - wrong_a), len(wrong_a - wrong_b))
    assert c.neither == len(wrong_a & wrong_b) and c.n == N
    p = theirs.binomtest(c.first_only, c.discordant).pvalue
    assert plain.accuracy.p == pytest.approx(p)


def test_more_ids_on_one_side_are_said_and_duplicates_refused():
    a, b = questions("baseline", 100), questions("nextn", 103)
    found = compare.evaluations(a, b)
    assert found.accuracy.counts.n == 100
    assert found.note == "100 ids paired; left out: 3 only in the second set"
    assert [o.rows for o in found.outcomes] == [100, 103]
    assert "left out: 3 only in the second set" in str(show_compare.evaluation(found))
    with pytest.raises(UsageError, match="5 stands twice in the second"):
        compare.evaluations(a, [*b, b[5]])


def test_how_questions_ended_is_counted_and_never_dropped():
    b = questions("nextn")
    for i, state in ((1, "truncated"), (2, "truncated"), (3, "unparsed"), (4, "error")):
        b[i] |= {"status": state, "correct": False, "e2e_s": None, "decode_rate": None}
    found = compare.evaluations(questions("baseline"), b)
    assert found.outcomes[1].states == {"ok": 196, "truncated": 2, "unparsed": 1, "error": 1}
    assert found.accuracy.counts.n == N
    rates = {r.name: r for r in found.ratios}
    assert rates["time of a reply"].ratio.n == N - 4 and rates["length"].ratio.n == N
    text = str(show_compare.evaluation(found))
    assert "truncated" in text and "unparsed" in text


def test_rates_and_lengths_are_paired():
    found = compare.evaluations(questions("baseline"), questions("nextn"))
    rates = {r.name: r for r in found.ratios}
    assert rates["decode rate"].ratio.value == pytest.approx(1.5)
    assert rates["decode rate"].first == pytest.approx(40) and rates["decode rate"].ratio.n == N
    tokens = np.arange(N) + 200.0
    slow, fast = 0.2 + tokens / 40, 0.2 + tokens / 60
    assert rates["time of a reply"].ratio.value == pytest.approx(fast.mean() / slow.mean())
    assert rates["time per token"].first == pytest.approx(slow.sum() / tokens.sum())
    assert rates["time of a reply, p50"].ratio.value == pytest.approx(
        np.median(fast) / np.median(slow)
    )
    assert compare.drift(found.ratios).startswith("No length drift is shown")


def test_length_drift_is_told_and_taken_out():
    """An arm that is as fast per token and writes a fifth more: slower per reply only."""
    a = questions("baseline")
    b = [r | {"arm": "nextn", "completion_tokens": r["completion_tokens"] * 1.2} for r in a]
    b = [r | {"e2e_s": 0.2 + r["completion_tokens"] / 40} for r in b]
    found = compare.evaluations(a, b)
    rates = {r.name: r.ratio for r in found.ratios}
    assert rates["time of a reply"].low > 1.1
    assert rates["decode rate"].value == pytest.approx(1.0)
    assert rates["time per token"].value == pytest.approx(1.0, abs=0.01)
    said = compare.drift(found.ratios)
    assert said.startswith("Length drift: the second wrote more, 1.200 [1.200, 1.200] (n=200)")


def test_two_runs_that_differ_in_the_switch_only(runs, root):
    make_run(runs, "frozen", "fp8-head", root, questions("fp8-head"))
    make_run(runs, "new", "nextn", root, questions("nextn"))
    (found,) = compare.compare("frozen", "new", runs, root=root, margin=0.05)
    assert found.evaluation.accuracy.counts.n == N
    whats = [d.what for d in found.differs]
    assert "the switch nextn" in whats and "the flag --speculative-algorithm" in whats
    assert all(d.declared for d in found.differs)
    text = str(show_compare.comparison(found))
    assert "They differ in: the switch nextn (off against on)" in text and "McNemar" in text
    with pytest.raises(UsageError, match="the switch nextn"):
        compare.compare("frozen", "new", runs, switches=["fp8-head"], root=root)


def launch_with(root: Path, stage: str, *words: str) -> dict:
    launch = recipe.load("tiny-ling", root=root).render(stage, model=Path("/m")).to_json()
    return {"launches": {stage: launch | {"argv": [*launch["argv"], *words]}}}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"versions": {"numpy": "1.0"}}, r"the version of numpy \(.* against 1.0\)"),
        ({"versions": {"sglang": "0.6"}}, r"the version of sglang \(none against 0.6\)"),
        ({"machine": {"arch": "aarch64"}}, "the machine"),
        ({"lane": "gpu"}, r"the lane \(cpu against gpu\)"),
        ({"recipe": {"sha256": "0" * 64}}, "the recipe"),
    ],
)
def test_other_differences_are_refused_and_named(runs, root, facts, said):
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"))
    make_run(runs, "b", "nextn", root, questions("nextn"), **facts)
    with pytest.raises(UsageError, match=f"more than the declared switch: .*{said}"):
        compare.compare("a", "b", runs, root=root)


def test_versions_of_what_only_draws_do_not_matter(runs, root):
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"))
    make_run(runs, "b", "nextn", root, questions("nextn"), versions={"matplotlib": "1"})
    assert compare.compare("a", "b", runs, root=root)


def test_flags_and_seeds_beyond_the_switch_are_refused(runs, root):
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"))
    more = launch_with(root, "nextn", "--chunked-prefill-size", "512")
    make_run(runs, "b", "nextn", root, questions("nextn"), **more)
    with pytest.raises(UsageError, match=r"--chunked-prefill-size \(not set against 512\)"):
        compare.compare("a", "b", runs, root=root)
    more = launch_with(root, "nextn")
    argv = more["launches"]["nextn"]["argv"]
    argv[argv.index("--random-seed") + 1] = "7"
    make_run(runs, "c", "nextn", root, questions("nextn"), **more)
    with pytest.raises(UsageError, match=r"--random-seed \(\d+ against 7\)"):
        compare.compare("a", "c", runs, root=root)
    more["launches"]["nextn"]["env"]["OMP_NUM_THREADS"] = "99"
    make_run(runs, "d", "nextn", root, questions("nextn"), **more)
    with pytest.raises(UsageError, match="the variable OMP_NUM_THREADS"):
        compare.compare("c", "d", runs, root=root)


def test_an_older_recipe_is_said_to_be_unchecked(runs, root):
    old = {"recipe": {"sha256": "0" * 64}}
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"), **old)
    more = launch_with(root, "nextn", "--chunked-prefill-size", "512")
    make_run(runs, "b", "nextn", root, questions("nextn"), **old, **more)
    (found,) = compare.compare("a", "b", runs, root=root)
    assert any("which flags belong to the switch is not checked" in r for r in found.remarks)
    assert "the flag --chunked-prefill-size" in [d.what for d in found.differs]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt_tokens": 5}, "prompt_tokens of question 0"),
        ({"gold": "x"}, "gold of question 0"),
        ({"prompt_hash": "other"}, "prompt_hash of question 0"),
        ({"seed": 2}, "seed of the questions"),
        ({"concurrency": 4}, "concurrency of the questions"),
        ({"settings": {"temperature": 0.6}}, "settings of the questions"),
    ],
)
def test_other_prompts_or_sampling_are_refused(tmp_path, more, said):
    same = {"prompt_hash": "p", "seed": 1, "settings": {"temperature": 0}, "concurrency": 1}
    a = write(tmp_path / "a.jsonl", questions("baseline", 20, **same))
    b = write(tmp_path / "b.jsonl", questions("nextn", 20, **{**same, **more}))
    with pytest.raises(UsageError, match=said):
        compare.compare(a, b, tmp_path)


def test_two_bare_files_say_what_is_not_checked(tmp_path):
    a = write(tmp_path / "a" / "x.jsonl", questions("baseline", 20))
    b = write(tmp_path / "b" / "x.jsonl", questions("baseline", 20))
    (found,) = compare.compare(a, b, tmp_path)
    assert [r.split(":")[-1] for r in found.remarks].count(
        " versions, machine, flags and seeds are not checked."
    ) == 2
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for again in (a, str(tmp_path / "b" / ".." / "a" / "x.jsonl"), f"{tmp_path}/link/x.jsonl"):
        with pytest.raises(UsageError, match="with itself"):
            compare.compare(a, again, tmp_path)


@pytest.mark.parametrize("more", [{"correct": "false"}, {"id": [1]}, {"correct": None}])
def test_rows_that_grade_nothing_are_not_graded(tmp_path, more):
    """The text "false" would be right to Python, and a list cannot be paired."""
    a = write(tmp_path / "a.jsonl", questions("baseline", 20))
    rows = questions("nextn", 20)
    b = write(tmp_path / "b.jsonl", [{**rows[0], **more}, *rows[1:]])
    (found,) = compare.compare(a, b, tmp_path)
    assert found.evaluation.note == "19 ids paired; left out: 1 only in the first set"


@pytest.mark.parametrize("value", ["1.0", float("nan"), True, None, [1]])
def test_a_time_that_is_no_number_is_not_known(tmp_path, value):
    a = write(tmp_path / "a.jsonl", questions("baseline", 20))
    b = write(tmp_path / "b.jsonl", questions("nextn", 20, e2e_s=value))
    (found,) = compare.compare(a, b, tmp_path)
    assert [r.name for r in found.evaluation.ratios] == ["decode rate", "first token", "length"]


def test_failed_questions_that_were_asked_again_are_no_evaluation(runs, root):
    """`eval --retry-errors` keeps their rows beside the others, in `<task>.errors.jsonl`."""
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"))
    folder = runs / "a" / "80_live_evaluation"
    write(folder / "gsm8k.errors.jsonl", questions("fp8-head", 3, status="error"))
    (side,) = sides("a", runs)
    assert len(side.evaluation) == N


def test_a_file_of_a_run_brings_the_runs_manifest(runs, root):
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"))
    (side,) = sides(str(runs / "a" / "80_live_evaluation" / "gsm8k.jsonl"), runs)
    assert side.manifest["lane"] == "cpu" and side.launch["stage"] == "fp8-head"


def test_which_arm_is_compared_with_which(tmp_path):
    a = write(tmp_path / "a.jsonl", questions("baseline", 9) + questions("fp8-head", 9))
    b = write(tmp_path / "b.jsonl", questions("nextn", 9) + questions("fp8-head", 9))
    c = write(tmp_path / "c.jsonl", questions("nextn", 9))
    assert [s.arm for pair in choose(sides(a, tmp_path), sides(b, tmp_path)) for s in pair] == [
        "fp8-head",
        "fp8-head",
    ]
    with pytest.raises(UsageError, match="say which to compare"):
        compare.compare(a, c, tmp_path)
    (found,) = compare.compare(f"{a}:baseline", c, tmp_path)
    assert found.labels == ("baseline", "nextn")
    for text, said in ((f"{a}:humming", "no arm 'humming'"), ("nowhere", "no run and no file")):
        with pytest.raises(UsageError, match=said):
            sides(text, tmp_path)
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(UsageError, match="holds no evaluated questions"):
        sides(empty, tmp_path)


def bench_row(arm: str, prompt: int, rate: float, repeat: int = 0, **more) -> dict:
    return {
        "arm": arm, "arm_hash": arm, "workload": "short-turn", "prompt": f"{prompt:02d}",
        "case_hash": f"c{prompt}", "repeat": repeat, "settings": {"sampling": {"temperature": 0}},
        "machine_id": "m", "machine": {}, "model_id": "x", "regime": "r", "recipe": "tiny-ling",
        "complete": True, "decode_tokens": 100, "decode_s": 100 / rate, "decode_rate": rate,
        "ttft_s": 0.1, "e2e_s": 0.1 + 100 / rate, "tpot_s": 1 / rate, "peak_rate": rate,
        "completion_tokens": 101, "cached_tokens": 0, "spec": None, "output_hash": f"o{prompt}",
    } | more  # fmt: skip


def test_benchmarks_of_two_files(tmp_path):
    a = write(tmp_path / "a.jsonl", [bench_row("baseline", i, 40 + i) for i in range(6)])
    b = write(tmp_path / "b.jsonl", [bench_row("nextn", i, 80 + 2 * i) for i in reversed(range(6))])
    (found,) = compare.compare(a, b, tmp_path)
    gain = found.bench.whole["nextn"].gain
    assert gain.value == pytest.approx(2.0) and gain.n == 6 and gain.excludes(1.0)
    times = {r.name: r.ratio.value for r in found.bench.ratios}
    slow, fast = (np.mean([0.1 + 100 / (k * (40 + i)) for i in range(6)]) for k in (1, 2))
    assert times["time of a reply"] == pytest.approx(fast / slow)
    text = str(show_compare.comparison(found))
    assert "faster" in text and text.count("short-turn") == 1
    other = write(
        tmp_path / "c.jsonl", [bench_row("nextn", i, 80, machine_id="z") for i in range(6)]
    )
    with pytest.raises(UsageError, match="differ in the machine"):
        compare.compare(a, other, tmp_path)
    with pytest.raises(UsageError, match="nothing of the same kind"):
        compare.compare(a, write(tmp_path / "d.jsonl", questions("nextn", 9)), tmp_path)


def test_within_a_run_every_arm_is_compared_with_the_baseline(runs, root):
    rows = questions("fp8-head") + questions("baseline") + questions("nextn")
    make_run(runs, "a", "nextn", root, rows)
    found = compare.within(sides("a", runs))
    assert [c.labels for c in found] == [("baseline", "fp8-head"), ("baseline", "nextn")]


def test_command(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", questions("baseline"))
    b = write(tmp_path / "b.jsonl", questions("nextn"))
    assert cli.main(["compare", a, b, "--margin", "5"]) == 0
    out = capsys.readouterr().out
    assert "McNemar, exact" in out and "200" in out and "a margin of 5.00 points" in out
    assert cli.main(["compare", a, b, "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["evaluation"]["accuracy"]["n"] == N and data["bench"] is None
    assert cli.main(["compare", a, str(tmp_path / "none.jsonl")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_questions_of_two_kinds_are_compared_apart(runs, root):
    make_run(runs, "a", "fp8-head", root, questions("fp8-head"))
    make_run(runs, "b", "nextn", root, questions("nextn"))
    for name, arm in (("a", "fp8-head"), ("b", "nextn")):
        write(runs / name / arm / "sparklet.jsonl", questions(arm, 30))
    found = compare.compare("a", "b", runs, root=root)
    assert [(c.second, c.evaluation.accuracy.counts.n) for c in found] == [
        ("b:nextn (gsm8k)", N),
        ("b:nextn (sparklet)", 30),
    ]
    make_run(runs, "c", "nextn", root, questions("nextn") + questions("baseline"))
    write(runs / "c" / "x" / "sparklet.jsonl", questions("nextn", 30) + questions("baseline", 30))
    both = compare.within(sides("c", runs))
    assert [c.evaluation.accuracy.counts.n for c in both] == [N, 30]
