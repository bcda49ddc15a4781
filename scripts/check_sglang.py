#!/usr/bin/env python3
"""Say whether an SGLang has the shape that the plugin's hooks expect, part by part.

    scripts/check_sglang.py 0.5.22          downloads that wheel (30 MB), looks, and deletes it
    scripts/check_sglang.py /path/to/site-packages

Nothing of SGLang is imported or installed. Exit status 0: everything fits; 1: something does not (its
function or field is named); 2: there is no such SGLang. A version that fits is not yet known: unpack its
wheel, run the switches' tests in `tests/engine` with PYTHONPATH set to that folder, then add it to
`KNOWN_SGLANG` in `lib/sparkling_sglang/sparkling_sglang/plugin.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib" / "sparkling_sglang"))

from sparkling_sglang import drift, plugin


def fetch(version: str, folder: Path) -> Path:
    """Download and unpack one wheel. Raises FileNotFoundError when there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    command += [":all:", "--dest", str(folder), f"sglang=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("sglang-*.whl"))
    if done.returncode or not wheels:
        raise FileNotFoundError(
            f"SGLang {version} could not be downloaded: "
            + (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder / "unpacked")
    return folder / "unpacked"


def report(folder: Path) -> int:
    """Print what fits and what does not."""
    found = drift.check(folder)
    version = drift.Sources(folder).version() or "of unknown version"
    known = [part for part in found if version in plugin.KNOWN_SGLANG[part]]
    said = "every part" if len(known) == len(found) else ", ".join(known) or "no part"
    said += "" if known and len(known) < len(found) else " of the plugin"
    print(f"SGLang {version}, known for {said}")
    for part, problems in found.items():
        if not problems:
            print(f"{part}: fits")
        for one in problems:
            print(f"{part}: {one}")
    return 1 if any(found.values()) else 0


def main(arguments: list[str]) -> int:
    """Run with one word: a version, or a folder."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    word = arguments[0]
    try:
        if not re.fullmatch(r"\d+(\.\w+)+", word):
            return report(Path(word))
        with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
            return report(fetch(word, Path(folder)))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
