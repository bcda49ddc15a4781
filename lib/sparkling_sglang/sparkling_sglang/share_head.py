"""The NEXTN draft uses the target's LM head: the module, not only its weight tensor.

SGLang 0.5.23 gives the draft the target's weight tensor (``set_embed_and_head``) and hands over the
module only to models that define ``set_lm_head_from_target``; ``BailingMoeForCausalLMNextN`` does
not. With a BF16 head that is enough. With a quantized one the draft would multiply bare FP8 codes
without their scales: every token is still verified, so the text stays right and only the accept
length tells, 1.00. Hence the handover, and a check that stops the server instead.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparkling_sglang import status, switches

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

DRAFT_CLASS = "BailingMoeForCausalLMNextN"

logger = logging.getLogger("sparkling_sglang")


class DraftHeadError(RuntimeError):
    """The draft's LM head is not the target's; the message is one sentence with the remedy."""


def difference(target: Any, draft: Any) -> str | None:
    """How the draft's head computes something else than the target's, or None.

    Two modules are equal when they hold the same weight and scale tensors and use the same method.
    """
    if draft is target:
        return None
    if draft.weight is not target.weight:
        return "it has another weight tensor"
    if getattr(draft, "weight_scale", None) is not getattr(target, "weight_scale", None):
        return "it lacks the scales of the quantized weight"
    ours, theirs = type(draft.quant_method).__name__, type(target.quant_method).__name__
    if ours != theirs:
        return f"it multiplies with {ours} and the target with {theirs}"
    return None


def set_lm_head_from_target(self: Any, target_lm_head: Any) -> None:
    """What SGLang calls on a draft model that defines it: take over the whole module."""
    self.lm_head = target_lm_head


def _hand_over(worker: Any) -> None:
    """Before ``EagleDraftWorker.init_lm_head``: teach the draft's class to take the module."""
    model = type(worker.draft_runner.model)
    if model.__name__ == DRAFT_CLASS and not hasattr(model, "set_lm_head_from_target"):
        model.set_lm_head_from_target = set_lm_head_from_target


def _check(strict: bool, worker: Any) -> None:
    """After ``EagleDraftWorker.init_lm_head``: report, and stop the server if it must be shared."""
    from sglang.srt.lora.layers import unwrap_lora_layer

    draft = worker.draft_runner.model
    target = unwrap_lora_layer(getattr(worker.target_worker.model_runner.model, "lm_head", None))
    if type(draft).__name__ != DRAFT_CLASS:
        _check_other(strict, target, draft)
        return
    problem = difference(target, draft.lm_head)
    dtype = status.dtype_name(draft.lm_head.weight.dtype)
    status.update(
        draft={
            "class": type(draft).__name__,
            "head_shared": problem is None,
            "head_is_target_module": draft.lm_head is target,
            "head_dtype": dtype,
        }
    )
    if problem is None:
        logger.info("The NEXTN draft uses the target's lm_head (%s).", dtype)
        return
    if switches.read().trap:
        remedy = f"unset {switches.TRAP}, which does this on purpose."
    else:
        remedy = "leave SPARKLING_SHARE_HEAD unset or at 1, or start without NEXTN."
    sentence = (
        f"The NEXTN draft's lm_head is not the target's: {problem}, so its drafts would not be "
        f"accepted: {remedy}"
    )
    if strict:
        raise DraftHeadError(sentence)
    logger.warning(sentence)  # where a trap was set, its own warning stands above


def _check_other(strict: bool, target: Any, draft: Any) -> None:
    """Another model's draft is left alone, unless it took a quantized head's tensor only."""
    head = getattr(draft, "lm_head", None)
    if head is None or not hasattr(target, "weight_scale"):
        return
    problem = difference(target, head) if head.weight is target.weight else None
    if problem is None:
        return
    sentence = (
        f"The draft {type(draft).__name__} took the target's FP8 lm_head as a bare tensor: "
        f"{problem}, so its drafts would not be accepted: start without SPARKLING_FP8_LM_HEAD, or "
        "without speculation."
    )
    if strict:
        raise DraftHeadError(sentence)
    logger.warning(sentence)


def register(patches: Patches, *, hand_over: bool) -> None:
    """Check the draft's head in any case; with ``hand_over`` also share the module and insist."""
    target = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head"
    if hand_over:
        patches.hook("share-head", target, _hand_over, "before")
    patches.hook("share-head", target, lambda _result, worker: _check(hand_over, worker), "after")
