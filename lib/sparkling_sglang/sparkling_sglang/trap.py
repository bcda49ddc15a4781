"""The trap, on purpose: a draft that gets the FP8 head's tensor without its quantization state.

``SPARKLING_TRAP=tensor-only``, for teaching. Nothing raises, every shape fits, and the answers stay
right because each draft is verified; the draft is noise, and decoding is slower than without one.

Which misreading does it was measured on Sparklet (accept length of NEXTN 3/1/4 on greedy problems,
3.79 with the whole head; ``tests/sparklet/test_trap.py``). Dropping the row scales alone is not
enough: 2.5, since the rows' scales differ by a factor of 6 only. With one scale for the whole tensor
dropping it changes nothing (3.8). The noise comes from what SGLang's plain head product does next
(``LogitsProcessor._compute_lm_head``): it casts the activations to the *weight's* dtype and returns
the product in it. Bare e4m3 codes give logits in the thousands, e4m3 ends at 448, most of the
vocabulary saturates, and argmax takes the first of the ties: 1.03. That is what is reproduced here.
Reading the codes as unsigned bytes, or pairs of them as BF16, gives 1.00 as well.

SGLang 0.5.23 by itself runs into this on a CPU only; on CUDA torch refuses the product of two e4m3
matrices while the draft's graph is captured. So the product is done here in float32 and rounded to
e4m3 afterwards: the same values on every device, but slower than the head that it pretends to be. On an
H200 three such products made a round at full size last 16.3 ms instead of 10.9 (docs/design.md).
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch

from sparkling_sglang import share_head, status
from sparkling_sglang.fp8_head import FP8, FP8_MAX, dequantized_product
from sparkling_sglang.switches import TENSOR_ONLY, TRAP, Switches

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

WARNING = (
    f"{TRAP}={TENSOR_ONLY}: THIS SERVER IS BROKEN ON PURPOSE.",
    "The NEXTN draft has the FP8 head's tensor without its scales and its method.",
    "Answers stay right, no draft is of use, decoding is slower than without speculation.",
    f"It is for teaching only: unset {TRAP} for anything else.",
)

logger = logging.getLogger("sparkling_sglang")


def banner() -> str:
    """The warning in a frame that stands out of a log."""
    width = max(map(len, WARNING))
    bar = "!" * (width + 8)
    return "\n".join(("", bar, *(f"!!! {line:<{width}} !!!" for line in WARNING), bar))


def bare_product(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What ``x.to(e4m3) @ q.T`` gives: bare codes as weights, the result in e4m3, saturated.

    Args:
        x: [tokens, hidden], any float dtype; q: [rows, hidden] float8_e4m3fn.

    Returns:
        [tokens, rows] float8_e4m3fn.
    """
    codes = x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)
    ones = torch.ones(q.shape[0], device=q.device)
    return dequantized_product(codes, q, ones).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


class TensorOnlyMethod:
    """The draft head's ``quant_method`` in the trap."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [tokens, rows] in the dtype of ``x`` [tokens, hidden]."""
        return bare_product(x, layer.weight).to(x.dtype)


def refusal(wanted: Switches, args: Any = None) -> str | None:
    """Why the trap cannot be set so, in one sentence, or None. ``args``: SGLang's, if resolved."""
    if wanted.trap is None:
        return None
    if wanted.trap != TENSOR_ONLY:
        return f"{TRAP}={wanted.trap} is unknown: the one trap is {TENSOR_ONLY}, or unset it."
    if not wanted.fp8_head:
        return (
            f"{TRAP}={TENSOR_ONLY} needs a quantized head to take the scales from: set "
            f"SPARKLING_FP8_LM_HEAD=1, or unset {TRAP}."
        )
    if wanted.share_head:
        return (
            f"{TRAP}={TENSOR_ONLY} and SPARKLING_SHARE_HEAD=1 contradict each other: unset one of "
            "them."
        )
    if args is not None and not args.speculative_algorithm:
        return (
            f"{TRAP}={TENSOR_ONLY} needs a draft: start with --speculative-algorithm NEXTN, or "
            f"unset {TRAP}."
        )
    return None


def _checked(wanted: Switches, args: Any) -> None:
    """After ``ServerArgs.check_server_args`` in the main process: refuse, or warn."""
    reason = refusal(wanted, args)
    if reason:
        raise SystemExit(f"sparkling_sglang: error: {reason}")
    # The log is not configured yet, and may never be read: stderr always is.
    print(banner(), file=sys.stderr, flush=True)


def _spring(_result: Any, worker: Any) -> None:
    """After ``EagleDraftWorker.init_lm_head``, which has shared the tensor: set the trap."""
    draft = worker.draft_runner.model
    if type(draft).__name__ != share_head.DRAFT_CLASS:
        return
    draft.lm_head.quant_method = TensorOnlyMethod()
    status.update(draft={"trap": TENSOR_ONLY})
    logger.warning(banner())


def register_main(patches: Patches, wanted: Switches) -> None:
    """Refuse what cannot be a trap before SGLang starts its other processes, and warn."""
    patches.hook(
        "trap",
        "sglang.srt.server_args.ServerArgs.check_server_args",
        lambda _result, args: _checked(wanted, args),
        "after",
    )


def register(patches: Patches) -> None:
    """Set the trap once the draft has the target's tensor (scheduler process)."""
    patches.hook(
        "trap",
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
        _spring,
        "after",
    )
