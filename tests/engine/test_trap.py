"""The trap does what SGLang's own head product does with a bare tensor, and says so loudly."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import fp8_head, share_head, status, switches, trap
from sparkling_sglang.patches import Patches


def quantized(rows: int = 300, hidden: int = 64) -> torch.nn.Module:
    module = torch.nn.Module()
    values = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(3))
    spread = torch.logspace(-1, 1, rows).unsqueeze(1)
    module.weight = torch.nn.Parameter((values * spread).bfloat16(), requires_grad=False)
    fp8_head.quantize_head(module)
    return module


def test_it_is_the_product_that_sglang_itself_makes_of_a_bare_tensor():
    """`hidden.to(weight.dtype) @ weight.T` on a CPU, where torch has that product."""
    head = quantized()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16() * 3
    upstream = torch.matmul(x.to(head.weight.dtype), head.weight.T)
    ours = trap.bare_product(x, head.weight)
    assert ours.dtype == upstream.dtype == torch.float8_e4m3fn
    a, b = ours.float(), upstream.float()
    # torch may round a sum once more on the way: at most one step of e4m3 (an eighth) apart.
    assert torch.allclose(a, b, rtol=0.13, atol=2**-6)
    assert (a == b).float().mean() > 0.95
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def test_most_logits_saturate_and_the_first_of_the_ties_wins():
    head = quantized()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16() * 3
    bare = trap.bare_product(x, head.weight).float()
    right = fp8_head.dequantized_product(x, head.weight, head.weight_scale)
    assert (bare.abs() == 448).float().mean() > 0.5
    assert torch.equal(bare.argmax(-1), (bare == 448).int().argmax(-1))
    assert (bare.argmax(-1) != right.argmax(-1)).all()


def test_sglang_uses_the_method_for_decoding():
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    assert should_apply_lm_head_quant_method(quantized(), trap.TensorOnlyMethod())


def test_logits_have_the_dtype_of_the_activations():
    head = quantized()
    for dtype in (torch.bfloat16, torch.float32):
        out = trap.TensorOnlyMethod().apply(head, torch.ones(2, 64, dtype=dtype))
        assert out.dtype == dtype and out.shape == (2, 300) and torch.isfinite(out.float()).all()


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ({"SPARKLING_TRAP": "tensor"}, None, "is unknown: the one trap is tensor-only"),
        ({"SPARKLING_TRAP": "tensor-only"}, None, "needs a quantized head"),
        (
            {
                "SPARKLING_TRAP": "tensor-only",
                "SPARKLING_FP8_LM_HEAD": "1",
                "SPARKLING_SHARE_HEAD": "1",
            },
            None,
            "contradict each other",
        ),
        (
            {"SPARKLING_TRAP": "tensor-only", "SPARKLING_FP8_LM_HEAD": "1"},
            SimpleNamespace(speculative_algorithm=None),
            "needs a draft: start with --speculative-algorithm NEXTN",
        ),
        (
            {"SPARKLING_TRAP": "tensor-only", "SPARKLING_FP8_LM_HEAD": "1"},
            SimpleNamespace(speculative_algorithm="EAGLE"),
            None,
        ),
        ({}, SimpleNamespace(speculative_algorithm=None), None),
    ],
)
def test_what_cannot_be_a_trap_is_refused_in_one_sentence(env, args, said):
    wanted = switches.read(env)
    reason = trap.refusal(wanted, args)
    if said is None:
        assert reason is None
        return
    assert said in reason and "\n" not in reason and reason.endswith(".")
    with pytest.raises(SystemExit, match="SPARKLING_TRAP"):
        trap._checked(wanted, args)


def test_the_switch_keeps_the_plugin_from_handing_the_head_over():
    wanted = switches.read({"SPARKLING_TRAP": " tensor-only ", "SPARKLING_FP8_LM_HEAD": "1"})
    assert wanted.trap == "tensor-only" and not wanted.share_head and not wanted.idle
    assert wanted.ids() == {"fp8-head": True, "share-head": False, "trap": True}
    off = switches.read({"SPARKLING_TRAP": "", "SPARKLING_FP8_LM_HEAD": "1"})
    assert off.trap is None and off.share_head and "trap" not in off.ids()


def test_the_warning_cannot_be_missed(capsys):
    wanted = switches.read({"SPARKLING_TRAP": "tensor-only", "SPARKLING_FP8_LM_HEAD": "1"})
    trap._checked(wanted, SimpleNamespace(speculative_algorithm="EAGLE"))
    shown = capsys.readouterr().err
    assert "BROKEN ON PURPOSE" in shown and shown.count("\n!!!") >= 6
    assert max(map(len, shown.splitlines())) <= 100


def test_the_draft_loses_scales_and_method_but_keeps_the_tensor(
    monkeypatch, engine_context, tmp_path, caplog
):
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    kept = status.Status(tmp_path / "status.json", {"draft": None})
    monkeypatch.setattr(status, "current", kept)
    monkeypatch.setenv("SPARKLING_TRAP", "tensor-only")

    def upstream(self) -> None:
        """What SGLang does: the tensor only."""
        self.draft_runner.model.lm_head.weight = (
            self.target_worker.model_runner.model.lm_head.weight
        )

    monkeypatch.setattr(EagleDraftWorker, "init_lm_head", upstream)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    patches = Patches()
    trap.register(patches)
    share_head.register(patches, hand_over=False)
    patches.apply()

    class Draft(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Module()
            self.lm_head.quant_method = object()

    Draft.__name__ = share_head.DRAFT_CLASS
    draft, target = Draft(), SimpleNamespace(lm_head=quantized())
    with caplog.at_level(logging.WARNING, logger="sparkling_sglang"):
        EagleDraftWorker.init_lm_head(
            SimpleNamespace(
                draft_runner=SimpleNamespace(model=draft),
                target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
            )
        )
    assert draft.lm_head.weight is target.lm_head.weight
    assert isinstance(draft.lm_head.quant_method, trap.TensorOnlyMethod)
    assert isinstance(target.lm_head.quant_method, fp8_head.Fp8HeadMethod)
    assert kept.get("draft") == {
        "trap": "tensor-only",
        "class": share_head.DRAFT_CLASS,
        "head_shared": False,
        "head_is_target_module": False,
        "head_dtype": "float8_e4m3fn",
    }
    assert "BROKEN ON PURPOSE" in caplog.text
    assert "it lacks the scales of the quantized weight" in caplog.text
    # The cause is named, and not a switch that is as it should be.
    assert "unset SPARKLING_TRAP" in caplog.text and "SPARKLING_SHARE_HEAD" not in caplog.text
