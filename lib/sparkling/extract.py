"""The final answer in a model's text, and the rule that found it.

The rules, in order; the first that finds a number decides, and within a rule the last place in the
text does, since models correct themselves:

    ####            the number after `####`, as in GSM8K's own solutions
    boxed           the last complete `\\boxed{…}` or `\\fbox{…}`, braces balanced
    the answer is   the number in the sentence after "the answer is", "Answer:" and the like
    last number     the last number in the text

Thinking is never searched: what `think.split` calls reasoning is gone before the first rule. A box
that is empty, holds no number or is never closed is passed over and noted; nothing behind an
unclosed one is an answer. Values are exact (`numbers`), so 18, 18.0 and $18.00 are the same and
0.1 is not 0.1000001.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sparkling import numbers, think

HASHES, BOXED, PHRASE, LAST = "####", "boxed", "the answer is", "last number"
RULES = (HASHES, BOXED, PHRASE, LAST)
UNPARSED = "unparsed"
NEAR = 400  # characters after "the answer is" in which its number is looked for

_THINKING = ("reasoning", "thinking", "reasoning_text", "redacted_thinking")

_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*")
# Nothing but a name, an equals sign or markup may stand between the mark and its number.
_LEAD = re.compile(
    r"[\s$(*:=~≈]*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?[\s:=*$]*)?(?:[A-Za-z]\s*=\s*)?",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\s*[0-9]{1,2}[.)]\s+\S")  # "#### 2. Second step"
_BOX = re.compile(r"\\f?box(?:ed)?\s*(?=\{)|\\boxed\s+(?=[-+$.0-9])")
_PHRASE = re.compile(
    r"\banswers?\b[^.!?\n:=]{0,60}?(?:\s(?:is|are|was|equals?|would\s+be|will\s+be|becomes)\b|\s*[:=→⇒])"
    r"(?!\s+not\b)"
    r"|^[ \t#*_>]*(?:(?:the|my)\s+)?(?:final\s+)?answer[ \t#*_]*\r?$"  # a line of its own
    r"|<answer>",
    re.IGNORECASE | re.MULTILINE,
)
_OPENING = re.compile(r"(?:[\s*:$(\[]|\\[(\[$])*")  # not the backslash of a \frac
_DETACHED = re.compile(r"^([\s$(]*[-+])\s+(?=[$0-9.])")  # "- 18" where nothing stands before it
# Between the numbers of one sum; and what ends a sum: a clause, a remark in brackets.
_OPERATOR = re.compile(r"(?<![A-Za-z])[-+*/:÷(](?![A-Za-z])|\b(?:x|times|plus|minus|of)\b")
_BREAK = re.compile(
    r"[,;]|(?<!\s):\s|(?:^|[^-+*/x=:÷(\s])\s+\(|[.!?]\s"
    r"|\b(?:because|since|as|so|where|when|if|from|given|which|that|or|and|but|with)\b",
    re.IGNORECASE,
)
_END = re.compile(r"[.!?](?=\s|$)|\n")


@dataclass(frozen=True)
class Answer:
    """What was found. `value` and `text` are None when nothing was; `notes` say what was passed
    over and what looks wrong with the text."""

    value: Fraction | None
    text: str | None
    rule: str
    notes: tuple[str, ...] = ()

    @property
    def parsed(self) -> bool:
        return self.value is not None

    def equals(self, gold: Fraction) -> bool:
        """Whether it is exactly the wanted number."""
        return self.value is not None and self.value == gold

    def to_json(self) -> dict[str, Any]:
        return {"answer": self.text, "rule": self.rule, "notes": list(self.notes)}


def extract(text: str | None) -> Answer:
    """The answer in a text (thinking, if any, is taken off first); None is an empty text."""
    notes: list[str] = []
    _, answer, tagged = think.split(text or "")
    if tagged:
        notes.append(think.WARNING)
    boxes, open_at = _boxes(answer, notes)
    if open_at is not None:
        answer = answer[:open_at]
    for rule, find in (
        (HASHES, lambda: _after_hashes(answer)),
        (BOXED, lambda: _in_boxes(boxes, notes)),
        (PHRASE, lambda: _after_phrase(answer)),
        (LAST, lambda: _last(answer)),
    ):
        found = find()
        if found is not None:
            return Answer(found.value, found.text, rule, tuple(dict.fromkeys(notes)))
    return Answer(None, None, UNPARSED, tuple(dict.fromkeys(notes)))


def text_of(content: Any) -> str:
    """The text of a message's content, in the shapes that endpoints use: null is none, a list of
    parts is the texts of its parts but those of thinking ("reasoning", "thinking")."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (
            part.get("text") if isinstance(part, dict) else part
            for part in content
            if not (isinstance(part, dict) and part.get("type") in _THINKING)
        )
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def gold(solution: str) -> Fraction:
    """The number after `####` of a reference solution. ValueError where there is none."""
    found = extract(solution)
    if found.rule != HASHES or found.value is None:
        raise ValueError("the solution has no number after ####")
    return found.value


# -- the rules -----------------------------------------------------------------------------------


def _after_hashes(text: str) -> numbers.Number | None:
    for match in reversed(list(_HASHES.finditer(text))):
        line = text[match.end() :].partition("\n")[0]
        box = _BOX.search(line)
        if box is not None and not line[: box.start()].strip(" $*"):
            line = line[box.end() :]
        line = _DETACHED.sub(r"\1", numbers.plain(line))
        if _HEADING.match(line):
            continue
        found = numbers.find(line)
        lead = _LEAD.match(line)
        if found and lead is not None and line[lead.end() : found[0].start].strip(" $(+") == "":
            return _result(line, found)
    return None


def _boxes(text: str, notes: list[str]) -> tuple[list[str], int | None]:
    """The contents of all complete boxes, and where an unclosed one begins."""
    found: list[str] = []
    at = 0
    while (match := _BOX.search(text, at)) is not None:
        if text[match.end()] != "{":
            found.append(re.split(r"[\s$]", text[match.end() :].lstrip("$"), maxsplit=1)[0])
            at = match.end()
            continue
        end = _closing(text, match.end())
        if end is None:
            notes.append("unclosed box")
            return found, match.start()
        found.append(text[match.end() + 1 : end])
        at = match.end() + 1  # a box may hold a box
    return found, None


def _closing(text: str, start: int) -> int | None:
    """Where the brace that opens at `start` is closed; `\\{` and `\\}` are no braces."""
    depth, at = 0, start
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 2
            continue
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return at
        at += 1
    return None


def _in_boxes(boxes: list[str], notes: list[str]) -> numbers.Number | None:
    for content in reversed(boxes):
        if not content.strip():
            notes.append("empty box")
            continue
        found = _first(_DETACHED.sub(r"\1", numbers.plain(content)))
        if found is not None:
            return found
        notes.append("box without a number")
    return None


def _after_phrase(text: str) -> numbers.Number | None:
    for match in reversed(list(_PHRASE.finditer(text))):
        rest = text[match.end() : match.end() + NEAR]
        rest = rest[_OPENING.match(rest).end() :]
        found = _first(numbers.plain(_sentence(rest)))
        if found is not None:
            return found
    return None


def _sentence(text: str) -> str:
    end = _END.search(text)
    return text[: end.start()] if end else text


def _first(text: str) -> numbers.Number | None:
    found = numbers.find(text)
    return _result(text, found) if found else None


def _result(text: str, found: list[numbers.Number]) -> numbers.Number:
    """The first number, or what the sum comes to that begins with it: 18 in `9 x 2 = 18`, in
    `18 = 9 x 2`, in `18 m^2` and in `18, as x = 3`."""
    sides = [[found[0]]]
    for before, after in itertools.pairwise(found):
        gap = text[before.end : after.start]
        if _BREAK.search(gap):
            break
        if "=" in gap:
            sides.append([after])
        elif _OPERATOR.search(gap):
            sides[-1].append(after)
        else:
            break
    alone = [side[0] for side in sides if len(side) == 1]
    return alone[-1] if alone else found[0]


def _last(text: str) -> numbers.Number | None:
    found = numbers.find(numbers.plain(text))
    return found[-1] if found else None
