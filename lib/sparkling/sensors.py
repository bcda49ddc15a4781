"""What this machine says of its power, temperature, clocks and memory, and what it does not say.

A sensor is a callable that returns fields for one sample, and never raises:

    power    {source: watts}        read at this moment
    energy   {source: joules}       counted since the sensor was made, wraps of the counter undone
    temp_c, mhz                     {source: value}
    throttle {source: reason}       only while the clocks are held down
    mem_available                   bytes

NVML (through pynvml where it is installed, else through nvidia-smi) gives the board power of NVIDIA
GPUs, and on many the energy counted by the board, which misses nothing between samples and is then
taken instead; a GB10 offers some of this, and what it does not offer is left out. RAPL gives the energy of CPU
packages where the kernel lets a user read it. hwmon gives what the board's own sensors are called.
Sources overlap (a package may hold the GPU), so they are never added up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Sensor = Callable[[], dict[str, Any]]

# Bits of NVML's clocks event reasons that hold clocks below what was asked for; "idle" and the
# application's own settings are not among them (nvml.h, nvmlClocksEventReason…).
THROTTLE = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_SMI_FIELDS = "index,power.draw,clocks.sm,temperature.gpu"
_SMI_LIMIT_S = 2.0
_SMI_PERIOD_S = 1.0
_NOT_SAID = {"", "n/a", "not supported", "unknown error", "[n/a]", "[not supported]"}


def find(root: Path = Path("/"), *, gpu: bool = True) -> tuple[list[Sensor], list[str]]:
    """The sensors of this machine, and one clause for each kind that is not there.

    root: where /sys and /proc are found (tests bring their own). gpu: whether to ask for GPUs.
    """
    tried = [nvidia()] if gpu else []
    tried += [rapl(root), hwmon(root)]
    others = (thermal(root), clocks(root), memory(root))
    sensors = [s for s in (*tried, *others) if s is not None and not isinstance(s, str)]
    return sensors, [s for s in tried if isinstance(s, str)]


# -- NVIDIA --------------------------------------------------------------------------------------


def nvidia() -> Sensor | str:
    """NVML, else nvidia-smi, or why there is neither."""
    found = nvml()
    if not isinstance(found, str):
        return found
    other = smi()
    return other if not isinstance(other, str) else f"{found}, {other}"


def nvml(module: Any = None) -> Sensor | str:
    """The NVML sensor, or why there is none. `module`: pynvml, or what stands in for it."""
    if module is None:
        try:
            import pynvml as module  # type: ignore[no-redef]
        except ImportError:
            return "pynvml is not installed"
    try:
        module.nvmlInit()
        handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
    except Exception as error:
        return f"NVML does not answer ({error})"
    if not handles:
        return "NVML lists no GPU"

    first: dict[str, float] = {}

    def value(name: str, *args: Any) -> Any:
        # A GPU that lacks one of these raises for it; a GB10 lacks several.
        with contextlib.suppress(Exception):
            return getattr(module, name)(*args)
        return None

    def read() -> dict[str, Any]:
        out: dict[str, Any] = {"power": {}, "energy": {}, "temp_c": {}, "mhz": {}, "throttle": {}}
        for i, handle in enumerate(handles):
            name = f"gpu{i}"
            milliwatts = value("nvmlDeviceGetPowerUsage", handle)
            if milliwatts:
                out["power"][name] = milliwatts / 1000
            millijoules = value("nvmlDeviceGetTotalEnergyConsumption", handle)
            if millijoules:
                out["energy"][name] = (millijoules - first.setdefault(name, millijoules)) / 1000
            for field, got in (
                ("temp_c", value("nvmlDeviceGetTemperature", handle, 0)),
                ("mhz", value("nvmlDeviceGetClockInfo", handle, 1)),
            ):
                if got:
                    out[field][name] = got
            # The newer name first; both give the same bits.
            bits = value("nvmlDeviceGetCurrentClocksEventReasons", handle)
            bits = bits or value("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
            reasons = [text for bit, text in THROTTLE.items() if bits & bit]
            if reasons:
                out["throttle"][name] = ", ".join(reasons)
        return out

    return read


def smi(
    ask: Callable[..., Any] | None = None, clock: Callable[[], float] = time.monotonic
) -> Sensor | str:
    """The nvidia-smi sensor, or why there is none. It takes a process to ask, so it asks at most once
    a second and says nothing in between."""
    if ask is None:
        from sparkling.commands import ask
    words = ("nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits")

    asked = float("-inf")

    def read() -> dict[str, Any]:
        nonlocal asked
        out: dict[str, Any] = {"power": {}, "temp_c": {}, "mhz": {}}
        if clock() - asked < _SMI_PERIOD_S:
            return out
        asked = clock()
        answer = ask(words, _SMI_LIMIT_S)
        if isinstance(answer, str) or answer[0] != 0:
            return out
        for line in answer[1].splitlines():
            index, *values = [part.strip() for part in line.split(",")]
            for field, text in zip(("power", "mhz", "temp_c"), values, strict=False):
                with contextlib.suppress(ValueError):
                    if text.lower() not in _NOT_SAID and float(text) > 0:
                        out[field][f"gpu{index}"] = float(text)
        return out

    answer = ask(words, _SMI_LIMIT_S)
    if isinstance(answer, str):
        return answer
    if not any(read().values()):
        return "nvidia-smi names no power, clock or temperature"
    asked = float("-inf")
    return read


# -- the kernel's own ----------------------------------------------------------------------------


def rapl(root: Path = Path("/")) -> Sensor | str:
    """Energy of CPU packages (and of the whole platform where it is counted), from powercap."""
    zones: dict[str, tuple[Path, float]] = {}
    refused = False
    for zone in sorted((root / "sys/class/powercap").glob("*-rapl:*")):
        if zone.name.count(":") > 1:
            continue  # a part of a package, counted in it already
        try:
            int((zone / "energy_uj").read_text())
            wrap = float((zone / "max_energy_range_uj").read_text())
            zones[f"rapl {(zone / 'name').read_text().strip()}"] = (zone / "energy_uj", wrap)
        except PermissionError:
            refused = True
        except (OSError, ValueError):
            continue
    if not zones:
        return "RAPL counters are not readable by this user" if refused else "there is no RAPL"
    last = dict.fromkeys(zones, 0.0)
    total = dict.fromkeys(zones, 0.0)
    for name, (path, _) in zones.items():
        last[name] = float(path.read_text())

    def read() -> dict[str, Any]:
        out = {}
        for name, (path, wrap) in zones.items():
            with contextlib.suppress(OSError, ValueError):
                now = float(path.read_text())
                step = now - last[name]
                total[name] += step if step >= 0 else step + wrap
                last[name] = now
                out[name] = total[name] / 1e6
        return {"energy": out}

    return read


def hwmon(root: Path = Path("/")) -> Sensor | str:
    """Power of the board's own sensors, in the names that the kernel gives them."""
    files: dict[str, Path] = {}
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        for path in sorted([*chip.glob("power*_average"), *chip.glob("power*_input")]):
            label = path.with_name(path.name.split("_")[0] + "_label")
            try:
                float(path.read_text())
                what = label.read_text().strip() if label.exists() else path.name.split("_")[0]
                files.setdefault(f"{(chip / 'name').read_text().strip()} {what}", path)
            except (OSError, ValueError):
                continue
    if not files:
        return "hwmon has no power sensor"

    def read() -> dict[str, Any]:
        out = {}
        for name, path in files.items():
            with contextlib.suppress(OSError, ValueError):
                out[name] = float(path.read_text()) / 1e6
        return {"power": out}

    return read


def thermal(root: Path = Path("/")) -> Sensor | None:
    """The hottest thermal zone."""
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))
    return _numbers(zones, "temp_c", "hottest zone", max, 1e-3)


def clocks(root: Path = Path("/")) -> Sensor | None:
    """The mean clock of the CPUs, in MHz."""
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    return _numbers(files, "mhz", "cpu mean", lambda x: sum(x) / len(x), 1e-3)


def _numbers(
    files: list[Path], field: str, name: str, of: Callable[[list[float]], float], scale: float
) -> Sensor | None:
    def read() -> dict[str, Any]:
        values = []
        for path in files:
            with contextlib.suppress(OSError, ValueError):
                values.append(float(path.read_text()) * scale)
        return {field: {name: round(of(values), 1)}} if values else {}

    return read if read() else None


def memory(root: Path = Path("/")) -> Sensor | None:
    """MemAvailable of /proc/meminfo, in bytes: the whole machine's, also inside a container."""
    path = root / "proc/meminfo"

    def read() -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return {"mem_available": int(line.split()[1]) * 1024}
        return {}

    return read if read() else None
