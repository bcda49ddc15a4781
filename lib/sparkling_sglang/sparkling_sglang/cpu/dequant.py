"""FP8 and MXFP4 checkpoints on a CPU: their weights become BF16 while they are loaded.

SGLang's kernels for both formats need a GPU (or AMX). Of a checkpoint whose ``quantization_config``
says block FP8, with or without MXFP4 routed experts (Ling-3.0-flash-fp4's layout), two things are
changed: the model is built without a quantization method, and ``load_weights`` sees each pair
``X.weight`` / ``X.weight_scale_inv`` as one BF16 ``X.weight``. E4M3 and E2M1 values times a power
of two are exact in BF16, so with ``scale_fmt: ue8m0`` nothing is rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

logger = logging.getLogger("sparkling_sglang")

SCALE = "_scale_inv"  # "X.weight" + SCALE is the name of its scale
GROUP = 32  # MXFP4: values per scale
# OCP Microscaling Formats 1.0, E2M1: magnitudes by code; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_block(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """BF16 [n, k] of ``weight`` float8_e4m3fn [n, k] and ``scale`` [ceil(n/bn), ceil(k/bk)].

    Raises:
        ValueError: the scale's shape does not belong to the weight's.
    """
    n, k = weight.shape
    if tuple(scale.shape) != (-(-n // block[0]), -(-k // block[1])):
        raise ValueError(f"scale {tuple(scale.shape)} does not fit an FP8 weight {(n, k)}")
    factor = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight.float() * factor[:n, :k]).to(torch.bfloat16)


def mxfp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """BF16 [n, k] of ``weight`` int8 [n, k/2] (low nibble first) and E8M0 ``scale`` [n, k/32].

    Raises:
        ValueError: the scale's shape does not belong to the weight's.
    """
    n, half = weight.shape
    if tuple(scale.shape) != (n, half * 2 // GROUP):
        raise ValueError(f"scale {tuple(scale.shape)} does not fit an MXFP4 weight {(n, half)}")
    raw = weight.view(torch.uint8)
    codes = torch.stack([raw & 15, raw >> 4], -1).flatten(1).long()
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])[codes]
    factor = torch.exp2(scale.view(torch.uint8).float() - 127)
    return (values.unflatten(1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(1).to(torch.bfloat16)


def dequantized(
    weights: Iterable[tuple[str, torch.Tensor]], block: tuple[int, int] = (128, 128)
) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights`` with every quantized pair as one BF16 tensor; the rest passes through.

    The two halves may come in any order, from different files.

    Raises:
        ValueError: a quantized weight without a scale, a scale without a weight, or shapes that do
            not belong together.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        is_scale = name.endswith(".weight" + SCALE)
        quantized = tensor.dtype in (torch.float8_e4m3fn, torch.int8)
        if not is_scale and not (quantized and name.endswith(".weight")):
            yield name, tensor
            continue
        other = name.removesuffix(SCALE) if is_scale else name + SCALE
        if other not in waiting:
            waiting[name] = tensor
            continue
        found = waiting.pop(other)
        whole, scale = (found, tensor) if is_scale else (tensor, found)
        base = other if is_scale else name
        try:
            result = (
                mxfp4(whole, scale) if whole.dtype == torch.int8 else fp8_block(whole, scale, block)
            )
        except ValueError as error:
            raise ValueError(f"{base}: {error}") from None
        yield base, result
    if waiting:
        name = min(waiting)
        raise ValueError(f"{len(waiting)} tensors lack their other half, e.g. {name}")


def applies(config: dict[str, Any] | None) -> bool:
    """Whether a ``quantization_config`` is one that this module undoes: block FP8."""
    config = config or {}
    return config.get("quant_method") == "fp8" and config.get("weight_block_size") is not None


def _as_dict(config: Any) -> dict[str, Any]:
    return config if isinstance(config, dict) else getattr(config, "to_dict", dict)()


def build_without(
    original: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``_get_quantization_config``: None for what is dequantized while loading."""
    config = _as_dict(getattr(model_config.hf_config, "quantization_config", None))
    if not applies(config):
        return original(model_config, *args, **kwargs)
    experts = config.get("routed_experts_quant_method")
    logger.info(
        "FP8%s weights become BF16 while loading: this CPU has no kernels for them.",
        f" and {experts.upper()}" if experts else "",
    )
    return None


def load(
    original: Callable[..., Any],
    model: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around ``BailingMoeV3ForCausalLM.load_weights``, which the NextN model calls, too."""
    config = _as_dict(getattr(model.config, "quantization_config", None))
    if applies(config):
        rows, columns = config["weight_block_size"]
        weights = dequantized(weights, (rows, columns))
    return original(model, weights, *args, **kwargs)


def register(patches: Patches) -> None:
    patches.hook(
        "dequantize",
        "sglang.srt.model_loader.loader._get_quantization_config",
        build_without,
        "around",
    )
    patches.hook(
        "dequantize",
        "sglang.srt.models.bailing_moe_v3.BailingMoeV3ForCausalLM.load_weights",
        load,
        "around",
    )
