"""Commit of the recurrent state that belongs to the last accepted draft token."""

from __future__ import annotations

from typing import Any

import torch


def copy_steps(
    pool: torch.Tensor,
    per_step: torch.Tensor,
    slots: torch.Tensor,
    steps: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """``pool[:, slots[i]] = per_step[:, rows[i], steps[i]]`` wherever slot and step are >= 0.

    ``pool [layers, slots, ...]``, ``per_step [layers, rows, draft_tokens, ...]`` with the same
    trailing shape; ``rows`` defaults to ``0..n-1``.
    """
    steps = steps.long()
    slots = slots[: steps.shape[0]].long()
    rows = torch.arange(steps.shape[0]) if rows is None else rows.long()
    valid = (steps >= 0) & (slots >= 0)
    pool[:, slots[valid]] = per_step[:, rows[valid], steps[valid]].to(pool.dtype)


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Roll every layer's state forward to the last accepted draft token of each request.

    ``mamba_caches`` is SGLang's ``MambaPool.SpeculativeState`` over all layers: ``temporal
    [layers, slots, H, V, K]`` with ``intermediate_ssm [layers, requests, draft_tokens, H, V, K]``,
    and the lists ``conv`` / ``intermediate_conv_window``. ``last_correct_step_indices [requests]``
    counts from 0 (the root). The track arguments, used with the extra_buffer strategy, copy a second
    time. Called by ``HybridLinearAttnBackend.update_mamba_state_after_mtp_verify``; SGLang's own
    raises on tensors that are not on CUDA or XPU.
    """
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    for pool, per_step in pairs:
        if not pool.numel():
            continue
        copy_steps(pool, per_step, state_indices_tensor, last_correct_step_indices, src_indices_raw)
        if mamba_track_indices is not None:
            copy_steps(pool, per_step, mamba_track_indices, mamba_steps_to_track, src_indices_raw)
