"""The doctor's checks of the GPU: what it is, its driver, what it can be read for, Humming's probe."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sparkling.doctor import ANSWERS, FAIL, OK, WARN, Check, Finding, Scene, not_here, ok

CAPABILITY = "12.1"  # GB10; the kernels are compiled for sm_121a
DRIVER, CUDA = (580,), (13, 0)
"""The branch of the driver that brings CUDA 13.0, and the CUDA that the pinned torch is built for."""

BANDWIDTH = 273.0  # GB/s, NVIDIA's figure for a DGX Spark
PROBE_S = 60.0  # importing torch is most of it

_PROBE = """
import importlib.metadata as m, json
out = {"version": m.version("humming-kernels")}
try:
    from humming.utils.device import calculate_gpu_bandwidth, estimate_tensorcore_max_tops
    out["bandwidth"] = calculate_gpu_bandwidth()
    out["tops"] = estimate_tensorcore_max_tops()
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(out))
"""


def _number(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(".") if part.isdigit())


def gpu(scene: Scene) -> Iterator[Finding]:
    """Name, compute capability, driver and CUDA of the first GPU."""
    titles = {
        "gpu.name": "GPU",
        "gpu.capability": "compute capability",
        "gpu.driver": "driver",
        "gpu.cuda": "CUDA of the driver",
    }
    if not scene.gpus.all:
        note = scene.gpus.note
        if not scene.gpu:
            for id, title in titles.items():
                yield not_here(id, title, f"the cpu lane needs none ({note})")
            return
        remedy = "install or reload the NVIDIA driver, or choose --lane cpu"
        if scene.gpus.perhaps:
            remedy = ANSWERS
        why = "Nothing of this lane runs without it"
        yield Finding("gpu.name", "GPU", f"none seen: {note}", "an NVIDIA GPU", FAIL, why, remedy)
        for id, title in list(titles.items())[1:]:
            yield not_here(id, title, "no GPU was seen")
        return
    one, spark = scene.gpus.all[0], scene.spark
    more = f" and {len(scene.gpus.all) - 1} more" if len(scene.gpus.all) > 1 else ""
    wanted = "GB10" if spark else "an NVIDIA GPU" if scene.gpu else "none"
    named = not spark or "GB10" in one.name.upper() or one.capability == CAPABILITY
    yield Finding(
        "gpu.name",
        "GPU",
        one.name + more,
        wanted,
        OK if named else WARN,
        "" if named else "The lane was chosen by hand; its recipe is made for a GB10",
    )
    yield _capability(scene, one.capability)
    yield _at_least("gpu.driver", "driver", one.driver, DRIVER, "CUDA 13 needs branch 580 or newer")
    yield _at_least(
        "gpu.cuda", titles["gpu.cuda"], scene.gpus.cuda, CUDA, "torch is built for 13.0"
    )


def _capability(scene: Scene, found: str | None) -> Finding:
    id, title = "gpu.capability", "compute capability"
    needed = CAPABILITY if scene.spark else "7.5 or more, for Humming"
    if found is None:
        why = "The driver does not tell it; the kernels to be compiled depend on it"
        return Finding(id, title, "not told", needed, WARN, why, "update the driver")
    fits = found == CAPABILITY if scene.spark else _number(found) >= (7, 5)
    why = "Kernels are compiled for exactly this: sm_121a" if scene.spark else ""
    remedy = "" if fits else "choose the lane gpu, whose recipe is not made for a GB10 alone"
    return Finding(id, title, found, needed, OK if fits else FAIL, why, remedy)


def _at_least(id: str, title: str, found: str | None, least: tuple[int, ...], why: str) -> Finding:
    needed = f"{'.'.join(map(str, least))} or newer"
    if found is None:
        return Finding(id, title, "not told", needed, WARN, why, "run `nvidia-smi` and look")
    fits = _number(found) >= least
    remedy = "" if fits else "update the driver (on DGX OS: a system update)"
    return Finding(id, title, found, needed, OK if fits else FAIL, why, remedy)


def readings(scene: Scene) -> Iterator[Finding]:
    """Clock, power and temperature: there, or said to be missing. None is needed to serve."""
    titles = {"gpu.clocks": "clock readings", "gpu.power": "power readings"}
    if not scene.gpus.all:
        for id, title in titles.items():
            yield not_here(id, title, "no NVIDIA GPU was seen")
        return
    one = scene.gpus.all[0]

    def told(value: float | None, unit: str) -> str:
        return "not told" if value is None else f"{value:g} {unit}"

    clocks = f"SM {told(one.sm_clock_mhz, 'MHz')}, memory {told(one.memory_clock_mhz, 'MHz')}"
    why = "A GB10 has no memory clock of its own to read; what a run samples, its report says"
    yield ok("gpu.clocks", titles["gpu.clocks"], clocks, "", why)
    power = f"{told(one.power_w, 'W')}, limit {told(one.power_limit_w, 'W')}"
    heat = f", {told(one.temperature_c, '°C')}"
    missing = one.power_w is None
    yield Finding(
        "gpu.power",
        titles["gpu.power"],
        power + heat,
        "a power reading, for energy per token",
        WARN if missing else OK,
        "Energy is reported only where it can be read" if missing else "",
    )


def humming(scene: Scene) -> Finding:
    """What Humming takes the memory bandwidth to be: it tunes its kernels by it at load.

    Humming 0.1.12 (`humming/utils/device.py`) returns 273 GB/s for compute capability 12.1, because
    a GB10 has no memory clock in NVML; versions before 0.1.11 fail there with NVMLError_NotSupported
    (published). Elsewhere it multiplies the memory clock by the bus width.
    """
    id, title = "humming.bandwidth", "Humming's bandwidth probe"
    if not scene.gpus.all or not scene.gpu:
        return not_here(id, title, "Humming's kernels need an NVIDIA GPU and its lane")
    if not scene.lane.server_python.is_file():
        return not_here(id, title, "there is no server environment yet to ask")
    needed = f"{BANDWIDTH:g} GB/s" if scene.spark else "a number"
    why = "Humming chooses its kernels by it while the model loads, so a failure costs minutes"
    answer = scene.ask((str(scene.lane.server_python), "-c", _PROBE), PROBE_S)
    if isinstance(answer, str):
        return Finding(id, title, answer, needed, WARN, why, "run the doctor again")
    try:
        told = json.loads(answer[1].strip().splitlines()[-1])
    except (ValueError, IndexError):
        remedy = "build the environment again with `sparkling setup`"
        return Finding(id, title, "humming-kernels is not there", needed, FAIL, why, remedy)
    version, speed = f"humming-kernels {told['version']}", told.get("bandwidth")
    if told.get("error"):
        lacks = "NotSupported" in told["error"] or "Not Supported" in told["error"]
        remedy = (
            "install humming-kernels 0.1.11 or newer, which knows a GB10"
            if lacks
            else "look at the driver (`nvidia-smi`): NVML does not answer"
        )
        return Finding(id, title, f"{version}: {told['error']}", needed, FAIL, why, remedy)
    right = speed == BANDWIDTH if scene.spark else bool(speed and speed > 0)
    found = f"{speed:g} GB/s by {version}"
    return Finding(id, title, found, needed, OK if right else WARN, why)


CHECKS: dict[str, Check] = {"gpu": gpu, "gpu.readings": readings, "humming.bandwidth": humming}
