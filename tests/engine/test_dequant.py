"""FP8 and MXFP4 tensors become the right BF16 ones, in any order, and nothing else is touched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang.cpu import dequant

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIXED = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "routed_experts_quant_method": "mxfp4",
}


def e8m0(exponents: list[list[int]]) -> torch.Tensor:
    return torch.tensor(exponents, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_mxfp4_takes_the_low_nibble_first_and_the_scale_per_32():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0] = 0x21  # index 0 is code 1 (0.5), index 1 is code 2 (1.0)
    codes[0, 1] = 0xF7  # index 2 is code 7 (6.0), index 3 is code 15 (-6.0)
    codes[0, 16] = 0x09  # index 32: code 9 (-0.5), second scale
    got = dequant.mxfp4(codes.view(torch.int8), e8m0([[127, 130]]))
    assert got.dtype == torch.bfloat16 and got.shape == (1, 64)
    assert got[0, :5].tolist() == [0.5, 1.0, 6.0, -6.0, 0.0]
    assert got[0, 32].item() == -0.5 * 8


def test_every_mxfp4_code_and_scale_is_exact_in_bf16():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | (codes[1::2] << 4)).view(torch.int8).unsqueeze(0)
    want = torch.tensor(E2M1 + [-x for x in E2M1]).repeat(2)
    for exponent in (107, 120, 127, 135):
        got = dequant.mxfp4(packed, e8m0([[exponent]]))[0]
        assert torch.equal(got.float(), want * 2.0 ** (exponent - 127))


def test_fp8_blocks_get_their_own_scale_and_may_end_early(rng):
    values = torch.randn(200, 300, generator=rng).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-6, 3, (2, 3), generator=rng).float())
    got = dequant.fp8_block(values, scale)
    for i in range(200):
        for j in (0, 127, 128, 255, 256, 299):
            want = values[i, j].float() * scale[i // 128, j // 128]
            assert got[i, j].float() == want  # power-of-two scales: exact


def pair(name: str, *, experts: bool = False) -> list[tuple[str, torch.Tensor]]:
    if experts:
        weight = torch.full((4, 16), 0x22, dtype=torch.int8)
        return [(name, weight), (name + "_scale_inv", e8m0([[128]] * 4))]
    weight = torch.ones(4, 8).to(torch.float8_e4m3fn)
    return [(name, weight), (name + "_scale_inv", torch.full((1, 1), 2.0))]


@pytest.mark.parametrize("order", [1, -1])
def test_pairs_meet_in_any_order_and_the_rest_passes_through(order):
    plain = ("model.norm.weight", torch.ones(3, dtype=torch.bfloat16))
    bias = ("model.layers.1.mlp.gate.expert_bias", torch.ones(2))
    a, b = pair("a.weight"), pair("b.weight", experts=True)
    stream = [a[0], b[0], plain, bias, a[1], b[1]][::order]
    got = dict(dequant.dequantized(stream))
    assert set(got) == {"a.weight", "b.weight", plain[0], bias[0]}
    assert got[plain[0]] is plain[1] and got[bias[0]] is bias[1]
    assert torch.equal(got["a.weight"], torch.full((4, 8), 2.0, dtype=torch.bfloat16))
    assert torch.equal(got["b.weight"], torch.full((4, 32), 2.0, dtype=torch.bfloat16))


def test_a_missing_half_is_an_error():
    weight, scale = pair("a.weight")
    for half in (weight, scale):
        with pytest.raises(ValueError, match=r"a\.weight"):
            list(dequant.dequantized([half]))


@pytest.mark.parametrize("experts", [True, False])
def test_a_scale_that_does_not_fit_is_named(experts):
    (name, weight), (other, scale) = pair("x.weight", experts=experts)
    with pytest.raises(ValueError, match=r"x\.weight: scale"):
        list(dequant.dequantized([(name, weight), (other, torch.cat([scale.float()] * 2, 1))]))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (MIXED, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "awq"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_only_block_fp8_is_undone(config, wanted):
    assert dequant.applies(config) is wanted
    calls = []
    model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=config))
    method = dequant.build_without(lambda *a: calls.append(a) or "method", model, "load")
    assert (method is None, bool(calls)) == (wanted, not wanted)
    seen = []
    dequant.load(
        lambda _, weights, is_nextn: seen.extend(weights),
        SimpleNamespace(config=SimpleNamespace(quantization_config=config)),
        iter(pair("a.weight")),
        is_nextn=True,
    )
    assert [name for name, _ in seen] == (
        ["a.weight"] if wanted else ["a.weight", "a.weight_scale_inv"]
    )
