"""The model card (README.md of the checkpoint)."""

from __future__ import annotations

from typing import Any


def text(settings: dict[str, Any], measured: dict[str, Any]) -> str:
    """The card, with the run's settings and the measured figures."""
    rows = "\n".join(f"| {k} | {v} |" for k, v in settings.items())
    figures = "\n".join(f"| {k} | {v} |" for k, v in measured.items())
    return f"""---
license: mit
language: en
---
# Sparklet

A practice model for workshops and tests: about ten million parameters with the architecture and the
on-disk format of Ling-3.0-flash-fp4 (`BailingMoeV3ForCausalLM`: Kimi Delta Attention and gated MLA
layers, grouped sigmoid router, MXFP4 experts, FP8 dense weights, one NEXTN layer).

**It is not a model of Ant Group or inclusionAI**, contains nothing of theirs, and is no smaller
version of Ling. It was trained from random numbers on texts written by a generator of this repository.

## What it can do
Small word problems with one to three steps (numbers below 10,000), answered with short reasoning and
`#### N`, with thinking on or off; repeating text; counting; calls of five tools in Ling's XML form;
a few greetings and stories made of building blocks. It knows about 700 words. It knows nothing about
the world, must not be asked for advice, and its arithmetic is sometimes wrong: that is intended.

## How it was made
`scripts/train_sparklet.py`; the weights follow from these settings and the code.

| setting | value |
|---|---|
{rows}

## Measured (problems never trained on)
| figure | value |
|---|---|
{figures}

## Licence
MIT, like the repository.
"""
