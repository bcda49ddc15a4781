"""Kimi Delta Attention: the recurrence, and the same in chunks of 16 tokens for training speed.

Per head, with state S [K, V], per-channel log decay g_t <= 0 [K], write strength beta_t:

    S_t = exp(g_t) * S_{t-1};  d_t = beta_t (v_t - S_t^T k_t);  S_t += k_t d_t^T;  o_t = S_t^T q_t

which is what SGLang 0.5.23 computes (`fused_sigmoid_gating_delta_rule_update`, `chunk_kda`; there
the state is stored transposed). With the safe gate g_t > -5, so inside a chunk of 16 tokens the
cumulated decay stays above exp(-80), and both exp(G) and exp(-G) are representable in float32:
that is why the chunk length is 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16


def safe_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay in (lower_bound, 0). f [..., heads, K], a_log [heads], dt_bias [heads * K]."""
    heads, width = f.shape[-2:]
    x = f.float() + dt_bias.float().view(heads, width)
    return lower_bound * torch.sigmoid(a_log.float().exp().view(heads, 1) * x)


def l2norm(x: Tensor) -> Tensor:
    """x / ||x|| over the last dimension, with SGLang's epsilon under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token at a time.

    q, k, g [B, H, T, K]; v [B, H, T, V]; beta [B, H, T]; state [B, H, K, V]. q is already scaled.
    Returns outputs [B, H, T, V] and the final state. Any dtype (float64 for reference).
    """
    b, h, t, width = q.shape
    s = q.new_zeros(b, h, width, v.shape[-1]) if state is None else state
    out = []
    for i in range(t):
        s = s * g[:, :, i].exp().unsqueeze(-1)
        d = (v[:, :, i] - torch.einsum("bhkv,bhk->bhv", s, k[:, :, i])) * beta[:, :, i, None]
        s = s + k[:, :, i].unsqueeze(-1) * d.unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, :, i]))
    return torch.stack(out, 2), s


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [..., n, n], n a power of two."""

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        inverse = _invert(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        t = inverse.transpose(-1, -2)
        return -(t @ grad @ t).tril(-1)


def _invert(lower: Tensor) -> Tensor:
    # [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]: block forward substitution, as stable
    # as the plain one, in log2(n) batched steps.
    n = lower.shape[-1]
    if n == 1:
        return torch.ones_like(lower)
    m = n // 2
    a, b = _invert(torch.stack([lower[..., :m, :m], lower[..., m:, m:]])).unbind(0)
    out = torch.zeros_like(lower)
    out[..., :m, :m] = a
    out[..., m:, m:] = b
    out[..., m:, :m] = -(b @ lower[..., m:, :m] @ a)
    return out


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent`, in matrix products over chunks of 16 tokens (float32)."""
    b, h, t, width = q.shape
    pad = -t % CHUNK
    if pad:  # beta 0 and g 0: a padded token neither writes nor decays
        q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
        beta = torch.nn.functional.pad(beta, (0, pad))
    n = (t + pad) // CHUNK
    q, k, v, g = (x.reshape(b, h, n, CHUNK, x.shape[-1]) for x in (q, k, v, g))
    beta = beta.reshape(b, h, n, CHUNK, 1)
    total = g.cumsum(-2)
    grow, last = total.exp(), total[..., -1:, :]
    k_in, k_out, q_in = k * grow, k * (-total).exp(), q * grow
    lower = (k_in @ k_out.transpose(-1, -2)).tril(-1) * beta
    mix = (q_in @ k_out.transpose(-1, -2)).tril()
    solve = _UnitLowerInverse.apply(lower)
    u = solve @ (v * beta)
    w = solve @ (k_in * beta)
    k_end = (k * (last - total).exp()).transpose(-1, -2)
    decay = last.exp().transpose(-1, -2)
    s = q.new_zeros(b, h, width, v.shape[-1]) if state is None else state
    # unbound once: the backward of indexing would fill and add a whole tensor for each chunk
    chunks = zip(*(x.unbind(2) for x in (u, w, q_in, mix, decay, k_end)), strict=True)
    out = []
    for u_i, w_i, q_i, mix_i, decay_i, k_i in chunks:
        d = u_i - w_i @ s
        out.append(q_i @ s + mix_i @ d)
        s = decay_i * s + k_i @ d
    return torch.cat(out, 2)[:, :, :t], s
