"""Case 35: the tools a server calls, found from a bare PATH; a CUDA_HOME that is none, refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sparkling import server, toolpath
from sparkling.errors import UsageError
from sparkling.toolpath import Tool, cuda_home, equip, search_path, tools


def program(folder: Path, name: str, says: str, code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {}, V1\nBuild x"


@pytest.fixture
def patience(monkeypatch):
    """A busy machine may need longer to start a program than the product waits for its answer."""
    monkeypatch.setattr(toolpath, "ASK_S", 60.0)


@pytest.fixture
def venv(tmp_path):
    """A server environment with ninja in it, and its python."""
    program(tmp_path / "venv" / "bin", "ninja", "1.13.0.git.kitware.jobserver-pipe-1")
    return program(tmp_path / "venv" / "bin", "python", "3.12")


@pytest.mark.usefixtures("patience")
def test_case_35_ninja_beside_the_servers_python_from_a_bare_path(venv):
    bare = {"PATH": "/nowhere:/usr/bin/none"}
    found = tools(venv, bare, names=["ninja"])["ninja"]
    assert found == Tool("ninja", str(venv.parent / "ninja"), "1.13.0")
    # The same PATH is what the server gets.
    child = server.child_environment({}, venv, base=bare)
    assert child["PATH"].split(":")[:2] == [str(venv.parent), str(Path(sys.executable).parent)]
    said = subprocess.run(["ninja", "--version"], env=child, capture_output=True, text=True)
    assert said.stdout.startswith("1.13.0")


def test_case_35_from_a_python_started_by_its_whole_path(venv):
    """As a kernel that a desktop started: nothing of the environment on PATH."""
    code = (
        "import sys; from pathlib import Path; from sparkling import toolpath\n"
        "print(toolpath.tools(Path(sys.argv[1]), names=['ninja'])['ninja'].path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(venv)],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(venv.parent / "ninja"), done.stderr


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (":/usr/local/cuda-12.8", "is a list of folders"),
        ("/usr/local/cuda:", "is a list of folders"),
        ("/no/such/cuda", "does not exist"),
        ("usr/local/cuda", "is no absolute path"),
        ("~/cuda", "is no absolute path"),
        ("/tmp", "holds no bin/nvcc"),
        ("/", "holds no bin/nvcc"),
    ],
)
@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_case_35_a_bad_cuda_home_is_refused_up_front(name, value, why):
    with pytest.raises(UsageError) as refused:
        cuda_home({name: value})
    said = str(refused.value)
    assert said.startswith(f"{name}={value!r} {why}") and "unset it" in said
    found = tools(Path("/v/bin/python"), {name: value}, names=["nvcc"])["nvcc"]
    assert found.path is None and found.note == said


def test_case_35_a_server_on_a_gpu_does_not_start_with_it(monkeypatch, tmp_path, root):
    from sparkling import recipe

    monkeypatch.setenv("CUDA_HOME", ":/usr/local/cuda-12.8")
    launch = recipe.load("ling-3.0-flash", root=root).render("baseline", model=tmp_path)
    with pytest.raises(UsageError, match=r"CUDA_HOME=':/usr/local/cuda-12.8' is a list"):
        server.start(launch, python=Path(sys.executable), log=tmp_path / "x.log")


def test_case_35_a_trailing_slash_and_an_empty_value(tmp_path):
    kit = program(tmp_path / "cuda-13" / "bin", "nvcc", NVCC.format("13.0")).parent.parent
    assert cuda_home({"CUDA_HOME": f"{kit}/"}) == str(kit)
    assert cuda_home({"CUDA_HOME": "", "CUDA_PATH": str(kit)}) == str(kit)
    assert cuda_home({"CUDA_HOME": " "}) is None and cuda_home({}) is None
    env = {"CUDA_HOME": f"{kit}//", "CUDA_PATH": "", "PATH": "/usr/bin"}
    equip(env, Path("/v/bin/python"))
    assert env["CUDA_HOME"] == str(kit) and "CUDA_PATH" not in env
    assert env["PATH"].split(":")[-1] == f"{kit}/bin"


@pytest.mark.usefixtures("patience")
def test_case_35_an_older_toolkit_first_on_path_is_named(tmp_path):
    old = program(tmp_path / "cuda-12.8" / "bin", "nvcc", NVCC.format("12.8"))
    kit = program(tmp_path / "cuda-13" / "bin", "nvcc", NVCC.format("13.0")).parent.parent
    path = {"PATH": f"{old.parent}:{kit}/bin"}
    found = tools(Path("/v/bin/python"), path, names=["nvcc"])["nvcc"]
    assert (found.path, found.version, found.number()) == (str(old), "12.8", (12, 8))
    assert found.number() < toolpath.NVCC_FOR_121
    # CUDA_HOME goes before PATH, as it does for FlashInfer.
    found = tools(Path("/v/bin/python"), {**path, "CUDA_HOME": str(kit)}, names=["nvcc"])["nvcc"]
    assert (found.path, found.version) == (f"{kit}/bin/nvcc", "13.0")


@pytest.mark.usefixtures("patience")
def test_case_35_every_tool_is_named_with_path_and_version(venv):
    found = tools(venv)
    assert set(found) == {"ninja", "nvcc", "c++", "git", "uv"}
    assert str(found["ninja"]) == f"1.13.0 ({venv.parent}/ninja)"


def test_case_35_hanging_tools_are_asked_side_by_side(venv):
    limits = []

    def hangs(command, timeout_s):
        limits.append(timeout_s)
        return f"{command[0]} did not answer within {timeout_s:g} s"

    found = tools(venv, ask=hangs, which=lambda name, path: f"/bin/{name}")
    assert all(limit == 2.0 for limit in limits) and len(limits) == len(found)
    assert str(found["ninja"]) == "/bin/ninja did not answer within 2 s (/bin/ninja)"


@pytest.mark.usefixtures("patience")
def test_a_tool_that_is_broken_or_missing(venv, tmp_path):
    program(tmp_path / "b", "git", "nothing", 3)
    found = tools(
        venv, {"PATH": str(tmp_path / "b")}, names=["git", "uv"], which=_only(tmp_path / "b")
    )
    assert str(found["git"]) == f"answers with code 3 ({tmp_path}/b/git)"
    assert found["uv"] == Tool("uv") and str(found["uv"]) == "not found"


def _only(folder: Path):
    return lambda name, path: str(folder / name) if (folder / name).exists() else None


def test_the_path_holds_every_folder_once_and_no_empty_one():
    env = {"PATH": f"/usr/bin::/v/bin:/usr/bin{os.pathsep}"}
    path = search_path(Path("/v/bin/python"), env, ours=Path("/n/bin/python"), toolkit="/cuda")
    assert path == "/v/bin:/n/bin:/usr/bin:/cuda/bin"
