"""What the H200 computed, against the plain PyTorch model: teacher-forced on the recorded answers.

On a GPU the inputs of FP8 layers are rounded too (W8A8), so the model does the same here. The model
that a recording agrees with tells whether the server applied layer 3's SwiGLU limit: seen were a
root mean square of 0.015 to 0.017 nats for the right one and 0.07 to 0.16 for the other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sparklet import export, quantize

ROOT = Path(__file__).resolve().parents[2]
TEXTS = 20


@pytest.fixture(scope="module")
def model():
    return export.load(ROOT / "models" / "sparklet")[0]


def distance(model, name: str, limit: float) -> float:
    """Root mean square difference (nats) of the chosen tokens' log-probabilities, with layer 3's
    limit for routed experts set to `limit` (0: none)."""
    (layer,) = [i for i, x in enumerate(model.c.expert_swiglu_limits) if x]
    assert layer == 3 and model.c.expert_swiglu_limits[3] == 4.0
    recording = json.loads((ROOT / f"tests/data/sparklet/{name}.json").read_text())
    moe = model.layers[layer].mlp
    try:
        moe.limit = limit
        with torch.no_grad():
            model.prepare(torch.bfloat16, round_inputs=True)
            if "fp8" in name:
                head = quantize.fp8_head(model.lm_head.weight).to(torch.bfloat16)
                object.__setattr__(model.lm_head, "now", head)
            found = []
            for row in recording["greedy"][:TEXTS]:
                table = model.logits(model(torch.tensor([row["prompt"] + row["ids"]])))[0]
                table = table.log_softmax(-1)[len(row["prompt"]) - 1 : -1]
                mine = table.gather(1, torch.tensor(row["ids"])[:, None])[:, 0]
                found.append(mine - torch.tensor(row["logprobs"]))
        return float(torch.cat(found).square().mean().sqrt())
    finally:
        moe.limit = model.c.expert_swiglu_limits[layer]


@pytest.mark.parametrize(("name", "applied"), [("h200-fp8-nextn", True), ("h200-nextn", False)])
def test_a_gpu_s_log_probabilities_tell_whether_the_limit_was_applied(model, name, applied):
    """The plugin's servers apply it; stock SGLang 0.5.23 with Humming drops it."""
    given, dropped = distance(model, name, 4.0), distance(model, name, 0.0)
    print(f"{name}: {given:.4f} nats from the model with the limit, {dropped:.4f} from one without")
    right, wrong = (given, dropped) if applied else (dropped, given)
    assert right < 0.025 and wrong > 2.5 * right
