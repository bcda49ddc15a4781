"""What the notebook on kernels shows: building with live progress, and a rehearsal on real C++."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import (
    fullsize,
    kernels,
    kernels_measured,
    kernels_ninja,
    kernels_probe,
    machine,
    show,
    toolpath,
)
from sparkling.kernels_ninja import Gate, Tick

if TYPE_CHECKING:
    from sparkling.lane import Lane

GIB, MIB = 2**30, 2**20

FILES = 4
SPARK_JOBS = 12  # what the rule gives for 115 GiB and 20 cores
_SOURCE = """
#include <algorithm>
#include <map>
#include <string>
#include <vector>
template <int N> int f(std::map<int, std::string>& m) {
  std::vector<int> v(N); std::sort(v.begin(), v.end()); m[N] = std::to_string(v[0]);
  return f<N - 1>(m) + static_cast<int>(m.size());
}
template <> int f<0>(std::map<int, std::string>& m) { return static_cast<int>(m.size()); }
int run(std::map<int, std::string>& m) { return f<24>(m); }
"""


def build(lane: Lane, stage: str = "baseline") -> show.View:
    """Compile the CUTLASS experts if they are missing here; says why not where nothing applies."""
    launch = kernels.stage_launch(lane, stage)
    seen = kernels.capability(lane)
    if launch.value("device") == "cpu" or seen is None or not seen.startswith("12."):
        return show.note(
            "Nothing is compiled here: FlashInfer's CUTLASS MXFP4 experts are for GPUs of compute "
            f"capability 12.x. On a Spark this cell does what `{kernels.COMMAND}` does."
        )
    with show.Live("Compiling the CUTLASS experts") as live:
        report = kernels.build(lane, stage, progress=lambda tick: live.update(note=told(tick)))
        live.end(report.proof.how)
    return show.note(f"{report.proof.path}: {report.proof.how}.")


def warm(lane: Lane, stage: str) -> show.View:
    """Start a stage twice with a few layers; where nothing is compiled, what would be done."""
    launch = kernels.stage_launch(lane, stage)
    command = f"sparkling kernels warm {stage}"
    if lane.kind == "cpu" or launch.value("device") == "cpu":
        return show.note(
            f"Nothing is warmed up here: Humming and Triton compile for a GPU. There, `{command}` starts "
            "the stage twice with a few layers and says what the first start took more."
        )
    with show.Live(f"Warming up {stage}") as live:
        found = kernels_probe.warm(
            launch,
            lane,
            lane.cache / "kernel-probe",
            progress=lambda phase, _seconds: live.update(note=phase),
        )
        live.end(f"{found.first_s:.0f} s, then {found.again_s:.0f} s")
    rows = [("first start", found.first_s), ("next start", found.again_s)]
    return show.table(rows, ["", "seconds until ready (n=1)"], caption=f"{found}.")


def recorded_starts() -> show.View:
    """First start against next ones with the full-size model, as it was recorded on an H200."""
    record = fullsize.recorded()
    arms = [one for one in record.arms.values() if one.facts.get("start")]
    arms.sort(key=lambda one: one.facts["date"])
    first = {_experts(one): one for one in reversed(arms)}
    rows = []
    for one in arms:
        made = one.facts.get("humming") or {}
        rows.append(
            {
                "server, in the order in which they were done": one.name,
                "GPU": one.gpu,
                "its kernels": "none yet" if first[_experts(one)] is one else "compiled before",
                "Humming kernels compiled": made.get("compiled"),
                "imports, s": one.facts["start"]["import_s"],
                "then until ready, s": one.facts["start"]["load_to_ready_s"],
            }
        )
    return show.table(
        rows,
        caption=f"Recorded on an {record.device.upper()} with dummy weights, n=1 each, named by experts, "
        "head and drafts (stock: with none of our switches; clamp-off: without the SwiGLU limit; trap: the "
        "draft without the head's scales; swap: Humming on Marlin's GPU); one server at a time on each of two "
        "GPUs, so two started at once. n/a: Marlin's servers ask nothing of Humming, and stock's do not count. "
        "NEXTN's first has kernels of its own to compile (inferred from its time). Marlin compiled its "
        "MXFP4 kernels alone; all of them took more than 330 s in an earlier recording. Not a "
        "Spark.",
    )


def _experts(arm: fullsize.Arm) -> str:
    """Whose experts a recorded server ran: every arm but Marlin's has Humming's."""
    return "marlin" if arm.name.startswith("marlin") else "humming"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def told(tick: Tick) -> str:
    """A build's progress as one line."""
    left = "" if tick.left_s is None else f", about {max(1, round(tick.left_s / 60))} min left"
    return (
        f"{tick.done} of {tick.total}, {tick.state}, {tick.running} running, "
        f"{tick.available / GIB:.1f} GiB available{left}"
    )


def measured() -> show.View:
    """What compiling these targets took, as far as anybody here measured it."""
    facts = kernels_measured.facts()
    total = kernels_measured.total_s()
    whole = "" if total is None else f" All of them: about {total / 60:.0f} CPU minutes."
    at_once = kernels_measured.at_once(SPARK_JOBS) / GIB
    whole += f" The {SPARK_JOBS} largest at once: about {at_once:.0f} GiB."
    view = show.table(
        kernels_measured.rows(),
        caption=f"{facts['measured']} of {facts['of']} targets, in a random order, one at a time; "
        f"{facts['machine']}; nvcc {facts['nvcc']}, for sm_121a. Not a Spark.{whole}"
        f"{_library(facts.get('library'))}",
    )
    together = kernels_measured.together()
    return view if together is None else view + _together(together)


def _library(made: dict[str, Any] | None) -> str:
    """The library that came of it, as sentences."""
    if made is None:
        return ""
    codes = ", ".join(f"{count} for {arch}" for arch, count in made["gpu_codes"].items())
    return (
        f" Linked, they are {made['bytes'] / 1e6:.1f} MB with {sum(made['gpu_codes'].values())} parts "
        f"of GPU code ({codes}); loaded {made['loaded']}."
    )


def _together(record: dict[str, Any]) -> show.View:
    """Many at once, on another machine."""
    caption = (
        f"{record['measured']} of {record['asked']} targets that were asked for, {record['jobs']} at "
        f"once for {record['seconds'] / 60:.1f} minutes (n=1), the rest not ready then; "
        f"{record['machine']}; nvcc {record['nvcc']}, for sm_121a. "
        f"{record['peak_bytes_together'] / GIB:.0f} GiB in all compilers together at most. Not a Spark."
    )
    found = kernels_measured.families(measured=record["rows"])
    return show.table(
        kernels_measured.rows(found), title="Many at once, on a larger machine", caption=caption
    )


def rehearse(folder: Path) -> show.View:
    """The gate at work on real C++: memory shrinks while it compiles, and comes back.

    The files are small and so is the allowance (it is stated, not taken from this machine); the
    compilers, the signals and the resumed build are real.
    """
    tools = toolpath.tools(Path(sys.executable), names=("ninja", "c++"))
    missing = [name for name, tool in tools.items() if tool.path is None]
    if missing:
        return show.note(
            f"No rehearsal: {' and '.join(missing)} not found. `pip install ninja` and a C++ compiler "
            "would do; nothing later needs them on the cpu lane."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = [f"rule cc\n  command = {tools['c++'].path} -O2 -c $in -o $out"]
    for i in range(FILES):
        (folder / f"{i}.cpp").write_text(_SOURCE)
        lines.append(f"build {i}.o: cc {i}.cpp")  # a folder's name may hold what ninja reads
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    seen: list[Tick] = []
    stated = _stated(seen)
    gate = Gate(lambda: next(stated), max(2, machine.cpus()), keep=512 * MIB, each=256 * MIB)
    env = {"PATH": toolpath.search_path(Path(sys.executable))}
    result = kernels_ninja.build(
        folder,
        folder / "build.ninja",
        ninja=str(tools["ninja"].path),
        env=env,
        gate=gate,
        progress=seen.append,
    )
    rows: list[dict[str, Any]] = [
        {
            "file": Path(name).name,
            "seconds": entry["seconds"],
            "MiB at most": entry["peak"] / MIB,
        }
        for name, entry in sorted(result.targets.items())
    ]
    caption = (
        f"{result.done} of {result.total} built with {result.jobs} at once; throttled "
        f"{_times(result.throttled)}, ended for memory and continued {_times(result.ended)}."
    )
    return show.table(rows, caption=caption)


def _stated(seen: list[Tick]) -> Iterator[int]:
    """Available memory as the rehearsal states it: enough until a file is in work, then less than is
    kept back, then too little until a compiler was ended for it, then enough again."""
    plenty, less, little = 1024 * MIB, 400 * MIB, 100 * MIB
    while not any(tick.running for tick in seen):
        yield plenty
    yield from (less, less)
    while not any(tick.state == "waiting for memory" for tick in seen):
        yield little
    while True:
        yield plenty
