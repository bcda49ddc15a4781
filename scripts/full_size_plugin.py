"""A second plugin of SGLang for `record_full_size.py` alone: random weights, and a gate.

Dummy weights as SGLang makes them are no good for timing more than one token: every layer gets the
same values, FP8 matrices round to zero, norms of 0.001 leave the router nothing to tell tokens apart
by, and packed FP4 codes are whatever the memory held. Here each tensor gets its own seeded noise of
about a trained model's size, so that every token chooses its own experts and nothing overflows.

The gate holds the scheduler process before it touches the GPU until a file appears: the imports of the
next server (25 s of Python) overlap with the measuring of the present one, in turn on one GPU.

Marlin's module is compiled from a copy of SGLang's sources with the kernels of an MXFP4 checkpoint alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import shutil
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


OTHER_KERNELS = re.compile(r"^  (?!MXFP4)[A-Z0-9]+_GET_IF\(host::\w+\)$", re.MULTILINE)


def marlin_folder(installed: Path, folder: Path) -> Path:
    """A copy of SGLang's Marlin sources that instantiates the MXFP4 kernels alone; returns its main
    file. The full module (some 200 kernels in one file) compiles for more than five minutes on an
    H200's host; the twelve that an MXFP4 checkpoint can choose from are the same code.

    Raises:
        ValueError: the sources do not look as those of SGLang 0.5.23.
    """
    made = folder / "gemm" / "marlin_moe" / "moe_wna16_marlin.cuh"
    if made.exists():  # one path for all servers: it is part of the compiled module's name
        return made
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.copytree(installed / "gemm", part / "gemm", dirs_exist_ok=True)
    short = part / made.relative_to(folder)
    text, dropped = OTHER_KERNELS.subn("", short.read_text())
    if dropped != 7 or "    MXFP4_GET_IF(host::kFE2M1f)" not in text:
        raise ValueError(f"{dropped} groups of kernels found in {short}, not 7")
    short.write_text(text)
    with contextlib.suppress(OSError):  # another server was faster
        part.rename(folder)
    return made


def short_marlin(folder: Path) -> None:
    """Let SGLang compile the short copy when it asks for its Marlin module."""
    import sglang
    from sglang.kernels.ops.moe import moe_wna16_marlin

    source = Path(sglang.__file__).parent / "kernels" / "jit" / "csrc"
    short = marlin_folder(source, folder)
    original = moe_wna16_marlin.load_jit

    def load_jit(*args: Any, cuda_files: list[str], **kwargs: Any) -> Any:
        logger.warning("compiling Marlin's MXFP4 kernels alone")
        return original(*args, cuda_files=[str(short)], **kwargs)

    moe_wna16_marlin.load_jit = load_jit


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
    if folder := os.environ.get("FULL_SIZE_MARLIN"):
        try:
            short_marlin(Path(folder))
        except (ImportError, OSError, ValueError):  # then it compiles the whole module
            logger.exception("full-size recording: Marlin's module stays as it is")
    if gate := os.environ.get("FULL_SIZE_GATE"):
        _gate(Path(gate))
