"""KDA against the recurrence of its paper, one token at a time, in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sparkling_sglang.cpu import kda

TOLERANCE = dict(rtol=2e-4, atol=2e-5)


def reference(case: dict, tokens: range, state: torch.Tensor, order: list[int] | None = None):
    """Outputs ``[T, H, V]`` and the states after every token ``[T, H, V, K]``, float64.

    ``S <- (I - beta k k^T) Diag(exp g) S + beta k v^T`` with ``S [K, V]``, ``o = scale * S^T q``.
    ``order[t]`` is the token whose state token ``t`` continues; by default the one before.
    """
    heads, size = case["k"].shape[1:]
    outputs, states = [], []
    for t, token in enumerate(tokens):
        out, after = [], []
        for h in range(heads):
            q, k = (case[x][token, h].double() for x in ("q", "k"))
            v = case["v"][token, h].double()
            q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
            x = case["gate"][token, h].double() + case["dt_bias"].view(heads, size)[h].double()
            rate = case["A_log"].view(-1)[h].double().exp()
            bound = case["lower_bound"]
            if bound is None:
                g = -rate * (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))
            else:
                g = bound / (1 + torch.exp(-rate * x))
            beta = 1 / (1 + torch.exp(-case["beta"][token, h].double()))
            if t == 0:
                before = state[h].double().T
            else:
                before = states[t - 1 if order is None else order[t]][h].T
            eye = torch.eye(size, dtype=torch.float64)
            now = (eye - beta * torch.outer(k, k)) @ (g.exp().unsqueeze(1) * before)
            now = now + beta * torch.outer(k, v)
            out.append(now.T @ q * size**-0.5)
            after.append(now.T)
        outputs.append(torch.stack(out))
        states.append(torch.stack(after))
    return torch.stack(outputs), torch.stack(states)


def make(rng, tokens, heads=3, size=32, width=32, lower_bound=-5.0, dtype=torch.float32) -> dict:
    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=rng) * scale).to(dtype)

    return {
        "q": normal(tokens, heads, size),
        "k": normal(tokens, heads, size),
        "v": normal(tokens, heads, width),
        "gate": normal(tokens, heads, size, scale=2.0),
        "beta": normal(tokens, heads),
        "A_log": torch.randn(1, 1, heads, 1, generator=rng) * 0.5,
        "dt_bias": torch.randn(heads * size, generator=rng),
        "lower_bound": lower_bound,
    }


def pool(rng, slots, heads=3, size=32, width=32, empty=()) -> torch.Tensor:
    states = torch.randn(slots, heads, width, size, generator=rng) * 0.3
    states[list(empty)] = 0
    return states


def call(function, case, states, slots, bounds, **more):
    fixed = {name: case[name] for name in ("A_log", "dt_bias", "lower_bound")}
    tokens, heads, size = case["k"].shape
    return function(
        case["q"].unsqueeze(0),
        case["k"].unsqueeze(0),
        case["v"].unsqueeze(0),
        case["gate"].view(1, tokens, heads * size),
        case["beta"].unsqueeze(0),
        states=states,
        slots=torch.tensor(slots, dtype=torch.int32),
        bounds=torch.tensor(bounds, dtype=torch.int32),
        **fixed,
        **more,
    )


def edges(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("lengths", [[1], [16], [15, 1, 17], [40, 3, 64, 33]])
def test_prefill(rng, lengths, lower_bound):
    case = make(rng, sum(lengths), lower_bound=lower_bound)
    slots = [4, 1, 6, 2][: len(lengths)]
    states = pool(rng, 8, empty=[slots[0]])
    before, bounds = states.clone(), edges(lengths)
    out = call(kda.prefill, case, states, slots, bounds)
    for i, slot in enumerate(slots):
        want, after = reference(case, range(bounds[i], bounds[i + 1]), before[slot])
        torch.testing.assert_close(out[0, bounds[i] : bounds[i + 1]].double(), want, **TOLERANCE)
        torch.testing.assert_close(states[slot].double(), after[-1], **TOLERANCE)
    untouched = [s for s in range(8) if s not in slots]
    assert torch.equal(states[untouched], before[untouched])


def test_prefill_at_the_real_head_size_with_many_chunk_groups(rng, monkeypatch):
    """Head size 128 and the limit on live pairs so low that every chunk is a group of its own."""
    monkeypatch.setattr(kda, "_PAIR_ELEMENTS", 1)
    case = make(rng, 50, heads=2, size=128, width=128)
    states = pool(rng, 2, heads=2, size=128, width=128)
    before = states.clone()
    out = call(kda.prefill, case, states, [1], [0, 50])
    want, after = reference(case, range(50), before[1])
    torch.testing.assert_close(out[0].double(), want, **TOLERANCE)
    torch.testing.assert_close(states[1].double(), after[-1], **TOLERANCE)


@pytest.mark.parametrize("cut", [1, 16, 37])
def test_prefill_in_two_parts_equals_one(rng, cut):
    case = make(rng, 60)
    whole = pool(rng, 2)
    parts = whole.clone()
    out = call(kda.prefill, case, whole, [1], [0, 60])
    first = {k: v[:cut] if k in ("q", "k", "v", "gate", "beta") else v for k, v in case.items()}
    rest = {k: v[cut:] if k in ("q", "k", "v", "gate", "beta") else v for k, v in case.items()}
    two = [
        call(kda.prefill, first, parts, [1], [0, cut]),
        call(kda.prefill, rest, parts, [1], [0, 60 - cut]),
    ]
    torch.testing.assert_close(torch.cat(two, 1), out, **TOLERANCE)
    torch.testing.assert_close(parts, whole, **TOLERANCE)


def test_gates_that_close_completely_stay_finite(rng):
    """exp(-sum of gates) of such a chunk exceeds float32 by far; only differences are formed."""
    case = make(rng, 40, lower_bound=None)
    case["gate"] += 60
    states = pool(rng, 2)
    before = states.clone()
    out = call(kda.prefill, case, states, [1], [0, 40])
    want, after = reference(case, range(40), before[1])
    torch.testing.assert_close(out[0].double(), want, **TOLERANCE)
    torch.testing.assert_close(states[1].double(), after[-1], **TOLERANCE)


def test_prefill_skips_padded_rows_and_empty_sequences(rng):
    case = make(rng, 9)
    states = pool(rng, 4)
    before = states.clone()
    out = call(kda.prefill, case, states, [2, -1, 3], [0, 4, 9, 9])
    assert out[0, :4].abs().min() > 0
    assert not out[0, 4:].any()
    assert torch.equal(states[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode(rng, lower_bound):
    case = make(rng, 4, lower_bound=lower_bound)
    states = pool(rng, 8)
    before = states.clone()
    out = call(kda.step, case, states, [5, 0, 7, 2], [0, 1, 2, 3, 4])
    for i, slot in enumerate([5, 0, 7, 2]):
        want, after = reference(case, range(i, i + 1), before[slot])
        torch.testing.assert_close(out[0, i : i + 1].double(), want, **TOLERANCE)
        torch.testing.assert_close(states[slot].double(), after[0], **TOLERANCE)
    assert torch.equal(states[[1, 3, 4, 6]], before[[1, 3, 4, 6]])


def test_decode_with_a_padded_row_reads_a_zero_state_and_writes_none(rng):
    case = make(rng, 2)
    states = pool(rng, 3)
    before = states.clone()
    out = call(kda.step, case, states, [-1, 1], [0, 1, 2])
    want, _ = reference(case, range(1), torch.zeros_like(before[0]))
    torch.testing.assert_close(out[0, :1].double(), want, **TOLERANCE)
    assert torch.equal(states[[0, 2]], before[[0, 2]])
    assert not torch.equal(states[1], before[1])


def test_verification_keeps_every_state_and_commits_none(rng):
    case = make(rng, 12)
    states = pool(rng, 6)
    before = states.clone()
    kept = torch.full((5, 6, 3, 32, 32), 9.0)
    rows = torch.tensor([3, -1, 0, 4], dtype=torch.int32)  # longer than the batch, as SGLang's is
    out = call(
        kda.step, case, states, [2, 4, 1], [0, 4, 8, 12], intermediate=kept, intermediate_rows=rows
    )
    assert torch.equal(states, before)
    for i, slot in enumerate([2, 4, 1]):
        want, after = reference(case, range(4 * i, 4 * i + 4), before[slot])
        torch.testing.assert_close(out[0, 4 * i : 4 * i + 4].double(), want, **TOLERANCE)
        if rows[i] >= 0:
            torch.testing.assert_close(kept[rows[i], :4].double(), after, **TOLERANCE)
    assert (kept[:, 4:] == 9).all() and (kept[[1, 2, 4]] == 9).all()


def test_verification_of_a_tree_continues_the_parents_state(rng):
    case = make(rng, 10)
    states = pool(rng, 3)
    parents = torch.tensor([[0, 0, 0, 1, 3], [0, 0, 1, 1, 0]])
    kept = torch.zeros(2, 5, 3, 32, 32)
    out = call(
        kda.step,
        case,
        states,
        [1, 2],
        [0, 5, 10],
        intermediate=kept,
        intermediate_rows=torch.tensor([0, 1]),
        parents=parents,
    )
    for i in range(2):
        tokens = range(5 * i, 5 * i + 5)
        want, after = reference(case, tokens, states[i + 1], parents[i].tolist())
        torch.testing.assert_close(out[0, 5 * i : 5 * i + 5].double(), want, **TOLERANCE)
        torch.testing.assert_close(kept[i].double(), after, **TOLERANCE)


def test_verification_of_unequal_lengths(rng):
    case = make(rng, 7)
    states = pool(rng, 3)
    kept = torch.zeros(2, 5, 3, 32, 32)
    out = call(
        kda.step,
        case,
        states,
        [1, 2],
        [0, 2, 7],
        intermediate=kept,
        intermediate_rows=torch.tensor([1, 0]),
    )
    for i, (tokens, row) in enumerate([(range(0, 2), 1), (range(2, 7), 0)]):
        want, after = reference(case, tokens, states[i + 1])
        torch.testing.assert_close(out[0, tokens.start : tokens.stop].double(), want, **TOLERANCE)
        torch.testing.assert_close(kept[row, : len(tokens)].double(), after, **TOLERANCE)


def test_bfloat16_inputs_are_computed_in_float32(rng):
    case = make(rng, 20, dtype=torch.bfloat16)
    states = pool(rng, 2)
    before = states.clone()
    out = call(kda.prefill, case, states, [1], [0, 20])
    want, after = reference(case, range(20), before[1])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].double(), want, rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(states[1].double(), after[-1], **TOLERANCE)


def test_the_kernel_takes_what_sglang_passes_to_the_one_it_replaces():
    for name in ("decode", "target_verify", "extend"):
        ours = inspect.signature(getattr(kda.TorchKDAKernel, name)).parameters
        theirs = inspect.signature(getattr(TritonKDAKernel, name)).parameters
        required = [p for p in theirs if theirs[p].default is inspect.Parameter.empty]
        assert set(required) <= set(ours), name


def test_the_kernel_passes_its_arguments_on(rng):
    """Through the class, with the keywords of ``KDAAttnBackend``: prefill, then a decode step."""
    case = make(rng, 5)
    states = pool(rng, 2, empty=[1])
    kernel = kda.TorchKDAKernel()
    fixed = {name: case[name] for name in ("A_log", "dt_bias", "lower_bound")}
    common = dict(ssm_states=states, cache_indices=torch.tensor([1], dtype=torch.int32), **fixed)

    def span(a, b):
        return {x: case[x][a:b].unsqueeze(0) for x in ("q", "k", "v")}

    kernel.extend(
        **span(0, 4),
        g=case["gate"][None, :4],
        beta=case["beta"][None, :4],
        query_start_loc=torch.tensor([0, 4]),
        beta_is_raw=True,
        layer_id=0,
        **common,
    )
    out = kernel.decode(
        **span(4, 5),
        a=case["gate"][4:5].flatten(1),
        b=case["beta"][None, 4:5],
        query_start_loc=torch.tensor([0, 1]),
        **common,
    )
    want, after = reference(case, range(5), torch.zeros(3, 32, 32))
    torch.testing.assert_close(out[0].double(), want[4:], **TOLERANCE)
    torch.testing.assert_close(states[1].double(), after[-1], **TOLERANCE)


@pytest.mark.parametrize(
    "change", [{"return_intermediate_states": True}, {"beta_is_raw": False}, {"A_log": None}]
)
def test_prefill_variants_that_are_not_there_say_so(rng, change):
    case = make(rng, 2)
    arguments = dict(
        g=case["gate"][None],
        beta=case["beta"][None],
        ssm_states=pool(rng, 1),
        cache_indices=torch.tensor([0]),
        query_start_loc=torch.tensor([0, 2]),
        A_log=case["A_log"],
        dt_bias=case["dt_bias"],
        lower_bound=-5.0,
        beta_is_raw=True,
    )
    inputs = [case[x][None] for x in ("q", "k", "v")]
    with pytest.raises(NotImplementedError):
        kda.TorchKDAKernel().extend(*inputs, **(arguments | change))
