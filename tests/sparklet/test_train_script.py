"""What `scripts/train_sparklet.py` says to a wrong request."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_sparklet.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_sparklet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["measure", "DIR/none"], "holds nothing to measure"),
        (["measure", "DIR"], "holds nothing to measure"),
        (["export", "DIR", "DIR/out"], "holds nothing to export"),
        (["card", "DIR", "--stored", "DIR/none.json"], "there is no file DIR/none.json"),
        (["train", "DIR/file"], "DIR/file is a file"),
        (["train", "DIR/run", "--steps", "0"], "--steps 0 is impossible"),
    ],
)
def test_a_wrong_request_is_one_sentence(script, tmp_path, capsys, words, said):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        script.main([word.replace("DIR", str(tmp_path)) for word in words])
    assert ended.value.code == 2
    assert said.replace("DIR", str(tmp_path)) in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
