"""A checkpoint whose head cannot be FP8 is refused before a server is started on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from sparkling import headcheck, server
from sparkling.errors import UsageError
from sparkling.recipe import Launch


def checkpoint(folder: Path, config: object = None, head: np.ndarray | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({} if config is None else config))
    if head is not None:
        save_file({"lm_head.weight": head}, folder / "model-2.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"lm_head.weight": "model-2.safetensors"}})
        )
    return folder


def launch(folder: Path, *words: str, on: bool = True) -> Launch:
    switches = {"humming": True, "fp8-head": on, "nextn": False}
    argv = ("-m", "x", "--model-path", str(folder), *words)
    return Launch(argv, {}, "r", "fp8-head", None, switches, "m")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tie_word_embeddings": True}, "ties its LM head to the word embeddings"),
        ({"enable_lm_head_fp32": True}, "float32 LM head (enable_lm_head_fp32)"),
        ({"enable_lm_head_output_fp32": True}, "float32 LM head (enable_lm_head_output_fp32)"),
    ],
)
def test_a_configuration_that_forbids_it(tmp_path, config, said):
    made = checkpoint(tmp_path / "m", config)
    with pytest.raises(UsageError) as refused:
        headcheck.require(launch(made))
    text = str(refused.value)
    assert text.startswith(f"Stage fp8-head is not started: {made} ") and said in text
    assert text.endswith("without the FP8 head.") and "\n" not in text
    headcheck.require(launch(made, on=False))
    name = next(iter(config))
    headcheck.require(launch(made, "--json-model-override-args", json.dumps({name: False})))


def test_a_head_that_is_stored_quantized(tmp_path):
    codes = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    assert "stores its LM head as F8_E4M3" in headcheck.refusal(
        checkpoint(tmp_path / "a", head=codes)
    )
    plain = checkpoint(tmp_path / "b", head=codes.astype(ml_dtypes.bfloat16))
    assert headcheck.refusal(plain) is None


@pytest.mark.parametrize("config", [[], {"tie_word_embeddings": None}, {"tie_word_embeddings": 0}])
def test_what_cannot_be_read_forbids_nothing(tmp_path, config):
    assert headcheck.refusal(checkpoint(tmp_path / "m", config)) is None
    assert headcheck.refusal(tmp_path / "nowhere") is None
    (tmp_path / "m" / "config.json").write_text("{")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"no header")
    assert headcheck.refusal(tmp_path / "m") is None


def test_the_server_asks_before_it_starts(tmp_path):
    made = checkpoint(tmp_path / "m", {"tie_word_embeddings": True})
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho started > started\n")
    python.chmod(0o755)
    with pytest.raises(UsageError, match="ties its LM head"):
        server.start(launch(made), python=python, log=tmp_path / "x.log")
    assert not (tmp_path / "x.log").exists()
    named = replace(launch(made), argv=("-m", "x", "--model-path", "owner/name"))
    headcheck.require(named)
