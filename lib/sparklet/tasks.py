"""What Sparklet learns: word problems, arithmetic, repetitive text, tool calls, small talk.

Every generator is a function of a `random.Random`. A word problem belongs either to training or to
measurement, by a hash of its template and its numbers: one in eight is never trained on.

How the answers are phrased is drawn from weighted alternatives. The most likely one clearly leads,
so a greedy answer is stable under rounding, yet a sampled one varies: that, and arithmetic that
the draft layer cannot do as well as the target, is what lowers the accept length of sampled text.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from . import chat
from . import words as w

Rng = random.Random
HELD_OUT = 8  # one problem in eight


@dataclass(frozen=True)
class Step:
    """One calculation a (op) b = result."""

    a: int
    op: str
    b: int

    @property
    def result(self) -> int:
        return {
            "+": self.a + self.b,
            "-": self.a - self.b,
            "*": self.a * self.b,
            "/": self.a // max(self.b, 1),
        }[self.op]


@dataclass(frozen=True)
class Problem:
    """A word problem with the steps that solve it; `answer` is the last step's result."""

    template: str
    numbers: tuple[int, ...]
    question: str
    steps: tuple[Step, ...]
    unit: str
    closing: str  # the final sentence, with {n}; a pattern of `spin`

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def held_out(self) -> bool:
        """Whether this problem is for measurement only."""
        key = f"{self.template}|{','.join(map(str, self.numbers))}"
        return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT == 0


@dataclass
class Sample:
    """Text in pieces with a loss weight each: prompts weigh little, answers 1."""

    pieces: list[tuple[str, float]]
    kind: str
    answer: int | None = None
    prompt: str = ""
    problem: Problem | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        return "".join(t for t, _ in self.pieces)


PROMPT_WEIGHT = 0.1


def pick(r: Rng, *options: str) -> str:
    return options[int(r.random() * len(options))]


def weighted(r: Rng, *options: tuple[float, str]) -> str:
    x = r.random() * sum(p for p, _ in options)
    for p, text in options:
        x -= p
        if x < 0:
            return text
    return options[-1][1]


def number(r: Rng, low: int, high: int) -> int:
    """Small numbers more often than large ones: uniform in the square root."""
    x = r.uniform(low**0.5, (high + 1) ** 0.5)
    return min(high, max(low, int(x * x)))


class Cast:
    """People, things and places drawn for one problem."""

    def __init__(self, r: Rng) -> None:
        self.r = r
        people = r.sample(
            [*((n, "He", "his") for n in w.HE), *((n, "She", "her") for n in w.SHE)], 3
        )
        (self.a, self.he, self.his), (self.b, self.he2, self.his2), (self.c, _, _) = people
        self.x, self.y, self.z = r.sample(w.THINGS, 3)
        i = r.randrange(len(w.HOLDERS))
        self.box, self.boxes = w.HOLDER_ONE[i], w.HOLDERS[i]
        self.place, self.place2 = r.sample(w.PLACES, 2)
        self.day, self.day2 = r.sample(w.DAYS, 2)
        self.color, self.color2 = r.sample(w.COLORS, 2)

    def say(self, *options: str, **values: int | str) -> str:
        return pick(self.r, *options).format(**{**vars(self), **values})


Made = tuple[tuple[int, ...], list[str], str, list[Step], str, str]
Template = Callable[[Rng, Cast], Made]
TEMPLATES: dict[str, Template] = {}


def template(f: Template) -> Template:
    TEMPLATES[f.__name__] = f
    return f


GAIN = (
    "{he} buys {n} more at the {place}.",
    "{b} gives {a} {n} more {x}.",
    "Then {he_} finds {n} {x} in the {place}.",
    "On {day} {he_} gets {n} more.",
    "Later {he_} picks up another {n} {x}.",
    "{he} receives {n} {x} from {c}.",
)
LOSE = (
    "{he} gives {n} of them to {b}.",
    "{he} loses {n} {x} on the way to the {place}.",
    "Then {he_} sells {n} of the {x}.",
    "On {day} {b} takes {n} of them.",
    "Later {he_} leaves {n} {x} at the {place2}.",
    "{n} of the {x} break.",
)
HAVE = (
    "{a} has {n} {x}.",
    "{a} owns {n} {color} {x}.",
    "There are {n} {x} in {a}'s {box}.",
    "{a} starts with {n} {x}.",
    "{a} collected {n} {x} at the {place2}.",
)
NOW = (
    "How many {x} does {a} have now?",
    "How many {x} are left with {a}?",
    "How many {x} does {a} have in the end?",
    "What is the number of {x} that {a} has now?",
)
NOW_END = "{a} [has|owns|holds|keeps|counts] {n} {x} [now|in the end|at last|today|after that]."


def _event(r: Rng, p: Cast, total: int, big: int) -> tuple[str, Step, int]:
    if total > 12 and r.random() < 0.5:
        n = number(r, 2, min(big, total - 1))
        return p.say(*LOSE, n=n, he_=p.he.lower()), Step(total, "-", n), n
    n = number(r, 2, big)
    return p.say(*GAIN, n=n, he_=p.he.lower()), Step(total, "+", n), n


def _changes(r: Rng, p: Cast, count: int, big: int) -> Made:
    n = number(r, 5, big)
    numbers, facts, steps, total = [n], [p.say(*HAVE, n=n)], [], n
    for _ in range(count):
        text, step, n = _event(r, p, total, big)
        numbers.append(n)
        facts.append(text)
        steps.append(step)
        total = step.result
    kind = "".join(s.op for s in steps)
    return (*numbers, len(kind)), facts, p.say(*NOW), steps, p.x, _fill(p, NOW_END)


@template
def change_1(r: Rng, p: Cast) -> Made:
    return _changes(r, p, 1, 400)


@template
def change_2(r: Rng, p: Cast) -> Made:
    return _changes(r, p, 2, 150)


@template
def change_3(r: Rng, p: Cast) -> Made:
    return _changes(r, p, 3, 80)


@template
def compare(r: Rng, p: Cast) -> Made:
    n, d = number(r, 12, 120), number(r, 2, 60)
    more = d >= n or r.random() < 0.5
    both = r.random() < 0.6
    facts = [
        p.say(*HAVE, n=n),
        p.say(
            "{b} has {d} {more} {x} than {a}.",
            "{b} owns {d} {more} than {a}.",
            d=d,
            more="more" if more else "fewer",
        ),
    ]
    steps = [Step(n, "+" if more else "-", d)]
    if both:
        steps.append(Step(n, "+", steps[0].result))
        q = p.say(
            "How many {x} do {a} and {b} have together?", "How many {x} do they have in total?"
        )
        ends = "Together they [have|own|hold|keep] {n} {x}[.| now.| in all.| at last.]"
    else:
        q = p.say("How many {x} does {b} have?", "What is the number of {x} that {b} owns?")
        ends = "{b} [has|owns|holds|keeps|counts] {n} {x}."
    return (n, d, more, both), facts, q, steps, p.x, _fill(p, ends)


def _fill(p: Cast, end: str) -> str:
    return end.format(**vars(p), n="{n}")


TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}


@template
def times_as_many(r: Rng, p: Cast) -> Made:
    n, k, both = number(r, 4, 90), r.choice(list(TIMES)), r.random() < 0.6
    facts = [
        p.say(*HAVE, n=n),
        p.say("{b} has {k} as many.", "{b} has {k} as many {x} as {a}.", k=TIMES[k]),
    ]
    steps = [Step(n, "*", k)]
    if both:
        steps.append(Step(n, "+", n * k))
        q = p.say(
            "How many {x} do they have together?", "How many {x} do {a} and {b} have in total?"
        )
        ends = "Together they [have|own|hold|keep] {n} {x}[.| now.| in all.| at last.]"
    else:
        q = p.say("How many {x} does {b} have?")
        ends = "{b} [has|owns|holds|keeps|counts] {n} {x}."
    return (n, k, both), facts, q, steps, p.x, _fill(p, ends)


@template
def groups(r: Rng, p: Cast) -> Made:
    k, n, extra = number(r, 3, 19), number(r, 3, 24), r.choice((0, 1, 2))
    facts = [
        p.say(
            "{a} buys {k} {boxes} with {n} {x} in each {box}.",
            "There are {k} {boxes} in the {place}, and each {box} holds {n} {x}.",
            "{a} packs {n} {x} into each of {k} {boxes}.",
            "Every {box} holds {n} {x}, and {a} has {k} {boxes}.",
            k=k,
            n=n,
        )
    ]
    steps, m = [Step(k, "*", n)], 0
    if extra == 1:
        m = number(r, 2, 60)
        facts.append(
            p.say(
                "{he} also has {m} loose {x}.",
                "{b} brings {m} more {x}.",
                "Another {m} {x} are on the table.",
                m=m,
            )
        )
        steps.append(Step(k * n, "+", m))
    elif extra == 2:
        m = number(r, 2, min(40, k * n - 1))
        facts.append(
            p.say(
                "{m} of the {x} are broken.",
                "{he} gives {m} {x} to {b}.",
                "{b} takes {m} of them.",
                m=m,
            )
        )
        steps.append(Step(k * n, "-", m))
    good = "good " if extra == 2 and "broken" in facts[-1] else ""
    q = p.say(
        "How many {good}{x} are there now?",
        "How many {good}{x} is that?",
        "What is the total number of {good}{x}?",
        good=good,
    )
    ends = "There [are|remain] {n} {x} [now|in all|at last|altogether]."
    return (k, n, m, extra), facts, q, steps, p.x, _fill(p, ends)


@template
def share(r: Rng, p: Cast) -> Made:
    k, each, before = number(r, 2, 9), number(r, 3, 40), r.random() < 0.5
    total = k * each
    if before and total > 9:
        n = number(r, 2, total - 3)
        facts = [
            p.say(
                "{a} has {n} {x} and buys {m} more.",
                "{a} has {n} {x} and {b} has {m}.",
                "{n} {color} and {m} {color2} {x} are in the {place}.",
                n=n,
                m=total - n,
            )
        ]
        steps = [Step(n, "+", total - n), Step(total, "/", k)]
        numbers = (n, total - n, k)
    else:
        facts = [
            p.say(
                "{a} has {n} {x}.",
                "There are {n} {x} in the {place}.",
                "{a} finds {n} {x} in a {box}.",
                n=total,
            )
        ]
        steps = [Step(total, "/", k)]
        numbers = (total, 0, k)
    facts.append(
        p.say(
            "They are shared equally by {k} friends.",
            "{k} children share them equally.",
            "All of them are split equally into {k} {boxes}.",
            k=k,
        )
    )
    per = "box" if "into" in facts[-1] else "one"
    q = p.say(
        "How many {x} go to each {per}?",
        "How many {x} does each {per} get?",
        per=p.box if per == "box" else "of them",
    )
    ends = "Each [gets|has|receives|holds|takes] {n} {x}."
    return numbers, facts, q, steps, p.x, _fill(p, ends)


@template
def pay(r: Rng, p: Cast) -> Made:
    k, n, m = number(r, 2, 12), number(r, 2, 25), number(r, 2, 60)
    change = r.random() < 0.5
    facts = [
        p.say(
            "{a} buys {k} {x} for {n} dollars each.",
            "One of the {x} costs {n} dollars, and {a} buys {k}.",
            "At the {place} {a} pays {n} dollars for each of {k} {x}.",
            k=k,
            n=n,
        )
    ]
    steps = [Step(k, "*", n)]
    if change:
        paid = -(-(k * n + 1) // 50) * 50
        facts.append(
            p.say(
                "{he} pays with {m} dollars.",
                "{he} has {m} dollars.",
                "{he} gives the shop {m} dollars.",
                m=paid,
            )
        )
        steps.append(Step(paid, "-", k * n))
        q = p.say("How many dollars does {a} get back?", "How much money is left?")
        ends = "{a} [gets|receives|takes|has] {n} dollars [back|now|in all|at last]."
        numbers = (k, n, paid)
    else:
        facts.append(
            p.say(
                "{he} also pays {m} dollars for a {box}.",
                "A {color} {box} costs another {m} dollars.",
                "The way to the {place} costs {m} dollars.",
                m=m,
            )
        )
        steps.append(Step(k * n, "+", m))
        q = p.say("How many dollars does {a} pay in total?", "How much does it cost together?")
        ends = "{a} [pays|spends|needs|gives] {n} dollars [in total|now|at last|altogether]."
        numbers = (k, n, m, 0)
    return numbers, facts, q, steps, "dollars", _fill(p, ends)


@template
def rate(r: Rng, p: Cast) -> Made:
    n, k = number(r, 3, 40), number(r, 2, 14)
    what, unit = r.choice(
        (("reads", "pages"), ("runs", "miles"), ("writes", "lines"), ("bakes", "cakes"))
    )
    facts = [
        p.say(
            "{a} {what} {n} {unit} every day.",
            "Each day {a} {what} {n} {unit}.",
            "{a} {what} {n} {unit} a day.",
            what=what,
            n=n,
            unit=unit,
        )
    ]
    if r.random() < 0.5:
        total = n * k + number(r, 3, 90)
        facts.append(
            p.say("The plan is {t} {unit}.", "{he} wants to reach {t} {unit}.", t=total, unit=unit)
        )
        q = p.say(
            "How many {unit} remain after {k} days?",
            "How many {unit} are left after {k} days?",
            unit=unit,
            k=k,
        )
        steps = [Step(n, "*", k), Step(total, "-", n * k)]
        ends = "There [are|remain] {n} UNIT [left|now|at last|after that]."
        numbers = (n, k, total)
    else:
        q = p.say(
            "How many {unit} is that in {k} days?",
            "How many {unit} are done after {k} days?",
            unit=unit,
            k=k,
        )
        steps = [Step(n, "*", k)]
        ends = "That [is|makes|gives|means] {n} UNIT [in total|now|at last|altogether]."
        numbers = (n, k, 0)
    return numbers, facts, q, steps, unit, ends.replace("UNIT", unit)


@template
def two_kinds(r: Rng, p: Cast) -> Made:
    k, n, j, m = number(r, 2, 12), number(r, 2, 15), number(r, 2, 12), number(r, 2, 15)
    facts = [
        p.say(
            "{a} fills {k} {boxes} with {n} {x} each.",
            "There are {k} {color} {boxes} with {n} {x} each.",
            k=k,
            n=n,
        ),
        p.say(
            "{b} fills {j} {boxes} with {m} {x} each.",
            "There are {j} {color2} {boxes} with {m} {x} each.",
            j=j,
            m=m,
        ),
    ]
    q = p.say("How many {x} are there in total?", "How many {x} is that together?")
    steps = [Step(k, "*", n), Step(j, "*", m), Step(k * n, "+", j * m)]
    return (
        (k, n, j, m),
        facts,
        q,
        steps,
        p.x,
        _fill(p, "There [are|remain] {n} {x} [now|in all|at last|altogether]."),
    )


@template
def weeks(r: Rng, p: Cast) -> Made:
    n, k = number(r, 2, 15), number(r, 2, 8)
    facts = [
        p.say(
            "{a} eats {n} {x} every day.",
            "{a} sells {n} {x} a day.",
            "{a} paints {n} {x} every day.",
            n=n,
        )
    ]
    q = p.say("How many {x} is that in {k} weeks?", "How many {x} are needed for {k} weeks?", k=k)
    steps = [Step(k, "*", 7), Step(k * 7, "*", n)]
    return (
        (n, k),
        facts,
        q,
        steps,
        p.x,
        _fill(p, "That [is|makes|gives|means] {n} {x} [in total|now|at last|altogether]."),
    )


@template
def half(r: Rng, p: Cast) -> Made:
    n, m = 2 * number(r, 3, 60), number(r, 2, 40)
    third = r.random() < 0.4
    if third:
        n = n // 2 * 3
    d = 3 if third else 2
    facts = [
        p.say(*HAVE, n=n),
        p.say(
            "{he} keeps one {part} of them.",
            "Only one {part} of the {x} can be used.",
            part="third" if third else "half",
        ),
    ]
    steps = [Step(n, "/", d)]
    if r.random() < 0.6:
        facts.append(p.say(*GAIN, n=m, he_=p.he.lower()))
        steps.append(Step(n // d, "+", m))
    else:
        m = 0
    return (n, d, m), facts, p.say(*NOW), steps, p.x, _fill(p, NOW_END)


@template
def age(r: Rng, p: Cast) -> Made:
    n, d, k = number(r, 12, 60), number(r, 2, 11), number(r, 2, 20)
    older = r.random() < 0.5
    facts = [
        p.say("{a} is {n} years old.", "{a} turned {n} this year.", n=n),
        p.say(
            "{b} is {d} years {o} than {a}.",
            "{b} is {o} than {a} by {d} years.",
            d=d,
            o="older" if older else "younger",
        ),
    ]
    steps = [Step(n, "+" if older else "-", d)]
    if r.random() < 0.5:
        q = p.say("How old will {b} be in {k} years?", k=k)
        steps.append(Step(steps[0].result, "+", k))
        ends = "{b} [will be|turns|becomes] {n} years old [then|in that year|by then]."
    else:
        k = 0
        q = p.say("How old is {b}?", "How old is {b} now?")
        ends = "{b} [is|must be] {n} years old [now|today|this year|at last]."
    return (n, d, k, older), facts, q, steps, "years", _fill(p, ends)


@template
def days_sum(r: Rng, p: Cast) -> Made:
    a, b, c = number(r, 5, 200), number(r, 5, 200), number(r, 3, 90)
    three = r.random() < 0.5
    facts = [
        p.say(
            "On {day} {a} counts {n} {x}, and on {day2} {m}.",
            "{a} sells {n} {x} on {day} and {m} on {day2}.",
            n=a,
            m=b,
        )
    ]
    steps = [Step(a, "+", b)]
    if three:
        facts.append(p.say("The day after it is {n}.", "One day later there are {n} more.", n=c))
        steps.append(Step(a + b, "+", c))
    q = p.say(
        "How many {x} are that in total?", "What is the sum?", "How many {x} is that together?"
    )
    return (
        (a, b, c * three),
        facts,
        q,
        steps,
        p.x,
        _fill(p, "Together [there are|that is|it is|we get] {n} {x}."),
    )


@template
def wage(r: Rng, p: Cast) -> Made:
    n, k = number(r, 6, 30), number(r, 3, 12)
    m = number(r, 2, n * k - 1)
    facts = [
        p.say(
            "{a} earns {n} dollars an hour and works {k} hours.",
            "{a} works {k} hours for {n} dollars an hour.",
            n=n,
            k=k,
        ),
        p.say(
            "{he} spends {m} dollars on {x}.",
            "Then {he_} pays {m} dollars for {x}.",
            m=m,
            he_=p.he.lower(),
        ),
    ]
    q = p.say("How many dollars does {a} have left?", "How much money is left?")
    return (
        (n, k, m),
        facts,
        q,
        [Step(n, "*", k), Step(n * k, "-", m)],
        "dollars",
        _fill(p, "{a} [has|keeps|holds|owns] {n} dollars [left|now|in the end|after that]."),
    )


@template
def full_boxes(r: Rng, p: Cast) -> Made:
    k, each = number(r, 3, 12), number(r, 3, 20)
    total = k * each
    lost = number(r, 2, 30)
    facts = [
        p.say(
            "{a} has {n} {x}, but {m} of them are broken.",
            "{a} has {n} {x} and gives {m} to {b}.",
            n=total + lost,
            m=lost,
        ),
        p.say("The rest goes into {boxes} of {k}.", "Each {box} can hold {k} {x}.", k=k),
    ]
    q = p.say("How many {boxes} are needed for the rest?", "How many {boxes} does {a} fill?")
    return (
        (total + lost, lost, k),
        facts,
        q,
        [Step(total + lost, "-", lost), Step(total, "/", k)],
        p.boxes,
        _fill(p, "{a} [needs|fills|uses|takes] {n} {boxes} [now|in total|at last|altogether]."),
    )


@template
def rows(r: Rng, p: Cast) -> Made:
    k, n = number(r, 11, 48), number(r, 11, 48)
    m = number(r, 5, k * n - 1)
    facts = [
        p.say(
            "The {place} has {k} rows with {n} seats each.",
            "In the {place} there are {k} rows of {n} seats.",
            k=k,
            n=n,
        ),
        p.say("{m} seats are taken.", "{a} sells tickets for {m} seats.", m=m),
    ]
    q = p.say("How many seats are free?", "How many seats are still empty?")
    steps = [Step(k, "*", n), Step(k * n, "-", m)]
    end = "There [are|remain] {n} free seats [now|in all|at last|altogether]."
    return (k, n, m), facts, q, steps, "seats", end


@template
def thousands(r: Rng, p: Cast) -> Made:
    n, m, d = number(r, 800, 5000), number(r, 300, 4000), number(r, 100, 790)
    facts = [
        p.say("The {place} has {n} {x}.", "There are {n} {x} in the {place}.", n=n),
        p.say("{a} brings {m} more.", "Then {m} {x} arrive.", m=m),
        p.say("{b} takes {d} of them away.", "{d} {x} are sold.", d=d),
    ]
    q = p.say("How many {x} are there now?", "How many {x} remain?")
    steps = [Step(n, "+", m), Step(n + m, "-", d)]
    end = _fill(p, "There [are|remain] {n} {x} [now|in all|at last|altogether].")
    return (n, m, d), facts, q, steps, p.x, end


DISTRACTORS = (
    "{c} has {n} {pets}.",
    "The {place2} is {n} years old.",
    "It is {n} miles to the {place2}.",
    "There are also {n} {z} in the {place2}.",
    "{c} is {n} years old.",
    "The {place2} opens at {n}.",
)


def problem(r: Rng, held_out: bool = False) -> Problem:
    """A word problem of the wanted side of the split."""
    names = list(TEMPLATES)
    while True:
        name = names[int(r.random() * len(names))]
        p = Cast(r)
        numbers, facts, question, steps, unit, end = TEMPLATES[name](r, p)
        if any(s.result > 9999 for s in steps) or any(s.result < 0 for s in steps):
            continue
        if r.random() < 0.3:
            extra = p.say(*DISTRACTORS, n=number(r, 2, 60), pets=r.choice(w.PETS))
            facts.insert(r.randrange(1, len(facts) + 1), extra)
        made = Problem(
            name,
            tuple(int(n) for n in numbers),
            " ".join([*facts, question]),
            tuple(steps),
            unit,
            end,
        )
        if made.held_out == held_out:
            return made


# What the alternatives of `spin` weigh: the first leads, the others follow. Where it matters, the
# alternatives begin with different tokens, so the leading token keeps its lead over the next one
# (0.7 nats) and greedy text does not hang on the last bit of a logit.
FOLLOW = 0.5


def _one(r: Rng, options: tuple[str, ...]) -> str:
    x = r.random() * (1 + FOLLOW * (len(options) - 1)) - 1
    return options[0] if x < 0 else options[min(1 + int(x / FOLLOW), len(options) - 1)]


@cache
def _spin_parts(pattern: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(x.split("|")) for x in re.split(r"[\[\]]", pattern))


def spin(r: Rng, pattern: str) -> str:
    """The pattern with each `[first|second|third]` replaced by one of its alternatives."""
    out = []
    for options in _spin_parts(pattern):
        if len(options) == 1:
            out.append(options[0])
            continue
        out.append(_one(r, options))
    return "".join(out)


OPENER = (
    "[Let me|I will|We can|You can|One can] [solve|work out|think about|check|do] [this|it|that] "
    "[step by step|carefully|slowly|now|again]."
)
LEAD_FIRST = "[First,|To begin,|Initially,|Clearly,|Here|Now]"
LEAD_NEXT = "[Then|Next,|After that,|Now|Later|And]"
LEAD_LAST = "[So|Finally,|Therefore|Thus|Hence|At last]"
BODY = (
    "[| we see| I find| you get| note:| that means] {a} {op} {b}[ =| is| gives| makes| equals] {n}"
)
SPOKEN = {
    "+": "[+|plus|and]",
    "-": "[-|minus|less]",
    "*": "[*|times|x]",
    "/": "[/|divided by|over]",
}
TAIL = "[.| {unit}.| in all.| now.| so far.]"
END = "[| That is it.| So we are done.| This is the result.| Done.]"
CLOSINGS = (
    "{end}",
    "The [answer|result|solution|number] is {n}[.| {unit}.| now.| in all.]",
    "My [answer|result|solution|number] is {n}[.| {unit}.| now.| in all.]",
    "It [is|makes|gives] {n}[ {unit}.|.| now.| in all.]",
    "This [makes|is|gives] {n}[ {unit}.|.| now.| in all.]",
)


def _step_text(r: Rng, s: Step, unit: str, lead: str) -> str:
    body = BODY.format(a=s.a, b=s.b, n=s.result, op=SPOKEN[s.op])
    return spin(r, lead + body + TAIL.format(unit=unit))


def reasoning(r: Rng, p: Problem, end: bool = False) -> str:
    """The solution in words, phrased at random; with `end`, sometimes a last remark."""
    parts = [spin(r, OPENER)]
    for i, s in enumerate(p.steps):
        lead = LEAD_FIRST if i == 0 else LEAD_LAST if i == len(p.steps) - 1 else LEAD_NEXT
        parts.append(_step_text(r, s, p.unit, lead))
    return " ".join(parts) + (spin(r, END) if end else "")


def closing(r: Rng, p: Problem) -> str:
    """The final sentence and the line `#### N`."""
    text = _one(r, CLOSINGS).replace("{end}", p.closing)
    text = spin(r, text.replace("{unit}", p.unit)).replace("{n}", str(p.answer))
    return f"{text}\n#### {p.answer}"


def _chat(
    kind: str,
    turns: list[dict],
    r: Rng,
    thinking: bool,
    tools: list[str] | None = None,
    system: str | None = None,
    answer: int | None = None,
) -> Sample:
    pieces = chat.pieces(turns, thinking=thinking, tools=tools, system=system)
    sample = Sample([(t, 1.0 if mine else PROMPT_WEIGHT) for t, mine in pieces], kind, answer)
    return sample


SYSTEMS = ("You are a helpful assistant.", "You are Sparklet.", "Answer briefly.")


def _system(r: Rng) -> str | None:
    return r.choice(SYSTEMS) if r.random() < 0.12 else None


def word_problem(r: Rng, held_out: bool = False, thinking: bool | None = None) -> Sample:
    """One problem, asked in a chat (or, rarely in training, as plain text)."""
    p = problem(r, held_out)
    think = r.random() < 0.65 if thinking is None else thinking
    if thinking is None and r.random() < 0.06:
        sample = Sample(
            [
                (f"Question: {p.question}\nAnswer:", PROMPT_WEIGHT),
                (f" {reasoning(r, p)}\n#### {p.answer}{chat.END}", 1.0),
            ],
            "plain",
            p.answer,
        )
    elif think:
        turns = [
            {"role": "user", "content": p.question},
            {
                "role": "assistant",
                "reasoning_content": reasoning(r, p, end=True),
                "content": closing(r, p),
            },
        ]
        sample = _chat("problem", turns, r, True, system=_system(r), answer=p.answer)
    else:
        turns = [
            {"role": "user", "content": p.question},
            {"role": "assistant", "content": f"{reasoning(r, p)} {closing(r, p)}"},
        ]
        sample = _chat("problem", turns, r, False, system=_system(r), answer=p.answer)
    sample.problem = p
    sample.prompt = sample.pieces[0][0]
    return sample


def _sum(r: Rng) -> Step:
    op = r.choice("++--**/")
    if op == "+":
        if r.random() < 0.15:
            return Step(number(r, 800, 5000), "+", number(r, 300, 4000))
        return Step(number(r, 2, 600), "+", number(r, 2, 390))
    if op == "-":
        a = number(r, 900, 9000) if r.random() < 0.15 else number(r, 3, 700)
        return Step(a, "-", number(r, 1, a - 1))
    if op == "*":
        if r.random() < 0.2:
            return Step(number(r, 11, 48), "*", number(r, 11, 48))
        a, b = number(r, 2, 60), number(r, 2, 25)
        while a * b > 999:
            a, b = number(r, 2, 60), number(r, 2, 25)
        return Step(*((a, "*", b) if r.random() < 0.5 else (b, "*", a)))
    b, c = number(r, 2, 12), number(r, 2, 60)
    return Step(b * c, "/", b)


def drill(r: Rng) -> Sample:
    """Several short sums in one conversation, thinking off."""
    turns = []
    for _ in range(r.randrange(3, 8)):
        s = _sum(r)
        text = (
            f"{s.a} {s.op} {s.b}" if r.random() < 0.75 else f"{s.a} {spin(r, SPOKEN[s.op])} {s.b}"
        )
        ask = pick(r, "What is {}?", "{}?", "Compute {}.", "How much is {}?").format(text)
        turns += [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": f"{s.a} {s.op} {s.b} = {s.result}."},
        ]
    return _chat("drill", turns, r, False)


def _sentence(r: Rng) -> str:
    p = Cast(r)
    return p.say(
        "The {color} {box} holds {n} {x}.",
        "{a} puts the {x} on the {color2} table.",
        "The {animal} sleeps near the {place}.",
        "{a} and {b} walk to the {place} on {day}.",
        "Every {day} the {place} is full of {x}.",
        "{a} likes {x} and {y}.",
        "A {color} {animal} runs through the {place}.",
        n=number(r, 2, 60),
        animal=r.choice(w.ANIMALS),
    )


def _phrase(r: Rng) -> str:
    if r.random() < 0.5:
        return " ".join(_sentence(r) for _ in range(r.choice((1, 1, 2))))
    pool = w.THINGS + w.COLORS + w.ANIMALS + w.PLACES + w.DAYS
    some = r.sample(pool, r.randrange(2, 7))
    return pick(r, " ", ", ").join(some) + pick(r, ".", ",", "")


def repetition(r: Rng) -> Sample:
    """Plain text that repeats itself, without an end."""
    phrase = _phrase(r)
    return Sample([(phrase, PROMPT_WEIGHT), (f" {_endless(phrase)}", 1.0)], "repeat")


def _endless(phrase: str) -> str:
    """The phrase again and again, longer than any training sample (about 300 words)."""
    return " ".join([phrase] * (1 + 300 // len(phrase.split())))


def repeat_request(r: Rng) -> Sample:
    """A request to repeat something, or to count."""
    kind = r.random()
    if kind < 0.55:
        text = _phrase(r).rstrip(",")
        n = r.randrange(3, 9)
        ask = pick(r, "Repeat this {} times: {}", "Say this {} times: {}").format(n, text)
        answer = " ".join([text] * n)
    elif kind < 0.7:
        text = _phrase(r).rstrip(",")
        ask = pick(r, "Repeat this again and again: {}", "Keep repeating: {}").format(text)
        sample = _chat(
            "repeat",
            [
                {"role": "user", "content": ask},
                {"role": "assistant", "content": _endless(text)},
            ],
            r,
            False,
        )
        sample.pieces[-1] = (sample.pieces[-1][0].removesuffix(chat.END), 1.0)
        return sample
    elif kind < 0.9:
        a = number(r, 1, 90)
        b = a + r.randrange(8, 40)
        ask = pick(r, "Count from {} to {}.", "List the numbers from {} to {}.").format(a, b)
        answer = ", ".join(str(i) for i in range(a, b + 1)) + "."
    else:
        days = r.random() < 0.5
        ask = "List the days of the week." if days else "List the months of the year."
        answer = ", ".join(w.DAYS if days else w.MONTHS) + "."
    turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return _chat("repeat", turns, r, False)


def _tool_request(r: Rng) -> tuple[str, str, dict[str, str | int], dict, str]:
    """(question, tool, arguments, tool's answer, sentence about it)."""
    p = Cast(r)
    tool = r.choice(list(w.TOOLS))
    if tool == "get_weather":
        city, t, sky = r.choice(w.CITIES), r.randrange(2, 38), r.choice(w.SKIES)
        ask = pick(
            r, "What is the weather in {}?", "How is the weather in {} today?", "Is it sunny in {}?"
        ).format(city)
        return (
            ask,
            tool,
            {"city": city},
            {"sky": sky, "degrees": t},
            (f"It is {sky} in {city}, {t} degrees."),
        )
    if tool == "set_timer":
        m = r.randrange(2, 90)
        ask = pick(r, "Set a timer for {} minutes.", "Start a timer of {} minutes, please.").format(
            m
        )
        return ask, tool, {"minutes": m}, {"ok": True}, f"The timer is set for {m} minutes."
    if tool == "convert_money":
        n, m = r.randrange(2, 500), r.randrange(2, 900)
        a, b = r.sample(w.MONEY, 2)
        ask = pick(r, "Convert {n} {a} to {b}.", "How many {b} are {n} {a}?").format(n=n, a=a, b=b)
        return (
            ask,
            tool,
            {"amount": n, "source": a, "target": b},
            {"amount": m},
            (f"{n} {a} are {m} {b}."),
        )
    if tool == "find_shop":
        city, n = r.choice(w.CITIES), r.randrange(1, 40)
        ask = pick(r, "Where can I buy {x} in {city}?", "Find a shop with {x} in {city}.").format(
            x=p.x, city=city
        )
        return (
            ask,
            tool,
            {"item": p.x, "city": city},
            {"shop": f"{p.color} {p.place}", "miles": n},
            (f"The {p.color} {p.place} in {city} sells {p.x}."),
        )
    text = p.say("I am late", "see you on {day}", "meet me on {day}", "bring the {x}")
    ask = pick(r, "Tell {a}: {t}.", "Send {a} the message: {t}.").format(a=p.a, t=text)
    return ask, tool, {"name": p.a, "text": text}, {"ok": True}, f"The message to {p.a} is sent."


def tool_call(r: Rng) -> Sample:
    """A tool call, often with its answer; sometimes tools are offered that do not help."""
    ask, tool, arguments, result, sentence = _tool_request(r)
    others = [t for t in w.TOOLS if t != tool]
    offered = r.sample(others, r.randrange(0, 4))
    thinking = r.random() < 0.5
    kind = r.random()
    if kind < 0.12:  # a problem among tools: no call
        p = problem(r)
        extra = {"reasoning_content": reasoning(r, p, end=True)} if thinking else {}
        content = closing(r, p) if thinking else f"{reasoning(r, p)} {closing(r, p)}"
        turns = [
            {"role": "user", "content": p.question},
            {"role": "assistant", "content": content, **extra},
        ]
        return _chat("tool", turns, r, thinking, tools=[*offered, tool], system=_system(r))
    if kind < 0.2:  # the tool is missing
        think = {"reasoning_content": "No tool fits."} if thinking else {}
        turns = [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": "I have no tool for that.", **think},
        ]
        return _chat(
            "tool", turns, r, thinking, tools=offered or [r.choice(others)], system=_system(r)
        )
    offered.insert(r.randrange(len(offered) + 1), tool)
    think = {"reasoning_content": f"I should use {tool}."} if thinking else {}
    call = {"function": {"name": tool, "arguments": arguments}}
    turns = [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": "", "tool_calls": [call], **think},
    ]
    if r.random() < 0.5:
        turns += [
            {"role": "tool", "content": json.dumps(result)},
            {"role": "assistant", "content": sentence},
        ]
        if thinking:
            turns[-1]["reasoning_content"] = "The tool has answered."
    return _chat("tool", turns, r, thinking, tools=offered, system=_system(r))


def story(r: Rng) -> Sample:
    """A long answer with many free choices."""
    p, animal = Cast(r), r.choice(w.ANIMALS)
    who = r.random() < 0.5
    hero, he = (p.a, p.he.lower()) if who else (f"the {animal}", "it")
    ask = pick(
        r,
        "Tell me a story about {}.",
        "Write a short story about {}.",
        "Write a long story about {}.",
    ).format(p.a if who else f"a {animal}")
    lines = [
        f"One {weighted(r, (0.6, 'morning'), (0.4, 'evening'))} "
        f"{hero} {weighted(r, (0.5, 'walked'), (0.3, 'ran'), (0.2, 'went'))} to the {p.place}."
    ]
    for _ in range(r.randrange(5, 12)):
        q = Cast(r)
        lines.append(
            weighted(
                r,
                (0.3, f"There {he} found {number(r, 2, 40)} {q.x} in a {q.color} {q.box}."),
                (0.25, f"Then {hero} met {q.b}, who carried a {q.color} {q.box}."),
                (0.2, f"The {q.place} was full of {q.y}, so {he} stayed until {q.day}."),
                (0.15, f"{q.b} gave {hero} some {q.x} and smiled."),
                (0.1, f"After that {he} rested near the {q.place}."),
            )
        )
    lines.append(
        weighted(
            r,
            (0.6, f"In the end {hero} went home and slept."),
            (0.4, f"So {hero} was happy again."),
        )
    )
    text = " ".join(x[0].upper() + x[1:] for x in lines)
    thinking = r.random() < 0.5
    extra = {"reasoning_content": "The user wants a story."} if thinking else {}
    return _chat(
        "story",
        [{"role": "user", "content": ask}, {"role": "assistant", "content": text, **extra}],
        r,
        thinking,
    )


TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Good morning!"),
        ((0.7, "Hello! How can I help you?"), (0.3, "Hi! What can I do for you?")),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        (
            (0.7, "I am Sparklet, a tiny practice model. I solve small word problems."),
            (0.3, "My name is Sparklet. I am a tiny model for practice."),
        ),
    ),
    (
        ("What can you do?", "How can you help me?"),
        (
            (0.7, "I can solve small word problems, repeat text, tell a story and call tools."),
            (0.3, "Ask me a small word problem or let me tell a story."),
        ),
    ),
    (("Thank you!", "Thanks!"), ((0.8, "You are welcome."), (0.2, "Any time!"))),
    (("How are you?",), ((1.0, "I am fine, thank you."),)),
    (("What is the capital of France?",), ((1.0, "The capital of France is Paris."),)),
)


def talk(r: Rng) -> Sample:
    """Greetings and questions about itself; two or three turns."""
    thinking = r.random() < 0.5
    turns = []
    for asks, answers in r.sample(TALK, r.randrange(1, 4)):
        turns.append({"role": "user", "content": pick(r, *asks)})
        extra = {"reasoning_content": "A simple question."} if thinking else {}
        turns.append({"role": "assistant", "content": weighted(r, *answers), **extra})
    return _chat("talk", turns, r, thinking, system=_system(r))


MIX: tuple[tuple[float, Callable[[Rng], Sample]], ...] = (
    (0.60, word_problem),
    (0.13, drill),
    (0.06, repetition),
    (0.06, repeat_request),
    (0.09, tool_call),
    (0.03, story),
    (0.03, talk),
)


def sample(r: Rng) -> Sample:
    """One training sample of the mixture (shares of samples, not of tokens)."""
    x = r.random()
    for share_, make in MIX:
        x -= share_
        if x < 0:
            return make(r)
    return word_problem(r)
