"""Building a server environment: a real venv and a real pip, with a package of one file, offline."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from sparkling import environments, environments_run, procs
from sparkling.environments import LOCK, build, installed, made_of, state
from sparkling.environments_run import Installer, environment, installer, pip_index
from sparkling.errors import SparklingError, UsageError
from sparkling.recipe import Edition, load

FORK = Edition("fork", "A build", "env/pins.txt", ".venv-x", build="another repository")


def wheel(folder: Path, name: str, version: str, code: str = "", requires: str = "") -> Path:
    """A wheel of one module, by the specification (PEP 427)."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": meta + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def digest(text: str) -> str:
        raw = hashlib.sha256(text.encode()).digest()
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    record = "".join(f"{n},sha256={digest(t)},{len(t)}\n" for n, t in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as out:
        for member, text in files.items():
            out.writestr(member, text)
    return path


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "env").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    here = (
        f"{sys.version_info[0]}.{sys.version_info[1]}"  # the pins of these tests are for this one
    )
    monkeypatch.setattr(environments, "PYTHON", here)
    return tmp_path


def pinned(root: Path, *wheels: Path) -> None:
    (root / "env/pins.txt").write_text("".join(f"{w}\n" for w in wheels))


def make(root: Path, said: list[str] | None = None, **options):
    told = said if said is not None else []
    given = {"python": sys.executable, "installer": "pip", "imports": ("one",), **options}
    return build(root, FORK, progress=told.append, **given)


# -- building --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_environment_is_built_verified_and_written_down(root):
    pinned(root, wheel(root, "one", "1.0", "VALUE = 1\n"))
    said: list[str] = []
    built = make(root, said)
    python = root / ".venv-x/bin/python"
    assert built.fresh and built.lock["packages"]["one"] == "1.0"
    assert json.loads((root / ".venv-x" / LOCK).read_text()) == built.lock
    assert built.lock["made_of"] == made_of(root, FORK) and built.lock["installer"] == "pip"
    assert state(root, FORK, python).current
    assert any(line.startswith("importing what the server imports") for line in said)
    assert any(line.startswith("building the fork (log: ") for line in said)
    assert str(built).startswith(f"{root}/.venv-x is built: ")
    # Once more: nothing is run.
    again: list[str] = []
    assert not make(root, again).fresh and again == []
    # A package added by hand is noticed, and so are other pins.
    extra = wheel(root, "two", "2.0")
    pip = [str(python), "-m", "pip", "install", "-q", "--no-index", str(extra)]
    subprocess.run(pip, check=True, capture_output=True)
    assert state(root, FORK, python).told == "changed since it was verified"
    pinned(root, wheel(root, "one", "1.1", "VALUE = 2\n"), extra)
    assert "other pins" in state(root, FORK, python).told
    built = make(root)
    assert built.fresh and (built.lock["packages"]["one"], built.lock["packages"]["two"]) == (
        "1.1",
        "2.0",
    )


@pytest.mark.slow
def test_a_failed_build_is_one_sentence_and_goes_on_later(root):
    pinned(root, wheel(root, "one", "1.0"), root / "gone-1.0-py3-none-any.whl")
    with pytest.raises(SparklingError, match=r"could not be installed: .*gone-1\.0") as failed:
        make(root)
    assert "run it again and it goes on from there." in str(failed.value)
    python = root / ".venv-x/bin/python"
    assert state(root, FORK, python).told == "begun and not finished, or not verified"
    born = python.lstat().st_mtime_ns
    pinned(root, wheel(root, "one", "1.0"))
    assert make(root).fresh and python.lstat().st_mtime_ns == born  # not made anew
    # What broke since then is found before anybody starts a server with it.
    python.unlink()
    python.symlink_to("/no/such/python")
    assert not state(root, FORK, python).current
    assert make(root).fresh


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "requires", "says"),
    [
        ("import nothing_of_that_name\n", "", "one cannot be imported by .*nothing_of_that_name"),
        ("", "three>=3", "Pip check finds a conflict: one 1.0 requires three"),
    ],
)
def test_what_does_not_verify_is_never_called_built(root, code, requires, says):
    pinned(root, wheel(root, "one", "1.0", code, requires))
    # Only `--no-deps` gets past pip with a requirement that is not there.
    plain = Installer.install
    change = {"install": lambda self, server, what: plain(self, server, ("--no-deps", *what))}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Installer, "install", change["install"])
        with pytest.raises(SparklingError, match=says):
            make(root)
    assert not (root / ".venv-x" / LOCK).exists()


@pytest.mark.slow
def test_an_import_that_wants_a_driver_is_said_to_be_unjudged(root):
    code = "raise OSError('libcuda.so.1: cannot open shared object file')\n"
    pinned(root, wheel(root, "one", "1.0", code))
    built = make(root)
    assert built.unjudged == ("one",) and "without a driver one could not be imported" in str(built)
    assert built.lock["unjudged"] == ["one"]


# -- parts -----------------------------------------------------------------------------------------


def test_no_installer_or_python_is_one_sentence(root, monkeypatch):
    pinned(root)
    with pytest.raises(UsageError, match="installers are uv and pip"):
        make(root, installer="conda")
    monkeypatch.setattr(environments_run.shutil, "which", lambda name, path=None: None)
    with pytest.raises(UsageError, match="uv is not installed"):
        installer("uv")
    assert installer("auto").name == "pip"
    with pytest.raises(UsageError, match="There is no Python 'python9'; install python"):
        make(root, python="python9")


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("python.3.10.2", "is Python 3.10.2, and the server's packages are pinned for"),
        ("python.3.121.0", "is Python 3.121.0"),
        ("python.2.7.18", "is Python 2.7.18"),
        ("hello", "is no Python that runs (it answers with code 0)"),
        ("", "is no Python that runs"),
    ],
)
def test_a_python_of_another_version_is_refused_before_anything_is_made(root, says, told):
    pinned(root)
    program = root / "python-mine"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    with pytest.raises(UsageError, match=re.escape(told)):
        make(root, python=str(program))
    assert not (root / ".venv-x").exists()


def test_uv_takes_a_version_instead_of_a_path(monkeypatch):
    uv = Installer("uv", "/bin/uv")
    monkeypatch.setattr(environments, "PYTHON", "3.12")
    for told in ("3.12", "3.12.7"):
        assert environments._python(told, uv, {}) == told
    with pytest.raises(UsageError, match=r"3\.11 is Python 3\.11, and"):
        environments._python("3.11", uv, {})


def test_a_lane_without_pins_has_nothing_to_build(root):
    with pytest.raises(UsageError, match=r"which ./scripts/setup\.sh makes"):
        build(root, Edition(), progress=print)


def test_a_build_of_the_fork_has_few_jobs_and_no_rust():
    env = environment(FORK, Installer("pip"), {"PYTHONPATH": "/x"}, available=40 * 2**30, cpus=20)
    assert env["MAX_JOBS"] == env["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert env["SGLANG_BUILD_RUST_EXTS"] == "none" and "PYTHONPATH" not in env
    little = environment(FORK, Installer("pip"), {}, available=2**30, cpus=20)
    assert little["MAX_JOBS"] == "1"
    stock = replace(FORK, build=None)
    assert "SGLANG_BUILD_RUST_EXTS" not in environment(stock, Installer("pip"), {}, available=0)


def test_uv_is_given_pips_index_but_not_on_its_command_line(monkeypatch):
    index = "https://user:secret@mirror.example/simple"
    assert pip_index({"PIP_INDEX_URL": index}) == index
    env = environment(FORK, Installer("uv", "/bin/uv"), {"PIP_INDEX_URL": index}, available=0)
    assert env["UV_DEFAULT_INDEX"] == index
    mine = {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": "https://other.example"}
    assert environment(FORK, Installer("uv", "/bin/uv"), mine, available=0) | {} != {}
    kept = environment(FORK, Installer("uv", "/bin/uv"), mine, available=0)
    assert kept["UV_DEFAULT_INDEX"] == "https://other.example"
    command = Installer("uv", "/bin/uv").install(Path("/v/bin/python"), ("-r", "x"))
    assert "secret" not in " ".join(command)
    told = "global.index-url='https://mirror.example/simple'\nglobal.timeout='3'\n"
    monkeypatch.setattr(environments_run.commands, "ask", lambda *a, **k: (0, told))
    assert pip_index({}) == "https://mirror.example/simple"
    monkeypatch.setattr(environments_run.commands, "ask", lambda *a, **k: (0, "global.timeout='3'"))
    assert pip_index({}) is None


def test_a_commit_that_was_installed_is_written_down(tmp_path):
    site = tmp_path / "lib/python3.12/site-packages/sglang-0.0.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: SGLang\nVersion: 0.0.0.dev1\n")
    origin = {"url": "https://x.example/s.git", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}
    (site / "direct_url.json").write_text(json.dumps(origin))
    found = installed(tmp_path / "bin/python")
    assert found == {
        "python": "3.12",
        "packages": {"sglang": "0.0.0.dev1"},
        "commits": {"sglang": "a" * 40},
    }
    assert installed(tmp_path / "none/bin/python")["packages"] == {}


def test_an_environment_of_ones_own_is_not_judged(root):
    pinned(root)
    found = state(root, FORK, Path("/mine/bin/python"))
    assert found.current and "of your own" in found.told


def test_a_stopped_build_ends_what_installs(tmp_path, monkeypatch):
    """Ctrl-C, and SIGTERM which the command turns into the same, reach the whole process group."""
    monkeypatch.setattr(environments_run, "TELL_S", 0.05)
    said: list[str] = []

    def progress(line: str) -> None:
        said.append(line)
        if "s] installing: " in line:  # its log is read, so the pid is there too
            raise KeyboardInterrupt

    steps = environments_run.Steps(
        tmp_path, tmp_path / "x.log", {"PATH": "/usr/bin:/bin"}, progress
    )
    script = (
        f"sleep 99 & echo $! > {tmp_path}/p; mv {tmp_path}/p {tmp_path}/pid; echo Collecting; wait"
    )
    with pytest.raises(KeyboardInterrupt):
        steps.run("installing", ("sh", "-c", script), "no")
    assert said[0].startswith("installing (log: ") and "s] installing: " in said[-1]
    gone = procs.identify(int((tmp_path / "pid").read_text()))
    assert procs.wait_gone([gone] if gone else [], 60) == []


def test_what_went_wrong_is_told_without_passwords():
    why = environments_run.Steps._why
    text = "fine\nERROR: no https://user:secret@mirror.example/simple\nnote: see above\n"
    assert why(text) == "ERROR: no https://***@mirror.example/simple"
    assert why("one\nlast words\n") == "last words" and why("") == "it said nothing"


def test_every_edition_that_ships_can_be_planned(request):
    repository = request.config.rootpath
    for edition in load("ling-3.0-flash", root=repository).editions.values():
        assert environments.pins(repository, edition).is_file()
        assert len(made_of(repository, edition)) == 16
