"""`sparkling log`: what an SGLang server's log says, and why the server failed if it did."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path


def _log(args: argparse.Namespace) -> int:
    from sparkling import logread
    from sparkling.errors import UsageError

    try:
        if args.file == "-":
            text = sys.stdin.buffer.read().decode("utf-8", "replace")
        else:
            text = Path(args.file).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"The log {args.file} cannot be read: {error.strerror}.") from error
    try:
        found = logread.read(text)
    except UsageError as error:
        raise UsageError(f"{args.file} is no server's log: {error}") from error
    print(json.dumps(found.to_json(), indent=1) if args.json else found.view().text)
    return 0 if found.diagnosis is None else 1


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. `command(name, handler, help_text)` returns its parser."""
    parser = command("log", _log, "what a server's log says, and why the server failed")
    parser.add_argument("file", metavar="FILE", help="the log of an SGLang server; - reads stdin")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.epilog = "Exit code 0: no known failure; 1: a failure, with cause and remedy."
