"""What an appendix shows that needs no server."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from sparkling import lane, suite


@pytest.fixture
def shown(tmp_path, monkeypatch) -> Callable[[str, str], tuple[str, int]]:
    """`shown(notebook, kind)` runs a notebook in the suite on a lane without a server environment and
    gives the text of its outputs and how many pictures there are. Where HTML comes with a picture,
    JupyterLab shows the HTML alone: that is none."""
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", str(tmp_path / "no" / "python"))

    def run(notebook: str, kind: str) -> tuple[str, int]:
        said: list[str] = []
        result = suite.run_suite(lane.detect(kind), notebooks=[notebook], progress=said.append)
        assert result.exit_code == 0, "\n".join(said)
        done = next((tmp_path / "runs").glob(f"*/notebooks/{notebook}.ipynb"))
        outputs = [
            output.get("data", {})
            for cell in json.loads(done.read_text())["cells"]
            if cell["cell_type"] == "code"
            for output in cell["outputs"]
        ]
        text = "\n".join("".join(data.get("text/plain", "")) for data in outputs)
        return text, sum("image/png" in data and "text/html" not in data for data in outputs)

    return run
