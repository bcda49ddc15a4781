"""Short causal convolutions with a state per request, as linear attention uses them.

The convolution is depthwise over time: ``y[d, t] = act(bias[d] + sum_j weight[d, j] *
x[d, t - (width - 1) + j])``. A request's state is its last ``width - 1`` inputs ``[dim, width - 1]``,
oldest first; slot ``-1`` marks a padded row. SGLang passes the state pool transposed, as a view, so
states are written through indexing and never reshaped. Sums are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PAD_SLOT_ID = -1


def _activate(y: torch.Tensor, activation: str | bool | None) -> torch.Tensor:
    if activation in (None, False):
        return y
    if activation in ("silu", "swish", True):
        return F.silu(y)
    raise ValueError(f"activation {activation!r}: only silu is known")


def _convolve(
    history: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | bool | None,
) -> torch.Tensor:
    """``history [n, dim, width - 1 + T]`` float32 -> ``[n, dim, T]``, summed over shifted copies."""
    width = weight.shape[1]
    steps = history.shape[-1] - (width - 1)
    taps = weight.float()
    y = history[..., :steps] * taps[:, :1]
    for j in range(1, width):
        y = torch.addcmul(y, history[..., j : j + steps], taps[:, j : j + 1])
    if bias is not None:
        y = y + bias.float().unsqueeze(-1)
    return _activate(y, activation)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    **unused,
) -> torch.Tensor:
    """Prefill: convolve whole sequences and leave each one's state behind.

    ``x [dim, tokens]`` holds the sequences side by side, ``query_start_loc [bs + 1]`` their bounds,
    ``weight [dim, width]``, ``conv_states [slots, dim, width - 1]`` (written in place at
    ``cache_indices [bs]``), ``has_initial_state [bs]`` bool: whether the slot's state precedes the
    sequence, zeros otherwise. Returns ``[dim, tokens]``; padded rows come back as zeros. Called by
    ``KDAAttnBackend._convolve_prefill`` (there through the plugin, since SGLang takes its Triton
    kernel on every platform).
    """
    out = torch.zeros_like(x)
    keep = weight.shape[1] - 1
    bounds = query_start_loc.tolist()
    slots = range(len(bounds) - 1) if cache_indices is None else cache_indices.tolist()
    resumed = [False] * len(bounds) if has_initial_state is None else has_initial_state.tolist()
    for i, slot in enumerate(slots):
        start, end = bounds[i], bounds[i + 1]
        if slot == pad_slot_id or end == start:
            continue
        before = (
            conv_states[slot].float() if resumed[i] else x.new_zeros((x.shape[0], keep)).float()
        )
        history = torch.cat([before, x[:, start:end].float()], 1)
        out[:, start:end] = _convolve(history[None], weight, bias, activation)[0].to(out.dtype)
        conv_states[slot] = history[:, history.shape[1] - keep :].to(conv_states.dtype)
    return out


def _tree_history(
    x: torch.Tensor, state: torch.Tensor, parents: torch.Tensor, width: int
) -> torch.Tensor:
    """The ``width`` inputs that end at each tree token: ``[n, dim, T, width]``, oldest first.

    Token 0 continues ``state [n, dim, width - 1]``; token ``t`` continues its parent. Parents have
    lower positions than their children, so one pass in order suffices.
    """
    n, dim, steps = x.shape
    windows = x.new_empty((n, dim, steps, width))
    rows = torch.arange(n)
    for t in range(steps):
        before = state if t == 0 else windows[rows, :, parents[:, t], 1:]
        windows[:, :, t] = torch.cat([before, x[:, :, t : t + 1]], -1)
    return windows


def tree_parents(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Parents ``[n, T]`` from first-child and next-sibling links (-1: none); the root's is 0."""
    n, steps = next_token.shape
    parents = torch.zeros((n, steps), dtype=torch.int64)
    rows = torch.arange(n)
    for t in range(steps):
        for link, parent in ((next_token[:, t], t), (next_sibling[:, t], parents[:, t])):
            has = link >= 0
            value = parent if isinstance(parent, int) else parent[has]
            parents[rows[has], link[has].long()] = value
    return parents


def _rows(tensor: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor[mask]


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
) -> torch.Tensor:
    """Decode and verification: a few tokens that continue each request's state.

    ``x [bs, dim]`` or ``[bs, dim, T]``, ``conv_state [slots, dim, width - 1]`` addressed by
    ``conv_state_indices [bs]``. Returns the shape of ``x``; padded rows come back as zeros.

    * Decode (no ``intermediate_conv_window``): the state moves on by ``T`` inputs.
    * Verification: the state after each draft token ``t`` goes to
      ``intermediate_conv_window[intermediate_state_indices[i], t]`` (``[dim, width - 1]``; a negative
      index skips it) and ``conv_state`` itself stays as it was, since SGLang later scatters the
      accepted one.
    * Tree verification (``retrieve_next_token`` / ``retrieve_next_sibling [bs, T]`` given): token
      ``t`` continues its parent; the parents are also written to ``retrieve_parent_token [bs, T]``,
      where the recurrence reads them.

    Called by ``KDAAttnBackend.forward_decode`` and ``_forward_target_verify``.

    Raises:
        NotImplementedError: a circular state buffer (``cache_seqlens``) or ``num_accept_tokens``.
    """
    if cache_seqlens is not None or num_accept_tokens is not None:
        raise NotImplementedError("circular or rewinding convolution states on a CPU")
    single = x.dim() == 2
    if single:
        x = x.unsqueeze(-1)
    width = weight.shape[1]
    slots = conv_state_indices
    slots = torch.arange(x.shape[0]) if slots is None else slots.long()
    live = slots != pad_slot_id
    if not bool(live.all()):
        out = torch.zeros_like(x)
        parents = None if retrieve_parent_token is None else retrieve_parent_token[live]
        out[live] = causal_conv1d_update_cpu(
            x[live],
            conv_state,
            weight,
            bias,
            activation,
            conv_state_indices=slots[live],
            intermediate_conv_window=intermediate_conv_window,
            intermediate_state_indices=_rows(intermediate_state_indices, live),
            retrieve_next_token=_rows(retrieve_next_token, live),
            retrieve_next_sibling=_rows(retrieve_next_sibling, live),
            retrieve_parent_token=parents,
        )
        if parents is not None:
            retrieve_parent_token[live] = parents
        return out.squeeze(-1) if single else out
    steps = x.shape[-1]
    fresh, state = x.float(), conv_state[slots].float()
    tree = retrieve_next_token is not None
    if tree:
        parents = tree_parents(retrieve_next_token, retrieve_next_sibling)
        retrieve_parent_token.copy_(parents)
        windows = _tree_history(fresh, state, parents, width)
        y = (windows * weight.float().unsqueeze(1)).sum(-1)
        y = _activate(y if bias is None else y + bias.float().unsqueeze(-1), activation)
    else:
        history = torch.cat([state, fresh], -1)
        windows = history.unfold(-1, width, 1)
        y = _convolve(history, weight, bias, activation)
    if intermediate_conv_window is not None:
        rows = intermediate_state_indices.long()
        kept = windows[..., 1:].transpose(1, 2).to(intermediate_conv_window.dtype)
        wanted = rows >= 0
        intermediate_conv_window[rows[wanted], :steps] = kept[wanted]
    elif tree:
        raise NotImplementedError("a tree of drafts needs intermediate_conv_window")
    else:
        conv_state[slots] = history[..., -(width - 1) :].to(conv_state.dtype)
    y = y.to(x.dtype)
    return y.squeeze(-1) if single else y


def chunk_gated_delta_rule_cpu(*args, **kwargs):
    """Prefill of gated delta nets; ``linear/kernels/gdn_triton.py`` imports the name.

    Raises:
        NotImplementedError: always, Ling-3.0 has no such layer.
    """
    raise NotImplementedError("gated delta nets on a CPU; Ling-3.0 has none")
