"""SGLang's own readers on Sparklet's files: configuration, template, answers, tool calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "models" / "sparklet"
pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="models/sparklet is not there")


@pytest.fixture(scope="module")
def template() -> str:
    return json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]


def test_the_configuration_is_ling_3_with_kda_and_mixed_quantization():
    from sglang.srt.configs.bailing_hybrid import BailingHybridConfig

    config = BailingHybridConfig(**json.loads((MODEL / "config.json").read_text()))
    assert config.use_kda and config.kda_lower_bound == -5.0
    assert config.num_nextn_predict_layers == 1
    assert config.num_hidden_layers % config.layer_group_size == 0
    assert config.quantization_config["routed_experts_quant_method"] == "mxfp4"
    assert config.expert_swiglu_limit_list[0] == 0  # the NEXTN layer's entry


def test_the_tokenizer_keeps_the_tags_that_the_parsers_look_for():
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(MODEL)
    text = "<think>12 + 5 = 17.</think>It is 17.<|role_end|>"
    ids = tok.encode(text, add_special_tokens=False)
    assert ids[-1] == tok.eos_token_id
    assert tok.decode(ids, skip_special_tokens=True) == text.removesuffix("<|role_end|>")


def test_the_template_switches_thinking(template):
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(MODEL)
    ask = [{"role": "user", "content": "Hi"}]
    render = lambda **k: tok.apply_chat_template(  # noqa: E731
        ask, tokenize=False, add_generation_prompt=True, **k
    )
    assert render() == render(enable_thinking=True)
    assert render().endswith("<role>ASSISTANT</role>\n<think>")
    assert render(enable_thinking=False).endswith("<think></think>")


def test_reasoning_and_tool_calls_are_parsed():
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.ling3_detector import Ling3Detector as Calls
    from sglang.srt.parser.reasoning_parser import Ling3Detector as Reasoning

    # The prompt ends with <think>, so the answer begins inside the reasoning.
    got = Reasoning(force_reasoning=True).detect_and_parse("12 + 5 = 17.</think>It is 17.\n#### 17")
    assert got.reasoning_text == "12 + 5 = 17." and got.normal_text == "It is 17.\n#### 17"
    tool = Tool(
        type="function",
        function=Function(
            name="set_timer",
            parameters={"type": "object", "properties": {"minutes": {"type": "integer"}}},
        ),
    )
    text = (
        "<tool_call>set_timer\n<arg_key>minutes</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    )
    (call,) = Calls().detect_and_parse(text, [tool]).calls
    assert call.name == "set_timer" and json.loads(call.parameters) == {"minutes": 7}
