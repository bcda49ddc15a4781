"""Every published figure: complete, recomputed where it is derived, and no other one in the prose."""

from __future__ import annotations

import json
import re

import pytest
from sparkling import published, stats
from sparkling.errors import UsageError

ALL = published.load()
DERIVED = [one for one in ALL.figures.values() if one.formula]


@pytest.mark.parametrize("one", DERIVED, ids=lambda one: one.id)
def test_every_derived_figure_is_what_its_formula_gives(one):
    assert round(published.compute(one.formula, ALL.figures), one.digits) == one.value


def test_the_counts_of_the_paired_run_agree_with_each_other():
    v = published.value
    both, base, all_, none = (
        v(f"gsm8k_{name}") for name in ("both_right", "baseline_only", "all_only", "both_wrong")
    )
    assert both + base + all_ + none == v("gsm8k_questions") == 1319
    assert both + base == v("gsm8k_baseline_correct")
    assert both + all_ == v("gsm8k_all_correct")
    assert stats.mcnemar_exact(int(base), int(all_)) == pytest.approx(1.0)


def test_the_issue_s_figures_are_here():
    v = published.value
    assert v("post_gain_over_base") == pytest.approx(185.1, abs=0.05)
    assert v("post_nextn_ratio") == pytest.approx(2.34, abs=0.005)
    assert v("post_implied_round_cost") == pytest.approx(1.67, abs=0.005)
    assert v("gsm8k_gain") == pytest.approx(42.5, abs=0.05)
    assert v("gsm8k_round_cost_post") == pytest.approx(2.3, abs=0.05)
    topics = {name: {one.value for one in found} for name, found in ALL.topics().items()}
    assert topics["the base of the gain of 185.1 %"] == {36.09, 43.94}
    assert {0.65, 0.85} <= topics["--mem-fraction-static on a Spark, 0.65 to 0.85"]
    assert {60.5, 70.4} <= topics["size of the FP4 weights, 60.5 or 70.4 GB"]


def test_what_sources_disagree_about_has_more_than_one_figure():
    for topic, found in ALL.topics().items():
        assert len({one.value for one in found}) > 1, topic


def test_every_source_has_an_address_or_says_why_not():
    used = {one.source for one in ALL.figures.values() if not one.formula}
    assert used == set(ALL.sources)
    for source in ALL.sources.values():
        assert source.url.startswith("https://") or len(source.no_url) > 20


def test_a_figure_is_quoted_with_its_source():
    assert published.figure("gsm8k_questions").text() == "1,319 questions"
    assert published.figure("trap_accept_length").text() == "1.00 tokens a round"
    assert published.figure("gsm8k_gain").text() == "42.5 %"
    row = published.rows(["gsm8k_baseline_rate"])[0]
    assert row["figure"] == "37.8115 tokens/s"
    assert "https://github.com/ly01325" in row["source"] and "temperature 0.6" in row["conditions"]
    assert "derived from ly01325" in published.rows(["gsm8k_gain"])[0]["source"]
    with pytest.raises(UsageError, match="did you mean gsm8k_gain"):
        published.figure("gsm8k_gains")


@pytest.mark.parametrize(
    ("formula", "sentence"),
    [
        ("nothing + 1", "names 'nothing'"),
        ("gsm8k_gain.real", "may hold numbers"),
        ("__import__('os')", "may hold numbers"),
        ("1 / 0", "cannot be computed"),
        ("1 +", "cannot be computed"),
    ],
)
def test_a_formula_is_arithmetic_only(formula, sentence):
    with pytest.raises(UsageError, match=sentence):
        published.compute(formula, ALL.figures)


ONE = """
[sources.s]
title = "t"
url = "https://example.org"
read = "2026-11"
[[figure]]
id = "a"
value = 2.0
unit = "ms"
what = "w"
source = "s"
conditions = "c"
date = "2026"
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ONE.replace('source = "s"', 'source = "x"'), "no source 'x'"),
        (ONE.replace('conditions = "c"\n', ""), "conditions: it is missing"),
        (ONE.replace('url = "https://example.org"', ""), "either url or no_url"),
        (ONE.replace("value = 2.0", 'value = "2"'), "must be"),
        (ONE + ONE[ONE.index("[[figure]]") :], "given twice"),
        (
            ONE + '[[derived]]\nid="b"\nformula="c"\nvalue=1\ndigits=0\nunit="x"\nwhat="y"',
            "names 'c'",
        ),
        (ONE + "[more]\n", "unknown"),
    ],
)
def test_a_file_with_a_mistake(tmp_path, text, sentence):
    path = tmp_path / "published.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        published.load(path)


# -- the prose ---------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?(tokens/s|tokens a round|%|ms\b|GB/s|GB\b)")


def claims(text):
    """Sentences and table rows that say they quote something published, with their figures."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        if lines[0].startswith("|"):  # a table: its header, or its row, says so
            pieces = (
                lines[2:] if "published" in lines[0] else [r for r in lines if "published" in r]
            )
        else:
            sentences = re.split(r"(?<=[.;]) ", " ".join(lines))
            pieces = [s for s in sentences if re.search(r"[Pp]ublished|publisher", s)]
        for piece in pieces:
            if "measured" not in piece:
                yield from ((piece, *found) for found in NUMBER.findall(piece))


def known(number, unit):
    digits = len(number.partition(".")[2])
    value = float(number.replace(",", ""))
    for one in ALL.figures.values():
        share = one.unit == "of memory" and unit == "%"  # 0.68 is also written as 68 %
        found = round(published.value(one.id) * (100 if share else 1), digits)
        if found == value and (one.unit == unit or share):
            return True
    return False


def prose(root):
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        yield page.name, page.read_text("utf-8")
    for page in sorted((root / "notebooks").glob("*.ipynb")):
        for cell in json.loads(page.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield page.name, "".join(cell["source"])


def test_no_published_figure_stands_in_the_prose_that_is_not_in_the_file(root):
    quoted = [(name, *claim) for name, text in prose(root) for claim in claims(text)]
    assert len(quoted) >= 10  # the search still finds the ones that are there
    unknown = [claim for claim in quoted if not known(claim[2], claim[3])]
    assert unknown == []


def test_the_search_finds_a_figure_that_is_not_in_the_file():
    text = "Published for a Spark: 37.8 tokens/s, and 99.9 tokens/s elsewhere."
    found = list(claims(text))
    assert [known(number, unit) for _, number, unit in found] == [True, False]
    table = "| published | rate |\n|---|---|\n| a | 12.3 ms |\n"
    assert [number for _, number, _ in claims(table)] == ["12.3"]
