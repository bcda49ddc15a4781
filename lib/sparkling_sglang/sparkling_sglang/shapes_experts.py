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
from typing import Any

import torch

from sparkling_sglang.shapes_backends import ExpertShape, Layer, reference, stored_bytes

TOKENS = (1, 2, 3, 4, 8)
CALLS = 40  # Ling has 40 such layers
LAYERS = 4
WRONG = 0.02  # relative error from which an output is not rounding any more (sparkling.shapes)
SEED = 7


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
        got = backend.run(self.layers[0], x, ids, even * self.weight_scale)[0].float()
        self.relative_error = float((got - exact).norm() / exact.norm())
        self.setup_s = time.monotonic() - began

    @property
    def weight_scale(self) -> float:
        """What the router's weights carry: the routed scaling factor where the backend wants it."""
        return self.shape.scaling if self.backend.scaled_weights else 1.0

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
        weight = self.weight_scale / shape.top_k
        weights = torch.full((calls, tokens, shape.top_k), weight, device=self.device)
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
