"""Further workloads: office turns, code, tool calls, thinking on and off; measured when named.

The texts are ours and the same for every arm. Conversations with tools are written here to the end,
calls and results included: if an arm's own call were sent back to it, arms would answer different
prompts, and nothing could be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparkling.errors import UsageError
from sparkling.workloads import Prompt, Workload

NAMES = ("business", "code", "tools", "thinking-on", "thinking-off", "gsm8k")


def make(name: str, sizes: Mapping[str, int], texts: str = "general") -> Workload:
    """The workload of that name with these sizes (tokens). `texts` as in `workloads.workloads`; it
    matters to gsm8k only, which asks Sparklet its own kind of problems.

    UsageError for more prompts than there are, or without GSM8K on this machine.
    """
    n, short, long = sizes["prompts"], sizes["short_output"], sizes["long_output"]
    if name == "business":
        return Workload(
            name,
            f"a short turn of office work, an answer of at most {short} tokens, no thinking",
            _take(name, BUSINESS, n),
            short,
            thinking=False,
        )
    if name == "code":
        return Workload(
            name,
            f"a function to write or to mend, at most {long} tokens, no thinking",
            _take(name, CODE, n),
            long,
            thinking=False,
        )
    if name == "tools":
        return Workload(
            name,
            f"both rounds of a tool call, at most {short} tokens a round, no thinking",
            _tool_rounds(n),
            short,
            thinking=False,
            tools=TOOLS,
        )
    if name == "gsm8k":
        return _problems(n, long, texts)
    assert name in ("thinking-on", "thinking-off"), name
    on = name == "thinking-on"
    return Workload(
        name,
        f"questions that need a little thought, {'with' if on else 'without'} thinking, at most {long} "
        f"tokens: the same ones as thinking-{'off' if on else 'on'}",
        _take(name, PUZZLES, n),
        long,
        thinking=on,
    )


def _take(workload: str, texts: Sequence[str], n: int) -> tuple[Prompt, ...]:
    if n > len(texts):
        raise UsageError(f"The workload {workload} has {len(texts)} prompts, not {n}.")
    return tuple(Prompt(f"{i:02d}", text) for i, text in enumerate(texts[:n]))


def _tool_rounds(n: int) -> tuple[Prompt, ...]:
    """Two prompts a question: `NN.call`, which wants a call, and `NN.answer`, which brings the call
    and its result along and wants an answer."""
    if n > len(TOOL_TURNS):
        raise UsageError(f"The workload tools has {len(TOOL_TURNS)} questions, not {n}.")
    made = []
    for i, (question, name, arguments, result) in enumerate(TOOL_TURNS[:n]):
        ask = {"role": "user", "content": question}
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{i:02d}", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
        made += [
            Prompt(f"{i:02d}.call", question, messages=(ask,)),
            Prompt(f"{i:02d}.answer", question, messages=(ask, said, told)),
        ]
    return tuple(made)


def _problems(n: int, most: int, texts: str) -> Workload:
    """Problems as an evaluation asks them, the first n, but greedy and cut at `most` tokens."""
    from sparkling import gsm8k
    from sparkling.lane import find_root

    if texts == "practice":
        task = gsm8k.sparklet()
        settings = task.defaults
    else:
        root = find_root()
        test, train = (gsm8k.find(split, root) for split in ("test", "train"))
        if test is None:
            raise UsageError(
                "The workload gsm8k needs GSM8K's test file, which is not on this machine: run "
                "`sparkling eval` once, which fetches it, or name a folder with test.jsonl in "
                f"{gsm8k.VARIABLE}."
            )
        task = gsm8k.gsm8k(test, train)
        settings = gsm8k.Settings(mode="5-shot" if train else "zero-shot")
    if n > len(task.questions):
        raise UsageError(f"The workload gsm8k has {len(task.questions)} questions, not {n}.")
    chosen = task.questions[:n]
    return Workload(
        "gsm8k",
        f"{task.title}: the first {n}, {settings.mode}, thinking {'on' if settings.thinking else 'off'}, "
        f"greedy, at most {most} tokens",
        tuple(Prompt(str(q.id), task.prompt(q, settings)) for q in chosen),
        most,
        thinking=settings.thinking,
    )


BUSINESS = [
    "Draft a two-sentence reply to a customer whose parcel is three days late. Offer to refund the "
    "delivery fee.",
    "Summarise in one line: the supplier moves the delivery of 400 hinges from the 3rd to the 17th "
    "and asks us to confirm by Friday.",
    "Turn this into a polite reminder: invoice 2217, 1,340 euros, due two weeks ago.",
    "Classify as complaint, question or praise, and answer with that one word only: The new form "
    "forgot my address again.",
    "Extract name, date and amount as JSON: On 4 May Ms Okafor paid 89.50 for the spring course.",
    "Give three subject lines for an email that announces shorter opening hours in August.",
    "Rewrite for a customer without technical words: the nightly sync failed because the token had "
    "expired.",
    "Write an agenda with times for a 30-minute meeting on the new returns process.",
]

CODE = [
    "Write a Python function `merge(a, b)` that merges two sorted lists without using `sorted`, "
    "with type hints, a docstring and three assertions.",
    "This function is wrong for empty input and slow for long input. Mend both and explain:\n\n"
    "def average(xs):\n    total = 0\n    for i in range(len(xs)):\n        total += xs[i]\n"
    "    return total / len(xs)\n",
    "Write a SQL query: for each customer the sum of the orders of the last 90 days, customers "
    "without orders included with 0, highest sum first. Tables: customers(id, name), "
    "orders(id, customer_id, placed_at, total).",
    "Write a POSIX shell script that keeps the seven newest `.tar.gz` files of a folder and deletes "
    "the others, safe for names with spaces.",
    "Translate into idiomatic Rust with error handling:\n\ndef read_numbers(path):\n"
    "    with open(path) as f:\n        return [int(line) for line in f if line.strip()]\n",
    "Write a small LRU cache class in TypeScript with get, set and a capacity, in constant time, and "
    "a test for the eviction order.",
    "Write a C function that reverses the words of a string in place, and say why it is linear.",
    "Write a Python generator that reads a JSON Lines file and yields records, naming the line "
    "number in the exception for a broken line.",
]

PUZZLES = [
    "A clock loses four minutes an hour. It was right at noon. What time is it really when it first "
    "shows six in the evening?",
    "Three switches outside a closed room belong to three lamps inside. How do you find out which "
    "belongs to which if you may enter only once?",
    "A train leaves at 8:40 and arrives at 11:05 after two stops of six minutes each. The line is 190 "
    "km long. What is its average speed while it moves?",
    "In how many ways can five people sit in a row if two of them will not sit side by side?",
    "A shop takes 20 % off and then adds 20 %. What does an item of 75 euros cost at the end?",
    "Which is larger, 2 to the 30th or 10 to the 9th? Decide without multiplying everything out.",
    "A rope around a globe of 1 m radius is lengthened by 1 m and lifted evenly. How high is it above "
    "the surface?",
    "Two dice are thrown. What is the probability that the larger of the two numbers is exactly 4?",
]


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS = (
    _tool("get_weather", "The weather in a city now.", city="string"),
    _tool("find_order", "An order by its number.", number="integer"),
    _tool("convert", "Convert an amount between currencies.", amount="number", to="string"),
)
"""Offered with every prompt of the workload."""

TOOL_TURNS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "What is the weather in Lisbon? One sentence.",
        "get_weather",
        {"city": "Lisbon"},
        {"sky": "clear", "celsius": 24, "wind_kmh": 18},
    ),
    (
        "Where is my order 5521, and when will it arrive?",
        "find_order",
        {"number": 5521},
        {"number": 5521, "state": "shipped", "carrier": "NordPost", "expected": "Thursday"},
    ),
    (
        "How much are 250 euros in Swiss francs?",
        "convert",
        {"amount": 250, "to": "CHF"},
        {"amount": 236.75, "currency": "CHF", "rate": 0.947},
    ),
    (
        "Should I take an umbrella in Bergen today?",
        "get_weather",
        {"city": "Bergen"},
        {"sky": "rain", "celsius": 9, "wind_kmh": 41},
    ),
    (
        "Was order 7040 paid? Answer yes or no, and the amount.",
        "find_order",
        {"number": 7040},
        {"number": 7040, "state": "packed", "paid": True, "total": 64.2},
    ),
    (
        "Convert 1,200 dollars to yen and round to whole yen.",
        "convert",
        {"amount": 1200, "to": "JPY"},
        {"amount": 181440.0, "currency": "JPY", "rate": 151.2},
    ),
]
