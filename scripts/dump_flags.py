"""Write the flags and environment variables of the installed SGLang, as data for `sparkling`.

Run with the server environment's Python whenever its SGLang changes:

    .venv-server/bin/python scripts/dump_flags.py > lib/sparkling/flags-<version>.txt

One line each: `flag NAMES ARITY [TYPE [CHOICES]]` (names separated by commas, the first is the one
we write; choices by `|`) and `env NAME` for every SGLANG_* variable that SGLang's source mentions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from pathlib import Path

import sglang
from sglang.srt.server_args import ServerArgs

KINDS = {"int": "int", "float": "float", "human_readable_int": "size"}


def flags() -> list[str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    lines = []
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or "--help" in names:
            continue
        arity = "1" if action.nargs is None else str(action.nargs)
        if isinstance(action, argparse.BooleanOptionalAction):
            # --x and --no-x are opposites, not two names of one flag.
            lines += [f"flag {name} 0" for name in names]
            continue
        words = ["flag", ",".join(names), arity]
        if arity != "0":
            words.append(KINDS.get(getattr(action.type, "__name__", "str"), "str"))
            if action.choices:
                words.append("|".join(sorted(map(str, action.choices))))
        lines.append(" ".join(words))
    return sorted(lines)


def variables() -> list[str]:
    found: set[str] = set()
    for source in Path(sglang.__file__).parent.rglob("*.py"):
        found.update(re.findall(r"\bSGLANG_[A-Z0-9_]*[A-Z0-9]\b", source.read_text("utf-8")))
    return [f"env {name}" for name in sorted(found)]


def main() -> None:
    version = importlib.metadata.version("sglang")
    print(f"# SGLang {version}: its server flags and environment variables.")
    print("# Written by scripts/dump_flags.py; do not edit.")
    print("\n".join(flags() + variables()))


if __name__ == "__main__":
    main()
