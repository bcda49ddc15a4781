"""Lanes: what a probe shows, what was asked for, and the places that follow."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest
from sparkling import lane, procs
from sparkling.errors import UsageError
from sparkling.lane import Gpu, Sighting, detect, find_root, parse_smi, probe_gpus


def sees(*gpus: Gpu, note: str = "nvidia-smi lists it"):
    return lambda: Sighting(gpus, note)


def never():
    raise AssertionError("the probe was not to be asked")


LIMIT_S = 60.0  # for a fake that is to answer: a busy machine starts a Python in seconds


def fake(tmp_path: Path, body: str) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\nimport sys, time\nquery = sys.argv[1]\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# -- what the GPUs say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "kind"),
    [
        ((Gpu("NVIDIA GB10", "12.1"),), "spark"),
        ((Gpu("NVIDIA GB10"),), "spark"),
        ((Gpu("NVIDIA Graphics Device", "12.1"),), "spark"),
        ((Gpu("NVIDIA RTX 6000", "12.0"), Gpu("NVIDIA GB10", "12.1")), "spark"),
        ((Gpu("NVIDIA GB100", "10.0"),), "gpu"),
        ((Gpu("NVIDIA H200", "9.0"),), "gpu"),
        ((Gpu("NVIDIA GeForce RTX 5090", "12.0"),), "gpu"),
        ((), "cpu"),
    ],
)
def test_the_gpu_decides(root, gpus, kind):
    found = detect(root=root, env={}, probe=sees(*gpus))
    assert found.kind == kind
    assert found.reason.startswith(f"Lane {kind}: ") and found.reason.endswith(".")
    if kind == "spark":
        assert next(g for g in gpus if g.is_spark).name in found.reason


def test_no_gpu_says_why(root):
    found = detect(root=root, env={}, probe=sees(note="nvidia-smi did not answer within 2 s"))
    assert (
        found.reason == "Lane cpu: no NVIDIA GPU was found (nvidia-smi did not answer within 2 s)."
    )


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_gpus_are_no_gpus(root, hidden):
    found = detect(root=root, env={"CUDA_VISIBLE_DEVICES": hidden}, probe=never)
    assert found.kind == "cpu" and "CUDA_VISIBLE_DEVICES" in found.reason


def test_visible_gpus_are_probed(root):
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    assert detect(root=root, env=env, probe=sees(Gpu("NVIDIA H200", "9.0"))).kind == "gpu"


# -- what was asked for --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", lane.KINDS)
def test_asked_for_is_not_probed(root, kind):
    assert detect(kind, root=root, env={}, probe=never).kind == kind
    by_env = detect(root=root, env={"SPARKLING_LANE": kind}, probe=never)
    assert by_env.kind == kind and "SPARKLING_LANE" in by_env.reason


def test_an_argument_wins_over_the_variable(root):
    assert detect("cpu", root=root, env={"SPARKLING_LANE": "spark"}, probe=never).kind == "cpu"


def test_auto_in_the_variable_probes(root):
    env = {"SPARKLING_LANE": "auto"}
    assert detect(root=root, env=env, probe=sees(Gpu("NVIDIA GB10", "12.1"))).kind == "spark"


@pytest.mark.parametrize(
    ("kind", "env", "start"),
    [
        ("tpu", {}, "lane 'tpu' is unknown"),
        ("auto", {"SPARKLING_LANE": "GPU"}, "SPARKLING_LANE 'GPU' is unknown"),
    ],
)
def test_an_unknown_lane_is_refused(root, kind, env, start):
    with pytest.raises(UsageError) as caught:
        detect(kind, root=root, env=env, probe=never)
    assert str(caught.value) == f"{start}; the lanes are auto, spark, gpu, cpu."


# -- places --------------------------------------------------------------------------------------


def test_places_of_the_cpu_lane(root):
    found = detect("cpu", root=root, env={}, probe=never)
    assert found.recipe_path == root / "env" / "recipes" / "sparklet.toml"
    assert found.model == root / "models" / "sparklet"
    assert found.server_python == root / ".venv-server" / "bin" / "python"
    assert found.runs == root / "runs"
    assert found.cache == root / ".cache"


@pytest.mark.parametrize("kind", ["spark", "gpu"])
def test_places_of_the_gpu_lanes(root, kind):
    found = detect(kind, root=root, env={}, probe=never)
    assert found.recipe_path == root / "env" / "recipes" / "ling-3.0-flash.toml"
    assert found.model == root / ".cache" / "models" / "ling-3.0-flash-fp4"


def test_every_place_can_be_told(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {
        "SPARKLING_MODEL": "weights/a",
        "SPARKLING_RUNS": "../elsewhere",
        "SPARKLING_SERVER_PYTHON": "~/venv/bin/python",
        "SPARKLING_RECIPE": "ling-3.0-flash",
        "HOME": "/home/someone",
    }
    monkeypatch.setenv("HOME", "/home/someone")
    found = detect("cpu", root=root, env=env, probe=never)
    assert found.model == tmp_path / "weights" / "a"
    assert found.runs == tmp_path.parent / "elsewhere"
    assert found.server_python == Path("/home/someone/venv/bin/python")
    assert found.recipe_path == root / "env" / "recipes" / "ling-3.0-flash.toml"


def test_the_server_python_stays_a_link(root, tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    found = detect("cpu", root=root, env={"SPARKLING_SERVER_PYTHON": str(link)}, probe=never)
    assert found.server_python == link


def test_another_recipe_brings_its_own_checkpoint(root, tmp_path):
    text = (root / "env" / "recipes" / "tiny-ling.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('".cache/models/tiny-ling"', '"/models/trained"'))
    found = detect("cpu", root=root, env={"SPARKLING_RECIPE": str(path)}, probe=never)
    assert (found.recipe_path, found.model) == (path, Path("/models/trained"))


def test_an_unreadable_recipe_is_one_sentence(root, tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(UsageError) as caught:
        detect("cpu", root=root, env={"SPARKLING_RECIPE": str(path)}, probe=never)
    assert str(caught.value) == f"{path}: there is no such file."


def test_the_root_is_found_upwards(root):
    assert find_root({}, cwd=root / "tests" / "unit") == root


def test_the_root_is_found_from_the_library_when_elsewhere(root, tmp_path):
    assert find_root({}, cwd=tmp_path) == root


def test_a_told_root_must_be_a_checkout(root, tmp_path):
    assert find_root({"SPARKLING_ROOT": str(root)}, cwd=tmp_path) == root
    with pytest.raises(UsageError, match="is not a Sparkling checkout"):
        find_root({"SPARKLING_ROOT": str(tmp_path)})


def test_the_runs_are_found_without_a_recipe(root, tmp_path):
    assert lane.runs_folder({"SPARKLING_ROOT": str(root)}) == root / "runs"
    assert lane.runs_folder({"SPARKLING_RUNS": str(tmp_path)}) == tmp_path


# -- nvidia-smi ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("NVIDIA GB10, 12.1\n", (Gpu("NVIDIA GB10", "12.1"),)),
        ("NVIDIA GB10, [N/A]\n", (Gpu("NVIDIA GB10", None),)),
        ("NVIDIA GB10, [Not Supported]\n", (Gpu("NVIDIA GB10", None),)),
        ("NVIDIA GB10, N/A\n", (Gpu("NVIDIA GB10", None),)),
        ("NVIDIA GB10\n", (Gpu("NVIDIA GB10", None),)),
        ("[N/A], 12.1\n", ()),
        ("[N/A], [N/A]\n\n", ()),
        ("NVIDIA H200, 9.0\r\nNVIDIA H200, 9.0\r\n", (Gpu("NVIDIA H200", "9.0"),) * 2),
        ("NVIDIA H200, ERR!\n", (Gpu("NVIDIA H200", None),)),
        ("", ()),
    ],
)
def test_what_nvidia_smi_prints(text, gpus):
    assert parse_smi(text) == gpus


def test_the_probe_reads_nvidia_smi(tmp_path):
    smi = fake(tmp_path, "print('NVIDIA GB10, 12.1' if 'compute_cap' in query else 'no')")
    assert probe_gpus(smi, LIMIT_S, tmp_path).gpus == (Gpu("NVIDIA GB10", "12.1"),)


def test_an_old_driver_is_asked_for_the_name_alone(tmp_path):
    smi = fake(
        tmp_path,
        "if 'compute_cap' in query: print('Field \"compute_cap\" is not valid'); sys.exit(2)\n"
        "print('Tesla V100')",
    )
    assert probe_gpus(smi, LIMIT_S, tmp_path).gpus == (Gpu("Tesla V100", None),)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("print('NVIDIA-SMI has failed'); sys.exit(9)", "fails with code 9"),
        ("print('')", "lists no GPU"),
        ("sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.exit(1)", "fails with code 1"),
    ],
)
def test_a_probe_that_finds_nothing_says_why(tmp_path, body, note):
    seen = probe_gpus(fake(tmp_path, body), LIMIT_S, tmp_path)
    assert seen.gpus == () and seen.note.endswith(note)


def test_a_missing_nvidia_smi(tmp_path):
    seen = probe_gpus(str(tmp_path / "none"), proc=tmp_path)
    assert seen.gpus == () and seen.note.endswith("is not installed")


def test_a_file_that_cannot_be_run(tmp_path):
    path = tmp_path / "nvidia-smi"
    path.write_text("not a program")
    seen = probe_gpus(str(path), proc=tmp_path)
    assert seen.gpus == () and "cannot be run" in seen.note


def test_a_hanging_nvidia_smi_is_given_up_and_killed(tmp_path, monkeypatch):
    # Found by its environment: it may be killed before it could say who it is.
    mark = ("SPARKLING_TEST_MARK", str(tmp_path))
    monkeypatch.setenv(*mark)
    smi = fake(tmp_path, "time.sleep(600)")
    began = time.monotonic()
    seen = probe_gpus(smi, timeout_s=1.0, proc=tmp_path)
    assert time.monotonic() - began < 60
    assert seen.gpus == () and seen.note.endswith("did not answer within 1 s")
    deadline = time.monotonic() + 60
    while (left := procs.marked(*mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_the_driver_names_the_gpu_when_nvidia_smi_does_not(tmp_path):
    folder = tmp_path / "gpus" / "000f:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA GB10\nIRQ: \t 1\n")
    seen = probe_gpus(str(tmp_path / "none"), proc=tmp_path / "gpus")
    assert seen.gpus == (Gpu("NVIDIA GB10"),) and seen.gpus[0].is_spark
    assert "is not installed" in seen.note


# -- editions ------------------------------------------------------------------------------------


def test_the_edition_picks_the_servers_environment(root):
    def found(**given):
        return detect("spark", root=root, env={}, probe=never, **given)

    assert found().edition == "stock"
    assert found().server_python == root / ".venv-server-spark" / "bin" / "python"
    fork = found(edition="fork")
    assert fork.server_python == root / ".venv-server-spark-fork" / "bin" / "python"
    assert fork.edition == "fork" and fork.model == found().model
    assert detect("cpu", root=root, env={}).server_python == root / ".venv-server/bin/python"


def test_the_edition_from_the_environment(root):
    env = {"SPARKLING_EDITION": " fork ", "SPARKLING_LANE": "gpu"}
    assert detect(root=root, env=env, probe=never).edition == "fork"
    assert detect(root=root, env=env, probe=never, edition="stock").edition == "stock"
    own = {**env, "SPARKLING_SERVER_PYTHON": "/venv/bin/python"}
    assert detect(root=root, env=own).server_python == Path("/venv/bin/python")
    with pytest.raises(UsageError, match="has no edition 'fork'"):
        detect("cpu", root=root, env=env)


def test_no_devices_is_no_gpu():
    assert parse_smi("No devices were found\n") == ()
