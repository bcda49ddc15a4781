"""The scripts that run on a GPU machine: what can be tested without one."""

from __future__ import annotations

import gzip
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu():
    return load("record_sparklet_gpu")


def test_the_recorder_needs_nothing_of_ours_but_the_repository(gpu):
    """A GPU machine has SGLang and tokenizers, and none of our libraries' dependencies."""
    code = (
        "import sys; before = set(sys.modules); sys.path.insert(0, 'scripts')\n"
        "import record_sparklet_gpu\n"
        "tops = {n.split('.')[0] for n in set(sys.modules) - before}\n"
        "print(*sorted(t for t in tops if t not in sys.stdlib_module_names))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(said) == {
        "record_sparklet",
        "record_sparklet_gpu",
        "sparklet",
        "sparkling",
        "tokenizers",
    }


def test_sglang_would_find_the_plugin_in_the_temporary_folder(gpu, tmp_path):
    site = gpu.plugin_site(tmp_path / "site")
    (found,) = metadata.distributions(path=[str(site)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", "sparkling_sglang:register")
    assert (site / "sparkling_sglang" / "plugin.py").is_file()


def test_every_arm_is_one_the_recipe_knows(gpu):
    book = gpu.rec.recipe.load("sparklet-gpu", root=ROOT)
    for name, arm in gpu.ARMS.items():
        stage = book.combination(arm.switches)
        launch = book.render(stage, model=book.model, port=1, variant=arm.variant)
        assert launch.switches["humming"] and launch.switches["nextn"] is (name != "baseline")
        assert launch.switches["fp8-head"] is arm.plugin  # a stock server needs no plugin
        assert ("SPARKLING_TRAP" in launch.env) is (name == "trap")


def test_a_server_that_dies_is_said_and_its_log_kept(gpu, tmp_path, monkeypatch, capsys):
    """With a Python that has no SGLang: nothing is waited for, the log says why."""
    empty = tmp_path / "empty" / "sglang"
    empty.mkdir(parents=True)
    (empty / "__init__.py").write_text("raise SystemExit('no SGLang here')\n")
    monkeypatch.setenv("PYTHONPATH", str(empty.parent))
    assert gpu.main([str(tmp_path / "out"), "--arms", "baseline", "--seconds", "60"]) == 1
    said = capsys.readouterr().out
    assert "the server ended with 1" in said and "failed: baseline" in said

    log = gzip.decompress((tmp_path / "out" / "h200-baseline.log.gz").read_bytes())
    assert b"no SGLang here" in log


def test_a_retraining_s_words():
    again = load("retrain_sparklet")
    assert again.command("gpu") == ("gpu", ["--preset", "gpu"])
    assert again.command("cpu:seed=2,draft_rows=0.25") == (
        "cpu-seed2-draft_rows0.25",
        ["--preset", "cpu", "--seed", "2", "--draft-rows", "0.25"],
    )
