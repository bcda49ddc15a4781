"""Runs transformers' own Ling-3.0 (`bailing_hybrid`, transformers >= 5.24) on a checkpoint.

A script for the server environment's Python with the pinned transformers of `env/reference.txt`
first on PYTHONPATH, because SGLang pins another version. Reads a JSON request from stdin:

    {"model": folder, "sequences": [[token ids], ...], "fp8_head": false, "out": file}

and writes an .npz whose `logprobs_i` [tokens, vocab] float32 is the log-softmax after every token of
sequence i. One forward pass for each sequence, no cache: a greedy continuation by another engine is
checked by passing prompt and continuation and comparing the argmax at every step.

transformers 5.24.0 knows no SwiGLU limits, so they are added here, written from Ling's definition:
min(silu(gate), L) * clamp(up, -L, L).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as ling


def limited(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    gate = F.silu(gate)
    return gate.clamp(max=limit) * up.clamp(-limit, limit) if limit else gate * up


def experts_forward(self, hidden, top_k_index, top_k_weights):
    out = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        token, slot = torch.where(top_k_index == expert)
        gate, up = (hidden[token] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
        product = limited(gate, up, self.limit) @ self.down_proj[expert].T
        out.index_add_(0, token, product * top_k_weights[token, slot, None])
    return out


def mlp_forward(self, x):
    return self.down_proj(limited(self.gate_proj(x), self.up_proj(x), self.limit))


def load(folder: Path, fp8_head: bool) -> torch.nn.Module:
    config = json.loads((folder / "config.json").read_text())
    # transformers' class has another name than the checkpoint's, which is SGLang's.
    config["architectures"] = ["BailingHybridForCausalLM"]
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.iterdir():
            (Path(scratch) / file.name).symlink_to(file.resolve())
        (Path(scratch) / "config.json").unlink()
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        model, info = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, output_loading_info=True
        )
    if info["missing_keys"] or info["mismatched_keys"]:
        sys.exit(f"transformers could not load {info}")
    layers = config["num_hidden_layers"]
    routed = config.get("expert_swiglu_limit_list") or [0.0] * layers
    shared = config.get("share_expert_swiglu_limit_list") or [0.0] * layers
    ling.BailingHybridExperts.forward = experts_forward
    for layer, expert_limit, shared_limit in zip(model.model.layers, routed, shared, strict=True):
        if isinstance(layer.mlp, ling.BailingHybridMoE):
            layer.mlp.experts.limit = expert_limit
            layer.mlp.shared_experts.limit = shared_limit
            layer.mlp.shared_experts.forward = mlp_forward.__get__(layer.mlp.shared_experts)
    weight = model.lm_head.weight.data
    weight.copy_(weight.bfloat16())  # SGLang keeps this model's head in BF16 whatever --dtype says
    if fp8_head:
        scale = weight.abs().amax(1, keepdim=True) / 448
        weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
    return model.eval()


@torch.no_grad()
def main() -> None:
    asked = json.load(sys.stdin)
    model = load(Path(asked["model"]), asked.get("fp8_head", False))
    arrays = {}
    for index, ids in enumerate(asked["sequences"]):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        arrays[f"logprobs_{index}"] = logits.float().log_softmax(-1).numpy()
    np.savez(asked["out"], **arrays)


if __name__ == "__main__":
    main()
