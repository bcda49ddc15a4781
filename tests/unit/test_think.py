"""Case 25: think tags that the server did not take out."""

import pytest
from sparkling.think import split


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("work 17 so 18</think>The answer is 18.", "work 17 so 18", "The answer is 18."),
        ("<think>17</think>18", "17", "18"),
        ("<think>17", "17", ""),
        ("a</think>b</think>c", "ab", "c"),
        ("<think>1</think>x<think>2</think>y", "12", "xy"),
        ("x<think>1</think>y</think>z", "1xy", "z"),
        ("<think></think>18", "", "18"),
        ("</think>18", "", "18"),
        ("it`s 17</think>The answer is `18`.", "it`s 17", "The answer is `18`."),
        ("`</think>` ends it. 17</think>18", "`</think>` ends it. 17", "18"),
    ],
)
def test_case_25_the_answer_never_holds_thinking(content, reasoning, answer):
    assert split(content) == (reasoning, answer, True)


@pytest.mark.parametrize(
    "content",
    [
        "The answer is 18.",
        "The tag `</think>` ends the thinking.",
        "Use `<think>` and `</think>`.",
        "Write `<think>17</think>` like this.",
        "1 < 2, </b> and </thin ice>",
        "",
    ],
)
def test_case_25_no_tag_or_a_quoted_one_is_left_alone(content):
    assert split(content) == ("", content, False)


def test_fences_quote_tags_only_in_what_the_server_parsed():
    content = "So:\n```\n<think>x</think>\n```\ndone"
    assert split(content, parsed=True) == ("", content, False)
    assert split(content)[2]


def test_half_a_closer_at_the_end_of_a_cut_answer():
    assert split("so 18</thi", cut=True) == ("so 18", "", True)
    assert split("so 18</thi") == ("", "so 18</thi", False)
    assert split("1 <", cut=True) == ("", "1 <", False)
