"""Run a ninja build under a memory gate: as many compilers as fit, fewer when memory shrinks.

What happens at a look, several times a second, with `keep` bytes kept back (16 GiB):

    available ≥ keep         the build goes on
    below keep               ninja itself is stopped (SIGSTOP): what runs ends, nothing new starts
    below keep ÷ 2           all compilers but the oldest are stopped: they hold, but take no more
    below keep ÷ 4           the build is ended; half-written files are removed; it waits until a
                             job fits again, counts the jobs anew and goes on where it was

ninja keeps a log of what is done, so ending it loses at most the files in work. The same log, in the
same folder, is what a server looks at: see `kernels_flashinfer`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkling import kernels_jobs, procs
from sparkling.errors import SparklingError
from sparkling.files import write_atomic
from sparkling.memwatch import resident

LOG = ".ninja_log"
POLL_S = 0.2
TELL_S = 0.5
END_S = 5.0
_STATUS = re.compile(r"^@(\d+)/(\d+)@")
_OUTPUT = re.compile(r"(?:^|\s)-o\s+(\S+)")
_BUILD = re.compile(r"^build\s+(.+?)\s*:\s*(\S+)", re.M)


@dataclass(frozen=True)
class Gate:
    """What the build may take. `available` looks at the memory (bytes)."""

    available: Callable[[], int]
    cores: int
    keep: int = kernels_jobs.KEEP
    each: int = kernels_jobs.PER_JOB

    def jobs(self, env: Mapping[str, str]) -> kernels_jobs.Jobs:
        return kernels_jobs.jobs(self.available(), self.cores, env, keep=self.keep, each=self.each)


@dataclass(frozen=True)
class Tick:
    """Where a build is. `left_s` is None until two files are done."""

    done: int
    total: int
    running: int
    jobs: int
    available: int
    state: str  # "building" | "throttled" | "waiting for memory"
    left_s: float | None


@dataclass
class Result:
    """What a build did. `targets`: output → its seconds, and the most that its processes held."""

    done: int = 0
    total: int = 0
    seconds: float = 0.0
    jobs: int = 0
    throttled: int = 0  # times that compilers or ninja were stopped
    ended: int = 0  # times that the build was ended for memory and begun again
    lowest: int | None = None  # available memory, bytes
    targets: dict[str, dict[str, float]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    output: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.done == self.total


Progress = Callable[[Tick], None]


def outputs(ninja_file: Path) -> list[str]:
    """Every output that a build file names, in its order."""
    return [found[1] for found in _BUILD.finditer(ninja_file.read_text())]


def pending(folder: Path, ninja_file: Path, *, ninja: str, env: Mapping[str, str]) -> int:
    """How many targets ninja would build now (`ninja -n`); 0 when everything fits.

    It must be the ninja that the server calls: 1.13 does not read the log of 1.11, and then builds
    everything again. It even removes such a log when it only looks, so the log is put back.

    Raises:
        SparklingError: ninja refuses the build file.
    """
    log, kept = folder / LOG, None
    with contextlib.suppress(OSError):
        kept = log.read_bytes()
    done = subprocess.run(
        [ninja, "-n", "-C", str(folder), "-f", str(ninja_file)],
        env={**env, "NINJA_STATUS": "@%f/%t@ "},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if kept is not None and not log.exists():
        write_atomic(log, kept)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise SparklingError(f"ninja refuses {ninja_file}: {said[-1] if said else 'no reason'}.")
    totals = [int(found[2]) for line in done.stdout.splitlines() if (found := _STATUS.match(line))]
    return max(totals, default=0)


def build(
    folder: Path,
    ninja_file: Path,
    *,
    ninja: str,
    env: Mapping[str, str],
    gate: Gate,
    progress: Progress | None = None,
    wait_s: float = 3600.0,
) -> Result:
    """Build everything that is not built yet.

    Args:
        folder: where ninja works and keeps its log.
        ninja: the program.
        env: its environment; MAX_JOBS in it is obeyed if it is lower, and set for the compilers.
        wait_s: how long to wait for memory once the build was ended for it.

    Raises:
        SparklingError: a file does not compile, memory does not come back, or not even one job fits.
        UsageError: MAX_JOBS has a value that would do harm.
    """
    return _Builder(folder, ninja_file, ninja, dict(env), gate, progress, wait_s).run()


class _Builder:
    def __init__(
        self,
        folder: Path,
        ninja_file: Path,
        ninja: str,
        env: dict[str, str],
        gate: Gate,
        progress: Progress | None,
        wait_s: float,
    ) -> None:
        self.folder, self.file, self.ninja, self.env = folder, ninja_file, ninja, env
        self.gate, self.progress, self.wait_s = gate, progress, wait_s
        self.result = Result(total=len(outputs(ninja_file)))
        self.began = time.monotonic()
        self.built = 0  # in this call
        self.too_big: set[str] = set()  # ended for memory while nothing else ran
        self.building_s = 0.0
        self.jobs = 0

    def run(self) -> Result:
        result = self.result
        try:
            while True:
                left = pending(self.folder, self.file, ninja=self.ninja, env=self.env)
                result.done = result.total - left
                if left == 0:
                    return result
                self._await_room()
                if self._once():
                    continue  # ended for memory, or done: look again
        finally:
            result.seconds = time.monotonic() - self.began

    def _await_room(self) -> None:
        """Count the jobs; after an end for memory, wait until one fits."""
        deadline = time.monotonic() + (self.wait_s if self.result.ended else 0.0)
        while True:
            try:
                found = self.gate.jobs(self.env)
            except SparklingError as error:
                if error.exit_code == 2 or time.monotonic() >= deadline:
                    raise
                self._tell(0, "waiting for memory", self._look())
                time.sleep(POLL_S)
                continue
            self.jobs = self.result.jobs = found.count
            self.result.notices = found.notices
            return

    def _look(self) -> int:
        free = self.gate.available()
        lowest = self.result.lowest
        self.result.lowest = free if lowest is None else min(lowest, free)
        return free

    def _once(self) -> bool:
        """One run of ninja. True when it is done or was ended for memory; raises when it failed."""
        env = {
            **self.env,
            kernels_jobs.MAX_JOBS: str(self.jobs),
            "NINJA_STATUS": "@%f/%t@ ",
        }
        me = os.getpid()

        def before_exec() -> None:
            # Whoever builds may be killed: ninja then ends its compilers and itself.
            procs.prctl(procs.PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != me:
                os._exit(1)
            with contextlib.suppress(OSError):
                os.nice(10)

        ctypes.CDLL(None)  # loaded before the fork
        process = subprocess.Popen(
            [self.ninja, "-C", str(self.folder), "-f", str(self.file), "-j", str(self.jobs)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )
        run = _Run(process, self)
        try:
            return run.watch()
        finally:
            run.end()

    def _tell(self, running: int, state: str, free: int) -> None:
        if self.progress is None:
            return
        left = None
        if self.built >= 2:
            left = self.building_s / self.built * (self.result.total - self.result.done)
        self.progress(
            Tick(self.result.done, self.result.total, running, self.jobs, free, state, left)
        )


class _Run:
    """One ninja process and its compilers."""

    def __init__(self, process: subprocess.Popen[bytes], builder: _Builder) -> None:
        self.process, self.builder, self.result = process, builder, builder.result
        os.set_blocking(process.stdout.fileno(), False)
        self.text = ""
        self.holding = False  # ninja is stopped
        self.paused: set[int] = set()
        self.seen: dict[int, tuple[str, float]] = {}  # a job's pid → output, first seen
        self.begun_with = self.result.done

    def watch(self) -> bool:
        gate, told, looked = self.builder.gate, 0.0, 0.0
        last = time.monotonic()
        jobs: list[procs.Stat] = []
        while self.process.poll() is None:
            free = self.builder._look()
            now = time.monotonic()
            # The processes are looked at less often than the memory, for that costs more.
            if free < gate.keep or self.holding or now - looked >= TELL_S:
                looked, table = now, procs.table()
                jobs = self._jobs(table)
                self._note(jobs, table)
            if jobs and free < gate.keep // 4:
                self._end_for_memory(jobs)
                return True
            was = self.holding
            self._throttle(free, jobs)
            if self.holding and not was:
                told = 0.0  # a build that stands still says so at once
            self._read()
            self.builder.building_s += now - last
            last = now
            if now - told >= TELL_S:
                told = now
                held = self.holding or self.paused
                self.builder._tell(len(jobs), "throttled" if held else "building", free)
            time.sleep(POLL_S)
        self._read()
        self.builder._tell(0, "building", self.builder._look())
        if self.process.returncode != 0:
            raise self._failed()
        return True

    # -- what runs -----------------------------------------------------------------------------

    def _jobs(self, table: dict[int, procs.Stat]) -> list[procs.Stat]:
        """The jobs that ninja runs, oldest first."""
        below = procs.descendants(self.process.pid, table)
        mine = [one for one in below if one.ppid == self.process.pid and not one.dead]
        return sorted(mine, key=lambda one: (one.start, one.pid))

    def _note(self, jobs: list[procs.Stat], table: dict[int, procs.Stat]) -> None:
        """What each running target holds now."""
        for job in jobs:
            output, since = self.seen.get(job.pid, ("", time.monotonic()))
            # Asked until it tells: a child that is only just forked still has ninja's command.
            output = output or _output_of(job.pid)
            self.seen[job.pid] = (output, since)
            if not output:
                continue
            tree = [job.pid, *(one.pid for one in procs.descendants(job.pid, table))]
            held = sum(map(resident, tree))
            entry = self.result.targets.setdefault(output, {"seconds": 0.0, "peak": 0})
            entry["peak"] = max(entry["peak"], held)
            entry["seconds"] = time.monotonic() - since

    def _throttle(self, free: int, jobs: list[procs.Stat]) -> None:
        gate = self.builder.gate
        # With nothing running, stopping ninja would wait for memory that nobody gives back.
        hold = free < gate.keep and bool(jobs)
        if hold != self.holding:
            self.holding = hold
            self.result.throttled += hold
            self._signal(self.process.pid, signal.SIGSTOP if hold else signal.SIGCONT)
        if free < gate.keep // 2:
            for job in jobs[1:]:
                if job.pid not in self.paused:
                    self.paused.add(job.pid)
                    self._signal_tree(job.pid, signal.SIGSTOP)
        elif free >= gate.keep or (jobs and jobs[0].pid in self.paused):
            self._go_on()
        if jobs and jobs[0].pid in self.paused:  # the oldest one is done, the next may run
            self.paused.discard(jobs[0].pid)
            self._signal_tree(jobs[0].pid, signal.SIGCONT)

    def _go_on(self) -> None:
        for pid in self.paused:
            self._signal_tree(pid, signal.SIGCONT)
        self.paused.clear()

    # -- ends ----------------------------------------------------------------------------------

    def _end_for_memory(self, jobs: list[procs.Stat]) -> None:
        self.result.ended += 1
        unfinished = [self.seen[job.pid][0] for job in jobs if job.pid in self.seen]
        alone = unfinished[0] if len(jobs) == 1 and unfinished else ""
        held = self.result.targets.get(alone, {}).get("peak", 0)
        # The compilers first: they hold the memory.
        for job in jobs:
            self._signal_tree(job.pid, signal.SIGKILL)
        self.end()
        self._read()
        for output in unfinished:
            if output:
                self.result.targets.pop(output, None)
                with contextlib.suppress(OSError):
                    (self.builder.folder / output).unlink()
        if alone in self.builder.too_big:
            raise SparklingError(
                f"{Path(alone).name} alone takes more memory than there is: its compiler was ended "
                f"twice, at {held / 2**30:.1f} GiB; stop what else uses memory, or build elsewhere."
            )
        if alone:
            self.builder.too_big.add(alone)

    def end(self) -> None:
        """Nothing of this run is left afterwards."""
        if self.process.poll() is None:
            for number in (signal.SIGCONT, signal.SIGTERM):
                self._signal(self.process.pid, number)
            self._go_on()
            below = [
                procs.Identity(one.pid, one.start, procs.boot_id())
                for one in procs.descendants(self.process.pid)
            ]
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
            self.process.kill()
            self.process.wait()
            for one in below:
                procs.send(one, signal.SIGKILL)
            procs.wait_gone(below, END_S)
        self._read()
        self.process.stdout.close()

    def _failed(self) -> SparklingError:
        lines = self.result.output
        at = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), None)
        # After "FAILED: …" stands the command, which may well hold the word.
        after = lines if at is None else lines[at + 2 :]
        said = [line for line in after if "error" in line.lower()] or lines[-1:]
        what = Path(lines[at].split()[-1]).name if at is not None else "a target"
        why = f": {said[0].strip()[:300]}" if said else ""
        b = self.builder
        # ninja counts what failed as finished.
        with contextlib.suppress(SparklingError):
            left = pending(b.folder, b.file, ninja=b.ninja, env=b.env)
            self.result.done = self.result.total - left
        return SparklingError(
            f"{what} does not compile{why}; {self.result.done} of {self.result.total} are done, and "
            "another run goes on from there."
        )

    # -- small things --------------------------------------------------------------------------

    def _read(self) -> None:
        if self.process.stdout.closed:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.process.stdout.fileno(), 1 << 16):
                self.text += data.decode("utf-8", "replace")
        *lines, self.text = self.text.split("\n")
        for line in lines:
            found = _STATUS.match(line)
            if found:
                finished, total = int(found[1]), int(found[2])
                self.builder.built += max(
                    0, self.result.total - total + finished - self.result.done
                )
                self.result.done = self.result.total - total + finished
            else:
                self.result.output.append(line)
        del self.result.output[:-400]

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)

    def _signal_tree(self, pid: int, number: int) -> None:
        for one in [pid, *(below.pid for below in procs.descendants(pid))]:
            self._signal(one, number)


def _output_of(pid: int) -> str:
    """The file that a job of ninja writes, from its command; "" where it cannot be told."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found = _OUTPUT.search(b" ".join(words).decode("utf-8", "replace"))
        return found[1] if found else ""
    return ""
