"""Commands over what was measured: `stats mcnemar`, `compare`, `export`, `sizing`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from sparkling.errors import UsageError


def _stats_mcnemar(args: argparse.Namespace) -> int:
    from sparkling import stats_paired

    counts = stats_paired.Counts(args.both, args.first_only, args.second_only, args.neither)
    margin = None if args.margin is None else args.margin / 100
    found = stats_paired.paired(counts, margin=margin)
    print(json.dumps(found.to_json(), indent=1) if args.json else found.text())
    return 0


def _compare(args: argparse.Namespace) -> int:
    from sparkling import compare, lane, show_compare

    margin = None if args.margin is None else args.margin / 100
    found = compare.compare(
        args.first,
        args.second,
        lane.runs_folder(),
        switches=args.switch,
        margin=margin,
        root=lane.find_root(),
    )
    if args.json:
        print(json.dumps([c.to_json() for c in found], indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(str(show_compare.comparison(c)) for c in found))
    return 0


def _export(args: argparse.Namespace) -> int:
    import sys

    from sparkling import export, lane
    from sparkling.report_rows import find

    folder = find(args.run, lane.runs_folder())
    sys.stdout.write(export.export(folder, args.format))
    return 0


def _sizing(args: argparse.Namespace) -> int:
    from sparkling import lane, report_rows, sizing, store

    runs = lane.runs_folder()
    if args.run is None:
        newest = store.latest(runs, holding=("*/rows.jsonl", "*/*.jsonl"))
        if newest is None:
            raise UsageError(f"There is no run in {runs}; `sparkling bench` makes one.")
        folder = newest.dir
    else:
        folder = report_rows.find(args.run, runs)
    bench = report_rows.ladder_rows(store.Run(folder, None))
    questions = [r for rows in report_rows.evaluations(folder).values() for r in rows]
    prompts = None
    if args.prompts:
        from pathlib import Path

        from sparkling import promptfile

        prompts = promptfile.load(Path(args.prompts), max_tokens=1).prompts
    source, rows = sizing.chosen(bench, questions, args.kind, prompts)
    if args.arm:
        there = list(dict.fromkeys(r["arm"] for r in rows))
        rows = [r for r in rows if r["arm"] == args.arm]
        if not rows:
            raise UsageError(f"There is no arm {args.arm!r} here; there are {', '.join(there)}.")
    calls = 10 if args.calls is None and args.kind == "agents" else args.calls
    found = sizing.expect(rows, source, calls=calls, per_day=args.per_day, tokens=args.tokens)
    if args.json:
        print(json.dumps([e.to_json() for e in found], indent=1, ensure_ascii=False))
    else:
        print(f"run {folder.name}")
        shaky = sizing.unsteady(rows)
        if shaky:
            print(f"{shaky}; expect less from these numbers.")
        print(sizing.view(found, report_rows.machine_of(rows)))
    return 0


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"a count is 0 or more, not {value}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _show_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def handler(_: argparse.Namespace) -> int:
        raise UsageError(f"Which one? See {parser.prog} --help.")

    return handler


def register(command: Callable[..., Any]) -> None:
    """Add our commands to the parser; see `cli.MORE`."""
    stats = command("stats", lambda _: 2, "statistics of counts given by hand")
    stats.set_defaults(handler=_show_help(stats))
    kinds = stats.add_subparsers(metavar="WHICH")
    text = "exact McNemar of two arms on the same questions, with what n can show"
    mcnemar = kinds.add_parser("mcnemar", help=text, description=text, allow_abbrev=False)
    mcnemar.set_defaults(handler=_stats_mcnemar)
    for name, said in (
        ("both", "questions that both arms have right"),
        ("first_only", "right in the first arm (the baseline) only"),
        ("second_only", "right in the second arm only"),
        ("neither", "right in neither"),
    ):
        mcnemar.add_argument(name, type=_count, metavar=name.upper(), help=said)
    mcnemar.add_argument(
        "--margin", type=_number, metavar="POINTS", help="give a verdict of non-inferiority"
    )
    mcnemar.add_argument("--json", action="store_true")

    compare = command("compare", _compare, "compare two runs, arms or files of rows, paired by id")
    compare.add_argument("first", metavar="A", help="RUN, RUN:ARM or a file; the baseline")
    compare.add_argument("second", metavar="B", help="RUN, RUN:ARM or a file")
    compare.add_argument(
        "--switch",
        action="append",
        default=[],
        metavar="NAME",
        help="the switch that may differ; may be repeated (default: any that the recipe declares)",
    )
    compare.add_argument(
        "--margin", type=_number, metavar="POINTS", help="give a verdict of non-inferiority"
    )
    compare.add_argument("--json", action="store_true")
    compare.epilog = "Whatever differs in more than the declared switch is refused."

    export = command("export", _export, "print a run's rows as CSV, JSON or a llama-benchy table")
    export.add_argument("run", metavar="RUN", help="a run's id or folder")
    export.add_argument("--format", choices=("csv", "json", "llama-benchy"), default="csv")

    sizing = command("sizing", _sizing, "what to expect for your work from what a run has measured")
    sizing.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder (newest)")
    sizing.add_argument(
        "--class",
        dest="kind",
        default="short-turns",
        metavar="CLASS",
        help="short-turns, long-answers, agents or questions (short-turns)",
    )
    sizing.add_argument("--prompts", metavar="FILE", help="your own prompts instead, JSON lines")
    sizing.add_argument("--arm", help="only this one")
    sizing.add_argument("--calls", type=_count, metavar="N", help="calls of an agent's loop (10)")
    sizing.add_argument("--per-day", type=_count, metavar="N", help="how long N replies take")
    sizing.add_argument("--tokens", type=_count, metavar="N", help="a reply of N tokens as well")
    sizing.add_argument("--json", action="store_true")
