"""Exports: every row and column, nothing that a spreadsheet executes, llama-benchy's shape."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from sparkling import cli, export
from sparkling.errors import UsageError
from sparkling.store import Run, open_run


def request(arm: str, i: int, **more) -> dict:
    return {
        "arm": arm, "arm_hash": arm, "workload": "short-turn", "prompt": f"{i:02d}", "repeat": 0,
        "model": "tiny|ling", "complete": True, "prompt_tokens": 100 + i, "cached_tokens": 20,
        "completion_tokens": 48, "ttft_s": 0.1 + i / 100, "decode_rate": 40.0 + i, "e2e_s": 1.0,
        "settings": {"sampling": {"temperature": 0.0}, "thinking": None}, "output_hash": f"o{i}",
        "chunk_times_s": [0.1, 0.2], "warnings": ["=1+1"], "problem": None,
    } | more  # fmt: skip


QUESTION = {
    "id": 7,
    "arm": "baseline",
    "correct": True,
    "answer": "-18",
    "text": "long",
    "rule": "@x",
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = open_run(tmp_path / "runs", "r1", notebook="80_live")
    for arm in ("baseline", "nextn"):
        for i in range(4):
            made.append("rows", request(arm, i))
    made.append("rows", request("nextn", 4, complete=False, ttft_s=None, decode_rate=None))
    made.append("gsm8k", QUESTION)
    return made


def test_csv_has_every_row_and_column(run):
    rows = list(csv.DictReader(io.StringIO(export.export(run.dir, "csv"))))
    assert len(rows) == 10 and [r["kind"] for r in rows].count("question") == 1
    first, last = rows[0], rows[-1]
    assert float(first["ttft_s"]) == 0.1 and first["settings.sampling.temperature"] == "0.0"
    assert first["problem"] == "" and first["complete"] == "true"
    assert "chunk_times_s" not in first and "text" not in last
    # a number stays one, anything else that begins like a formula does not
    assert (
        last["answer"] == "-18" and last["rule"] == "'@x" and last["file"] == "80_live/gsm8k.jsonl"
    )
    assert first["warnings"] == '["=1+1"]'


def test_json_has_everything_and_the_manifest(run):
    data = json.loads(export.export(run.dir, "json"))
    assert data["manifest"]["run_id"] == "r1"
    assert len(data["requests"]) == 9 and data["requests"][0]["chunk_times_s"] == [0.1, 0.2]
    assert data["questions"] == [{**QUESTION, "file": "80_live/gsm8k.jsonl"}]


def test_requests_of_several_users_at_once_are_exported(tmp_path):
    run = open_run(tmp_path / "runs", "r2", notebook="concurrency")
    for i in range(3):
        run.append("rows", request("nextn", i, users=2, user=i % 2))
    rows = list(csv.DictReader(io.StringIO(export.export(run.dir, "csv"))))
    assert [(r["kind"], r["users"]) for r in rows] == [("request of a user", "2")] * 3
    data = json.loads(export.export(run.dir, "json"))
    assert len(data["of_users"]) == 3 and data["requests"] == []
    with pytest.raises(UsageError, match="no requests measured one at a time"):
        export.export(run.dir, "llama-benchy")


def test_llama_benchy_table(run):
    text = export.export(run.dir, "llama-benchy")
    lines = text.splitlines()
    head = [c.strip() for c in lines[0].strip("|").split(" | ")]
    assert head == ["model", "test", "t/s", "ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)"]
    assert set(lines[1]) == set("|:-") and len({len(line) for line in lines[:6]}) == 1
    first = [c.strip() for c in lines[2].replace("\\|", "/").strip("|").split("|")]
    pp = [(80 + i) / (0.1 + i / 100) for i in range(4)]
    assert first[0] == "tiny/ling (baseline, short-turn)" and first[1] == "pp102"
    assert first[2] == f"{np.mean(pp):.2f} ± {np.std(pp):.2f}"
    assert first[3:] == ["", "", "115.00 ± 11.18"]
    second = [c.strip() for c in lines[3].replace("\\|", "/").strip("|").split("|")]
    assert second[1:3] == ["tg48", "41.50 ± 1.12"] and second[5] == ""
    assert "nextn short-turn n=4" in text and "not measured" in text


def test_what_cannot_be_exported_is_one_sentence(run, tmp_path, capsys, monkeypatch):
    empty = open_run(tmp_path / "runs", "r2")
    for folder, form, said in (
        (run.dir, "xml", "no format 'xml'"),
        (empty.dir, "csv", "no measured requests"),
        (tmp_path, "csv", "not a Sparkling run"),
    ):
        with pytest.raises(UsageError, match=said):
            export.export(folder, form)
    only = open_run(tmp_path / "runs", "r3", notebook="80")
    only.append("gsm8k", QUESTION)
    with pytest.raises(UsageError, match="llama-benchy"):
        export.export(only.dir, "llama-benchy")
    assert cli.main(["export", str(only.dir), "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("kind,id,arm,correct")
    assert cli.main(["export", str(tmp_path / "none")]) == 2
