"""Cards, minutes and needs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from sparkling import card, machine, memory, needs, recipe
from sparkling.errors import SparklingError, UsageError
from sparkling.lane import Lane

TEXT = """
[40_baseline]
title = "The baseline"
have = "A number."
needs = ["disk", "memory"]
risks = "One server."
undo = "sparkling stop"
next = "50_humming"

[50_humming]
title = "Humming"
have = "Kernels."
risks = "None."
undo = "Nothing."
after = ["40_baseline"]

[appendix_cost]
title = "Costs"
have = "Numbers."
risks = "None."
undo = "Nothing."
"""


@pytest.fixture
def lane(tmp_path: Path) -> Lane:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "cards.toml").write_text(TEXT)
    python = Path(sys.executable)
    return Lane(
        "cpu",
        tmp_path,
        python,
        tmp_path / "r.toml",
        tmp_path / "m",
        tmp_path / "runs",
        "no GPU was found",
    )


def run_of(lane: Lane, run: str, seconds: float, *, kind: str = "cpu", verdict: str = "ok") -> None:
    folder = lane.runs / run
    folder.mkdir(parents=True)
    entry = {"name": "40_baseline", "verdict": verdict, "seconds": seconds, "cells": []}
    data = {"run": run, "lane": kind, "notebooks": [entry]}
    (folder / "timings.json").write_text(json.dumps(data))


def test_the_opening_card_says_everything(lane):
    text = card.opening("40_baseline", lane).text
    for want in (
        "The baseline",
        "A number.",
        "One server.",
        "sparkling stop",
        "disk, memory",
        "no GPU was found",
    ):
        assert want in text
    assert "not measured yet on the cpu lane" in text
    assert "--record-minutes" in text


def test_minutes_are_the_last_run_s_else_the_recorded_ones_else_none(lane):
    folder = lane.root / "notebooks"
    card.record_minutes(folder, "spark", {"40_baseline": 600})
    assert card.measured(lane) == {}
    card.record_minutes(folder, "cpu", {"40_baseline": 90, "50_humming": 30})
    found = card.measured(lane)
    assert found["40_baseline"].text.startswith("1.5 minutes (measured 20")
    assert "CPUs" in found["40_baseline"].source
    run_of(lane, "20260101-000000-aaaa", 60)
    run_of(lane, "20260103-000000-aaaa", 120)
    run_of(lane, "20260104-000000-aaaa", 999, kind="spark")
    run_of(lane, "20260105-000000-aaaa", 999, verdict="failed")
    run_of(lane, "20260106-000000-aaaa", 999, verdict="kept")
    (lane.runs / "20260107-000000-aaaa").mkdir()
    (lane.runs / "20260107-000000-aaaa" / "timings.json").write_text("{")
    found = card.measured(lane)
    assert found["40_baseline"].text == "2.0 minutes (measured here, run 20260103-000000-aaaa)"
    assert found["50_humming"].seconds == 30
    assert "2.0 minutes" in card.opening("40_baseline", lane).text


def test_recording_minutes_leaves_other_lanes_alone(lane):
    folder = lane.root / "notebooks"
    card.record_minutes(folder, "spark", {"40_baseline": 600})
    card.record_minutes(folder, "cpu", {"40_baseline": 6})
    data = json.loads((folder / "minutes.json").read_text())
    assert data["spark"]["40_baseline"]["minutes"] == 10.0
    assert data["cpu"]["40_baseline"]["minutes"] == 0.1
    (folder / "minutes.json").write_text("nonsense")
    with pytest.raises(UsageError, match=r"minutes\.json is not readable"):
        card.measured(lane)


def test_the_closing_card_says_what_was_proved_and_what_comes_next(lane):
    text = card.closing("40_baseline", lane, ["baseline: humming off"], note="n").text
    assert "baseline: humming off" in text
    assert "50_humming: Humming" in text
    text = card.closing("50_humming", lane).text
    assert "nothing was proved" in text
    assert "last notebook" in text and "the appendices" in text
    assert "last notebook" not in card.closing("appendix_cost", lane).text
    text = card.closing("50_humming", lane, answered=True).text
    assert "a server was started and answered; no switch was proved" in text
    assert "nothing" not in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "x must be a table"),
        ('[a]\ntitle = "t"', "have is missing|is missing"),
        (
            '[a]\ntitle = "t"\nhave = "h"\nrisks = "r"\nundo = "u"\nrisk = "r"',
            "unknown key risk; did you mean risks",
        ),
        ('[a]\ntitle = "t"\nhave = 1\nrisks = "r"\nundo = "u"', "have must be text"),
        (
            '[a]\ntitle = "t"\nhave = "h"\nrisks = "r"\nundo = "u"\nneeds = "x"',
            "needs must be a list",
        ),
        ('[a]\ntitle = "t"\nhave = "h"\nrisks = "r"\nundo = "u"\nnext = "b"', "no notebook b"),
        ("[a", "broken TOML"),
    ],
)
def test_a_mistake_in_the_cards_is_one_sentence(lane, text, said):
    (lane.root / "notebooks" / "cards.toml").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        card.load(lane.root / "notebooks")
    assert "cards.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_notebook_without_a_card_is_one_sentence(lane):
    with pytest.raises(UsageError, match=r"no table \[40_baselin\]; did you mean 40_baseline"):
        card.opening("40_baselin", lane)


def test_the_shipped_cards_fit_together(root):
    cards = card.load(root / "notebooks")
    assert list(cards) == sorted(cards)
    for name, one in cards.items():
        assert set(one.needs) <= set(needs.CHECKS), name
        assert all(other < name for other in one.after), name
    chain = ["00_start_here"]
    while cards[chain[-1]].next:
        chain.append(cards[chain[-1]].next)
    assert chain == [name for name in cards if not name.startswith("appendix_")]
    for path in (root / "notebooks").glob("*.ipynb"):
        assert path.stem in cards


# -- needs -------------------------------------------------------------------------------------------


def test_checks_have_a_tick_or_a_cross_and_a_remedy():
    good = needs.Check("disk", True, "9 GB")
    bad = needs.Check("memory", False, "1 GiB", "end something")
    odd = needs.Check("port", None, "unknown")
    checks = needs.Checks([good, bad, odd])
    text = str(checks)
    assert text.startswith("Not ready")
    assert "✓" in text
    assert "✗" in text
    assert "end something" in text
    with pytest.raises(SparklingError, match=r"^Not ready: memory: 1 GiB; end something\.$"):
        checks.require()
    fine = needs.Checks([good, odd])
    fine.require()
    assert str(fine).startswith("Ready")
    assert "what to do" not in str(needs.Checks([good]))


def test_an_unknown_need_is_one_sentence(lane):
    with pytest.raises(UsageError, match=r"no check 'memry'; did you mean memory"):
        needs.check(["memry"], lane)


def test_a_missing_server_environment_names_the_script(lane):
    gone = Lane(
        "cpu",
        lane.root,
        lane.root / "none" / "python",
        lane.recipe_path,
        lane.model,
        lane.runs,
        "x",
    )
    (check,) = needs.check(["server"], gone)
    assert check.ok is False
    assert "setup.sh" in check.remedy
    (check,) = needs.check(["server"], lane)  # this environment has no SGLang
    assert check.ok is False
    assert "SGLang is not installed" in check.found


def test_the_fork_needs_no_plugin(lane, root, monkeypatch):
    recipe = root / "env" / "recipes" / "ling-3.0-flash.toml"
    versions = {"sglang": "0.5.15", "sparkling-sglang": None}
    monkeypatch.setattr(needs, "_version_in", lambda lane, package: versions[package])
    spark = dataclasses.replace(lane, kind="spark", root=root, recipe_path=recipe)
    (check,) = needs.check(["server"], spark)  # stock cannot do without it
    assert check.ok is False
    assert check.remedy == "run `sparkling setup --lane spark`"
    (check,) = needs.check(["server"], dataclasses.replace(spark, edition="fork"))
    assert check.ok
    assert check.found == "SGLang 0.5.15"
    gone = dataclasses.replace(spark, edition="fork", server_python=root / "none" / "python")
    (check,) = needs.check(["server"], gone)
    assert check.remedy == "run `sparkling setup --lane spark --edition fork`"


def test_memory_and_disk_follow_the_lane(lane, monkeypatch):
    monkeypatch.setitem(needs.MEMORY_GIB, "cpu", 0.001)
    assert needs.check(["memory"], lane)[0].ok
    monkeypatch.setitem(needs.MEMORY_GIB, "cpu", 10**9)
    assert needs.check(["memory"], lane)[0].ok is False
    monkeypatch.setitem(needs.DISK_GB, "cpu", 10**9)
    assert needs.check(["disk"], lane)[0].ok is False


def test_the_memory_needed_is_what_a_start_asks_for(lane, root, monkeypatch):
    book = recipe.load("ling-3.0-flash", root=root)
    spark = dataclasses.replace(
        lane, kind="spark", root=root, recipe_path=root / "env/recipes/ling-3.0-flash.toml"
    )
    first, last = needs.memory_gib(spark)
    assert 85 < first < last < 115
    for stage, gib in (("baseline", first), ("nextn", last)):
        for more, fits in ((0, True), (-0.2, False)):
            here = machine.Memory(2**37, int((gib + more) * 2**30), "", unified=True)
            assert memory.need(book, stage, memory=here).ok is fits, (stage, more)
    for free, fits in ((last, True), (first - 0.2, False)):
        here = machine.Memory(2**37, int(free * 2**30), "", unified=True)
        monkeypatch.setattr(machine, "memory", lambda here=here: here)
        assert needs.check(["memory"], spark)[0].ok is fits
    # The practice model on a GPU does not ask for what the full one does.
    small = dataclasses.replace(
        spark,
        kind="gpu",
        recipe_path=root / "env/recipes/sparklet-gpu.toml",
        model=root / "models/sparklet",
    )
    assert max(needs.memory_gib(small)) < 10
    assert needs.check(["disk"], small)[0].need == "1 GB of free disk"


def test_a_missing_checkpoint_says_how_to_get_one(lane, monkeypatch):
    monkeypatch.setattr(needs, "tiny_model", lambda root: root / "tiny")
    (check,) = needs.check(["checkpoint"], lane)
    assert check.ok is False
    assert "sparkling tiny" not in check.remedy  # which would not build it there
    monkeypatch.setattr(needs, "tiny_model", lambda root: lane.model)
    (check,) = needs.check(["checkpoint"], lane)
    assert check.ok is False
    assert "sparkling tiny" in check.remedy
    lane.model.mkdir()
    (check,) = needs.check(["checkpoint"], lane)
    assert check.ok is False
    assert os.linesep not in check.found
