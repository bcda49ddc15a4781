"""The recorder of hidden states and routing, on two problems."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("record", ROOT / "scripts" / "record_hidden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.record(2, 11)


def test_states_and_targets_belong_together(made):
    states, routing = made
    n = len(states["targets"])
    assert states["hidden"].shape == (n, 256) and states["hidden"].dtype == np.uint16
    assert routing["answers_experts"].shape == (n, 3, 2)
    assert set(routing["answers_text"]) == {0, 1}


def test_each_position_chooses_two_different_experts(made):
    for kind in ("answers", "repeated"):
        experts = made[1][f"{kind}_experts"]
        assert experts.max() < 16 and (experts[..., 0] != experts[..., 1]).all()


def test_the_shipped_recording_is_of_this_model(made):
    """The shipped file's first problems are these: same seed, so the same first text."""
    shipped = np.load(ROOT / "lib" / "sparkling" / "recordings" / "sparklet-routing.npz")
    assert shipped["answers_experts"].shape[1:] == made[1]["answers_experts"].shape[1:]
    assert set(shipped["answers_text"]) == set(range(24))
