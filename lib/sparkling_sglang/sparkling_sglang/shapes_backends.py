"""A layer of Ling's routed experts in MXFP4, prepared and run as SGLang 0.5.23 does it.

Weights are random codes. One token's output is compared with float32, from the weights as stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

GROUP = 32  # weights that share a scale in MXFP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_CODES = (118, 122)  # 2^-9 to 2^-6: activations stay near 1


@dataclass(frozen=True)
class ExpertShape:
    """Routed experts of a layer; Ling-3.0-flash's by default."""

    experts: int = 512
    top_k: int = 8
    hidden: int = 2_560
    intermediate: int = 768
    scaling: float = 2.5

    @property
    def expert_bytes(self) -> float:
        """One expert as the checkpoint stores it: three matrices of 4-bit codes and the scales."""
        return 3 * self.hidden * self.intermediate * (0.5 + 1 / GROUP)

    def expected_union(self, tokens: int) -> float:
        """Experts woken by tokens that choose independently: E (1 - (1 - k/E)^tokens)."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 as stored -> float32: codes [..., n, k / 2] uint8, the lower half first; scales
    [..., n, k / 32] uint8, exponents of two biased by 127."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device)
    values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1)
    values = values.flatten(-2)
    return values * torch.exp2(scales.float() - 127).repeat_interleave(GROUP, dim=-1)


class Layer(torch.nn.Module):
    """Random MXFP4 weights with the names and attributes that SGLang's preparations look for."""

    def __init__(self, shape: ExpertShape, device: torch.device, noise: torch.Generator) -> None:
        super().__init__()
        self.num_local_experts = shape.experts
        self.hidden_size = shape.hidden
        self.intermediate_size_per_partition = shape.intermediate
        self.params_dtype = torch.bfloat16
        self.with_bias = False
        self.layer_name = "model.layers.0.mlp.experts"
        for name, (n, k) in {
            "w13": (2 * shape.intermediate, shape.hidden),
            "w2": (shape.hidden, shape.intermediate),
        }.items():
            for suffix, low, high, width in (
                ("weight", 0, 256, k // 2),
                ("weight_scale", *SCALE_CODES, k // GROUP),
            ):
                size = (shape.experts, n, width)
                data = torch.randint(
                    low, high, size, dtype=torch.uint8, device=device, generator=noise
                )
                if suffix == "weight_scale":
                    data = data.view(torch.float8_e8m0fnu)
                self.register_parameter(
                    f"{name}_{suffix}", torch.nn.Parameter(data, requires_grad=False)
                )


def reference(layer: Layer, x: torch.Tensor, weights: torch.Tensor, scaling: float) -> torch.Tensor:
    """Float32 output [hidden] of one token through the layer's first experts, from the weights as
    stored (so before the backend rearranges them).

    x: [hidden]; weights: one for each of these experts. SwiGLU without a limit: silu(gate) * up.
    """
    total = torch.zeros(layer.hidden_size, device=x.device)
    for expert in range(len(weights)):
        w13, w2 = (
            dequantize(
                getattr(layer, f"{name}_weight")[expert].view(torch.uint8),
                getattr(layer, f"{name}_weight_scale")[expert].view(torch.uint8),
            )
            for name in ("w13", "w2")
        )
        gate, up = (w13 @ x.float()).chunk(2)
        total += weights[expert] * (w2 @ (torch.nn.functional.silu(gate) * up))
    return scaling * total


class Humming:
    """SGLang's Humming runner on such a layer (moe_runner/humming.py, indexed GEMM)."""

    name = "humming"
    scaled_weights = False

    def __init__(self, shape: ExpertShape) -> None:
        from sglang.srt.layers.moe.moe_runner import humming as runner
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
        from sglang.srt.layers.quantization.humming_utils import prepare_humming_moe_layer

        self._runner, self._prepare = runner, prepare_humming_moe_layer
        self._shape = shape
        self._gemm = runner.get_standard_humming_moe_gemm_type()
        self._config = MoeRunnerConfig(
            num_experts=shape.experts,
            num_local_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.intermediate,
            top_k=shape.top_k,
            params_dtype=torch.bfloat16,
            activation="silu",
            routed_scaling_factor=shape.scaling,
        )

    def prepare(self, layer: Layer) -> None:
        """Rearrange the weights as `process_weights_after_loading` of its MoE method does."""
        self._prepare(layer, {"quant_method": "mxfp4"})
        layer.core = self._runner.HummingRunnerCore(self._config)
        layer.core.layer = layer

    def run(
        self, layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """All that SGLang does for a layer once its router has chosen."""
        given = self._runner.HummingRunnerInput(
            hidden_states=x, topk_weights=weights, topk_ids=ids, gemm_type=self._gemm
        )
        info = self._runner.HummingMoeQuantInfo(layer=layer)
        return layer.core.run(given, info, {}).hidden_states

    def plan(self, layer: Layer, ids: torch.Tensor) -> list[dict[str, Any]]:
        """What SGLang works out from a route before the two products; the tensors are new ones."""
        return [dict(part) for part in layer.core._prepare_indexed_gemm_kwargs(ids)]

    def products(self, layer: Layer, x: torch.Tensor, plan: list[dict[str, Any]]) -> torch.Tensor:
        """The two products alone, on whatever activations stand in the buffer between them."""
        rows, shape = x.shape[0] * self._shape.top_k, self._shape
        between = x.new_empty(rows, 2 * shape.intermediate)
        out = x.new_empty(rows, shape.hidden)
        forward = self._runner.HummingMethod.forward_layer
        forward(layer=layer, inputs=x, outputs=between, sublayer_name="w13", **plan[0])
        half = between.view(2 * rows, shape.intermediate)[:rows]
        forward(layer=layer, inputs=half, outputs=out, sublayer_name="w2", **plan[1])
        return out


class Marlin:
    """SGLang's Marlin runner on such a layer (moe_runner/marlin.py); compiles for minutes once.

    For MXFP4 it leaves the routed scaling factor to the router, whose weights then carry it
    (`fuse_routed_scaling_factor_in_topk` of SGLang's method).
    """

    name = "marlin"
    scaled_weights = True

    def __init__(self, shape: ExpertShape) -> None:
        from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace
        from sglang.srt.layers.quantization.marlin_utils_fp4 import (
            prepare_moe_mxfp4_layer_for_marlin,
        )

        self._run, self._workspace = fused_marlin_moe, marlin_make_workspace
        self._prepare, self._shape = prepare_moe_mxfp4_layer_for_marlin, shape
        self._gating: dict[int, torch.Tensor] = {}

    def prepare(self, layer: Layer) -> None:
        """Rearrange the weights as `process_weights_after_loading` of its MoE method does."""
        for name in ("w13_weight", "w2_weight"):
            data = getattr(layer, name).data.view(torch.int8)
            setattr(layer, name, torch.nn.Parameter(data, requires_grad=False))
        self._prepare(layer)

    def run(
        self, layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """All that SGLang does for a layer once its router has chosen."""
        tokens = x.shape[0]
        if tokens not in self._gating:
            self._gating[tokens] = torch.zeros(tokens, self._shape.experts, device=x.device)
        return self._run(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=self._gating[tokens],
            topk_weights=weights,
            topk_ids=ids,
            workspace=self._workspace(x.device, max_blocks_per_sm=4),
            num_bits=4,
            is_k_full=True,
            inplace=False,
            routed_scaling_factor=self._shape.scaling,
        )


BACKENDS = {"humming": Humming, "marlin": Marlin}


def stored_bytes(layer: Layer, shape: ExpertShape) -> float:
    """Bytes of one expert as the backend rearranged it (padding and scales included)."""
    named = [*layer.named_parameters()]
    return sum(p.numel() * p.element_size() for _, p in named) / shape.experts
