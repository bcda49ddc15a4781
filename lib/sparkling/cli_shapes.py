"""`sparkling shapes`: Ling's decode kernels alone, as recorded or measured on this machine's GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path


def _shapes(args: argparse.Namespace) -> int:
    from sparkling import lane, shapes, shapes_live, show_shapes, show_shapes_more
    from sparkling.errors import UsageError

    if args.measure and args.record:
        raise UsageError("Give --measure or --record, not both: one measures, the other reads.")
    if not args.measure and (args.out or args.only is not None):
        raise UsageError("--out and --only say what to measure: give --measure with them.")
    if args.measure:
        out = Path(args.out or "kernel-shapes.json")
        only = "" if args.only is None else shapes_live.parts(args.only)
        found = shapes_live.measure(lane.detect(args.lane), out, only=only)
        path = out
    else:
        path = Path(args.record) if args.record else shapes.RECORDED
        found = shapes.read(path)
    if args.json:
        print(json.dumps(json.loads(path.read_text("utf-8")), indent=1))
        return 1 if args.measure and found.missing else 0
    views = [
        show_shapes.where(found, live=args.measure),
        show_shapes.limit(found),
        show_shapes.head(found),
        *(
            show_shapes.experts(found, part=part, backend=backend)
            for backend in found.expert_bytes
            for part in shapes.PARTS
            if any((c.backend, c.part) == (backend, part) for c in found.experts)
        ),
        show_shapes_more.consistency(found),
    ]
    if len(found.expert_bytes) > 1:
        views.append(show_shapes_more.backends(found))
    print("\n\n".join(map(str, views)))
    return 1 if args.measure and found.missing else 0


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. `command(name, handler, help_text)` returns its parser."""
    parser = command("shapes", _shapes, "show or measure the decode kernels alone")
    parser.add_argument(
        "--measure", action="store_true", help="measure on this machine's GPU, which must be idle"
    )
    parser.add_argument("--record", metavar="FILE", help="show this record (default: an H200's)")
    parser.add_argument(
        "--out", metavar="FILE", help="where --measure writes (default: kernel-shapes.json)"
    )
    parser.add_argument(
        "--only",
        metavar="PARTS",
        help="of bandwidth,head,experts,marlin; a record needs bandwidth (default: all but marlin)",
    )
    parser.add_argument("--lane", default="auto", help="auto, spark, gpu or cpu (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.epilog = (
        "Definitions stand in lib/sparkling/shapes.py. Marlin compiles for minutes first."
    )
