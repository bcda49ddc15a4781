"""Parameters are typed by their defaults, and unknown ones are refused."""

from __future__ import annotations

import json

import pytest
from sparkling import params
from sparkling.errors import UsageError


def notebook(source: str, *, tags=("parameters",), times: int = 1) -> dict:
    cell = {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}, "outputs": []}
    return {"cells": [{"cell_type": "markdown", "source": "# x", "metadata": {}}, *[cell] * times]}


def test_defaults_are_read_without_running_anything():
    source = 'lane = "auto"\nrepeats: int = 3\nfast = False\nnames = ["a"]\nrate = 0.5\nprint("x")'
    found = params.defaults_of(notebook(source), "x.ipynb")
    assert found == {"lane": "auto", "repeats": 3, "fast": False, "names": ["a"], "rate": 0.5}


@pytest.mark.parametrize(
    ("book", "said"),
    [
        (notebook("x = 1", tags=()), "has 0 cells tagged"),
        (notebook("x = 1", times=2), "has 2 cells tagged"),
        (notebook("x = "), "does not parse"),
        (notebook("x = len('a')"), "default of x must be a plain value"),
    ],
)
def test_a_bad_parameters_cell_is_one_sentence(book, said):
    with pytest.raises(UsageError, match=said) as caught:
        params.defaults_of(book, "40_x.ipynb")
    assert str(caught.value).startswith("40_x.ipynb")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("default", "given", "value"),
    [
        (False, "true", True),
        (True, "false", False),
        (True, "0", False),
        (False, "Yes", True),
        (False, True, True),
        (3, "007", 7),
        (3, "-4", -4),
        (3, 5, 5),
        (0.5, "1", 1.0),
        (0.5, 2, 2.0),
        ("auto", "007", "007"),
        ("auto", "true", "true"),
        ([1], "1,2, 3", [1, 2, 3]),
        ([1], "[4, 5]", [4, 5]),
        (["a"], "x,y", ["x", "y"]),
        ([], "", []),
        ([True], ["false"], [False]),
        ({"a": 1}, '{"b": 2}', {"b": 2}),
        (None, "3", 3),
        (None, "text", "text"),
    ],
)
def test_values_take_the_type_of_the_default(default, given, value):
    got = params.typed("p", default, given)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("default", "given"),
    [
        (False, "maybe"),
        (False, 1),
        (3, "3.5"),
        (3, "three"),
        (3, True),
        (3, 3.0),
        (0.5, "nan"),
        (0.5, "inf"),
        (0.5, "x"),
        ("a", 3),
        ([1], "1,x"),
        ([1], 3),
        ([1], "[1"),
        ({"a": 1}, "[1]"),
        ({"a": 1}, "{"),
    ],
)
def test_a_value_of_another_type_is_one_sentence(default, given):
    with pytest.raises(UsageError) as caught:
        params.typed("repeats", default, given)
    said = str(caught.value)
    assert said.startswith("Parameter repeats must be ")
    assert "\n" not in said


DECLARED = {"40_a": {"lane": "auto", "run_id": "", "repeats": 3}, "50_b": {"lane": "auto"}}


def test_each_notebook_gets_what_it_declares_and_nothing_else():
    got = params.assign(DECLARED, {"repeats": "5"}, {"lane": "cpu"})
    assert got == {"40_a": {"lane": "cpu", "repeats": 5}, "50_b": {"lane": "cpu"}}


def test_an_unknown_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match=r"parameter 'repeat'; did you mean repeats"):
        params.assign(DECLARED, {"repeat": "5"}, {})
    with pytest.raises(UsageError, match=r"there are repeats"):
        params.assign(DECLARED, {"zzz": "5"}, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workloads": "short-turn,shapes"}, "There is no workload 'shapes'"),
        ({"repeats": "0"}, "at least one repeat, not 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, said):
    declared = {"40_baseline": {"workloads": ["short-turn"], "repeats": 2}}
    with pytest.raises(UsageError, match=said):
        params.assign(declared, given, {})


def test_what_the_suite_sets_itself_is_refused_with_the_right_option():
    with pytest.raises(UsageError, match="use --run instead"):
        params.assign(DECLARED, {"run_id": "x"}, {})
    # By value it would reach the notebooks and not the server's Python, which the suite fixes.
    with pytest.raises(UsageError, match="use --edition instead"):
        params.assign({"40_a": {"edition": ""}}, {"edition": "fork"}, {})


def test_files_that_are_no_notebooks(tmp_path):
    for text, said in (("{", "not a notebook"), ("[]", "no list of cells"), ("{}", "no list of")):
        path = tmp_path / "x.ipynb"
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            params.load_notebook(path)
    with pytest.raises(UsageError, match="cannot be read"):
        params.load_notebook(tmp_path / "none.ipynb")
    path.write_text(json.dumps(notebook("x = 1")))
    assert len(params.load_notebook(path)["cells"]) == 2
