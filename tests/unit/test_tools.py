"""Case 21: tool calls from pieces."""

import json

import pytest
from sparkling.tools import Assembler


def entry(index=None, id=None, name=None, args=...):
    function = {}
    if name is not None:
        function["name"] = name
    if args is not ...:
        function["arguments"] = args
    out = {"function": function}
    if index is not None:
        out["index"] = index
    if id is not None:
        out["id"] = id
    return out


def assemble(*deltas, finish="tool_calls"):
    made = Assembler()
    for delta in deltas:
        made.feed(delta)
    return made.finish(finish)


def test_case_21_1_pieces_go_to_the_call_of_their_index():
    whole, broken = assemble(
        [entry(0, "A", "f", ""), entry(1, "B", "g", "")],
        [entry(0, args='{"x":')],
        [entry(1, args='{"x":2}')],
        [entry(0, args="1}")],
    )
    assert [(c.id, c.name, c.arguments) for c in whole] == [
        ("A", "f", {"x": 1}),
        ("B", "g", {"x": 2}),
    ]
    assert broken == []


def test_case_21_2_without_index_the_id_tells_calls_apart():
    whole, _ = assemble(
        [entry(id="A", name="f", args='{"x":1')],
        [entry(id="B", name="f", args='{"x":2}')],
        [entry(id="A", args="}")],
    )
    assert [(c.id, c.arguments) for c in whole] == [("A", {"x": 1}), ("B", {"x": 2})]


def test_case_21_3_two_entries_of_one_call_in_one_chunk():
    whole, _ = assemble([entry(0, "A", "f", ""), entry(0, args='{"x":')], [entry(0, args="1}")])
    assert [(c.id, c.name, c.arguments) for c in whole] == [("A", "f", {"x": 1})]


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ({"x": 1}, {"x": 1}),
        (None, {}),
        ("", {}),
        ("null", {}),
        ("{}", {}),
        ('"{\\"x\\": 1}"', {"x": 1}),
    ],
)
def test_case_21_4_arguments_as_object_null_or_nothing(args, want):
    whole, broken = assemble([entry(0, "A", "f", args)])
    assert [c.arguments for c in whole] == [want]
    assert broken == []


def test_case_21_5_a_call_counts_although_the_finish_reason_is_stop():
    whole, _ = assemble([entry(0, "A", "f", '{"x":1}')], finish="stop")
    assert [c.arguments for c in whole] == [{"x": 1}]


@pytest.mark.parametrize("finish", ["length", None, "abort"])
@pytest.mark.parametrize("raw", ['{"x":', '{"x": 1}'])
def test_case_21_6_a_call_cut_off_is_never_offered(finish, raw):
    # The second one parses, but a parser may have closed the braces of half a value.
    whole, broken = assemble(
        [entry(0, "A", "f", '{"y":0}')], [entry(1, "B", "g", raw)], finish=finish
    )
    assert [c.name for c in whole] == ["f"]
    assert [(c.name, c.arguments, c.complete) for c in broken] == [("g", None, False)]
    assert "generation ended" in broken[0].problem


def test_the_last_written_call_is_the_cut_one_not_the_last_begun():
    whole, broken = assemble(
        [entry(0, "A", "f", '{"x":'), entry(1, "B", "g", '{"y":2}')],
        [entry(0, args="1")],
        finish="length",
    )
    assert [c.name for c in whole] == ["g"]
    assert [c.name for c in broken] == ["f"]


def test_broken_arguments_say_why():
    whole, broken = assemble(
        [entry(0, "A", "f", "{x: 1}")], [entry(1, "B", "g", "[1]")], [entry(2, "C", args="{}")]
    )
    assert whole == []
    assert [
        "not JSON" in broken[0].problem,
        "object" in broken[1].problem,
        "name" in broken[2].problem,
    ] == [True] * 3


def test_an_index_reused_with_another_id_and_name_is_another_call():
    whole, _ = assemble(
        [entry(0, "A", "f", '{"x":1}')], [entry(0, "B", "g", '{"x":')], [entry(0, args="2}")]
    )
    assert [(c.id, c.name, c.arguments) for c in whole] == [
        ("A", "f", {"x": 1}),
        ("B", "g", {"x": 2}),
    ]


def test_ids_that_change_with_every_piece_do_not_split_a_call():
    whole, _ = assemble([entry(0, "A", "f", '{"x":')], [entry(0, "B", args="1}")])
    assert [(c.id, c.arguments) for c in whole] == [("A", {"x": 1})]


def test_neither_index_nor_id_continues_the_last_call():
    whole, _ = assemble(
        [entry(name="f", args='{"x":')], [entry(args="1}")], [entry(name="g", args="{}")]
    )
    assert [(c.name, c.arguments) for c in whole] == [("f", {"x": 1}), ("g", {})]


def test_nothing_and_nonsense():
    made = Assembler()
    assert not made.feed(None) and not made.feed([]) and not made.feed(["x"]) and not made
    assert made.feed([{"index": 0, "function": None, "id": "A"}])
    assert json.dumps(made.finish("stop")[1][0].raw) == '""'
