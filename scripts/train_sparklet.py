#!/usr/bin/env python3
"""Trains Sparklet, measures it and writes it in Ling-3.0-flash-fp4's format.

python scripts/train_sparklet.py train RUN --preset cpu      (or gpu; resumes by itself)
python scripts/train_sparklet.py measure RUN
python scripts/train_sparklet.py export RUN DIR
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Threads that wait sleep: spinning ones made a step six times as long on a busy machine of two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps 1,024 prepared kernels; the batches' shapes need more, and each costs 0.5 ms
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"error: {sys.executable} has no torch; call this with .venv-server/bin/python.")
from sparklet import card, evaluate, export, tokenizer, training


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, or continue a run")
    train.add_argument("run", type=Path, help="folder of the run")
    train.add_argument("--preset", choices=sorted(training.PRESETS), default="gpu")
    for f in fields(training.Settings):
        kind = float if f.type == "float" else int
        train.add_argument(f"--{f.name.replace('_', '-')}", type=kind, default=None)
    train.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train.add_argument("--parts", type=int, default=0, help="of a batch, on as many cores (2)")
    train.add_argument("--workers", type=int, default=0, help="processes that draw samples")
    train.add_argument("--stop-at", type=int, default=None, help="stop (resumable) after this step")
    train.add_argument("--report", type=float, default=10.0, help="seconds between progress lines")
    measure = commands.add_parser("measure", help="print the quality figures")
    measure.add_argument("run", type=Path, help="folder of a run, or of an exported model")
    measure.add_argument("--n", type=int, default=512)
    measure.add_argument("--seed", type=int, default=7)
    measure.add_argument("--batch", type=int, default=256)
    measure.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    measure.add_argument(
        "--form",
        choices=("stored", "bf16", "w8a8"),
        default="stored",
        help="the stored weights; a run's weights unrounded; stored with FP8 inputs",
    )
    measure.add_argument("--json", type=Path, default=None)
    write = commands.add_parser("export", help="write the model files")
    write.add_argument("run", type=Path)
    write.add_argument("target", type=Path)
    about = commands.add_parser("card", help="write the model card with measured figures")
    about.add_argument("model", type=Path, help="exported model with its run's settings.json")
    about.add_argument("--stored", type=Path, required=True, help="`measure DIR --json`")
    about.add_argument("--bf16", type=Path, default=None, help="`measure RUN --form bf16 --json`")
    about.add_argument(
        "--other",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="another run's figures: both measurements in one file, as retrain_sparklet.py writes",
    )
    return parser


def _wrong(args: argparse.Namespace) -> str:
    """What is wrong with the request, in one sentence; empty if nothing is."""
    if args.command == "train":
        if args.steps is not None and args.steps < 1:
            return f"--steps {args.steps} is impossible: give at least 1"
        if args.run.exists() and not args.run.is_dir():
            return f"{args.run} is a file: give a folder for the run"
    elif args.command == "card":
        for path in (args.stored, args.bf16):
            if path and not path.is_file():
                return f"there is no file {path}: `measure --json` writes it"
    elif not any((args.run / name).exists() for name in _HELD[args.command]):
        return f"{args.run} holds nothing to {args.command}: `train` makes a run, `export` a model"
    return ""


# One of these is in the folder that a command reads: a run's weights, an exported model's settings.
_HELD = {"measure": ("config.json", "state.pt"), "export": ("state.pt",)}


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if wrong := _wrong(args):
        parser.error(wrong)
    if args.command == "train":
        settings = training.PRESETS[args.preset]
        given = {f.name: getattr(args, f.name) for f in fields(settings)}
        settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
        settings = replace(settings, muon=bool(settings.muon))
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("high")
        parts = 1
        if args.device == "cpu":
            training.keep_memory()
            parts = max(1, min(args.parts or torch.get_num_threads(), 2))
            torch.set_num_threads(max(1, torch.get_num_threads() // parts))
        run = training.Run(args.run, settings, args.device, parts=parts)
        if run.resume():
            print(f"continuing at step {run.step}", flush=True)
        run.train(
            workers=args.workers,
            stop_at=args.stop_at,
            report=args.report,
            show=lambda line: print(line, flush=True),
        )
        print(f"trained {run.step} steps in {run.seconds:.0f} s", flush=True)
    elif args.command == "measure":
        began = time.monotonic()
        if (args.run / "config.json").exists():
            model, tok = export.load(args.run, args.device)
            quantize = False  # the loaded values are on the grid already
        else:
            model, _ = training.load_model(args.run / "state.pt", args.device)
            tok, quantize = tokenizer.build(), args.form != "bf16"
        with torch.no_grad():
            model.eval().prepare(torch.bfloat16, quantize, round_inputs=args.form == "w8a8")
        result = evaluate.report(model, tok, args.n, args.seed, args.batch)
        print("\n".join(evaluate.lines(result)))
        if (args.run / "config.json").exists():
            same = evaluate.same_text(model, tok)
            print(f"    greedy text with FP8 inputs is the same on {same}/100 problems")
        print(f"    {args.form}, {time.monotonic() - began:.0f} s", flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    elif args.command == "card":
        read = lambda path: json.loads(path.read_text()) if path else None  # noqa: E731
        settings = read(args.model / "settings.json") or {}
        found = card.figures(read(args.stored), read(args.bf16))
        others = {
            name: read(Path(file)) for name, _, file in (x.partition("=") for x in args.other)
        }
        (args.model / "README.md").write_text(card.text(settings, found, others))
    else:
        model, settings = training.load_model(args.run / "state.pt")
        size = export.save(model, args.target, settings)
        for name in ("settings.json", "losses.jsonl", "loss.svg"):
            if (args.run / name).exists():
                (args.target / name).write_text((args.run / name).read_text())
        print(f"{args.target}: {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
