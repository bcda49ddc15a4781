#!/usr/bin/env python3
"""Trains Sparklet again, with other seeds or settings, and measures every result the same way.

    python scripts/retrain_sparklet.py OUT gpu:seed=2 gpu:seed=3 cpu:seed=1,draft_rows=0.25

Each word is a preset with changes. Every run is trained, exported and measured twice (as stored, and
unrounded) by train_sparklet.py; OUT gets its settings, losses, log and `measured-NAME.json` when it
is done, and with `--keep` the model of the first. A run that would end too late is stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "train_sparklet.py"


def command(word: str) -> tuple[str, list[str]]:
    """(name, arguments of `train`) of `preset:key=value,...`."""
    preset, _, changes = word.partition(":")
    args, name = ["--preset", preset], [preset]
    for part in filter(None, changes.split(",")):
        key, _, value = part.partition("=")
        args += [f"--{key.replace('_', '-')}", value]
        name.append(f"{key}{value}")
    return "-".join(name), args


class Retraining:
    """All runs of one call."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.began = time.monotonic()
        self.slots = threading.Semaphore(args.at_once)
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def step(self, name: str, *words: str) -> float:
        """One call of train_sparklet.py; its output goes to the run's log. Returns its seconds."""
        left = self.args.seconds - (time.monotonic() - self.began)
        began = time.monotonic()
        with (self.args.out / f"{name}.log").open("ab") as log:
            subprocess.run(
                [sys.executable, str(SCRIPT), *words, "--device", self.args.device]
                if words[0] != "export"
                else [sys.executable, str(SCRIPT), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, left),
                check=True,
            )
        return time.monotonic() - began

    def run(self, word: str, keep: bool) -> None:
        name, settings = command(word)
        folder, out = self.work / name, self.args.out
        with self.slots:
            try:
                took = self.step(
                    name, "train", str(folder), *settings, "--workers", str(self.args.workers)
                )
                self.say(f"{name}: trained in {took:.0f} s")
                for file in ("settings.json", "losses.jsonl"):
                    shutil.copy(folder / file, out / f"{name}.{file}")
                exported = out / name if keep else folder / "exported"
                self.step(name, "export", str(folder), str(exported))
                made = {"settings": json.loads((folder / "settings.json").read_text())}
                made["seconds"], made["device"] = round(took, 1), self.args.device
                for form, what in (("stored", exported), ("bf16", folder)):
                    where = folder / f"{form}.json"
                    more = ["--form", "bf16"] if form == "bf16" else []
                    n = ["--n", str(self.args.n), "--json", str(where), *more]
                    self.step(name, "measure", str(what), *n)
                    made[form] = json.loads(where.read_text())
                    (out / f"measured-{name}.json").write_text(json.dumps(made, indent=1) + "\n")
                    found = made[form]["sampled"]
                    self.say(
                        f"{name}, {form}: accuracy {found['accuracy']:.3f}, accept "
                        f"{found['accept_length']:.2f}, repeated "
                        f"{made[form]['repetition']['accept_length']:.2f}"
                    )
            except Exception as error:
                self.failed.append(name)
                self.say(f"{name}: {error!r}"[:300])

    def all(self) -> int:
        threads = [
            threading.Thread(target=self.run, args=(word, self.args.keep and i == 0))
            for i, word in enumerate(self.args.runs)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.2)  # in the order given
        for thread in threads:
            thread.join()
        self.say(f"failed: {', '.join(self.failed)}" if self.failed else "all done")
        return 1 if self.failed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", help="preset:key=value,...")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--n", type=int, default=1024, help="problems to measure with")
    parser.add_argument("--at-once", type=int, default=3, help="runs on the device at a time")
    parser.add_argument("--workers", type=int, default=2, help="of each, drawing samples")
    parser.add_argument("--seconds", type=float, default=1e9, help="for everything")
    parser.add_argument("--keep", action="store_true", help="keep the first run's model in OUT")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        return Retraining(args, Path(work)).all()


if __name__ == "__main__":
    raise SystemExit(main())
