"""The LM head in FP8, quantized while the server starts.

SGLang 0.5.23 has no such thing: ``SGLANG_ENABLE_FP8_LM_HEAD`` belongs to a fork and is ignored by
the released version. The head of Ling-3.0-flash is 157,184 x 2,560, so in BF16 every decode step
reads 805 MB for it; one byte per weight halves that.

After the target's weights are loaded the head is quantized per row to ``float8_e4m3fn`` with a
float32 scale for each row (= vocabulary entry), the BF16 tensor is dropped, and the head's
``quant_method`` becomes :class:`Fp8HeadMethod`, which SGLang's logits processor calls for decode,
verification and log-probabilities alike.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from sparkling_sglang import head_choice, status
from sparkling_sglang.head_refusals import refusal, refusal_of_model, refuse_updates

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448

# Rows at a time, for quantizing and for multiplying: bounds the temporary copy (8,192 x 2,560 in
# float32 is 84 MB).
CHUNK_ROWS = 8192

LOG_LINE = "Online FP8 quantization enabled for lm_head."

logger = logging.getLogger("sparkling_sglang")


class HeadError(RuntimeError):
    """The LM head cannot be served in FP8; the message is one sentence with the remedy."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row symmetrically to e4m3, so that its largest magnitude becomes 448.

    Args:
        weight: [rows, hidden], any float dtype.

    Returns:
        ``q`` [rows, hidden] float8_e4m3fn and ``scale`` [rows] float32 with ``weight ~ q * scale``.
        Per entry the error is at most 2**-4 of its magnitude plus 2**-10 of the scale (half a
        step of e4m3's 3 mantissa bits, and of its subnormals).

    Raises:
        HeadError: the weight holds infinities or NaN.
    """
    q = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        part = weight[rows].float()
        largest = part.abs().amax(dim=1)
        if not bool(torch.isfinite(largest).all()):
            raise HeadError(
                "The LM head holds infinite or NaN weights and cannot be quantized to FP8: check "
                "the checkpoint, or start without SPARKLING_FP8_LM_HEAD."
            )
        # A row of zeros (vocabulary padding), or so small that float32 holds no such scale, gets
        # scale 1 instead of dividing by 0.
        step = largest / FP8_MAX
        scale[rows] = torch.where(step > 0, step, 1.0)
        q[rows] = (part / scale[rows].unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return q, scale


def dequantized_product(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x @ (q * scale).T`` in float32, a chunk of rows at a time; runs on any device.

    e4m3 values are exact in float32 and the scale is applied to the product, so the only rounding
    is float32's.

    Args:
        x: [tokens, hidden]; q: [rows, hidden] float8_e4m3fn; scale: [rows] float32.

    Returns:
        [tokens, rows] float32.
    """
    x = x.float()
    out = torch.empty(x.shape[0], q.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, q.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        torch.matmul(x, q[rows].float().t(), out=out[:, rows])
    return out.mul_(scale)


def dequantized_bf16_product(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same for many BF16 tokens on a GPU: BF16 operands, which hold e4m3 exactly.

    Args and Returns: as :func:`dequantized_product`, but the result is BF16; the product is
    accumulated and scaled in float32 and rounded once.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cuda" or not len(x):
        return dequantized_product(x, q, scale)
    out = torch.empty(x.shape[0], q.shape[0], dtype=x.dtype, device=x.device)
    for start in range(0, q.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        part = torch.mm(x, q[rows].to(x.dtype).t(), out_dtype=torch.float32)
        out[:, rows] = part.mul_(scale[rows])
    return out


class Fp8HeadMethod:
    """A head's ``quant_method``: SGLang calls :meth:`apply` in place of its BF16 product.

    Args:
        q: [rows, hidden] float8_e4m3fn; scale: [rows] float32. Not kept, but the product is chosen
            for them.
        count: keep the number of products in :attr:`applied`, a tensor on the device, so that a
            product replayed from a CUDA graph counts too.
    """

    def __init__(self, q: torch.Tensor, scale: torch.Tensor, *, count: bool = False) -> None:
        choice = head_choice.choose(q, scale, dequantized_product, dequantized_bf16_product)
        self.kernel, self.details, self._product = choice.name, choice.details, choice.product
        self.applied = torch.zeros((), dtype=torch.int64, device=q.device) if count else None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [tokens, rows] in the dtype of ``x`` [tokens, hidden], as the BF16 head gives."""
        if self.applied is not None:
            self.applied.add_(1)
        logits = self._product(x, layer.weight, layer.weight_scale)
        if bias is not None:
            logits = logits.float() + bias.float()
        return logits.to(x.dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing: SGLang calls it on every method when a session of weight updates ends."""


def quantize_head(head: Any, *, count: bool = False) -> tuple[int, int]:
    """Replace a loaded ``ParallelLMHead``'s weight by its FP8 form, in place.

    ``head.weight`` becomes a float8_e4m3fn parameter of the same shape and ``head.weight_scale`` a
    float32 parameter [rows]; nothing keeps the original alive.

    Returns:
        Bytes of the head before and after, scales included.

    Raises:
        HeadError: see :func:`quantize_rows`; also if the weight is no 16- or 32-bit float.
    """
    weight = head.weight.data
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise HeadError(
            f"The LM head is already stored as {status.dtype_name(weight.dtype)}: start without "
            "SPARKLING_FP8_LM_HEAD."
        )
    before = weight.numel() * weight.element_size()
    q, scale = quantize_rows(weight)
    del head.weight, weight  # gone before the kernel is chosen, which takes memory, too
    head.weight = torch.nn.Parameter(q, requires_grad=False)
    head.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    head.quant_method = Fp8HeadMethod(q, scale, count=count)
    return before, q.numel() * q.element_size() + scale.numel() * scale.element_size()


def _loaded(_result: Any, runner: Any) -> None:
    """After ``ModelRunner.load_model``: quantize the target's head; the draft gets it later."""
    if runner.is_draft_worker:
        return
    reason = refusal(runner.server_args) or refusal_of_model(runner.model)
    if reason:
        raise HeadError(reason)
    head = runner.model.lm_head
    before_dtype = status.dtype_name(head.weight.dtype)
    before, after = quantize_head(head, count=status.current is not None)
    refuse_updates(head)
    method = head.quant_method
    # The wording of the first sentence is the fork's, so one log parser reads both.
    logger.info(
        "%s %s -> float8_e4m3fn with %d row scales, %d -> %d bytes, kernel %s.",
        LOG_LINE,
        before_dtype,
        head.weight_scale.numel(),
        before,
        after,
        method.kernel,
    )
    if method.details:
        logger.info("FP8 LM head: %s", method.details)
    if status.current is not None:
        status.current.update(
            head={
                "dtype": status.dtype_name(head.weight.dtype),
                "bytes_before": before,
                "bytes_after": after,
                "kernel": method.kernel,
                **method.details,
            }
        )
        status.current.count_head(lambda: int(method.applied))


def _checked(_result: Any, args: Any) -> None:
    """After ``ServerArgs.check_server_args`` in the main process: refuse before anything starts."""
    reason = refusal(args)
    if reason:
        raise SystemExit(f"sparkling_sglang: error: {reason}")


def register_main(patches: Patches) -> None:
    """Refuse contradictory arguments before SGLang starts its other processes."""
    patches.hook(
        "fp8-head", "sglang.srt.server_args.ServerArgs.check_server_args", _checked, "after"
    )


def register(patches: Patches) -> None:
    """Quantize the target's head once its weights are loaded (scheduler process)."""
    patches.hook(
        "fp8-head",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        _loaded,
        "after",
    )
