"""The recording's random weights: every storage is filled, differently for each tensor, without NaN."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

PLUGIN = Path(__file__).resolve().parents[2] / "scripts" / "full_size_plugin.py"


@pytest.fixture(scope="module")
def plugin():
    spec = importlib.util.spec_from_file_location("full_size_plugin", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model() -> torch.nn.Module:
    """One tensor of every storage that Ling's full-size model has, holding what must not stay."""

    def held(shape, dtype):
        if dtype in (torch.int8, torch.int64):
            return Parameter(torch.full(shape, 3, dtype=dtype), requires_grad=False)
        return Parameter(torch.full(shape, float("nan")).to(dtype), requires_grad=False)

    made = torch.nn.Module()
    made.experts, made.gate, made.attn = (torch.nn.Module() for _ in range(3))
    made.experts.w13_weight = held((4, 8, 256), torch.int8)
    made.experts.w13_weight_scale_inv = held((4, 8, 16), torch.float32)
    made.experts.w2_weight_scale_inv = held((4, 8, 16), torch.float8_e8m0fnu)
    made.gate.weight = held((16, 512), torch.float32)
    made.gate.expert_bias = held((16,), torch.float32)
    made.attn.weight = held((64, 512), torch.float8_e4m3fn)
    made.attn.other = held((64, 512), torch.float8_e4m3fn)
    made.attn.weight_scale_inv = held((1, 4), torch.float32)
    made.attn.norm = torch.nn.RMSNorm(8, dtype=torch.bfloat16)
    made.attn.steps = held((2,), torch.int64)
    made.attn.register_buffer("cos_sin_cache", torch.full((2, 2), 7.0))
    return made


def test_every_tensor_is_filled(plugin):
    one = model()
    with torch.no_grad():
        plugin.fill(one)
    got = {name: tensor.float() for name, tensor in one.state_dict().items()}
    assert all(torch.isfinite(tensor).all() for tensor in got.values())
    assert one.experts.w13_weight.unique().numel() == 256
    assert (got["experts.w13_weight_scale_inv"] == 2**-7).all()
    assert (got["experts.w2_weight_scale_inv"] == 2**-7).all()
    assert got["gate.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert got["attn.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(got["attn.weight"], got["attn.other"])
    assert (got["gate.expert_bias"] == 0).all() and (got["attn.norm.weight"] == 1).all()
    assert (got["attn.weight_scale_inv"] == 1).all()
    assert (got["attn.steps"] == 3).all() and (got["attn.cos_sin_cache"] == 7).all()


def test_the_same_model_gets_the_same_weights(plugin):
    one, two = model(), model()
    with torch.no_grad():
        plugin.fill(one)
        plugin.fill(two)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), two.state_dict()[name].view(torch.uint8)), name


def test_the_gate_holds_until_its_file_appears(plugin, tmp_path):
    import threading

    waiting = threading.Thread(target=plugin._gate, args=(tmp_path / "gate",), daemon=True)
    waiting.start()
    limit = time.monotonic() + 60
    while not (tmp_path / "gate.at").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    waiting.join(0.3)
    assert waiting.is_alive() and (tmp_path / "gate.at").exists()
    (tmp_path / "gate").touch()
    waiting.join(60)
    assert not waiting.is_alive()


def test_marlins_sources_keep_their_mxfp4_kernels_alone(plugin, tmp_path):
    """Of the installed SGLang: a changed source must be refused and not compiled half."""
    import sglang

    source = Path(sglang.__file__).parent / "kernels" / "jit" / "csrc"
    made = plugin.marlin_folder(source, tmp_path / "marlin")
    whole = (source / made.relative_to(tmp_path / "marlin")).read_text()
    kept = [line for line in made.read_text().splitlines() if "_GET_IF(host::" in line]
    assert kept == ["    MXFP4_GET_IF(host::kFE2M1f)"]
    assert len(whole.splitlines()) == len(made.read_text().splitlines())
    assert (made.parent.parent / "marlin" / "marlin.cuh").exists()
    assert plugin.marlin_folder(tmp_path / "nowhere", tmp_path / "marlin") == made
    broken = tmp_path / "source"
    (broken / "gemm" / "marlin_moe").mkdir(parents=True)
    (broken / "gemm" / "marlin_moe" / made.name).write_text(
        whole.replace("  ACT_GET_IF(host::kU8B128)\n", "")
    )
    with pytest.raises(ValueError, match="not 7"):
        plugin.marlin_folder(broken, tmp_path / "again")
