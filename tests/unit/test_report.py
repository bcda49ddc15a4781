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
        "--flag &lt;v&gt;",
        "A=1",
        "sparkling",
        "numpy",
    ):
        assert want in page, want
    assert 'href="notebooks/50_humming.ipynb"' not in page  # never executed, so nothing to link to
    assert not re.search(r"https?://|<script|<link|@import|src=\"(?!data:)", page)


def test_the_ladder_is_that_of_the_notebook_which_measured_most_arms(run):
    rows = report.ladder_rows(run)
    assert len(rows) == 12
    assert 999.0 not in {r["decode_rate"] for r in rows}
    page = report.build(run.dir).read_text()
    assert "2 CPUs (a CPU)" in page
    assert "6 prompts, 6 rows" in page


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
