"""Which misreading of an FP8 head makes the drafts useless, measured on the shipped model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from sparklet import decode, evaluate, export

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lib" / "sparkling_sglang"))

from sparkling_sglang import fp8_head, trap  # noqa: E402

N = 10  # problems, about 100 rounds of sound drafts


@pytest.fixture(scope="module")
def measured():
    """name -> accept length of greedy problems with the draft's head read so."""
    model, tok = export.load(ROOT / "models" / "sparklet")
    with torch.no_grad():
        model.prepare(torch.bfloat16)
    asked = (text for text, _, _ in evaluate.problems(N, 31))
    texts = evaluate._run(model, tok, asked, 160, decode.Sampling(), 0, N)
    weight = model.lm_head.now
    q, scale = fp8_head.quantize_rows(weight)
    whole = weight.float().abs().max() / fp8_head.FP8_MAX
    one, codes = (weight.float() / whole).to(fp8_head.FP8).float(), q.float()
    pairs = q.reshape(-1).view(torch.bfloat16).float().nan_to_num(0, 0, 0)
    pairs = torch.cat([pairs, pairs.new_zeros(pairs.shape)]).reshape(q.shape)
    readings = {
        "whole head": lambda h: (h.float() @ codes.T) * scale,
        "row scales dropped": lambda h: h.float() @ codes.T,
        "one scale, dropped": lambda h: h.float() @ one.T,
        "activations in e4m3, scales kept": lambda h: (
            (h.to(fp8_head.FP8).float() @ codes.T) * scale
        ),
        "the trap": lambda h: (
            trap.bare_product(h.reshape(-1, h.shape[-1]), q).float().reshape(*h.shape[:-1], -1)
        ),
        "unsigned bytes": lambda h: h.float() @ q.view(torch.uint8).float().T,
        "pairs of bytes as BF16": lambda h: h.float() @ pairs.T,
    }
    found = {}
    for name, head in readings.items():
        model.logits = head  # the draft's only: the texts are there already
        found[name] = decode.accepted(model, texts).length
        del model.logits
    print({name: round(length, 3) for name, length in found.items()})
    return found


def test_the_whole_head_drafts_well(measured):
    assert measured["whole head"] > 3.5


def test_dropping_scales_alone_is_not_the_silent_failure(measured):
    assert 1.8 < measured["row scales dropped"] < measured["whole head"] - 0.5
    assert measured["one scale, dropped"] > measured["whole head"] - 0.2
    assert measured["activations in e4m3, scales kept"] > measured["whole head"] - 0.2


def test_the_trap_leaves_nothing(measured):
    assert 1.0 <= measured["the trap"] < 1.15


def test_the_report_to_sglang_quotes_these_lengths(measured):
    report = (ROOT / "docs" / "upstream" / "draft-lm-head.md").read_text("utf-8")
    quoted = re.findall(r"^\| the .+ \| ([\d.]+) \|$", report, re.MULTILINE)
    # Another processor's products may end a round or two differently.
    names = ("whole head", "row scales dropped", "the trap")
    assert [float(q) for q in quoted] == [pytest.approx(measured[n], abs=0.12) for n in names]


def test_reading_bytes_as_something_else_leaves_nothing_either(measured):
    assert measured["unsigned bytes"] < 1.05
    assert measured["pairs of bytes as BF16"] < 1.05
