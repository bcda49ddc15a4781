#!/usr/bin/env python3
"""Records what Sparklet's LM head reads and which experts it wakes, on text that it wrote itself.

    .venv-server/bin/python scripts/record_hidden.py [FOLDER] [--problems 24] [--seed 11]

Needs torch, so it runs with the server environment's Python. Two files go to lib/sparkling/recordings
and are read without torch:

sparklet-hidden.npz (`sparkling head`): `hidden` [n, hidden size] BF16 bits as uint16, final hidden
states; `targets` [n] the token that followed; `label` what it is.
sparklet-routing.npz (`sparkling.unions`): for kinds "answers" and "repeated", `<kind>_experts` [n, MoE
layers, top k] uint8 the experts of each position, `<kind>_text` [n] which text it belongs to; `label`.
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
from sparklet.decode import Sampling, Text, generate  # noqa: E402
from sparklet.model import Router  # noqa: E402

OUT = ROOT / "lib" / "sparkling" / "recordings"


class Routes:
    """Collects the experts that every router of the model chooses, layer by layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.last: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda _module, _args, out: self.last.append(out[1]))

    def take(self) -> np.ndarray:
        """[T, layers, top k] of the forward pass just made; forgets it."""
        taken, self.last = self.last, []
        return torch.stack(taken, 1).to(torch.uint8).numpy()


@torch.inference_mode()
def record(problems: int, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(hidden states and following tokens, experts chosen) at every answer position."""
    torch.manual_seed(seed)
    model, tok = export.load(ROOT / "models" / "sparklet")
    model.prepare(torch.bfloat16, quantize=False)
    stop = tokenizer.token_id(tok, chat.END)

    def write(texts: list[str], sampling: Sampling, most: int, stop: int | None) -> list[Text]:
        ids = [tok.encode(text, add_special_tokens=False).ids for text in texts]
        return generate(model, ids, most=most, stop=stop, sampling=sampling, seed=seed)

    asked = [text for text, _, _ in evaluate.problems(problems, seed)]
    kinds = {
        "answers": write(asked, evaluate.ADVISED, 160, stop),
        "repeated": write(evaluate.repetitive(problems, seed), Sampling(), 96, None),
    }
    routes = Routes(model)
    states, targets, experts = [], [], {}
    for kind, texts in kinds.items():
        chosen, number = [], []
        for i, text in enumerate(texts):
            hidden = model(torch.tensor([text.ids]))[0].to(torch.bfloat16)
            at = slice(text.begin - 1, len(text.ids) - 1)
            chosen.append(routes.take()[at])
            number.append(np.full(len(chosen[-1]), i, np.int16))
            if kind == "answers":
                states.append(hidden[at].view(torch.int16).numpy().view(np.uint16))
                targets.append(np.asarray(text.ids[text.begin :], np.int32))
        experts[f"{kind}_experts"] = np.concatenate(chosen)
        experts[f"{kind}_text"] = np.concatenate(number)
    how = f"seed {seed}, BF16 on a CPU with torch {torch.__version__}"
    label = (
        f"Sparklet (models/sparklet), final hidden states at the answers of {problems} held-out "
        f"problems, sampled at temperature 0.6, {how}"
    )
    routing = (
        f"Sparklet (models/sparklet), experts chosen at the same answers, and in {problems} greedy "
        f"continuations of repetitive text, {how}"
    )
    return (
        {
            "hidden": np.concatenate(states),
            "targets": np.concatenate(targets),
            "label": np.asarray(label),
        },
        {**experts, "label": np.asarray(routing)},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    made = record(args.problems, args.seed)
    for name, arrays in zip(("sparklet-hidden.npz", "sparklet-routing.npz"), made, strict=True):
        path = args.out / name
        np.savez_compressed(path, **arrays)
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
