"""What a notebook shows of the server's environment: editions told by real diffs, built or verified."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from sparkling import environments, environments_show, store
from sparkling.environments import Built
from sparkling.errors import SparklingError
from sparkling.lane import Lane
from sparkling.recipe import load


@pytest.fixture
def session(root, tmp_path):
    lane = Lane("spark", tmp_path, Path(), root / "r.toml", tmp_path / "m", tmp_path / "runs", "x")
    run = store.open_run(tmp_path / "runs", notebook="10_environment")
    return types.SimpleNamespace(lane=lane, recipe=load("ling-3.0-flash", root=root), run=run)


def at(session, python: Path) -> None:
    session.lane = replace(session.lane, server_python=python)


def test_each_edition_is_told_its_switches_in_its_own_way(root):
    book = load("ling-3.0-flash", root=root)
    stock = environments_show.told(book, "fp8-head", "stock")
    fork = environments_show.told(book, "fp8-head", "fork")
    assert stock == "- --enable-fp32-lm-head\n+ SPARKLING_FP8_LM_HEAD=1"
    assert fork == "- --enable-fp32-lm-head\n+ SGLANG_ENABLE_FP8_LM_HEAD=1"
    assert "+ --speculative-algorithm NEXTN" in environments_show.told(book, "nextn", "fork")
    text = str(environments_show.editions(book))
    assert ".venv-server-spark" in text and "SGLANG_ENABLE_FP8_LM_HE" in text


def test_a_switch_without_a_stage(root):
    book = load("tiny-ling", root=root)
    assert environments_show.told(book, "humming", "stock") == "no stage turns it on"


def test_where_there_are_pins_it_is_built_and_the_manifest_says_of_what(session, monkeypatch):
    folder = session.lane.root / ".venv-server-spark"
    at(session, folder / "bin" / "python")
    lock = {"packages": {"sglang": "0.5.23", "torch": "2.14.1"}}
    asked = []

    def build(root, edition, progress):
        asked.append((root, edition.name))
        progress("installing")
        return Built(folder, lock, ("humming",))

    monkeypatch.setattr(environments, "build", build)
    monkeypatch.setattr(environments, "installed", lambda python: {**lock, "python": "3.12"})
    said = str(environments_show.ready(session))
    assert asked == [(session.lane.root, "stock")]
    assert "is built: 2 packages" in said and "not importable without a driver" in said
    assert session.run.manifest["server_environment"]["packages"] == lock["packages"]


def test_an_environment_of_ones_own_is_verified_not_built(session, monkeypatch):
    at(session, Path(sys.executable))
    monkeypatch.setattr(environments, "build", lambda *a, **k: pytest.fail("not ours to build"))
    monkeypatch.setattr(environments_show, "CPU_IMPORTS", ("json", "ssl"))
    assert "imports what its server needs: json, ssl." in str(environments_show.ready(session))
    monkeypatch.setattr(environments_show, "CPU_IMPORTS", ("json", "no_such_module"))
    with pytest.raises(SparklingError, match=r"no_such_module cannot be imported by .*No module"):
        environments_show.ready(session)


def test_the_manifest_is_written_once_and_anew_after_a_build(session):
    python = Path(sys.executable)
    environments.note(session.run, python)
    first = session.run.manifest["server_environment"]
    assert first["packages"]["pytest"] and first["python"].startswith("3.")
    session.run.update(server_environment={"packages": {"a": "1"}})
    environments.note(session.run, python)
    assert "a" in session.run.manifest["server_environment"]["packages"]
    environments.note(session.run, python, again=True)
    assert session.run.manifest["server_environment"]["packages"]["pytest"]
    other = store.open_run(session.lane.runs, notebook="x")
    environments.note(other, Path("/none/bin/python"))
    assert other.manifest["server_environment"] is None


def test_imports_are_judged_together_and_a_failure_is_told_from_the_rest(tmp_path, monkeypatch):
    modules = {
        "fine": "",
        "broken": "raise ImportError('no libx.so')",
        "quiet": "import os\nos._exit(1)",
        "rival": "import sys\nif 'fine' in sys.modules: raise ImportError('not beside fine')",
        "noted": f"with open({str(tmp_path / 'n')!r}, 'a') as file: file.write('x')",
    }
    for name, code in modules.items():
        (tmp_path / f"{name}.py").write_text(code + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def found(*names: str) -> dict[str, str | None]:
        return environments.verify(Path(sys.executable), names)

    assert found("fine", "noted") == {"fine": None, "noted": None}
    assert (tmp_path / "n").read_text() == "x"  # one process was enough
    assert found("fine", "broken", "quiet") == {
        "fine": None,
        "broken": "ImportError: no libx.so",
        "quiet": "no message",
    }
    # Each works alone, and the server would have both.
    assert found("rival") == {"rival": None}
    assert found("fine", "rival") == {"fine": None, "rival": "ImportError: not beside fine"}
    assert found() == {}
    gone = environments.verify(tmp_path / "python", ("fine",))
    assert gone == {"fine": f"{tmp_path / 'python'} is not installed"}
