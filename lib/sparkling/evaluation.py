"""Evaluating an arm of a run: which questions, where the rows go, proved before and after."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sparkling import (
    bench,
    compare,
    compare_sides,
    evaluate,
    gsm8k,
    plots,
    proof,
    show,
    show_compare,
    stats_paired,
)
from sparkling import published as facts
from sparkling.errors import UsageError
from sparkling.lane import Lane
from sparkling.recipe import Recipe
from sparkling.tally import DEFINITION, Tally
from sparkling.workloads import digest


def task_of(
    lane: Lane,
    recipe: Recipe,
    name: str = "auto",
    *,
    data: str = "",
    training: str = "",
    shots: bool = True,
    say: Any = None,
) -> gsm8k.Task:
    """The questions to ask: a file of the user's, GSM8K (fetched when it is not here), or Sparklet's
    problems, which "auto" takes where the recipe speaks the practice model's language.

    shots: whether examples will be shown, so that the training set is needed. Raises UsageError
    for an unknown name or a file that is none, SparklingError when GSM8K cannot be had.
    """
    if data:
        return gsm8k.custom(Path(data), Path(training) if training else None)
    if name == "auto":
        name = "sparklet" if recipe.texts == "practice" else "gsm8k"
    if name == "sparklet":
        return gsm8k.sparklet()
    if name != "gsm8k":
        raise UsageError(f"There are no questions {name!r}; there are {', '.join(gsm8k.TASKS)}.")
    from sparkling import gsm8k_fetch

    test = gsm8k_fetch.ensure("test", lane.root, say=say)
    return gsm8k.gsm8k(test, gsm8k_fetch.ensure("train", lane.root, say=say) if shots else None)


def settings_of(
    task: gsm8k.Task,
    *,
    mode: str | None = None,
    greedy: bool = False,
    thinking: bool | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> gsm8k.Settings:
    """The task's settings with what was asked for instead. Raises UsageError."""
    given = {"mode": mode, "thinking": thinking, "max_tokens": max_tokens, "seed": seed}
    settings = dataclasses.replace(
        task.defaults, **{k: v for k, v in given.items() if v is not None}
    )
    settings = settings.greedy() if greedy else settings
    task.shots(settings)  # refuse before anything is started
    return settings


def limit_of(recipe: Recipe, given: int | None = None) -> int | None:
    """How many questions: as given, else the recipe's size `questions`, else all (None)."""
    return given or recipe.sizes.get("questions")


def rows_of(run: Any, arm: str, task: gsm8k.Task) -> Path:
    """Where the rows of an arm are: `<run>/<arm>/<task>.jsonl`."""
    return run.shared(arm, f"{task.name}.jsonl")


def facts_of(launch: Any) -> dict[str, Any]:
    """What a row says of the arm that answered."""
    here = bench.machine()
    return {
        "arm_hash": bench.arm_hash(launch),
        "stage": launch.stage,
        "variant": launch.variant,
        "model": launch.served_name,
        "model_id": bench.model_identity(launch),
        "machine_id": digest(here),
    }


def watched(title: str, server: Any, task: Any, settings: Any, **options: Any) -> Tally:
    """`evaluate.evaluate` under a live line `title` that shows the sums; raises what it raises."""
    with show.Live(title) as live:
        tally = evaluate.evaluate(
            server,
            task,
            settings,
            progress=lambda sums, _row: live.update(note=sums.line()),
            **options,
        )
        live.end(tally.line())
    return tally


def of_session(
    session: Any,
    server: Any,
    task: gsm8k.Task,
    settings: gsm8k.Settings,
    *,
    limit: int | None = None,
    **options: Any,
) -> Tally:
    """Evaluate the running arm of a session, then prove once more that it still is that arm.

    The caller has proved it before. Raises what `evaluate.evaluate` raises, and NotLive when the
    proof afterwards fails: then the rows are those of an arm that changed, and the message says so.
    """
    arm = str(session.arm or session.stage)
    tally = watched(
        f"Evaluating {arm} on {task.title}",
        server,
        task,
        settings,
        arm=arm,
        out=rows_of(session.run, arm, task),
        facts=facts_of(server.launch),
        limit=limit,
        **options,
    )
    after = proof.prove(server)
    after.stage = arm
    session.run.save(f"proof-{arm}-after", after)
    after.require()
    session.run.update(
        {"evaluations": {arm: {"task": task.name, "settings": settings.text(), **tally.to_json()}}}
    )
    return tally


def in_notebook(
    session: Any,
    server: Any,
    questions: int = 0,
    *,
    problems: str = "auto",
    concurrency: int = 1,
    **asked: Any,
) -> show.View:
    """`of_session` with the recipe's questions (or so many of them), shown as a table.

    asked: what `settings_of` takes. Raises what `task_of`, `settings_of` and `of_session` raise.
    """
    shots = asked.get("mode") != "zero-shot"
    task = task_of(session.lane, session.recipe, problems, shots=shots)
    settings = settings_of(task, **asked)
    limit = limit_of(session.recipe, questions)
    tally = of_session(session, server, task, settings, limit=limit, concurrency=concurrency)
    return view([tally], task, settings)


def compared(run: Any, *, margin: float | None = None) -> show.View:
    """Every evaluated arm of a run against its baseline (or its first arm), question by question.

    margin: the loss of accuracy that would be borne, in points, for a verdict of non-inferiority.
    """
    found = compare.within(tested_of(run), margin=None if margin is None else margin / 100)
    if not found:
        return show.note("Fewer than two arms of this run have answered the same questions.")
    made = show.View("", "")
    for one in found:
        made += show_compare.comparison(one)
    return made


def times(run: Any, key: str = "e2e_s", label: str = "time of a reply") -> show.View:
    """The whole distribution of one quantity of the evaluated answers, a curve an arm."""
    groups = {s.arm: [row.get(key) for row in s.evaluation] for s in tested_of(run)}
    unit = "s" if key.endswith("_s") else "tokens"
    drawn = plots.ecdf(groups, label=label, unit=unit, title=f"All answers: {label}")
    return drawn or show.note("No arm of this run has answered questions.")


def tested_of(run: Any) -> list[compare_sides.Side]:
    """The arms of a run that have answered questions."""
    try:
        found = compare_sides.sides(str(run.dir), run.dir.parent)
    except UsageError:  # it holds nothing yet
        return []
    return [dataclasses.replace(side, bench=()) for side in found if side.evaluation]


def published(margin: float = 1.0) -> show.View:
    """What the published counts of GSM8K's 1,319 questions say, and what they cannot say."""
    names = ("both_right", "baseline_only", "all_only", "both_wrong")
    figures = [facts.figure(f"gsm8k_{name}") for name in names]
    counts = stats_paired.Counts(*(int(f.value) for f in figures))
    found = stats_paired.paired(counts, margin=margin / 100)
    made = show.note(f"PUBLISHED, not measured here: {facts.source_text(figures[0])}", strong=True)
    for line in found.text("baseline", "all three").split("\n"):
        made += show.note(line)
    return made


def view(tallies: list[Tally], task: gsm8k.Task, settings: gsm8k.Settings) -> show.View:
    """Arms side by side, every number with its n; which rule found the answers; warnings."""
    made = show.table(
        [t.row() for t in tallies],
        title=f"{task.title}: {settings.text()}",
        caption=DEFINITION,
    )
    rules = dict.fromkeys(rule for t in tallies for rule in t.rules)
    made += show.table(
        [{"rule": rule, **{t.arm: t.rules[rule] for t in tallies}} for rule in rules],
        title="The rule that found the answer",
    )
    for t in tallies:
        for warning, count in t.warnings.items():
            made += show.note(f"{t.arm}: {count} × {warning}")
    return made
