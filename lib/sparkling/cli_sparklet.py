"""The command `sparklet-quality`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from sparkling.errors import UsageError


def _quality(args: argparse.Namespace) -> int:
    if args.n < 4:
        raise UsageError(f"--n is {args.n}: give at least 4 problems.")
    from sparkling import lane, quality, show

    figures = quality.measure(lane.detect(args.lane), n=args.n, seed=args.seed)
    rows = [figure.row() for figure in figures]
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        print(show.table(rows, title=f"Sparklet, {args.n} problems, seed {args.seed}"))
    return 0


def register(command: Callable[..., Any]) -> None:
    """Add our command to the parser; see `cli.MORE`."""
    sub = command(
        "sparklet-quality", _quality, "measure every quality figure of the practice model"
    )
    sub.add_argument("--lane", default="auto", help="spark, gpu, cpu or auto")
    sub.add_argument("--n", type=int, default=256, help="word problems (256)")
    sub.add_argument("--seed", type=int, default=7, help="which of the problems (7)")
    sub.add_argument("--json", action="store_true")
    sub.epilog = "Starts two servers, one after the other; minutes on a CPU."
