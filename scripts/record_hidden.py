#!/usr/bin/env python3
"""Records what Sparklet's LM head reads: final hidden states on text that the model wrote itself.

    .venv-server/bin/python scripts/record_hidden.py [OUT.npz] [--problems 24] [--seed 11]

Needs torch, so it runs with the server environment's Python. The file goes to
lib/sparkling/recordings/sparklet-hidden.npz and is read by `sparkling head` without torch: `hidden`
[n, hidden size] BF16 bits as uint16, `targets` [n] the token that followed, `label` what it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "lib"))

from sparklet import chat, evaluate, export, tokenizer  # noqa: E402
from sparklet.decode import generate  # noqa: E402

OUT = ROOT / "lib" / "sparkling" / "recordings" / "sparklet-hidden.npz"


@torch.inference_mode()
def record(problems: int, seed: int) -> dict[str, np.ndarray]:
    """Hidden states and following tokens of every answer position."""
    torch.manual_seed(seed)
    model, tok = export.load(ROOT / "models" / "sparklet")
    model.prepare(torch.bfloat16, quantize=False)
    prompts = [
        tok.encode(text, add_special_tokens=False).ids
        for text, _, _ in evaluate.problems(problems, seed)
    ]
    stop = tokenizer.token_id(tok, chat.END)
    texts = generate(model, prompts, most=160, stop=stop, sampling=evaluate.ADVISED, seed=seed)
    states, targets = [], []
    for text in texts:
        hidden = model(torch.tensor([text.ids]))[0].to(torch.bfloat16)
        at = slice(text.begin - 1, len(text.ids) - 1)
        states.append(hidden[at].view(torch.int16).numpy().view(np.uint16))
        targets.append(np.asarray(text.ids[text.begin :], np.int32))
    label = (
        f"Sparklet (models/sparklet), final hidden states at the answers of {problems} held-out "
        f"problems, sampled at temperature 0.6, seed {seed}, BF16 on a CPU with torch {torch.__version__}"
    )
    return {
        "hidden": np.concatenate(states),
        "targets": np.concatenate(targets),
        "label": np.asarray(label),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path, default=OUT)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    made = record(args.problems, args.seed)
    np.savez_compressed(args.out, **made)
    print(f"{args.out}: {made['hidden'].shape[0]} positions, {args.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
