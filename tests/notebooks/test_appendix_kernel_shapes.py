"""The appendix on kernels without a GPU: the H200's records, labelled as such, every figure with n."""

from __future__ import annotations

import json

from sparkling import lane, shapes, suite


def test_it_shows_the_records_and_says_that_they_are(root, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", str(tmp_path / "no" / "python"))
    said: list[str] = []
    # A lane with a GPU but no environment: refused there, shown from the record all the same.
    result = suite.run_suite(
        lane.detect("spark"), notebooks=["appendix_kernel_shapes"], progress=said.append
    )
    assert result.exit_code == 0, "\n".join(said)
    done = next((tmp_path / "runs").glob("*/notebooks/appendix_kernel_shapes.ipynb"))
    outputs = [
        output
        for cell in json.loads(done.read_text())["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]
    text = "\n".join("".join(o.get("data", {}).get("text/plain", "")) for o in outputs)
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 3
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
