"""The short convolution against ``torch.nn.functional.conv1d`` in float64."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from sgl_kernel import mamba
from sglang.kernels.ops.mamba import causal_conv1d_triton

DIM, WIDTH = 6, 4
TOLERANCE = dict(rtol=1e-5, atol=1e-6)


def reference(x: torch.Tensor, before: torch.Tensor, weight, bias, silu: bool = True):
    """``x [dim, T]`` after ``before [dim, 3]``: outputs ``[dim, T]``, float64."""
    history = torch.cat([before, x], 1).double()
    weight = weight.double().unsqueeze(1)
    bias = None if bias is None else bias.double()
    y = F.conv1d(history[None], weight, bias, groups=x.shape[0])[0]
    return F.silu(y) if silu else y


@pytest.fixture
def weights(rng):
    return torch.randn(DIM, WIDTH, generator=rng), torch.randn(DIM, generator=rng)


def states(rng, slots=6) -> torch.Tensor:
    """A pool as SGLang keeps it, ``[slots, 3, dim]``, seen as ``[slots, dim, 3]``."""
    return torch.randn(slots, WIDTH - 1, DIM, generator=rng).transpose(1, 2)


@pytest.mark.parametrize("with_bias", [True, False])
def test_prefill(rng, weights, with_bias):
    weight, bias = weights[0], weights[1] if with_bias else None
    lengths, slots, resumed = [7, 1, 2, 12], [3, 0, 5, 1], [False, True, True, False]
    bounds = [sum(lengths[:i]) for i in range(5)]
    x = torch.randn(sum(lengths), DIM, generator=rng).T
    pool = states(rng)
    before = pool.clone()
    out = mamba.causal_conv1d_fn_cpu(
        x,
        weight,
        bias,
        activation="silu",
        conv_states=pool,
        has_initial_state=torch.tensor(resumed),
        cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=torch.tensor(bounds, dtype=torch.int32),
        seq_lens_cpu=lengths,
    )
    for i, slot in enumerate(slots):
        part = x[:, bounds[i] : bounds[i + 1]]
        start = before[slot] if resumed[i] else torch.zeros(DIM, WIDTH - 1)
        want = reference(part, start, weight, bias)
        torch.testing.assert_close(out[:, bounds[i] : bounds[i + 1]].double(), want, **TOLERANCE)
        assert torch.equal(pool[slot], torch.cat([start, part], 1)[:, -3:])
    assert torch.equal(pool[[2, 4]], before[[2, 4]])


@pytest.mark.parametrize("cuts", [[1], [2, 3], [4, 5, 11]])
def test_prefill_in_chunks_equals_one(rng, weights, cuts):
    x = torch.randn(DIM, 13, generator=rng)
    whole, parts = states(rng), states(rng)

    def run(pool, a, b):
        return mamba.causal_conv1d_fn_cpu(
            x[:, a:b],
            *weights,
            pool,
            torch.tensor([0, b - a]),
            cache_indices=torch.tensor([2]),
            has_initial_state=torch.tensor([a > 0]),
        )

    want = run(whole, 0, 13)
    edges = [0, *cuts, 13]
    got = torch.cat([run(parts, a, b) for a, b in pairwise(edges)], 1)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(parts[2], whole[2])


def test_prefill_leaves_padded_rows_alone(rng, weights):
    x = torch.randn(DIM, 6, generator=rng)
    pool = states(rng)
    before = pool.clone()
    out = mamba.causal_conv1d_fn_cpu(
        x, *weights, pool, torch.tensor([0, 3, 6]), cache_indices=torch.tensor([-1, 4])
    )
    assert not out[:, :3].any() and out[:, 3:].abs().min() > 0
    assert torch.equal(pool[:4], before[:4])


def test_decode_moves_the_state_on(rng, weights):
    x = torch.randn(3, DIM, generator=rng)
    pool = states(rng)
    before = pool.clone()
    out = mamba.causal_conv1d_update_cpu(
        x, pool, *weights, activation="silu", conv_state_indices=torch.tensor([4, 0, 2])
    )
    assert out.shape == x.shape
    for i, slot in enumerate([4, 0, 2]):
        want = reference(x[i].unsqueeze(1), before[slot], *weights)
        torch.testing.assert_close(out[i].double(), want[:, 0], **TOLERANCE)
        assert torch.equal(pool[slot], torch.cat([before[slot], x[i].unsqueeze(1)], 1)[:, -3:])
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


def test_decode_after_prefill_continues_the_sequence(rng, weights):
    x = torch.randn(DIM, 9, generator=rng)
    pool = torch.zeros(2, DIM, WIDTH - 1)
    mamba.causal_conv1d_fn_cpu(
        x[:, :7], *weights, pool, torch.tensor([0, 7]), cache_indices=torch.tensor([1])
    )
    steps = [
        mamba.causal_conv1d_update_cpu(
            x[:, t][None], pool, *weights, activation="silu", conv_state_indices=torch.tensor([1])
        )
        for t in (7, 8)
    ]
    want = reference(x, torch.zeros(DIM, 3), *weights)[:, 7:]
    torch.testing.assert_close(torch.stack(steps, -1)[0].double(), want, **TOLERANCE)


def test_verification_keeps_every_window_and_commits_none(rng, weights):
    x = torch.randn(3, DIM, 5, generator=rng)
    pool = states(rng)
    before = pool.clone()
    windows = torch.full((4, 5, WIDTH - 1, DIM), 9.0).transpose(2, 3)
    out = mamba.causal_conv1d_update_cpu(
        x,
        pool,
        *weights,
        activation="silu",
        conv_state_indices=torch.tensor([4, 0, 2], dtype=torch.int32),
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([1, -1, 2], dtype=torch.int32),
    )
    assert torch.equal(pool, before)
    for i, (slot, row) in enumerate([(4, 1), (0, -1), (2, 2)]):
        torch.testing.assert_close(
            out[i].double(), reference(x[i], before[slot], *weights), **TOLERANCE
        )
        history = torch.cat([before[slot], x[i]], 1)
        for t in range(5):
            if row >= 0:
                assert torch.equal(windows[row, t], history[:, t + 1 : t + 4])
    assert (windows[[0, 3]] == 9).all()


def test_verification_of_a_tree_follows_the_ancestors(rng, weights):
    """Token 1 and 2 are children of the root, 3 and 4 of token 1, 5 of token 3."""
    parents = [-1, 0, 0, 1, 1, 3]
    next_token = torch.tensor([[1, 3, -1, 5, -1, -1]])
    next_sibling = torch.tensor([[-1, 2, -1, 4, -1, -1]])
    x = torch.randn(1, DIM, 6, generator=rng)
    pool = states(rng)
    windows = torch.zeros(1, 6, DIM, WIDTH - 1)
    found = torch.full((1, 6), 77)
    out = mamba.causal_conv1d_update_cpu(
        x,
        pool,
        *weights,
        activation="silu",
        conv_state_indices=torch.tensor([3]),
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([0]),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_parent_token=found,
    )
    assert found.tolist() == [[0, 0, 0, 1, 1, 3]]
    for t in range(6):
        path, at = [], t
        while at != -1:
            path.insert(0, at)
            at = parents[at]
        want = reference(x[0][:, path], pool[3], *weights)[:, -1]
        torch.testing.assert_close(out[0, :, t].double(), want, **TOLERANCE)
        assert torch.equal(windows[0, t], torch.cat([pool[3], x[0][:, path]], 1)[:, -3:])


@pytest.mark.parametrize("tree", [False, True])
def test_padded_rows_change_nothing(rng, weights, tree):
    x = torch.randn(3, DIM, 2, generator=rng)
    pool = states(rng)
    windows = torch.zeros(3, 2, DIM, WIDTH - 1)
    links = {}
    if tree:
        links = dict(
            retrieve_next_token=torch.tensor([[1, -1]] * 3),
            retrieve_next_sibling=torch.full((3, 2), -1),
            retrieve_parent_token=torch.full((3, 2), 5),
        )
    out = mamba.causal_conv1d_update_cpu(
        x,
        pool,
        *weights,
        activation="silu",
        conv_state_indices=torch.tensor([2, -1, 0]),
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([0, 1, 2]),
        **links,
    )
    for i, slot in ((0, 2), (2, 0)):
        torch.testing.assert_close(
            out[i].double(), reference(x[i], pool[slot], *weights), **TOLERANCE
        )
    assert not out[1].any() and not windows[1].any()
    if tree:
        assert links["retrieve_parent_token"].tolist() == [[0, 0], [5, 5], [0, 0]]


def test_no_activation_and_bfloat16(rng, weights):
    x = torch.randn(2, DIM, generator=rng).bfloat16()
    pool = states(rng).bfloat16()
    before = pool.clone()
    out = mamba.causal_conv1d_update_cpu(x, pool, *weights, conv_state_indices=torch.tensor([1, 2]))
    assert out.dtype == torch.bfloat16
    for i, slot in enumerate([1, 2]):
        want = reference(x[i].unsqueeze(1).float(), before[slot].float(), *weights, silu=False)
        torch.testing.assert_close(out[i].double(), want[:, 0], rtol=8e-3, atol=8e-3)
    with pytest.raises(ValueError, match="only silu"):
        mamba.causal_conv1d_update_cpu(x, pool, *weights, activation="gelu")


def test_signatures_cover_sglangs():
    for ours, theirs in (
        (mamba.causal_conv1d_fn_cpu, causal_conv1d_triton.causal_conv1d_fn),
        (mamba.causal_conv1d_update_cpu, causal_conv1d_triton.causal_conv1d_update),
    ):
        known = set(inspect.signature(ours).parameters)
        for name, parameter in inspect.signature(theirs).parameters.items():
            if (
                parameter.default is inspect.Parameter.empty
                and parameter.kind.name != "VAR_KEYWORD"
            ):
                assert name in known


def test_states_that_are_not_there_say_so(rng, weights):
    x, pool = torch.randn(1, DIM, generator=rng), states(rng)
    for extra in ("cache_seqlens", "num_accept_tokens"):
        with pytest.raises(NotImplementedError):
            mamba.causal_conv1d_update_cpu(x, pool, *weights, **{extra: torch.tensor([1])})
    with pytest.raises(NotImplementedError):
        mamba.chunk_gated_delta_rule_cpu()
