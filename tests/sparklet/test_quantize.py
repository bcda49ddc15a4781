"""MXFP4 and FP8: layouts, ranges and rounding."""

from __future__ import annotations

import pytest
import torch
from sparklet import quantize as q


def test_every_code_survives_a_round_trip_and_the_low_nibble_is_the_even_index():
    values = torch.tensor([*q.E2M1, *(-x for x in q.E2M1)]).repeat(2).view(1, 32) * 0.25
    codes, scale = q.mxfp4_pack(values)
    assert codes.shape == (1, 16) and codes.dtype == torch.int8
    assert scale.shape == (1, 1) and scale.dtype == torch.float8_e8m0fnu
    assert scale.float().item() == 0.25
    raw = codes.view(torch.uint8)[0]
    assert raw[0].item() == 0x10  # index 0 is code 0 (low nibble), index 1 is code 1
    assert torch.equal(q.mxfp4_unpack(codes, scale), values)


def test_packing_matches_the_training_rounding():
    torch.manual_seed(0)
    w = torch.randn(3, 64, 128) * torch.logspace(-3, 1, 64).view(1, 64, 1)
    assert torch.equal(q.fake_mxfp4(w), q.mxfp4_unpack(*q.mxfp4_pack(w)))
    m = torch.randn(130, 200)
    assert torch.equal(q.fake_fp8(m), q.fp8_unpack(*q.fp8_pack(m)))


def test_rounding_again_changes_nothing():
    w = q.fake_mxfp4(torch.randn(8, 64))
    assert torch.equal(q.fake_mxfp4(w), w)
    m = q.fake_fp8(torch.randn(128, 128))
    assert torch.equal(q.fake_fp8(m), m)


def test_errors_are_as_small_as_the_formats_allow():
    torch.manual_seed(1)
    w = torch.randn(256, 256)
    relative = lambda a: ((a - w).norm() / w.norm()).item()  # noqa: E731
    assert relative(q.fake_mxfp4(w)) < 0.12
    assert relative(q.fake_fp8(w)) < 0.03
    assert relative(q.fp8_head(w)) < 0.03
    assert relative(q.fp8_activation(w)) < 0.03


def test_scales_are_powers_of_two_and_nothing_overflows():
    w = torch.randn(256, 384) * 50
    values, scale = q.fp8_pack(w)
    assert scale.shape == (2, 3)
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    assert torch.isfinite(values.float()).all() and values.float().abs().max() <= q.E4M3_MAX


def test_zeros_stay_zero():
    codes, scale = q.mxfp4_pack(torch.zeros(2, 32))
    assert q.mxfp4_unpack(codes, scale).abs().max() == 0
    assert q.fake_fp8(torch.zeros(4, 4)).abs().max() == 0


@pytest.mark.parametrize("fake", [q.fake_mxfp4, q.fake_fp8, q.fp8_activation])
def test_gradients_pass_straight_through(fake):
    w = torch.randn(128, 128, requires_grad=True)
    fake(w).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w))
