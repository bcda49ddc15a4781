"""Every path of SGLang's logits processor that touches the LM head, with the head in FP8.

The oracle is the same processor with a float32 head that holds what the FP8 one stands for, codes
times scales: whatever the path does around the product must come out alike. Which paths there are is
asserted from SGLang's source, so that one more fails here.
"""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import fp8_head

VOCAB, HIDDEN = 192, 32


@pytest.fixture(scope="module")
def heads(engine_context):
    """(FP8 head, the float32 head that it stands for)."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    values = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    values *= torch.logspace(-1, 1, VOCAB).unsqueeze(1)
    quantized = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.bfloat16)
    quantized.weight.data.copy_(values)
    fp8_head.quantize_head(quantized, count=True)
    plain = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.float32)
    plain.weight.data.copy_(quantized.weight.float() * quantized.weight_scale.unsqueeze(1))
    return quantized, plain


def states(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))


def metadata(mode: str, **fields):
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return LogitsMetadata(forward_mode=ForwardMode[mode], **fields)


def prefill(**more):
    """Three texts of 4, 5 and 6 tokens: log-probabilities from token 0, none, from token 3."""
    lengths = [4, 5, 6]
    return metadata(
        "EXTEND",
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=lengths,
        **more,
    )


def judged(**more):
    starts = [0, 5, 3]
    kept = [length - start for length, start in zip([4, 5, 6], starts, strict=True)]
    return prefill(
        extend_return_logprob=True,
        extend_logprob_start_lens_cpu=starts,
        extend_logprob_pruned_lens_cpu=kept,
        extend_return_top_logprob=True,
        top_logprobs_nums=[3, 0, 2],
        extend_token_ids_logprob=True,
        token_ids_logprobs=[[1, 7], None, [180]],
        extend_input_logprob_token_ids_gpu=torch.arange(sum(kept)) * 9,
        **more,
    )


def full_capture():
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    return CaptureHiddenMode.FULL


def plain_list(value):
    """Tensors and nested lists of them as one list of numbers."""
    if isinstance(value, torch.Tensor):
        return value.float().flatten().tolist()
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in plain_list(item)]
    return [] if value is None else [float(value)]


def scored(**more):
    """A prompt that is only judged, not continued."""
    return prefill(
        is_prefill_only=True,
        extend_token_ids_logprob=True,
        token_ids_logprobs=[[1, 7], [2, 3], [180]],
        extend_return_top_logprob=True,
        top_logprobs_nums=[2, 2, 2],
        **more,
    )


# name -> (tokens, metadata, settings of the processor, variables)
PATHS = {
    "decode": (3, lambda: metadata("DECODE"), {}, {}),
    "verification of 4": (4, lambda: metadata("TARGET_VERIFY"), {}, {}),
    "draft extend": (
        4,
        lambda: metadata("DRAFT_EXTEND_V2", draft_extend_select_index=torch.tensor([1, 3])),
        {},
        {},
    ),
    "captured graph: float32 buffer": (
        3,
        lambda: metadata("DECODE", next_token_logits_buffer=torch.full((3, VOCAB), 9.0)),
        {},
        {},
    ),
    "prefill": (15, prefill, {}, {}),
    "prefill with log-probabilities": (15, judged, {}, {"SGLANG_ENABLE_LOGPROB_CHUNK": "0"}),
    "the same in chunks": (
        15,
        judged,
        {},
        {"SGLANG_ENABLE_LOGPROB_CHUNK": "1", "SGLANG_LOGPROB_CHUNK_SIZE": "3"},
    ),
    "the same by log-softmax": (15, judged, {}, {"SGLANG_ENABLE_FAST_INPUT_LOGPROBS": "0"}),
    "hidden states returned": (15, lambda: judged(capture_hidden_mode=full_capture()), {}, {}),
    "softcapped, scaled": (3, lambda: metadata("DECODE"), {"cap": 2.0, "logit_scale": 0.5}, {}),
    "diffusion: all logits": (4, lambda: metadata("DLLM_EXTEND"), {"return_full_logits": True}, {}),
}


def processor(cap: float | None = None, **settings):
    from sglang.srt.layers.logits_processor import LogitsProcessor

    config = SimpleNamespace(vocab_size=VOCAB, final_logit_softcapping=cap)
    return LogitsProcessor(config, **settings)


def compare(one, other) -> int:
    """Assert that two outputs hold the same numbers; how many there were."""
    seen = 0
    for name, wanted in vars(other).items():
        a, b = plain_list(vars(one)[name]), plain_list(wanted)
        assert len(a) == len(b), name
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=2e-4, rtol=1e-4, msg=name)
        seen += len(b)
    return seen


@pytest.mark.parametrize("name", PATHS)
def test_a_path_gives_what_the_dequantized_head_gives(heads, monkeypatch, name):
    tokens, make, settings, variables = PATHS[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    quantized, plain = heads
    ids = torch.arange(tokens)
    before = int(quantized.quant_method.applied)
    outputs = [
        processor(**settings).forward(ids, states(tokens), head, make())
        for head in (quantized, plain)
    ]
    assert compare(*outputs) >= VOCAB
    products = int(quantized.quant_method.applied) - before
    assert products == (3 if name == "the same in chunks" else 1)


def test_the_graphs_buffer_itself_is_filled(heads):
    """A replayed graph reads its logits from the buffer that it was captured with."""
    buffer = torch.full((3, VOCAB), 9.0)
    out = processor().forward(
        torch.arange(3), states(3), heads[0], metadata("DECODE", next_token_logits_buffer=buffer)
    )
    assert out.next_token_logits.data_ptr() == buffer.data_ptr()
    assert not (buffer == 9.0).any()


@pytest.mark.parametrize(
    "way", ["compute_logprobs_at_positions", "compute_logprobs_for_multi_item_scoring"]
)
def test_scoring_gives_what_the_dequantized_head_gives(heads, way):
    at = [torch.tensor([1, 3]), torch.tensor([2]), torch.tensor([5])]
    before = int(heads[0].quant_method.applied)
    outputs = [
        getattr(processor(), way)(torch.arange(15), states(15), head, scored(), at)
        for head in heads
    ]
    assert compare(*outputs) > 10
    assert int(heads[0].quant_method.applied) == before + 1


def test_bf16_hidden_states_give_float32_logits_for_the_sampler(heads):
    """Penalties, grammar masks and temperature are applied to these, in place."""
    out = (
        processor()
        .forward(torch.arange(2), states(2).bfloat16(), heads[0], metadata("DECODE"))
        .next_token_logits
    )
    assert out.dtype == torch.float32 and out.is_contiguous()
    out.masked_fill_(torch.arange(VOCAB) > 3, float("-inf"))
    assert bool((out.argmax(-1) <= 3).all())


def test_these_are_all_the_paths_that_sglang_has():
    """Who asks for logits, and who looks at the head itself."""
    from sglang.srt.layers import logits_processor

    tree = ast.parse(inspect.getsource(logits_processor.LogitsProcessor))
    callers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "_get_logits"
    }
    assert callers == {
        "forward",
        "_get_dllm_logits",
        "compute_logprobs_for_multi_item_scoring",
        "compute_logprobs_at_positions",
    }
    readers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "weight"
    }
    assert readers == {"_compute_lm_head"}  # and there only after should_apply_lm_head_quant_method
