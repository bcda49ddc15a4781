"""The reports to SGLang say of the installed SGLang what is so: their files, names and lines of code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

REPORTS = Path(__file__).resolve().parents[2] / "docs" / "upstream"
SRT = Path(importlib.util.find_spec("sglang").origin).parent / "srt"


def text(name: str) -> str:
    return (REPORTS / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["swiglu-clamp", "draft-lm-head"])
def test_a_report_is_whole_and_its_files_exist(name):
    report = text(name)
    for heading in ("Title", "What happens", "Reproduction", "Proposed change", "Versions"):
        assert re.search(rf"^## {heading}", report, re.MULTILINE), heading
    assert re.search(r"^## Expected and actual, in numbers", report, re.MULTILINE)
    assert "{" not in re.sub(r"```.*?```", "", report, flags=re.DOTALL)  # nothing left to fill in
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", report))
    ours = {one for one in named if one.startswith(("lib/", "scripts/", "tests/"))}
    assert all((REPORTS.parents[1] / one).is_file() for one in ours), ours
    for one in named - ours:
        found = [path for path in SRT.rglob(Path(one).name) if str(path).endswith("/" + one)]
        assert found, one


def test_the_limit_reproduction_shows_what_it_says(engine_context):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: F401  (import order)

    block = re.search(r"```python\n(.*?)```", text("swiglu-clamp"), re.DOTALL)[1]
    said: list[object] = []
    exec(block, {"print": said.append})
    assert said == [None]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("models/bailing_moe_v3.py", "gemm1_clamp_limit=self.expert_swiglu_limit"),
        ("layers/moe/moe_runner/humming.py", "self.swiglu_limit = config.swiglu_limit"),
        ("layers/moe/moe_runner/triton_utils/fused_moe.py", "_swiglu_silu_clamp_mul("),
        ("layers/quantization/mxfp4_flashinfer_cutlass_moe.py", "_use_swiglu_step"),
        ("models/bailing_moe_nextn.py", '"layer_id": 0'),
        ("models/qwen3_5_mtp.py", "def set_lm_head_from_target"),
        ("models/nemotron_h_mtp.py", "def set_lm_head_from_target"),
        ("speculative/eagle_worker_v2.py", 'hasattr(self.draft_runner.model, "set_lm_head_fr'),
        ("layers/logits_processor.py", "hidden_states.to(lm_head.weight.dtype), lm_head.weight.T"),
        ("model_executor/runner_backend_utils/__init__.py", "1. set --mem-fraction-static to a"),
        ("speculative/eagle_draft_cuda_graph_runner.py", "{CUDA_GRAPH_CAPTURE_FAILED_MSG}"),
    ],
)
def test_what_the_reports_quote_stands_there(file, words):
    assert words in (SRT / file).read_text("utf-8")


def test_the_draft_still_lacks_what_the_report_asks_for():
    assert "set_lm_head_from_target" not in (SRT / "models/bailing_moe_nextn.py").read_text("utf-8")
