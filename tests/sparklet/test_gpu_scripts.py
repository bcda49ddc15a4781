"""The scripts that run on a GPU machine: what can be tested without one."""

from __future__ import annotations

import gzip
import importlib.util
import json
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


FAKE = """
import json, sys
from pathlib import Path
words, folder = sys.argv[1:], Path(sys.argv[2])
if words[0] == "train":
    if "13" in words:
        raise SystemExit("no luck with this seed")
    folder.mkdir()
    (folder / "settings.json").write_text('{"seed": 2}')
    (folder / "losses.jsonl").write_text("")
elif words[0] == "export":
    Path(words[2]).mkdir()
else:
    form = "bf16" if "bf16" in words else "stored"
    found = {"sampled": {"accuracy": 0.5, "accept_length": 3.0}, "form": form}
    found["repetition"] = {"accept_length": 3.9}
    Path(words[words.index("--json") + 1]).write_text(json.dumps(found))
"""


def test_retraining_keeps_each_run_s_figures_and_says_which_failed(tmp_path, monkeypatch, capsys):
    again = load("retrain_sparklet")
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(again, "SCRIPT", script)
    words = [str(tmp_path / "out"), "gpu:seed=2", "gpu:seed=13", "--device", "cpu", "--keep"]
    assert again.main(words) == 1
    said = capsys.readouterr().out
    assert "failed: gpu-seed13" in said and "gpu-seed2, bf16: accuracy 0.500" in said
    made = json.loads((tmp_path / "out" / "measured-gpu-seed2.json").read_text())
    assert made["settings"] == {"seed": 2} and made["device"] == "cpu"
    assert [made[form]["form"] for form in ("stored", "bf16")] == ["stored", "bf16"]
    assert (tmp_path / "out" / "gpu-seed2").is_dir()  # the first run's model
    assert "no luck" in (tmp_path / "out" / "gpu-seed13.log").read_text()
