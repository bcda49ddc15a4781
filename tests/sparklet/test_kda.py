"""The chunked form against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from sparklet import kda


def case(kind: str, t: int, seed: int = 0):
    torch.manual_seed(seed)
    q = kda.l2norm(torch.randn(2, 2, t, 32)) * 32**-0.5
    k = torch.randn(2, 2, t, 32)
    if kind == "repeated":  # nearly equal keys: the worst case for inverting I + L
        k = k[:, :, :1] + 0.01 * k
    v, beta = torch.randn(2, 2, t, 24), torch.rand(2, 2, t)
    g = -5 * torch.rand(2, 2, t, 32)
    if kind == "floor":
        g = torch.full_like(g, -4.9999)
    if kind in ("long memory", "repeated"):
        g = g * 1e-3
    return q, kda.l2norm(k), v, g, beta


@pytest.mark.parametrize("kind", ["mixed", "floor", "long memory", "repeated"])
@pytest.mark.parametrize("t", [1, 16, 53])
def test_chunked_equals_float64_recurrence(kind, t):
    x = case(kind, t)
    state = torch.randn(2, 2, 32, 24)
    out, last = kda.chunked(*x, state)
    want, want_last = kda.recurrent(*(y.double() for y in (*x, state)))
    assert (out - want).abs().max() < 1e-4
    assert (last - want_last).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["mixed", "floor", "repeated"])
def test_gradients_equal(kind):
    def gradients(run, dtype):
        x = [y.to(dtype).requires_grad_() for y in case(kind, 37)]
        out, state = run(*x)
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        ((out * weight).sum() + state.square().sum()).backward()
        return [y.grad for y in x]

    mine = gradients(kda.chunked, torch.float32)
    want = gradients(kda.recurrent, torch.float64)
    for a, b in zip(mine, want, strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() < 1e-4 * max(1.0, float(b.abs().max()))


def test_gate_stays_above_its_lower_bound():
    f = torch.tensor([-1e4, 0.0, 1e4]).expand(2, 3)
    g = kda.safe_gate(f, torch.zeros(2), torch.zeros(6), -5.0)
    assert g.min() >= -5.0 and g.max() <= 0.0
    assert g[0, 1] == pytest.approx(-2.5)


def test_a_state_can_be_carried_over_any_cut():
    x = case("mixed", 40)
    whole, end = kda.chunked(*x)
    first, state = kda.chunked(*(y[:, :, :23] for y in x))
    second, state = kda.chunked(*(y[:, :, 23:] for y in x), state)
    assert torch.allclose(torch.cat([first, second], 2), whole, atol=1e-5)
    assert torch.allclose(state, end, atol=1e-5)
