"""`sparkling kernels`: what the stages compile, building it with nothing loaded, and the proof."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from sparkling.errors import UsageError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. `command(name, handler, help_text)` returns its parser."""
    parser = command(
        "kernels", _kernels, "compile kernels before a model is loaded, and check them"
    )
    parser.add_argument(
        "what",
        choices=("plan", "build", "check", "warm"),
        help="plan: look only; build: FlashInfer's CUTLASS experts; check: are they what the server "
        "loads; warm: start a stage twice with a few layers, so that all it compiles is cached",
    )
    parser.add_argument("stage", nargs="?", metavar="STAGE", help="default: baseline")
    parser.add_argument("--lane", default="auto", help="auto, spark, gpu or cpu (default: auto)")
    parser.add_argument("--recipe", help="a recipe's name or file (default: the lane's)")
    parser.add_argument("--model", help="the checkpoint's directory (default: the recipe's)")
    parser.add_argument(
        "--edition", help="the build of SGLang: stock or fork (default: the recipe's)"
    )
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        help="compile for this GPU, as 12.1a (default: the one that is here)",
    )
    parser.add_argument("--json", action="store_true")


def _kernels(args: argparse.Namespace) -> int:
    from sparkling import kernels, lane

    told = (("RECIPE", args.recipe), ("MODEL", args.model), ("EDITION", args.edition))
    for name, value in told:
        if value:
            os.environ[f"SPARKLING_{name}"] = value
    where = lane.detect(args.lane)
    stage = args.stage or "baseline"
    if args.what == "plan":
        if args.stage:
            raise UsageError(
                f"`kernels plan` looks at every stage of the lane; leave {args.stage!r} out."
            )
        plan = kernels.plan(where, arch=args.arch)
        _show(plan.to_json() if args.json else str(plan), args.json)
        return 0
    if args.what == "check":
        proof = kernels.check(where, stage, arch=args.arch)
        data = {**vars(proof), "path": str(proof.path)}
        mark = "ok" if proof.ok else "not ok"
        _show(data if args.json else f"{mark}: {proof.path}: {proof.how}", args.json)
        return 0 if proof.ok else 1
    if args.what == "warm":
        if args.arch:
            raise UsageError("`kernels warm` compiles for the GPU that is here; leave --arch out.")
        return _warm(args, where, stage)
    report = kernels.build(where, stage, arch=args.arch, progress=_progress())
    if args.json:
        _show(report.to_json(), True)
    else:
        print(_told(report))
    return 0 if report.proof.ok else 1


def _warm(args: argparse.Namespace, where: Any, stage: str) -> int:
    from sparkling import kernels, kernels_probe, recipe

    recipe.load(where.recipe_path, root=where.root).require(stage, where.kind)
    launch = kernels.stage_launch(where, stage)
    kernels_probe.needs_gpu(launch)
    folder = where.cache / "kernel-probe"
    found = kernels_probe.warm(launch, where, folder)
    _show(found.to_json() if args.json else f"{found}.", args.json)
    return 0


def _told(report: Any) -> str:
    if report.result is None:
        return f"{report.note}: {report.proof.path}"
    r = report.result
    lines = [f"{r.done} of {r.total} targets are built, {r.seconds:.0f} s with {r.jobs} at once."]
    if r.throttled or r.ended:
        lines.append(
            f"Memory was short: throttled {r.throttled} times, ended and continued {r.ended} times."
        )
    mark = "ok" if report.proof.ok else "not ok"
    return "\n".join([*lines, f"{mark}: {report.proof.path}: {report.proof.how}"])


def _show(value: Any, as_json: bool) -> None:
    print(json.dumps(value, indent=2, default=str) if as_json else value)


def _progress() -> Callable[[Any], None]:
    """A callback that prints a line to stderr whenever something has changed."""
    last: list[tuple[int, str]] = []

    def progress(tick: Any) -> None:
        now = (tick.done, tick.state)
        if last[-1:] == [now]:
            return
        last[:] = [now]
        left = "" if tick.left_s is None else f", about {tick.left_s / 60:.0f} min left"
        print(
            f"{tick.done}/{tick.total} {tick.state}, {tick.running} of {tick.jobs} running, "
            f"{tick.available / 2**30:.1f} GiB available{left}",
            file=sys.stderr,
            flush=True,
        )

    return progress
