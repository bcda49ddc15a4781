"""Comparing two recordings of a server's answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "record_sparklet.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_sparklet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recording(ids, top, prompt=(1, 2)):
    row = {"prompt": list(prompt), "ids": ids, "top": top, "rounds": 2}
    return {"greedy": [row], "accept_length": {"greedy": 3.0, "sampled": None}}


def test_equal_texts_are_counted_and_a_difference_shows_its_gap(script):
    top = [[[-0.1, 5], [-2.0, 6]], [[-0.70, 7], [-0.72, 8]]]
    other = [[[-0.1, 5], [-2.0, 6]], [[-0.69, 8], [-0.74, 7]]]
    a, b = recording([5, 7], top), recording([5, 8], other)
    assert script.compare(a, a) == {
        "n": 1,
        "same": 1,
        "gaps": [],
        "accept_length": {"greedy": (3.0, 3.0)},
    }
    got = script.compare(a, b)
    assert got["same"] == 0 and got["gaps"] == [0.02]


def test_different_prompts_are_refused(script):
    with pytest.raises(ValueError, match="same prompts"):
        script.compare(recording([5], []), recording([5], [], prompt=(9,)))


def test_accept_length_leaves_the_first_token_out(script):
    rows = [{"ids": [1] * 9, "rounds": 2}, {"ids": [1] * 5, "rounds": 2}]
    assert script.accept_length(rows) == 12 / 4
    assert script.accept_length([{"ids": [1], "rounds": None}]) is None
