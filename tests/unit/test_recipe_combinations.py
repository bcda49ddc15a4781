"""Any combination of switches renders, and differs from the ladder's stages in those switches only."""

from __future__ import annotations

import itertools

import pytest
from sparkling import proof, recipe
from sparkling._rules import SWITCHES
from sparkling.errors import UsageError


@pytest.fixture(scope="module")
def spark(root):
    return recipe.load("ling-3.0-flash", root=root)


@pytest.fixture(scope="module")
def tiny(root):
    return recipe.load("tiny-ling", root=root)


def render(book, stage):
    return book.render(stage, model="/m")


def parts(launch):
    flags = {name: values for name, values in launch._flags()}
    return flags, launch.env


def test_every_combination_turns_on_its_switches_and_no_other(spark):
    for on in itertools.product((False, True), repeat=3):
        chosen = [s for s, yes in zip(SWITCHES, on, strict=True) if yes]
        name = spark.combination(reversed(chosen))
        launch = render(spark, name)
        assert launch.stage == name == "+".join(["baseline", *chosen])
        assert launch.switches == dict(zip(SWITCHES, on, strict=True))
        assert not spark.available(name)


def test_a_switch_changes_the_same_things_whatever_else_is_on(spark):
    def delta(before, after):
        return [str(c) for c in recipe.diff(render(spark, before), render(spark, after))]

    for switch in SWITCHES:
        others = [s for s in SWITCHES if s != switch]
        seen = {
            tuple(sorted(delta(spark.combination(with_), spark.combination([*with_, switch]))))
            for n in range(3)
            for with_ in itertools.combinations(others, n)
        }
        assert len(seen) == 1 and seen != {()}


def test_the_ladders_stages_are_combinations(spark, tiny):
    for book in (spark, tiny):
        done = []
        for stage in book.ladder:
            if book.stage(stage).switch:
                done.append(book.stage(stage).switch)
            assert parts(render(book, book.combination(done))) == parts(render(book, stage))


def test_what_is_expected_follows_each_switch(spark):
    launch = render(spark, "baseline+nextn")
    expect = spark.stage("baseline+nextn").expect
    assert expect["nextn"] == spark.stage("nextn").expect["nextn"]
    for switch in ("humming", "fp8-head"):
        assert expect[switch] == spark.stage("baseline").expect[switch]
    assert proof.expectations(launch) == expect


def test_a_combination_that_cannot_be_is_refused(spark, tiny):
    assert "GPU" in tiny.available("baseline+humming+nextn")
    for book, name, said in (
        (tiny, "baseline+humming", "not available here: Humming"),
        (spark, "baseline+hummin", "no switch 'hummin'.*did you mean humming"),
        (spark, "baseline+nextn+humming", r"write this combination of switches as baseline\+hum"),
        (spark, "baseline+", "no switch ''"),
        (spark, "humming+nextn", r"has no stage 'humming\+nextn'"),
        (spark, "baseline+nextn+nextn", r"as baseline\+nextn\."),
    ):
        with pytest.raises(UsageError, match=said):
            render(book, name)
