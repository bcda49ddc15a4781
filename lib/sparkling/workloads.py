"""What is asked of every arm: the same prompts, byte for byte.

Prompts are written here or made from a fixed seed; nothing about them depends on the arm, the
machine or the time. The one exception, the length of the `shape` prompts, is cut with the server's
own tokenizer, which all arms of a model share; each row records a hash of what was really sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkling import practice
from sparkling._toml import closest
from sparkling.errors import UsageError

# Sizes in tokens, as a recipe's [sizes] gives them; these stand in for what it leaves out.
DEFAULTS = {
    "short_output": 256,
    "long_output": 2048,
    "repeat_output": 1024,
    "shape_input": 32768,
    "shape_output": 2048,
    "prompts": 4,
}
_IGNORED = {"context", "repeats", "questions"}  # sizes of the recipe that are not the workloads'
NAMES = ("short-turn", "long-answer", "repeated-text", "shape")


@dataclass(frozen=True)
class Prompt:
    """`text` is sent as it is; if `tokens` is set, sentences of `body` follow it, as many as keep
    the whole within that many tokens, then `end`. `messages`: a whole conversation instead."""

    id: str
    text: str
    body: tuple[str, ...] = ()
    end: str = ""
    tokens: int | None = None
    messages: tuple[Mapping[str, Any], ...] = ()

    def render(self, count: Callable[[str], int] | None = None) -> str | list[Mapping[str, Any]]:
        """The text (or the messages) to send. `count` gives a text's number of tokens; without it a sentence is
        taken for 24."""
        if self.messages:
            return list(self.messages)
        if self.tokens is None:
            return self.text
        if count is None:
            return self._upto(max(1, self.tokens // 24))
        low, high, guess = 0, len(self.body), max(1, self.tokens // 24)
        while low < high:  # the most sentences that fit; tokens grow with each
            k = min(max(guess, low + 1), high)
            n = count(self._upto(k))
            if n <= self.tokens:
                low = k
            else:
                high = k - 1
            guess = min(max(k * self.tokens // max(n, 1), low + 1), high)
        return self._upto(low)

    def _upto(self, k: int) -> str:
        return " ".join((self.text, *self.body[:k])) + self.end


@dataclass(frozen=True)
class Workload:
    """Prompts and how they are to be answered. `api` is "chat" or "generate"."""

    name: str
    description: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    api: str = "chat"
    ignore_eos: bool = False
    thinking: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def greedy(self) -> bool:
        return not self.sampling.get("temperature")

    def sampled(self, **sampling: Any) -> Workload:
        """This workload under another sampling, called `<name>/sampled`."""
        return dataclasses.replace(self, name=f"{self.name}/sampled", sampling=dict(sampling))

    def settings(self) -> dict[str, Any]:
        """Everything but the prompts: two rows are comparable only if these agree."""
        return {
            "max_tokens": self.max_tokens,
            "sampling": dict(sorted(self.sampling.items())),
            "api": self.api,
            "ignore_eos": self.ignore_eos,
            "thinking": self.thinking,
            **({"tools": digest(self.tools)} if self.tools else {}),
        }


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def workloads(
    sizes: Mapping[str, int], names: Sequence[str] | None = None, *, texts: str = "general"
) -> list[Workload]:
    """The named workloads (the four of NAMES by default; `workloads_more` has others), with a
    recipe's sizes and its kind of `texts`.

    UsageError for a name, a size or texts that do not exist, or a size that makes no sense.
    """
    if texts not in TEXTS:
        raise UsageError(
            f"There are no texts {texts!r}{closest(texts, TEXTS)}; there are {', '.join(TEXTS)}."
        )
    unknown = [k for k in sizes if k not in DEFAULTS and k not in _IGNORED]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is no size of a workload; there are {', '.join(DEFAULTS)}."
        )
    s = {**DEFAULTS, **{k: v for k, v in sizes.items() if k in DEFAULTS}}
    for name, value in s.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(
                f"The size {name} must be a whole number of at least 1, not {value!r}."
            )
    from sparkling import workloads_more as more  # it builds on this module

    made = {w.name: w for w in _all(s, TEXTS[texts])}
    for name in names or ():
        if name not in made and name not in more.NAMES:
            every = (*made, *more.NAMES)
            raise UsageError(f"There is no workload {name!r}; there are {', '.join(every)}.")
    return [made[n] if n in made else more.make(n, s, texts) for n in (names or NAMES)]


def repeats_of(sizes: Mapping[str, int], given: int | None = None) -> int:
    """How often to measure: as given, else as the recipe's sizes say, else 3. UsageError below 1."""
    count = sizes.get("repeats", 3) if given is None else given
    if count < 1:
        raise UsageError(f"A benchmark needs at least one repeat, not {count}.")
    return count


def _all(s: Mapping[str, int], texts: Texts) -> list[Workload]:
    n = s["prompts"]
    short, long, passages, repeat = texts
    return [
        Workload(
            "short-turn",
            f"a short question, an answer of at most {s['short_output']} tokens, no thinking",
            _take("short-turn", short, n),
            s["short_output"],
            thinking=False,
        ),
        Workload(
            "long-answer",
            f"an explanation with thinking, cut at {s['long_output']} tokens",
            _take("long-answer", long, n),
            s["long_output"],
            thinking=True,
        ),
        Workload(
            "repeated-text",
            f"a passage to copy again and again, {s['repeat_output']} tokens at most: the best case "
            "for a draft",
            _take("repeated-text", [repeat.format(text=t) for t in passages], n),
            s["repeat_output"],
            thinking=False,
        ),
        Workload(
            "shape",
            f"{s['shape_input']:,} tokens in, exactly {s['shape_output']:,} out",
            tuple(_log(i, s["shape_input"]) for i in range(n)),
            s["shape_output"],
            ignore_eos=True,
            thinking=False,
        ),
    ]


def _take(workload: str, texts: Sequence[str], n: int) -> tuple[Prompt, ...]:
    if n > len(texts):
        raise UsageError(f"The workload {workload} has {len(texts)} prompts, not {n}.")
    return tuple(Prompt(f"{i:02d}", text) for i, text in enumerate(texts[:n]))


SHORT = [
    "Name three rivers that cross more than two countries, and one fact about each.",
    "Why is the sky darker at the top of a mountain than at sea level?",
    "Write a polite two-line reply that declines an invitation to a birthday party.",
    "What is the difference between a stack and a queue? One example of each.",
    "Convert 72 degrees Fahrenheit to Celsius and show the steps.",
    "Which metals are liquid near room temperature, and why is one of them used in thermometers?",
    "Give a regular expression for a date written as 2031-04-17, and say what each part does.",
    "How does a suspension bridge carry the weight of its deck?",
    "A recipe for four needs 300 g of flour. How much for seven people? Show the sum.",
    "Explain to a ten-year-old what an interest rate is.",
    "What should I check first when a bicycle chain keeps slipping?",
    "List the phases of the moon in order, beginning with the new moon.",
]

LONG = [
    "Explain in detail how a compiler turns a loop over an array into fast machine code, from "
    "parsing to register allocation, with a small example carried through every stage.",
    "Describe how a city could replace its diesel buses within ten years: vehicles, charging, "
    "depots, staff, money, and what usually goes wrong. Weigh two alternatives.",
    "Derive the formula for the sum of the first n square numbers in two different ways, explain "
    "every step, and test both with n = 7.",
    "Write a long guide for a beginner who wants to grow tomatoes on a balcony, from choosing seeds "
    "to the last harvest, month by month.",
    "Compare merge sort, heap sort and quick sort: ideas, invariants, worst cases, memory, "
    "behaviour in caches, and which you would choose for a million short strings.",
    "Tell the story of a lighthouse keeper who finds that the light has been answering another "
    "light for years. At least eight scenes, with dialogue.",
    "Explain how vaccines train the immune system, what boosters do, and how trials measure "
    "efficacy, including what a confidence interval means there.",
    "Plan a four-day walking tour for a family with two children: daily stages, food, a wet-weather "
    "plan, a packing list, and the reasons for each choice.",
    "Explain virtual memory from the first page fault to swapping, then design a small experiment "
    "that would show each effect on a Linux machine.",
    "Discuss three ways to store energy for a village with solar power: batteries, pumped water and "
    "heat. Estimate sizes for 200 households, and state every assumption.",
    "Teach the rules and the first strategic ideas of the board game Go to somebody who knows chess.",
    "Explain how the tides arise, why there are two a day, and why their height differs so much "
    "from place to place.",
]

_REPEAT = "Copy the following text word for word, again and again, without any comment:\n\n{text}"
PASSAGES = [
    "The ferry leaves the east pier at six, calls at the mill, the market and the old fort, and is "
    "back before the evening bell.",
    "Item, quantity, price: bolts, 40, 0.12; nuts, 40, 0.08; washers, 80, 0.03; brackets, 12, 1.90; "
    "hinges, 6, 2.45; total, 178, 47.11.",
    "First wash the rice until the water runs clear, then soak it for half an hour, then steam it "
    "for twenty minutes, then let it rest.",
    "North wind, light rain, visibility good. North wind, heavy rain, visibility poor. South wind, "
    "no rain, visibility excellent.",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    "    return area(width, height) * depth",
    "Every station reports at the full hour: name, pressure, temperature, wind, cloud. Every station "
    "repeats its report at the half hour.",
    "A red door, a green gate, a blue shutter; a red gate, a green shutter, a blue door; a red "
    "shutter, a green door, a blue gate.",
    "Step one, close the valve. Step two, open the drain. Step three, wait for the lamp. Step four, "
    "close the drain. Step five, open the valve.",
    "Dear member, your book is due on Monday; please return it or renew it. Dear member, your book "
    "is overdue; please return it now.",
    "The second train waits for the first, the third for the second, the fourth for the third, and "
    "nobody waits for the fourth.",
    "Alpha is before beta, beta is before gamma, gamma is before delta, delta is before epsilon, "
    "epsilon is before zeta.",
    "Sand, gravel, cement, water; mix, pour, level, wait; sand, gravel, cement, water; mix, pour, "
    "level, wait.",
]

Texts = tuple[list[str], list[str], list[str], str]
TEXTS: dict[str, Texts] = {
    "general": (SHORT, LONG, PASSAGES, _REPEAT),
    "practice": (practice.SHORT, practice.LONG, practice.PASSAGES, practice.REPEAT),
}
"""Kinds of texts: short questions, long ones, passages, and how to ask for copies of a passage."""

_WHO = (
    "harbour master",
    "night nurse",
    "tram driver",
    "baker",
    "surveyor",
    "archivist",
    "gardener",
)
_WHERE = ("the north gate", "pier nine", "ward four", "the old mill", "platform two", "the archive")
_DID = ("counted", "repaired", "reported", "moved", "weighed", "lost and found", "handed over")
_WHAT = ("crates", "lanterns", "tickets", "ledgers", "sacks of flour", "spare parts", "letters")
_NOTE = (
    "nobody objected",
    "the bell rang twice",
    "rain was expected",
    "the lamp had to be changed",
    "the key was returned late",
    "a visitor asked for directions",
)


def _log(i: int, tokens: int) -> Prompt:
    """A made-up duty log of about `tokens` tokens and a task that needs all of it."""
    rng = random.Random(f"sparkling shape {i}")
    pick = rng.choice
    # Eight tokens a sentence is less than any tokenizer makes of one: enough sentences to cut from.
    body = tuple(
        f"On day {rng.randrange(1, 400)} the {pick(_WHO)} at {pick(_WHERE)} {pick(_DID)} "
        f"{rng.randrange(2, 999)} {pick(_WHAT)}, and {pick(_NOTE)}."
        for _ in range(max(8, tokens // 8))
    )
    end = (
        "\n\nThat was the log. Write a report on it: what happened at each place, who did most, "
        "what was unusual, and what should be checked next."
    )
    # The beginnings differ, so that no prompt finds another's beginning in the prefix cache.
    return Prompt(
        f"{i:02d}", f"{rng.randrange(10**6)} is the number of this log.\n\n", body, end, tokens
    )
