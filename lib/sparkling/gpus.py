"""What nvidia-smi says of the GPUs, taken for what it is worth.

On a GB10 the memory of the GPU is the machine's own: drivers print `[N/A]` or `Not Supported` for
it, zeros, or a figure that is far too small (8128 MiB), and have no memory clock. What is not a
plain positive number is unknown here, never 0, and the machine's memory is read from /proc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparkling.commands import Ask, ask
from sparkling.lane import DRIVER_LIST, PROBE_TIMEOUT_S, Gpu, driver_list, parse_smi

MIB = 2**20
_SILENT = "did not answer"  # as `commands.ask` says of a time-out
SMI = "nvidia-smi"
LESS = ("name", "compute_cap", "driver_version", "memory.total", "memory.used")
"""What a driver is asked for that does not know all of FIELDS."""
FIELDS = (
    "name",
    "compute_cap",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
UNIFIED_CAPABILITIES = ("12.1", "11.0", "8.7", "7.2")
"""GPUs that have no memory of their own: GB10, and Jetson Thor, Orin and Xavier."""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU; None is "the driver does not say". Memory in bytes, clocks in MHz, power in W.

    asked: whether nvidia-smi answered for it. One that only the driver's list names may have any
    memory.
    """

    name: str
    capability: str | None = None
    driver: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    asked: bool = True

    @property
    def unified(self) -> bool:
        """Whether it draws from the machine's own memory: known by kind, else by its reporting no
        memory of its own. Of a GPU known by kind no figure for its memory is believed."""
        known = Gpu(self.name, self.capability).is_spark
        silent = self.asked and self.memory_total is None
        return known or self.capability in UNIFIED_CAPABILITIES or silent

    @property
    def memory_free(self) -> int | None:
        """Bytes free in its own memory; None where it has none, or does not say."""
        if self.unified or self.memory_total is None or self.memory_used is None:
            return None
        return max(0, self.memory_total - self.memory_used)


@dataclass(frozen=True)
class Gpus:
    """All GPUs, the newest CUDA version that the driver takes, and where this is from."""

    all: tuple[GpuFacts, ...] = ()
    cuda: str | None = None
    note: str = f"{SMI} is not installed"

    @property
    def unified(self) -> bool:
        """Whether the first GPU draws from the machine's own memory."""
        return bool(self.all) and self.all[0].unified

    @property
    def perhaps(self) -> bool:
        """Whether there is a GPU, or may be one behind a driver that does not answer."""
        return bool(self.all) or _SILENT in self.note


def _number(field: str) -> float | None:
    """A positive number (units allowed after it), else None: `[N/A]`, zeros and prose are not."""
    word = field.strip().split(" ")[0]
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) and float(word) > 0 else None


def parse_facts(text: str) -> tuple[GpuFacts, ...]:
    """Parse `nvidia-smi --query-gpu=FIELDS (or LESS) --format=csv,noheader,nounits`; odd lines are
    dropped."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        whole = len(cells) in (len(FIELDS), len(LESS))
        names = parse_smi(f"{cells[0]},{cells[1]}") if whole else ()
        if not names:
            continue
        cells += [""] * (len(FIELDS) - len(cells))
        total, used, sm, mem, power, limit, heat = (_number(cell) for cell in cells[3:])
        driver = cells[2] if re.match(r"\d+(\.\d+)*$", cells[2]) else None
        # 0 MiB in use of a known total is a fact; without a total it is nothing.
        idle = total is not None and cells[4].split(" ")[0] == "0"
        found.append(
            GpuFacts(
                names[0].name,
                names[0].capability,
                driver,
                None if total is None else int(total * MIB),
                0 if idle else None if used is None else int(used * MIB),
                sm,
                mem,
                power,
                limit,
                heat,
            )
        )
    return tuple(found)


def parse_cuda(text: str) -> str | None:
    """The CUDA version in the output of `nvidia-smi --version` (or of plain `nvidia-smi`)."""
    found = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", text)
    return found[1] if found else None


def look(
    ask: Ask = ask,
    timeout_s: float = PROBE_TIMEOUT_S,
    proc: Path = DRIVER_LIST,
    *,
    command: str = SMI,
    cuda: bool = True,
) -> Gpus:
    """Look at the GPUs. Never raises; after one time-out nothing more is asked.

    Args:
        ask: what runs a command; `timeout_s` is given to each call.
        proc: where the driver lists its GPUs, for when nvidia-smi does not answer.
        cuda: ask for the CUDA version too (one more call).
    """
    for fields in (FIELDS, LESS):  # less for a driver too old for one of the fields
        query = f"--query-gpu={','.join(fields)}"
        answer = ask((command, query, "--format=csv,noheader,nounits"), timeout_s)
        if isinstance(answer, str):
            break
        facts = parse_facts(answer[1]) if answer[0] == 0 else ()
        if facts:
            said = ask((command, "--version"), timeout_s) if cuda else ""
            version = None if isinstance(said, str) else parse_cuda(said[1])
            return Gpus(facts, version, f"{command} lists it")
    if isinstance(answer, str):
        note = answer
    else:
        code = answer[0]
        note = f"{command} fails with code {code}" if code else f"{command} lists no GPU"
    listed = tuple(GpuFacts(gpu.name, asked=False) for gpu in driver_list(proc))
    return Gpus(listed, None, f"the driver lists it, though {note}" if listed else note)


Holders = dict[int, int | None] | str
"""Processes that compute on a GPU: pid → bytes of its memory, None where that is not told. Or a
clause that says why nobody knows."""


def holders(
    ask: Ask = ask, timeout_s: float = PROBE_TIMEOUT_S, proc: Path = DRIVER_LIST
) -> Holders:
    """Who computes on a GPU. A driver that hangs or fails is not one on which nobody computes: then
    the answer is why it is unknown. {} where no driver lists a GPU.

    proc: where the driver lists its GPUs.
    """
    answer = ask(
        (SMI, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"), timeout_s
    )
    if isinstance(answer, str) or answer[0] != 0:
        note = answer if isinstance(answer, str) else f"{SMI} fails with code {answer[0]}"
        return note if _SILENT in note or driver_list(proc) else {}
    found: dict[int, int | None] = {}
    for line in answer[1].splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdigit():
            amount = _number(used)
            found[int(pid)] = None if amount is None else int(amount * MIB)
    return found


def not_alone(held: Holders, what: str) -> str | None:
    """Why `what` cannot have the GPU to itself, in one sentence, or None.

    what: the reason, as in "the kernels must have it to themselves".
    """
    if isinstance(held, str):
        return f"Nobody knows whether the GPU is idle ({held}), and {what}."
    if held:
        return (
            f"Process {next(iter(held))} computes on the GPU, and {what}: stop it (`sparkling stop` ends "
            "our servers) and run this again."
        )
    return None
