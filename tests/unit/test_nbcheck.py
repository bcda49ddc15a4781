"""The static gate: a good notebook passes, and each kind of bad one fails for its own reason."""

from __future__ import annotations

import json

import nbformat
import pytest
from sparkling import nbcheck
from sparkling.nbcheck import METADATA, check, fix

GOOD = [
    ("markdown", "# The example\n\nWhat this notebook does."),
    ("markdown", "What it may be told."),
    ("code", 'lane = "auto"\nrun_id = ""', ["parameters"]),
    ("markdown", "Open it."),
    (
        "code",
        "from sparkling import notebook\n\n"
        'nb = notebook.begin("40_example", lane=lane, run_id=run_id)\nnb.opening',
    ),
    ("markdown", "## Is everything there?\n\nCheck what it needs."),
    ("code", "nb.check()"),
    ("markdown", "Close it. See [the other one](50_other.ipynb)."),
    ("code", "nb.closing"),
]


def write(folder, cells=GOOD, name="40_example"):
    made = []
    for number, (kind, source, *tags) in enumerate(cells):
        cell = {
            "cell_type": kind,
            "id": f"c{number}",
            "metadata": {"tags": tags[0]} if tags else {},
            "source": source.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.ipynb"
    whole = {"cells": made, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return path


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "notebooks"
    place.mkdir()
    (place / "50_other.ipynb").write_text("{}")
    (place / "cards.toml").write_text("[40_example]\n")
    (tmp_path / "README.md").write_text("| [example](notebooks/40_example.ipynb) |\n")
    return place


def told(path):
    return [str(problem) for problem in check([path])]


def swapped(number, kind, source, *tags):
    return [*GOOD[:number], (kind, source, *tags), *GOOD[number + 1 :]]


def test_a_good_notebook_passes_and_is_valid(folder):
    path = write(folder)
    assert told(path) == []
    nbformat.validate(nbformat.read(path, as_version=4))
    assert fix([path]) == []


# ------------------------------------------------------- forms that fail silently (case 5)

SILENT = {
    "shell": ("!false", "fails silently"),
    "shell with a code": ("!exit 7", "fails silently"),
    "shell into a name": ("files = !ls", "fails silently"),
    "indented shell": ("if True:\n    !false", "fails silently"),
    "pip": ("%pip install nope/ --no-index", "fails silently"),
    "bash": ("%%bash\nfalse | tee", "fails silently"),
    "background bash": ("%%bash --bg\nfalse", "fails silently"),
    "help": ("?print", "fails silently"),
    "magic by hand": ('get_ipython().run_line_magic("pip", "x")', "calls get_ipython"),
    "system": ("import os\nos.system('false')", "os.system"),
    "system, imported": ("from os import system", "imports os.system"),
    "popen": ("import os\nos.popen('false')", "os.popen"),
    "subprocess": ("import subprocess\nsubprocess.run(['false'])", "imports subprocess"),
    "thread": ("import threading\nthreading.Thread(target=print).start()", "imports threading"),
    "thread, imported": ("from threading import Thread", "imports threading"),
    "pool": ("from concurrent.futures import ThreadPoolExecutor", "imports concurrent"),
    "process": ("import multiprocessing as mp", "imports multiprocessing"),
    "task": ("import asyncio\nasyncio.create_task(f())", "asyncio.create_task"),
    "task, imported": ("from asyncio import create_task", "imports asyncio.create_task"),
    "task of a loop": (
        "import asyncio\nl = asyncio.get_event_loop()\nl.create_task(f())",
        "l.create_task",
    ),
    "future": ("import asyncio\nasyncio.ensure_future(f())", "asyncio.ensure_future"),
    "executor": ("loop.run_in_executor(None, print)", "run_in_executor"),
    "exit": ("import sys\nsys.exit(0)", "sys.exit"),
    "quit": ("quit()", "calls quit"),
    "question": ("x = input()", "calls input"),
    "bare except": ("try:\n    x = 1\nexcept:\n    print(1)", "swallows"),
    "silent except": ("try:\n    x = 1\nexcept OSError:\n    pass", "swallows"),
    "broken": ("x = = 1", "does not parse"),
}


@pytest.mark.parametrize("name", SILENT)
def test_silent_failures_are_refused(folder, name):
    source, says = SILENT[name]
    problems = told(write(folder, swapped(6, "code", source + "\nnb.check")))
    assert any(says in problem and "cell 6" in problem for problem in problems), problems


def test_harmless_code_is_not(folder):
    source = (
        "import os\nimport asyncio\n"
        "share = 7 % 3\ntext = '!x' + '%y'\nos.environ.get('A')\nx = 1 != 2\n"
        "try:\n    x = 1\nexcept ValueError as error:\n    print(error)\nnb.check()"
    )
    assert told(write(folder, swapped(6, "code", source))) == []


# ------------------------------------------------------------------------------- other content

CONTENT = {
    "a path of a machine": (
        swapped(6, "code", 'open("/home/ann/x")\nnb.check()'),
        "holds a path of one machine (/home/...)",
    ),
    "a tilde path": (swapped(6, "code", 'p = "~/x"\nnb.check()'), "path of one machine (~/...)"),
    "root's home": (swapped(6, "code", "p = '/root/x'\nnb.check()"), "(/root/...)"),
    "sys.path": (
        swapped(6, "code", "import sys\nsys.path.append('.')\nnb.check()"),
        "changes where modules come from",
    ),
    "a long cell": (
        swapped(6, "code", "\n".join(["x = 1"] * 15 + ["nb.check()"])),
        "has 16 lines of code, more than 15",
    ),
    "an empty cell": (swapped(6, "code", ""), "is empty"),
    "code after code": (
        [*GOOD[:7], ("code", "x = 1"), *GOOD[7:]],
        "cell 7: has no text before it",
    ),
    "blank text": (swapped(5, "markdown", " "), "cell 6: has no text before it"),
    "no parameters": (swapped(2, "code", "lane = 'auto'"), "has 0 cells tagged `parameters`"),
    "two parameter cells": (
        swapped(6, "code", "nb.check()", ["parameters"]),
        "has 2 cells tagged `parameters`",
    ),
    "late parameters": (
        [GOOD[0], *GOOD[3:5], *GOOD[1:3], *GOOD[5:]],
        "must be the first code cell",
    ),
    "another tag": (swapped(6, "code", "nb.check()", ["raises-exception"]), "'raises-exception'"),
    "two titles": (swapped(5, "markdown", "# Another title"), "has 2 first-level headings"),
    "no title": (swapped(0, "markdown", "Just text."), "has 0 first-level headings"),
    "a late title": (
        [("markdown", "Text."), *GOOD],
        "has 1 first-level headings, must have one, in its first cell",
    ),
    "a skipped level": (swapped(5, "markdown", "### Deep"), "'Deep' skips a level"),
    "a numbered title": (swapped(0, "markdown", "# 40 The example"), "carries a number"),
    "a numbered heading": (swapped(5, "markdown", "## 1. First"), "carries a number"),
    "a neighbour's number": (
        swapped(7, "markdown", "Go on with 50_other."),
        "'50_o' names a notebook by its number",
    ),
    "a number in a link's text": (
        swapped(7, "markdown", "Go on with [50_other](50_other.ipynb)."),
        "names a notebook by its number",
    ),
    "notebook 40": (swapped(7, "markdown", "As in notebook 40."), "'notebook 40'"),
    "a dead link": (swapped(7, "markdown", "See [it](60_gone.ipynb)."), "60_gone.ipynb, which"),
    "no card first": (
        swapped(4, "code", 'from sparkling import notebook\nnb = notebook.begin("40_example")'),
        "does not open with its card",
    ),
    "a late card": (
        [
            *GOOD[:4],
            ("code", 'nb = notebook.begin("40_example")\nnb.check()'),
            ("markdown", "Late."),
            ("code", "nb.opening"),
            *GOOD[5:],
        ],
        "does not open with its card",
    ),
    "no card last": (swapped(8, "code", "nb.stop()"), "cell 8: must be nb.closing"),
    "no check": (swapped(6, "code", "nb.stop()"), "checks what it needs"),
    "another name": (
        swapped(4, "code", 'nb = notebook.begin("40_other")\nnb.opening'),
        "begins '40_other' but the file is called 40_example",
    ),
    "no begin": (swapped(4, "code", "nb.opening"), "never begins"),
}


@pytest.mark.parametrize("name", CONTENT)
def test_each_rule_has_its_sentence(folder, name):
    cells, says = CONTENT[name]
    problems = told(write(folder, cells))
    assert any(says in problem for problem in problems), problems


def test_code_fences_are_not_prose(folder):
    text = "Like this:\n\n```python\n# a comment, no title\n50_other\n```"
    assert told(write(folder, swapped(5, "markdown", text))) == []


def test_the_readme_and_the_cards_know_every_notebook(folder, tmp_path):
    path = write(folder)
    (tmp_path / "README.md").write_text("nothing")
    assert told(path) == [f"{path}: is not linked in README.md"]
    (tmp_path / "README.md").unlink()
    (folder / "cards.toml").write_text("[other]\n")
    assert told(path) == [f"{path}: has no card in cards.toml"]


# ----------------------------------------------------------------------------------------- form


def spoil(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


FORM = {
    "outputs": (
        lambda d: d["cells"][2]["outputs"].append(
            {"output_type": "stream", "name": "stdout", "text": ["x"]}
        ),
        "it holds outputs",
    ),
    "a count": (lambda d: d["cells"][2].update(execution_count=3), "it holds outputs"),
    "no id": (lambda d: d["cells"][2].pop("id"), "lacks an id"),
    "an id twice": (lambda d: d["cells"][2].update(id="c0"), "lacks an id"),
    "another kernel": (
        lambda d: d["metadata"]["kernelspec"].update(name="my-venv"),
        "metadata are not the fixed ones",
    ),
    "widget state": (lambda d: d["metadata"].update(widgets={}), "metadata are not the fixed"),
    "old format": (lambda d: d.update(nbformat_minor=2), "not nbformat 4.5"),
    "cell metadata": (
        lambda d: d["cells"][0]["metadata"].update(collapsed=True),
        "metadata of a cell",
    ),
}


@pytest.mark.parametrize("name", FORM)
def test_form_is_refused_and_repaired(folder, name):
    change, says = FORM[name]
    path = write(folder)
    spoil(path, change)
    problems = told(path)
    assert len(problems) == 1 and says in problems[0] and "--fix" in problems[0]
    assert fix([path]) == [path]
    assert told(path) == [] and fix([path]) == []
    nbformat.validate(nbformat.read(path, as_version=4))


def test_bytes_count(folder):
    path = write(folder)
    whole = path.read_text()
    for other in (
        whole.rstrip("\n"),
        whole + "\n",
        json.dumps(json.loads(whole), indent=2, sort_keys=True) + "\n",
        json.dumps(dict(reversed(json.loads(whole).items())), indent=1) + "\n",
        whole.replace("\n", "\r\n"),
    ):
        path.write_text(other, newline="")
        assert "canonical form" in told(path)[0]
        assert fix([path]) == [path]
        assert path.read_text() == whole


def test_ids_are_kept_and_new_ones_do_not_move(folder):
    path = write(folder)
    spoil(path, lambda d: [d["cells"][n].pop("id") for n in (2, 4)])
    fix([path])
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert [ids[0], ids[1], ids[3]] == ["c0", "c1", "c3"]
    assert len(set(ids)) == len(ids)
    spoil(path, lambda d: [d["cells"][n].pop("id") for n in (2, 4)])
    fix([path])
    assert [cell["id"] for cell in json.loads(path.read_text())["cells"]] == ids


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": 3}', '{"cells": [3]}', "\x80"])
def test_whatever_is_no_notebook_is_said_to_be_none(folder, text):
    path = folder / "40_example.ipynb"
    path.write_bytes(text.encode("latin-1"))
    assert told(path) == [f"{path}: is not a notebook"]
    assert fix([path]) == []


def test_missing_and_empty_places_are_told(folder, tmp_path):
    assert "cannot be read" in told(tmp_path / "gone.ipynb")[0]
    (tmp_path / "void").mkdir()
    assert told(tmp_path / "void") == [f"{tmp_path / 'void'}: there is no notebook here"]


def test_the_nbval_folder_keeps_outputs(tmp_path):
    path = write(tmp_path / "nbval")
    assert all("keeps no output" in problem for problem in told(path)) and told(path)

    def run(data):
        for cell in data["cells"]:
            if cell["cell_type"] == "code":
                cell["execution_count"] = 1

    spoil(path, run)
    assert told(path) == []  # cards, README and links are the suite's business, not nbval's
    assert fix([path]) == []


def test_the_command(folder, capsys):
    path = write(folder)
    spoil(path, lambda d: d["cells"][2].update(execution_count=3))
    assert nbcheck.main([str(path)]) == 1
    assert "canonical form" in capsys.readouterr().out
    assert nbcheck.main(["--fix", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: rewritten\n"


def test_our_own_notebooks_pass(root):
    places = [root / "notebooks", root / "tests" / "notebooks" / "nbval"]
    assert [str(problem) for problem in check(places)] == []
