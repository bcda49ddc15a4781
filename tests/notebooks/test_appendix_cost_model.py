"""The appendix on costs runs by itself, in seconds, without a server, on every lane."""

from __future__ import annotations

import json

import pytest
from sparkling import lane, suite


@pytest.mark.parametrize("kind", ["cpu", "spark"])
def test_it_runs_without_a_server(kind, root, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", str(tmp_path / "no" / "python"))
    where = lane.detect(kind)
    said: list[str] = []
    result = suite.run_suite(where, notebooks=["appendix_cost_model"], progress=said.append)
    assert result.exit_code == 0, "\n".join(said)
    done = next((tmp_path / "runs").glob("*/notebooks/appendix_cost_model.ipynb"))
    outputs = [
        output
        for cell in json.loads(done.read_text())["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]
    text = "\n".join("".join(o.get("data", {}).get("text/plain", "")) for o in outputs)
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 5
    for words in ("70.42 GB", "The published figures, reconciled", "FP8 heads against", "stated"):
        assert words in text
    assert "No run on this machine holds measurements yet" in text


def test_the_whole_suite_includes_it(root):
    names = [path.stem for path in suite.ordered(root / "notebooks")]
    assert names[0] == "00_start_here" and "appendix_cost_model" in names
    assert names.index("90_serve") < names.index("appendix_cost_model")
