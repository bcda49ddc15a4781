"""The report: one file, made from what is on the disk, also of a run that failed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sparkling import report
from sparkling.errors import UsageError
from sparkling.proof import prove_recorded
from sparkling.store import Run, open_run


def row(arm: str, prompt: int, rate: float, repeat: int = 0, **more) -> dict:
    tokens = 100
    return {
        "arm": arm,
        "arm_hash": arm,
        "workload": "short-turn",
        "prompt": f"{prompt:02d}",
        "case_hash": f"c{prompt}",
        "repeat": repeat,
        "settings": {"sampling": {"temperature": 0}},
        "machine_id": "m",
        "machine": {"cpus": 2, "cpu": "a CPU", "gpus": []},
        "model_id": "x",
        "regime": "r",
        "recipe": "tiny-ling",
        "complete": True,
        "decode_tokens": tokens,
        "decode_s": tokens / rate,
        "decode_rate": rate,
        "ttft_s": 0.1,
        "e2e_s": 1.0,
        "tpot_s": 1 / rate,
        "peak_rate": rate,
        "completion_tokens": 101,
        "cached_tokens": 0,
        "spec": None,
        "output_hash": f"o{prompt}",
        "problem": None,
    } | more


@pytest.fixture
def run(tmp_path: Path) -> Run:
    whole = open_run(tmp_path / "runs", None)
    whole.update(
        {
            "lane": "cpu",
            "launches": {"nextn": {"argv": ["-m", "x", "--flag", "<v>"], "env": {"A": "1"}}},
        }
    )
    for arm, rate in (("baseline", 40.0), ("nextn", 80.0)):
        for prompt in range(6):
            open_run(tmp_path / "runs", whole.id, notebook="80_live").append(
                "rows", row(arm, prompt, rate + prompt)
            )
    one = open_run(tmp_path / "runs", whole.id, notebook="40_baseline")
    one.append("rows", row("baseline", 0, 999.0))
    one.save("proof-nextn", prove_recorded("cpu-nextn"))
    (whole.dir / "notebooks").mkdir()
    (whole.dir / "notebooks" / "40_baseline.ipynb").write_text("{}")
    cells = [{"index": 2, "first": "nb.start('<x>')", "seconds": 9.5}]
    books = [
        {
            "name": "40_baseline",
            "verdict": "ok",
            "seconds": 12.3,
            "cells": cells,
            "cell": None,
            "cell_first": None,
            "said": None,
        },
        {
            "name": "50_humming",
            "verdict": "failed",
            "seconds": 1.0,
            "cells": [],
            "cell": 4,
            "cell_first": "nb.prove()",
            "said": "NotLive: <why>",
        },
    ]
    (whole.dir / "timings.json").write_text(
        json.dumps(
            {
                "run": whole.id,
                "lane": "cpu",
                "started": "today",
                "seconds": 75.0,
                "ok": False,
                "leaks": ["process 7 still runs"],
                "notebooks": books,
            }
        )
    )
    return whole


def test_everything_is_in_one_self_contained_file(run):
    path = report.build(run.dir)
    page = path.read_text()
    assert path == run.dir / "report.html"
    assert re.search(r'<img alt="[^"]+" src="data:image/png;base64,[A-Za-z0-9+/=]{1000,}">', page)
    for want in (
        "1 of 2 notebooks ran to their end in 1:15",
        "NOT everything passed",
        'href="notebooks/40_baseline.ipynb"',
        "12.3",
        "50_humming, cell 4 (nb.prove())",
        "NotLive: &lt;why&gt;",
        "left behind: process 7",
        "RECORDING",
        "nextn live",
        "nb.start(&#x27;&lt;x&gt;&#x27;)",
        "&lt;v&gt;",
        "A=1",
        "sparkling",
        "numpy",
    ):
        assert want in page, want
    assert 'href="notebooks/50_humming.ipynb"' not in page  # never executed, so nothing to link to
    assert "<td>total</td>" in page


def test_a_resumed_run_does_not_claim_its_last_pass_did_it_all(run):
    path = run.dir / "timings.json"
    timings = json.loads(path.read_text())
    timings["notebooks"][0]["verdict"] = "kept"
    path.write_text(json.dumps(timings))
    page = report.build(run.dir).read_text()
    assert (
        "1 of 2 notebooks ran to their end, 1 of them before the run was resumed; the rest took 1:15;"
        in page
    )
    assert "<td>this pass</td>" in page and "<td>total</td>" not in page
    assert not re.search(r"https?://|<script|<link|@import|src=\"(?!data:)", page)


def test_the_ladder_is_that_of_the_notebook_which_measured_most_arms(run):
    rows = report.ladder_rows(run)
    assert len(rows) == 12
    assert 999.0 not in {r["decode_rate"] for r in rows}
    page = report.build(run.dir).read_text()
    assert "2 CPUs (a CPU)" in page
    assert "6 prompts, 6 rows" in page


def test_a_machine_that_was_not_steady_is_told(run):
    warning = (
        "Machine not steady: repeats of one prompt differ by ×5.0; read no gain from this run."
    )
    assert "not steady" not in report.build(run.dir).read_text()
    live = open_run(run.dir.parent, run.id, notebook="80_live")
    live.append("rows", row("nextn", 0, 16.0, repeat=1))
    assert f"<p class='bad'><b>{warning}</b></p>" in report.build(run.dir).read_text()


def test_a_part_that_cannot_be_made_says_so_in_its_place(run):
    open_run(run.dir.parent, run.id, notebook="80_live").append(
        "rows", row("nextn", 0, 70.0, repeat=1, machine_id="other")
    )
    (run.dir / "40_baseline" / "proof-bad.json").write_text("{")
    page = report.build(run.dir).read_text()
    assert page.count("This part could not be made") == 2
    assert "the machine" in page
    assert "50_humming, cell 4" in page


def test_damaged_timings_are_told(run):
    (run.dir / "timings.json").write_text('{"notebooks":5,"ok":1}')
    page = report.build(run.dir).read_text()
    assert "timings.json is damaged" in page
    assert page.count("This part could not be made") == 1


def test_a_run_with_nothing_in_it_has_a_report_too(tmp_path):
    run = open_run(tmp_path / "runs", None)
    page = report.build(run.dir).read_text()
    for want in ("Nothing was measured", "No server was proved", "did not run", run.id):
        assert want in page


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="is not a Sparkling run"):
        report.build(tmp_path)


# -- the measured sections -----------------------------------------------------------------------


def question(arm: str, i: int, correct: bool, **more) -> dict:
    tokens = 100 + i
    return {
        "id": i, "arm": arm, "correct": correct, "answer": "1", "rule": "boxed", "gold": "1",
        "finish_reason": "stop", "status": "ok", "prompt_tokens": 90, "completion_tokens": tokens,
        "ttft_s": 0.2, "e2e_s": 0.2 + tokens / 50, "decode_rate": 50.0, "spec": None,
        "text": "<script>alert('x')</script>", "reasoning": "", "attempt": 1,
    } | more  # fmt: skip


def evaluate(run: Run, n: int = 60) -> None:
    book = open_run(run.dir.parent, run.id, notebook="80_live")
    for arm, step in (("baseline", 7), ("nextn", 8)):
        for i in range(n):
            extra = {"status": "truncated", "rule": "<b>"} if i == 0 else {}
            book.append("gsm8k", question(arm, i, i % step != 0, **extra))


def test_verdicts_come_first(run):
    evaluate(run)
    page = report.build(run.dir).read_text()
    first = page.index("<ul class='verdicts'>")
    for later in ("<img", "<table", 'id="the-ladder"', 'id="evaluation"'):
        assert first < page.index(later)
    verdicts = page[first : page.index("</ul>", first)]
    assert "nextn is faster: 1.9" in verdicts and "times the decode rate of baseline" in verdicts
    assert "baseline answers 51 of 60 questions right: 85.00 % [" in verdicts
    assert "nextn against baseline: No difference is shown" in verdicts
    # the only proof of this run is a recording, which proves nothing here
    assert "Not proved here: nextn." in verdicts


def test_a_trap_that_the_proof_found_is_no_failure(run):
    bad = json.loads((run.dir / "40_baseline" / "proof-nextn.json").read_text())
    bad["stage"] = "nextn-trap"
    bad["verdicts"][-1]["cause"] = "contributes nothing (SPARKLING_TRAP=tensor-only: no scales)"
    (run.dir / "40_baseline" / "proof-nextn-trap.json").write_text(json.dumps(bad))
    page = report.build(run.dir).read_text()
    assert "found by the proof, as it must be: nextn-trap." in page
    assert "Not proved here: nextn." in page  # the recording beside it


def test_the_machine_s_table_is_no_wall(run):
    """The server's packages are folded, and what has a section of its own is not repeated raw."""
    packages = {f"package{i}": "1.0" for i in range(40)}
    run.update(
        server_environment={"python": "3.11", "packages": packages},
        evaluations={"baseline": {"accuracy": {"low": 0.6899611872949993}}},
    )
    page = report.build(run.dir).read_text()
    at = page.index("<summary>All 40 packages of the server's environment</summary>")
    assert "package39" not in page[:at] and "package39" in page[at:]
    assert "server_environment.python" in page[:at] and "0.68996" not in page
    assert "package39" in (run.dir / report.MARKDOWN).read_text()


def test_evaluation_and_comparison_have_definition_and_n(run):
    evaluate(run)
    page = report.build(run.dir).read_text()
    for want in (
        "Wilson interval at 95 %",
        "80_live/gsm8k.jsonl",
        "truncated",
        "McNemar, exact, two-sided",
        "pairs, joined by id",
        "No length drift is shown",
        "The whole distribution: time of an answer",
        "P99 is about the maximum",
    ):
        assert want in page, want
    assert page.count("data:image/png") == 3
    assert not re.search(r"https?://|<script|<link|@import|src=\"(?!data:)|<b></td>", page)


def test_a_run_without_questions_says_so(run):
    page = report.build(run.dir).read_text()
    assert "No questions were evaluated in this run." in page
    assert "Fewer than two arms answered questions" in page
    assert 'id="energy-and-memory"' not in page and 'id="each-switch' not in page


def test_energy_memory_and_events_are_shown_where_they_exist(run):
    folder = run.dir / "80_live"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").open()]
    for i, r in enumerate(rows):
        r |= {"sent_s": 100.0 + 2 * i}
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    samples = [{"head": 1}] + [
        {
            "t": 99 + i / 4,
            "power": {"gpu0": 50.0},
            "mem_available": 3 * 2**30,
            "temp_c": {"gpu0": 61},
        }
        for i in range(120)
    ]
    (folder / "power.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    event = {"level": "warn", "available": 2**30, "end": 2**29, "total": 8 * 2**30}
    (run.dir / "memory-events.jsonl").write_text(json.dumps(event) + "\n")
    page = report.build(run.dir).read_text()
    # 50 W for 1 s a request, 101 tokens a request
    assert "0.495 [0.495, 0.495] (n=6)" in page and "gpu0" in page and "61 °C" in page
    assert "3.00 GiB" in page and "1.00 of 8.0 GiB of memory available" in page


def test_the_factorial_is_shown_where_it_was_measured(run):
    folder = run.dir / "ablation"
    folder.mkdir()
    (folder / "order.json").write_text("{}")
    rates = {
        "baseline": 40,
        "baseline+fp8-head": 44,
        "baseline+nextn": 80,
        "baseline+fp8-head+nextn": 88,
    }
    rows = [row(arm, i, rate + i, round=0) for arm, rate in rates.items() for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = report.build(run.dir).read_text()
    assert 'id="each-switch-alone-and-together"' in page and "fp8-head × nextn" in page


def test_what_makes_the_run_again(run):
    page = report.build(run.dir).read_text()
    at = page.index('id="doing-it-again"')
    assert ".venv/bin/sparkling suite --lane cpu" in page[at:]
    assert f"git checkout {run.manifest['git']['commit']}" in page[at:]
    assert "sparkling ablation" not in page
    other = open_run(run.dir.parent, None, notebook="ablation")
    for arm in ("b", "baseline"):
        other.append("rows", row(arm, 0, 40.0))
    order = {"rounds": 2, "seed": 7, "arms": ["baseline", "b"]}
    other.update({"recipe": {"name": "tiny-ling"}, "order": order})
    page = report.build(other.dir).read_text()
    want = (
        ".venv/bin/sparkling ablation --recipe tiny-ling --workload short-turn --rounds 2 --seed 7"
    )
    assert want in page
    ladder = page[page.index('id="the-ladder"') :]
    assert ladder.index("<td>baseline</td>") < ladder.index("<td>b</td>")


def test_it_reads_on_a_phone_in_the_dark_and_on_paper(run):
    page = report.build(run.dir).read_text()
    assert 'name="viewport"' in page
    for want in (
        "prefers-color-scheme: dark",
        "@media print",
        "@media (max-width",
        "overflow-x: auto",
    ):
        assert want in page
    assert page.count("<table>") == page.count('<div class="wide"><table>')


def test_markdown_says_the_same(run):
    evaluate(run)
    report.build(run.dir)
    text = (run.dir / "report.md").read_text()
    assert text.startswith("# Sparkling run ")
    for want in ("## Verdicts", "- nextn is faster", "McNemar, exact", "50\\_humming, cell 4"):
        assert want in text, want
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert len(fences) % 2 == 0 and fences[0] == "```text" and fences[1] == "```"
    outside = re.sub(r"```text\n.*?\n```", "", text, flags=re.DOTALL)
    assert "<" not in outside.replace("\\<", "")


class Counted(str):
    """A prompt's name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_the_work_is_linear_in_the_rows(run, monkeypatch):
    seen = []
    for n in (150, 300):
        rows = [
            row(arm, i, rate) | {"prompt": Counted(f"{i:05d}")}
            for arm, rate in (("baseline", 40.0), ("nextn", 80.0), ("other", 50.0))
            for i in range(n)
        ]
        monkeypatch.setattr("sparkling.report_sections.ladder_rows", lambda _, rows=rows: rows)
        Counted.compared = 0
        assert "could not be made" not in report.build(run.dir).read_text()
        seen.append(Counted.compared)
    assert 0 < seen[1] < 2.5 * seen[0]


def test_users_at_once_have_a_section_and_no_place_on_the_ladder(run):
    folder = run.dir / "concurrency"
    folder.mkdir()
    (folder / "order.json").write_text(json.dumps({"arms": ["fp8-head", "nextn"]}))
    rows = []
    for arm, rate in (("fp8-head", 40.0), ("nextn", 60.0)):
        for users in (1, 2):
            for i in range(6):
                sent = 100.0 + (i // users) * 3
                more = {"users": users, "user": i % users, "turn": i // users, "sent_s": sent}
                more |= {"chunk_times_s": [0.1, 0.5, 0.9], "chunk_tokens": [1, 50, 101]}
                rows.append(row(arm, i, rate, round=0, limit=4, **more))
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = report.build(run.dir).read_text()
    at = page.index('id="users-at-once"')
    section = page[at : page.index("<h2", at)]
    assert "Where speculation" in section or "What speculation gains" in section
    assert "could not be made" not in page
    assert {r["arm"] for r in report.ladder_rows(run)} == {"baseline", "nextn"}
