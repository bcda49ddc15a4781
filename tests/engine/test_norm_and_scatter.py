"""The gated norm against ``torch.nn.functional``, the state commit against plain loops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sparkling_sglang.cpu import norm, scatter


@pytest.mark.parametrize("activation", ["sigmoid", "swish"])
@pytest.mark.parametrize("affine", [True, False])
def test_gated_norm(rng, activation, affine):
    x = torch.randn(2, 5, 3, 16, generator=rng)
    gate = torch.randn(2, 5, 48, generator=rng)
    weight = torch.randn(16, generator=rng) if affine else None
    bias = torch.randn(16, generator=rng) if affine else None
    got = norm.rms_norm_gated(x, gate, weight, bias, activation, eps=1e-3)
    w = None if weight is None else weight.double()
    want = F.rms_norm(x.double(), (16,), w, eps=1e-3)
    want = want if bias is None else want + bias.double()
    g = gate.double().view(x.shape)
    want = want * (torch.sigmoid(g) if activation == "sigmoid" else F.silu(g))
    assert got.shape == x.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_gated_norm_in_bfloat16_rounds_once(rng):
    x, gate = (torch.randn(7, 32, generator=rng).bfloat16() for _ in range(2))
    weight = torch.randn(32, generator=rng).bfloat16()
    got = norm.rms_norm_gated(x, gate, weight, None, "sigmoid")
    want = F.rms_norm(x.double(), (32,), weight.double(), eps=1e-6) * torch.sigmoid(gate.double())
    assert got.dtype == torch.bfloat16
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-9).all()


def test_gated_norm_with_a_residual_says_so(rng):
    x = torch.randn(2, 4, generator=rng)
    with pytest.raises(NotImplementedError):
        norm.rms_norm_gated(x, x, None, None, residual=x)


def caches(rng, layers=2, slots=7, rows=4, steps=3) -> SimpleNamespace:
    def pair(*shape):
        pool = torch.randn(layers, slots, *shape, generator=rng)
        return pool, torch.randn(layers, rows, steps, *shape, generator=rng)

    temporal, intermediate = pair(2, 4, 5)
    conv, window = pair(3, 6)
    return SimpleNamespace(
        temporal=temporal,
        intermediate_ssm=intermediate,
        conv=[conv],
        intermediate_conv_window=[window],
    )


def by_loops(pool, per_step, slots, steps, rows):
    pool = pool.clone()
    for i, (slot, step) in enumerate(zip(slots, steps, strict=True)):
        if slot >= 0 and step >= 0:
            for layer in range(pool.shape[0]):
                pool[layer, slot] = per_step[layer, rows[i], step]
    return pool


@pytest.mark.parametrize("rows", [None, [3, 0, 2, 1]])
def test_commit(rng, rows):
    state = caches(rng)
    slots, steps = [5, 2, -1, 6], [0, 2, 1, -1]
    want = [
        by_loops(pool, per_step, slots, steps, rows or range(4))
        for pool, per_step in (
            (state.temporal, state.intermediate_ssm),
            (state.conv[0], state.intermediate_conv_window[0]),
        )
    ]
    scatter.scatter_mamba_states_after_mtp_verify(
        state,
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(steps),
        None,
        None,
        src_indices_raw=None if rows is None else torch.tensor(rows),
    )
    assert torch.equal(state.temporal, want[0])
    assert torch.equal(state.conv[0], want[1])


def test_commit_copies_tracked_states_too(rng):
    state = caches(rng)
    want = by_loops(state.temporal, state.intermediate_ssm, [5, 2], [0, 2], range(2))
    want = by_loops(want, state.intermediate_ssm, [1, 3], [1, -1], range(2))
    scatter.scatter_mamba_states_after_mtp_verify(
        state,
        torch.tensor([5, 2]),
        torch.tensor([0, 2]),
        torch.tensor([1, 3]),
        torch.tensor([1, -1]),
    )
    assert torch.equal(state.temporal, want)


def test_commit_converts_and_writes_through_a_strided_pool(rng):
    """Pools may be strided views and keep another dtype than the scratch."""
    backing = torch.zeros(2, 7, 2, 8, dtype=torch.bfloat16)
    pool = backing[..., :4]
    per_step = torch.randn(2, 4, 3, 2, 4, generator=rng)
    scatter.copy_steps(pool, per_step, torch.tensor([6]), torch.tensor([1]))
    assert torch.equal(backing[:, 6, :, :4], per_step[:, 0, 1].bfloat16())
    assert not backing[..., 4:].any() and not backing[:, :6].any()
