"""Writes and reads the checkpoint, tensor by tensor as Ling-3.0-flash-fp4 has it on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import card, chat, tokenizer
from .config import Config
from .model import Norm, Router, Sparklet, Weight
from .quantize import fp8_pack, fp8_unpack, mxfp4_pack, mxfp4_unpack

SHARD = 3_000_000  # bytes; several shards and an index, like the large model


def _checkpoint_name(name: str) -> str:
    """The checkpoint's name of a module or parameter of `Sparklet`."""
    return name if name.startswith("lm_head") else f"model.{name}"


def tensors(model: Sparklet) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) in the checkpoint's order and types."""
    for path, module in model.named_modules():
        name = _checkpoint_name(path)
        if isinstance(module, Weight):
            w = module.weight.detach().cpu()
            if module.store == "mxfp4":
                base, part = name.rsplit(".", 1)
                for e in range(w.shape[0]):
                    codes, scale = mxfp4_pack(w[e])
                    yield f"{base}.{e}.{part}.weight", codes
                    yield f"{base}.{e}.{part}.weight_scale_inv", scale
            elif module.store == "fp8":
                values, scale = fp8_pack(w)
                yield f"{name}.weight", values
                yield f"{name}.weight_scale_inv", scale
            else:
                kind = torch.bfloat16 if module.store == "bf16" else torch.float32
                yield f"{name}.weight", w.to(kind)
        elif isinstance(module, Router):
            yield f"{name}.weight", module.weight.detach().cpu()
            yield f"{name}.expert_bias", module.expert_bias.detach().cpu()
        elif hasattr(module, "A_log"):
            yield f"{name}.A_log", module.A_log.detach().cpu()
            yield f"{name}.dt_bias", module.dt_bias.detach().cpu()


def save(model: Sparklet, target: Path, settings: Any = None) -> int:
    """Writes all files of the model to `target`; returns their size in bytes."""
    target.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors(model):
        size = tensor.numel() * tensor.element_size()
        if filled + size > SHARD and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.contiguous()
        filled += size
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        (target / file).chmod(0o644)  # safetensors writes for the owner only
        index.update(dict.fromkeys(shard, file))
    total = sum(t.numel() * t.element_size() for s in shards for t in s.values())
    tok = tokenizer.build()
    pad, end = tokenizer.token_id(tok, chat.PAD), tokenizer.token_id(tok, chat.END)
    tok.save(str(target / "tokenizer.json"))
    write = lambda name, x: (target / name).write_text(  # noqa: E731
        json.dumps(x, indent=1, sort_keys=False) + "\n"
    )
    write("model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    write("config.json", model.c.to_hf(pad=pad, eos=end))
    write(
        "generation_config.json",
        {
            "eos_token_id": end,
            "pad_token_id": pad,
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 29,
        },
    )
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": chat.END,
            "pad_token": chat.PAD,
            "additional_special_tokens": [t for t in chat.HIDDEN if t not in (chat.END, chat.PAD)],
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.c.max_position_embeddings,
            "chat_template": chat.TEMPLATE,
        },
    )
    (target / "chat_template.jinja").write_text(chat.TEMPLATE)
    facts = asdict(settings) if settings is not None else {}
    write_manifest(target)
    (target / "README.md").write_text(card.text(facts, {}))
    return sum(f.stat().st_size for f in target.iterdir())


MANIFEST = "sparkling.json"  # where the notebooks' library looks for checksums


def write_manifest(folder: Path) -> None:
    """Writes the SHA-256 of every file that a server reads, beside them."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*.json"), *folder.glob("*.jinja")]
    names = sorted(f.name for f in files if f.name not in (MANIFEST, "settings.json"))
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    made = {"what": "Sparklet, a practice model trained by Sparkling", "sha256": hashes}
    (folder / MANIFEST).write_text(json.dumps(made, indent=1) + "\n")


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint, as stored. Raises FileNotFoundError for a missing shard."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    out: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                out[name] = f.get_tensor(name)
    missing = set(index) - set(out)
    if missing:
        raise KeyError(f"{folder}: {len(missing)} tensors of the index are in no shard")
    return out


def load(folder: Path, device: str = "cpu") -> tuple[Sparklet, Tokenizer]:
    """The model with the stored values (exactly) as its weights, and its tokenizer."""
    config = Config.from_hf(json.loads((folder / "config.json").read_text()))
    stored, model = read(folder), Sparklet(config)
    used: set[str] = set()

    def take(name: str) -> Tensor:
        used.add(name)
        return stored[name]

    with torch.no_grad():
        for path, module in model.named_modules():
            name = _checkpoint_name(path)
            if isinstance(module, Weight):
                if module.store == "mxfp4":
                    base, part = name.rsplit(".", 1)
                    for e in range(config.num_experts):
                        x = f"{base}.{e}.{part}"
                        module.weight[e] = mxfp4_unpack(
                            take(f"{x}.weight"), take(f"{x}.weight_scale_inv")
                        )
                elif module.store == "fp8":
                    module.weight.copy_(
                        fp8_unpack(take(f"{name}.weight"), take(f"{name}.weight_scale_inv"))
                    )
                else:
                    module.weight.copy_(take(f"{name}.weight").float())
            elif isinstance(module, Router):
                module.weight.copy_(take(f"{name}.weight"))
                module.expert_bias.copy_(take(f"{name}.expert_bias"))
            elif hasattr(module, "A_log"):
                module.A_log.copy_(take(f"{name}.A_log"))
                module.dt_bias.copy_(take(f"{name}.dt_bias"))
    left = set(stored) - used
    if left:
        raise KeyError(f"{folder}: {len(left)} unknown tensors, e.g. {sorted(left)[0]}")
    return model.to(device).eval(), tokenizer.load(folder / "tokenizer.json")


__all__ = ["Norm", "load", "read", "save", "tensors", "write_manifest"]
