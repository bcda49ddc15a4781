"""`sparkling ablation` on real servers: two arms, proved around their rows, and the tables.

One switch and one round keep it at two starts; the order, the resumption and the statistics have
tests of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sparkling import tiny
from sparkling.files import read_rows

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_arms_by_turns(root, server_python, tmp_path):
    mine = tmp_path / "mine.jsonl"
    talk = [{"role": "user", "content": "Why is the sky blue?"}]
    lines = [{"id": "sky", "messages": talk}, {"id": "name", "prompt": "Name three rivers."}]
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines))
    env = {
        **os.environ,
        "SPARKLING_RUNS": str(tmp_path / "runs"),
        "SPARKLING_RECIPE": "tiny-ling",
        "SPARKLING_MODEL": str(tiny.build(tmp_path / "tiny")),
        "SPARKLING_SERVER_PYTHON": str(server_python),
    }
    words = ["ablation", "--lane", "cpu", "--switch", "nextn", "--rounds", "1", "--idle", "1"]
    words += ["--prompts", str(mine), "--thinking", "off", "--run", "real", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "sparkling.cli", *words],
        capture_output=True, text=True, env=env, cwd=root, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "runs" / "real" / "ablation"
    rows = read_rows(folder / "rows.jsonl")
    assert {(r["arm"], r["prompt"]) for r in rows} == {
        (arm, prompt) for arm in ("baseline", "baseline+nextn") for prompt in ("sky", "name")
    }
    assert all(r["complete"] for r in rows) and len({r["case_hash"] for r in rows}) == 2
    # Both arms say the same, since speculation changes no greedy answer.
    assert len({(r["prompt"], r["output_hash"]) for r in rows}) == 2
    proved = [e for e in read_rows(folder / "blocks.jsonl") if e["event"] in ("proved", "good")]
    assert [(e["when"], e["switches"]["nextn"]) for e in proved if e["arm"] == "baseline"] == [
        ("before", "off"), ("after", "off")
    ]  # fmt: skip
    assert {e["switches"]["nextn"] for e in proved if e["arm"] == "baseline+nextn"} == {"live"}
    result = json.loads(done.stdout)
    assert [e["switches"] for e in result["all"]["effects"]] == [["nextn"]]
    assert result["acceptance"][0]["length"]["value"] > 1
    assert result["machine"]["samples"] >= 4 and result["machine"]["least_available"] > 0
    assert (folder / "power.jsonl").is_file()
