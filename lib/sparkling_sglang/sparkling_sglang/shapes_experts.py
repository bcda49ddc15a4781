"""Ling's routed experts in MXFP4, run as SGLang 0.5.23 runs them, for a few tokens at once.

A decode step waits for the weights of the experts that its tokens chose. How many different ones
that is, the *union*, decides what a verification of several tokens costs: independent tokens wake
nearly k times as many experts as one token does, tokens that choose alike wake no more.

Routes are drawn anew for every replay and the layers take turns, so a call finds none of its
weights in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TOKENS = (1, 2, 3, 4, 8)
CALLS = 40  # Ling has 40 such layers
LAYERS = 4
GROUP = 32  # weights that share a scale in MXFP4
WRONG = 0.05  # relative error from which an output is not rounding any more
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_CODES = (118, 122)  # 2^-9 to 2^-6: activations stay near 1
SEED = 7


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


def draw(
    shape: ExpertShape, calls: int, tokens: int, routing: str, noise: torch.Generator
) -> torch.Tensor:
    """Experts chosen in each call, [calls, tokens, top k] int32, on the CPU.

    routing: "random", each token's experts uniformly and independently; "repeated", every token of
    a call the same ones (another draw for each call).
    """
    alike = routing == "repeated"
    scores = torch.rand(calls, 1 if alike else tokens, shape.experts, generator=noise)
    chosen = scores.topk(shape.top_k, dim=-1).indices.to(torch.int32)
    return chosen.expand(calls, tokens, shape.top_k).contiguous()


def unions(routes: torch.Tensor) -> list[int]:
    """Number of different experts in each call of [calls, tokens, top k]."""
    return [int(call.unique().numel()) for call in routes]


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
    """SGLang's Marlin runner on such a layer (moe_runner/marlin.py); compiles for minutes once."""

    name = "marlin"

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


class Bench:
    """The prepared layers of one backend, and how far one token's output is from float32."""

    def __init__(
        self,
        backend: Any,
        shape: ExpertShape,
        device: torch.device,
        *,
        layers: int = LAYERS,
        calls: int = CALLS,
    ) -> None:
        self.backend, self.shape, self.device, self.calls = backend, shape, device, calls
        began = time.monotonic()
        noise = torch.Generator(device=device).manual_seed(SEED)
        x = torch.randn(1, shape.hidden, generator=noise, device=device).to(torch.bfloat16)
        even = torch.full((1, shape.top_k), 1 / shape.top_k, device=device)
        exact = None
        self.layers = []
        for _ in range(layers):
            layer = Layer(shape, device, noise)
            if exact is None:
                exact = reference(layer, x[0], even[0], shape.scaling)
            backend.prepare(layer)
            self.layers.append(layer)
        ids = torch.arange(shape.top_k, dtype=torch.int32, device=device).unsqueeze(0)
        got = backend.run(self.layers[0], x, ids, even)[0].float()
        self.relative_error = float((got - exact).norm() / exact.norm())
        self.setup_s = time.monotonic() - began

    @property
    def right(self) -> bool:
        """Whether that distance is rounding."""
        return self.relative_error < WRONG

    def facts(self) -> dict[str, Any]:
        """What holds for all cases of this backend."""
        return {
            "layers": len(self.layers),
            "setup_s": round(self.setup_s, 2),
            "relative_error": self.relative_error,
            "expert_bytes": self.shape.expert_bytes,
            "expert_bytes_stored": stored_bytes(self.layers[0], self.shape),
        }

    def case(self, timer: Any, tokens: int, routing: str, part: str = "layer") -> dict[str, Any]:
        """One case's times and the unions of the calls that were timed.

        part: "layer", all that SGLang does once the router has chosen; "products", the two matrix
        products of it alone.
        """
        shape, calls = self.shape, self.calls
        noise = torch.Generator().manual_seed(SEED + tokens)
        local = torch.Generator(device=self.device).manual_seed(SEED)
        x = torch.randn(calls, tokens, shape.hidden, generator=local, device=self.device).to(
            torch.bfloat16
        )
        ids = torch.zeros(calls, tokens, shape.top_k, dtype=torch.int32, device=self.device)
        weights = torch.full((calls, tokens, shape.top_k), 1 / shape.top_k, device=self.device)
        counted: list[list[int]] = []

        def refill(_: int) -> None:
            routes = draw(shape, calls, tokens, routing, noise)
            ids.copy_(routes)
            counted.append(unions(routes))
            if part == "products":
                renew()

        def layer(call: int) -> Layer:
            return self.layers[call % len(self.layers)]

        plans: list[list[dict[str, Any]]] = []

        def renew() -> None:
            """Put the new routes' plans where the captured products read theirs."""
            for call in range(calls):
                fresh = self.backend.plan(layer(call), ids[call])
                if len(plans) <= call:
                    plans.append(fresh)
                for old, new in zip(plans[call], fresh, strict=True):
                    for name, value in new.items():
                        if isinstance(value, torch.Tensor):
                            old[name].copy_(value)

        def step(call: int) -> torch.Tensor:
            if part == "products":
                return self.backend.products(layer(call), x[call], plans[call])
            return self.backend.run(layer(call), x[call], ids[call], weights[call])

        timing = timer.time(step, calls, refill)
        timed = counted[-len(timing.us) :]  # the first draw was for warming up
        return {
            "backend": self.backend.name,
            "tokens": tokens,
            "routing": routing,
            "part": part,
            "union_expected": shape.expected_union(tokens) if routing == "random" else shape.top_k,
            "union": [round(sum(one) / len(one), 4) for one in timed],
            "union_least": min(min(one) for one in timed),
            "union_most": max(max(one) for one in timed),
            **timing.to_json(),
        }


def cases(backend: Any, tokens: tuple[int, ...] = TOKENS) -> Iterator[tuple[int, str, str]]:
    """(tokens, routing, part); one token has nobody to repeat, so it stands once."""
    for part in ("layer", "products") if hasattr(backend, "products") else ("layer",):
        for m in tokens:
            for routing in ("random", "repeated") if m > 1 else ("random",):
                yield m, routing, part


def measure(timer: Any, bench: Bench, tokens: tuple[int, ...] = TOKENS) -> Iterator[dict[str, Any]]:
    """Every case's record, one after the other; a case that fails says so and the next follows."""
    for m, routing, part in cases(bench.backend, tokens):
        try:
            yield bench.case(timer, m, routing, part)
        except Exception as error:
            yield {
                "backend": bench.backend.name,
                "tokens": m,
                "routing": routing,
                "part": part,
                "error": f"{type(error).__name__}: {error}"[:300],
            }


def layers_that_fit(shape: ExpertShape, device: torch.device) -> int:
    """How many layers the free memory holds, at most `LAYERS`; preparing one needs about two more.

    Raises RuntimeError when not even one fits.
    """
    free, _ = torch.cuda.mem_get_info(device)
    one = shape.experts * shape.expert_bytes
    fit = int(free / one - 2.5)
    if fit < 1:
        raise RuntimeError(
            f"one layer of experts and its preparation need {3.5 * one / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free"
        )
    return min(fit, LAYERS)
