"""The FP8 head against the BF16 one through running servers, one after the other.

Two Lings do not fit into one Spark, so the stage without the head judges its texts first and its
verdicts are kept (`head-judged.json` of a run); then the stage with the head reads the same tokens.
Each also answers freely, and the first reads everything twice: what differs then is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkling import head_live, workloads
from sparkling.errors import UsageError

if TYPE_CHECKING:
    from sparkling.lane import Lane
    from sparkling.recipe import Launch, Recipe

Say = Callable[[str], None]
SWITCH = "fp8-head"
PLAIN_LOGITS = "bf16-logits"
"""A variant of the recipe under which a BF16 head's logits are BF16, as the FP8 head's are: where it
exists, the arms differ in the head alone."""


@dataclass(frozen=True)
class Compared:
    """The second stage against the first: teacher-forced, the first against itself, free-running."""

    stages: tuple[str, str]
    forced: list[head_live.ForcedAgreement]
    noise: list[head_live.ForcedAgreement]
    free: head_live.FreeRun

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": list(self.stages),
            "forced": [one.to_json() for one in self.forced],
            "noise": [one.to_json() for one in self.noise],
            "free": self.free.to_json(),
        }


def arms(book: Recipe) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    """(stage, variant) without the FP8 head and with it: the stage that turns it on, and its parent.

    Raises UsageError when the recipe's ladder has no such stage.
    """
    for name in book.ladder:
        stage = book.stages[name]
        if stage.switch == SWITCH and stage.parent:
            variant = PLAIN_LOGITS if PLAIN_LOGITS in book.variants else None
            return (stage.parent, variant), (name, None)
    raise UsageError(f"The recipe {book.name} has no stage that turns {SWITCH} on.")


def questions(book: Recipe) -> tuple[str, ...]:
    """What both stages are asked: the workloads' questions, in words that the recipe's model knows."""
    short, long, *_ = workloads.TEXTS[book.texts]
    own = head_live.PROMPTS if book.texts == "general" else ()
    return (*own, *short, *long)


def measure(
    lane: Lane, book: Recipe, *, prompts: Sequence[str] | None = None, say: Say = print
) -> Compared:
    """Start both stages in turn and compare them. Raises ServerError, UsageError, RequestError."""
    from sparkling import server, store

    chosen = arms(book)
    asked = tuple(prompts or questions(book))
    run = store.open_run(
        lane.runs, None, notebook="head", params={"stages": [s for s, _ in chosen]}
    )
    ids: list[list[int]] = []
    judged: list[list[head_live.Forced]] = []
    answers: list[list[list[int]]] = []
    for stage, variant in chosen:
        say(f"Starting {stage}{f' ({variant})' if variant else ''} …")
        launch: Launch = book.render(
            stage, model=lane.model, port=0, variant=variant, cache=lane.cache
        )
        with server.start(
            launch,
            python=lane.server_python,
            log=run.path("logs", f"{stage}.log"),
            deadline_s=book.timeouts.get("ready_s", 300),
            runs=lane.runs,
        ) as running:
            client = running.client()
            first = not ids
            if first:
                ids = head_live.texts(client, asked)
            say(f"{sum(map(len, ids)):,} tokens are read …")
            judged.append(head_live.force(client, ids))
            if first:
                judged.append(head_live.force(client, ids))
            answers.append(head_live.answers(client, asked))
        run.save("head-judged", [[vars(one) for one in texts] for texts in judged])
    before, again, after = judged
    found = Compared(
        (chosen[0][0], chosen[1][0]),
        head_live.compare_forced(before, after),
        head_live.compare_forced(before, again),
        head_live.compare_answers(*answers, max_tokens=head_live.FREE_TOKENS),
    )
    run.save("head", found.to_json())
    return found
