"""Whether a checkpoint's LM head can be quantized to FP8 at all, known before a server is started.

The plugin refuses the same once the weights are loaded, which on a Spark is minutes later. Only
`config.json` and one header are read here; what cannot be read forbids nothing.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import weightcheck
from sparkling.errors import SparklingError, UsageError

if TYPE_CHECKING:
    from sparkling.recipe import Launch

NAME = "lm_head.weight"
PLAIN = ("BF16", "F16", "F32")
FP32_LOGITS = ("enable_lm_head_fp32", "enable_lm_head_output_fp32")


def require(launch: Launch) -> None:
    """Raise UsageError when the launch quantizes a head that the checkpoint does not allow it for."""
    if not launch.switches.get("fp8-head"):
        return
    words = launch.words("model-path") or launch.words("model") or ()
    if not words:
        return
    override: dict[str, Any] = {}
    with contextlib.suppress(ValueError, TypeError):
        override = json.loads(launch.value("json-model-override-args") or "{}")
    reason = refusal(Path(words[0]), override)
    if reason:
        raise UsageError(f"Stage {launch.stage} is not started: {reason}")


def refusal(checkpoint: Path, override: dict[str, Any] | None = None) -> str | None:
    """Why this checkpoint's head cannot be quantized, in one sentence, or None.

    Args:
        checkpoint: its folder; a name on a model hub is no folder, and then nothing is known.
        override: fields that --json-model-override-args lays over its configuration.
    """
    config: Any = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    config = (config if isinstance(config, dict) else {}) | (override or {})
    if config.get("tie_word_embeddings") is True:
        return (
            f"{checkpoint} ties its LM head to the word embeddings, which need BF16; choose a stage "
            "without the FP8 head."
        )
    for name in FP32_LOGITS:
        if config.get(name) is True:
            return (
                f"{checkpoint} asks for a float32 LM head ({name}); choose a stage without the FP8 "
                "head."
            )
    dtype = _dtype(checkpoint)
    if dtype is not None and dtype not in PLAIN:
        return (
            f"{checkpoint} stores its LM head as {dtype}, so it is quantized already; choose a stage "
            "without the FP8 head."
        )
    return None


def _dtype(checkpoint: Path) -> str | None:
    """Dtype of the stored head; None where that cannot be told from one file's header."""
    with contextlib.suppress(OSError, ValueError, SparklingError, AttributeError):
        index = checkpoint / "model.safetensors.index.json"
        name = "model.safetensors"
        if index.is_file():
            name = json.loads(index.read_text("utf-8"))["weight_map"].get(NAME, "")
        if name and (checkpoint / name).is_file():
            tensor = weightcheck.header(checkpoint / name).get(NAME)
            return tensor.dtype if tensor else None
    return None
