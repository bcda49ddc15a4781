"""What the plugin says when it stops the server becomes the diagnosis, word for word."""

from __future__ import annotations

import pytest
from sparkling import crash, log

SAID = [
    (
        "sparkling_sglang: error: The FP8 LM head (SPARKLING_FP8_LM_HEAD) and "
        "--enable-fp32-lm-head contradict each other: drop one of them.",
        "The FP8 LM head (SPARKLING_FP8_LM_HEAD) and --enable-fp32-lm-head contradict each other",
        "drop one of them",
    ),
    (
        "sparkling_sglang.fp8_head.HeadError: The checkpoint ties lm_head to the word embeddings, "
        "which need BF16: start without SPARKLING_FP8_LM_HEAD.",
        "The checkpoint ties lm_head to the word embeddings, which need BF16",
        "start without SPARKLING_FP8_LM_HEAD",
    ),
    (
        "sparkling_sglang.share_head.DraftHeadError: The NEXTN draft's lm_head is not the "
        "target's: it lacks the scales of the quantized weight, so its drafts would not be "
        "accepted: leave SPARKLING_SHARE_HEAD unset or at 1, or start without NEXTN.",
        "The NEXTN draft's lm_head is not the target's: it lacks the scales of the quantized "
        "weight, so its drafts would not be accepted",
        "leave SPARKLING_SHARE_HEAD unset or at 1, or start without NEXTN",
    ),
    (
        "sparkling_sglang.clamp.ClampError: SwiGLU limits are not the checkpoint's: layers 35 to "
        "41 want 4 for the routed experts and deep_gemm applies none: start with "
        "--moe-runner-backend humming, marlin or flashinfer_mxfp4.",
        "SwiGLU limits are not the checkpoint's: layers 35 to 41 want 4 for the routed experts and "
        "deep_gemm applies none",
        "start with --moe-runner-backend humming, marlin or flashinfer_mxfp4",
    ),
]


@pytest.mark.parametrize(("line", "cause", "remedy"), SAID)
def test_a_refusal_is_the_diagnosis(line, cause, remedy):
    # SGLang's own advice follows the traceback; it must not win.
    lines = ["Traceback (most recent call last):", "  raise HeadError(reason)", line]
    found = crash.diagnose([*lines, "RuntimeError: Rank 0 scheduler died during initialization"])
    assert (found.kind, found.cause, found.remedy) == ("plugin-refused", cause, remedy)
    event = log.parse_line(line)
    assert isinstance(event, log.Crash) and event.reason == cause and event.remedy == remedy
