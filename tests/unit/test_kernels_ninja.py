"""The memory gate on real ninja builds: small for its mechanics, real C++ for the compilers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sparkling import kernels_ninja as kn
from sparkling import procs, toolpath
from sparkling.errors import SparklingError, UsageError

GIB = 2**30
MIB = 2**20

NINJA = toolpath.tools(Path(sys.executable), names=("ninja",))["ninja"].path
pytestmark = pytest.mark.skipif(NINJA is None, reason="ninja is not installed (pip install ninja)")

JOB = """
import sys, time, os
out, seconds, mib = sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
held = bytearray(b"x" * (mib << 20))
open(out, "w").write("half")
open("started", "a").write(os.path.basename(out) + "\\n")
number, limit = len(open("started").readlines()), time.monotonic() + 60

def waits():
    try:
        return number > int(open("hold").read()) and time.monotonic() < limit
    except FileNotFoundError:
        return False

while waits():
    time.sleep(0.02)
time.sleep(seconds)
open(out, "w").write("whole")
"""


def plan(
    folder: Path, count: int = 6, seconds: float = 0.4, mib: int = 1, hold: int | None = None
) -> Path:
    """A build of `count` jobs that hold memory for a while. All but the first `hold` of them wait
    until their test has seen what it looks for: `let_go`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.py").write_text(JOB)
    if hold is not None:
        (folder / "hold").write_text(str(hold))
    lines = [f"rule job\n  command = {sys.executable} -S job.py -o $out {seconds} {mib}"]
    lines += [f"build {folder}/{i}.o: job" for i in range(count)]
    lines.append("build all: phony " + " ".join(f"{folder}/{i}.o" for i in range(count)))
    # Phony is no target that is built.
    (folder / "build.ninja").write_text("\n".join(lines[:-1]) + "\n")
    return folder / "build.ninja"


def let_go(file: Path) -> None:
    (file.parent / "hold").unlink(missing_ok=True)


class Meter:
    """Available memory as a test says it."""

    def __init__(self, gib: float) -> None:
        self.gib = gib

    def __call__(self) -> int:
        return int(self.gib * GIB)


def run(file: Path, meter: Callable[[], int], cores: int = 4, **more: object) -> kn.Result:
    gate = kn.Gate(meter, cores, keep=more.pop("keep", 16 * GIB), each=more.pop("each", 8 * GIB))
    env = {"PATH": os.environ["PATH"], **more.pop("env", {})}
    return kn.build(file.parent, file, ninja=NINJA, env=env, gate=gate, **more)


def started(file: Path) -> list[str]:
    return (file.parent / "started").read_text().split()


def test_it_builds_what_is_missing_with_progress_and_no_more(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 5, 0.3)
    ticks: list[kn.Tick] = []
    result = run(file, Meter(48), progress=ticks.append)
    assert (result.done, result.total, result.jobs, result.complete) == (5, 5, 4, True)
    assert ticks[-1].done == 5 and {tick.state for tick in ticks} == {"building"}
    assert all(0 <= tick.done <= tick.total and tick.running <= 4 for tick in ticks)
    assert len(started(file)) == 5
    again = run(file, Meter(48))
    assert again.complete and len(started(file)) == 5
    (tmp_path / "b" / "3.o").unlink()
    assert kn.pending(file.parent, file, ninja=NINJA, env=os.environ) == 1
    assert run(file, Meter(48)).complete and len(started(file)) == 6


def test_looking_does_not_harm_the_log_of_another_ninja(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 2, 0.0)
    run(file, Meter(48))
    log = file.parent / kn.LOG
    # Too old for any ninja of today, as 1.11's is for 1.13.
    old = "# ninja log v3\n" + log.read_text().split("\n", 1)[1]
    log.write_text(old)
    assert kn.pending(file.parent, file, ninja=NINJA, env=os.environ) == 2
    assert log.read_text() == old


def test_the_jobs_are_what_memory_allows_and_the_user_wishes(tmp_path: Path) -> None:
    def most(name: str, meter: Meter, wanted: int, **env: str) -> int:
        ticks: list[kn.Tick] = []
        file = plan(tmp_path / name, 4, 0.1, hold=0)

        def progress(tick: kn.Tick) -> None:
            ticks.append(tick)
            # At the second look one too many would run, too.
            if sum(one.running >= wanted for one in ticks) >= 2:
                let_go(file)

        result = run(file, meter, env=env, progress=progress)
        assert result.jobs == max(tick.jobs for tick in ticks)
        return max(tick.running for tick in ticks)

    assert most("one", Meter(24), 1) == 1
    assert most("asked", Meter(200), 2, MAX_JOBS="2") == 2
    file = plan(tmp_path / "none")
    with pytest.raises(SparklingError, match=r"Nothing is compiled: 3\.0 GiB"):
        run(file, Meter(3))
    for bad in ("0", " 4", "auto"):
        with pytest.raises(UsageError, match="MAX_JOBS"):
            run(file, Meter(200), env={"MAX_JOBS": bad})
    assert not (file.parent / "started").exists()


def test_below_what_is_kept_back_nothing_new_starts(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 8, 0.1, hold=0)
    meter, seen = Meter(200), []

    def progress(tick: kn.Tick) -> None:
        seen.append(tick)
        if tick.state == "building" and meter.gib == 200:
            meter.gib = 12
        elif tick.state == "throttled":
            let_go(file)
            meter.gib = 200

    result = run(file, meter, progress=progress)
    assert result.complete and result.throttled >= 1 and result.ended == 0
    assert "throttled" in {tick.state for tick in seen}
    assert result.lowest == 12 * GIB


def test_below_half_of_it_only_the_oldest_job_goes_on(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 3, 0.1, hold=0)
    meter, states = Meter(200), []

    def as_wanted(ninja: str, jobs: list[str]) -> bool:
        return ninja == "T" and jobs.count("T") == 2 and len(jobs) == 3

    def progress(tick: kn.Tick) -> None:
        me = os.getpid()
        ninjas = [one for one in procs.descendants(me) if one.name == "ninja"]
        jobs = [one for one in procs.descendants(me) if ninjas and one.ppid == ninjas[0].pid]
        states.append([ninjas[0].state if ninjas else "", sorted(one.state for one in jobs)])
        if as_wanted(*states[-1]):
            let_go(file)
        if tick.running == 3 and meter.gib == 200:
            meter.gib = 7
        elif tick.running == 1:
            meter.gib = 200

    result = run(file, meter, progress=progress)
    assert result.complete and result.ended == 0
    # ninja stopped, two compilers stopped, one not: at some look it was so.
    assert any(as_wanted(*one) for one in states), states


def test_before_memory_is_gone_the_build_is_ended_and_goes_on_later(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 4, 0.1, hold=1)
    meter, states = Meter(24), []

    def progress(tick: kn.Tick) -> None:
        states.append(tick.state)
        if "waiting for memory" not in states:
            if tick.done == 1 and len(started(file)) == 2:  # the second one is in work
                meter.gib = 3
        elif tick.state == "waiting for memory":
            assert tick.running == 0
            # What was in work is not left behind half-written.
            assert [one for one in file.parent.glob("*.o") if one.read_text() != "whole"] == []
            let_go(file)
            meter.gib = 200

    result = run(file, meter, progress=progress)
    assert result.complete and result.ended == 1 and "waiting for memory" in states
    assert result.jobs == 4  # counted anew
    names = started(file)
    assert len(names) == 5 and len(set(names)) == 4  # one of them twice, the finished one not
    assert {one.read_text() for one in file.parent.glob("*.o")} == {"whole"}


def test_memory_that_does_not_come_back_is_a_sentence(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 2, 600)
    meter = Meter(24)

    def progress(tick: kn.Tick) -> None:
        meter.gib = 1

    with pytest.raises(SparklingError, match="Nothing is compiled"):
        run(file, meter, progress=progress, wait_s=0.3)
    assert not [one for one in procs.descendants(os.getpid()) if one.name == "ninja"]


def test_a_file_too_big_for_the_machine_is_not_tried_for_ever(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 1, 600)
    looks = iter(range(10_000))

    def meter() -> int:
        # Room for a job until one runs, and then none: whatever runs takes it all.
        me = os.getpid()
        running = [one for one in procs.descendants(me) if one.name == "ninja" and not one.dead]
        return (3 if running and next(looks) % 5 == 4 else 24) * GIB

    with pytest.raises(SparklingError, match=r"0\.o alone takes more memory .* ended twice"):
        run(file, meter, wait_s=20)


def test_a_file_that_does_not_compile_is_named(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 2, 0.1)
    text = file.read_text()
    file.write_text(
        text
        + "rule bad\n  command = echo 'x.cu:1: error: no such header' && false\n"
        + f"build {tmp_path}/b/bad.o: bad\n"
    )
    with pytest.raises(
        SparklingError, match=r"bad\.o does not compile: x\.cu:1: error: no such.* 2 of 3 are done"
    ):
        run(file, Meter(24))
    file.write_text("nonsense")
    with pytest.raises(SparklingError, match="ninja refuses"):
        run(file, Meter(24))


def test_interrupting_it_leaves_no_compiler(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 3, 600)
    before = {one.pid for one in procs.descendants(os.getpid())}  # other tests' own

    def left() -> list[procs.Stat]:
        below = procs.descendants(os.getpid())
        return [one for one in below if not one.dead and one.pid not in before]

    def progress(tick: kn.Tick) -> None:
        if tick.running:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(file, Meter(200), progress=progress)
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == []


def test_killing_whoever_builds_leaves_no_compiler(tmp_path: Path) -> None:
    file = plan(tmp_path / "b", 2, 600)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom sparkling import kernels_ninja as kn\n"
        "file = Path(sys.argv[1])\n"
        "gate = kn.Gate(lambda: 200 << 30, 2)\n"
        "kn.build(file.parent, file, ninja=sys.argv[2], env=dict(os.environ), gate=gate)\n"
    )
    mark = {"SPARKLING_TEST_MARK": str(time.time_ns())}
    builder = subprocess.Popen(
        [sys.executable, "-c", code, str(file), NINJA], env={**os.environ, **mark}
    )
    (name, value), deadline = next(iter(mark.items())), time.monotonic() + 60
    while len(procs.marked(name, value)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(procs.marked(name, value)) >= 4  # the builder, ninja, two jobs
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert procs.wait_gone(procs.marked(name, value), 60) == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_real_compilers_are_measured_and_gated(tmp_path: Path) -> None:
    """Heavy C++ files; the allowance is small, and shrinks while they compile."""
    source = (
        "#include <map>\n#include <regex>\n#include <string>\n"
        "int f(const std::string& s) { std::map<int, std::regex> m; m[1] = std::regex(s);\n"
        "  return std::regex_match(s, m[1]); }\n"
    )
    lines = ["rule cc\n  command = c++ -O1 -c $in -o $out"]
    for i in range(2):
        (tmp_path / f"{i}.cpp").write_text(source)
        lines.append(f"build {tmp_path}/{i}.o: cc {tmp_path}/{i}.cpp")
    file = tmp_path / "build.ninja"
    file.write_text("\n".join(lines) + "\n")
    meter = Meter(1.0)  # room for two of 256 MiB beside the 512 kept back
    result = run(file, meter, keep=512 * MIB, each=256 * MIB, cores=8)
    assert result.complete and result.jobs == 2
    assert len(result.targets) == 2
    for name, found in result.targets.items():
        assert Path(name).read_bytes()[:4] == b"\x7fELF"
        assert found["peak"] > 20 * MIB and found["seconds"] > 0
