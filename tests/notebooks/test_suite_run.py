"""The whole suite on the cpu lane, once, as a user runs it; every test here looks at that one run.

What a user's run asks twice (`repeats`) is asked once here: answers do not depend on it, the width of
intervals does, and the suite is the longest part of the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading

import psutil
import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(2400)]
NOTEBOOKS = (
    "00_start_here",
    "10_environment",
    "20_weights",
    "30_kernels",
    "40_baseline",
    "50_humming",
    "60_fp8_lm_head",
    "70_nextn",
    "80_live_evaluation",
    "90_serve",
    "appendix_cost_model",
    "appendix_kernel_shapes",
    "appendix_swiglu_clamp",
)
STARTED = ("00_start_here", "40_baseline", "60_fp8_lm_head", "70_nextn", "90_serve")
KEY = re.compile(rb"sk-[0-9a-f]{48}")


class Memory(threading.Thread):
    """The largest memory of the kernels and of the servers below a process, in bytes (PSS)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.over = psutil.Process(pid), threading.Event()
        self.kernel = self.server = 0

    def run(self) -> None:
        while not self.over.wait(3.0):
            kernel = server = 0
            try:
                below = self.root.children(recursive=True)
            except psutil.NoSuchProcess:
                return
            for process in below:
                try:
                    words = " ".join(process.cmdline())
                    size = process.memory_full_info().pss
                except psutil.Error:
                    continue
                if "ipykernel" in words:
                    kernel = max(kernel, size)
                elif "sglang" in words:
                    server += size
            self.kernel, self.server = max(self.kernel, kernel), max(self.server, server)


class Done:
    """A finished run of the suite."""

    def __init__(self, code, said, folder, memory) -> None:
        self.code, self.said, self.dir, self.memory = code, said, folder, memory
        self.timings = json.loads((folder / "timings.json").read_text())

    def notebook(self, name):
        return json.loads((self.dir / "notebooks" / f"{name}.ipynb").read_text())

    def text(self, name) -> str:
        """All text that the notebook's cells show."""
        parts = []
        for cell in self.notebook(name)["cells"]:
            for output in cell.get("outputs", ()):
                parts += output.get("text", ())
                parts += output.get("data", {}).get("text/plain", ())
                parts.append("\n")
        return "".join(parts)


@pytest.fixture(scope="module")
def done(root, tmp_path_factory):
    runs = tmp_path_factory.mktemp("suite") / "runs"
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkling.cli", "suite", "--lane", "cpu", "-p", "repeats=1"],
        env=os.environ | {"SPARKLING_RUNS": str(runs)},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    memory = Memory(process.pid)
    memory.start()
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        print(line, end="")
    code = process.wait()
    memory.over.set()
    memory.join()
    (folder,) = [p.parent for p in runs.glob("*/timings.json")]
    return Done(code, "".join(said), folder, memory)


def test_the_exit_code_is_the_truth(done):
    verdicts = {n["name"]: n["verdict"] for n in done.timings["notebooks"]}
    assert verdicts == dict.fromkeys(NOTEBOOKS, "ok"), done.said[-3000:]
    assert done.code == 0
    assert done.timings["leaks"] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_ran_to_its_end(done, name):
    cells = [c for c in done.notebook(name)["cells"] if c["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    shown = done.text(name)
    for word in ("You will have", "Minutes", "Needs", "Risks", "Undo", "Proved here"):
        assert word in shown
    assert ("Next" in shown) or name.startswith("appendix")
    assert "Traceback" not in shown and "object at 0x" not in shown


@pytest.mark.parametrize("name", STARTED)
def test_a_server_was_started_and_stopped(done, name):
    shown = done.text(name)
    assert "is ready at http://127.0.0.1:" in shown
    assert "The server is stopped, its port free and its memory back." in shown


def test_the_weights_are_verified_and_broken_ones_found(done):
    shown = done.text("20_weights")
    assert re.search(r"content +✓ +9 hashed now", shown) and "517 tensors" in shown
    assert "is short by 1 byte:" in shown and "not compared with a checksum" in shown
    assert "right form but not the right content" in shown


def test_the_baseline_is_proved_off_and_measured(done):
    shown = done.text("40_baseline")
    assert "Stage baseline: proved" in shown
    proof = json.loads((done.dir / "40_baseline" / "proof-baseline.json").read_text())
    assert {v["switch"]: v["state"] for v in proof["verdicts"]} == {
        "humming": "off",
        "fp8-head": "off",
        "nextn": "off",
    }
    rows = [json.loads(r) for r in (done.dir / "40_baseline/rows.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row.get("arm") == "baseline"]
    assert {row["workload"] for row in measured} == {"short-turn", "long-answer"}
    assert all(row["complete"] for row in measured)
    assert len(measured) == 12 == len({(row["workload"], row["prompt"]) for row in measured})


def test_humming_is_shown_by_a_recording_and_says_so(done):
    shown = done.text("50_humming")
    assert "Nothing is started: Humming's kernels are compiled for NVIDIA GPUs" in shown
    assert "RECORDING — not this machine" in shown
    assert "--moe-runner-backend" in shown and "flashinfer_mxfp4" in shown
    assert "nothing was started, so nothing was proved" in shown
    assert not list((done.dir / "50_humming").glob("proof-*.json"))


def test_the_fp8_head_is_live(done):
    shown = done.text("60_fp8_lm_head")
    assert "fp8-head  on        ✓ live" in shown
    assert "float8_e4m3fn" in shown
    assert "FP8 heads against the BF16 head" in shown and "block-128" in shown


def test_the_draft_contributes(done):
    shown = done.text("70_nextn")
    assert "nextn     on        ✓ live" in shown
    assert "addmm_cuda" in shown and "without its scales and method" in " ".join(shown.split())
    rows = [json.loads(r) for r in (done.dir / "70_nextn/rows.jsonl").read_text().splitlines()]
    by_text = {}
    for row in rows:
        if row.get("arm") in ("nextn", "nextn-trap") and row["spec"]:
            key = (row["arm"], row["workload"])
            tokens, rounds = by_text.get(key, (0, 0))
            spec = row["spec"]
            by_text[key] = (tokens + spec["tokens"], rounds + spec["rounds"])
    lengths = {key: tokens / rounds for key, (tokens, rounds) in by_text.items()}
    trap = lengths.pop(("nextn-trap", "short-turn"))
    lengths = {workload: length for (_, workload), length in lengths.items()}
    assert set(lengths) == {"short-turn", "long-answer", "repeated-text"}
    assert all(2.2 < length <= 4 for length in lengths.values()), lengths
    assert lengths["repeated-text"] > 3.5 and lengths["repeated-text"] > lengths["long-answer"]
    assert 1.0 <= trap < 1.2
    assert "verification cost" in shown and "This run has no prompt" not in shown


def test_the_trap_is_shown_as_a_measured_arm_and_found_by_its_proof(done):
    shown = done.text("70_nextn")
    assert "nextn     on        ✗ not live  the draft contributes nothing" in shown
    assert "SPARKLING_TRAP=tensor-only" in shown and "Stage nextn-trap: not proved" in shown
    ladder = shown[shown.index("Decode rate by stage") :]
    found = re.findall(r"^(baseline|fp8-head|nextn|nextn-trap) +\d", ladder, re.MULTILINE)
    assert found == ["baseline", "fp8-head", "nextn", "nextn-trap"]
    (log,) = (done.dir / "70_nextn" / "logs").glob("nextn-trap-*.log")
    assert "BROKEN ON PURPOSE" in log.read_text(errors="replace")


def test_the_evaluation_is_paired_and_proved_before_and_after(done):
    shown = done.text("80_live_evaluation")
    files = {arm: done.dir / arm / "sparklet.jsonl" for arm in ("baseline", "nextn")}
    rows = {
        arm: {r["id"]: r for r in map(json.loads, file.read_text().splitlines())}
        for arm, file in files.items()
    }
    assert rows["baseline"].keys() == rows["nextn"].keys() and len(rows["nextn"]) == 24
    for name, one in rows["baseline"].items():
        other = rows["nextn"][name]
        assert (one["prompt_hash"], one["gold"]) == (other["prompt_hash"], other["gold"])
        assert one["spec"] is None and other["spec"]["rounds"] > 0
    assert sum(r["correct"] for r in rows["baseline"].values()) >= 12
    for arm in rows:
        for name in (f"proof-{arm}", f"proof-{arm}-after"):
            assert json.loads((done.dir / "80_live_evaluation" / f"{name}.json").read_text())["ok"]
    for said in (
        "McNemar, exact, two-sided",
        "PUBLISHED, not measured here",
        "only a loss above about 0.85 points is excluded",
    ):
        assert said in shown


def test_the_ladder_is_a_picture(done):
    cells = done.notebook("80_live_evaluation")["cells"]
    pictures = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {}) and "text/html" not in output["data"]
    ]
    assert len(pictures) == 2 and min(map(len, pictures)) > 10_000
    report = (done.dir / "report.html").read_text()
    assert "data:image/png;base64," in report
    for name in NOTEBOOKS:
        assert f'href="notebooks/{name}.ipynb"' in report
    assert not re.search(
        r"""(src|href)=["'](https?:)?//""", report
    )  # nothing loaded from elsewhere


def test_serving_does_its_whole_work(done):
    shown = done.text("90_serve")
    assert "refused: 401" in shown
    assert re.search(r"thinks:  .*12 \+ 7 = 19", shown) and "#### 19" in shown
    assert 'tool_calls get_weather {"city": "Paris"}' in shown
    assert "the function is called with Paris" in shown
    assert "It is sunny in Paris, 21 degrees." in shown
    assert re.search(r"(\d+) tokens in (\d+) pieces", shown)
    assert "gone: Connect" in shown


def test_no_key_was_written_anywhere(done):
    found = [
        str(path)
        for path in done.dir.parent.rglob("*")
        if path.is_file() and KEY.search(path.read_bytes())
    ]
    assert found == []


def test_memory_stays_within_its_bounds(done):
    assert 50e6 < done.memory.kernel < 400e6, done.memory.kernel
    assert 500e6 < done.memory.server < 4e9, done.memory.server


def test_the_final_table_and_the_report_are_named(done):
    assert "notebook" in done.said and "verdict" in done.said
    assert done.said.rstrip().endswith(str(done.dir / "report.html"))
    for name in NOTEBOOKS:
        assert re.search(rf"^{name} +\d+\.\d +ok$", done.said, re.MULTILINE)


def test_the_time_of_each_notebook_is_on_record(done):
    seconds = {n["name"]: n["seconds"] for n in done.timings["notebooks"]}
    assert all(value > 0 for value in seconds.values())
    whole = done.timings["seconds"]
    assert sum(seconds.values()) <= whole + 1
    print(f"suite: {whole:.0f} s", {k: round(v) for k, v in seconds.items()})
