"""nbval itself can fail: else its green lines over `nbval/` would mean nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys


def nbval(path):
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(path)], cwd=path.parent, capture_output=True, text=True)
    return done.returncode, done.stdout


def changed(path, before, after):
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_changed_output_and_a_raising_cell_are_found(root, tmp_path):
    source = root / "tests" / "notebooks" / "nbval" / "numbers.ipynb"
    good = tmp_path / "good.ipynb"
    shutil.copy(source, good)
    code, said = nbval(good)
    assert code == 0, said
    wrong = tmp_path / "wrong.ipynb"
    shutil.copy(source, wrong)
    changed(wrong, "100.0 tokens/s", "101.0 tokens/s")
    code, said = nbval(wrong)
    assert code == 1 and "101.0 tokens/s" in said
    raising = tmp_path / "raising.ipynb"
    shutil.copy(source, raising)
    changed(raising, "import stats", "import no_such_module")
    assert nbval(raising)[0] == 1


def test_every_cell_of_the_subset_is_compared(root):
    """An unmarked cell is only run, in lax mode."""
    for path in (root / "tests" / "notebooks" / "nbval").glob("*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] == "code" and "parameters" not in tags:
                assert "NBVAL_CHECK_OUTPUT" in "".join(cell["source"])
                assert cell["outputs"]
