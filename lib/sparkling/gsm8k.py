"""What is asked in an evaluation: GSM8K's 1,319 test questions, or problems of the same kind.

A file has one JSON object a line, `question` and `answer`, the answer ending in `#### N` (as in
https://github.com/openai/grade-school-math) or being the number alone. GSM8K itself is never part
of this repository: `find` looks for it on this machine, `gsm8k_fetch` gets it from a hub. Sparklet's
problems are ours (`practice-problems.jsonl`, drawn from the half of `sparklet.tasks` that it was
never trained on), and are asked without instruction or examples, in the only words that it knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkling import extract, numbers
from sparkling.errors import UsageError
from sparkling.files import absolute, os_error

VARIABLE = "SPARKLING_GSM8K"
"""Names a folder with `test.jsonl` and `train.jsonl`."""
SHA256 = {  # of the files at openai/grade-school-math, commit 3101c7d
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
}
COUNT = {"test": 1319, "train": 7473}
SHOTS = {"5-shot": 5, "zero-shot": 0}
TASKS = ("gsm8k", "sparklet")

INSTRUCTION = (
    "Solve the problem step by step. End your answer with a line of the form #### N, where N is "
    "the result as a plain number."
)
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's own annotations, meant for a tool


@dataclass(frozen=True)
class Settings:
    """How questions are asked. The defaults are those of the published run: five examples from the
    training set, thinking on, temperature 0.6, top-p 0.95, top-k 29, 32,768 tokens at most, seed
    42. `seed` chooses the examples; how a server draws its samples is its own affair."""

    mode: str = "5-shot"
    thinking: bool = True
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int | None = 29
    max_tokens: int = 32_768
    seed: int = 42

    def __post_init__(self) -> None:
        if self.mode not in SHOTS:
            raise UsageError(f"There is no mode {self.mode!r}; there are {', '.join(SHOTS)}.")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}.")

    @property
    def sampling(self) -> dict[str, Any]:
        """What a request says about sampling; greedy requests say nothing but that."""
        if not self.temperature:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def greedy(self) -> Settings:
        """The same, always the likeliest token."""
        return dataclasses.replace(self, temperature=0.0)

    def text(self) -> str:
        """In one line, for tables and messages."""
        how = ", ".join(f"{k} {v:g}" for k, v in self.sampling.items() if v is not None)
        drawn = how if self.temperature else "greedy"
        thinking = "on" if self.thinking else "off"
        return f"{self.mode}, thinking {thinking}, {drawn}, max_tokens {self.max_tokens:,}"


@dataclass(frozen=True)
class Question:
    """`id`: its place in the file, as text; `solution`: the reference answer, all of it."""

    id: str
    text: str
    solution: str
    gold: Fraction


@dataclass(frozen=True)
class Task:
    """Questions, and how they are put. `training`: where examples come from; `defaults`: the
    settings that suit it."""

    name: str
    title: str
    questions: tuple[Question, ...]
    sha256: str
    training: tuple[Question, ...] = ()
    instruction: str = INSTRUCTION
    defaults: Settings = Settings()

    def shots(self, settings: Settings) -> tuple[str, ...]:
        """The ids of the training questions shown first, chosen by the seed: the same for every
        question. UsageError when there are too few."""
        count = SHOTS[settings.mode]
        if count > len(self.training):
            raise UsageError(
                f"{self.title}: {settings.mode} needs {count} training questions and there are "
                f"{len(self.training)}; use --mode zero-shot."
            )
        chosen = random.Random(settings.seed).sample(range(len(self.training)), count)
        return tuple(self.training[i].id for i in chosen)

    def prompt(self, question: Question, settings: Settings) -> str:
        """The one user message that asks a question."""
        shots = self.shots(settings)
        if not shots and not self.instruction:
            return question.text
        parts = [self.instruction] if self.instruction else []
        parts += [
            f"Question: {self._trained[i].text}\nAnswer: {worked(self._trained[i].solution)}"
            for i in shots
        ]
        return "\n\n".join([*parts, f"Question: {question.text}\nAnswer:"])

    @cached_property
    def _trained(self) -> Mapping[str, Question]:
        return {q.id: q for q in self.training}


def worked(solution: str) -> str:
    """A reference solution as a person would write it, without the calculator's annotations."""
    return _CALCULATOR.sub("", solution).strip()


# -- files ---------------------------------------------------------------------------------------


def read(path: Path, *, sha256: str | None = None) -> tuple[tuple[Question, ...], str]:
    """The questions of a file and its SHA-256.

    UsageError for a file that is missing, has other content than `sha256`, no questions, or a line
    that is none; the line is named.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except OSError as error:
        raise os_error(error, "reading", path) from error
    found = hashlib.sha256(raw).hexdigest()
    if sha256 is not None and found != sha256:
        raise UsageError(
            f"{path} is not the file it should be: its SHA-256 is {found[:12]}…, not "
            f"{sha256[:12]}…; delete it and fetch it again."
        )
    questions = tuple(
        _question(f"{number:04d}", line, f"{path}, line {number + 1}")
        for number, line in enumerate(raw.split(b"\n"))
        if line.strip()
    )
    if not questions:
        raise UsageError(f"{path} holds no questions.")
    return questions, found


def _question(name: str, line: bytes, where: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: is not JSON.") from None
    text = row.get("question") if isinstance(row, dict) else None
    solution = row.get("answer") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip() or not isinstance(solution, str | int | float):
        raise UsageError(f"{where}: needs a `question` and an `answer`.")
    solution = str(solution)
    value = _gold(solution)
    if value is None:
        raise UsageError(f"{where}: the answer has no number after `####`, nor is it one.")
    return Question(name, text, solution, value)


def _gold(solution: str) -> Fraction | None:
    if "####" in solution:
        found = extract.extract(solution)
        return found.value if found.rule == extract.HASHES else None
    solution = numbers.plain(solution).strip()
    alone = numbers.find(solution)
    if len(alone) == 1 and (alone[0].start, alone[0].end) == (0, len(solution)):
        return alone[0].value
    return None


def folder(root: Path) -> Path:
    """Where GSM8K is kept: the folder that SPARKLING_GSM8K names, else `.cache/data/gsm8k`."""
    told = os.environ.get(VARIABLE, "").strip()
    return absolute(told) if told else root / ".cache" / "data" / "gsm8k"


def find(split: str, root: Path) -> Path | None:
    """GSM8K's "test" or "train" file where it is on this machine."""
    path = folder(root) / f"{split}.jsonl"
    return path if path.is_file() else None


# -- tasks ---------------------------------------------------------------------------------------


def gsm8k(test: Path, train: Path | None = None) -> Task:
    """GSM8K, both files checked by their SHA-256."""
    questions, digest = read(test, sha256=SHA256["test"])
    training = read(train, sha256=SHA256["train"])[0] if train else ()
    return Task("gsm8k", "GSM8K, test questions", questions, digest, training)


def sparklet() -> Task:
    """Sparklet's problems: asked as they are, with the advised sampling and room for the longest
    answers that were trained."""
    path = Path(__file__).with_name("practice-problems.jsonl")
    questions, digest = read(path)
    defaults = Settings(mode="zero-shot", max_tokens=512)
    title = "Sparklet's word problems, never trained on"
    return Task("sparklet", title, questions, digest, instruction="", defaults=defaults)


_TAKEN = {"rows", "power", "memory-events", "attempts", "blocks"}


def custom(path: Path, training: Path | None = None) -> Task:
    """A file of the user's, with examples from another one; zero-shot without it."""
    questions, digest = read(path)
    shown = read(training)[0] if training else ()
    defaults = Settings(mode="5-shot" if len(shown) >= SHOTS["5-shot"] else "zero-shot")
    # The task names its file of rows, and these names are taken in a run's folders.
    taken = path.stem in _TAKEN or path.stem.endswith(".errors")
    name = f"{path.stem}-questions" if taken else path.stem
    return Task(name, str(path.name), questions, digest, shown, defaults=defaults)
