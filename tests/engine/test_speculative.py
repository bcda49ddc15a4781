"""Draft trees and their verification against trees kept as plain Python objects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import sgl_kernel
import torch


@dataclass
class Node:
    """A drafted candidate: its number among all candidates, its parent, its place if selected."""

    candidate: int
    parent: Node | None
    depth: int
    place: int = -1
    children: list[Node] = field(default_factory=list)


def grow(random_: random.Random, topk: int, steps: int, num_draft: int):
    """Draft as EAGLE does and select ``num_draft - 1`` candidates with all their ancestors.

    Returns the root, ``parent_list`` and ``selected_index`` of one request as SGLang would make
    them. Step 0 has ``topk`` candidates; each later step has ``topk`` for each of ``topk`` beams,
    which are candidates of the step before. The last step's beams are not listed.
    """
    root = Node(-1, None, 0)
    level = [Node(i, root, 1) for i in range(topk)]
    drafted, parent_list = list(level), [-1, *range(topk)]
    beams = level
    for step in range(1, steps):
        first = topk + (step - 1) * topk * topk
        level = [
            Node(first + b * topk + c, beams[b], step + 1) for b in range(topk) for c in range(topk)
        ]
        drafted += level
        beams = random_.sample(level, topk)
        parent_list += [b.candidate for b in beams]
    if steps > 1:
        parent_list = parent_list[:-topk]
    selected: list[Node] = []
    while len(selected) < num_draft - 1:
        selected.append(
            random_.choice(
                [n for n in drafted if n not in selected and n.parent in [root, *selected]]
            )
        )
    root.place = 0
    for place, node in enumerate(sorted(selected, key=lambda n: n.candidate), start=1):
        node.place = place
    for node in sorted(selected, key=lambda n: n.place):
        node.parent.children.append(node)
    by_place = [root, *sorted(selected, key=lambda n: n.place)]
    return by_place, parent_list, [n.candidate for n in by_place[1:]]


SHAPES = [(1, 1, 2), (1, 3, 4), (2, 3, 6), (4, 3, 10), (3, 2, 8)]


def build(trees, lens, topk, steps, num_draft, mode):
    batch = len(trees)
    sizes = num_draft * (num_draft + (torch.tensor(lens) if mode == 0 else 0 * torch.tensor(lens)))
    out = dict(
        tree_mask=torch.ones(int(sizes.sum()), dtype=torch.bool),
        positions=torch.zeros(batch * num_draft, dtype=torch.int64),
        retrieve_index=torch.full((batch, num_draft), -1),
        retrieve_next_token=torch.full((batch, num_draft), -1),
        retrieve_next_sibling=torch.full((batch, num_draft), -1),
    )
    lists = [t[1] for t in trees] if steps > 1 else [[] for _ in trees]
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor(lists, dtype=torch.int64),
        torch.tensor([t[2] for t in trees]),
        torch.tensor(lens),
        *out.values(),
        topk,
        steps,
        num_draft,
        mode,
    )
    return out


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("topk, steps, num_draft", SHAPES)
def test_trees_are_laid_out(topk, steps, num_draft, mode):
    random_ = random.Random(topk * 100 + steps * 10 + mode)
    for _ in range(5):
        trees = [grow(random_, topk, steps, num_draft) for _ in range(3)]
        lens = [random_.randrange(1, 9) for _ in trees]
        out = build(trees, lens, topk, steps, num_draft, mode)
        start = 0
        for b, (nodes, _, _) in enumerate(trees):
            width = num_draft + (lens[b] if mode == 0 else 0)
            size = num_draft * width
            mask = out["tree_mask"][start : start + size].view(num_draft, width)
            start += size
            if mode == 0:
                assert mask[:, : lens[b]].all()
                mask = mask[:, lens[b] :]
            for node in nodes:
                line, at = set(), node
                while at is not None:
                    line.add(at.place)
                    at = at.parent
                assert set(mask[node.place].nonzero().flatten().tolist()) == line
                assert out["positions"][b * num_draft + node.place] == lens[b] + node.depth
                assert out["retrieve_index"][b, node.place] == b * num_draft + node.place
                places = [child.place for child in node.children] + [-1]
                assert out["retrieve_next_token"][b, node.place] == places[0]
                for child, after in zip(node.children, places[1:], strict=True):
                    assert out["retrieve_next_sibling"][b, child.place] == after
            assert out["retrieve_next_sibling"][b, 0] == -1


def test_bit_packed_masks_are_refused():
    with pytest.raises(NotImplementedError, match="bit-packed"):
        build([grow(random.Random(0), 1, 3, 4)], [3], 1, 3, 4, 2)


def longest_match(node: Node, tokens: list[int], target: list[int]) -> list[int]:
    """Places of the longest path from ``node`` whose every step is the target's choice."""
    paths = [
        longest_match(child, tokens, target)
        for child in node.children
        if tokens[child.place] == target[node.place]
    ]
    return [node.place, *max(paths, key=len, default=[])]


@pytest.mark.parametrize("topk, steps, num_draft", SHAPES)
def test_greedy_verification_takes_the_longest_match(topk, steps, num_draft):
    random_ = random.Random(topk * 100 + steps)
    seen = set()
    for _ in range(30):
        trees = [grow(random_, topk, steps, num_draft) for _ in range(3)]
        out = build(trees, [4, 2, 7], topk, steps, num_draft, 1)
        candidates = torch.zeros(3, num_draft, dtype=torch.int64)
        target = torch.zeros(3, num_draft, dtype=torch.int64)
        for b, (nodes, _, _) in enumerate(trees):
            for node in nodes:
                # Siblings are different tokens; the target picks among them or something else.
                for token, child in enumerate(node.children):
                    candidates[b, child.place] = 10 + token
                target[b, node.place] = 10 + random_.randrange(len(node.children) + 1)
        predicts = torch.full((3 * num_draft,), -7, dtype=torch.int32)
        accept_index = torch.full((3, steps + 1), -1, dtype=torch.int32)
        accept_num = torch.zeros(3, dtype=torch.int32)
        sgl_kernel.verify_tree_greedy_cpu(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=accept_num,
            candidates=candidates,
            retrive_index=out["retrieve_index"],
            retrive_next_token=out["retrieve_next_token"],
            retrive_next_sibling=out["retrieve_next_sibling"],
            target_predict=target,
        )
        want_predicts = torch.full_like(predicts, -7)
        for b, (nodes, _, _) in enumerate(trees):
            path = longest_match(nodes[0], candidates[b].tolist(), target[b].tolist())
            rows = [b * num_draft + place for place in path]
            assert accept_index[b].tolist() == rows + [-1] * (steps + 1 - len(rows))
            assert accept_num[b] == len(rows) - 1
            for place, row in zip(path, rows, strict=True):
                want_predicts[row] = target[b, place]
            seen.add(len(path))
        assert torch.equal(predicts, want_predicts)
    assert len(seen) > 1


def test_bonus_tokens():
    tokens = torch.arange(100, 112)
    bonus = torch.zeros(3, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [100, 107, 109]


def test_accepted_slots_are_packed():
    index = torch.tensor([[0, 2, -1], [3, -1, -1]])
    out = torch.full((4,), -5)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.tensor([50, 51, 52, 53]), out)
    assert out.tolist() == [50, 52, 53, -5]


@pytest.mark.parametrize("select", [None, [0, 3, 4]])
def test_ids_rotate_by_one(select):
    ids = torch.tensor([1, 2, 3, 40, 50, 60, 70])
    want = ids.tolist()
    spans, new = [(0, 2), (2, 0), (3, 4)], [91, 92, 93]
    for i, (start, length) in enumerate(spans):
        if length:
            for j in range(start, start + length - 1):
                want[j] = want[j + 1]
            want[select[i] if select else start + length - 1] = new[i]
    sgl_kernel.rotate_input_ids_cpu(
        ids,
        torch.tensor([s for s, _ in spans]),
        torch.tensor([n for _, n in spans]),
        torch.tensor(new).unsqueeze(1),
        None if select is None else torch.tensor(select),
    )
    assert ids.tolist() == want
