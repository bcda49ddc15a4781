"""The weights notebook as a Spark runs it, with a local hub that holds the practice model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fakes"))
from fake_hubs import Hub

REPO = "inclusionAI/Ling-3.0-flash-fp4"


def said(executed: Path, cell: str) -> str:
    cells = {c["id"]: c for c in json.loads(executed.read_text())["cells"]}
    outputs = cells[cell]["outputs"]
    return "\n".join("".join(o.get("data", {}).get("text/plain", "")) for o in outputs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_checkpoint_is_fetched_once_and_verified(root, tmp_path):
    shipped = root / "models" / "sparklet"
    files = {p.name: p.read_bytes() for p in shipped.iterdir() if p.name != "sparkling.json"}
    model = tmp_path / "model"
    model.mkdir()
    with (model / "pad").open("wb") as sparse:  # so that no 80 GB have to be free for the test
        sparse.truncate(79_000_000_000)
    with Hub(files, repo=REPO) as hub:
        env = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "MODELSCOPE_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "MODELSCOPE_HOME": str(tmp_path / "ms"),
            "SPARKLING_MODEL": str(model),
            "SPARKLING_RUNS": str(tmp_path / "runs"),
        }
        for number in (1, 2):
            executed = tmp_path / f"{number}.ipynb"
            command = [
                sys.executable,
                "-m",
                "papermill",
                "notebooks/20_weights.ipynb",
                str(executed),
            ]
            command += ["-p", "lane", "spark", "--cwd", str(root / "notebooks")]
            done = subprocess.run(
                command,
                cwd=root,
                env=env,
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, done.stderr[-2000:]
        served = sum(len(data) for name, data in files.items() if name != ".gitattributes")
        assert hub.bodies() == served  # the second run fetched nothing
    assert "every file equals the hub's checksum" in said(tmp_path / "1.ipynb", "get-code")
    assert "no hub is asked" in said(tmp_path / "2.ipynb", "get-code")
    assert "untouched since" in said(tmp_path / "2.ipynb", "whole-code")
