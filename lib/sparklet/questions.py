"""Problems that Sparklet was never trained on, and how its answers are judged. Needs no torch."""

from __future__ import annotations

import random
import re

from . import chat, tasks
from . import words as w


def extract(text: str) -> int | None:
    """The number after the last ####, or None."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return int(found[-1]) if found else None


def problems(n: int, seed: int) -> list[tuple[str, tasks.Problem, bool]]:
    """(prompt text, problem, thinking) of n held-out problems, thinking on for every other one."""
    rng, out = random.Random(f"held out {seed}"), []
    for i in range(n):
        p = tasks.problem(rng, held_out=True)
        text = chat.prompt([{"role": "user", "content": p.question}], thinking=i % 2 == 0)
        out.append((text, p, i % 2 == 0))
    return out


def repetitive(n: int, seed: int) -> list[str]:
    """Prompts whose greedy continuation repeats: half plain text, half a request."""
    rng, out = random.Random(f"repeat {seed}"), []
    while len(out) < n:
        if len(out) % 2:
            phrase = tasks._phrase(rng)
            out.append(f"{phrase} {phrase} {phrase}")
        else:
            text = tasks._phrase(rng).rstrip(",")
            ask = f"Repeat this again and again: {text}"
            out.append(chat.prompt([{"role": "user", "content": ask}], thinking=False))
    return out


def tool_requests(n: int, seed: int) -> list[tuple[str, str]]:
    """(prompt, expected call) with the needed tool among the offered."""
    rng, out = random.Random(f"tools {seed}"), []
    for i in range(n):
        ask, tool, arguments, _, _ = tasks._tool_request(rng)
        others = [t for t in w.TOOLS if t != tool]
        offered = rng.sample(others, 2)
        offered.insert(rng.randrange(3), tool)
        text = chat.prompt([{"role": "user", "content": ask}], thinking=i % 2 == 0, tools=offered)
        out.append((text, chat._call({"function": {"name": tool, "arguments": arguments}})))
    return out
