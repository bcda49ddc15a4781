"""The inventory against real files and against what others count of the full-size model."""

from __future__ import annotations

import json
import shutil
from math import prod

import pytest
from sparkling import architecture, inventory, tiny, traffic, weightcheck
from sparkling.errors import UsageError

BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8}


@pytest.fixture(scope="module")
def sparklet(root):
    return root / "models" / "sparklet"


@pytest.fixture(scope="module")
def tiny_ling(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("tiny") / "ling")


@pytest.fixture(scope="module")
def flash():
    return inventory.inventory(inventory.FLASH)


def stored(folder):
    return {
        tensor.name: (tensor.dtype, tensor.shape)
        for file in weightcheck.headers(folder).values()
        for tensor in file.values()
    }


def config(folder):
    return json.loads((folder / "config.json").read_text())


# -- names, dtypes and shapes ----------------------------------------------------------------------


def test_the_practice_model_is_exactly_what_its_configuration_implies(sparklet):
    assert inventory.expected(config(sparklet)) == stored(sparklet)


def test_the_tiny_ling_is_exactly_what_its_configuration_implies(tiny_ling):
    assert inventory.expected(config(tiny_ling)) == stored(tiny_ling)


def test_other_sizes_of_the_tiny_ling_too(tmp_path):
    dims = tiny.Dims(layers=6, group=3, hidden=256, experts=16, expert_groups=8, top_k=4)
    folder = tiny.build(tmp_path / "ling", random=True, dims=dims)
    assert inventory.expected(config(folder)) == stored(folder)


def test_the_full_size_model_has_the_parameters_that_others_count(flash):
    """llama.cpp prints n_params 127 486 405 600 for its conversion of the model."""
    tensors = inventory.expected(inventory.flash_config())
    weights = sum(
        prod(shape) * (2 if dtype == "I8" else 1)
        for name, (dtype, shape) in tensors.items()
        if not name.endswith("scale_inv")
    )
    assert weights == 127_486_405_600


def test_the_full_size_model_has_the_published_size(flash):
    assert round(flash.bytes_total / 1e9, 1) == 70.4
    assert flash.sizes["LM head"] == 157_184 * 2560 * 2 == 804_782_080
    # 40 layers x 512 experts x 3 matrices of 2560 x 768 at 4 bits and a scale for 32.
    assert flash.sizes["routed experts"] == 40 * 512 * 3 * 2560 * 768 * 17 // 32
    assert flash.sizes["KDA attention"] > 35 * 6 * 4096 * 2560


def test_what_one_more_router_dtype_would_make_of_the_published_size():
    """The published 70.4 GB tells an FP32 router from a BF16 one, which would give 70.3."""
    other = {**inventory.flash_config(), "router_dtype": "bf16"}
    assert round(inventory.inventory(other).bytes_total / 1e9, 1) == 70.3


@pytest.mark.parametrize(
    ("want", "found", "good"),
    [
        (("BF16", (4, 4)), ("F32", (4, 4)), True),
        (("F32", (8,)), ("F32", (1, 1, 8, 1)), True),
        (("F32", (2, 2)), ("F8_E8M0", (2, 2)), True),
        (("F32", (256, 1, 4)), ("BF16", (256, 4)), True),
        (("F8_E8M0", (4, 4)), ("U8", (4, 4)), False),
        (("F8_E8M0", (4, 4)), ("F32", (4, 4)), False),
        (("I8", (4, 4)), ("F8_E4M3", (4, 4)), False),
        (("F8_E4M3", (4, 4)), ("BF16", (4, 4)), False),
        (("BF16", (4, 4)), ("F8_E8M0", (4, 4)), False),
        (("BF16", (4, 2)), ("BF16", (2, 4)), False),
    ],
)
def test_what_fits(want, found, good):
    assert inventory.fits(want, found) is good


def test_names_that_the_loader_leaves_out_on_purpose(sparklet):
    assert inventory.unused("model.layers.42.shared_head.head.weight")
    assert inventory.unused("model.layers.42.embed_tokens.weight")
    assert inventory.unused("model.layers.3.attention.rotary_emb.inv_freq")
    assert not any(inventory.unused(name) for name in stored(sparklet))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_experts": "512"}, "num_experts is '512'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"layer_group_size": 5}, "does not divide its 42 layers"),
        ({"num_nextn_predict_layers": 2}, "one at most"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"full_attention_type": "gqa"}, "full_attention_type"),
    ],
)
def test_a_configuration_that_is_not_understood(change, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        inventory.expected({**inventory.flash_config(), **change})
    assert str(caught.value).count(". ") == 0


def test_other_forms_of_the_architecture():
    """Low-rank queries, a low-rank KDA, no draft, tied embeddings, no quantization."""
    plain = {
        **inventory.flash_config(),
        "quantization_config": None,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 256,
        "no_kda_lora": False,
        "layer_group_size": [1, 0] * 21,
    }
    found = inventory.expected(plain)
    assert "lm_head.weight" not in found and not any("layers.42." in name for name in found)
    assert found["model.layers.1.attention.q_b_proj.weight"] == ("BF16", (32 * 192, 256))
    assert found["model.layers.0.attention.f_a_proj.weight"] == ("BF16", (128, 2560))
    assert {dtype for dtype, _ in found.values()} == {"BF16", "F32"}
    assert architecture.shape(plain).mla == tuple(range(1, 42, 2))


# -- components ------------------------------------------------------------------------------------


def test_every_tensor_belongs_somewhere(sparklet, tiny_ling, flash):
    for one in (inventory.inventory(sparklet), inventory.inventory(tiny_ling), flash):
        assert "other" not in one.sizes and "NEXTN other" not in one.sizes
        assert one.bytes_total == sum(part.bytes for part in one.components)


def test_headers_and_configuration_agree(sparklet, tiny_ling):
    for folder in (sparklet, tiny_ling):
        read, implied = inventory.inventory(folder), inventory.inventory(config(folder))
        assert sorted(map(str, read.components)) == sorted(map(str, implied.components))
        assert "headers" in read.source and "headers" not in implied.source
        total = sum(weightcheck_size(folder))
        assert 0 < total - read.bytes_total < 0.02 * total + 200_000  # what is left is headers


def weightcheck_size(folder):
    return [path.stat().st_size for path in folder.glob("*.safetensors")]


def test_a_folder_with_a_configuration_only(sparklet, tmp_path):
    shutil.copy(sparklet / "config.json", tmp_path / "config.json")
    assert inventory.inventory(tmp_path).sizes == inventory.inventory(sparklet).sizes


def test_a_checkpoint_that_is_cut_off_is_refused(sparklet, tmp_path):
    folder = shutil.copytree(sparklet, tmp_path / "cut")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(weightcheck.WeightsError, match="short by 10 bytes"):
        inventory.inventory(folder)


def test_no_checkpoint(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        inventory.inventory(tmp_path)


def test_an_unknown_quantization_still_has_an_inventory(sparklet, tmp_path):
    folder = shutil.copytree(sparklet, tmp_path / "odd")
    odd = {**config(folder), "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(odd))
    one = inventory.inventory(folder)
    assert one.bytes_total == inventory.inventory(sparklet).bytes_total
    with pytest.raises(UsageError, match=r"unknown: .*'awq'"):
        one.step_bytes()


# -- traffic ---------------------------------------------------------------------------------------


def test_the_union_of_experts():
    assert traffic.union(1) == 8
    assert traffic.union(2) == pytest.approx(8 + 8 * (1 - 8 / 512))
    assert traffic.union(4) == pytest.approx(31.26, abs=0.01)  # 30.8 was counted on a GPU
    assert traffic.union(10_000) == pytest.approx(512)
    assert traffic.union(3, experts=4, top_k=4) == 4
    for bad in ((0, 512, 8), (1, 8, 9), (1, 8, 0)):
        with pytest.raises(UsageError):
            traffic.union(bad[0], experts=bad[1], top_k=bad[2])


def test_the_union_by_drawing_experts():
    import random

    draw = random.Random(5)
    seen = [len({e for _ in range(4) for e in draw.sample(range(512), 8)}) for _ in range(4000)]
    assert sum(seen) / len(seen) == pytest.approx(traffic.union(4), abs=0.06)


def test_a_decode_step_of_the_full_size_model_by_hand(flash):
    step = flash.step_bytes()
    parts = {part.name: part.read for part in step.parts}
    assert parts["routed experts"] == 40 * 8 * 3 * 2560 * 768 * 17 / 32
    assert parts["LM head"] == 804_782_080
    # 35 layers: five matrices in, one out, FP8 with a scale for each block of 128 x 128.
    assert parts["KDA attention"] == pytest.approx(35 * 6 * 4096 * 2560, rel=0.01)
    # The recurrent state as SGLang's log has it: 9 slots are 0.62 GiB with these sizes.
    slots = 9 * 35 * 32 * 128 * 128 * 4 / 2**30
    assert slots == pytest.approx(0.62, abs=0.005)
    assert parts["KDA state"] == 35 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)
    assert step.total == pytest.approx(4.97e9, rel=0.001)


def test_the_kv_cache_as_the_log_has_it(flash):
    """`KV Cache is allocated. #tokens: 5123008, KV size: 38.48 GB` (GiB, with a page of 64 tokens for
    padding), H200, same sizes; the draft's pool was 4,023,488 tokens, 4.32 GB."""
    each = traffic.kv_bytes(flash.known())
    assert each == 8064
    assert round(each * (5_123_008 + 64) / 2**30, 2) == 38.48
    assert round(traffic.kv_bytes(flash.known(), 1) * (4_023_488 + 64) / 2**30, 2) == 4.32
    far, near = flash.step_bytes(context=32_768), flash.step_bytes()
    assert far.total - near.total == 8064 * 32_768


def test_a_round_reads_the_head_four_times(flash):
    bf16, fp8 = flash.round_bytes(), flash.round_bytes(head="FP8")
    saved = 157_184 * (2560 * 2 - 2560 - 4)
    assert bf16.total - fp8.total == pytest.approx(4 * saved)
    one = flash.step_bytes().total - flash.step_bytes(head="FP8").total
    assert one == pytest.approx(saved)
    assert bf16.positions == 4


def test_a_round_adds_up(flash):
    """Verification, draft extend and two single passes: nothing twice, nothing lost."""
    whole = flash.round_bytes(3, context=1000, head="FP8").total
    parts = [
        flash.step_bytes(4, context=1000, head="FP8"),
        flash.draft_bytes(4, context=1000, head="FP8"),
        *[flash.draft_bytes(1, context=1000, head="FP8")] * 2,
    ]
    assert whole == pytest.approx(sum(part.total for part in parts))


def test_more_positions_more_bytes(flash):
    totals = [flash.step_bytes(k).total for k in range(1, 9)]
    assert totals == sorted(totals)
    same = flash.step_bytes(4, union=8)
    assert flash.step_bytes(1).total < same.total < flash.step_bytes(4).total


@pytest.mark.parametrize("union", [7, 33, 513])
def test_an_impossible_union(flash, union):
    with pytest.raises(UsageError, match="8 to 32 experts"):
        flash.step_bytes(4, union=union)


def test_an_impossible_step(flash):
    with pytest.raises(UsageError):
        flash.step_bytes(context=-1)
    with pytest.raises(UsageError, match="BF16 or FP8"):
        flash.step_bytes(head="int4")
    with pytest.raises(UsageError):
        flash.round_bytes(0)
    with pytest.raises(UsageError, match="no NEXTN layer"):
        inventory.inventory(
            {**inventory.flash_config(), "num_nextn_predict_layers": 0}
        ).draft_bytes()


def test_rows_and_json(flash):
    rows = flash.rows()
    assert rows[0]["component"] == "routed experts"
    assert sum(row["%"] for row in rows) == pytest.approx(100)
    assert json.loads(json.dumps(flash.to_json()))["bytes"] == flash.bytes_total
    step = flash.step_bytes()
    assert sum(row["%"] for row in step.rows()) == pytest.approx(100)
    assert json.loads(json.dumps(step.to_json()))["total"] == step.total
    assert step.seconds(273e9) == pytest.approx(step.total / 273e9)


def test_a_recipe(root):
    from sparkling import recipe

    book = recipe.load(root / "env" / "recipes" / "sparklet.toml", root=root)
    assert inventory.inventory(book).bytes_total == inventory.inventory(book.model).bytes_total
