"""What tests/conftest.py promises: server tests are skipped aloud, or fail when they must run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

TEST = """
import pytest
@pytest.mark.server
def test_needs_a_server(server_python):
    assert server_python.name == "python"
def test_needs_none(root, data):
    assert data.parent.parent == root
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch):
    """pytest.ini needs one, and importing nbval takes a second and a half each time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")


@pytest.fixture
def run(root, tmp_path):
    folder = tmp_path / "tests" / "server"
    folder.mkdir(parents=True)
    shutil.copy(root / "tests" / "conftest.py", tmp_path / "tests")
    shutil.copy(root / "pytest.ini", tmp_path)
    (folder / "test_it.py").write_text(TEST)

    def go(**env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
            cwd=tmp_path,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
        )
        return done.stdout

    return go


def test_skipped_aloud_without_a_server_environment(run, tmp_path):
    out = run(SPARKLING_SERVER_PYTHON=str(tmp_path / "none"))
    assert "1 passed, 1 skipped" in out
    assert f"needs the server environment, and {tmp_path / 'none'} is missing" in out


def test_a_failure_where_the_server_is_required(run, tmp_path):
    out = run(SPARKLING_SERVER_PYTHON=str(tmp_path / "none"), SPARKLING_REQUIRE_SERVER="1")
    assert "1 failed, 1 passed" in out or "1 passed, 1 error" in out
    assert "scripts/setup.sh makes it" in out


def test_run_where_there_is_one(run, tmp_path):
    python = tmp_path / ".venv-server" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert "2 passed" in run()


def test_folders_of_the_other_environment_are_left_out_aloud(run, tmp_path):
    engine = tmp_path / "tests" / "engine"
    engine.mkdir()
    (engine / "test_e.py").write_text("import sglang")
    out = run(SPARKLING_SERVER_PYTHON=str(tmp_path / "none"))
    assert "not collected in this environment: tests/engine" in out
    assert "1 passed, 1 skipped" in out


def test_what_a_test_sets_ends_with_it(root, tmp_path):
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os\nHOME = os.environ['HOME']\n"
        "def test_first():\n    os.environ['SPARKLING_MODEL'] = 'x'\n    del os.environ['HOME']\n"
        "def test_second():\n    assert 'SPARKLING_MODEL' not in os.environ\n"
        "    assert os.environ['HOME'] == HOME\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HOME": "/somewhere"},
    )
    assert done.returncode == 0, done.stdout


def test_unit_tests_do_not_see_the_callers_settings(root, tmp_path):
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    shutil.copy(root / "tests" / "conftest.py", tmp_path / "tests")
    (folder / "test_it.py").write_text(
        "import os\ndef test_clean():\n"
        "    assert not [n for n in os.environ if n.startswith('SPARKLING_')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path,
        env={**os.environ, "SPARKLING_LANE": "spark"},
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout
