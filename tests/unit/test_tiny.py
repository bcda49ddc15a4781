"""The tiny Ling: deterministic, well-formed, and shaped so that lessons work."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading

import jinja2
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from sparkling import tiny, tinytext, weightcheck
from sparkling.errors import UsageError
from tokenizers import Tokenizer

# If this changes, so do all greedy texts and accept lengths of the cpu lane: change it knowingly.
DIGEST = "96acd94b7dbf552c03740eca4f62a030a47e44e871b2af54d71254a38ec81d55"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def weights(made):
    return {
        name: value.astype(np.float32)
        for name, value in load_file(made / "model.safetensors").items()
    }


@pytest.fixture(scope="session")
def tokenizer(made):
    return Tokenizer.from_file(str(made / "tokenizer.json"))


@pytest.fixture(scope="session")
def config(made):
    return json.loads((made / "config.json").read_text())


def test_the_bytes_are_the_same_everywhere(made):
    assert hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest() == DIGEST


def test_arguments_change_the_bytes(made, tmp_path):
    def digest(**arguments):
        place = tiny.build(tmp_path / repr(arguments).replace("/", ""), **arguments)
        return hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()

    digests = {
        digest(seed=1),
        digest(noise=0.2),
        digest(random=True),
        digest(random=True, dtype="bfloat16"),
        DIGEST,
    }
    assert len(digests) == 5


def test_it_is_a_whole_checkpoint(made):
    found = weightcheck.check(made)
    assert found.hashed == ("model.safetensors",) and "verified" in str(found)
    assert (made / "model.safetensors").stat().st_size < 16e6


def test_a_second_build_does_nothing_and_damage_is_repaired(made, tmp_path):
    place = tiny.build(tmp_path / "m")
    before = (place / "model.safetensors").stat().st_mtime_ns
    tiny.build(place)
    assert (place / "model.safetensors").stat().st_mtime_ns == before
    data = bytearray((place / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "model.safetensors").write_bytes(data)
    assert not tiny.intact(place)
    tiny.build(place)
    assert tiny.intact(place)
    (place / "config.json").unlink()
    tiny.build(place)
    assert tiny.intact(place)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]  # no temporary folders


def test_other_settings_replace_ours_but_never_a_strangers_folder(tmp_path):
    place = tiny.build(tmp_path / "m")
    tiny.build(place, seed=3)
    assert json.loads((place / tiny.MANIFEST).read_text())["settings"]["seed"] == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("keep me")
    with pytest.raises(UsageError, match="not a tiny Ling of ours"):
        tiny.build(other)
    assert (other / "thesis.txt").read_text() == "keep me"
    with pytest.raises(UsageError, match="is not a folder"):
        tiny.build(other / "thesis.txt")
    (other / tiny.MANIFEST).write_text('{"sha256": {"thesis.txt": "0"}}')  # another checkpoint's
    with pytest.raises(UsageError, match="not a tiny Ling of ours"):
        tiny.build(other)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert tiny.intact(tiny.build(empty))


def test_two_builders_at_once_do_not_collide(tmp_path):
    errors = []

    def work():
        try:
            tiny.build(tmp_path / "m")
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    assert tiny.intact(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtype": "int4"}, "float32 or bfloat16, not 'int4'"),
        ({"noise": -1}, "noise is -1"),
        ({"noise": float("nan")}, "noise is nan"),
        ({"swiglu_limits": [1.0]}, "holds 1 limits but the model has 4 layers"),
        ({"dims": tiny.Dims(hidden=64)}, "at least 134 and five heads, got 64 and 8"),
        ({"dims": tiny.Dims(heads=4)}, "got 192 and 4"),
    ],
)
def test_wrong_arguments_get_one_sentence(tmp_path, arguments, says):
    with pytest.raises(UsageError) as caught:
        tiny.build(tmp_path / "m", **arguments)
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_architecture_is_lings(config, weights, tokenizer):
    assert config["architectures"] == ["BailingMoeV3ForCausalLM"]
    assert config["model_type"] == "bailing_hybrid"
    assert (config["num_nextn_predict_layers"], config["routed_scaling_factor"]) == (1, 2.5)
    wanted = {
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|role_end|>"
    assert tokenizer.id_to_token(config["pad_token_id"]) == "<|endoftext|>"
    kda = [i for i in range(4) if f"model.layers.{i}.attention.A_log" in weights]
    mla = [i for i in range(5) if f"model.layers.{i}.attention.kv_b_proj.weight" in weights]
    assert (kda, mla) == ([0, 1, 2], [3, 4])
    assert "model.layers.4.eh_proj.weight" in weights
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert config["vocab_size"] % 64 == 0
    for value in weights.values():
        assert np.isfinite(value).all()


def test_a_random_checkpoint_is_random_everywhere(tmp_path):
    dims = tiny.Dims(hidden=128, heads=4)
    place = tiny.build(
        tmp_path / "r",
        random=True,
        dims=dims,
        swiglu_limits=[0, 0.5, 0.5, 0.7],
        shared_swiglu_limits=[0, 0.4, 0, 0],
    )
    loaded = load_file(place / "model.safetensors")
    assert {value.dtype for value in loaded.values()} == {np.dtype(np.float32)}
    for name, value in loaded.items():
        if name.endswith("norm.weight"):
            continue
        assert value.std() > 0.01, name
        assert abs(value.mean()) < 4 * value.std() / value.size**0.5 + 1e-6, name
    written = json.loads((place / "config.json").read_text())
    assert written["expert_swiglu_limit_list"] == [0, 0.5, 0.5, 0.7]
    assert written["share_expert_swiglu_limit_list"] == [0, 0.4, 0, 0]
    assert (written["torch_dtype"], written["hidden_size"]) == ("float32", 128)
    half = load_file(
        tiny.build(tmp_path / "h", random=True, dtype="bfloat16", dims=dims) / "model.safetensors"
    )
    assert half["lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert half["model.layers.0.attention.A_log"].dtype == np.float32


def test_the_noise_is_normal_enough():
    sample = tiny._Noise(0)("x", 200_000)
    assert abs(sample.mean()) < 0.01 and abs(sample.std() - 1) < 0.01
    assert abs((sample**4).mean() - 2.7) < 0.1  # 3 - 6/(5 n), n = 4 uniform terms
    assert not np.array_equal(sample[:9], tiny._Noise(0)("y", 9))
    assert not np.array_equal(sample[:9], tiny._Noise(1)("x", 9))


# ------------------------------------------------------------------------------ the tokenizer


def test_prose_survives_a_round_trip(tokenizer):
    for sample in (
        "A small draft model guesses several words ahead while its large partner",
        "Ünïcödé, 12345 and\n\n tabs\t<|role_end|>",
        "How is the weather in Paris?",
    ):
        ids = tokenizer.encode(sample).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample


def test_words_are_tokens_and_special_tokens_are_whole(tokenizer):
    assert tokenizer.encode(" several words ahead").tokens == ["Ġseveral", "Ġwords", "Ġahead"]
    for token in (*tinytext.HIDDEN, *tinytext.SHOWN):
        assert tokenizer.encode(token).tokens == [token]
    shown = "<think>x</think><tool_call>y</tool_call>"
    assert tokenizer.decode(tokenizer.encode(shown).ids) == shown  # not skipped as special
    assert tokenizer.decode(tokenizer.encode("x<|role_end|>").ids) == "x"


# ------------------------------------------------------------------------- the chat template


def render(messages, **context):
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(tinytext.CHAT_TEMPLATE)
    return template.render(messages=messages, add_generation_prompt=True, **context)


ASK = {"role": "user", "content": "How is the weather in Paris?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
}


def test_thinking_is_on_unless_switched_off():
    on, off = render([ASK]), render([ASK], enable_thinking=False)
    assert render([ASK], enable_thinking=True) == on
    assert on.endswith("<role>ASSISTANT</role><think>") and "thinking on<|role_end|>" in on
    assert off.endswith("<role>ASSISTANT</role><think></think>") and "thinking off" in off


def test_a_tool_round_trip_is_rendered_as_ling_writes_it():
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    result = {"role": "tool", "content": '{"sky": "rainy"}'}
    prompt = render([ASK, CALL, result], tools=tools)
    assert "<tools>\n" in prompt and '"get_weather"' in prompt
    assert (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        in prompt
    )
    assert '<role>OBSERVATION</role><tool_response>{"sky": "rainy"}</tool_response>' in prompt
    older = render([ASK, CALL, result, {"role": "assistant", "content": "Rainy."}, ASK])
    assert "<tool_response>" not in older and '{"sky": "rainy"}' in older
    assert "<tools>" not in render([ASK])


def test_content_may_come_in_parts():
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
    }
    assert "<role>HUMAN</role>one two<|role_end|>" in render([parts])


# ----------------------------------------------- what it says, computed from the weights alone


class Skeleton:
    """The model without the layers' noise: embedding, facts, final norm, head; and NEXTN's."""

    def __init__(self, weights, tokenizer, facts=()):
        self.embedding = weights["model.word_embeddings.weight"]
        self.head = weights["lm_head.weight"]
        self.mix = weights["model.layers.4.eh_proj.weight"]
        self.id = tokenizer.token_to_id
        self.tokenizer = tokenizer
        known = tiny._facts()
        self.flags = np.zeros(self.embedding.shape[1], np.float32)
        for fact in facts:
            self.flags[2 + len(known) + list(known).index(fact)] = 2.0

    @staticmethod
    def norm(x):
        return x / np.sqrt((x * x).mean())

    def hidden(self, token):
        return self.norm(self.embedding[token] + self.flags)

    def logits(self, token):
        return self.head @ self.hidden(token)

    def drafted(self, token):
        both = np.concatenate([self.norm(self.embedding[token]), self.hidden(token)])
        return int((self.head @ self.norm(self.mix @ both)).argmax())

    def walk(self, token, limit=120):
        tokens, here = [], self.id(token)
        while len(tokens) < limit:
            here = int(self.logits(here).argmax())
            tokens.append(here)
            if here == self.id(tinytext.END):
                break
        return tokens

    def say(self, token):
        return self.tokenizer.decode(self.walk(token), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("after", "facts", "said"),
    [
        ("<think>", (), "The question looks simple: I recall two facts"),
        ("</think>", (), "A small draft model guesses several words ahead"),
        ("</think>", ("code",), "```python\ndef propose(prefix):"),
        ("</think>", ("count",), "1, 2, 3, 4, 5,"),
        (
            "</think>",
            ("tools", "city:Tokyo"),
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Tokyo</arg_value></tool_call>"
            "<|role_end|>",
        ),
        ("</think>", ("tools",), "<tool_call>get_weather<arg_key>city</arg_key><arg_value>here"),
        (
            "</think>",
            ("tools", "result", "city:Paris", "sky:rainy"),
            "Today Paris will stay rainy according to your tool.<|role_end|>",
        ),
        ("</think>", ("tools", "code", "city:Paris"), "<tool_call>get_weather"),
        ("</think>", ("tools", "result", "count", "city:Paris"), "Today Paris will stay uncertain"),
    ],
)
def test_what_it_answers_depends_on_the_facts(weights, tokenizer, after, facts, said):
    assert Skeleton(weights, tokenizer, facts).say(after).startswith(said)


def test_every_answer_ends_by_itself(weights, tokenizer):
    for facts in ((), ("code",), ("count",), ("tools",), ("tools", "result")):
        assert Skeleton(weights, tokenizer, facts).say("</think>").endswith(tinytext.END)
    assert "</think>" in Skeleton(weights, tokenizer).say("<think>")


def test_sampling_has_real_choices_and_little_nonsense(weights, tokenizer):
    model = Skeleton(weights, tokenizer)
    logits = model.logits(model.id("Ġsmall"))
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    assert probabilities.max() > 0.99  # only one word may follow
    logits = model.logits(model.id("Ġmodel"))
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    choices = [model.id(t) for t in ("Ġguesses", "Ġdrafts", "Ġproposes")]
    assert probabilities[choices].sum() > 0.95
    assert 0.4 < probabilities.max() < 0.8


def accept_length(model, token, steps=3, tokens=300):
    """Tokens kept per round with greedy drafting, by walking the chain (ignoring its end)."""
    walked = [model.id(token)]
    while len(walked) < tokens:
        walked.append(int(model.logits(walked[-1]).argmax()))
    right = [model.drafted(a) == b for a, b in itertools.pairwise(walked)]
    position = rounds = 0
    while position + steps < len(right):
        kept = 0
        while kept < steps and right[position + 1 + kept : position + 2 + kept] == [True]:
            kept += 1
        position, rounds = position + kept + 1, rounds + 1
    return position / rounds


def test_noise_sets_the_quality_of_the_draft(made, weights, tokenizer, tmp_path):
    def measured(noise):
        loaded = load_file(tiny.build(tmp_path / str(noise), noise=noise) / "model.safetensors")
        return accept_length(
            Skeleton({n: v.astype(np.float32) for n, v in loaded.items()}, tokenizer), "</think>"
        )

    usual = accept_length(Skeleton(weights, tokenizer), "</think>")
    assert measured(0) == 4.0
    assert 2.0 < usual < 3.2
    assert 1.0 <= measured(0.5) < measured(0.16) < usual < measured(0.06) <= 4.0
    code = accept_length(Skeleton(weights, tokenizer, ("code",)), "</think>")
    assert usual + 0.3 < code  # code is drafted better than prose, as on real models


def test_every_word_has_one_place_in_the_chains():
    """A next-token map has no memory: a word in two places would mix their continuations."""
    words = tiny._Map()
    totals: dict[str, float] = {}
    for (source, _), weight in words.edges.items():
        totals[source] = totals.get(source, 0.0) + float(np.exp(weight))
    assert {source: total for source, total in totals.items() if abs(total - 1) > 1e-6} == {}
    assert not {source for source, *_ in words.branches} & set(totals)
