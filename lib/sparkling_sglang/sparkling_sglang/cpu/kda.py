"""Kimi Delta Attention (KDA) in PyTorch: prefill in chunks, decode and verification step by step.

Per head and token, with a state ``S [V, K]`` in float32 (SGLang keeps ``[slots, H, V, K]``)::

    S <- S * exp(g)                      g [K]: log decay, at most 0
    u <- beta * (v - S k)                what the state does not yet say about k
    S <- S + u k^T
    o <- scale * S q

``q`` and ``k`` are divided by their length first (with 1e-6 under the root), ``beta`` is the
sigmoid of its projection, ``scale`` is ``K ** -0.5`` and the gate comes from
:func:`log_decay`. Definitions read from SGLang 0.5.23:
``kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py`` and
``kernels/ops/attention/fla/kda.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

_EPS = 1e-6
# Tokens per chunk. Within a chunk every pair of tokens gets its own decay, exp(G_i - G_j) <= 1 for
# j <= i, so nothing overflows however hard the gate closes; the cost of pairs bounds the size.
_CHUNK = 16
# Elements of the pairwise decay tensor that are alive at once (float32, so 16 MiB).
_PAIR_ELEMENTS = 1 << 22


def log_decay(
    raw: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Log decay of the state, ``[tokens, H, K]`` float32, never positive.

    ``raw [tokens, H, K]`` is the gate projection, ``A_log`` has ``H`` elements, ``dt_bias`` has
    ``H * K``. Safe gate (``lower_bound`` given): ``lower_bound * sigmoid(exp(A_log) * x)``,
    otherwise ``-exp(A_log) * softplus(x)``, with ``x = raw + dt_bias``.
    """
    heads, size = raw.shape[-2:]
    x = raw.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(heads, size)
    rate = A_log.float().exp().view(heads, 1)
    if lower_bound is None:
        return -rate * F.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None = None,
    keep_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Step by step for ``N`` requests of equal length; all inputs float32, ``q`` scaled.

    ``q``, ``k``, ``g [N, T, H, K]``, ``v [N, T, H, V]``, ``beta [N, T, H]``, ``state [N, H, V, K]``.
    ``parents [N, T]``: token ``t > 0`` continues the state of token ``parents[:, t]`` (a tree of
    drafts) instead of that of ``t - 1``. Returns the outputs ``[N, T, H, V]``, the last state, and
    the states after every token ``[N, T, H, V, K]`` if kept.
    """
    decay = g.exp().unsqueeze(-2)
    outputs, states = [], []
    for t in range(q.shape[1]):
        if parents is not None and t > 0:
            state = torch.stack([states[p][n] for n, p in enumerate(parents[:, t].tolist())])
        state = state * decay[:, t]
        key = k[:, t].unsqueeze(-2)
        known = torch.matmul(state, key.transpose(-1, -2)).squeeze(-1)
        update = (v[:, t] - known) * beta[:, t].unsqueeze(-1)
        state = torch.addcmul(state, update.unsqueeze(-1), key)
        outputs.append(torch.matmul(state, q[:, t].unsqueeze(-1)).squeeze(-1))
        if keep_states:
            states.append(state)
    return torch.stack(outputs, 1), state, torch.stack(states, 1) if keep_states else None


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of any length, a chunk at a time; all inputs float32, ``q`` scaled.

    ``q``, ``k``, ``g [T, H, K]``, ``v [T, H, V]``, ``beta [T, H]``, ``state [H, V, K]``. Returns
    ``[T, H, V]`` and the last state.

    With ``G_i`` the log decay summed over the chunk up to token ``i``, the updates ``u`` of a chunk
    solve a unit lower triangular system: ``u_i + beta_i * sum_{j<i} (k_i . exp(G_i - G_j) k_j) u_j
    = beta_i * (v_i - S exp(G_i) k_i)``. Everything that does not touch ``S`` is done for many
    chunks at once; the loop over chunks only carries the state.
    """
    tokens, heads, size = k.shape
    width = v.shape[-1]
    pad = -tokens % _CHUNK
    # A padded token has k = 0, beta = 0 and g = 0, so it leaves the state alone.
    q, k, v, g, beta = (
        F.pad(x, (0, 0) * (x.dim() - 1) + (0, pad)).unflatten(0, (-1, _CHUNK)).transpose(1, 2)
        for x in (q, k, v, g, beta)
    )
    total = g.cumsum(2)
    beta = beta.unsqueeze(-1)
    at_once = max(1, _PAIR_ELEMENTS // (heads * _CHUNK * _CHUNK * size))
    outputs = []
    for first in range(0, total.shape[0], at_once):
        part = slice(first, first + at_once)
        sums, keys, queries = total[part], k[part], q[part]
        pairs = (sums.unsqueeze(3) - sums.unsqueeze(2)).exp_()
        pairs = pairs.mul_(keys.unsqueeze(2))  # [n, H, i, j, K]: exp(G_i - G_j) k_j
        products = torch.matmul(pairs, torch.stack([keys, queries], -1))
        # Pairs with j > i look ahead (and may overflow): the solver reads only what is below the
        # diagonal, and tril drops them.
        system = beta[part] * products[..., 0]
        from_query = products[..., 1].tril()
        grown = sums.exp()
        right = beta[part] * torch.cat([v[part], keys * grown], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        own, through_state = solved.split([width, size], -1)
        seen = queries * grown
        last = sums[:, :, -1:]
        carried = keys * (last - sums).exp()
        kept = last.exp()
        for c in range(sums.shape[0]):
            before = state.transpose(-1, -2)
            update = own[c] - torch.bmm(through_state[c], before)
            outputs.append(torch.bmm(seen[c], before) + torch.bmm(from_query[c], update))
            state = state * kept[c] + torch.bmm(update.transpose(-1, -2), carried[c])
    out = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens]
    return out, state


def _uniform_length(bounds: list[int]) -> int | None:
    """Common length of the sequences between ``bounds``, or None if they differ."""
    step = bounds[1] - bounds[0]
    return step if bounds == list(range(bounds[0], bounds[-1] + 1, step or 1)) and step else None


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    *,
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Prefill of several sequences laid end to end.

    ``q``, ``k [1, tokens, H, K]``, ``v [1, tokens, H, V]``, ``raw_gate`` reshapeable to
    ``[tokens, H, K]``, ``raw_beta`` to ``[tokens, H]``; sequence ``i`` is ``bounds[i]:bounds[i+1]``
    and continues ``states[slots[i]]``, which is replaced. SGLang zeroes a slot when it hands it to
    a new request, so the state always counts. Returns ``[1, tokens, H, V]`` in ``v``'s dtype; rows
    of a slot below 0 are zeros.
    """
    heads, size = k.shape[-2:]
    g = log_decay(raw_gate.reshape(-1, heads, size), A_log, dt_bias, lower_bound)
    beta = raw_beta.reshape(-1, heads).float().sigmoid()
    query, key, value = _unit(q[0]) * size**-0.5, _unit(k[0]), v[0].float()
    out = torch.zeros(v.shape[1:], dtype=v.dtype)
    edges = bounds.tolist()
    for i, slot in enumerate(slots[: len(edges) - 1].tolist()):
        span = slice(edges[i], edges[i + 1])
        if slot < 0 or span.start == span.stop:
            continue
        parts = (x[span] for x in (query, key, value, g, beta))
        result, last = chunked(*parts, states[slot].float())
        out[span] = result.to(v.dtype)
        states[slot] = last.to(states.dtype)
    return out.unsqueeze(0)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    *,
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    intermediate: torch.Tensor | None = None,
    intermediate_rows: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode (one token each) or verification (a few draft tokens each).

    Shapes as in :func:`prefill`. Without ``intermediate`` the states are replaced. With it
    (``[rows, steps, H, V, K]``) they stay, and the state after each token goes to
    ``intermediate[intermediate_rows[i], t]`` (a negative row skips it). ``parents [bs, T]``
    describes a tree of drafts. A slot below 0 reads a zero state and writes none.
    """
    heads, size = k.shape[-2:]
    edges = bounds.tolist()
    batch = len(edges) - 1
    length = _uniform_length(edges)
    if length is None:
        out = torch.zeros_like(v)
        for i in range(batch):
            span = slice(edges[i], edges[i + 1])
            if span.start == span.stop:
                continue
            one = slice(i, i + 1)
            out[:, span] = step(
                q[:, span],
                k[:, span],
                v[:, span],
                raw_gate.reshape(-1, heads, size)[span],
                raw_beta.reshape(-1, heads)[span],
                states=states,
                slots=slots[one],
                bounds=torch.tensor([0, span.stop - span.start]),
                A_log=A_log,
                dt_bias=dt_bias,
                lower_bound=lower_bound,
                intermediate=intermediate,
                intermediate_rows=None if intermediate_rows is None else intermediate_rows[one],
                parents=None if parents is None else parents[one],
            )
        return out
    used = slice(edges[0], edges[-1])
    grouped = (batch, length)
    g = log_decay(raw_gate.reshape(-1, heads, size)[used], A_log, dt_bias, lower_bound)
    beta = raw_beta.reshape(-1, heads)[used].float().sigmoid()
    slots = slots[:batch].long()
    live = slots >= 0
    all_live = bool(live.all())
    state = states[slots if all_live else slots.clamp(min=0)].float()
    if not all_live:
        state[~live] = 0
    result, last, kept = recurrent(
        (_unit(q[0, used]) * size**-0.5).unflatten(0, grouped),
        _unit(k[0, used]).unflatten(0, grouped),
        v[0, used].float().unflatten(0, grouped),
        g.unflatten(0, grouped),
        beta.unflatten(0, grouped),
        state,
        parents=parents,
        keep_states=intermediate is not None,
    )
    if intermediate is None:
        states[slots[live]] = last[live].to(states.dtype)
    else:
        rows = intermediate_rows[:batch].long()
        wanted = rows >= 0
        intermediate[rows[wanted], :length] = kept[wanted].to(intermediate.dtype)
    out = result.flatten(0, 1).to(v.dtype).unsqueeze(0)
    if used == slice(0, v.shape[1]):
        return out
    whole = torch.zeros_like(v)
    whole[:, used] = out
    return whole


class TorchKDAKernel(TritonKDAKernel):
    """Takes the place of ``TritonKDAKernel``, whose Triton functions SGLang omits on a CPU.

    A subclass under the same name in the same module, so that SGLang's dispatcher builds it, its
    ``isinstance`` checks hold and its log line names the kernel that really runs.
    """

    supports_packed_decode = False
    supports_fused_chain_verify = False
    supports_track_state_snapshot = False

    def decode(
        self,
        q,
        k,
        v,
        a,
        b,
        *,
        A_log,
        dt_bias,
        ssm_states,
        cache_indices,
        query_start_loc,
        lower_bound=None,
        **kwargs,
    ):
        """One token per request; called by ``KDAAttnBackend.forward_decode``."""
        return step(
            q,
            k,
            v,
            a,
            b,
            states=ssm_states,
            slots=cache_indices,
            bounds=query_start_loc,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
        )

    def target_verify(
        self,
        A_log,
        dt_bias,
        q,
        k,
        v,
        a,
        b,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        intermediate_states_buffer,
        intermediate_state_indices,
        cache_steps,
        retrieve_parent_token,
        lower_bound=None,
        cache_ring=False,
        **kwargs,
    ):
        """Draft tokens of a round; called by ``KDAAttnBackend._forward_target_verify``."""
        if cache_ring or intermediate_states_buffer is None:
            raise NotImplementedError("--enable-linear-replayssm-spec on a CPU")
        return step(
            q,
            k,
            v,
            a,
            b,
            states=ssm_states,
            slots=cache_indices,
            bounds=query_start_loc,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            intermediate=intermediate_states_buffer,
            intermediate_rows=intermediate_state_indices,
            parents=retrieve_parent_token,
        )

    def extend(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        A_log=None,
        dt_bias=None,
        lower_bound=None,
        beta_is_raw=False,
        return_intermediate_states=False,
        **kwargs,
    ):
        """Prefill; called by ``KDAAttnBackend.forward_extend``."""
        if return_intermediate_states:
            raise NotImplementedError("--mamba-radix-cache-strategy extra_buffer on a CPU")
        if A_log is None or not beta_is_raw:
            raise NotImplementedError("KDA prefill with gates that were applied before")
        return prefill(
            q,
            k,
            v,
            g,
            beta,
            states=ssm_states,
            slots=cache_indices,
            bounds=query_start_loc,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
        )
