"""Sparklet's tests need torch; they run with the server environment's Python and skip elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lib"))

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small():
    """A Config of the smallest legal widths, for speed."""
    from sparklet.config import Config

    return Config(
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=1,
        kv_lora_rank=128,
        num_experts=8,
        n_group=2,
        topk_group=1,
    )


@pytest.fixture(scope="session")
def tok():
    from sparklet.batches import shared_tokenizer

    return shared_tokenizer()
