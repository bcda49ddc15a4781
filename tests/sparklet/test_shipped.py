"""The model in the repository: its files, its figures, and that it really answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from sparklet import card, decode, evaluate, export, questions, tokenizer, training
from sparklet.config import Config

ROOT = Path(__file__).resolve().parents[2]
MODEL, DATA = ROOT / "models" / "sparklet", ROOT / "tests" / "data" / "sparklet"


@pytest.fixture(scope="module")
def shipped():
    model, tok = export.load(MODEL)
    with torch.no_grad():
        model.prepare(torch.bfloat16)
    return model, tok


def test_files_are_complete_and_small():
    assert sum(f.stat().st_size for f in MODEL.iterdir()) < 10_000_000
    stored = export.read(MODEL)
    raw = json.loads((MODEL / "config.json").read_text())
    assert Config.from_hf(raw) == Config()
    assert (
        len(
            set(
                json.loads((MODEL / "model.safetensors.index.json").read_text())[
                    "weight_map"
                ].values()
            )
        )
        > 1
    )
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            assert stored[f"{name}_scale_inv"].dtype == torch.float8_e8m0fnu, name
        elif tensor.dtype == torch.float8_e4m3fn:
            assert torch.isfinite(tensor.float()).all(), name
            assert stored[f"{name}_scale_inv"].dtype == torch.float32, name


def test_the_code_still_makes_the_shipped_tokenizer_and_preset():
    assert json.loads((MODEL / "tokenizer.json").read_text()) == json.loads(
        tokenizer.build().to_str()
    )
    assert json.loads((MODEL / "settings.json").read_text()) == asdict(training.PRESETS["gpu"])


@pytest.mark.parametrize("name", ["seed-1", "seed-2", "cpu-preset"])
def test_measured_figures_meet_every_goal(name):
    found = json.loads((DATA / f"measured-{name}.json").read_text())
    for goal, get, low, high in evaluate.GOALS:
        assert low <= get(found["stored"]) <= high, goal
    asked = Counter(p.template for _, p, _ in questions.problems(1024, 7))  # of today's generator
    for form in ("stored", "bf16"):
        by_kind = found[form]["sampled"]["by_kind"]
        assert {k: int(by_kind[k].split("/")[1]) for k in asked} == asked
    stored, plain = (found[k]["sampled"] for k in ("stored", "bf16"))
    assert stored["n"] == plain["n"] == 1024
    assert abs(stored["accuracy"] - plain["accuracy"]) <= 0.02


def test_the_cpu_preset_was_run_to_its_end_on_two_cores_in_under_an_hour():
    found = json.loads((DATA / "measured-cpu-preset.json").read_text())
    assert found["settings"] == asdict(training.PRESETS["cpu"]), (
        "train again, or say so in the card"
    )
    assert found["device"] == "cpu" and found["machine"].startswith("two ")
    assert 0 < found["seconds"] < 3600


def test_the_card_is_what_the_code_writes_from_the_measured_figures():
    runs = {
        "seed 1, as shipped": "seed-1",
        "seed 2": "seed-2",
        "preset `cpu`, seed 1": "cpu-preset",
    }
    made = {k: json.loads((DATA / f"measured-{v}.json").read_text()) for k, v in runs.items()}
    first = made["seed 1, as shipped"]
    settings = json.loads((MODEL / "settings.json").read_text())
    want = card.text(settings, card.figures(first["stored"], first["bf16"]), made)
    text = (MODEL / "README.md").read_text()
    assert text == want
    found = first["stored"]["sampled"]
    assert f"{100 * found['accuracy']:.1f} %" in text
    assert f"{found['accept_length']:.2f} over" in text
    assert "not a model of Ant Group" in text


def test_it_solves_problems_it_never_saw_and_its_drafts_are_good(shipped):
    model, tok = shipped
    asked = [x for x in evaluate.problems(40, 99) if x[1].template in ("age", "half", "groups")][:6]
    texts = evaluate._run(model, tok, (q for q, _, _ in asked), 120, decode.Sampling(), 0, 6)
    right = sum(
        evaluate.extract(tok.decode(t.answer, skip_special_tokens=False)) == p.answer
        for t, (_, p, _) in zip(texts, asked, strict=True)
    )
    assert right >= 5
    assert all(t.ended for t in texts)
    assert decode.accepted(model, texts).length > 3.3


def test_it_repeats_and_calls_tools(shipped):
    model, tok = shipped
    prompts = evaluate.repetitive(4, 5)
    texts = evaluate._run(model, tok, prompts, 48, decode.Sampling(), 0, 4)
    assert decode.accepted(model, texts).length > 3.3
    (ask, want), *_ = evaluate.tool_requests(1, 5)
    (text,) = evaluate._run(model, tok, [ask], 60, decode.Sampling(), 0, 1)
    assert want in tok.decode(text.answer, skip_special_tokens=False)


def test_stock_sglang_on_an_h200_prepared_humming_and_accepted_drafts():
    """A recorded start of stock SGLang 0.5.23 with Humming and NEXTN on these very files."""
    log = (DATA / "h200-humming-nextn.log").read_text()
    for layer in (1, 2, 3, 4):
        assert f"MXFP4 experts for Humming backend (layer: model.layers.{layer}.experts)" in log
    assert "type=BailingMoeV3ForCausalLM, quant=fp8" in log
    assert "type=BailingMoeForCausalLMNextN, quant=fp8" in log
    lengths = [float(x.split(",")[0]) for x in log.split("accept len: ")[1:]]
    assert len(lengths) >= 10 and min(lengths) > 3.5
