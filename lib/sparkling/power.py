"""Power, memory, clocks and temperature over a run, and joules per token from them.

`Sampler` is a thread that reads the sensors a few times a second into `power.jsonl`, stamped by the
machine's monotonic clock, the one that rows of `bench` name their `sent_s` by. Energy of a window is

    a power source      the integral of the watts, linear between samples (trapezoids)
    an energy counter   its difference, linear between samples

and is unknown (None) where the samples do not cover the window without a gap of MOST_GAP_S. Joules
per token of an arm are Σ joules of its requests / Σ tokens of the same requests, prefill included;
the idle floor, measured with the arm's server loaded and idle, is named beside it and taken off in
the net figure. Sources are kept apart: a GPU's board and a CPU package may hold each other.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparkling import procs, sensors
from sparkling.files import os_error, read_rows
from sparkling.stats import Interval, bootstrap_ratio_of_sums

PERIOD_S = 0.25
MOST_GAP_S = 2.0
KEPT = 1000  # samples kept in memory; all are in the file
NO_SENSOR = "no sensor on this machine"

Samples = Sequence[Mapping[str, Any]]


class Sampler:
    """`with Sampler(path): …` samples until the block ends. One head row, one row a sample, and a
    last row that says what the sampling itself cost in CPU time.

    found: (sensors, what is missing), as `sensors.find` returns it. Never raises in its thread: a
    sensor that fails leaves its fields out.
    """

    def __init__(
        self,
        path: Path,
        *,
        found: tuple[Sequence[sensors.Sensor], Sequence[str]] | None = None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        chosen, missing = sensors.find() if found is None else found
        self.path, self.period_s = path, period_s
        self.missing = tuple(missing)
        self.taken = 0
        self.latest: deque[dict[str, Any]] = deque(maxlen=KEPT)  # a run may last for days
        self.cpu_s = 0.0
        self._sensors, self._clock = list(chosen), clock
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> dict[str, Any]:
        """Read every sensor once. The stamp is the middle of the reading."""
        merged: dict[str, Any] = {}
        before = self._clock()
        for sensor in self._sensors:
            for field, value in sensor().items():
                if isinstance(value, Mapping):
                    merged.setdefault(field, {}).update(value)
                else:
                    merged[field] = value
        row = {"t": round((before + self._clock()) / 2, 4)}
        return row | {k: v for k, v in merged.items() if v not in ({}, None)}

    def start(self) -> Sampler:
        """Begin. Raises SparklingError when the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
            self._file = self.path.open("a", encoding="utf-8")
            if cut:  # by a kill: our head must not be glued to it
                self._file.write("\n")
        except OSError as error:
            raise os_error(error, "opening", self.path) from error
        self._write(
            {
                "head": "power samples",
                "boot": procs.boot_id(),
                "clock": "CLOCK_MONOTONIC, seconds",
                "period_s": self.period_s,
                "missing": list(self.missing),
            }
        )
        self._thread = threading.Thread(target=self._run, name="power-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End, and write what the sampling cost. Harmless when it was never started."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self._thread = None
        self._write({"end": self.taken, "cpu_s": round(self.cpu_s, 4)})
        self._file.close()

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        due = self._clock()
        while True:
            row = self.sample()
            self.latest.append(row)
            self.taken += 1
            self._write(row)
            self.cpu_s = time.thread_time()
            # A slow sensor must not make the next samples come in a burst.
            due = max(due + self.period_s, self._clock())
            if self._end.wait(max(0.0, due - self._clock())):
                return

    def _write(self, row: Mapping[str, Any]) -> None:
        # Flushed, not fsynced: a kill loses nothing, and a disk that is busy delays no request.
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()


def read(path: Path, boot: str | None = None) -> list[dict[str, Any]]:
    """The samples of a file, in order of time. boot: only those since that boot of the machine,
    since monotonic stamps of two boots do not compare."""
    out: list[dict[str, Any]] = []
    current: str | None = None
    for row in read_rows(path):
        if "head" in row:
            current = row.get("boot")
        elif "t" in row and (boot is None or current == boot):
            out.append(row)
    return sorted(out, key=lambda r: r["t"])


# -- integration ---------------------------------------------------------------------------------


def sources(samples: Samples) -> list[str]:
    """The names of everything whose power or energy was sampled."""
    names = {n: None for s in samples for field in ("power", "energy") for n in s.get(field, ())}
    return list(names)


class Series:
    """One source over time: its watts, or the joules it has counted."""

    def __init__(self, samples: Samples, source: str) -> None:
        self.counted = any(source in s.get("energy", ()) for s in samples)
        field = "energy" if self.counted else "power"
        points = [(s["t"], s[field][source]) for s in samples if source in s.get(field, ())]
        self.times = [t for t, _ in points]
        self.values = [v for _, v in points]

    def joules(self, start: float, end: float, *, most_gap_s: float = MOST_GAP_S) -> float | None:
        """Energy between two stamps; None where the samples do not cover them."""
        low, high = bisect_right(self.times, start) - 1, bisect_left(self.times, end)
        if end < start or low < 0 or high >= len(self.times):
            return None
        if any(b - a > most_gap_s for a, b in pairwise(self.times[low : high + 1])):
            return None
        if self.counted:
            return self._at(end) - self._at(start)
        inside = range(bisect_right(self.times, start), high)
        cut = [(start, self._at(start))]
        cut += [(self.times[i], self.values[i]) for i in inside]
        cut += [(end, self._at(end))]
        return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(cut))

    def _at(self, t: float) -> float:
        i = bisect_left(self.times, t)
        if self.times[i] == t:
            return self.values[i]
        (a, x), (b, y) = ((self.times[k], self.values[k]) for k in (i - 1, i))
        return x + (y - x) * (t - a) / (b - a)

    def mean_watts(self, windows: Iterable[tuple[float, float]]) -> float | None:
        """Mean power over the windows that are covered; None without one."""
        energy = seconds = 0.0
        for start, end in windows:
            got = self.joules(start, end)
            if got is not None and end > start:
                energy, seconds = energy + got, seconds + end - start
        return energy / seconds if seconds else None


# -- per arm -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmEnergy:
    """What one arm's requests cost by one source.

    `per_token`: Σ joules / Σ completion tokens over `rows` requests, interval over prompts.
    `idle_watts`: mean power with this arm's server loaded and idle (None: not measured).
    `net_per_token`: the same with the idle floor × the time of the requests taken off.
    `uncovered`: requests whose time the samples do not cover; they are in neither sum.
    """

    arm: str
    source: str
    per_token: Interval
    net_per_token: float | None
    watts: float
    idle_watts: float | None
    rows: int
    uncovered: int

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "per_token": self.per_token.to_json()}


def per_arm(
    rows: Iterable[Mapping[str, Any]],
    samples: Samples,
    idle: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    *,
    seed: int = 0,
) -> list[ArmEnergy]:
    """Joules per token of every arm, by every source. [] without a sensor.

    idle: for each arm the windows in which its server was loaded and idle.
    """
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["complete"] and row.get("completion_tokens") and row.get("sent_s") is not None:
            arms.setdefault(row["arm"], []).append(row)
    out = []
    for source in sources(samples):
        series = Series(samples, source)
        for arm, mine in arms.items():
            sums: dict[Any, list[float]] = {}
            used = 0
            for row in mine:
                energy = series.joules(row["sent_s"], row["sent_s"] + row["e2e_s"])
                if energy is None:
                    continue
                used += 1
                unit = sums.setdefault((row["workload"], row["prompt"]), [0.0, 0.0, 0.0])
                for i, part in enumerate((energy, row["completion_tokens"], row["e2e_s"])):
                    unit[i] += part
            if not used:
                continue
            energies, tokens, seconds = zip(*sums.values(), strict=True)
            floor = series.mean_watts((idle or {}).get(arm, ()))
            net = None
            if floor is not None:
                net = (sum(energies) - floor * sum(seconds)) / sum(tokens)
            out.append(
                ArmEnergy(
                    arm=arm,
                    source=source,
                    per_token=bootstrap_ratio_of_sums(energies, tokens, seed=seed),
                    net_per_token=net,
                    watts=sum(energies) / sum(seconds),
                    idle_watts=floor,
                    rows=used,
                    uncovered=len(mine) - used,
                )
            )
    return out


@dataclass(frozen=True)
class Machine:
    """How the machine was over the samples: bytes, degrees, MHz; None where it does not say."""

    samples: int
    seconds: float
    least_available: int | None
    most_available: int | None
    hottest: Mapping[str, float]
    clocks: Mapping[str, tuple[float, float]]  # (lowest, highest)
    throttled: Mapping[str, int]  # "gpu0: software power cap" -> samples

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def machine(samples: Samples) -> Machine:
    """Memory, temperature, clocks and throttling over the samples."""
    memory = [s["mem_available"] for s in samples if s.get("mem_available") is not None]
    hottest: dict[str, float] = {}
    clock: dict[str, tuple[float, float]] = {}
    throttled: dict[str, int] = {}
    for s in samples:
        for name, value in s.get("temp_c", {}).items():
            hottest[name] = max(value, hottest.get(name, value))
        for name, value in s.get("mhz", {}).items():
            low, high = clock.get(name, (value, value))
            clock[name] = (min(low, value), max(high, value))
        for name, reason in s.get("throttle", {}).items():
            key = f"{name}: {reason}"
            throttled[key] = throttled.get(key, 0) + 1
    return Machine(
        samples=len(samples),
        seconds=samples[-1]["t"] - samples[0]["t"] if samples else 0.0,
        least_available=min(memory, default=None),
        most_available=max(memory, default=None),
        hottest=hottest,
        clocks=clock,
        throttled=throttled,
    )
