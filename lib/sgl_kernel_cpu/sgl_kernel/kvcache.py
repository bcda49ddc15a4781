"""Bookkeeping of the KV cache: which slot holds which token.

``req_to_token`` is SGLang's table ``[max_requests, max_context]`` of slot numbers (int32); row
``req_pool_indices[i]``, column ``t`` is the slot of token ``t`` of request ``i``. Index arguments
arrive as int32 or int64 and are never changed.
"""

from __future__ import annotations

import ctypes

import torch


def _spans(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor):
    """Yield ``(row, start, end, offset)``, offset counting the tokens of the spans before."""
    offset = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        yield row, first, last, offset
        offset += last - first


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write freshly allocated slots into the table: columns ``start[i]:end[i]`` of each row.

    ``out_cache_loc [sum(end - start)]`` holds the slots of all requests one after another.
    Called by ``srt/mem_cache/allocation.py`` when speculation reserves room for a round.
    """
    for row, first, last, offset in _spans(req_pool_indices, start, end):
        req_to_token[row, first:last] = out_cache_loc[offset : offset + last - first]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse: read columns ``start[i]:end[i]`` into ``out_cache_loc``, requests in order.

    Called by ``kernels/ops/speculative/cache_locs.py`` to find where a verification writes.
    """
    for row, first, last, offset in _spans(req_pool_indices, start, end):
        out_cache_loc[offset : offset + last - first] = req_to_token[row, first:last]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots after each request's last token.

    ``out_cache_loc [bs * topk * num_steps]``. Called by ``kernels/ops/speculative/cache_locs.py``
    before the draft model runs.
    """
    width = topk * num_steps
    columns = seq_lens.long().unsqueeze(1) + torch.arange(width)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long().unsqueeze(1), columns].flatten())


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """Table of slots as each draft candidate sees them, ``[bs * topk, pool_len]``.

    Row ``i * topk + k`` is request ``i``'s prefix of ``seq_lens[i]`` tokens followed by the
    ``num_steps`` slots of candidate ``k``, which lie at ``seq_lens[i] + k * num_steps`` in the
    request's own row. Columns past that are zero. Called by ``IntelAMXMultiStepDraftBackend`` in
    ``srt/layers/attention/intel_amx_backend.py``, once per round.
    """
    table = torch.zeros((seq_lens.numel() * topk, pool_len), dtype=req_to_token.dtype)
    out = 0
    for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        for candidate in range(topk):
            first = length + candidate * num_steps
            table[out, :length] = req_to_token[row, :length]
            table[out, length : length + num_steps] = req_to_token[row, first : first + num_steps]
            out += 1
    return table


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copy slots ``src_loc`` to ``tgt_loc`` in every layer's K and V buffer.

    ``data_ptrs [layers]`` (uint64) are buffer addresses and ``strides [layers]`` the bytes of one
    slot in each. All sources are read before any target is written, so the two may overlap. Called
    by ``kernels/ops/kvcache/cache_move.py`` to compact the accepted path of a draft tree.
    """
    if not tgt_loc.numel():
        return
    target, source = tgt_loc.long(), src_loc.long()
    slots = 1 + int(torch.maximum(target.max(), source.max()))
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        raw = (ctypes.c_uint8 * (slots * stride)).from_address(pointer)
        buffer = torch.frombuffer(raw, dtype=torch.uint8).view(slots, stride)
        buffer[target] = buffer[source]
