"""The cpu lane still answers as it was recorded, and as the GPU did once that is recorded."""

from __future__ import annotations

import importlib.util
import json

import pytest
from sparkling import recipe, server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]

GREEDY, REPEATED = 12, 4


@pytest.fixture(scope="module")
def script(root):
    path = root / "scripts" / "record_sparklet.py"
    spec = importlib.util.spec_from_file_location("record_sparklet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def now(root, server_python, tmp_path_factory, script):
    """The first answers of the recording, asked again of a server of today."""
    book = recipe.load("sparklet", root=root)
    folder = tmp_path_factory.mktemp("runs") / "runs"
    launch = book.render(book.combination(["nextn"]), model=book.model, port=0)
    with server.start(
        launch, python=server_python, log=folder / "server.log", deadline_s=600, runs=folder
    ) as one:
        return script.record(
            one.url, book.model, folder / "now.json", GREEDY, 0, REPEATED, budget=400
        )


def first(recording):
    """The same first answers of a whole recording."""
    rows = {"greedy": recording["greedy"][:GREEDY], "repeated": recording["repeated"][:REPEATED]}
    return rows


@pytest.mark.parametrize("name", ["cpu-nextn", "h200-nextn"])
def test_the_cpu_lane_answers_as_recorded(root, script, now, name):
    path = root / "tests" / "data" / "sparklet" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not recorded yet (models/sparklet/README.md)")
    assert now["complete"]
    rows = first(json.loads(path.read_text()))
    lengths = {kind: script.accept_length(some) for kind, some in rows.items()}
    found = script.compare({**rows, "accept_length": lengths}, now)
    print(found)
    assert found["n"] == GREEDY and set(found["accept_length"]) == {"greedy", "repeated"}
    # A few prompts prove no share of 45 in 50: what differs must be a near-tie all the same.
    assert script.verdict({**found, "same": found["n"]}) == []
    assert found["same"] >= GREEDY - 3
