"""A second plugin of SGLang for `record_full_size.py` alone: random weights, and a gate.

Dummy weights as SGLang makes them are no good for timing more than one token: every layer gets the
same values, FP8 matrices round to zero, norms of 0.001 leave the router nothing to tell tokens apart
by, and packed FP4 codes are whatever the memory held. Here each tensor gets its own seeded noise of
about a trained model's size, so that every token chooses its own experts and nothing overflows.

The gate holds the scheduler process before it touches the GPU until a file appears: the imports of the
next server (25 s of Python) overlap with the measuring of the present one, in turn on one GPU.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

STD = 0.02
EXPERT_SCALE = 7  # 2**-7: uniform E2M1 codes have an RMS of 2.93, so weights of 0.023
logger = logging.getLogger("sglang.srt.full_size")


def fill(model: Any) -> None:
    """Seeded noise for every tensor of a model that was just created, whatever its storage."""
    import torch

    filled = {}
    for name, tensor in model.state_dict().items():
        if any(part in name for part in ("rotary", "cos_sin", "inv_freq")):
            continue
        made = torch.Generator(device=tensor.device)
        made.manual_seed(zlib.crc32(name.encode()))
        kind = _fill_one(torch, name, tensor, made)
        filled[kind] = filled.get(kind, 0) + tensor.numel() * tensor.element_size()
    note = ", ".join(f"{kind} {size} bytes" for kind, size in sorted(filled.items()))
    logger.warning("full-size recording: random weights in %s: %s", type(model).__name__, note)


def _fill_one(torch: Any, name: str, tensor: Any, made: Any) -> str:
    """Fill one tensor; returns what it was taken for."""
    expert = ".w13_" in name or ".w2_" in name
    if tensor.dtype == getattr(torch, "float8_e8m0fnu", None):
        tensor.view(torch.uint8).fill_(127 - EXPERT_SCALE if expert else 127)
        return "e8m0 scales"
    if tensor.dtype in (torch.int8, torch.uint8):
        tensor.view(torch.uint8).random_(0, 256, generator=made)
        return "FP4 codes"
    if not tensor.is_floating_point():
        return "left as they were"
    if "scale" in name:
        tensor.fill_(2.0**-EXPERT_SCALE if expert else 1.0)
        return "scales"
    if tensor.element_size() == 1:
        noise = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        tensor.copy_(noise.normal_(0, STD, generator=made).to(tensor.dtype))
        return "FP8 matrices"
    if tensor.ndim > 1:
        tensor.normal_(0, STD, generator=made)
        return "matrices"
    tensor.fill_(1.0 if "norm" in name else 0.0)
    return "vectors"


def _gate(path: Path) -> None:
    """Say that this process stands at the gate, and wait for it to open (or for the parent to go)."""
    parent = os.getppid()
    path.with_suffix(".at").write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
    while not path.exists():
        if os.getppid() != parent:
            raise SystemExit("full-size recording: nobody is left to open the gate")
        time.sleep(0.05)


def register() -> None:
    """What SGLang calls in each of its processes."""
    if multiprocessing.parent_process() is None:
        return
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("FULL_SIZE_RANDOM") == "1":
        target = "sglang.srt.model_loader.loader.initialize_dummy_weights"
        HookRegistry.register(target, fill, HookType.REPLACE)
    if gate := os.environ.get("FULL_SIZE_GATE"):
        _gate(Path(gate))
