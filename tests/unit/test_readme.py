"""The README: two commands, a picture and the table stand where they belong, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def text(root):
    return (root / "README.md").read_text("utf-8")


def test_the_first_screen_has_the_two_commands_and_the_picture(text):
    first = text.split("\n## ", 1)[0]
    assert len(first.splitlines()) < 30
    assert "./scripts/demo.sh" in first and "./scripts/test.sh" in first
    assert "](docs/report.png)" in first


def test_every_relative_link_leads_somewhere(root):
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for target in LINK.findall(page.read_text("utf-8")):
            if "://" not in target and not target.startswith("#"):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_the_picture_is_small(root):
    assert 10_000 < (root / "docs" / "report.png").stat().st_size <= 200_000


def test_the_table_lists_every_notebook_in_order_with_its_title(root, text):
    rows = re.findall(r"^\| \[([^\]]+)\]\(notebooks/([^)]+)\.ipynb\)", text, re.MULTILINE)
    cards = tomllib.loads((root / "notebooks" / "cards.toml").read_text("utf-8"))
    files = sorted(path.stem for path in (root / "notebooks").glob("*.ipynb"))
    assert [stem for _, stem in rows] == files
    assert {stem: title for title, stem in rows} == {stem: cards[stem]["title"] for stem in files}


def test_every_command_it_names_exists(root, text):
    named = set(re.findall(r"sparkling ([a-z-]+)", text))
    help_text = subprocess.run(
        [sys.executable, "-m", "sparkling.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(re.findall(r"^    ([a-z-]+)(?:  |$)", help_text, re.MULTILINE))
    assert {"render", "prove", "serve", "stop"} <= named & known
    assert named <= known, named - known
    for script in re.findall(r"\./(scripts/[a-z.]+)", text):
        assert (root / script).is_file()


def test_every_test_folder_is_described(root, text):
    folders = {f"tests/{p.name}" for p in (root / "tests").iterdir() if any(p.glob("test_*.py"))}
    assert folders <= set(re.findall(r"`(tests/[a-z]+)`", text))
