"""What was recorded of the FP8 head's kernel on an H200 (``scripts/bench_head.py``)."""

from __future__ import annotations

import json

import pytest

BYTES = 157_184 * 2_560


@pytest.fixture(scope="module")
def record(root):
    """What ``scripts/bench_head.py`` wrote on an H200."""
    return json.loads((root / "tests/data/h200/lm-head.json").read_text(encoding="utf-8"))


def timed(record, name, tokens, part="plain"):
    found = [p for p in record[part]["products"] if (p["name"], p["tokens"]) == (name, tokens)]
    return min(found, key=lambda product: product["us"])


def test_the_record_was_made_by_the_command_on_cold_weights(record):
    for part in (record["plain"], record["humming"]):
        assert part["device"] == "NVIDIA H200" and "bench_head.py" in part["command"]
        assert (part["rows"], part["hidden"], part["copies"]) == (157_184, 2_560, 4)
        assert part["versions"]["torch"] and not part["failures"]
        for product in part["products"]:
            assert product["n"] == 30 and product["us_min"] <= product["us"] <= product["us_max"]
            rate = product["bytes"] / product["us"] / 1e3
            assert product["gb_per_s"] == pytest.approx(rate, rel=1e-3)
            assert product["of_read"] == pytest.approx(rate / part["read_gb_per_s"], rel=1e-3)
        # The yardstick is the fastest of all reads, the long ones among them.
        reads = [p["gb_per_s"] for p in part["products"] if p["name"].startswith("read ")]
        assert part["read_gb_per_s"] == max(reads) and len(reads) == 8


def test_the_record_shows_nine_tenths_of_the_read_bandwidth_for_1_to_4_tokens(record):
    for tokens in (1, 2, 3, 4, 8, 16):
        ours = timed(record, "sparkling", tokens)
        assert ours["bytes"] == BYTES + 4 * 157_184 and ours["beyond_one_step"] == 0
        assert "replay_differs" not in ours
        assert ours["of_read"] >= (0.9 if tokens <= 4 else 0.82)
        others = [
            timed(record, "bf16 cublas", tokens),
            timed(record, "torch._scaled_mm", tokens),
            timed(record, "humming", tokens, "humming"),
            timed(record, "humming tuned", tokens, "humming"),
        ]
        if tokens in (1, 4):
            others += [timed(record, f"triton {kind}", tokens) for kind in ("gemv", "dot")]
        # Clearly: its slowest replay is faster than the others' fastest; the medians, by a tenth.
        assert all(ours["us_max"] < other["us_min"] for other in others)
        assert all(ours["us"] <= 0.91 * other["us"] for other in others)
    bf16 = timed(record, "bf16 cublas", 1)
    saved = bf16["us"] - timed(record, "sparkling", 1)["us"]
    assert saved >= 0.8 * bf16["us"] / 2  # half of the bytes


def test_the_record_shows_the_choice_and_many_tokens(record):
    first, *later = record["plain"]["quantized"]
    assert first["kernel"] == "sparkling-cuda" and first["details"]["kernel_from"] == "trial"
    assert {r["details"]["kernel_from"] for r in later} == {"cache"}
    assert (first["bytes_before"], first["bytes_after"]) == (2 * BYTES, BYTES + 4 * 157_184)
    for tokens in (17, 64, 512):  # then all by torch's product, a chunk of rows at a time
        assert timed(record, "sparkling", tokens)["beyond_one_step"] == 0


def test_the_readme_quotes_the_record(record, root):
    text = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    few = [timed(record, "sparkling", tokens) for tokens in (1, 2, 3, 4)]
    one = few[0]
    low, high = (round(100 * f(p["of_read"] for p in few)) for f in (min, max))
    share = f"{low} %" if low == high else f"{low} to {high} %"
    humming = min(timed(record, n, 1, "humming")["us"] for n in ("humming", "humming tuned"))
    quotes = (
        f"{one['us']:.0f} µs for one token (n = {one['n']}, {one['us_min']:.1f} to "
        f"{one['us_max']:.1f})",
        f"{share} of the ",
        f" for 1 to 4 and {100 * timed(record, 'sparkling', 16)['of_read']:.0f} % for 16",
        f"BF16 through cuBLAS {timed(record, 'bf16 cublas', 1)['us']:.0f}",
        f"Humming's dense kernel {humming:.0f}",
        f"512 tokens: {timed(record, 'bf16 cublas', 512)['us']:.0f} µs against "
        f"{timed(record, 'sparkling', 512)['us']:,.0f} µs",
        f"({record['plain']['quantized'][0]['details']['kernel_seconds']:.0f} s on an H200)",
    )
    assert [quote for quote in quotes if quote not in text] == []
