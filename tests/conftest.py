"""Shared by all tests. Imports neither `sparkling` nor SGLang: both environments load this file.

`tests/engine` runs in the server environment, everything else in the notebook environment; a
folder whose library is not importable here is left out, and the header says so. Tests marked
`server` start a real SGLang server and are skipped where the server environment is missing, unless
`SPARKLING_REQUIRE_SERVER=1`, when they fail.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"engine": "sglang", "unit": "sparkling", "server": "sparkling", "notebooks": "sparkling"}
MISSING = sorted(
    folder for folder, module in NEEDS.items() if importlib.util.find_spec(module) is None
)


def find_server_python() -> Path:
    told = os.environ.get("SPARKLING_SERVER_PYTHON", "").strip()
    return Path(told).expanduser().absolute() if told else ROOT / ".venv-server" / "bin" / "python"


def pytest_report_header() -> list[str]:
    lines = [f"server python: {find_server_python()}"]
    if MISSING:
        lines.append(f"not collected in this environment: tests/{', tests/'.join(MISSING)}")
    return lines


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    inside = collection_path.resolve()
    return True if any(inside == ROOT / "tests" / name for name in MISSING) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("server") is None:
        return
    python = find_server_python()
    if os.access(python, os.X_OK):
        return
    message = f"needs the server environment, and {python} is missing (scripts/setup.sh makes it)"
    if os.environ.get("SPARKLING_REQUIRE_SERVER") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Several workers (`-n`) take the test files in the order of `in_turn.py`."""
    sys.path.insert(0, str(ROOT / "tests"))
    import in_turn

    return in_turn.InTurn(config, log)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT


@pytest.fixture(scope="session")
def data() -> Path:
    """Small files that tests read."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def server_python() -> Path:
    """Python of the server environment. Use it in tests marked `server`."""
    return find_server_python()


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unit tests do not see the caller's settings, and no test sees what another one has set."""
    before = dict(os.environ)
    if (ROOT / "tests" / "unit") in request.path.parents:
        for name in before:
            if name.startswith("SPARKLING_") or name == "CUDA_VISIBLE_DEVICES":
                del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)
