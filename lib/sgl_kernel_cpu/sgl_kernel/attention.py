"""Attention over SGLang's slot-addressed KV cache, in float32.

Shapes: ``q [tokens, heads, D]``, cached keys ``[slots, kv_heads, D]`` and values
``[slots, kv_heads, Dv]``. For multi-head latent attention (MLA) in its absorbed form there is one
kv head, ``D = kv_lora_rank + rope``, and the value buffer is a view of the key buffer's first
``kv_lora_rank`` columns.
"""

from __future__ import annotations

import torch

# Rows of queries per block: bounds the score matrix to heads x 256 x keys.
_QUERY_BLOCK = 256


def _unsupported(**features: bool) -> None:
    used = [name for name, on in features.items() if on]
    if used:
        raise NotImplementedError("attention on a CPU without AMX: no " + ", ".join(used))


def _weights(scores: torch.Tensor, hidden: torch.Tensor | None, cap: float) -> torch.Tensor:
    """Softmax over the last dimension of capped scores; places where ``hidden`` get weight 0."""
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one request: ``q [Tq, H, D]``, ``k [Tk, Hk, D]``, ``v [Tk, Hk, Dv]``.

    ``visible [Tq, Tk]`` is True where a query may look; None means everywhere. ``H`` must be a
    multiple of ``Hk``: query head ``h`` reads kv head ``h // (H / Hk)``. Returns float32
    ``[Tq, H, Dv]``.
    """
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    group = heads // kv_heads
    keys = k.float().permute(1, 2, 0)
    values = v.float().transpose(0, 1)
    blocks = []
    for first in range(0, q.shape[0], _QUERY_BLOCK):
        block = q[first : first + _QUERY_BLOCK].float().mul(scale)
        rows = block.shape[0]
        # Query heads of one kv head become rows of one product, so keys are never repeated.
        folded = block.reshape(rows, kv_heads, group, size).permute(1, 2, 0, 3)
        scores = torch.bmm(folded.reshape(kv_heads, group * rows, size), keys)
        hidden = None if visible is None else ~visible[first : first + rows]
        weights = _weights(scores.view(kv_heads, group, rows, -1), hidden, cap)
        mixed = torch.bmm(weights.view(kv_heads, group * rows, -1), values)
        blocks.append(mixed.view(heads, rows, -1).transpose(0, 1))
    return torch.cat(blocks)


def decode_attention_cpu(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One new token per request: store its K and V at ``loc``, attend, write ``output``.

    ``q [bs, H, D]``, ``key``/``value`` reshapeable to ``[bs, Hk, D]``/``[bs, Hk, Dv]`` or None
    when already stored, ``loc [bs]``, ``output [bs, H, Dv]``, ``seq_lens [bs]`` counting the new
    token. ``attn_logits`` is scratch space of the C++ kernel. Called by
    ``IntelAMXAttnBackend.forward_decode``, for target and draft.

    Raises:
        NotImplementedError: cross attention, a sliding window, attention sinks.
    """
    _unsupported(
        cross_attention=is_cross_attn,
        sliding_window=sliding_window_size > 0,
        sinks=sinks is not None,
    )
    if key is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    batch, heads, _ = q.shape
    kv_heads = k_buffer.shape[1]
    longest = int(seq_lens.max()) if batch else 0
    slots = req_to_token[req_pool_indices.long(), :longest].long()
    hidden = None
    if batch > 1:
        outside = torch.arange(longest) >= seq_lens.unsqueeze(1)
        # Beyond a request's end the table holds old slots: read its first token there instead, so
        # that nothing foreign (it might be NaN) enters even with weight zero.
        slots = torch.where(outside, slots[:, :1], slots)
        hidden = outside[:, None, None, :]
    keys = k_buffer[slots].float().permute(0, 2, 3, 1)
    values = v_buffer[slots].float().transpose(1, 2)
    grouped = q.float().mul(sm_scale * k_scale).reshape(batch, kv_heads, heads // kv_heads, -1)
    mixed = torch.matmul(_weights(torch.matmul(grouped, keys), hidden, logit_cap), values)
    output.copy_((mixed if v_scale == 1 else mixed * v_scale).view(output.shape))


def extend_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    output: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Several new tokens per request: prefill, chunked prefill, verification, draft extend.

    Request ``i`` brings ``extend_seq_lens[i]`` tokens from row ``extend_start_loc[i]`` on; its
    prefix of ``seq_lens[i] - extend_seq_lens[i]`` tokens is read from the cache, and the new tokens
    from ``k [tokens, Hk, D]`` and ``v [tokens, Hk, Dv]`` (from the cache too where these are None).
    A prefill of MLA without prefix passes expanded heads that the cache does not hold, which works
    because nothing is read from the cache then.

    ``tree_mask`` is flat, one ``[extend, extend]`` block per request (SGLang's QLEN_ONLY mode): who
    sees whom among the new tokens, while the prefix is visible to all. Without it the new tokens
    are causal. Called by ``IntelAMXAttnBackend.forward_extend``.

    Raises:
        NotImplementedError: cross attention, a sliding window, attention sinks.
    """
    _unsupported(
        cross_attention=is_cross_attn,
        sliding_window=sliding_window_size > 0,
        sinks=sinks is not None,
    )
    mask_start = 0
    for row, length, new, start in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    ):
        if new == 0:
            continue
        prefix = length - new
        among_new = None
        if tree_mask is not None:
            among_new = (
                tree_mask.view(-1)[mask_start : mask_start + new * new].view(new, new).bool()
            )
            mask_start += new * new
        elif is_causal and new > 1:
            among_new = torch.ones((new, new), dtype=torch.bool).tril()
        visible = None
        if among_new is not None:
            visible = torch.cat([torch.ones((new, prefix), dtype=torch.bool), among_new], 1)
        cached = req_to_token[row, : prefix if k is not None else length].long()
        keys = _keys(k, k_buffer, k_scale, cached, start, new)
        values = _keys(v, v_buffer, v_scale, cached, start, new)
        output[start : start + new] = attend(
            q[start : start + new], keys, values, sm_scale, visible, logit_cap
        ).to(output.dtype)


def _keys(
    fresh: torch.Tensor | None,
    buffer: torch.Tensor,
    scale: float,
    cached: torch.Tensor,
    start: int,
    new: int,
) -> torch.Tensor:
    """Cached rows followed by the request's fresh ones, float32 ``[Tk, Hk, D]``."""
    parts = []
    if cached.numel():
        stored = buffer[cached].float()
        parts.append(stored * scale if scale != 1 else stored)
    if fresh is not None:
        parts.append(fresh[start : start + new].float())
    return parts[0] if len(parts) == 1 else torch.cat(parts)
