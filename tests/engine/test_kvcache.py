"""The KV bookkeeping operators against plain loops over single elements."""

from __future__ import annotations

import pytest
import sgl_kernel
import torch

ROWS, COLUMNS = 6, 30


@pytest.fixture
def table(rng) -> torch.Tensor:
    return torch.randperm(ROWS * COLUMNS, generator=rng).view(ROWS, COLUMNS).int()


def test_slots_are_written_into_the_table_and_read_back(rng, table):
    rows, start, end = [4, 0, 2], [3, 0, 28], [7, 0, 30]
    loc = torch.randint(1000, 2000, (6,), generator=rng)
    want, at = table.clone(), 0
    for row, first, last in zip(rows, start, end, strict=True):
        for column in range(first, last):
            want[row, column] = loc[at]
            at += 1
    arguments = (torch.tensor(rows), table, torch.tensor(start), torch.tensor(end))
    sgl_kernel.assign_req_to_token_pool_cpu(*arguments, loc, COLUMNS)
    assert torch.equal(table, want)
    back = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(*arguments, back, COLUMNS)
    assert torch.equal(back, loc)


@pytest.mark.parametrize("topk, steps", [(1, 3), (2, 4)])
def test_draft_slots_follow_the_sequence(table, topk, steps):
    rows, lens = [5, 1], [7, 0]
    out = torch.zeros(2 * topk * steps, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(rows, dtype=torch.int32),
        table,
        torch.tensor(lens),
        out,
        COLUMNS,
        topk,
        steps,
    )
    want = [
        int(table[r, n + j]) for r, n in zip(rows, lens, strict=True) for j in range(topk * steps)
    ]
    assert out.tolist() == want


@pytest.mark.parametrize("topk", [1, 3])
def test_every_draft_candidate_sees_the_prefix_and_its_own_slots(table, topk):
    rows, lens, steps = [5, 1], [7, 2], 4
    out = sgl_kernel.build_draft_decode_metadata_cpu(
        table, torch.tensor(rows), torch.tensor(lens), topk, steps, COLUMNS
    )
    assert out.shape == (2 * topk, COLUMNS) and out.dtype == table.dtype
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        for candidate in range(topk):
            for column in range(COLUMNS):
                if column < length:
                    want = table[row, column]
                elif column < length + steps:
                    want = table[row, column + candidate * steps]
                else:
                    want = 0
                assert out[i * topk + candidate, column] == want


def test_kv_rows_move_in_every_layer_even_where_they_overlap(rng):
    layers = [
        torch.randn(10, 2, 4, generator=rng),
        torch.randint(-9, 9, (10, 3), generator=rng, dtype=torch.int16),
        torch.randn(10, 5, generator=rng).bfloat16(),
    ]
    target, source = [2, 3, 4, 0], [3, 4, 2, 9]
    want = [x.clone() for x in layers]
    for x, moved in zip(layers, want, strict=True):
        for t, s in zip(target, source, strict=True):
            moved[t] = x[s]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([x.data_ptr() for x in layers], dtype=torch.uint64),
        torch.tensor([x[0].numel() * x.element_size() for x in layers]),
        torch.tensor(target),
        torch.tensor(source, dtype=torch.int32),
    )
    for x, moved in zip(layers, want, strict=True):
        assert torch.equal(x, moved)
    sgl_kernel.copy_all_layer_kv_cache_cpu(*(torch.tensor([]) for _ in range(4)))
