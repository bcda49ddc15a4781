"""Trees of draft tokens: building them, verifying them greedily, and what follows.

A request drafts ``num_draft`` tokens per round: token 0 is the last accepted one, tokens 1.. are
the selected candidates in order of their index in the flattened candidate list. Candidate ``c`` was
produced by the beam in place ``c // topk``; place 0 is the root, and ``parent_list[b, p]`` names the
candidate that filled place ``p``. With top-k 1 the tree is a chain.
"""

from __future__ import annotations

import torch

_FULL_MASK = 0
_BITPACKED_MASK = 2


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent of each draft token as a position in the tree; -1 for the root and for orphans.

    ``selected`` are the ``num_draft - 1`` candidate indices. An orphan's parent was not selected;
    SGLang's selection by cumulative score never makes one.
    """
    position = {}
    for place, candidate in enumerate(selected, start=1):
        position.setdefault(candidate, place)
    parents = [-1]
    for candidate in selected:
        beam = candidate // topk
        parents.append(0 if beam == 0 else position.get(parent_list[beam], -1))
    return parents


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_draft: int,
    tree_mask_mode: int,
) -> None:
    """Lay out the draft tree of every request for verification.

    Reads ``parent_list [bs, 1 + (depth - 2) * topk + ...]``, ``selected_index [bs, num_draft - 1]``
    and ``seq_lens [bs]``; writes in place:

    * ``positions [bs * num_draft]``: sequence length plus depth in the tree;
    * ``retrieve_index [bs, num_draft]``: row of each draft token in the flattened batch;
    * ``retrieve_next_token`` / ``retrieve_next_sibling [bs, num_draft]`` (pre-filled with -1): first
      child of a token, and the next child of the same parent, lower positions first;
    * ``tree_mask`` (flat, bool): who may attend to whom. Mode 0 has ``seq_len + num_draft`` columns
      per draft token and leaves the prefix columns alone, mode 1 has ``num_draft``.

    Called by ``kernels/ops/speculative/spec_tree.py``; on a CPU SGLang asks for mode 1.
    """
    mode = int(tree_mask_mode)
    if mode == _BITPACKED_MASK:
        raise NotImplementedError("bit-packed tree masks are not built on a CPU")
    lengths = seq_lens.tolist()
    batch = len(lengths)
    selected = selected_index.view(batch, -1).tolist()
    parent_lists = parent_list.view(batch, -1).tolist() if parent_list.numel() else [[]] * batch
    mask, mask_start = tree_mask.view(-1), 0
    next_token, next_sibling, place, attends = [], [], [], []
    for request, length in enumerate(lengths):
        parents = _parents(selected[request], parent_lists[request], topk)
        child, sibling = [-1] * num_draft, [-1] * num_draft
        for token in range(num_draft - 1, 0, -1):
            parent = parents[token]
            if parent >= 0:
                sibling[token], child[parent] = child[parent], token
        rows, depths = [], []
        for token in range(num_draft):
            row, ancestor, steps = [False] * num_draft, token, 0
            row[0] = True
            while ancestor > 0 and steps < depth:
                row[ancestor] = True
                steps += 1
                ancestor = parents[ancestor]
            rows.append(row)
            depths.append(length + steps)
        next_token.append(child)
        next_sibling.append(sibling)
        place += depths
        if mode == _FULL_MASK:
            size = num_draft * (length + num_draft)
            block = mask[mask_start : mask_start + size].view(num_draft, length + num_draft)
            block[:, length:] = torch.tensor(rows, dtype=mask.dtype)
            mask_start += size
        else:
            attends.append(rows)
    if attends:
        mask[: batch * num_draft * num_draft] = torch.tensor(attends, dtype=mask.dtype).view(-1)
    positions.view(-1)[: batch * num_draft] = torch.tensor(place, dtype=positions.dtype)
    retrieve_index.view(batch, num_draft).copy_(
        torch.arange(batch * num_draft).view(batch, num_draft)
    )
    retrieve_next_token.view(batch, num_draft).copy_(torch.tensor(next_token))
    retrieve_next_sibling.view(batch, num_draft).copy_(torch.tensor(next_sibling))


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root as long as a child equals the target's own choice.

    Reads ``candidates [bs, num_draft]``, the three ``retrive_*`` links of the same shape (SGLang's
    spelling) and ``target_predict [bs, num_draft]``, the target's argmax after each draft token.
    Writes in place ``predicts [>= bs * num_draft]`` (the target's token at every accepted row; at
    the last of them it is the bonus token), ``accept_index [bs, depth]`` (accepted rows, rest left
    as it was) and ``accept_token_num [bs]`` (accepted drafts, bonus not counted).
    Called by ``kernels/ops/speculative/spec_tree.py``.
    """
    batch = candidates.shape[0]
    width = accept_index.shape[1]
    tokens = candidates.tolist()
    index = retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    target = target_predict.reshape(-1).tolist()
    rows, lengths = [], []
    for request in range(batch):
        at, accepted = 0, [index[request][0]]
        while len(accepted) < width:
            wanted = target[accepted[-1]]
            at = child[request][at]
            while at != -1 and tokens[request][at] != wanted:
                at = sibling[request][at]
            if at == -1:
                break
            accepted.append(index[request][at])
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        rows += accepted
        lengths.append(len(accepted) - 1)
    where = torch.tensor(rows)
    chosen = target_predict.reshape(-1)[where]
    predicts.view(-1)[where] = chosen.to(predicts.dtype)
    accept_token_num.copy_(torch.tensor(lengths))


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Last accepted token of each request, the root of its next tree.

    ``accept_tokens [bs * accept_stride]``, ``accept_lens [bs]`` (bonus counted) ->
    ``bonus_tokens [bs]``. Called by ``kernels/ops/speculative/eagle.py``.
    """
    lens = accept_lens.long()
    last = torch.arange(lens.numel()) * accept_stride + lens - 1
    bonus_tokens[: lens.numel()] = accept_tokens.view(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Slots of the accepted rows, in order and without gaps.

    Rows that are -1 in ``accept_index`` (any shape) are skipped; the tail of
    ``accept_out_cache_loc`` is left alone. Called by ``kernels/ops/speculative/eagle.py``.
    """
    rows = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's ids left by one and append its newest token, in place.

    ``input_ids [tokens]``; request ``i`` owns ``extend_seq_lens[i]`` of them from
    ``extend_start_loc[i]``. The new token goes to the end of the span, or to the absolute position
    ``select_index[i]``. Called by ``kernels/ops/speculative/multi_layer_eagle.py``.
    """
    new = topk_index.view(-1).tolist()
    targets = select_index.tolist() if select_index is not None else None
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for i, (start, length) in enumerate(spans):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[targets[i] if targets else start + length - 1] = new[i]
