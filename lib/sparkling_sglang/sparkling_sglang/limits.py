"""Which SwiGLU limit every layer of Ling wants, which one it computes with, and who applies it.

Runs once a model is loaded, the target's and the NEXTN draft's, with or without
``SPARKLING_SWIGLU_CLAMP``: without it the status file says where stock SGLang drops a limit, with it
such a layer stops the server. Layers go by their number in the checkpoint, read from the name of
their weights: SGLang builds the NEXTN layer as layer 0, so it looks up entry 0 of both lists. Ling's
lists end with the last ordinary layer and begin with 0, so that gives no limit, which is what a
list without an entry says; a list that had one for the NEXTN layer would be read wrongly, and is
reported so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparkling_sglang import clamp, status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkling_sglang.patches import Patches

STOCK = ("triton",)
"""Runners that apply the limit after SiLU themselves. ``flashinfer_mxfp4`` does on SM90 and SM120,
where its method says so (``_use_swiglu_step``)."""

ROUTED, SHARED = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"

logger = logging.getLogger("sparkling_sglang")


def listed(limits: Sequence[float] | None, number: int) -> float | None:
    """Entry ``number`` of a checkpoint's list; None for 0, a missing entry or no list."""
    if limits is None or not 0 <= number < len(limits) or not limits[number]:
        return None
    return float(limits[number])


def applied(layer: Any) -> tuple[float | None, str | None]:
    """The limit with which a ``FusedMoE`` clamps after SiLU, and who does it.

    Returns:
        ``(limit, "sglang" | "sparkling")``, or ``(None, None)`` where nobody does.
    """
    config = layer.moe_runner_config
    limit = clamp.wanted(config)
    if limit is None:
        return None, None
    runner = runner_of(layer)
    if runner == "cpu":
        return limit, "sparkling"
    if runner in clamp.OURS:
        return (limit, "sparkling") if config.swiglu_limit == -limit else (None, None)
    stock = runner in STOCK or getattr(layer.quant_method, "_use_swiglu_step", False)
    return (limit, "sglang") if stock else (None, None)


def runner_of(layer: Any) -> str | None:
    """SGLang's name of the layer's MoE runner; ``cpu`` for this plugin's own."""
    weight = getattr(layer, "w13_weight", None)
    if weight is not None and weight.device.type == "cpu":
        return "cpu"
    return getattr(layer.moe_runner_config.runner_backend, "value", None)


def survey(model: Any, config: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """What the layers of a loaded model want and do.

    Args:
        model: the ``torch.nn.Module`` that SGLang serves.
        config: the checkpoint's text configuration.

    Returns:
        ``{"limits": {number: entry}, "shared_limits": {number: entry}}`` for the routed and the
        shared experts of each MoE layer; an entry is ``{"wanted", "applied", "by", "runner"}``.
    """
    routed: dict[str, dict[str, Any]] = {}
    shared: dict[str, dict[str, Any]] = {}
    by_module: dict[str, str] = {}  # "model.decoder.mlp" -> "42"
    for name, module in model.named_modules():
        # An unquantized layer's method is a module too, and has a copy of the configuration.
        if not (hasattr(module, "moe_runner_config") and hasattr(module, "layer_name")):
            continue
        number = next(filter(str.isdigit, module.layer_name.split(".")), None)
        if number is None:
            continue
        by_module[name.rpartition(".")[0]] = number
        limit, by = applied(module)
        limits = getattr(config, ROUTED, None)
        # A model without the lists wants what its code asks for.
        asked = clamp.wanted(module.moe_runner_config)
        routed[number] = {
            "wanted": asked if limits is None else listed(limits, int(number)),
            "applied": limit,
            "by": by,
            "runner": runner_of(module),
        }
        if getattr(module, "num_fused_shared_experts", 0):  # computed as one more routed expert
            wish = listed(getattr(config, SHARED, None), int(number))
            shared[number] = {"wanted": wish, "applied": limit, "by": by, "runner": "fused"}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last != "shared_experts" or parent not in by_module or module is None:
            continue
        number = by_module[parent]
        limit = getattr(module, "swiglu_limit", None)  # BailingMLP.forward applies it
        shared[number] = {
            "wanted": listed(getattr(config, SHARED, None), int(number)),
            "applied": float(limit) if limit else None,
            "by": "sglang" if limit else None,
            "runner": type(module).__name__,
        }
    return {"limits": routed, "shared_limits": shared}


def problems(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """A clause for every kind of layer whose limit is not the checkpoint's, e.g. ``layers 35 to 41
    want 4 for their routed experts and marlin applies none``."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for kind, entries in found.items():
        for number, entry in entries.items():
            if entry["wanted"] != entry["applied"]:
                key = (kind, entry["wanted"], entry["applied"], entry["runner"])
                groups.setdefault(key, []).append(int(number))
    said = []
    for (kind, wish, limit, runner), numbers in groups.items():
        layers = f"layer {numbers[0]} wants" if len(numbers) == 1 else (
            f"layers {min(numbers)} to {max(numbers)} want"
        )  # fmt: skip
        experts = "routed" if kind == "limits" else "shared"
        wish, limit = ("none" if x is None else f"{x:g}" for x in (wish, limit))
        said.append(f"{layers} {wish} for the {experts} experts and {runner} applies {limit}")
    return said


def _loaded(strict: bool, runner: Any) -> None:
    """After ``ModelRunner.load_model``, of the target and of a draft."""
    model_config = runner.model_config
    config = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    found = survey(runner.model, config)
    if not found["limits"]:
        return
    if status.current is not None:
        before = status.current.get("moe") or {}
        status.update(moe={kind: before.get(kind, {}) | found[kind] for kind in found})
    said = problems(found)
    if not said:
        return
    sentence = "SwiGLU limits are not the checkpoint's: " + "; ".join(said)
    if strict:
        raise clamp.ClampError(
            f"{sentence}: start with --moe-runner-backend {clamp.APPLYING}, and with "
            "--disable-shared-experts-fusion, or unset SPARKLING_SWIGLU_CLAMP and accept it."
        )
    logger.warning(f"{sentence}. SPARKLING_SWIGLU_CLAMP=1 applies them.")


def register(patches: Patches, *, strict: bool) -> None:
    """Report the limits once a model is loaded; with ``strict`` stop where one is not applied."""
    patches.hook(
        "limits",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        lambda _result, runner, *_a, **_k: _loaded(strict, runner),
        "after",
    )
