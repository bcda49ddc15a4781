"""`sparkling eval` and `sparkling extract`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkling.errors import UsageError

if TYPE_CHECKING:
    from sparkling import gsm8k
    from sparkling.tally import Tally


def _extract(args: argparse.Namespace) -> int:
    from pathlib import Path

    from sparkling import extract
    from sparkling.files import os_error

    path = Path(args.file)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except OSError as error:
        raise os_error(error, "reading", path) from error
    found: list[dict[str, Any]] = []
    bad: list[str] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            bad.append(f"line {number} is not JSON")
            continue
        if not isinstance(row, dict) or "text" not in row:
            bad.append(f"line {number} has no `text`")
        elif not isinstance(row["text"], str | list | None):
            bad.append(f"line {number} has a `text` that is none")
        else:
            answer = extract.extract(extract.text_of(row["text"]))
            found.append({"line": number, **answer.to_json()})
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        for one in found:
            notes = f"  ({'; '.join(one['notes'])})" if one["notes"] else ""
            print(f"{one['line']}\t{one['answer'] or '-'}\t{one['rule']}{notes}")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise UsageError(f"{path}: {', '.join(bad[:5])}{more}; each line needs a `text`.")
    return 0


# -- eval ----------------------------------------------------------------------------------------


def _eval(args: argparse.Namespace) -> int:
    if args.url and args.stage:
        raise UsageError("Give stages to start or the --url of a server that runs, not both.")
    if args.resume and not args.run:
        args.run = _newest()
    from sparkling import cli, evaluation

    where = cli._lane(args)
    book = cli._book(where)
    task = evaluation.task_of(
        where,
        book,
        args.problems,
        data=args.data or "",
        training=args.training or "",
        shots=args.mode != "zero-shot",
        say=cli._say,
    )
    settings = evaluation.settings_of(
        task,
        mode=args.mode,
        greedy=args.greedy,
        thinking={"on": True, "off": False, None: None}[args.thinking],
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    options = {
        "limit": args.limit,
        "concurrency": args.concurrency,
        "stall_s": args.stall,
        "truncated_limit": args.allow_truncated / 100,
    }
    cli._say(
        f"{task.title}: {options['limit'] or len(task.questions):,} questions, {settings.text()}"
    )
    tallies = (_of_url if args.url else _of_stages)(args, task, settings, options)
    if args.json:
        cli._print_json([t.to_json() for t in tallies])
    else:
        cli._say(str(evaluation.view(tallies, task, settings)))
    return 0


def _of_stages(
    args: argparse.Namespace,
    task: gsm8k.Task,
    settings: gsm8k.Settings,
    options: dict[str, Any],
) -> list[Tally]:
    """Start, prove, evaluate, prove and stop each stage."""
    import contextlib

    from sparkling import cli, evaluate, evaluation, show_compare
    from sparkling.compare import within

    session = cli._session(args, "eval", args.stage)
    stages = args.stage or [session.recipe.ladder[0], session.recipe.ladder[-1]]
    cli._say(f"run: {session.run.id} (continue it with --run {session.run.id})")
    tallies = []
    with cli._ends_on_sigterm(), contextlib.closing(cli._Stopping(session)):
        for stage in stages:
            arm = f"{stage}-{args.variant}" if args.variant else stage
            if args.retry_errors:
                again = evaluate.retry_errors(evaluation.rows_of(session.run, arm, task))
                cli._say(f"{arm}: {again} failed questions will be asked again")
            cli._say(str(session.start(stage, variant=args.variant)))
            session.prove()
            running = session._running("evaluate")
            tallies.append(evaluation.of_session(session, running, task, settings, **options))
            session.stop()
    if len(tallies) > 1 and not args.json:
        for found in within(_sides(session.run.dir)):
            cli._say(str(show_compare.comparison(found)))
    return tallies


def _sides(folder: Any) -> Any:
    from sparkling import compare_sides

    return compare_sides.sides(str(folder), folder.parent)


def _of_url(
    args: argparse.Namespace,
    task: gsm8k.Task,
    settings: gsm8k.Settings,
    options: dict[str, Any],
) -> list[Tally]:
    """A server that somebody else started: evaluated as it is, and nothing about it is proved."""
    import os

    from sparkling import cli, evaluate, evaluation, lane, store
    from sparkling.client import Client

    arm = args.arm or "served"
    if arm.startswith(".") or not set(arm).isdisjoint("/\\:"):
        raise UsageError(
            f"--arm {arm!r} names a folder of the run; leave out / \\ : and a first dot."
        )
    key = os.environ.get("SPARKLING_API_KEY") or None
    with Client(args.url, api_key=key) as client:
        facts = {"model": client.model}  # before the run: a dead server must not leave an empty one
        run = store.open_run(
            lane.runs_folder(), args.run or None, notebook="eval", secrets=[key or ""]
        )
        cli._say(f"run: {run.id} (continue it with --run {run.id})")
        cli._say(
            "Not started here, so nothing is proved of this server; its answers are graded as is."
        )
        out = evaluation.rows_of(run, arm, task)
        if args.retry_errors:
            again = evaluate.retry_errors(out)
            cli._say(f"{arm}: {again} failed questions will be asked again")
        tally = evaluation.watched(
            f"Evaluating {arm}", client, task, settings, arm=arm, out=out, facts=facts, **options
        )
    run.update({"evaluations": {arm: {"task": task.name, **tally.to_json()}}})
    run.finish("done")
    return [tally]


def _newest() -> str:
    from sparkling import lane, store

    found = store.latest(lane.runs_folder(), holding=("eval",))
    if found is None or not (found.dir / "eval").is_dir():
        raise UsageError("There is no evaluation to resume; leave out --resume.")
    return found.id


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "whole number from 1 on"


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise ValueError
    return value


_share.__name__ = "number of per cent"


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands of this module."""
    from sparkling import cli

    p = command("eval", _eval, "ask graded questions of stages, each proved before and after")
    p.add_argument("stage", metavar="STAGE", nargs="*", help="default: the ladder's first and last")
    cli._lane_options(p)
    p.add_argument("--variant", help="a variant of the recipe, laid over every stage")
    p.add_argument("--url", help="a server that runs already, instead of stages")
    p.add_argument("--arm", help="what to call the server at --url (default: served)")
    p.add_argument("--run", metavar="RUN", help="go on with this run, or call a new one so")
    p.add_argument("--resume", action="store_true", help="continue the newest evaluation")
    p.add_argument(
        "--retry-errors", action="store_true", help="ask the questions that failed once more"
    )
    p.add_argument(
        "--problems",
        default="auto",
        metavar="NAME",
        help="gsm8k, sparklet, or auto for what suits the recipe",
    )
    p.add_argument("--data", metavar="FILE", help="questions of your own (JSONL: question, answer)")
    p.add_argument("--training", metavar="FILE", help="where examples for --data come from")
    p.add_argument("--limit", type=_positive, metavar="N", help="only the first N questions (all)")
    p.add_argument("--mode", choices=("5-shot", "zero-shot"), help="default: 5-shot for GSM8K")
    p.add_argument("--greedy", action="store_true", help="the likeliest token, no sampling")
    p.add_argument("--thinking", choices=("on", "off"), help="default: on")
    p.add_argument("--max-tokens", type=_positive, metavar="N", help="default: 32768 for GSM8K")
    p.add_argument("--seed", type=int, help="chooses the examples (42)")
    p.add_argument(
        "--concurrency", type=_positive, default=1, metavar="N", help="requests at once (1)"
    )
    p.add_argument(
        "--stall",
        type=cli._seconds,
        default=120.0,
        metavar="SECONDS",
        help="the longest silence (120)",
    )
    p.add_argument(
        "--allow-truncated",
        type=_share,
        default=5.0,
        metavar="PERCENT",
        help="how many cut answers to bear (5)",
    )
    p.add_argument("--json", action="store_true", help="the sums as JSON, at the end")
    p.epilog = "An API key for --url is read from SPARKLING_API_KEY."

    p = command("extract", _extract, "find the answer in each text of a file, and name the rule")
    p.add_argument("file", metavar="FILE", help="JSONL; each line has `text`")
    p.add_argument("--json", action="store_true")


__all__ = ["register"]
