"""The FP8 head: the numbers, what it refuses, and SGLang's logits processor using it."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import fp8_head, status

ROWS, HIDDEN = 300, 64


def weight(seed: int = 1, rows: int = ROWS, dtype=torch.bfloat16) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, HIDDEN, generator=noise)
    # Rows of very different size: one scale for the whole tensor would lose the small ones.
    return (values * torch.logspace(-4, 2, rows).unsqueeze(1)).to(dtype)


def head(values: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(values.clone(), requires_grad=False)
    module.quant_method = None
    return module


def restored(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.double() * scale.double().unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_entry_is_within_half_an_e4m3_step(dtype):
    w = weight(dtype=dtype)
    q, scale = fp8_head.quantize_rows(w)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (ROWS,)
    # Each row uses the whole range, whatever its size.
    assert bool((q.float().abs().amax(1) == 448).all())
    error = (restored(q, scale) - w.double()).abs()
    bound = w.double().abs() * 2**-4 + scale.double().unsqueeze(1) * 2**-10
    assert bool((error <= bound * (1 + 1e-6)).all())
    # It is lossy: an untouched copy would pass the bound as well.
    assert error.max() > 0.01 * w.abs().max()


def test_quantizing_in_chunks_changes_nothing(monkeypatch):
    whole = fp8_head.quantize_rows(weight())
    monkeypatch.setattr(fp8_head, "CHUNK_ROWS", 7)
    parts = fp8_head.quantize_rows(weight())
    assert torch.equal(whole[0].view(torch.uint8), parts[0].view(torch.uint8))
    assert torch.equal(whole[1], parts[1])


def test_rows_of_zeros_stay_zero():
    w = weight()
    w[[0, 5]] = 0
    q, scale = fp8_head.quantize_rows(w)
    assert not restored(q, scale)[[0, 5]].any() and bool(torch.isfinite(scale).all())


def test_rows_too_small_for_a_scale_do_not_become_nan():
    w = weight(dtype=torch.float32)
    w[3] = 1e-44
    w[3, 7] = 0
    q, scale = fp8_head.quantize_rows(w)
    assert not restored(q, scale)[3].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(bad):
    w = weight()
    w[9, 3] = bad
    with pytest.raises(fp8_head.HeadError, match="infinite or NaN"):
        fp8_head.quantize_rows(w)


@pytest.mark.parametrize("chunk", [7, 8192])
@pytest.mark.parametrize("tokens", [1, 4, 90])
def test_the_product_is_that_of_the_dequantized_weight(monkeypatch, tokens, chunk):
    monkeypatch.setattr(fp8_head, "CHUNK_ROWS", chunk)
    made = head(weight())
    fp8_head.quantize_head(made)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    wanted = x.double() @ restored(made.weight, made.weight_scale).T
    got = made.quant_method.apply(made, x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)
    # In BF16 the hidden states are exact inputs and only the logits are rounded.
    got = made.quant_method.apply(made, x.bfloat16())
    wanted = x.bfloat16().double() @ restored(made.weight, made.weight_scale).T
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=2**-8)


def test_a_bias_is_added():
    made = head(weight())
    fp8_head.quantize_head(made)
    x, bias = torch.randn(3, HIDDEN), torch.arange(ROWS).float()
    plain = made.quant_method.apply(made, x)
    torch.testing.assert_close(made.quant_method.apply(made, x, bias), plain + bias)


def test_the_bf16_copy_is_freed_and_bytes_are_counted():
    made = head(weight())
    old = weakref.ref(made.weight)
    before, after = fp8_head.quantize_head(made)
    gc.collect()
    assert old() is None
    assert (before, after) == (ROWS * HIDDEN * 2, ROWS * HIDDEN + ROWS * 4)
    assert {n for n, _ in made.named_parameters()} == {"weight", "weight_scale"}


def test_products_are_counted_only_when_asked():
    made = head(weight())
    fp8_head.quantize_head(made, count=True)
    for _ in range(3):
        made.quant_method.apply(made, torch.randn(2, HIDDEN))
    assert int(made.quant_method.applied) == 3
    made = head(weight())
    fp8_head.quantize_head(made)
    assert made.quant_method.applied is None


def test_a_head_that_is_quantized_already_is_refused():
    made = head(weight())
    fp8_head.quantize_head(made)
    with pytest.raises(fp8_head.HeadError, match="already stored as float8_e4m3fn"):
        fp8_head.quantize_head(made)


# ----------------------------------------------------------------------------------- refusals


def arguments(**changes):
    plain = {"enable_fp32_lm_head": False, "tp_size": 1, "enable_lora": None, "lora_paths": None}
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_fp32_lm_head": True}, "--enable-fp32-lm-head contradict"),
        ({"tp_size": 2}, "--tp-size is 2"),
        ({"enable_lora": True}, "cannot carry LoRA adapters"),
        ({"lora_paths": ["a"]}, "cannot carry LoRA adapters"),
    ],
)
def test_contradicting_arguments_stop_the_main_process(changes, said):
    with pytest.raises(SystemExit) as stopped:
        fp8_head._checked(None, arguments(**changes))
    message = str(stopped.value)
    assert (
        message.startswith("sparkling_sglang: error: ") and said in message and "\n" not in message
    )
    assert message.count(". ") == 0 and message.endswith(".")


def test_plain_arguments_pass():
    assert fp8_head._checked(None, arguments()) is None


class Model(torch.nn.Module):
    def __init__(self, tied: bool = False, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.word_embeddings = head(weight(3))
        self.lm_head = head(weight())
        if tied:
            self.lm_head.weight = self.word_embeddings.weight


def runner(model, *, draft: bool = False, **changes):
    return SimpleNamespace(
        model=model, is_draft_worker=draft, server_args=arguments(**changes), device="cpu"
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Model(tied=True), "ties lm_head to the word embeddings"),
        (Model(tie_word_embeddings=True), "ties lm_head to the word embeddings"),
        (Model(enable_lm_head_fp32=True), "float32 lm_head"),
        (torch.nn.Linear(2, 2), "Linear has no lm_head"),
    ],
)
def test_models_whose_head_cannot_be_quantized_are_refused(model, said):
    with pytest.raises(fp8_head.HeadError, match=said):
        fp8_head._loaded(None, runner(model))


def test_loading_quantizes_the_targets_head_and_says_so(monkeypatch, tmp_path, caplog):
    kept = status.Status(tmp_path / "status.json", {"head": None})
    monkeypatch.setattr(status, "current", kept)
    target, draft = Model(), Model()
    with caplog.at_level(logging.INFO, logger="sparkling_sglang"):
        fp8_head._loaded(None, runner(draft, draft=True))
        assert not caplog.messages and draft.lm_head.weight.dtype == torch.bfloat16
        fp8_head._loaded(None, runner(target))
    before, after = ROWS * HIDDEN * 2, ROWS * HIDDEN + ROWS * 4
    (line,) = caplog.messages
    assert line == (
        "Online FP8 quantization enabled for lm_head. bfloat16 -> float8_e4m3fn with "
        f"{ROWS} row scales, {before} -> {after} bytes, kernel torch-dequantize."
    )
    assert target.word_embeddings.weight.dtype == torch.bfloat16
    assert kept.get("head") == {
        "dtype": "float8_e4m3fn",
        "bytes_before": before,
        "bytes_after": after,
        "kernel": "torch-dequantize",
    }
    target.lm_head.quant_method.apply(target.lm_head, torch.randn(1, HIDDEN))
    assert kept._counter() == 1


# ---------------------------------------------------------------------- SGLang's own code around it


def test_sglangs_logits_processor_calls_the_fp8_head(engine_context):
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    made = ParallelLMHead(128, HIDDEN, params_dtype=torch.bfloat16)
    made.weight.data.copy_(weight(rows=128))
    processor = LogitsProcessor(SimpleNamespace(vocab_size=128))
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    plain = processor._compute_lm_head(x, made)
    fp8_head.quantize_head(made, count=True)
    got = processor._compute_lm_head(x, made)
    wanted = x.double() @ restored(made.weight, made.weight_scale).T
    torch.testing.assert_close(got.double(), wanted, atol=1e-3, rtol=2**-8)
    assert int(made.quant_method.applied) == 1
    assert not torch.equal(got, plain)


def test_hooks_sit_where_sglang_loads_and_checks(engine_context, monkeypatch):
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs
    from sparkling_sglang.patches import Patches

    monkeypatch.setattr(ModelRunner, "load_model", lambda self: "loaded")
    monkeypatch.setattr(ServerArgs, "check_server_args", lambda self: None)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    patches = Patches()
    fp8_head.register(patches)
    fp8_head.register_main(patches)
    patches.apply()
    target = runner(Model())
    ModelRunner.load_model(target)
    assert target.model.lm_head.weight.dtype == torch.float8_e4m3fn
    with pytest.raises(SystemExit):
        ServerArgs.check_server_args(arguments(tp_size=2))
