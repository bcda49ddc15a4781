"""`sparkling doctor` and `sparkling setup`: what the machine has, and the server's environment."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def _where(args: argparse.Namespace) -> tuple[Any, Any]:
    """The lane and its recipe, of the edition that was asked for."""
    from sparkling import lane, recipe

    for name in ("recipe", "model", "edition"):
        if getattr(args, name, None):
            os.environ[f"SPARKLING_{name.upper()}"] = getattr(args, name)
    found = lane.detect(args.lane)
    return found, recipe.load(found.recipe_path, root=found.root).with_edition(found.edition)


def _doctor(args: argparse.Namespace) -> int:
    import platform
    import sys

    from sparkling import doctor

    where, book = _where(args)
    found = doctor.run(doctor.Scene.here(where, book))
    facts = {
        "lane": where.kind,
        "reason": where.reason,
        "python": f"{platform.python_version()} ({sys.executable})",
        "recipe": f"{book.name} ({book.shown}), stages {', '.join(book.ladder)}",
        "edition": where.edition,
        "server python": str(where.server_python),
        "model": str(where.model),
        "runs": str(where.runs),
    }
    if args.json:
        checks = found.to_json()
        print(json.dumps({**facts, "ok": found.ok, "checks": checks}, indent=2, ensure_ascii=False))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
        print(f"\n{found.view(everything=not args.brief)}")
    return 0 if found.ok else 1


def _setup(args: argparse.Namespace) -> int:
    from sparkling import environments

    where, book = _where(_seen(args))
    edition = book.built
    if args.if_needed is not None and edition.requirements is None:
        return 0
    folder = environments.folder_of(where.root, edition)
    if where.server_python.parent.parent != folder:
        print(
            f"The server's Python is {where.server_python}, an environment of your own: left alone."
        )
        return 0
    if args.dry_run:
        state = environments.state(where.root, edition, where.server_python)
        print(f"{edition.name}: {edition.title}")
        print(f"pins: {environments.pins(where.root, edition)}\nenvironment: {folder}")
        print(f"state: {state.told}")
        return 0

    def end(signum: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt  # so that what installs is ended too

    before = signal.signal(signal.SIGTERM, end)
    try:
        built = environments.build(
            where.root,
            edition,
            python=args.python,
            installer=args.installer,
            progress=lambda line: print(line, flush=True),
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    print(built)
    return 0


def _seen(args: argparse.Namespace) -> argparse.Namespace:
    """With --if-needed, the lane's options among those of another command."""
    if args.if_needed is None:
        return args
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _options(others)
    known, _ = others.parse_known_args(args.if_needed)
    return known


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lane", default="auto", help="auto, spark, gpu or cpu (default: auto, what is found)"
    )
    parser.add_argument("--recipe", help="a recipe's name or file (default: the lane's)")
    parser.add_argument("--model", help="the checkpoint's directory (default: the recipe's)")
    parser.add_argument(
        "--edition", help="the build of SGLang: stock or fork (default: the recipe's)"
    )


def register(command: Command) -> None:
    """Add the commands."""
    doctor = command("doctor", _doctor, "say what was found here and what is missing")
    _options(doctor)
    doctor.add_argument("--json", action="store_true", help="the checks as a list, for programs")
    doctor.add_argument("--brief", action="store_true", help="only what is to look at or fails")

    setup = command("setup", _setup, "build and verify the server environment of a GPU lane")
    _options(setup)
    setup.add_argument("--python", help="the interpreter to make it with (default: Python 3.12)")
    setup.add_argument("--installer", default="auto", help="uv, pip or auto (default: auto)")
    setup.add_argument("--dry-run", action="store_true", help="only say what would be built")
    setup.add_argument(
        "--if-needed",
        nargs=argparse.REMAINDER,
        metavar="OPTIONS",
        help="the lane from another command's options; nothing where the lane needs none",
    )
