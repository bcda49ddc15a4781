"""What the FP8 LM head cannot go with: refused at start-up, in one sentence with the remedy.

Three moments. Arguments are looked at before SGLang starts its other processes; the loaded model
when its weights are there (a checkpoint can forbid it, too); and updates of the weights while the
server runs are refused by SGLang itself, which asks every module of the model for
``_derived_weight_cache_error`` (0.5.21 and newer). Without that an update would copy BF16 weights
into the e4m3 parameter: torch casts without a word, the old scales stay, and the logits are noise.
Memory that is released and resumed (``--enable-memory-saver``) is no danger: the FP8 tensors are made
after the region that SGLang releases, so they stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SWITCH = "SPARKLING_FP8_LM_HEAD"
HEAD = f"The FP8 LM head ({SWITCH})"
DROP = "drop one of them."
WITHOUT = f"start without {SWITCH}."

# Draft workers that take the target's tensor, and that the check of the draft's head never sees.
UNSEEN_DRAFTS = ("FROZEN_KV_MTP",)

# What SGLang gives a head that is not quantized (logits_processor._UNQUANTIZED_LM_HEAD_METHODS);
# PackWeightMethod is missing on purpose: it has brought the weight into another order.
PLAIN_METHODS = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")

UPDATE_REFUSED = (
    f"{HEAD} was quantized when the server started and cannot take other weights while it runs: "
    f"start the server on the new checkpoint, or {WITHOUT}"
)

ARGUMENTS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("enable_fp32_lm_head", bool, "and --enable-fp32-lm-head contradict each other"),
    ("tp_size", lambda n: n > 1, "works on one device and --tp-size is {value}"),
    ("pp_size", lambda n: n > 1, "works on one device and --pp-size is {value}"),
    ("enable_lora", bool, "cannot carry LoRA adapters"),
    ("lora_paths", bool, "cannot carry LoRA adapters"),
    (
        "enable_multi_layer_eagle",
        bool,
        "and --enable-multi-layer-eagle do not go together, whose drafts get the head's tensor "
        "without its scales",
    ),
    (
        "speculative_algorithm",
        lambda name: str(name).upper() in UNSEEN_DRAFTS,
        "and --speculative-algorithm {value} do not go together, whose draft gets the head's "
        "tensor without its scales",
    ),
    (
        "speculative_token_map",
        bool,
        "and --speculative-token-map do not go together, which takes rows of the head without "
        "their scales",
    ),
    (
        "startup_weight_load_mode",
        lambda mode: mode == "overlap",
        "is made of weights that are loaded, and --startup-weight-load-mode overlap loads them "
        "later",
    ),
    (
        "weight_cache_mode",
        lambda mode: mode != "off",
        "gives the BF16 head's memory back, and --weight-cache-mode {value} leaves it with another "
        "process",
    ),
    (
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        bool,
        "replaces the BF16 head, and --remote-instance-weight-loader-start-seed-via-transfer-engine "
        "would go on to hand its memory to other servers",
    ),
    (
        "rl_on_policy_target",
        bool,
        "changes the logits, and --rl-on-policy-target {value} wants those of a trainer",
    ),
)
"""Field of SGLang's ServerArgs, whether its value forbids the head, and the middle of the sentence."""


def refusal(args: Any) -> str | None:
    """Why the server's arguments forbid an FP8 head, in one sentence, or None.

    Args:
        args: SGLang's ``ServerArgs``. That it has these fields is asserted by the test of the
            installed SGLang; one that is missing forbids nothing.
    """
    for name, forbids, why in ARGUMENTS:
        value = getattr(args, name, None)
        if value is not None and forbids(value):
            return f"{HEAD} {why.format(value=value)}: {DROP}"
    return None


def refusal_of_model(model: Any) -> str | None:
    """Why a loaded target model's head cannot be quantized, in one sentence, or None."""
    head = getattr(model, "lm_head", None)
    if head is None:
        return f"{type(model).__name__} has no lm_head to quantize to FP8: {WITHOUT}"
    if hasattr(head, "set_lora"):
        return f"{HEAD} cannot carry LoRA adapters: {DROP}"
    weight = getattr(head, "weight", None)
    method = type(getattr(head, "quant_method", None)).__name__
    if weight is None or method not in (*PLAIN_METHODS, "NoneType"):
        return (
            f"The checkpoint's or the server's quantization holds lm_head already ({method}): "
            f"{WITHOUT}"
        )
    config = getattr(model, "config", None)
    others = (p for m in model.modules() if m is not head for p in m.parameters(recurse=False))
    if getattr(config, "tie_word_embeddings", False) or any(p is weight for p in others):
        return (
            "The checkpoint ties lm_head to the word embeddings, which need BF16: start without "
            "SPARKLING_FP8_LM_HEAD."
        )
    for name in ("enable_lm_head_fp32", "enable_lm_head_output_fp32"):
        if getattr(config, name, False):
            return f"The checkpoint asks for a float32 lm_head ({name}): {WITHOUT}"
    return None


def refuse_updates(head: Any) -> None:
    """Let SGLang refuse every update of the weights at run time: see the module's docstring."""
    head._derived_weight_cache_error = UPDATE_REFUSED
