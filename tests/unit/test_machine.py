"""Memory, CPUs and GPUs through injected files and answers: GB10s, containers, wedged drivers."""

from __future__ import annotations

import resource
import stat
import sys
from pathlib import Path

import pytest
from sparkling import cgroup, commands, gpus, machine
from sparkling.errors import SparklingError

GIB = 2**30
SPARK_KB = 119 * 2**20  # about what a Spark's /proc/meminfo says, in kB

MEMINFO = f"""MemTotal:       {SPARK_KB} kB
MemFree:        {4 * 2**20} kB
MemAvailable:   {100 * 2**20} kB
Buffers:        102400 kB
Cached:         {96 * 2**20} kB
Active(file):   {40 * 2**20} kB
Inactive(file): {56 * 2**20} kB
Dirty:          {2**20} kB
Writeback:      0 kB
SwapTotal:             0 kB
SwapFree:              0 kB
SReclaimable:   {2**20} kB
HugePages_Total:       0
"""


def reader(texts: dict[str, str]):
    return {"/proc/meminfo": MEMINFO, **texts}.get


def answers(text: str, code: int = 0, version: str = "CUDA Version        : 13.0"):
    """What asks a pretended nvidia-smi that answers every query with `text`."""

    def ask(command, timeout_s):
        return (0, version) if "--version" in command else (code, text)

    return ask


GB10 = "NVIDIA GB10, 12.1, 580.95.05, {total}, {used}, 2411, [N/A], 11.20, [N/A], 47\n"
H200 = "NVIDIA H200, 9.0, 580.95.05, 143771, 4, 1980, 3201, 76.12, 700.00, 31\n"


# -- case 31: what nvidia-smi says of a GB10 ------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "used"),
    [
        ("[N/A]", "[N/A]"),
        ("Not Supported", "Not Supported"),
        ("[Not Supported]", "[Not Supported]"),
        ("N/A", "[Insufficient Permissions]"),
        ("0", "0"),
        ("8128", "0"),
        ("8128 MiB", "514 MiB"),
        ("", ""),
    ],
)
def test_case_31_a_gb10s_memory_is_the_machines(total, used):
    seen = gpus.look(answers(GB10.format(total=total, used=used)))
    found = machine.memory(reader({}), seen)
    assert found.unified and found.gpu == "NVIDIA GB10"
    assert found.total == SPARK_KB * 1024 and found.available == 100 * GIB
    assert "/proc/meminfo" in found.source and "unified" in found.source
    assert (found.gpu_total, found.gpu_available) == (None, None)
    assert (found.model_total, found.model_available) == (found.total, found.available)


def test_case_31_all_fields_missing_is_still_a_gpu():
    (one,) = gpus.look(answers("NVIDIA GB10" + ", [N/A]" * 9 + "\n")).all
    assert one == gpus.GpuFacts("NVIDIA GB10") and one.unified and one.memory_free is None


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("sys.exit(9)", "fails with code 9"),
        ("print('No devices were found')", "lists no GPU"),
        ("time.sleep(600)", "did not answer within 0.3 s"),
        ("os.kill(os.getpid(), 9)", "fails with code -9"),
        ("sys.stdout.buffer.write(b'\\xff\\xfe\\x00,,,')", "lists no GPU"),
    ],
)
def test_case_31_a_broken_nvidia_smi_costs_nothing_but_its_time(tmp_path, body, note):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    asked = []

    def ask(command, timeout_s):
        asked.append(command)
        return commands.ask(command, timeout_s)

    limit = 0.3 if "sleep" in body else 60
    seen = gpus.look(ask, limit, tmp_path / "none", command=str(smi))
    assert seen.all == () and note in seen.note
    # A driver that hangs is not asked a second time.
    assert len(asked) == (1 if "did not answer" in note else 2)
    found = machine.memory(reader({}), seen)
    assert not found.unified and found.available == 100 * GIB and found.gpu is None


def test_case_31_a_missing_nvidia_smi(tmp_path):
    seen = gpus.look(proc=tmp_path, command=str(tmp_path / "nvidia-smi"))
    assert seen.all == () and seen.note.endswith("nvidia-smi is not installed")


def test_case_31_the_default_limit_is_two_seconds():
    limits = []

    def ask(command, timeout_s):
        limits.append(timeout_s)
        return "nvidia-smi did not answer within 2 s"

    gpus.look(ask, proc=Path("/nowhere"))
    assert limits == [2.0]


def test_a_hanging_driver_still_names_its_gpus(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("Model: \t\t NVIDIA GB10\nIRQ: 1\n")
    seen = gpus.look(lambda command, timeout_s: "it did not answer", proc=tmp_path)
    assert [one.name for one in seen.all] == ["NVIDIA GB10"] and seen.unified
    assert seen.note == "the driver lists it, though it did not answer"


def test_an_older_driver_is_asked_for_less():
    def ask(command, timeout_s):
        if "--version" in command:
            return 0, "NVIDIA-SMI version  : 590.1\nCUDA UMD Version : 13.1"
        if "power.draw" in command[1]:
            return 2, 'Field "clocks.mem" is not a valid field to query.'
        return 0, "NVIDIA GB10, 12.1, 570.1, [N/A], [N/A]\nNVIDIA L4, 8.9, 570.1, 23034, 0\n"

    seen = gpus.look(ask)
    assert seen.all[0] == gpus.GpuFacts("NVIDIA GB10", "12.1", "570.1") and seen.cuda == "13.1"
    assert seen.all[1].memory_free == 23034 * 2**20 and not seen.all[1].unified


def test_a_gpu_with_memory_of_its_own():
    seen = gpus.look(answers(H200))
    (one,) = seen.all
    assert (seen.cuda, one.driver, one.sm_clock_mhz, one.power_w) == (
        "13.0",
        "580.95.05",
        1980,
        76.12,
    )
    found = machine.memory(reader({}), seen)
    assert not found.unified
    assert (found.gpu_total, found.gpu_available) == (143771 * 2**20, 143767 * 2**20)
    assert found.model_total == found.gpu_total and found.model_available == found.gpu_available
    assert found.available == 100 * GIB  # the machine's own, as ever


def test_an_idle_gpu_is_all_free():
    (one,) = gpus.look(answers(H200.replace("143771, 4,", "143771, 0,"))).all
    assert one.memory_used == 0 and one.memory_free == one.memory_total


def test_who_computes_on_the_gpu():
    assert gpus.holders(answers("101, 2048\n102, [N/A]\nNo running processes\n")) == {
        101: 2 * GIB,
        102: None,
    }


def test_a_driver_that_does_not_answer_is_not_one_that_nobody_uses(tmp_path):
    none, listed = tmp_path / "none", tmp_path / "gpus"
    (listed / "0").mkdir(parents=True)
    (listed / "0" / "information").write_text("Model: NVIDIA GB10\n")
    missing, broken = (lambda *_: "nvidia-smi is not installed"), answers("1, 1", code=18)
    assert gpus.holders(missing, proc=none) == gpus.holders(broken, proc=none) == {}
    assert gpus.holders(missing, proc=listed) == "nvidia-smi is not installed"
    assert gpus.holders(broken, proc=listed) == "nvidia-smi fails with code 18"
    hung = lambda command, limit: f"{command[0]} did not answer within {limit:g} s"  # noqa: E731
    for proc in (none, listed):
        assert gpus.holders(hung, proc=proc) == "nvidia-smi did not answer within 2 s"
        assert gpus.look(hung, proc=proc).perhaps
    assert not gpus.look(missing, proc=none).perhaps


def test_a_silent_driver_does_not_make_a_gpu_unified(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("Model: NVIDIA H200\n")
    seen = gpus.look(lambda *_: "nvidia-smi did not answer within 2 s", proc=tmp_path)
    found = machine.memory(reader({}), seen)
    assert not seen.unified and not found.unified and found.untold
    assert not machine.memory(reader({}), gpus.look(answers(H200))).untold


# -- case 33: containers --------------------------------------------------------------------------

V2 = {"/proc/self/cgroup": "0::/a/b\n"}
INNER, OUTER = "/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a"


def v2(
    folder: str, limit: int | str, current: int, inactive: int = 0, **more: int
) -> dict[str, str]:
    stat = {"anon": 1, "file": 96 * GIB, "inactive_file": inactive, "active_file": 0, **more}
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": "".join(f"{name} {value}\n" for name, value in stat.items()),
    }


def test_case_33_a_limit_and_its_droppable_cache():
    texts = {**V2, **v2(INNER, 34359738368, 30 * GIB, 20 * GIB)}
    found = machine.host_memory(reader(texts))
    assert (found.total, found.available, found.limit) == (32 * GIB, 22 * GIB, 32 * GIB)
    assert INNER in found.source and "32.0 GiB" in found.source
    assert (found.host_total, found.host_available) == (SPARK_KB * 1024, 100 * GIB)


@pytest.mark.parametrize(
    ("more", "available"),
    [
        # Weights that were fetched and then hashed: their pages are on the active list.
        ({"active_file": 20 * GIB}, 22 * GIB),
        ({"inactive": 2 * GIB, "active_file": 18 * GIB, "slab_reclaimable": GIB}, 23 * GIB),
        # Not yet on the disk: not to be had at once.
        ({"active_file": 20 * GIB, "file_dirty": 3 * GIB, "file_writeback": GIB}, 18 * GIB),
        ({"active_file": GIB, "file_dirty": 3 * GIB}, 2 * GIB),
        # tmpfs and shared memory are in `file` and `shmem` and are no cache; nor are anonymous pages,
        # nor pages that are locked. Mapped pages are on the lists, and MemAvailable counts them too.
        ({"shmem": 20 * GIB, "inactive_anon": 20 * GIB, "unevictable": 20 * GIB}, 2 * GIB),
        ({"active_file": 20 * GIB, "file_mapped": 20 * GIB, "slab": 9 * GIB}, 22 * GIB),
    ],
)
def test_case_33_what_a_container_would_get_back(more, available):
    texts = {**V2, **v2(INNER, 32 * GIB, 30 * GIB, **more)}
    found = machine.host_memory(reader(texts))
    assert (found.total, found.available) == (32 * GIB, available)


@pytest.mark.parametrize(
    "texts",
    [
        {**V2, **v2(INNER, "max", 30 * GIB)},
        {
            "/proc/self/cgroup": "4:memory:/x\n",
            "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{30 * GIB}\n",
        },
        {**V2, **v2(INNER, 200 * GIB, 150 * GIB)},  # above the machine's own size
        {"/proc/self/cgroup": "0::/\n"},
        {"/proc/self/cgroup": "nonsense\n\n0::\n"},
        {**V2, f"{INNER}/memory.max": "\n"},
        {},
    ],
)
def test_case_33_unlimited(texts):
    found = machine.host_memory(reader(texts))
    assert (found.total, found.available, found.limit) == (SPARK_KB * 1024, 100 * GIB, None)
    assert found.source == "/proc/meminfo"


def test_case_33_the_limit_of_the_parent_holds():
    texts = {**V2, **v2(INNER, "max", 2 * GIB), **v2(OUTER, 16 * GIB, 6 * GIB, GIB)}
    found = machine.host_memory(reader(texts))
    assert (found.total, found.available) == (16 * GIB, 11 * GIB)
    assert found.source.startswith(f"control group {OUTER} ")


def test_case_33_the_tightest_level_decides_each():
    # The inner limit is smaller, but of the outer one less is left.
    texts = {**V2, **v2(INNER, 32 * GIB, 2 * GIB), **v2(OUTER, 64 * GIB, 60 * GIB)}
    found = machine.host_memory(reader(texts))
    assert (found.total, found.available) == (32 * GIB, 4 * GIB)


def test_case_33_a_machine_fuller_than_the_container():
    texts = {**V2, **v2(INNER, 32 * GIB, 0)}
    full = MEMINFO.replace(f"MemAvailable:   {100 * 2**20}", f"MemAvailable:   {5 * 2**20}")
    found = machine.host_memory(reader({**texts, "/proc/meminfo": full}))
    assert (found.total, found.available) == (32 * GIB, 5 * GIB)


def test_case_33_version_1_counts_the_whole_groups_cache():
    texts = {
        "/proc/self/cgroup": "9:cpuset:/\n4:cpu,memory:/docker/x\n0::/\n",
        "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{8 * GIB}\n",
        "/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{6 * GIB}\n",
        "/sys/fs/cgroup/memory/docker/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    assert machine.host_memory(reader(texts)).available == 3 * GIB
    stat = "/sys/fs/cgroup/memory/docker/x/memory.stat"
    texts[stat] += f"active_file 1\ntotal_active_file {2 * GIB}\ndirty 9\ntotal_dirty {GIB}\n"
    assert machine.host_memory(reader(texts)).available == 4 * GIB


@pytest.mark.parametrize(
    ("path", "root", "folder"),
    [
        ("/docker/x", "/docker/x", "/sys/fs/cgroup/memory"),  # its own part is all it sees
        ("/docker/x/y", "/docker/x", "/sys/fs/cgroup/memory/y"),
        ("/../..", "/", "/sys/fs/cgroup/memory"),  # moved out of the part it sees
        ("/elsewhere", "/docker/x", "/sys/fs/cgroup/memory"),  # nothing there: the mount itself
    ],
)
def test_case_33_where_a_container_sees_its_groups(path, root, folder):
    texts = {
        "/proc/self/cgroup": f"4:memory:{path}\n",
        "/proc/self/mountinfo": "22 1 0:5 / / rw - ext4 /dev/sda rw\n"
        f"31 22 0:27 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n",
        f"{folder}/memory.limit_in_bytes": f"{8 * GIB}",
        f"{folder}/memory.usage_in_bytes": f"{2 * GIB}",
    }
    found = machine.host_memory(reader(texts))
    assert found.available == 6 * GIB and f"control group {folder} " in found.source


def test_case_33_a_soft_limit_holds_too():
    texts = {**V2, **v2(INNER, "max", 2 * GIB), f"{INNER}/memory.high": f"{10 * GIB}\n"}
    assert machine.host_memory(reader(texts)).available == 8 * GIB


def test_case_33_a_group_over_its_limit_has_nothing_left():
    texts = {**V2, **v2(INNER, 4 * GIB, 5 * GIB)}
    assert machine.host_memory(reader(texts)).available == 0


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        ({**V2, f"{INNER}/cpu.max": "200000 100000\n"}, 2),
        ({**V2, f"{INNER}/cpu.max": "max 100000\n"}, 20),
        ({**V2, f"{INNER}/cpu.max": "max 100000\n", f"{OUTER}/cpu.max": "350000 100000\n"}, 3),
        ({**V2, f"{INNER}/cpu.max": "50000 100000\n"}, 1),
        ({**V2, f"{INNER}/cpu.max": "9000000 100000\n"}, 20),
        ({**V2, f"{INNER}/cpu.max": "400000\n"}, 4),
        ({"/proc/self/cgroup": "3:cpu,cpuacct:/\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, 20),
        (
            {
                "/proc/self/cgroup": "3:cpu,cpuacct:/\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        ({}, 20),
    ],
)  # fmt: skip
def test_case_33_cpus(texts, count):
    assert machine.cpus(reader(texts), affinity=lambda: 20) == count


# -- meminfo --------------------------------------------------------------------------------------


def test_what_could_be_dropped_by_hand():
    found = machine.host_memory(reader({}))
    # Both file lists and reclaimable slab, without what has yet to be written.
    assert found.page_cache == (40 + 56 - 1 + 1) * GIB
    assert found.free == 4 * GIB and (found.swap_total, found.swap_free) == (0, 0)


def test_an_old_kernel_without_memavailable():
    text = "".join(line + "\n" for line in MEMINFO.splitlines() if "Available" not in line)
    found = machine.host_memory(reader({"/proc/meminfo": text}))
    assert found.available == (4 + 96) * GIB and "MemFree and droppable cache" in found.source


@pytest.mark.parametrize("text", ["", "MemTotal: kB\n", "MemTotal: 0 kB\n", "MemFree: 1 kB\n"])
def test_a_meminfo_that_says_nothing_is_one_sentence(text):
    with pytest.raises(SparklingError, match="does not say how much memory"):
        machine.memory({"/proc/meminfo": text}.get, gpus.Gpus())


def test_the_real_machine():
    found = machine.memory()
    assert 0 < found.available <= found.total <= found.host_total
    assert machine.cpus() >= 1
    assert cgroup.read_text("/no/such/file") is None and cgroup.read_text("/proc") is None


# -- disk and limits ------------------------------------------------------------------------------


def test_the_disk_under_a_folder_yet_to_be_made(tmp_path):
    found = machine.disk(tmp_path / "a" / "b", usage=lambda path: (100, 90, 10))
    assert found == machine.Disk(tmp_path, 100, 10)
    assert machine.disk(tmp_path).total > 0


def test_a_disk_that_does_not_answer_is_one_sentence(tmp_path):
    def gone(path):
        raise OSError(5, "Input/output error")

    with pytest.raises(SparklingError, match="cannot be looked at: Input/output error"):
        machine.disk(tmp_path, usage=gone)


def test_limits():
    found = machine.limits(
        lambda which: (resource.RLIM_INFINITY if which == resource.RLIMIT_AS else 7, 9)
    )
    assert found["address space"] is None and found["open files"] == 7
    assert set(machine.limits()) == set(machine.LIMITS)


def test_a_command_that_is_no_program(tmp_path):
    path = tmp_path / "x"
    path.write_text("")
    assert commands.ask((str(path),), 1) == f"{path} cannot be run (Permission denied)"
    assert commands.ask((f"{path}y",), 1) == f"{path}y is not installed"
    code = "import os, sys; sys.stderr.write('e'); sys.stderr.flush(); print(os.environ.get('K'))"
    assert commands.ask((sys.executable, "-c", code), 60, env={"K": "v"}, stderr=True) == (
        0,
        "ev\n",
    )
    assert commands.ask((sys.executable, "-c", code), 60, env={}) == (0, "None\n")
