"""The attention operators, through the dispatcher, against torch's own attention in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sgl_kernel import attention

TOLERANCE = dict(rtol=1e-4, atol=1e-5)
SLOTS, TABLE = 64, 40


def reference(q, k, v, scale, visible):
    """``q [Tq, H, D]``, ``k [Tk, Hk, D]``, ``v [Tk, Hk, Dv]`` -> float64 ``[Tq, H, Dv]``."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1).transpose(0, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.double().transpose(0, 1), k, v, attn_mask=visible, scale=scale
    )
    return out.transpose(0, 1)


def causal(new: int, length: int) -> torch.Tensor:
    return torch.tensor([[j <= i + length - new for j in range(length)] for i in range(new)])


class Cache:
    """A KV pool with a table of scattered slots; every unused slot holds NaN."""

    def __init__(self, rng, lengths, kv_heads=2, size=16, width=None, mla=False):
        self.lengths = lengths
        self.k = torch.full((SLOTS, kv_heads, size), float("nan"))
        self.v = self.k[..., :width] if mla else torch.full((SLOTS, kv_heads, width), float("nan"))
        order = torch.randperm(SLOTS, generator=rng)
        self.table = torch.full((8, TABLE), int(order[-1]), dtype=torch.int32)
        self.rows = torch.randperm(8, generator=rng)[: len(lengths)]
        for i, length in enumerate(lengths):
            slots, order = order[:length], order[length:]
            self.table[self.rows[i], :length] = slots.int()
            self.k[slots] = torch.randn(length, kv_heads, size, generator=rng)
            if not mla:
                self.v[slots] = torch.randn(length, kv_heads, width, generator=rng)

    def of(self, i, length=None):
        slots = self.table[self.rows[i], : length or self.lengths[i]].long()
        return self.k[slots], self.v[slots]


def decode(cache, q, key=None, value=None, loc=None, seq_lens=None, **change):
    output = torch.empty(*q.shape[:2], cache.v.shape[-1], dtype=q.dtype)
    arguments = dict(
        q=q,
        k_buffer=cache.k,
        v_buffer=cache.v,
        k_scale=1.0,
        v_scale=1.0,
        output=output,
        key=key,
        value=value,
        loc=torch.zeros(len(cache.lengths), dtype=torch.int64) if loc is None else loc,
        attn_logits=torch.zeros(1),
        req_to_token=cache.table,
        req_pool_indices=cache.rows,
        seq_lens=torch.tensor(cache.lengths),
        sm_scale=0.3,
        logit_cap=0.0,
        is_cross_attn=False,
        sliding_window_size=0,
        encoder_lens=None,
        sinks=None,
    )
    torch.ops.sgl_kernel.decode_attention_cpu(**(arguments | change))
    return output


def extend(cache, q, lengths, new, k=None, v=None, tree_mask=None, is_causal=True, **change):
    output = torch.empty(*q.shape[:2], cache.v.shape[-1] if v is None else v.shape[-1])
    arguments = dict(
        q=q,
        k=k,
        v=v,
        output=output,
        k_buffer=cache.k,
        v_buffer=cache.v,
        k_scale=1.0,
        v_scale=1.0,
        req_to_token=cache.table,
        req_pool_indices=cache.rows,
        seq_lens=torch.tensor(lengths),
        extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        extend_start_loc=torch.tensor([sum(new[:i]) for i in range(len(new))]),
        max_len_extend=max(new),
        sm_scale=0.3,
        logit_cap=0.0,
        is_cross_attn=False,
        sliding_window_size=0,
        encoder_lens=None,
        sinks=None,
        tree_mask=tree_mask,
        is_causal=is_causal,
    )
    torch.ops.sgl_kernel.extend_attention_cpu(**(arguments | change))
    return output


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[9], [3, 17, 1, 8]])
def test_decode(rng, lengths, heads, kv_heads):
    cache = Cache(rng, lengths, kv_heads, width=12)
    q = torch.randn(len(lengths), heads, 16, generator=rng)
    out = decode(cache, q)
    for i in range(len(lengths)):
        want = reference(q[i : i + 1], *cache.of(i), 0.3, None)
        torch.testing.assert_close(out[i : i + 1].double(), want, **TOLERANCE)


@pytest.mark.parametrize("mla", [False, True])
def test_decode_stores_the_new_token_first(rng, mla):
    """In latent attention (MLA) the values are a view of the keys."""
    cache = Cache(rng, [4, 7], kv_heads=1, width=12, mla=mla)
    last = [int(cache.table[cache.rows[i], n - 1]) for i, n in enumerate(cache.lengths)]
    key = torch.randn(2, 1, 16, generator=rng)
    value = key[..., :12] if mla else torch.randn(2, 1, 12, generator=rng)
    q = torch.randn(2, 4, 16, generator=rng)
    out = decode(cache, q, key.view(2, 16), value, loc=torch.tensor(last))
    assert torch.equal(cache.k[last], key) and torch.equal(cache.v[last], value)
    for i in range(2):
        want = reference(q[i : i + 1], *cache.of(i), 0.3, None)
        torch.testing.assert_close(out[i : i + 1].double(), want, **TOLERANCE)


@pytest.mark.parametrize("with_fresh", [True, False])
def test_extend_after_a_prefix(rng, with_fresh):
    """New keys come from the arguments if given, and only the prefix from the cache."""
    lengths, new = [9, 5, 12], [4, 5, 1]
    cache = Cache(rng, lengths, width=12)
    q = torch.randn(10, 4, 16, generator=rng)
    k, v = (torch.randn(10, 2, n, generator=rng) for n in (16, 12)) if with_fresh else (None, None)
    out = extend(cache, q, lengths, new, k, v)
    start = 0
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        span = slice(start, start + count)
        keys, values = cache.of(i)
        if with_fresh:
            keys = torch.cat([keys[: length - count], k[span]])
            values = torch.cat([values[: length - count], v[span]])
        want = reference(q[span], keys, values, 0.3, causal(count, length))
        torch.testing.assert_close(out[span].double(), want, **TOLERANCE)
        start += count


def test_prefill_of_expanded_latent_heads(rng):
    """MLA's prefill brings as many K and V heads as queries; the cache holds one latent head."""
    cache = Cache(rng, [6, 3], kv_heads=1, size=10, width=8, mla=True)
    q, k = (torch.randn(9, 4, 16, generator=rng) for _ in range(2))
    v = torch.randn(9, 4, 12, generator=rng)
    out = extend(cache, q, [6, 3], [6, 3], k, v)
    for span in (slice(0, 6), slice(6, 9)):
        n = span.stop - span.start
        want = reference(q[span], k[span], v[span], 0.3, causal(n, n))
        torch.testing.assert_close(out[span].double(), want, **TOLERANCE)


def test_verification_of_trees(rng):
    """One flat [new, new] block per request; the prefix is visible to every draft token."""
    lengths, new = [9, 7], [4, 4]
    cache = Cache(rng, lengths, width=12)
    q = torch.randn(8, 4, 16, generator=rng)
    blocks = torch.stack(
        [
            torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]),
            torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]),
        ]
    ).bool()
    out = extend(cache, q, lengths, new, tree_mask=blocks.flatten())
    for i, length in enumerate(lengths):
        span = slice(4 * i, 4 * i + 4)
        visible = torch.cat([torch.ones(4, length - 4, dtype=torch.bool), blocks[i]], 1)
        want = reference(q[span], *cache.of(i), 0.3, visible)
        torch.testing.assert_close(out[span].double(), want, **TOLERANCE)


def test_extend_without_causality_sees_everything(rng):
    cache = Cache(rng, [8], width=12)
    q = torch.randn(5, 4, 16, generator=rng)
    out = extend(cache, q, [8], [5], is_causal=False)
    want = reference(q, *cache.of(0), 0.3, None)
    torch.testing.assert_close(out.double(), want, **TOLERANCE)


def test_an_empty_request_in_the_batch_is_skipped(rng):
    cache = Cache(rng, [8, 4], width=12)
    q = torch.randn(3, 4, 16, generator=rng)
    out = extend(cache, q, [8, 4], [0, 3])
    want = reference(q, *cache.of(1), 0.3, causal(3, 4))
    torch.testing.assert_close(out.double(), want, **TOLERANCE)


def test_query_blocks_join(rng, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 7)
    q, k, v = (torch.randn(23, n, 16, generator=rng) for n in (4, 2, 2))
    out = attention.attend(q, k, v, 0.3, causal(23, 23))
    torch.testing.assert_close(out.double(), reference(q, k, v, 0.3, causal(23, 23)), **TOLERANCE)


def test_logit_cap_and_scales(rng):
    cache = Cache(rng, [5], kv_heads=1, width=16)
    q = torch.randn(1, 1, 16, generator=rng)
    keys, values = (x[:, 0].double() for x in cache.of(0))
    scores = 2 * torch.tanh((q[0, 0].double() @ (keys * 0.5).T) * 0.3 / 2)
    want = scores.softmax(-1) @ (values * 3)
    arguments = dict(logit_cap=2.0, k_scale=0.5, v_scale=3.0)
    out = decode(cache, q, **arguments)
    torch.testing.assert_close(out[0, 0].double(), want, **TOLERANCE)
    out = extend(cache, q, [5], [1], **arguments)
    torch.testing.assert_close(out[0, 0].double(), want, **TOLERANCE)


def test_bfloat16(rng):
    cache = Cache(rng, [9, 4], width=16)
    cache.k, cache.v = cache.k.bfloat16(), cache.v.bfloat16()
    q = torch.randn(2, 4, 16, generator=rng).bfloat16()
    out = decode(cache, q)
    assert out.dtype == torch.bfloat16
    for i in range(2):
        want = reference(q[i : i + 1], *cache.of(i), 0.3, None)
        torch.testing.assert_close(out[i : i + 1].double(), want, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize(
    "change", [{"is_cross_attn": True}, {"sliding_window_size": 5}, {"sinks": torch.zeros(4)}]
)
def test_what_is_not_there_says_so(rng, change):
    cache = Cache(rng, [5], width=12)
    q = torch.randn(1, 4, 16, generator=rng)
    with pytest.raises(NotImplementedError):
        decode(cache, q, **change)
    with pytest.raises(NotImplementedError):
        extend(cache, q, [5], [1], **change)
