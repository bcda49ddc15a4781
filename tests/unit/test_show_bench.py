"""What the tables say, and what they say when something is not known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sparkling import acceptance, break_even, concurrency, power, show_bench
from sparkling.ablation import ablation

sys.path.insert(0, str(Path(__file__).parent))
from test_ablation import rows
from test_acceptance import row as spoken
from test_concurrency import both


def flat(view):
    return " ".join(view.text.split())


def test_a_factorial():
    view = show_bench.ablation(
        ablation(rows(lambda on: 1.5 ** ("b" in on), switches=("a", "b")), ("a", "b"))
    )
    text = flat(view)
    assert "a × b interaction 1.000 [1.000, 1.000] (n=6) 1.000, 1.000 no" in text
    assert "b main 1.500 [1.500, 1.500] (n=6) 1.500, 1.500 yes" in text
    assert "1 (baseline)" in text and "baseline+b" in view.html
    assert "by round, relative to the first: 1.000, 1.000." in text


def test_a_machine_that_was_not_steady_is_said_to_be():
    data = rows(lambda on: 1.0, switches=("a",), pace=lambda r: 1 + r)
    assert "Machine not steady" in show_bench.ablation(ablation(data, ("a",))).text


def test_drafts():
    answers = [spoken([3] * 20 + [1] * 20, prompt=f"{i}") for i in range(5)]
    text = flat(show_bench.acceptance(acceptance.acceptance(answers)))
    assert "1: 50 %" in text and "3: 50 %" in text and "5 of 5" in text and "falls" in text
    assert "16 to 31 4.00 [4.00, 4.00] (n=5) 20" in text
    counters = {"tokens": 10, "rounds": 4, "histogram": None, "source": "counters"}
    text = flat(
        show_bench.acceptance(acceptance.acceptance([{**spoken([1, 2]), "spec": counters}]))
    )
    assert "unknown" in text and "0 of 1" in text and "By place" not in text
    assert "No arm speculated" in show_bench.acceptance([]).text


def test_energy_and_its_absence():
    log = [{"t": float(t), "power": {"gpu0": 50.0}, "temp_c": {"gpu0": 60}} for t in range(12)]
    request = {
        "arm": "a", "workload": "w", "sent_s": 4.0, "e2e_s": 2.0, "completion_tokens": 20,
        "complete": True,
    }  # fmt: skip
    arms = power.per_arm([{**request, "prompt": str(i)} for i in range(4)], log, {"a": [(0, 2)]})
    text = flat(show_bench.energy(arms, power.machine(log)))
    assert "a gpu0 5.000 [5.000, 5.000] (n=4) 0 50.0 50.0 4" in text
    assert "gpu0 60 °C" in text and "12 over 11 s" in text
    text = flat(show_bench.energy([], power.machine([]), ["there is no RAPL"]))
    assert "Power: no sensor on this machine (there is no RAPL)" in text and "0 over 0 s" in text


@pytest.mark.parametrize("queued", [True, False])
def test_users(queued):
    data = [{**r, "limit": 4 if queued else 16} for r in both(lambda u: 1.5 if u < 4 else 0.8)]
    view = show_bench.concurrency(concurrency.levels(data), break_even.pays(data, "plain", "spec"))
    text = flat(view)
    assert ("16 (queued)" in text) == queued
    assert f"The server runs {4 if queued else 16} at once." in text
    assert "Speculation stops paying at about 3." in text
    assert "gain" not in show_bench.concurrency(concurrency.levels(data)).text
