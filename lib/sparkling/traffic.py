"""Bytes that one decode step, one verification and one round of speculation move, part by part.

At batch one a step is bound by memory: it streams every weight it uses once, so bytes over bandwidth
is its least time. Counted are weights, the KV cache and the recurrent state. Not counted are
activations (some MB a step) and whatever a kernel reads twice.

What is read how often was taken from SGLang 0.5.23:

- a verification of k positions streams every matrix once, and of the routed experts those that any of
  its k tokens chose: the *union*;
- MLA decodes with `kv_b_proj` unpacked to BF16 (`bailing_moe_v3.py`, post_load_weights);
- a decode step reads and writes each KDA state; a verification also writes one state for each
  position and copies the accepted one back (`intermediate_ssm_state_cache` in the server's log);
- a round with n draft steps is one verification of n + 1, one pass of the draft over the same n + 1
  positions ("draft extend"), which yields the first draft token, and n - 1 single passes. Each
  ends in the LM head: a round reads the head n + 1 times (`eagle_worker_v2.py`, draft_forward).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkling.architecture import Shape
from sparkling.errors import UsageError

HEADS = ("BF16", "FP8")
STATE_BYTES = 4  # the KDA state is FP32 (SGLang: --mamba-ssm-dtype)
CONV_BYTES = KV_BYTES = 2  # both BF16
NEXTN = "NEXTN "
"""What a component of the draft layer is called: this, then its own part's name."""


def union(positions: int, *, experts: int = 512, top_k: int = 8) -> float:
    """Expected number of different experts that `positions` tokens choose in one layer:
    E·(1 - (1 - k/E)^positions), if their choices are independent and no expert is preferred.

    Real text chooses alike, so this is the upper end of what to expect; `top_k` is the lower.
    """
    if positions < 1 or not 0 < top_k <= experts:
        raise UsageError(
            f"A union needs at least one position and 1 <= top-k <= experts, not {positions} "
            f"positions, top-k {top_k}, {experts} experts."
        )
    return experts * (1.0 - (1.0 - top_k / experts) ** positions)


@dataclass(frozen=True)
class Part:
    """One part of a step's traffic, in bytes."""

    name: str
    read: float
    written: float = 0.0


@dataclass(frozen=True)
class StepBytes:
    """The traffic of one step or round. `union` is the experts a layer of the target read."""

    what: str
    positions: int
    context: int  # tokens already in the cache
    head: str
    union: float
    parts: tuple[Part, ...]

    @property
    def read(self) -> float:
        return sum(part.read for part in self.parts)

    @property
    def written(self) -> float:
        return sum(part.written for part in self.parts)

    @property
    def total(self) -> float:
        return self.read + self.written

    def seconds(self, bandwidth: float) -> float:
        """The least time at this bandwidth in bytes/s: reads and writes share it."""
        return self.total / bandwidth

    def rows(self) -> list[dict[str, Any]]:
        """Largest first, as rows for a table."""
        parts = sorted(self.parts, key=lambda part: -(part.read + part.written))
        return [
            {
                "part": part.name,
                "read MB": part.read / 1e6,
                "written MB": part.written / 1e6,
                "%": 100 * (part.read + part.written) / self.total,
            }
            for part in parts
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "positions": self.positions,
            "context": self.context,
            "head": self.head,
            "union": self.union,
            "read": self.read,
            "written": self.written,
            "total": self.total,
            "parts": [vars(part) for part in self.parts],
        }


def step(
    shape: Shape,
    sizes: Mapping[str, int],
    positions: int = 1,
    union_: float | None = None,
    *,
    context: int = 0,
    head: str = "BF16",
) -> StepBytes:
    """One forward pass of the target over `positions` tokens of one request.

    sizes: stored bytes by component (`Inventory.sizes`). union_: experts read a layer, when it is
    known; else the expected one. Raises UsageError for an impossible request.
    """
    chosen = _union(shape, positions, union_)
    _check(positions, context, head)
    parts = [
        Part("routed experts", sizes.get("routed experts", 0) * chosen / shape.experts),
        *(Part(name, sizes.get(name, 0)) for name in ("shared expert", "dense MLP", "router")),
        Part("KDA attention", sizes.get("KDA attention", 0)),
        Part("MLA attention", _mla(shape, sizes, "", len(shape.mla))),
        Part("norms", sizes.get("norms", 0)),
        Part("embeddings", positions * shape.hidden * KV_BYTES),
        Part("LM head", head_bytes(shape, head)),
        _kv(shape, len(shape.mla), positions, context),
        _state(shape, positions),
    ]
    what = "decode step" if positions == 1 else f"verification of {positions}"
    return StepBytes(what, positions, context, head, chosen, tuple(parts))


def draft(
    shape: Shape,
    sizes: Mapping[str, int],
    positions: int = 1,
    union_: float | None = None,
    *,
    context: int = 0,
    head: str = "BF16",
) -> StepBytes:
    """One pass of the NEXTN layer. Raises UsageError when the checkpoint has none."""
    if not shape.nextn:
        raise UsageError("This checkpoint has no NEXTN layer, so it cannot draft.")
    chosen = _union(shape, positions, union_)
    _check(positions, context, head)
    kept = ("shared expert", "router", "projection", "norms")
    parts = [
        Part("routed experts", sizes.get(NEXTN + "routed experts", 0) * chosen / shape.experts),
        *(Part(name, sizes.get(NEXTN + name, 0)) for name in kept),
        Part("MLA attention", _mla(shape, sizes, NEXTN, 1)),
        Part("embeddings", positions * shape.hidden * KV_BYTES),
        Part("LM head", head_bytes(shape, head)),
        _kv(shape, 1, positions, context),
    ]
    return StepBytes("draft pass", positions, context, head, chosen, tuple(parts))


def rounds(
    shape: Shape,
    sizes: Mapping[str, int],
    steps: int = 3,
    union_: float | None = None,
    *,
    context: int = 0,
    head: str = "BF16",
) -> StepBytes:
    """One round of speculation with `steps` draft tokens in a chain: verification, draft extend and
    `steps` - 1 further drafts. `union_`: experts read a layer by all positions together."""
    if steps < 1:
        raise UsageError(f"A round needs at least one draft step, not {steps}.")
    verify = step(shape, sizes, steps + 1, union_, context=context, head=head)
    extend = draft(shape, sizes, steps + 1, union_, context=context, head=head)
    single = draft(shape, sizes, 1, context=context, head=head)
    drafts = [extend, *[single] * (steps - 1)]
    parts = list(verify.parts)
    for name in dict.fromkeys(part.name for passed in drafts for part in passed.parts):
        same = [part for passed in drafts for part in passed.parts if part.name == name]
        read, written = sum(p.read for p in same), sum(p.written for p in same)
        parts.append(Part(f"draft: {name}", read, written))
    what = f"round of {steps} drafts"
    return StepBytes(what, steps + 1, context, head, verify.union, tuple(parts))


def head_bytes(shape: Shape, head: str = "BF16") -> int:
    """The LM head's weights as they are read: BF16, or e4m3 with one FP32 scale a row."""
    return shape.vocab * (shape.hidden * 2 if head == "BF16" else shape.hidden + 4)


def kv_bytes(shape: Shape, layers: int | None = None) -> int:
    """KV cache for each token, BF16: one latent vector and the rotated key, an MLA layer."""
    layers = len(shape.mla) if layers is None else layers
    return layers * (shape.kv_lora + shape.rope) * KV_BYTES


def state_bytes(shape: Shape) -> int:
    """Recurrent state of one request: a matrix a head and KDA layer, and the convolutions' tails."""
    matrix = shape.heads * shape.head_dim * shape.head_dim * STATE_BYTES
    tails = 3 * shape.kda_width * (shape.conv - 1) * CONV_BYTES
    return shape.kda_layers * (matrix + tails)


def _mla(shape: Shape, sizes: Mapping[str, int], prefix: str, layers: int) -> int:
    up = layers * shape.heads * (shape.nope + shape.v_dim) * shape.kv_lora * 2
    return sizes.get(f"{prefix}MLA attention", 0) - sizes.get(f"{prefix}MLA kv_b", 0) + up


def _kv(shape: Shape, layers: int, positions: int, context: int) -> Part:
    each = kv_bytes(shape, layers)
    return Part("KV cache", each * context, each * positions)


def _state(shape: Shape, positions: int) -> Part:
    one = state_bytes(shape)
    if positions == 1:
        return Part("KDA state", one, one)
    return Part("KDA state", 2 * one, (positions + 1) * one)


def _union(shape: Shape, positions: int, given: float | None) -> float:
    most = min(shape.experts, positions * shape.top_k)
    if given is None:
        return union(positions, experts=shape.experts, top_k=shape.top_k)
    if not shape.top_k <= given <= most:
        raise UsageError(
            f"{positions} position{'s' if positions > 1 else ''} with top-k {shape.top_k} of "
            f"{shape.experts} experts read {shape.top_k} to {most} experts a layer, not {given:g}."
        )
    return float(given)


def _check(positions: int, context: int, head: str) -> None:
    if context < 0:
        raise UsageError(f"A context of {context} tokens is impossible.")
    if head not in HEADS:
        raise UsageError(f"The LM head is {' or '.join(HEADS)} here, not {head!r}.")
