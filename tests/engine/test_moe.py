"""Routed experts on a CPU against a float64 reference: functions alone, then SGLang's whole block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import status
from sparkling_sglang.cpu import moe

# The sizes and limits of conftest's CONFIG.
EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 48, 32, 2
SCALING, LIMIT, SHARED_LIMIT = 2.5, 0.4, 0.6


def weights(seed: int, dtype: torch.dtype = torch.float32):
    noise = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=noise) * 0.3
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=noise) * 0.3
    return w13.to(dtype), w2.to(dtype)


def routes(tokens: int, seed: int):
    noise = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=noise)
    values, ids = scores.topk(TOP_K)
    return values, ids.int()


def reference_swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    gate = gate / (1 + torch.exp(-gate))
    if limit:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit)
    return gate * up


def reference(x, w13, w2, values, ids, scaling, limit):
    """One token and one expert at a time, in float64."""
    x, w13, w2, values = (t.double() for t in (x, w13, w2, values))
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if 0 <= e < w13.shape[0]:
                out[t] += values[t, k] * (w2[e] @ reference_swiglu(w13[e] @ x[t], limit))
    return out * scaling


def test_the_limit_applies_after_silu_and_to_both_signs_of_up():
    gate_up = torch.tensor([[10.0, 10.0, -5.0, 1.0, 7.0, -7.0, 3.0, 0.5]], dtype=torch.float64)
    got = moe.swiglu(gate_up, 4.0)
    # silu(10) = 9.9995 and is cut to 4; silu(-5) = -0.0335 has no lower bound; silu(1) = 0.7311.
    # Clamped before SiLU, the first would be silu(4) * 4 = 15.71.
    wanted = torch.tensor([[16.0, -16.0, -0.033464 * 3, 0.731059 * 0.5]], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [None, 0, LIMIT])
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 70])  # 8 tokens x 2 are copied, 9 are grouped
def test_routed_experts_match_a_float64_loop(tokens, limit):
    w13, w2 = weights(1)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    values, ids = routes(tokens, 3)
    got = moe.routed_experts(x, w13, w2, values, ids, scaling=SCALING, limit=limit)
    wanted = reference(x, w13, w2, values, ids, SCALING, limit)
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [4, 40])
def test_padded_tokens_contribute_nothing(tokens):
    w13, w2 = weights(4)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(5))
    values, ids = routes(tokens, 6)
    ids[0], ids[1, 1] = -1, EXPERTS
    got = moe.routed_experts(x, w13, w2, values, ids)
    assert not got[0].any()
    torch.testing.assert_close(
        got.double(), reference(x, w13, w2, values, ids, 1.0, None), atol=2e-5, rtol=1e-5
    )


def test_bf16_sums_are_rounded_once():
    w13, w2 = weights(7, torch.bfloat16)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(8)).bfloat16()
    values, ids = routes(64, 9)
    got = moe.routed_experts(x, w13, w2, values, ids, scaling=SCALING)
    assert got.dtype == torch.bfloat16
    wanted = reference(x, w13, w2, values, ids, SCALING, None)
    # Rounding of gate/up, of their product and of each expert's output: a few times 2**-9.
    assert (got.double() - wanted).abs().max() < 0.01 * wanted.abs().max()


def layer_and_config(**changes):
    w13, w2 = weights(10)
    layer = SimpleNamespace(
        w13_weight=w13,
        w2_weight=w2,
        layer_name="model.layers.3.experts",
        should_fuse_routed_scaling_factor_in_topk=changes.pop("fused", False),
    )
    config = SimpleNamespace(
        activation="silu",
        gemm1_alpha=None,
        gemm1_clamp_limit=LIMIT,
        apply_router_weight_on_input=False,
        routed_scaling_factor=SCALING,
    )
    return layer, SimpleNamespace(**{**vars(config), **changes})


def forward(layer, config, original=None):
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(11))
    values, ids = routes(5, 12)
    got = moe.moe_forward(original, layer, x, (values, ids, None), config)
    return got.double(), (x, layer.w13_weight, layer.w2_weight, values, ids)


def test_factor_and_limit_come_from_the_runner_config():
    got, inputs = forward(*layer_and_config())
    torch.testing.assert_close(got, reference(*inputs, SCALING, LIMIT), atol=2e-5, rtol=1e-5)


def test_a_factor_that_topk_folded_in_is_not_applied_twice():
    got, inputs = forward(*layer_and_config(fused=True))
    torch.testing.assert_close(got, reference(*inputs, 1.0, LIMIT), atol=2e-5, rtol=1e-5)


def test_other_activations_run_upstreams_code_and_are_scaled():
    layer, config = layer_and_config(gemm1_alpha=1.7)
    got, _ = forward(layer, config, original=lambda layer, x, topk, config: torch.ones_like(x))
    assert torch.equal(got, torch.full_like(got, SCALING))


def test_the_status_file_learns_what_each_layer_did(tmp_path, monkeypatch):
    kept = status.Status(tmp_path / "status.json", {"moe": None})
    monkeypatch.setattr(status, "current", kept)
    monkeypatch.setattr(status, "_moe_seen", {})
    layer, config = layer_and_config()
    forward(layer, config)
    layer.layer_name, config.gemm1_clamp_limit = "model.layers.4.experts", None
    forward(layer, config)
    assert kept.get("moe") == {
        "routed_scaling_applied": True,
        "routed_scaling": {"3": SCALING, "4": SCALING},
        "swiglu_limits": {"3": LIMIT, "4": None},
    }


@pytest.fixture(scope="module")
def model_config(engine_context):
    """The model's configuration, with SGLang's routed experts hooked."""
    from sglang.srt.configs.model_config import ModelConfig
    from sparkling_sglang.patches import Patches

    patches = Patches()
    moe.register(patches)
    patches.apply()
    return ModelConfig.from_server_args(engine_context).hf_config


def block(model_config, layer_id: int):
    from sglang.srt.models.bailing_moe_v3 import BailingMoE

    made = BailingMoE(model_config, layer_id=layer_id, prefix=f"model.layers.{layer_id}")
    noise = torch.Generator().manual_seed(20 + layer_id)
    for name, parameter in made.named_parameters():
        scale = 0.2 if name.endswith("expert_bias") else 0.3
        parameter.data.normal_(0.0, scale, generator=noise)
    return made


def reference_block(made, x, limit, shared_limit, biased=True, scaling=SCALING):
    """Ling's MoE block in float64, one token at a time, written from its definition."""
    p = {name: value.double() for name, value in made.named_parameters()}
    out, chosen = [], []
    for t in x.double():
        score = torch.sigmoid(p["gate.weight"] @ t)
        choice = score + p["gate.expert_bias"] * biased
        group = choice.view(4, EXPERTS // 4).topk(2).values.sum(-1).topk(2).indices
        allowed = torch.full((4, EXPERTS // 4), -torch.inf, dtype=torch.float64)
        allowed[group] = 0.0
        ids = (choice + allowed.flatten()).topk(TOP_K).indices
        weight = score[ids] / score[ids].sum()
        value = torch.zeros_like(t)
        for w, e in zip(weight, ids, strict=True):
            inner = reference_swiglu(p["experts.w13_weight"][e] @ t, limit)
            value += scaling * w * (p["experts.w2_weight"][e] @ inner)
        inner = reference_swiglu(p["shared_experts.gate_up_proj.weight"] @ t, shared_limit)
        out.append(value + p["shared_experts.down_proj.weight"] @ inner)
        chosen.append(sorted(ids.tolist()))
    return torch.stack(out), chosen


# Layer 0 is what the NEXTN layer passes: it uses entry 0 of both lists.
@pytest.mark.parametrize(
    ("layer_id", "limit", "shared"),
    [(0, 0.7, 0.9), (1, LIMIT, SHARED_LIMIT), (2, None, SHARED_LIMIT), (3, LIMIT, None)],
)
def test_the_whole_block_matches_float64(model_config, layer_id, limit, shared):
    made = block(model_config, layer_id)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(30))
    wanted, chosen = reference_block(made, x, limit, shared)
    # Every ingredient matters here: without it the reference itself would be elsewhere.
    others = [
        reference_block(made, x, None if limit else 0.3, shared)[0],
        reference_block(made, x, limit, None if shared else 0.3)[0],
        reference_block(made, x, limit, shared, scaling=1.0)[0],
    ]
    assert all((wanted - other).abs().max() > 0.1 for other in others)
    assert chosen != reference_block(made, x, limit, shared, biased=False)[1]
    for rows in (slice(0, 40), slice(0, 3)):
        with torch.no_grad():
            got = made(x[rows]).double()
        torch.testing.assert_close(got, wanted[rows], atol=5e-5, rtol=1e-5)
