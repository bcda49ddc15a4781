"""What the FP8 head refuses: arguments, checkpoints, and other weights while the server runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import fp8_head, head_refusals

ROWS, HIDDEN = 32, 16
GOOD = {
    "enable_fp32_lm_head": False,
    "tp_size": 1,
    "pp_size": 1,
    "enable_lora": None,
    "lora_paths": None,
    "enable_multi_layer_eagle": False,
    "speculative_algorithm": "EAGLE",
    "speculative_token_map": None,
    "startup_weight_load_mode": "serial",
    "weight_cache_mode": "off",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": False,
    "rl_on_policy_target": None,
}
BAD = [
    ({"enable_fp32_lm_head": True}, "--enable-fp32-lm-head contradict each other"),
    ({"tp_size": 2}, "--tp-size is 2"),
    ({"pp_size": 2}, "--pp-size is 2"),
    ({"enable_lora": True}, "cannot carry LoRA adapters"),
    ({"lora_paths": ["a"]}, "cannot carry LoRA adapters"),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ({"speculative_algorithm": "FROZEN_KV_MTP"}, "--speculative-algorithm FROZEN_KV_MTP"),
    ({"speculative_token_map": "map.pt"}, "--speculative-token-map"),
    ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode overlap"),
    ({"weight_cache_mode": "daemon"}, "--weight-cache-mode daemon"),
    (
        {"remote_instance_weight_loader_start_seed_via_transfer_engine": True},
        "start-seed-via-transfer-engine",
    ),
    ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target fsdp"),
]


def test_every_rule_is_tried_here_and_plain_arguments_pass():
    assert {name for name, *_ in head_refusals.ARGUMENTS} == set(GOOD)
    assert {name for changes, _ in BAD for name in changes} == set(GOOD)
    assert head_refusals.refusal(SimpleNamespace(**GOOD)) is None


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_arguments_stop_the_main_process_and_the_scheduler(changes, said):
    args = SimpleNamespace(**{**GOOD, **changes})
    with pytest.raises(SystemExit) as stopped:
        fp8_head._checked(None, args)
    message = str(stopped.value)
    assert message.startswith("sparkling_sglang: error: The FP8 LM head (SPARKLING_FP8_LM_HEAD) ")
    assert said in message and "\n" not in message
    # One sentence, with the remedy after its last colon (sparkling.crash reads it so).
    assert message.endswith(": drop one of them.") and message.count(". ") == 0
    runner = SimpleNamespace(model=Model(), is_draft_worker=False, server_args=args)
    with pytest.raises(fp8_head.HeadError, match="SPARKLING_FP8_LM_HEAD"):
        fp8_head._loaded(None, runner)
    assert runner.model.lm_head.weight.dtype == torch.bfloat16


class UnquantizedEmbeddingMethod:
    """Stands for SGLang's class of this name: what a plain head has."""


class Model(torch.nn.Module):
    def __init__(self, method: object | None = None, tied: bool = False, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.word_embeddings, self.lm_head = torch.nn.Module(), torch.nn.Module()
        for one in (self.word_embeddings, self.lm_head):
            values = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
            one.weight = torch.nn.Parameter(values.bfloat16(), requires_grad=False)
        self.lm_head.quant_method = method or UnquantizedEmbeddingMethod()
        if tied:
            self.lm_head.weight = self.word_embeddings.weight


def without_weight() -> Model:
    model = Model()
    del model.lm_head.weight
    model.lm_head.qweight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), False)
    return model


def with_adapter() -> Model:
    model = Model()
    model.lm_head.set_lora = model.lm_head.apply_lora = lambda *_: None
    return model


def named(name: str) -> object:
    return type(name, (), {})()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (torch.nn.Linear(2, 2), "Linear has no lm_head"),
        (Model(tied=True), "ties lm_head to the word embeddings"),
        (Model(tie_word_embeddings=True), "ties lm_head to the word embeddings"),
        (Model(enable_lm_head_fp32=True), "float32 lm_head (enable_lm_head_fp32)"),
        (Model(enable_lm_head_output_fp32=True), "float32 lm_head (enable_lm_head_output_fp32)"),
        (without_weight(), "holds lm_head already (UnquantizedEmbeddingMethod)"),
        (Model(named("ModelOptFp8LinearMethod")), "holds lm_head already (ModelOptFp8Line"),
        (Model(named("GGUFEmbeddingMethod")), "holds lm_head already (GGUFEmbeddingMethod)"),
        # On a CPU with AMX: the weight has been brought into another order.
        (Model(named("PackWeightMethod")), "holds lm_head already (PackWeightMethod)"),
        (with_adapter(), "cannot carry LoRA adapters"),
    ],
)
def test_models_whose_head_cannot_be_quantized_are_refused(model, said):
    reason = head_refusals.refusal_of_model(model)
    assert said in reason and "\n" not in reason and reason.endswith(".")
    assert reason.count(": ") == 1
    runner = SimpleNamespace(model=model, is_draft_worker=False, server_args=SimpleNamespace())
    with pytest.raises(fp8_head.HeadError):
        fp8_head._loaded(None, runner)


def test_a_plain_head_passes():
    assert head_refusals.refusal_of_model(Model()) is None


def test_sglangs_plain_methods_are_those_that_pass_here(engine_context):
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    theirs = logits_processor._UNQUANTIZED_LM_HEAD_METHODS
    assert theirs - set(head_refusals.PLAIN_METHODS) == {"PackWeightMethod"}
    model = Model()
    model.lm_head = ParallelLMHead(64, HIDDEN, params_dtype=torch.bfloat16)
    assert head_refusals.refusal_of_model(model) is None


# ------------------------------------------------------------------ weights that change later


@pytest.fixture
def served():
    """A quantized model, as the server has it."""
    model = Model()
    fp8_head._loaded(
        None,
        SimpleNamespace(model=model, is_draft_worker=False, server_args=SimpleNamespace(**GOOD)),
    )
    return model


def test_without_the_refusal_an_update_would_leave_noise_behind(served):
    """Why it is there: torch casts BF16 into an e4m3 parameter without a word."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    head = served.lm_head
    right = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    default_weight_loader(head.weight, right)
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(3))
    got, wanted = head.quant_method.apply(head, x), x @ right.float().T
    assert (got - wanted).abs().max() > 0.9 * wanted.abs().max()


def updater(model):
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=SimpleNamespace(model_path="before"),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *a, **k: pytest.fail("updated"),
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


@pytest.mark.parametrize("way", ["disk", "distributed", "tensor", "ipc"])
def test_sglang_refuses_every_update_of_the_weights_and_says_why(engine_context, served, way):
    codes = served.lm_head.weight.detach().view(torch.uint8).clone()
    served.load_weights = lambda _: pytest.fail("loaded")
    change = [("lm_head.weight", torch.zeros(ROWS, HIDDEN))]
    made = updater(served)
    call = {
        "disk": lambda: made.update_weights_from_disk("/new", "auto"),
        "distributed": lambda: made.load_weights_from_distributed(change),
        "tensor": lambda: made.update_weights_from_tensor(change),
        "ipc": lambda: made.update_weights_from_ipc(SimpleNamespace(zmq_handles={})),
    }[way]
    done, message = call()
    assert not done and message == head_refusals.UPDATE_REFUSED
    assert "start the server on the new checkpoint" in message
    assert torch.equal(served.lm_head.weight.view(torch.uint8), codes)
    assert made.model_config.model_path == "before"


def test_a_session_of_updates_that_loads_nothing_leaves_the_head_alone(engine_context, served):
    """/begin_weight_update and /end_weight_update process every module that has a method."""
    codes = served.lm_head.weight.detach().view(torch.uint8).clone()
    made = updater(served)
    made.begin_weight_update()
    made.end_weight_update(run_post_load=True)
    assert torch.equal(served.lm_head.weight.view(torch.uint8), codes)


def test_releasing_and_resuming_memory_keeps_the_head(served):
    """What SGLang saves and puts back are buffers: none of the head's is lost or overwritten."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        _export_static_state,
        _import_static_state,
    )

    codes, scale = (
        p.detach().clone() for p in (served.lm_head.weight, served.lm_head.weight_scale)
    )
    _import_static_state(served, _export_static_state(served))
    assert torch.equal(served.lm_head.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(served.lm_head.weight_scale, scale)
