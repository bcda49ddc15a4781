"""The draft's head is the target's: handed over, checked, and the server stopped otherwise."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import fp8_head, share_head, status
from sparkling_sglang.patches import Patches


def head(seed: int = 1) -> torch.nn.Module:
    module = torch.nn.Module()
    values = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed))
    module.weight = torch.nn.Parameter(values, requires_grad=False)
    module.quant_method = SimpleNamespace()
    return module


def draft_class(name: str = share_head.DRAFT_CLASS) -> type:
    """A class of that name, new each time because the handover adds a method to it."""

    class Draft(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = head(2)

    Draft.__name__ = name
    return Draft


def worker(draft: torch.nn.Module, target_head: torch.nn.Module) -> SimpleNamespace:
    target = SimpleNamespace(lm_head=target_head)
    return SimpleNamespace(
        draft_runner=SimpleNamespace(model=draft),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
    )


@pytest.fixture
def init_lm_head(monkeypatch, engine_context):
    """init_lm_head(hand_over) → SGLang's method, hooked by the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    def make(hand_over: bool):
        # Not a module's function: the registry would replace that name here as well.
        def upstream(self) -> None:
            """What SGLang does with a draft that is not EAGLE3's."""
            draft, target = self.draft_runner.model, self.target_worker.model_runner.model.lm_head
            del draft.lm_head.weight
            draft.lm_head.weight = target.weight
            if hasattr(draft, "set_lm_head_from_target"):
                draft.set_lm_head_from_target(target)

        monkeypatch.setattr(EagleDraftWorker, "init_lm_head", upstream)
        monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
        monkeypatch.setattr(HookRegistry, "_patched", set())
        patches = Patches()
        share_head.register(patches, hand_over=hand_over)
        patches.apply()
        return EagleDraftWorker.init_lm_head

    return make


@pytest.fixture
def kept(monkeypatch, tmp_path):
    made = status.Status(tmp_path / "status.json", {"draft": None})
    monkeypatch.setattr(status, "current", made)
    return made


def quantized() -> torch.nn.Module:
    made = head()
    fp8_head.quantize_head(made)
    return made


def test_the_draft_gets_the_whole_module(init_lm_head, kept, caplog):
    one, target = draft_class()(), quantized()
    with caplog.at_level(logging.INFO, logger="sparkling_sglang"):
        init_lm_head(True)(worker(one, target))
    assert one.lm_head is target
    assert kept.get("draft") == {
        "class": "BailingMoeForCausalLMNextN",
        "head_shared": True,
        "head_is_target_module": True,
        "head_dtype": "float8_e4m3fn",
    }
    assert caplog.messages == ["The NEXTN draft uses the target's lm_head (float8_e4m3fn)."]


def test_without_the_handover_a_quantized_head_is_reported_as_not_shared(
    init_lm_head, kept, caplog
):
    one = draft_class()()
    init_lm_head(False)(worker(one, quantized()))
    assert kept.get("draft")["head_shared"] is False
    assert "it lacks the scales of the quantized weight" in caplog.text


def test_a_failed_handover_stops_the_server_with_cause_and_remedy(init_lm_head, kept):
    kind = draft_class()
    kind.set_lm_head_from_target = lambda self, head: None  # as if SGLang no longer called ours
    with pytest.raises(share_head.DraftHeadError) as stopped:
        init_lm_head(True)(worker(kind(), quantized()))
    message = str(stopped.value)
    assert "it lacks the scales of the quantized weight" in message
    assert "start without NEXTN" in message and "\n" not in message
    assert kept.get("draft")["head_shared"] is False


def test_a_bf16_weight_shared_as_a_tensor_is_the_same_head(init_lm_head, kept):
    one, target = draft_class()(), head()
    init_lm_head(False)(worker(one, target))
    assert one.lm_head is not target
    assert kept.get("draft")["head_shared"] is True
    assert kept.get("draft")["head_is_target_module"] is False


def test_other_draft_models_are_left_alone(init_lm_head, kept):
    kind = draft_class("LlamaForCausalLMEagle")
    init_lm_head(True)(worker(kind(), head()))
    assert not hasattr(kind, "set_lm_head_from_target")
    assert kept.get("draft") is None
    # One that takes modules over by itself is right with a quantized head, too.
    kind.set_lm_head_from_target = share_head.set_lm_head_from_target
    one, target = kind(), quantized()
    init_lm_head(True)(worker(one, target))
    assert one.lm_head is target


def test_another_models_draft_with_the_bare_fp8_tensor_stops_the_server(init_lm_head, caplog):
    kind = draft_class("LlamaForCausalLMEagle")
    with pytest.raises(share_head.DraftHeadError) as stopped:
        init_lm_head(True)(worker(kind(), quantized()))
    message = str(stopped.value)
    assert "LlamaForCausalLMEagle took the target's FP8 lm_head as a bare tensor" in message
    assert "it lacks the scales" in message and "\n" not in message
    init_lm_head(False)(worker(kind(), quantized()))
    assert "as a bare tensor" in caplog.text


def test_each_kind_of_difference_is_named():
    target = quantized()
    assert share_head.difference(target, target) is None
    other = head(5)
    assert share_head.difference(target, other) == "it has another weight tensor"
    other.weight = target.weight
    assert share_head.difference(target, other) == "it lacks the scales of the quantized weight"
    other.weight_scale = target.weight_scale
    other.quant_method = SimpleNamespace()
    assert "multiplies with SimpleNamespace" in share_head.difference(target, other)
    other.quant_method = target.quant_method
    assert share_head.difference(target, other) is None


def test_the_real_draft_class_has_the_name_and_lacks_the_method(engine_context):
    # If SGLang gives it the method one day, the handover of this plugin can go.
    from sglang.srt.models import bailing_moe_nextn

    real = getattr(bailing_moe_nextn, share_head.DRAFT_CLASS)
    assert "set_lm_head_from_target" not in vars(real)
