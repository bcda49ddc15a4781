"""Split an answer from the thinking before it, when the server did not."""

from __future__ import annotations

import re

_TAG = re.compile(r"</?think>")
_INLINE = re.compile(r"(`+)(?!`)[^\n]*?(?<!`)\1(?!`)")
_FENCE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1", re.DOTALL | re.MULTILINE)
_CLOSER = "</think>"

WARNING = (
    "reasoning parser seems off: a think tag arrived inside the answer; start the server with "
    "--reasoning-parser ling3"
)


def split(content: str, *, parsed: bool = False, cut: bool = False) -> tuple[str, str, bool]:
    """Separate `content` into (reasoning, answer, saw a tag).

    A bare `</think>` means that everything before it was thinking; an opener without a closer
    means that the thinking never ended, so there is no answer. A tag in back-ticks is a quotation.
    `parsed`: the server already separated some thinking, so code fences in `content` are an
    answer's and may quote tags too. `cut`: generation was stopped by its length; half a closer at
    the very end then still ends the thinking.
    """
    tags = _tags(content, fences=parsed)
    if not tags:
        half = _half_closer(content) if cut else 0
        return (content[:-half], "", True) if half else ("", content, False)
    reasoning: list[str] = []
    answer: list[str] = []
    thinking = False
    start = 0
    for tag in tags:
        piece = content[start : tag.start()]
        start = tag.end()
        if tag.group() == _CLOSER:
            if not thinking:
                # Nobody opened it: all that looked like answer so far was thinking.
                reasoning += answer
                answer = []
            reasoning.append(piece)
            thinking = False
        else:
            (reasoning if thinking else answer).append(piece)
            thinking = True
    (reasoning if thinking else answer).append(content[start:])
    return "".join(reasoning), "".join(answer), True


def _tags(content: str, *, fences: bool) -> list[re.Match[str]]:
    tags = list(_TAG.finditer(content))
    if not tags:
        return []
    quotes = [m.span() for m in _FENCE.finditer(content)] if fences else []
    # Back-ticks pair up badly in prose ("it`s"), and a real closer must not be missed: only a tag
    # that touches a back-tick of its span counts as quoted.
    spans = [m.span() for m in _INLINE.finditer(content)]

    def quoted(tag: re.Match[str]) -> bool:
        a, b = tag.span()
        if any(x <= a and b <= y for x, y in quotes):
            return True
        touches = content[a - 1 : a] == "`" or content[b : b + 1] == "`"
        return touches and any(x < a and b < y for x, y in spans)

    return [tag for tag in tags if not quoted(tag)]


def _half_closer(content: str) -> int:
    """How many characters of a started `</think>` end `content` (3 at least, so that a lone `<`
    or `</` of an ordinary text is left alone)."""
    for n in range(len(_CLOSER) - 1, 2, -1):
        if content.endswith(_CLOSER[:n]):
            return n
    return 0
