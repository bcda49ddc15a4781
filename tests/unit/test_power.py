"""Energy from samples against known curves, sensors against files and fakes, and what they lack."""

from __future__ import annotations

import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest
from sparkling import power, sensors
from sparkling.power import Sampler, Series


def samples(curve, times, field="power", source="gpu0"):
    return [{"t": t, field: {source: curve(t)}} for t in times]


def grid(start, end, step):
    return [start + i * step for i in range(round((end - start) / step) + 1)]


# -- integration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "integral"),
    [
        (lambda t: 40.0, lambda a, b: 40 * (b - a)),
        (lambda t: 10 + 3 * t, lambda a, b: 10 * (b - a) + 1.5 * (b * b - a * a)),
    ],
)
def test_lines_are_integrated_exactly_whatever_the_window(curve, integral):
    series = Series(samples(curve, grid(0, 10, 0.25)), "gpu0")
    for a, b in ((0, 10), (0.1, 9.9), (3.07, 3.11), (2.5, 2.5), (2.25, 7.75), (3.0, 3.2)):
        assert series.joules(a, b) == pytest.approx(integral(a, b))


def test_a_curve_is_integrated_to_the_step_squared():
    def curve(t):
        return 60 + 20 * math.sin(t)

    def exact(a, b):
        return 60 * (b - a) - 20 * (math.cos(b) - math.cos(a))

    errors = [
        abs(Series(samples(curve, grid(0, 12, h)), "gpu0").joules(1, 11) - exact(1, 11))
        for h in (0.5, 0.25, 0.125)
    ]
    assert errors[0] < 2 and errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3


def test_jittered_samples_of_a_step_are_right_to_one_interval():
    times = [i * 0.2 + 0.03 * ((i * 7) % 5) for i in range(80)]
    series = Series(samples(lambda t: 20.0 if t < 5 else 80.0, times), "gpu0")
    assert series.joules(1, 9) == pytest.approx(4 * 20 + 4 * 80, abs=60 * 0.32 / 2)


def test_a_counter_is_its_difference():
    series = Series(samples(lambda t: 7 * t * t, grid(0, 10, 0.5), "energy", "rapl"), "rapl")
    assert series.counted and series.joules(2, 8) == pytest.approx(7 * 60)


def test_windows_that_are_not_covered_are_unknown():
    full = samples(lambda t: 40.0, grid(0, 10, 0.25))
    gap = [s for s in full if not 4 < s["t"] < 7]
    series = Series(full, "gpu0")
    assert series.joules(-0.1, 5) is None and series.joules(5, 10.1) is None
    assert series.joules(5, 4) is None and Series([], "gpu0").joules(0, 1) is None
    assert Series(gap, "gpu0").joules(3, 8) is None  # nobody looked for three seconds
    assert Series(gap, "gpu0").joules(0, 4) == pytest.approx(160)
    assert Series(full, "gpu1").joules(0, 1) is None


# -- joules per token ----------------------------------------------------------------------------


def row(arm, prompt, sent, e2e, tokens, **more):
    return {
        "arm": arm, "workload": "w", "prompt": prompt, "sent_s": sent, "e2e_s": e2e,
        "completion_tokens": tokens, "complete": True, **more,
    }  # fmt: skip


def test_joules_per_token_by_arm_with_the_floor_taken_off():
    # Idle 20 W until 2; arm a works at 60 W until 10; idle until 12; arm b at 100 W until 20.
    def curve(t):
        return 20.0 if t < 2 or 10 <= t < 12 or t > 20 else (60.0 if t < 10 else 100.0)

    log = samples(curve, grid(0, 22, 0.001))
    rows = [row("a", f"{i:02d}", 2 + 2 * i, 2, 50) for i in range(4)]
    rows += [row("b", f"{i:02d}", 12 + 2 * i, 2, 200) for i in range(4)]
    rows += [row("b", "99", 30, 1, 10), row("b", "98", 13, 1, 10, complete=False)]
    a, b = power.per_arm(rows, log, {"a": [(0, 2)], "b": [(10.01, 11.99)]})
    assert (a.arm, a.source, a.rows, a.uncovered) == ("a", "gpu0", 4, 0)
    assert a.per_token.value == pytest.approx(120 / 50, rel=1e-3)
    assert a.idle_watts == pytest.approx(20, rel=1e-2) and a.watts == pytest.approx(60, rel=1e-3)
    assert a.net_per_token == pytest.approx(80 / 50, rel=1e-2)
    assert (b.rows, b.uncovered) == (4, 1)
    assert b.per_token.value == pytest.approx(1.0, rel=1e-3) and b.per_token.n == 4
    assert b.net_per_token == pytest.approx(0.8, rel=1e-2)
    assert power.per_arm(rows, log)[0].net_per_token is None  # no floor was measured
    assert json.dumps(a.to_json())


def test_without_a_sensor_there_is_no_energy():
    rows = [row("a", "00", 0, 1, 10)]
    assert power.per_arm(rows, [{"t": 0.0, "mem_available": 5}, {"t": 2.0}]) == []


def test_the_machine_over_the_run():
    log = [
        {"t": 0.0, "mem_available": 9, "temp_c": {"gpu0": 50}, "mhz": {"gpu0": 2400}},
        {"t": 1.0, "mem_available": 4, "temp_c": {"gpu0": 81}, "mhz": {"gpu0": 1700},
         "throttle": {"gpu0": "software power cap"}},
        {"t": 2.5, "mem_available": 7},
    ]  # fmt: skip
    got = power.machine(log)
    assert (got.samples, got.seconds, got.least_available, got.most_available) == (3, 2.5, 4, 9)
    assert got.hottest == {"gpu0": 81} and got.clocks == {"gpu0": (1700, 2400)}
    assert got.throttled == {"gpu0: software power cap": 1}
    assert power.machine([]).least_available is None


# -- the sampler ---------------------------------------------------------------------------------


def test_the_sampler_writes_what_it_reads_and_ends(tmp_path):
    ticks = itertools.count()
    log = tmp_path / "run" / "power.jsonl"
    sensor = lambda: {"power": {"gpu0": float(next(ticks))}, "throttle": {}}  # noqa: E731
    # Not faster: all must still be in `latest` when this thread comes to run again.
    with Sampler(log, found=([sensor], ["there is no RAPL"]), period_s=0.01) as sampler:
        while sampler.taken < 20:
            time.sleep(0.01)
    got = power.read(log)
    assert got == list(sampler.latest) and len(got) == sampler.taken >= 20
    stamps = [s["t"] for s in got]
    assert stamps == sorted(stamps)
    assert [s["power"]["gpu0"] for s in got] == list(range(len(got)))
    assert all(set(s) == {"t", "power"} for s in got)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["missing"] == ["there is no RAPL"] and lines[0]["boot"]
    assert lines[-1]["end"] == len(got) and lines[-1]["cpu_s"] >= 0
    assert power.sources(got) == ["gpu0"]
    sampler.stop()  # again: harmless
    assert power.read(log, boot="another boot") == []


def test_a_run_goes_on_behind_a_line_that_a_kill_cut(tmp_path):
    log = tmp_path / "power.jsonl"
    log.write_text('{"t": 1.0, "power": {"gpu0": 5}}\n{"t": 2.0, "pow')
    with Sampler(log, found=([], []), period_s=60):
        pass
    got = power.read(log)
    assert got[0] == {"t": 1.0, "power": {"gpu0": 5}} and len(got) == 2
    assert len(power.read(log, boot=power.procs.boot_id())) == 1  # of this boot: the new one


def test_a_slow_sensor_is_not_read_more_often_for_it(tmp_path):
    """Every reading takes three periods of a clock of our own: no burst follows."""
    now = [0.0]

    def sensor():
        now[0] += 0.75
        return {}

    sampler = Sampler(tmp_path / "p.jsonl", found=([sensor], []), clock=lambda: now[0])
    waits = []

    class End:
        def wait(self, seconds):
            waits.append(seconds)
            now[0] += seconds
            return len(waits) == 5

        def set(self):
            pass

    sampler._end = End()
    with sampler:
        sampler._thread.join(timeout=60)
    assert sampler.taken == 5 and waits == pytest.approx([0.0] * 5)
    assert [s["t"] for s in sampler.latest] == pytest.approx([0.375 + 0.75 * i for i in range(5)])


# -- sensors -------------------------------------------------------------------------------------


def put(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_rapl_counts_on_over_a_wrap(tmp_path):
    zone = "sys/class/powercap/intel-rapl:0"
    put(
        tmp_path,
        {
            f"{zone}/name": "package-0", f"{zone}/energy_uj": 900_000,
            f"{zone}/max_energy_range_uj": 1_000_000, f"{zone}:0/name": "core",
            f"{zone}:0/energy_uj": 5, f"{zone}:0/max_energy_range_uj": 1_000_000,
        },
    )  # fmt: skip
    sensor = sensors.rapl(tmp_path)
    assert sensor() == {"energy": {"rapl package-0": 0.0}}
    put(tmp_path, {f"{zone}/energy_uj": 100_000})
    assert sensor()["energy"] == pytest.approx({"rapl package-0": 0.2})
    put(tmp_path, {f"{zone}/energy_uj": 600_000})
    assert sensor()["energy"] == pytest.approx({"rapl package-0": 0.7})


def test_board_sensors_zones_clocks_and_memory(tmp_path):
    put(
        tmp_path,
        {
            "sys/class/hwmon/hwmon1/name": "board", "sys/class/hwmon/hwmon1/power1_input": 45_500_000,
            "sys/class/hwmon/hwmon1/power1_label": "SoC", "sys/class/hwmon/hwmon0/name": "nvme",
            "sys/class/thermal/thermal_zone0/temp": 51000, "sys/class/thermal/thermal_zone1/temp": 64500,
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 2_000_000,
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": 3_000_000,
            "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   2048 kB",
        },
    )  # fmt: skip
    found, missing = sensors.find(tmp_path, gpu=False)
    got = Sampler(tmp_path / "x", found=(found, missing)).sample()
    assert missing == ["there is no RAPL"]
    assert got["power"] == {"board SoC": 45.5} and got["mem_available"] == 2048 * 1024
    assert got["temp_c"] == {"hottest zone": 64.5} and got["mhz"] == {"cpu mean": 2500.0}


def test_a_machine_with_nothing_says_so(tmp_path):
    found, missing = sensors.find(tmp_path, gpu=False)
    assert found == [] and missing == ["there is no RAPL", "hwmon has no power sensor"]


class Nvml:
    """pynvml of a GB10: no memory clock, no energy counter; what it lacks raises."""

    def __init__(self, watts=44_100, count=1):
        self.watts, self.count = watts, count

    def nvmlInit(self):
        if self.count is None:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.watts is None:
            raise RuntimeError("Not Supported")
        return self.watts

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 61

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 2405

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x04 | 0x01 | 0x40


def test_nvml_gives_what_the_gpu_offers():
    assert sensors.nvml(Nvml())() == {
        "power": {"gpu0": 44.1}, "energy": {}, "temp_c": {"gpu0": 61}, "mhz": {"gpu0": 2405},
        "throttle": {"gpu0": "software power cap, hardware thermal slowdown"},
    }  # fmt: skip
    assert sensors.nvml(Nvml(watts=None))()["power"] == {}
    assert sensors.nvml(Nvml(count=0)) == "NVML lists no GPU"
    assert sensors.nvml(Nvml(count=None)) == "NVML does not answer (Driver Not Loaded)"


def test_a_boards_own_count_of_energy_is_taken_instead_of_its_watts():
    class Counting(Nvml):
        joules = 9_000.0

        def nvmlDeviceGetTotalEnergyConsumption(self, handle):
            self.joules += 30.0
            return round(self.joules * 1000)

    read = sensors.nvml(Counting())
    log = [{"t": float(t), **read()} for t in range(5)]
    assert [s["energy"]["gpu0"] for s in log] == [0.0, 30.0, 60.0, 90.0, 120.0]
    series = Series(log, "gpu0")
    assert series.counted and series.joules(1, 3.5) == pytest.approx(75)  # not 44.1 W × 2.5 s


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ((0, "0, 43.25, 2400, 60\n"), {"power": {"gpu0": 43.25}, "mhz": {"gpu0": 2400.0}, "temp_c": {"gpu0": 60.0}}),
        ((0, "0, [N/A], 2400, Not Supported\n"), {"power": {}, "mhz": {"gpu0": 2400.0}, "temp_c": {}}),
        ((0, "0, [N/A], [N/A], [N/A]\n"), "nvidia-smi names no power, clock or temperature"),
        ((9, ""), "nvidia-smi names no power, clock or temperature"),
        ("nvidia-smi is not installed", "nvidia-smi is not installed"),
        ("nvidia-smi did not answer within 2 s", "nvidia-smi did not answer within 2 s"),
    ],
)  # fmt: skip
def test_nvidia_smi_and_what_it_does_not_say(answer, wanted):
    asked = []

    def ask(words, limit):
        asked.append(SimpleNamespace(words=words, limit=limit))
        return answer

    found = sensors.smi(ask)
    assert (found if isinstance(found, str) else found()) == wanted
    assert all(a.words[0] == "nvidia-smi" and a.limit == 2.0 for a in asked)


def test_nvidia_smi_is_asked_once_a_second(tmp_path):
    now, asked = [100.0], []

    def ask(words, limit):
        asked.append(now[0])
        return 0, "0, 43.25, 2400, 60\n"

    read = sensors.smi(ask, clock=lambda: now[0])
    got = []
    for _ in range(9):
        got.append(bool(read()["power"]))
        now[0] += 0.25
    assert got == [True, False, False, False] * 2 + [True] and len(asked) == 2 + 3
