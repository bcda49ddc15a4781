"""What SGLang's main process needs, where server arguments are resolved."""

from __future__ import annotations

import os

from sparkling_sglang.patches import Patches

MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def keep_amx_backend(view) -> dict:
    """Leave ``--attention-backend intel_amx`` alone on a CPU without AMX.

    SGLang would fall back to ``torch_native``, which has neither latent attention nor speculation.
    The backend's two operators come from ``sgl_kernel`` here and need no AMX. Only the CPU branch
    of ``_attention_backend_platform_fallbacks`` can apply on the CPU engine.
    """
    return {}


def register(patches: Patches) -> None:
    """Patch this process, and name this lane's models for the processes it starts."""
    patches.hook(
        "attention-backend",
        "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks",
        keep_amx_backend,
    )
    os.environ.setdefault(MODELS, "sparkling_sglang.cpu.models")
