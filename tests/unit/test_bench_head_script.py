"""What `scripts/bench_head.py` says where it cannot measure."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_head.py"


def call(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_an_unknown_part_is_named(tmp_path):
    done = call(tmp_path / "head.json", "--parts", "plain,hummin")
    assert done.returncode == 2 and "no such part: hummin; there are plain" in done.stderr


def test_a_python_without_torch_is_named(tmp_path):
    if importlib.util.find_spec("torch"):
        pytest.skip("this Python has torch")
    done = call(tmp_path / "head.json")
    assert done.returncode == 2 and f"{sys.executable} has no torch" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "head.json").exists()
