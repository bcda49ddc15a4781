"""The tests of `tests/engine` and `tests/sparklet`, run by the server environment's Python.

They need torch and SGLang, which the notebook environment must not have. One process of the server
environment runs those that were selected; this module waits for each one's outcome in turn and
reports it as a test of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(
    os.environ.get("SPARKLING_SERVER_PYTHON", "").strip() or ROOT / ".venv-server/bin/python"
)
FOLDERS = ("tests/engine", "tests/sparklet")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if not any((ROOT / "tests" / "engine").glob("test_*.py")):
    pytest.skip("there are no tests in tests/engine", allow_module_level=True)


def command(*arguments: str) -> list[str]:
    options = ["-p", "no:cacheprovider", "-q", "--color=no"]
    return [str(PYTHON), "-m", "pytest", *options, *arguments]


def collected(cache: Path | None = None) -> list[str]:
    """Node ids of tests/engine; one that is not a test, to fail, where they cannot be had.

    cache: a file of this run, so that of several workers only one asks (it takes many seconds).
    """
    if cache is not None:
        with open(cache, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (text := file.read()):
                text = json.dumps(collected())
                file.write(text)
        return json.loads(text)
    if not os.access(PYTHON, os.X_OK):
        return ["tests/engine"]
    done = subprocess.run(
        command("--collect-only", *FOLDERS), cwd=ROOT, capture_output=True, text=True
    )
    ids = [line for line in done.stdout.splitlines() if line.startswith(FOLDERS)]
    return ids if done.returncode == 0 and ids else ["tests/engine"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine_test" in metafunc.fixturenames:
        config = metafunc.config
        # A worker's own temporary folder is inside that of the run.
        shared = Path(config.option.basetemp).parent if hasattr(config, "workerinput") else None
        ids = collected(shared and shared / "engine-tests.json")
        names = [i.removeprefix("tests/") for i in ids]
        metafunc.parametrize("engine_test", ids, ids=names)


class Outcomes:
    """A running pytest of the server environment, and what it has reported so far."""

    def __init__(self, ids: list[str], folder: Path) -> None:
        self.said, self.file = folder / "said.txt", folder / "outcomes.jsonl"
        self.file.touch()
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                command("-p", "engine_report", *ids),
                cwd=ROOT,
                env=os.environ
                | {"PYTHONPATH": str(ROOT / "tests"), "ENGINE_REPORT": str(self.file)},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def of(self, node: str) -> dict[str, str]:
        while True:
            ended = self.process.poll() is not None  # asked before reading: nothing is missed
            # Up to the last end of a line: a long one may be half written.
            for line in self.file.read_bytes().rpartition(b"\n")[0].splitlines():
                outcome = json.loads(line)
                if outcome["id"] == node:
                    return outcome
            if ended:
                tail = "\n".join(self.said.read_text(errors="replace").splitlines()[-40:])
                return {"outcome": "failed", "text": f"never reported; the run said:\n{tail}"}
            time.sleep(0.1)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    chosen = [
        item.callspec.params["engine_test"]
        for item in request.session.items
        if "engine_test" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    running = Outcomes(chosen, tmp_path_factory.mktemp("engine"))
    yield running
    running.end()


def test_engine(engine_test, request):
    if not os.access(PYTHON, os.X_OK):
        if os.environ.get("SPARKLING_REQUIRE_SERVER") == "1":
            pytest.fail(f"{PYTHON} is missing (scripts/setup.sh makes it)", pytrace=False)
        pytest.skip(f"needs the server environment, and {PYTHON} is missing")
    outcome = request.getfixturevalue("outcomes").of(engine_test)
    if outcome["outcome"] == "skipped":
        pytest.skip(outcome["text"])
    if outcome["outcome"] != "passed":
        pytest.fail(outcome["text"], pytrace=False)
