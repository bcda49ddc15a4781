"""The appendix on kernels without a GPU: the H200's records, labelled as such, every figure with n."""

from __future__ import annotations

import json

from sparkling import clampcheck, devices, fullsize, shapes, shapes_round


def test_it_shows_the_records_and_says_that_they_are(shown):
    # A lane with a GPU but no environment: refused there, shown from the record all the same.
    text, pictures = shown("appendix_kernel_shapes", "spark")
    assert pictures == 3
    for words in (
        "There is no server environment",
        "Recorded on NVIDIA H200, not on this machine",
        "sparkling shapes --measure",
        "The cost model against these kernels",
        "The FP8 head against its bytes",
        "What of a round these kernels explain",
        "Humming and Marlin on NVIDIA H200",
    ):
        assert words in text
    assert "This record holds no measurement" not in text


def prose(root, name: str) -> str:
    cells = json.loads((root / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    return " ".join(" ".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def test_the_figures_in_its_prose_are_the_records(root):
    text = " ".join(prose(root, "appendix_kernel_shapes").split())
    record, full = shapes.recorded(), fullsize.recorded()
    one, marlin = record.expert_case(1), record.expert_case(1, backend="marlin")
    head = next(case for case in record.head if case.format == "BF16")
    for figure in (
        f"{head.bytes / 1e6:.0f} MB in BF16",
        f"{record.experts_of} experts, of which a token reads {record.top_k}",
        f"one reads {record.moved(one) / 1e6:.0f} MB",
        f"an H200 does in {record.least_us(one):.0f} µs",
        f"{devices.device('h200').bandwidth / 1e9:,.0f} GB/s, an earlier",
        "judged by " + " and ".join(f"{b / 1e9:,.0f}" for b in full.bandwidth.values()) + " GB/s",
    ):
        assert figure in text, figure
    assert round(record.limit / devices.device("spark").bandwidth) == 17
    assert "a seventeenth of that bandwidth" in text
    # "Tokens that share their experts are nearly free", "it was the faster one", "nearly all of it".
    shared = record.cost(record.expert_case(4, "repeated"))
    assert shared is not None and shared.high < 1.05
    assert marlin is not None and marlin.times.median < one.times.median
    assert not record.shown_right("marlin") and "did not show its output to be right" in text
    told = clampcheck.recorded(root).largest("marlin")
    assert told and all(output.errors["stock"][1] < shapes.ROUNDING for output in told)
    long = [a for a in shapes_round.accounts(record, full) if a.context == 32_768]
    assert long and all(a.rest > 0.9 * a.added for a in long)


def test_the_record_that_ships_is_whole_and_right():
    """What every figure of that page stands on: every case, against float32, captured in a graph."""
    record = shapes.recorded()
    # Its one failure is of the benchmark itself, corrected since: the remark says so.
    assert [one.split(":")[0] for one in record.missing] == ["marlin"]
    assert len(record.remarks) == 1 and record.remarks[0].startswith("marlin")
    formats = {(case.format, case.rows) for case in record.head}
    assert formats == {(f, m) for f in ("BF16", "FP32-out", "FP8") for m in (1, 2, 3, 4, 8)}
    for part in shapes.PARTS:
        for tokens in (1, 2, 3, 4, 8):
            for routing in shapes.ROUTINGS:
                case = record.expert_case(tokens, routing, part)
                assert case is not None and case.times.graph and case.times.n >= 20
                if routing == "repeated":
                    assert case.union == record.top_k
    assert all(case.times.graph and case.times.n >= 20 for case in record.head)
    assert record.expert_errors["humming"] < shapes.ROUNDING
    assert max(case.error for case in record.head if case.format == "FP8") < 0.05
    # Nothing reads faster than the limit, and no rate is impossible.
    assert all(0 < record.share(case) <= 1 for case in (*record.head, *record.experts))
