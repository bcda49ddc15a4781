"""The LM head alone: BF16, BF16 with float32 output, and the plugin's FP8, at a few rows.

Several copies of the weights take turns, so that none of what a call reads is in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkling_sglang import fp8_head
from sparkling_sglang.shapes_timing import Step

ROWS = (1, 2, 3, 4, 8)
COPIES = 3
CALLS = 12
CHECKED = 4096  # vocabulary entries whose logits are compared with float32


@dataclass(frozen=True)
class HeadShape:
    """Vocabulary and hidden size; Ling-3.0-flash's by default."""

    vocab: int = 157_184
    hidden: int = 2_560

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.vocab * self.hidden


def _head(weight: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.quant_method = None
    return module


def _error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact logits."""
    got = logits[:, : exact.shape[1]].float()
    return float((got - exact).norm() / exact.norm())


def _forms(heads: list[torch.nn.Module]) -> Iterator[tuple[str, str, int, Callable[..., Any]]]:
    """Format, kernel, bytes of one head and the product `f(x, copy)`; FP8 last, since it replaces
    the BF16 weights as it does in a server."""
    stored = heads[0].weight.numel() * heads[0].weight.element_size()
    yield "BF16", "torch.matmul", stored, lambda x, i: torch.matmul(x, heads[i].weight.T)
    # What logits_processor.py of SGLang 0.5.23 calls for --enable-fp32-lm-head on CUDA.
    yield (
        "FP32-out",
        "torch.mm(out_dtype=float32)",
        stored,
        lambda x, i: torch.mm(x, heads[i].weight.T, out_dtype=torch.float32),
    )
    sizes = [fp8_head.quantize_head(head)[1] for head in heads]
    yield (
        "FP8",
        str(heads[0].quant_method.kernel),
        sizes[0],
        lambda x, i: heads[i].quant_method.apply(heads[i], x),
    )


def measure(
    timer: Any,
    device: torch.device,
    shape: HeadShape | None = None,
    *,
    rows: tuple[int, ...] = ROWS,
    copies: int = COPIES,
    calls: int = CALLS,
) -> Iterator[dict[str, Any]]:
    """One case after the other: its time, bytes read, and how far its logits are from float32's.

    FP8 is the product as served: `quantize_head` and its method, BF16 logits as output.
    """
    shape = shape or HeadShape()
    noise = torch.Generator(device=device).manual_seed(1)
    heads = []
    for _ in range(copies):
        weight = torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=device)
        heads.append(_head(weight.normal_(0, 0.02, generator=noise)))
    inputs = {
        m: torch.randn(m, shape.hidden, generator=noise, device=device).to(torch.bfloat16)
        for m in rows
    }
    sample = heads[0].weight[: min(CHECKED, shape.vocab)].float()
    exact = {m: x.float() @ sample.T for m, x in inputs.items()}
    forms = _forms(heads)
    while True:
        try:
            form = next(forms, None)
        except Exception as error:  # the FP8 head could not be made: the other cases stand
            yield {"format": "FP8", "error": f"{type(error).__name__}: {error}"[:300]}
            return
        if form is None:
            return
        name, kernel, size, product = form
        for m, x in inputs.items():
            case = {"format": name, "rows": m, "kernel": kernel, "bytes": size}
            step: Step = lambda i, x=x, product=product: product(x, i % copies)  # noqa: E731
            if details := getattr(heads[0].quant_method, "details", None):
                case["details"] = details  # how the kernel was chosen
            try:
                error = _error(step(0), exact[m])
                if not math.isfinite(error):
                    raise RuntimeError("its logits have values that are no numbers")
                case["relative_error"] = error
                case |= timer.time(step, calls).to_json()
            except Exception as error:
                case["error"] = f"{type(error).__name__}: {error}"[:300]
            yield case
