"""The process that owns a server: whatever dies, and however, nothing of the server is left.

Run as a script by `server.start`, with the standard library only. Two processes watch each other:

    notebook --pipe--> keeper (own session) --socket--> warden --> SGLang --> its workers

Keeper and warden are both child subreapers, so whatever SGLang starts stays below them even after
a double fork, a new session or a new name. If the notebook process dies, the keeper's pipe ends
and it has the warden stop SGLang in order. If the keeper dies, the warden's socket ends; if the
warden dies, SGLang gets SIGKILL from the kernel (PR_SET_PDEATHSIG) and the orphans fall to the
keeper: the survivor kills all that is left. Two are needed because the workers of a server that
is still importing protect themselves only later, so one SIGKILL too early would orphan them.

PR_SET_PDEATHSIG follows the *thread* that forked, and a notebook may start servers from any
thread. That is why the notebook only starts the keeper, and the warden's only early thread (its
main one) starts SGLang.

SGLang's output goes through the warden into the log, so that a secret can be struck out before
it reaches the disk: SGLang prints all its arguments, the API key among them. Secrets arrive on the
pipe and leave in a memory file (memfd); they are in no argument list and in no file.

The warden also watches the memory (`memwatch`): before the machine runs out it ends the server at
once, and says so in the log, in the run's `memory-events.jsonl` and to the notebook.

Protocol: one JSON object on stdin (`server.Server` writes it), then lines: `stop SECONDS`, and
`ready` once the server is. Events leave stdout as JSON lines: started, lost, memory, log-error,
exited, gone, failed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from types import ModuleType

TICK_S = 0.5
# A worker process that vanished takes SGLang down too, but SGLang first waits 5 s, and 60 s more
# when a scheduler is still alive (tokenizer_manager.py, crash diagnostics). We do not.
LOST_GRACE_S = 3.0
# Orderly stop when the notebook process or the keeper is gone: all must be over within 10 s.
ORPHAN_GRACE_S = 4.0
KILL_TIMEOUT_S = 20.0
WORKER = "sglang::"  # how SGLang's workers rename themselves, once they have imported it
MARK = "SPARKLING_SERVER_ID"
# Shared-memory files that SGLang, torch and multiprocessing leave behind when killed.
SHM_FAMILIES = ("sglang_", "sgl_", "sem.mp-", "torch_", "psm_", "nccl-", "cuda.shm.")
# Mapped by its scheduler from its making to its end, so one that nobody has mapped is nobody's.
LOADS = "sglang_loads_"


def _load(name: str) -> ModuleType:
    # By path: the folder must not go on sys.path, its module names could hide the library's.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"sparkling_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


procs = _load("procs") if __name__ == "__main__" else None
memwatch = _load("memwatch") if __name__ == "__main__" else None


class Redactor:
    """Strikes fixed secrets out of a byte stream, whatever the borders of its pieces.

    >>> r = Redactor([b"sk-12345678"])
    >>> r.feed(b"key sk-1234") + r.feed(b"5678!") + r.close()
    b'key [redacted]!'
    """

    SHOWN = b"[redacted]"

    def __init__(self, secrets: list[bytes]) -> None:
        # Longest first: a secret may contain another.
        self._secrets = sorted({one for one in secrets if one}, key=len, reverse=True)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        data = self._held + data
        for secret in self._secrets:
            data = data.replace(secret, self.SHOWN)
        # Hold back the longest tail that could be the beginning of a secret.
        hold = 0
        for secret in self._secrets:
            for size in range(min(len(secret) - 1, len(data)), hold, -1):
                if data.endswith(secret[:size]):
                    hold = size
                    break
        self._held = data[len(data) - hold :] if hold else b""
        return data[: len(data) - hold] if hold else data

    def close(self) -> bytes:
        held, self._held = self._held, b""
        return held


class Log(threading.Thread):
    """Pumps SGLang's output into the log file; never stops reading, so SGLang never blocks.

    The file is opened in append mode and reopened when it was moved away. What cannot be written
    (disk full) is dropped and counted.
    """

    def __init__(self, source: int, path: str, secrets: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._source, self._path = source, path
        self._redactor = Redactor(secrets)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.offset = os.fstat(self._file).st_size
        self.error: str | None = None
        self.lost = 0
        self.recent = b""

    def run(self) -> None:
        while True:
            try:
                data = os.read(self._source, 1 << 16)
            except OSError:
                data = b""
            self._write(self._redactor.feed(data) if data else self._redactor.close())
            if not data:
                break

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self.recent = (self.recent + data)[-16384:]
        try:
            self._reopen_if_moved()
            if self.lost:
                note = f"\n[sparkling] {self.lost} bytes of log lost: {self.error}\n"
                os.write(self._file, note.encode())
                self.lost = 0
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.error = os.strerror(error.errno) if error.errno else str(error)
            self.lost += len(data)

    def note(self, text: str) -> None:
        """A line of our own; whole, for the file is open for appending."""
        with contextlib.suppress(OSError):
            os.write(self._file, f"[sparkling] {text}\n".encode())

    def _reopen_if_moved(self) -> None:
        try:
            there, here = os.stat(self._path), os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                return
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fresh = os.open(self._path, flags, 0o644)
        os.close(self._file)
        self._file = fresh


def _is_spawned(pid: int) -> bool:
    """Whether this is a child of Python's multiprocessing: SGLang's workers begin as such."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.spawn" in file.read()
    except OSError:
        return False


def _wakeup() -> int:
    """A file descriptor that becomes readable when a signal arrives."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _drain(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except BlockingIOError:
        return b""
    except OSError:
        return b""


# --------------------------------------------------------------------------- shared memory


def _shm_of(pid: int) -> set[str]:
    """Paths in /dev/shm that a process has mapped; empty for one that is gone or not ours."""
    found = set()
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                if "/dev/shm/" in line:
                    found.add(line.rstrip("\n").split(None, 5)[-1])
    return found


def _mapped_shm() -> set[str]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return set().union(*map(_shm_of, pids))


def _loads() -> set[str]:
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return set()
    return {os.path.join("/dev/shm", name) for name in names if name.startswith(LOADS)}


# --------------------------------------------------------------------------- warden


class Warden:
    """Starts SGLang, pumps its output, notices deaths, stops it, and buries what is left."""

    def __init__(self, spec: dict, keeper: socket.socket, keeper_pid: int) -> None:
        self.spec, self.keeper, self.keeper_pid = spec, keeper, keeper_pid
        self.child: subprocess.Popen | None = None
        self.log: Log | None = None
        self.code: int | None = None
        self.reason: str | None = None
        self.kill_at: float | None = None
        self.workers: dict[int, tuple[int, str]] = {}
        self.unseen: set[int] = set()
        self.shm: set[str] = set()
        self.loads_before = _loads()
        self.next_scan = 0.0
        self.scans = 0
        self.log_error_told = False
        self.terminated = False
        self.orphaned = False
        asked = spec.get("memory")
        self.limits = memwatch.Limits.from_json(asked["limits"]) if asked else None
        self.watch = memwatch.Watch(self.limits) if asked else None
        self.gpu = None

    def tell(self, **event: object) -> None:
        with contextlib.suppress(OSError):
            self.keeper.sendall(json.dumps(event).encode() + b"\n")

    def run(self) -> None:
        procs.prctl(procs.PR_SET_NAME, b"spark-warden")
        procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)
        procs.prctl(procs.PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup = _wakeup()
        try:
            self._spawn()
        except OSError as error:
            name = error.filename or self.spec["argv"][0]
            self.tell(event="failed", error=f"{error.strerror or error}: {name}")
            return
        try:
            while self._step(wakeup):
                pass
        finally:
            left = self._bury()
        self.tell(
            event="exited",
            code=self.code,
            reason=self.reason,
            left=[[one.pid, one.name, one.state] for one in left],
            log_error=self.log.error,
            recent=self.log.recent.decode("utf-8", "replace") if self.log.error else "",
        )

    def _on_term(self, *_: object) -> None:
        self.terminated = True

    def _spawn(self) -> None:
        spec = self.spec
        read, write = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            import fcntl

            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.log = Log(read, spec["log"], [one.encode() for one in spec["redact"]])
        argv, handles, link = list(spec["argv"]), [], None
        if spec.get("config"):
            # SGLang reads further arguments from a file; here the file is memory, and the link
            # exists only because SGLang insists on a name that ends in .yaml.
            memory = os.memfd_create("sparkling", os.MFD_CLOEXEC)
            os.write(memory, spec["config"].encode())
            os.lseek(memory, 0, os.SEEK_SET)
            link = os.path.join(spec["tmp"], "secret.yaml")
            os.symlink(f"/proc/self/fd/{memory}", link)
            argv += ["--config", link]
            handles.append(memory)
        me = os.getpid()

        def before_exec() -> None:
            # In the forked child, still single-threaded.
            procs.prctl(procs.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                # Out of memory, the kernel should take the server, not the notebook or sshd.
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("500")

        self.child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            env=spec["env"],
            cwd=spec["cwd"],
            pass_fds=handles,
            process_group=0,
            preexec_fn=before_exec,
        )
        os.close(write)
        for handle in handles:
            os.close(handle)
        self.log.start()
        if self.limits is not None and self.limits.gpu:
            self.gpu = memwatch.GpuMemory(self.limits.interval_s)
            self.gpu.start()
        self.tell(
            event="started",
            server=procs.identify(self.child.pid).to_json(),
            pgid=self.child.pid,
            warden=procs.identify(me).to_json(),
            offset=self.log.offset,
            pipe=os.fstat(read).st_ino,
            time=time.time(),
        )

    def _step(self, wakeup: int) -> bool:
        """One round of the loop; False when SGLang's main process is gone."""
        sources = [wakeup] if self.orphaned else [wakeup, self.keeper]
        tick = TICK_S if self.limits is None else min(TICK_S, self.limits.interval_s)
        ready, _, _ = select.select(sources, [], [], tick)
        if self._out_of_memory():
            return False
        if wakeup in ready:
            _drain(wakeup)
        if self.keeper in ready:
            data = b""
            with contextlib.suppress(OSError):
                data = self.keeper.recv(4096)
            self.orphaned = not data
            for line in data.decode("utf-8", "replace").splitlines():
                words = line.split()
                if len(words) == 2 and words[0] == "stop":
                    self._stop(float(words[1]), "stopped")
                elif words == ["ready"]:
                    self._collect_shm()
        if os.getppid() != self.keeper_pid:
            self.orphaned = True
        if self.orphaned or self.terminated:
            self.terminated = False
            grace_s = min(ORPHAN_GRACE_S, self.spec["grace_s"])
            self._stop(grace_s, "the keeper is gone" if self.orphaned else "terminated")
        self._reap()
        if self.code is not None:
            return False
        self._watch_workers()
        if self.log.error and not self.log_error_told:
            self.log_error_told = True
            self.tell(event="log-error", error=self.log.error)
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.reason = self.reason or "a worker died"
            return False
        return True

    def _out_of_memory(self) -> bool:
        """One look at the memory; true when the server has just been killed for it."""
        if self.watch is None:
            return False
        free = memwatch.available(self.limits)
        level = self.watch.feed(time.monotonic(), free)
        if level is None:
            return False
        event = {
            **self.spec["memory"].get("about", {}),
            "time": time.time(),
            "level": level,
            "available": free,
            "total": self.limits.total,
            "warn": self.limits.warn,
            "end": self.limits.end,
            "pid": self.child.pid,
        }
        if level == "end":
            # First of all, and at once: an orderly stop takes seconds the machine may not have.
            self.reason = self.reason or "memory"
            boot, below = procs.boot_id(), procs.descendants(os.getpid())
            event["server_resident"] = sum(memwatch.resident(stat.pid) for stat in below)
            for stat in below:
                procs.send(procs.Identity(stat.pid, stat.start, boot), signal.SIGKILL)
        if self.gpu is not None and self.gpu.free is not None:
            event.update(gpu_available=self.gpu.free, gpu_total=self.gpu.total)
        if level != "recovered":
            event["biggest"] = memwatch.biggest()
        self.log.note(f"memory: {memwatch.sentence(event)}")
        self.tell(event="memory", **event)
        memwatch.record(self.spec["memory"]["events"], event)
        return level == "end"

    def _stop(self, grace_s: float, reason: str) -> None:
        limit = time.monotonic() + grace_s
        self.kill_at = limit if self.kill_at is None else min(limit, self.kill_at)
        if self.reason is not None:
            return
        self.reason = reason
        self._collect_shm()
        # The main process only: it asks its schedulers to release their memory and then ends
        # them. Signalled themselves they die at once, which SGLang takes for a crash.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.child.returncode = self.code

    def _watch_workers(self) -> None:
        for pid, (start, name) in list(self.workers.items()):
            stat = procs.read_stat(pid)
            gone = stat is None or stat.start != start
            if gone or stat.dead:
                del self.workers[pid]
                # Before it has its name it is any helper process, which may end in peace; a
                # signal or an error shows as long as SGLang has not taken notice of it.
                peaceful = not name.startswith(WORKER) and (gone or stat.exit_code == 0)
                if not peaceful:
                    self._lose(pid, name)
        now = time.monotonic()
        if now < self.next_scan:
            return
        # Workers appear while the server starts: look often at first, seldom later.
        self.scans += 1
        self.next_scan = now + (1.0 if self.scans < 120 else 10.0)
        unseen = set()
        for stat in procs.descendants(self.child.pid):
            named = stat.name.startswith(WORKER)
            if not stat.dead and (named or _is_spawned(stat.pid)):
                self.workers[stat.pid] = (stat.start, stat.name)
            elif stat.dead and stat.ppid == self.child.pid and stat.exit_code & 0x7F:
                # Killed before it was ever seen alive. SGLang takes notice of its workers only
                # when all are loaded, but of a helper that it ends itself at once.
                unseen.add(stat.pid)
                if stat.pid in self.unseen:
                    self._lose(stat.pid, stat.name)
        self.unseen = unseen
        if self.scans % 10 == 0:
            self._collect_shm()

    def _lose(self, pid: int, name: str) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + LOST_GRACE_S
            self.tell(event="lost", pid=pid, name=name)

    def _collect_shm(self) -> None:
        for stat in procs.descendants(os.getpid()):
            for path in _shm_of(stat.pid):
                if os.path.basename(path).startswith(SHM_FAMILIES):
                    self.shm.add(path)

    def _bury(self) -> list:
        self._collect_shm()
        left = procs.kill_descendants(KILL_TIMEOUT_S)
        if self.child.returncode is None:
            self.child.returncode = -signal.SIGKILL
        # Every holder of the pipe is dead, so the pump meets its end at once.
        self.log.join(5.0)
        # A server killed between two looks at its maps has left a file we never saw.
        for path in self.shm | (_loads() - self.loads_before - _mapped_shm()):
            with contextlib.suppress(OSError):
                if os.stat(path).st_uid == os.getuid():
                    os.unlink(path)
        _remove_tree(self.spec["tmp"])
        if self.orphaned:
            _remove_record(self.spec["state"])
        return left


# --------------------------------------------------------------------------- keeper


class Keeper:
    """Stands between the notebook process and the warden, and outlives neither for long."""

    def __init__(self, spec: dict) -> None:
        self.spec = spec
        self.warden_pid = 0
        self.warden: socket.socket | None = None
        self.state: dict = {}
        self.exit_event: dict | None = None
        self.deadline: float | None = None
        self.buffer = b""
        self.commands = b""
        self.notebook_open = True
        self.terminated = False

    def tell(self, **event: object) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(event).encode() + b"\n")

    def run(self) -> None:
        spec = self.spec
        procs.prctl(procs.PR_SET_NAME, b"spark-keeper")
        procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)
        spec["tmp"] = tempfile.mkdtemp(prefix="sparkling-", dir=spec["tmp_base"])
        spec["env"]["TMPDIR"] = spec["tmp"]
        self.state = {
            "id": spec["id"],
            "phase": "starting",
            "keeper": procs.identify(os.getpid()).to_json(),
            "port": spec["port"],
            "log": spec["log"],
            "tmp": spec["tmp"],
            "argv": spec["argv"],
            "started": time.time(),
        }
        try:
            self._save_state()
            self._fork_warden()
            signal.signal(signal.SIGTERM, self._on_term)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            wakeup = _wakeup()
            self._obey()
            while self._step(wakeup):
                pass
        finally:
            left = procs.kill_descendants(KILL_TIMEOUT_S)
            _remove_tree(spec["tmp"])
            _remove_record(spec["state"])
            if spec.get("claim"):
                _remove_record(spec["claim"])
        event = self.exit_event or {"event": "exited", "code": None, "reason": "the warden died"}
        event["left"] = [[one.pid, one.name, one.state] for one in left]
        self.tell(**{**event, "event": "gone"})

    def _on_term(self, *_: object) -> None:
        self.terminated = True

    def _fork_warden(self) -> None:
        ours, theirs = socket.socketpair()
        keeper_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                # The notebook's pipes are the keeper's alone.
                null = os.open(os.devnull, os.O_RDWR)
                for handle in (0, 1, 2):
                    os.dup2(null, handle)
                warden = Warden(self.spec, theirs, keeper_pid)
                try:
                    warden.run()
                    code = 0
                except Exception as error:
                    warden.tell(event="failed", error=f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        theirs.close()
        self.warden_pid, self.warden = pid, ours

    def _step(self, wakeup: int) -> bool:
        sources = [self.warden, wakeup] + ([0] if self.notebook_open else [])
        ready, _, _ = select.select(sources, [], [], TICK_S)
        if wakeup in ready:
            _drain(wakeup)
        if self.warden in ready and not self._hear_warden():
            return False
        if 0 in ready:
            self._hear_notebook()
        # The pipe stays open if a fork of the notebook process holds its end; a new parent does
        # tell that the notebook process is gone.
        if self.notebook_open and os.getppid() != self.spec["parent"]:
            self._notebook_gone()
        if self.terminated:
            self.terminated = False
            self._stop(self.spec["grace_s"])
        return self.deadline is None or time.monotonic() < self.deadline

    def _hear_warden(self) -> bool:
        try:
            data = self.warden.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return False
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "exited":
                self.exit_event = event
            elif event["event"] == "started":
                self.state.update(
                    phase="running",
                    server=event["server"],
                    pgid=event["pgid"],
                    warden=event["warden"],
                    pipe=event["pipe"],
                )
                self._save_state()
            self.tell(**event)
        return True

    def _hear_notebook(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self._notebook_gone()
            return
        self.commands += data
        self._obey()

    def _obey(self) -> None:
        *lines, self.commands = self.commands.split(b"\n")
        for line in lines:
            words = line.decode("utf-8", "replace").split()
            if len(words) == 2 and words[0] == "stop":
                self._stop(float(words[1]))
            elif words == ["ready"]:
                with contextlib.suppress(OSError):
                    self.warden.sendall(b"ready\n")

    def _notebook_gone(self) -> None:
        self.notebook_open = False
        self._stop(min(ORPHAN_GRACE_S, self.spec["grace_s"]))

    def _stop(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            self.warden.sendall(f"stop {grace_s}\n".encode())
        limit = time.monotonic() + grace_s + 3.0
        self.deadline = limit if self.deadline is None else min(limit, self.deadline)

    def _save_state(self) -> None:
        path = self.spec["state"]
        fresh = f"{path}.{os.getpid()}.new"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(fresh, "w") as file:
                json.dump(self.state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except OSError as error:
            # A full disk must not keep the server from being guarded: the record is for
            # `sparkling stop` only.
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            self.tell(event="log-error", error=os.strerror(error.errno or errno.EIO))


def _remove_tree(path: str) -> None:
    if os.path.basename(path).startswith("sparkling-"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_record(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def _read_spec() -> tuple[dict | None, bytes]:
    """The first line of stdin as JSON, and what came after it already."""
    data = b""
    while b"\n" not in data:
        piece = os.read(0, 1 << 16)
        if not piece:
            return None, b""
        data += piece
    line, rest = data.split(b"\n", 1)
    return json.loads(line), rest


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    spec, rest = _read_spec()
    if spec is None or os.getppid() != spec["parent"]:
        return 0
    keeper = Keeper(spec)
    keeper.commands = rest
    try:
        keeper.run()
    except Exception as error:
        keeper.tell(event="failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
