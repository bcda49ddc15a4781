"""Commands over bytes: `inventory`, `costmodel`, `head`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from sparkling.errors import UsageError


def _source(args: argparse.Namespace) -> Any:
    """The inventory that a command is about: --checkpoint, --recipe, else the lane's recipe."""
    from sparkling import inventory, lane, recipe

    if args.checkpoint and args.recipe:
        raise UsageError("Give --checkpoint or --recipe, not both: a recipe names its checkpoint.")
    if args.checkpoint:
        return inventory.inventory(args.checkpoint)
    if args.recipe:
        return inventory.inventory(recipe.load(args.recipe, root=lane.find_root()))
    return inventory.of_lane(lane.detect("auto"))


def _inventory(args: argparse.Namespace) -> int:
    from sparkling import show_cost

    found = _source(args)
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(show_cost.inventory(found))
    return 0


def _costmodel(args: argparse.Namespace) -> int:
    from sparkling import cost_recorded, costmodel, devices, puzzle, show_cost

    if args.context < 0:
        raise UsageError(f"--context {args.context} is impossible: give a number of tokens from 0.")
    rows = _rows(args.run) if args.run else []
    if rows and not args.checkpoint and not args.recipe:
        from sparkling import lane

        inv = costmodel.inventory_of(rows, lane.detect("auto"))
    else:
        inv = _source(args)
    inv.known()
    here = devices.measure_here()
    on = _device(args.device, rows, here)
    found = [*devices.known().values(), here]
    arms = costmodel.measured(rows, inv, on) if rows else []
    predicted = costmodel.run_predictions(rows, inv, on) if rows else []
    nextn = inv.known().nextn > 0
    if args.json:
        steps = {
            head: {
                "step": inv.step_bytes(context=args.context, head=head).to_json(),
                "verification": inv.step_bytes(4, context=args.context, head=head).to_json(),
                "round": inv.round_bytes(context=args.context, head=head).to_json()
                if nextn
                else None,
                "round_cost": costmodel.byte_costs(inv, context=args.context, head=head).to_json()
                if nextn
                else None,
            }
            for head in ("BF16", "FP8")
        }
        out = {
            "model": inv.model,
            "source": inv.source,
            "context": args.context,
            "bytes": steps,
            "devices": [one.to_json() for one in found],
            "measured": [arm.to_json() for arm in arms],
            "predictions": [one.to_json() for one in predicted],
            "recorded": [one.to_json() for one in cost_recorded.predictions()],
            "published": puzzle.settle().to_json(),
        }
        print(json.dumps(out, indent=1))
        return 0
    views: list[Any] = [show_cost.step(inv.step_bytes(context=args.context))]
    if nextn:
        views.append(show_cost.step(inv.round_bytes(context=args.context)))
        views.append(show_cost.devices(inv, found, context=args.context))
        views.append(show_cost.break_even_text(inv, context=args.context))
    if rows:
        views.append(show_cost.measured(arms, on))
    if predicted:
        views.append(show_cost.predictions(predicted))
    views.append(show_cost.predictions(cost_recorded.predictions()))
    views.append(show_cost.puzzle(puzzle.settle()))
    print("\n\n".join(map(str, views)))
    return 0


def _head(args: argparse.Namespace) -> int:
    if args.servers and args.stages:
        raise UsageError(
            "Give --servers for two that run, or --stages to have both started, not both."
        )
    if args.stages:
        return _head_stages(args)
    if args.servers:
        return _head_live(args)
    from sparkling import head, lane, recipe, show_head

    if args.checkpoint:
        folder = args.checkpoint
    elif args.recipe:
        folder = recipe.load(args.recipe, root=lane.find_root()).model
    else:
        folder = lane.detect("auto").model
    found = head.of_checkpoint(folder, args.hidden)
    print(json.dumps(found.to_json(), indent=1) if args.json else show_head.report(found))
    return 0


def _head_live(args: argparse.Namespace) -> int:
    import os

    from sparkling import head_live
    from sparkling.client import Client

    key = os.environ.get("SPARKLING_API_KEY") or None
    with Client(args.servers[0], key) as first, Client(args.servers[1], key) as second:
        ids = head_live.texts(first)
        judged = head_live.force(first, ids)
        noise = head_live.compare_forced(judged, head_live.force(first, ids))
        found = head_live.compare_forced(judged, head_live.force(second, ids))
        answers = head_live.free_run(first, second)
    if args.json:
        out = {
            "forced": [one.to_json() for one in found],
            "noise": [one.to_json() for one in noise],
            "free": answers.to_json(),
        }
        print(json.dumps(out, indent=1))
        return 0
    _print_live(found, noise, answers)
    return 0


def _print_live(found: Any, noise: Any, answers: Any, first: str = "first", second: str = "second"):
    from sparkling import show_head

    print(show_head.forced(found, first, second))
    print(f"\n{show_head.forced(noise[:1], first, f'{first}, read again,')}\n")
    print(show_head.free(answers))


def _head_stages(args: argparse.Namespace) -> int:
    import os
    import sys

    from sparkling import head_stages, lane, recipe

    for name, value in {"RECIPE": args.recipe, "MODEL": args.checkpoint}.items():
        if value:
            os.environ[f"SPARKLING_{name}"] = str(value)
    where = lane.detect("auto")
    book = recipe.load(where.recipe_path, root=where.root).with_edition(where.edition)
    found = head_stages.measure(
        where, book, say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        _print_live(found.forced, found.noise, found.free, *found.stages)
    return 0


def _rows(run: str) -> list[dict[str, Any]]:
    from pathlib import Path

    from sparkling import costmodel, lane

    folder = Path(run) if "/" in run else lane.runs_folder() / run
    return costmodel.rows_of(folder)


def _device(name: str | None, rows: list[dict[str, Any]], here: Any) -> Any:
    from sparkling import devices

    if name == "here":
        return here
    if name:
        return devices.device(name)
    gpus = (rows[0].get("machine") or {}).get("gpus") or () if rows else ()
    if gpus:
        found = devices.of_gpus(gpus)
        if found is None:
            raise UsageError(
                f"The bandwidth of {gpus[0]} is not known here: name a device with --device."
            )
        return found
    return here


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR", help="a checkpoint's folder")
    parser.add_argument(
        "--recipe", metavar="R", help="a recipe's name or file (default: the lane's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands of this module."""
    inv = command("inventory", _inventory, "list a checkpoint's bytes by component and dtype")
    inv.add_argument("checkpoint", metavar="DIR", nargs="?", help="a checkpoint's folder")
    inv.add_argument("--recipe", metavar="R", help="a recipe's name or file (default: the lane's)")
    inv.add_argument("--json", action="store_true", help="print JSON")
    inv.epilog = (
        "Only headers are read. Without weights the configuration decides; "
        "`--recipe ling-3.0-flash` works with no checkpoint at all."
    )

    cost = command("costmodel", _costmodel, "say what a step and a round must cost, and did cost")
    _options(cost)
    cost.add_argument("--run", metavar="RUN", help="compare with what this run measured")
    cost.add_argument(
        "--device", metavar="D", help="spark, h200 or here (default: the run's GPU, else here)"
    )
    cost.add_argument(
        "--context", type=int, default=1024, metavar="N", help="tokens in the cache (1024)"
    )

    agree = command("head", _head, "compare FP8 LM heads with the BF16 one")
    _options(agree)
    agree.add_argument("--hidden", metavar="FILE", help="recorded hidden states (.npz)")
    agree.add_argument(
        "--servers",
        nargs=2,
        metavar="URL",
        help="instead: compare two running servers, BF16 head first, on the same tokens",
    )
    agree.add_argument(
        "--stages",
        action="store_true",
        help="instead: start the stage without the FP8 head, then the one with it, and compare both",
    )
    agree.epilog = (
        "From the head alone, without a server; Sparklet has recorded hidden states, other "
        "checkpoints use random directions unless --hidden names a recording. --stages needs room for "
        "one server at a time and keeps what was read in a run folder. A key for --servers is read "
        "from SPARKLING_API_KEY."
    )
