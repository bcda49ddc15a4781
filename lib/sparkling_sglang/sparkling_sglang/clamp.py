"""Ling's SwiGLU limit for its routed experts, where SGLang's runner drops it.

Ling-3.0 clamps the routed experts of its last seven layers (``expert_swiglu_limit_list``), after
SiLU: ``min(silu(gate), limit) * clamp(up, -limit, limit)``. SGLang 0.5.23's model passes the limit
as ``gemm1_clamp_limit``; the Triton runner and ``flashinfer_mxfp4`` on SM90 and SM120 apply it
(``fused_moe._swiglu_silu_clamp_mul``, FlashInfer's ``SwigluStep``). The Humming runner reads only
``swiglu_limit`` (DeepSeek-V4's clamp *before* SiLU, another function), and so does Marlin unless
``gemm1_alpha`` is set: both drop Ling's limit without a word.

``SPARKLING_SWIGLU_CLAMP=1`` passes the limit to those two as a *negative* ``swiglu_limit``, which
no model of SGLang uses, and lets their activation (a kernel of its own between the two products)
answer to it. The number travels where SGLang carries its own limit, also through its custom
operators and compiled graphs. Layers without a limit are built and run as before. A runner that
would neither apply the limit itself nor take ours stops the server (:class:`ClampError`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

MOE = "sglang.srt.layers.moe."
RUNNER = MOE + "moe_runner.runner.MoeRunner.__init__"
HUMMING = MOE + "moe_runner.humming.HummingRunnerCore.apply_activation"
MARLIN = MOE + "fused_moe_triton.fused_marlin_moe.swiglu_limit_func"

OURS = ("humming", "marlin")
"""Runners whose activation this module changes."""

logger = logging.getLogger("sparkling_sglang")


class ClampError(RuntimeError):
    """A layer's SwiGLU limit cannot be applied; the message is one sentence with the remedy."""


def swiglu(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    """``out = min(silu(gate), limit) * clamp(up, -limit, limit)``, rounded once.

    Args:
        gate_up: [rows, 2 * columns], gate first, any float dtype.
        out: [rows, columns]; overwritten.
        limit: > 0. NaN stays NaN.
    """
    if gate_up.is_cuda:
        from sparkling_sglang import clamp_kernel

        clamp_kernel.launch(gate_up, out, limit)
        return
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate).clamp_(max=limit) * up.clamp(-limit, limit))


def wanted(config: Any) -> float | None:
    """The limit after SiLU that a layer's ``MoeRunnerConfig`` asks for, or None.

    With ``gemm1_alpha`` the same field means GPT-OSS's activation, and with SiTU (Kimi) that one's
    factor: none of ours.
    """
    other = config.gemm1_alpha is not None or config.activation == "situ"
    if other or not config.gemm1_clamp_limit:
        return None
    return float(config.gemm1_clamp_limit)


APPLYING = "humming, marlin or, on SM90 and SM120, flashinfer_mxfp4"
"""For a remedy: values of ``--moe-runner-backend`` with which Ling's MXFP4 experts obey."""


def _refuse(config: Any, runner: str, why: str, instead: str) -> ClampError:
    return ClampError(
        f"Layer {config.layer_id} limits its experts' SwiGLU to {wanted(config):g} and the MoE "
        f"runner {runner} {why}: start {instead}, or unset SPARKLING_SWIGLU_CLAMP and accept "
        "another model."
    )


def mark(config: Any, runner: str, *, lora: bool = False, standard: bool = True) -> None:
    """Put a layer's limit where the hooked activation of ``runner`` finds it.

    Args:
        config: the layer's ``MoeRunnerConfig``; its ``swiglu_limit`` becomes ``-limit``.
        runner: SGLang's name of the MoE runner backend.
        lora: whether the layer runs LoRA's variant of the runner.
        standard: whether tokens stay on their GPU (no all-to-all backend).

    Raises:
        ClampError: the runner's activation would not see the limit.
    """
    limit = wanted(config)
    if limit is None or runner not in OURS:
        return
    if config.swiglu_limit == -limit:  # the same configuration, built twice
        return
    if config.swiglu_limit is not None:
        why = f"has another limit of {config.swiglu_limit:g} before SiLU"
        raise _refuse(config, runner, why, "a model that has one of them")
    if config.activation != "silu" or not config.is_gated:
        why = f"is to run the activation {config.activation}{'' if config.is_gated else ' ungated'}"
        raise _refuse(config, runner, why, "a model whose experts are gated with SiLU")
    if lora:
        raise _refuse(config, runner, "applies none with LoRA", "without LoRA on the experts")
    if not standard:
        why = "applies none behind an all-to-all backend"
        raise _refuse(config, runner, why, "without --moe-a2a-backend")
    config.swiglu_limit = -limit


def _building(_runner: Any, backend: Any, config: Any, lora_enabled: bool = False) -> None:
    """Before ``MoeRunner.__init__(backend, config, lora_enabled)``."""
    if wanted(config) is None:
        return
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    standard = get_moe_a2a_backend().is_none()
    mark(config, backend.value, lora=lora_enabled, standard=standard)


def _humming(
    original: Callable[..., None], core: Any, inputs: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Around ``HummingRunnerCore.apply_activation(inputs, outputs)``."""
    limit = core.swiglu_limit
    if limit is None or limit >= 0:
        original(core, inputs=inputs, outputs=outputs)
        return
    swiglu(inputs.view(-1, inputs.shape[-1]), outputs.view(-1, outputs.shape[-1]), -limit)


def _marlin(
    original: Callable[..., None],
    output: torch.Tensor,
    gate_up: torch.Tensor,
    swiglu_limit: float = 0.0,
) -> None:
    """Around ``fused_marlin_moe.swiglu_limit_func(output, input, swiglu_limit)``."""
    if swiglu_limit >= 0:
        original(output, gate_up, swiglu_limit)
    else:
        swiglu(gate_up, output, -swiglu_limit)


def register(patches: Patches) -> None:
    """Hook the two runners that drop the limit (scheduler process of a GPU engine)."""
    patches.hook("clamp", RUNNER, _building, "before")
    patches.hook("clamp", HUMMING, _humming, "around")
    patches.hook("clamp", MARLIN, _marlin, "around")
