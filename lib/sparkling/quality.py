"""Sparklet's quality figures, through real servers: what `sparkling sparklet-quality` prints.

Two servers, one after the other: the last stage of the ladder answers (word problems sampled as
Ling advises, repetitive text, tool calls), then the baseline reads the same answers, and at each of
their tokens the likeliest next token of the FP8 head is compared with the BF16 head's.

The goals are those of the model's design; the problems are ones that it was never trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling.errors import SparklingError
from sparkling.files import read_json
from sparkling.metrics import accept_interval
from sparkling.reply import Reply
from sparkling.stats import Interval, bootstrap_ratio_of_sums, wilson

ADVISED = {"temperature": 0.6, "top_p": 0.95, "top_k": 29}
ANSWER, COPY, CALL = 160, 128, 80
"""Most tokens of an answer to a problem, of repetitive text and of a tool call."""

AT_ONCE = 4  # as many as the recipe lets run
RECORDED = Path("tests/data/sparklet/measured-seed-1.json")

Say = Callable[[str], Any]


@dataclass(frozen=True)
class Figure:
    """One figure with its goal. `n` counts what `unit` names; `where` says how it was got."""

    name: str
    interval: Interval
    n: int
    unit: str
    low: float
    high: float
    percent: bool = False
    where: str = "measured now"

    @property
    def meets(self) -> bool:
        """Whether the value lies within its goal."""
        return self.low <= self.interval.value <= self.high

    def row(self) -> dict[str, str]:
        """As a row of a table."""
        form = (lambda x: f"{100 * x:.1f} %") if self.percent else (lambda x: f"{x:.2f}")
        if self.percent and self.low > 0.9:
            form = lambda x: f"{100 * x:.2f} %"  # noqa: E731
        i = self.interval
        return {
            "figure": self.name,
            "value": form(i.value),
            "95 % interval": "unknown: too few"
            if i.low is None or i.high is None
            else f"{form(i.low)} to {form(i.high)}",
            "n": f"{self.n:,} {self.unit}",
            "goal": f"{form(self.low)} to {form(self.high)}",
            "": "ok" if self.meets else "OUT",
            "from": self.where,
        }


def _all(ask: Callable[[Any], Reply], items: Sequence[Any]) -> list[Reply]:
    """Every answer, in order, AT_ONCE at a time. Raises RequestError for one that is not whole."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [reply.require() for reply in pool.map(ask, items)]


def answers(client: Any, n: int, seed: int, say: Say = print) -> tuple[list[Figure], list[Reply]]:
    """The figures of one server with speculation, and the sampled answers they come from."""
    from sparklet import questions

    asked = questions.problems(n, seed)
    say(f"{n} word problems, sampled …")
    sampled = _all(
        lambda p: client.generate(p[0], max_tokens=ANSWER, stream=False, **ADVISED), asked
    )
    right = sum(
        questions.extract(reply.text) == p.answer
        for reply, (_, p, _) in zip(sampled, asked, strict=True)
    )
    copies = questions.repetitive(max(8, n // 8), seed)
    say(f"{len(copies)} repetitive texts, greedy …")
    repeated = _all(lambda p: client.generate(p, max_tokens=COPY, stream=False), copies)
    calls = questions.tool_requests(max(8, n // 4), seed)
    say(f"{len(calls)} tool calls, greedy …")
    called = _all(lambda p: client.generate(p[0], max_tokens=CALL, stream=False), calls)
    exact = sum(want in reply.text for reply, (_, want) in zip(called, calls, strict=True))
    return [
        Figure(
            "accuracy, temperature 0.6, top-p 0.95, top-k 29",
            wilson(right, n), n, "problems", 0.60, 0.98, True,
        ),
        _accept("accept length, sampled problems", sampled, 2.2, 3.4),
        _accept("accept length, repetitive text, greedy", repeated, 3.5, 4.0),
        Figure(
            "tool calls exactly right, greedy",
            wilson(exact, len(calls)), len(calls), "calls", 0.9, 1.0, True,
        ),
    ], sampled  # fmt: skip


def _accept(name: str, replies: Sequence[Reply], low: float, high: float) -> Figure:
    found = accept_interval(replies)
    if found is None:
        raise SparklingError(f"{name}: the server counted no rounds, so it does not speculate.")
    rounds = sum(reply.spec.rounds for reply in replies if reply.spec)
    return Figure(name, found, rounds, "rounds", low, high)


def top_tokens(client: Any, prompts: Sequence[str], texts: Sequence[Sequence[int]]) -> list[Any]:
    """For each text the likeliest token at each of its positions, read by teacher forcing.

    prompts: what stood before each answer; texts: the answers' token ids. Returns per text a list as
    long as the answer: what the server's head ranks first where that token stands.
    """

    def ask(pair: tuple[str, Sequence[int]]) -> list[int]:
        prompt, ids = pair
        begin = client.generate(prompt, max_tokens=1, stream=False).require().prompt_tokens
        whole = [*_ids(client, prompt), *ids]
        if begin is None or len(whole) - len(ids) != begin:
            raise SparklingError("The server counts the prompt's tokens in another way than we do.")
        extra = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": begin - 1}
        reply = client.generate(input_ids=whole, max_tokens=1, stream=False, extra=extra)
        top = (reply.require().meta_info or {}).get("input_top_logprobs") or []
        found = [entry[0][1] for entry in top if entry]
        return found[-len(ids) :]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, zip(prompts, texts, strict=True)))


def _ids(client: Any, text: str) -> list[int]:
    from tokenizers import Tokenizer

    path = Path(client.model_info()["model_path"]) / "tokenizer.json"
    return Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids


def agreement(fp8: Sequence[Sequence[int]], bf16: Sequence[Sequence[int]]) -> Figure:
    """How often both heads rank the same token first; the interval resamples answers."""
    same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(fp8, bf16, strict=True)]
    count = [len(x) for x in fp8]
    return Figure(
        "FP8 head (per row), same top token as BF16",
        bootstrap_ratio_of_sums(same, count),
        sum(count), "positions", 0.97, 0.99999, True,
    )  # fmt: skip


def recorded(root: Path) -> list[Figure]:
    """What cannot be had from the shipped files: the same weights before they were rounded.

    Their state is not in the repository; both were measured offline when the model was made.
    """
    path = root / RECORDED
    if not path.is_file():
        return []
    found = read_json(path)
    stored, plain = (found[key]["sampled"] for key in ("stored", "bf16"))
    a, b = (wilson(x["right"], x["n"]) for x in (stored, plain))
    # Newcombe's hybrid score interval of a difference of two proportions (1998, method 10).
    low = a.value - b.value - ((a.value - a.low) ** 2 + (b.high - b.value) ** 2) ** 0.5
    high = a.value - b.value + ((a.high - a.value) ** 2 + (b.value - b.low) ** 2) ** 0.5
    difference = Interval(a.value - b.value, low, high, stored["n"], "Newcombe", 0.95)
    return [
        Figure(
            "accuracy, stored minus unrounded weights",
            difference, stored["n"], "problems each", -0.02, 0.02, True,
            "recorded",
        )
    ]  # fmt: skip


def measure(
    lane: Any,
    *,
    n: int,
    seed: int,
    stages: tuple[str, str] = ("nextn", "baseline"),
    say: Say = print,
) -> list[Figure]:
    """All figures, with two servers of the recipe `sparklet` started for them. Raises ServerError."""
    from sparklet import questions

    from sparkling import recipe, server, store

    book = recipe.load("sparklet", root=lane.root)
    run = store.open_run(
        lane.runs, None, notebook="sparklet-quality", params={"n": n, "seed": seed}
    )
    prompts = [text for text, _, _ in questions.problems(n, seed)]
    figures: list[Figure] = []
    tops: list[list[Any]] = []
    ids: list[list[int]] = []
    for stage in stages:
        say(f"Starting {stage} …")
        log = run.path("logs", f"{stage}.log")
        launch = book.render(stage, model=book.model, port=0, cache=lane.cache)
        with server.start(
            launch,
            python=lane.server_python,
            log=log,
            deadline_s=book.timeouts.get("ready_s", 300),
            runs=lane.runs,
        ) as running:
            client = running.client()
            if not figures:
                figures, sampled = answers(client, n, seed, say)
                ids = [list(reply.output_ids or ()) for reply in sampled]
            say("Each answer's likeliest tokens …")
            tops.append(top_tokens(client, prompts, ids))
    figures.insert(3, agreement(*tops))
    figures += recorded(lane.root)
    run.save("quality", [figure.row() for figure in figures])
    return figures
