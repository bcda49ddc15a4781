"""`sparkling bench`, `sparkling ablation` and `sparkling concurrency`: arms measured by turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sparkling.errors import UsageError

USERS_VARIANT = "many-users"


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the three commands."""
    bench = command("bench", _bench, "measure stages by turns, each proved before and after")
    bench.add_argument("stage", metavar="STAGE", nargs="*", help="default: the whole ladder")
    _lane_options(bench)
    bench.add_argument("--variant", help="a variant of the recipe, laid over every stage")
    workload_options(bench)
    bench.add_argument(
        "--repeats", type=int, metavar="N", help="of each prompt in each start (default: 2)"
    )
    turn_options(bench)

    ablation = command(
        "ablation", _ablation, "measure every combination of switches, by turns, each proved"
    )
    _lane_options(ablation)
    ablation.add_argument(
        "--switch", action="append", metavar="NAME", help="only this one; may be repeated"
    )
    ablation.add_argument("--variant", help="a variant of the recipe, laid over every arm")
    workload_options(ablation)
    turn_options(ablation)

    users = command(
        "concurrency", _concurrency, "measure 1 to 16 users at once, with and without speculation"
    )
    _lane_options(users)
    users.add_argument(
        "--levels", default="1,2,4,8,16", metavar="N,N,…", help="users at once (1,2,4,8,16)"
    )
    users.add_argument(
        "--each", type=int, default=3, metavar="N", help="requests of each user, at least (3)"
    )
    users.add_argument("--plain", metavar="STAGE", help="without speculation (before the other)")
    users.add_argument("--spec", metavar="STAGE", help="with speculation (the ladder's last)")
    users.add_argument(
        "--variant",
        default=USERS_VARIANT,
        help=f"a variant of the recipe, laid over both stages ({USERS_VARIANT})",
    )
    users.add_argument("--workload", default="short-turn", metavar="NAME", help="(short-turn)")
    users.add_argument("--prompts", metavar="FILE", help="your own prompts instead, JSON lines")
    turn_options(users)


def _lane_options(parser: argparse.ArgumentParser) -> None:
    from sparkling.cli import _lane_options as options

    options(parser)


def workload_options(parser: argparse.ArgumentParser) -> None:
    """Which prompts: for every command that measures arms on workloads."""
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="your own prompts instead, JSON lines (see the README)"
    )
    parser.add_argument(
        "--thinking", choices=("on", "off"), help="whether your own prompts are thought about"
    )


def turn_options(parser: argparse.ArgumentParser) -> None:
    """How arms take turns."""
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="go on with this run, or call a new one so (default: a new one)",
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="starts of each arm (2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order (0)")
    parser.add_argument(
        "--idle",
        type=_idle,
        default=5.0,
        metavar="SECONDS",
        help="idle before each start's rows (5)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _idle(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 600:
        raise ValueError
    return value


_idle.__name__ = "number of seconds from 0 to 600"  # what argparse calls a value that is none


def chosen(args: argparse.Namespace, sizes: Any, texts: str) -> list[Any]:
    """The workloads that the options name. Raises UsageError."""
    from sparkling import promptfile, workloads

    if args.prompts and args.workload:
        raise UsageError("Give either --workload or --prompts, not both.")
    if getattr(args, "thinking", None) and not args.prompts:
        raise UsageError(
            "--thinking is for --prompts; the named workloads say themselves whether they think."
        )
    if not args.prompts:
        return workloads.workloads(sizes, args.workload, texts=texts)
    from sparkling.files import absolute

    thinking = {"on": True, "off": False, None: None}[getattr(args, "thinking", None)]
    most = sizes.get("long_output", workloads.DEFAULTS["long_output"])
    return [promptfile.load(absolute(args.prompts), max_tokens=most, thinking=thinking)]


def by_turns(session: Any, args: argparse.Namespace, stages: Sequence[str], task: Any) -> Any:
    """(rows, energies, machine, what no sensor says) of these stages, measured by turns."""
    from sparkling import power, turns

    sampler = power.Sampler(session.run.folder / turns.SAMPLES)
    # A server's start shows itself on stdout, which may be wanted for JSON.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        rows = turns.measure(
            session,
            stages,
            task,
            rounds=args.rounds,
            seed=args.seed,
            variant=args.variant,
            idle_s=args.idle,
            say=lambda text: print(text, flush=True),
            sampler=sampler,
        )
    energies, machine = turns.energy(session.run.folder, rows)
    return rows, energies, machine, sampler.missing


def _bench(args: argparse.Namespace) -> int:
    from sparkling import cli, order
    from sparkling.workloads import repeats_of

    book = cli._book(cli._lane(args))
    works = chosen(args, book.sizes, book.texts)  # refuse before anything is started
    stages = args.stage or list(book.ladder)
    order.balanced(stages, args.rounds, seed=args.seed)
    most = repeats_of(book.sizes)
    each = repeats_of({}, -(-most // args.rounds) if args.repeats is None else args.repeats)
    session = cli._session(args, "bench", stages)
    from sparkling import ablation, acceptance, interleave, ladder, show_bench

    with cli._ends_on_sigterm(), contextlib.closing(cli._Stopping(session)):
        task = interleave.Bench(works, each)
        rows, energies, machine, missing = by_turns(session, args, stages, task)
    base = book.ladder[0]
    views: list[Any] = []
    result: dict[str, Any] = {"stages": stages}
    if base in stages and len(stages) > 1:
        found = ladder.ladder(rows, base)
        rounds = ablation.gains_by_round(rows, base)
        result |= {"ladder": found.to_json(), "gains_by_round": rounds}
        views += [show_bench.arms(found, rounds), session.ladder()]
    else:
        from sparkling import show

        arms = ladder.summarise(rows)
        result["arms"] = [a.to_json() for a in arms]
        views.append(show.measured(arms))
    drafts = acceptance.acceptance(rows)
    result |= {
        "acceptance": [a.to_json() for a in drafts],
        "energy": [e.to_json() for e in energies],
        "machine": machine.to_json(),
        "no_sensor": list(missing),
    }
    session.run.save("bench", result)
    if drafts:
        views.append(show_bench.acceptance(drafts))
    views.append(show_bench.energy(energies, machine, missing))
    return _told(args, session, result, views)


def _told(args: argparse.Namespace, session: Any, result: Any, views: Sequence[Any]) -> int:
    """Print what came of it."""
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    for view in views:
        print(f"\n{view}", flush=True)
    print(f"\nrows: {session.run.path('rows.jsonl')}")
    return 0


def _ablation(args: argparse.Namespace) -> int:
    from sparkling import cli, order
    from sparkling._rules import SWITCHES

    book = cli._book(cli._lane(args))
    works = chosen(args, book.sizes, book.texts)  # refuse before anything is started
    switches = [s for s in SWITCHES if not book.available(book.combination([s]))]
    unknown = [s for s in args.switch or () if s not in SWITCHES]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no switch; there are {', '.join(SWITCHES)}.")
    for switch in args.switch or ():
        if switch not in switches:
            raise UsageError(
                f"{switch} cannot be switched on here: {book.available(book.combination([switch]))}"
            )
    switches = [s for s in switches if s in (args.switch or switches)]
    from sparkling.ablation import ablation, combinations

    stages = [book.combination(c) for c in combinations(switches)]
    order.balanced(stages, args.rounds, seed=args.seed)
    session = cli._session(args, "ablation", stages)
    from sparkling import acceptance, interleave, show_bench

    with cli._ends_on_sigterm(), contextlib.closing(cli._Stopping(session)):
        rows, energies, machine, missing = by_turns(session, args, stages, interleave.Bench(works))
    base = book.ladder[0]
    names = [w.name for w in works]
    whole = ablation(rows, switches, baseline=base)
    parts = {n: ablation(rows, switches, baseline=base, workload=n) for n in names}
    drafts = acceptance.acceptance(rows)
    result = {
        "switches": switches,
        "all": whole.to_json(),
        "workloads": {n: p.to_json() for n, p in parts.items()} if len(parts) > 1 else {},
        "acceptance": [a.to_json() for a in drafts],
        "energy": [e.to_json() for e in energies],
        "machine": machine.to_json(),
        "no_sensor": list(missing),
    }
    session.run.save("ablation", result)
    views = [show_bench.ablation(p) for p in (whole, *(parts.values() if len(parts) > 1 else ()))]
    views += [show_bench.acceptance(drafts), show_bench.energy(energies, machine, missing)]
    return _told(args, session, result, views)


def _levels(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--levels {text} is no list of whole numbers such as 1,2,4.") from None


def _concurrency(args: argparse.Namespace) -> int:
    from sparkling import break_even, cli, concurrency, order

    book = cli._book(cli._lane(args))
    args.workload = [args.workload] if not args.prompts else None
    works = chosen(args, book.sizes, book.texts)
    users = concurrency.Users(works[0], _levels(args.levels), args.each)
    spec = args.spec or book.ladder[-1]
    plain = args.plain or book.stage(spec).parent or book.ladder[0]
    stages = [plain, spec]
    for stage, on in ((plain, False), (spec, True)):
        if book.settings(stage, args.variant).switches()["nextn"] != on:
            raise UsageError(
                f"Stage {stage!r} runs {'without' if on else 'with'} NEXTN, so it cannot be the one "
                f"{'with' if on else 'without'} speculation."
            )
    order.balanced(stages, args.rounds, seed=args.seed)
    session = cli._session(args, "concurrency", stages)
    from sparkling import show_bench

    with cli._ends_on_sigterm(), contextlib.closing(cli._Stopping(session)):
        # Requests overlap, so there are no joules of a single one.
        rows, _, machine, missing = by_turns(session, args, stages, users)
    found = concurrency.levels(rows)
    where = break_even.pays(rows, plain, spec)
    result = {
        "levels": [x.to_json() for x in found],
        "pays": where.to_json() if where else None,
        "machine": machine.to_json(),
        "no_sensor": list(missing),
    }
    session.run.save("concurrency", result)
    return _told(args, session, result, [show_bench.concurrency(found, where)])
