"""Start a server, wait until it really answers, stop it. Process, log and port are owned here.

A start goes through `keeper.py`, a process of its own that outlives nothing: see there for what
happens when anything is killed. The notebook process holds a pipe to it, nothing else.

"Ready" means that the process lives, that HTTP answers, that it is *this* process which listens on
the port, that an API key is demanded if one was set, and that one token was generated.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkling import (
    claims,
    gpus,
    headcheck,
    kernels_flashinfer,
    kernels_jobs,
    machine,
    memory,
    memwatch,
    procs,
    toolpath,
)
from sparkling import log as _log
from sparkling._rules import FP8_HEAD_VARIABLES, PLUGIN_VARIABLES
from sparkling.errors import ServerError, UsageError
from sparkling.ports import DEFAULT_PORT, HOST, free_port, reserve
from sparkling.readiness import Progress, StartFailed, TokenProbe, Waiting

if TYPE_CHECKING:
    from sparkling.client import Client
    from sparkling.recipe import Launch

__all__ = [
    "Progress",
    "Server",
    "ServerError",
    "StartFailed",
    "child_environment",
    "free_port",
    "new_api_key",
    "start",
    "stop_all",
]

MARK = "SPARKLING_SERVER_ID"
STATE_FOLDER = ".servers"
MEMORY_EVENTS = "memory-events.jsonl"  # in the run's folder

# How long an orderly stop may take. SGLang looks every 5 s whether it was asked to stop, then has
# its schedulers release their memory. A server on the CPU has no device memory to release.
GRACE_S = 15.0
CPU_GRACE_S = 1.0

# A key that needs no quoting anywhere: not in YAML, JSON, an HTTP header or a Python repr. Only so
# can it be struck out of a log reliably.
WORD_S = 5.0  # a watchdog's word after the server that it killed; mostly it takes milliseconds
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~+/=-]{7,199}")
# Set by Jupyter for its own process; a server that inherits them imports the notebook's matplotlib
# backend or colours its log.
_NOT_INHERITED = (
    "MPLBACKEND",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "JPY_PARENT_PID",
    "JPY_SESSION_NAME",
    "PYTHONHOME",
    "__PYVENV_LAUNCHER__",
)
# What a stage is: a recipe sets these, a caller's shell does not.
SWITCH_VARIABLES = dict.fromkeys((*PLUGIN_VARIABLES, *FP8_HEAD_VARIABLES))


# --------------------------------------------------------------------------- environment


def _short_tmp() -> str:
    # SGLang puts Unix sockets there, whose paths may be 107 bytes long.
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"


def _loopback_unproxied(env: dict[str, str]) -> None:
    """Keep loopback out of any proxy: the server's own warm-up calls itself."""
    for name in ("no_proxy", "NO_PROXY"):
        listed = [one.strip() for one in env.get(name, "").split(",") if one.strip()]
        if "*" not in listed:
            listed += [one for one in (HOST, "localhost", "::1") if one not in listed]
        env[name] = ",".join(listed)


def child_environment(
    launch_env: Mapping[str, str],
    python: Path,
    *,
    extra: Mapping[str, str] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The server's environment: this process's, the recipe's additions, and what isolation needs.

    Precedence: `extra` over the recipe over the inherited one. PATH begins with the server
    environment's own tools and ours; loopback is never proxied. A switch that somebody's shell
    exports is not inherited: two stages differ in what their recipe says and in nothing else.
    """
    env = dict(os.environ if base is None else base)
    for name in (*_NOT_INHERITED, *SWITCH_VARIABLES):
        env.pop(name, None)
    home = python.parent
    toolpath.equip(env, python)
    if (home.parent / "pyvenv.cfg").exists():
        env["VIRTUAL_ENV"] = str(home.parent)
    else:
        env.pop("VIRTUAL_ENV", None)
    # Otherwise the folder the server runs in would come first on its module path.
    env["PYTHONSAFEPATH"] = "1"
    env.update(launch_env)
    env.update(extra or {})
    _loopback_unproxied(env)
    return env


def new_api_key() -> str:
    """A fresh random API key."""
    return "sk-" + secrets.token_hex(24)


def _check_key(key: str | None) -> None:
    if key is not None and not _KEY.fullmatch(key):
        raise UsageError(
            "The API key must be 8 to 200 letters, digits or . _ ~ + / = - and begin with a letter "
            "or digit, so that it can be kept out of logs reliably."
        )


# --------------------------------------------------------------------------- start


# Strong references: a server nobody holds any more still runs until it is stopped.
_SERVERS: set[Server] = set()


def start(
    launch: Launch,
    *,
    python: Path,
    log: Path,
    api_key: str | None = None,
    deadline_s: float = 180,
    extra_env: Mapping[str, str] | None = None,
    wait: bool = True,
    progress: Progress | None = None,
    exact_port: bool | None = None,
    runs: Path | None = None,
    consent: bool = False,
    watch: memwatch.Limits | None = None,
) -> Server:
    """Start the server that `launch` describes, if its memory will last.

    What it needs is summed up first (`memory.need_of`), and one model at a time holds a GPU
    (`claims`). While it runs its warden watches the memory and ends it before the machine runs out:
    see `Server.memory_events`.

    Args:
        launch: the rendered recipe. Its argv is used word for word; only a busy or zero port is
            replaced (see `exact_port`).
        python: the server environment's interpreter.
        log: file that the output is appended to. Old content is never read.
        api_key: demanded from clients. It stands in no argument list, environment or file.
        deadline_s: seconds until the server must be ready.
        extra_env: added to the environment, over the recipe's.
        wait: wait until ready; otherwise call `Server.wait_ready`.
        progress: called with the phase and the seconds since the start, about once a second.
        exact_port: refuse a busy port instead of taking another. Default: only a port other than
            0 and 30000 is taken literally.
        runs: the folder whose `.servers/` records this server for `stop_all`. Default: the folder
            named `runs` (or $SPARKLING_RUNS) above `log`, else the log's own.
        consent: the risk of a high --mem-fraction-static on a Spark is accepted (`memory.need_of`).
        watch: where the watchdog warns and ends the server; `memory.watch_limits()` if not given.

    Raises:
        UsageError: interpreter or checkpoint missing, bad API key, a head that cannot be FP8.
        NoMemory: what it needs is not there, or another model holds the GPU.
        ServerError: port taken.
        StartFailed: the server died, hangs or answers without generating. It is stopped then.
    """
    _check_key(api_key)
    python, log = Path(python), Path(log).absolute()
    if not os.access(python, os.X_OK):
        raise UsageError(
            f"The server environment's Python {python} is missing; run scripts/setup.sh (on a GPU: "
            "`sparkling setup`), or set SPARKLING_SERVER_PYTHON."
        )
    if api_key is not None and "--config" in launch.argv:
        raise UsageError(
            "The recipe passes --config to SGLang, which takes only one such file; the API key "
            "needs it, so move the recipe's settings into flags."
        )
    _check_model(launch.argv)
    headcheck.require(launch)
    if not _on_cpu(launch.argv):
        toolpath.cuda_home()  # a bad one would cost a failed compile, after the weights
    need = memory.need_of(launch, consent=consent)
    if need is not None:
        need.require()
        _check_kernels(launch, need, python, extra_env)
    if watch is None:
        watch = memory.watch_limits(gpu=not _on_cpu(launch.argv))
    wanted = launch.port
    if exact_port is None:
        exact_port = wanted not in (0, DEFAULT_PORT)
    attempts = 1 if exact_port or not wait else 3
    for attempt in range(1, attempts + 1):
        # Somebody outside may take the port while the server is loading: then another one.
        port, lock = reserve((wanted or None) if attempt == 1 else None, exact_port)
        placed = launch if port == wanted else launch.with_port(port)
        server = Server(
            placed, python, log, api_key, port, lock, extra_env or {}, runs, need, watch
        )
        if not wait:
            return server
        try:
            server.wait_ready(deadline_s, progress=progress)
            return server
        except StartFailed as error:
            taken = error.diagnosis is not None and error.diagnosis.kind == "port"
            if not taken or attempt == attempts:
                raise
    raise AssertionError("unreachable")


def _check_kernels(
    launch: Launch, need: memory.Need, python: Path, extra: Mapping[str, str] | None
) -> None:
    """With one memory pool, FlashInfer must not compile its experts beside the loaded model."""
    if need.kind != "unified" or launch.value("moe-runner-backend") != "flashinfer_mxfp4":
        return
    if launch.value("load-format") == "dummy":
        return  # the kernel probe: a few layers, there to have the rules written
    env = child_environment(launch.env, python, extra=extra)
    if not kernels_flashinfer.compiled_somewhere(python, env):
        raise memory.NoMemory(
            f"{launch.stage} is not started: its CUTLASS kernels are not compiled, and compiling them "
            "beside the loaded model is what locks a Spark; run `sparkling kernels build` first "
            "(notebook 30_kernels)."
        )


def _check_model(argv: tuple[str, ...]) -> None:
    for flag in ("--model-path", "--model"):
        if flag in argv[:-1]:
            model = argv[argv.index(flag) + 1]
            # Anything else may be a name on a model hub.
            if model.startswith(("/", "./", "../", "~")) and not os.path.isdir(
                os.path.expanduser(model)
            ):
                raise UsageError(
                    f"There is no checkpoint at {model}; download or build it (notebook "
                    "20_weights), or point SPARKLING_MODEL at it."
                )


def _run_folder(log: Path) -> Path:
    """The run that a log belongs to, known by its manifest; else the log's own folder."""
    return next((one for one in log.parents if (one / "manifest.json").is_file()), log.parent)


def _runs_folder(log: Path) -> Path:
    told = os.environ.get("SPARKLING_RUNS")
    if told and Path(told).absolute() in log.parents:
        return Path(told).absolute()
    for folder in log.parents:
        if folder.name == "runs" or (folder / STATE_FOLDER).is_dir():
            return folder
    return log.parent


class Server:
    """A running server. Use `start` to make one; a `with` block stops it at the end.

    Attributes:
        url: base URL, `http://127.0.0.1:PORT`.
        port: the port it listens on.
        pid: SGLang's main process.
        log: its log; `offset` is where this start begins in it, in bytes.
        status_file: where the plugin writes what is live.
        launch: what was started, with the port in use.
        started: wall-clock time of the start (seconds since 1970).
        ready_seconds: seconds from start to ready, None before.
        need: what it was reckoned to need of the memory (`memory.Need`), None where unknown.
        memory_events: what the watchdog told so far, oldest first; each has `level` ("warn",
            "recovered" or "end"), `available`, `total`, `time`, `biggest` (see `memwatch`).
    """

    def __init__(
        self,
        launch: Launch,
        python: Path,
        log: Path,
        api_key: str | None,
        port: int,
        lock: socket.socket,
        extra_env: Mapping[str, str],
        runs: Path | None,
        need: memory.Need | None = None,
        watch: memwatch.Limits | None = None,
    ) -> None:
        self.need = need
        self.memory_events: list[dict[str, Any]] = []
        self.launch, self.python, self.log, self.port = launch, python, log, port
        self.url = f"http://{HOST}:{port}"
        self.api_key = api_key
        self.id = secrets.token_hex(6)
        self.status_file = log.with_name(log.stem + ".status.json")
        self.started = time.time()
        self.ready_seconds: float | None = None
        self.pid = 0
        self.offset = 0
        self._identity: procs.Identity | None = None
        self._warden: procs.Identity | None = None
        self._pipe = 0
        self._began = time.monotonic()
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._buffer = b""
        self._noise: list[str] = []
        self._ended: dict[str, Any] | None = None
        self._lost: dict[str, Any] | None = None
        self._log_error: str | None = None
        self._stopped = False
        self._memory_before = procs.memory_available()
        self._oom_before = procs.oom_kills()
        self._on_cpu = _on_cpu(launch.argv)
        self._grace_s = CPU_GRACE_S if self._on_cpu else GRACE_S
        try:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                self.status_file.unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(
                    f"The server's log cannot be kept in {log.parent}: {error.strerror}."
                ) from error
            with self._claimed():
                self._keeper = self._start_keeper(python, lock, extra_env, runs, watch)
        finally:
            # The keeper holds the port's lock from now on.
            lock.close()
        _SERVERS.add(self)
        try:
            self._await_start()
        except BaseException:
            self.stop()
            raise

    # -- starting ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Note what this server will take, if nobody else's need stands against it."""
        self._claim: Path | None = None
        device = not self._on_cpu and gpus.look(cuda=False).perhaps
        if self.need is None and not device:
            yield
            return
        what = f"{self.launch.recipe}, stage {self.launch.stage}, on port {self.port}"
        size = self.need.peak if self.need else 0
        available = self.need.available if self.need else None
        with claims.table() as held:
            held.require(what, size, device=device, available=available)
            self._claim = held.path(self.id)
            yield
            who = procs.identify(self._keeper.pid)
            if who is not None:
                held.add(self.id, who, what, size, device=device)

    def _start_keeper(
        self,
        python: Path,
        lock: socket.socket,
        extra_env: Mapping[str, str],
        runs: Path | None,
        watch: memwatch.Limits | None,
    ) -> subprocess.Popen[bytes]:
        extra = {
            **self._kept_caches(),
            **self._few_jobs(),
            **extra_env,
            MARK: self.id,
            "SPARKLING_STATUS_FILE": str(self.status_file),
        }
        folder = Path(runs).absolute() if runs is not None else _runs_folder(self.log)
        key = self.api_key
        spec = {
            "id": self.id,
            "parent": os.getpid(),
            "argv": [str(python), *self.launch.argv],
            "env": child_environment(self.launch.env, python, extra=extra),
            "cwd": str(self.log.parent),
            "log": str(self.log),
            "state": str(folder / STATE_FOLDER / f"{self.id}.json"),
            "port": self.port,
            "tmp_base": _short_tmp(),
            "grace_s": self._grace_s,
            # JSON is YAML; SGLang reads the file as YAML.
            "config": json.dumps({"api-key": key}) if key else None,
            "redact": [key] if key else [],
            "claim": str(self._claim) if self._claim else None,
            "memory": self._watched(watch),
        }
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), self.id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
            cwd="/",
        )
        try:
            keeper.stdin.write(json.dumps(spec).encode() + b"\n")
            keeper.stdin.flush()
        except OSError as error:
            keeper.kill()
            keeper.wait()
            raise ServerError(f"The keeper process did not start: {error}.") from error
        os.set_blocking(keeper.stdout.fileno(), False)
        return keeper

    def _kept_caches(self) -> dict[str, str]:
        """Compiled kernels that would otherwise lie in TMPDIR, which is removed with the server."""
        name = "TORCHINDUCTOR_CACHE_DIR"
        if self._on_cpu or name in os.environ or name in self.launch.env:
            return {}
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return {name: os.path.join(base, "sparkling", "torchinductor")}

    def _few_jobs(self) -> dict[str, str]:
        """MAX_JOBS, should something be compiled beside the loaded model after all."""
        if self._on_cpu:
            return {}
        free = self._memory_before or 0
        held = self.need.peak if self.need and self.need.kind == "unified" else 0
        return {kernels_jobs.MAX_JOBS: kernels_jobs.beside(free, held, machine.cpus())}

    def _watched(self, limits: memwatch.Limits | None) -> dict[str, Any] | None:
        """What the warden is told about watching the memory."""
        if limits is None:
            return None
        about = {
            "server": self.id,
            "recipe": self.launch.recipe,
            "stage": self.launch.stage,
            "port": self.port,
            "log": str(self.log),
        }
        events = str(_run_folder(self.log) / MEMORY_EVENTS)
        return {"limits": limits.to_json(), "events": events, "about": about}

    def _await_start(self) -> None:
        """Wait until the process exists (not until it is ready)."""
        deadline = time.monotonic() + 60.0
        while self.pid == 0 and self._ended is None and time.monotonic() < deadline:
            self._hear(0.2)
        if self.pid == 0:
            reason = (self._ended or {}).get("error") or " ".join(self._noise[-3:]) or "no answer"
            raise StartFailed(
                f"The server process could not be started ({reason}).", tail=[], log=self.log
            )

    def _hear(self, timeout_s: float = 0.0) -> None:
        """Take in what the keeper reports."""
        with self._lock:
            pipe = self._keeper.stdout
            if pipe.closed:
                return
            ready, _, _ = select.select([pipe], [], [], timeout_s)
            if not ready:
                return
            try:
                data = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                pipe.close()
                self._ended = self._ended or {"event": "gone", "code": None, "reason": "keeper"}
                return
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    self._noise.append(line.decode("utf-8", "replace"))
                    continue
                self._on_event(event)

    def _tell(self, command: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._keeper.stdin.write(command.encode() + b"\n")
            self._keeper.stdin.flush()

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "started":
            self._identity = procs.Identity.from_json(event["server"])
            self._warden = procs.Identity.from_json(event["warden"])
            self.pid = event["server"]["pid"]
            self.offset = event["offset"]
            self._pipe = event["pipe"]
            self.started = event["time"]
        elif kind == "lost":
            self._lost = event
        elif kind == "log-error":
            self._log_error = event["error"]
        elif kind == "memory":
            self.memory_events.append({k: v for k, v in event.items() if k != "event"})
        elif kind in ("exited", "failed"):
            self._ended = event
            self._log_error = event.get("log_error") or self._log_error
        elif kind == "gone":
            self._ended = {**(self._ended or {}), **event}

    # -- state ---------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether SGLang's main process runs. A zombie does not."""
        self._hear()
        return self._ended is None and procs.is_alive(self._identity)

    def events(self) -> list[_log.Event]:
        """The typed log events of this start."""
        if not self.log.exists():
            return []
        return list(_log.parse(self.log, offset=self.offset))

    def processes(self) -> list[procs.Identity]:
        """Every living process of the server, its workers included."""
        found = _members(self.id, self._keeper.pid, self._identity, self._pipe)
        return [one for one in found if one != self._warden]

    def tail(self, n: int = 20) -> list[str]:
        """The last `n` lines of this start's output; of progress bars only the last state."""
        try:
            with open(self.log, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self.offset if self.offset <= size else 0
                begin = file.seek(max(begin, size - (1 << 16) - n * 200))
                text = file.read(size - begin).decode("utf-8", "replace")
        except OSError:
            text = ""
        if not text and self._ended:
            text = self._ended.get("recent", "")
        lines = [line[:500] for line in _log.split_lines(text) if line.strip()]
        last = self.ended_for_memory()
        if last and not (lines and lines[-1].startswith("[sparkling] memory:")):
            lines.append(f"[sparkling] memory: {last}"[:500])
        return lines[-n:]

    def ended_for_memory(self) -> str | None:
        """Why the watchdog ended this server, in plain words; None if it did not."""
        self._hear()
        # It kills first and tells a moment later: of a server that has just died, wait for the word.
        until = time.monotonic() + WORD_S
        while self.pid and not self._told_end() and time.monotonic() < until:
            self._hear(0.05)
        for event in self.memory_events:
            if event["level"] == "end":
                return memwatch.sentence(event)
        return None

    def _told_end(self) -> bool:
        """Whether everything about this server's end was heard, or it has not ended."""
        told = any(event["level"] == "end" for event in self.memory_events)
        return told or self._ended is not None or procs.is_alive(self._identity)

    def client(self, **settings: Any) -> Client:
        """A client for this server; `settings` go to `Client`."""
        from sparkling.client import Client

        return Client(self.url, api_key=self.api_key, **settings)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "running" if self.alive() else "ended"
        key = ", with an API key" if self.api_key else ""
        return f"<Server {self.launch.stage} on {self.url}, pid {self.pid}, {state}{key}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- readiness -----------------------------------------------------------------------------

    def wait_ready(self, deadline_s: float = 180, *, progress: Progress | None = None) -> None:
        """Wait until the server generates, at most until `deadline_s` seconds after its start.

        Raises:
            StartFailed: it died, hangs, or answers without generating. It has been stopped then.
        """
        if self.ready_seconds is not None and self.alive():
            return
        try:
            Waiting(self, deadline_s, progress).run()
        except BaseException:
            self.stop()
            raise
        self.ready_seconds = time.monotonic() - self._began
        # All shared memory exists now: the warden notes what to remove if all of it is killed.
        self._tell("ready")
        if self._claim is not None:
            claims.ready(self._claim)

    def generate_one(self, timeout_s: float) -> None:
        """Have one token generated.

        Raises:
            ServerError: none came within `timeout_s` seconds.
        """
        probe = TokenProbe(self)
        probe.start()
        deadline = time.monotonic() + timeout_s
        while probe.is_alive() and time.monotonic() < deadline and self.alive():
            probe.join(0.1)
        if probe.done:
            return
        probe.abandon()
        ended = self.ended_for_memory()
        if ended:
            raise ServerError(
                f"The server on port {self.port} is gone: {ended}; stop what else uses memory and "
                "start it again."
            )
        raise ServerError(
            f"The server on port {self.port} stopped answering after {timeout_s:.0f} s"
            + (f" ({probe.problem})" if probe.problem else "")
            + f"; the last lines of {self.log} may say why."
        )

    # -- stopping ------------------------------------------------------------------------------

    def stop(self, timeout_s: float = 30) -> None:
        """Stop the server and wait until every process of it is gone and its memory is back.

        Calling it again does nothing. Calling it in a fork of the process that started the server
        does nothing either.

        Raises:
            ServerError: something still runs after about `timeout_s` seconds.
        """
        with self._lock:
            if self._stopped or os.getpid() != self._owner:
                return
            self._hear()
            available = procs.memory_available()
            grace = min(self._grace_s, max(timeout_s - 5.0, timeout_s / 2))
            self._tell(f"stop {grace}")
            deadline = time.monotonic() + timeout_s
            while self._keeper.poll() is None and time.monotonic() < deadline:
                self._hear(0.1)
                if self._keeper.stdout.closed:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._keeper.wait(max(deadline - time.monotonic(), 0.1))
            if self._keeper.poll() is None:
                # Its warden sees the end of the socket and buries everything.
                self._keeper.kill()
                self._keeper.wait()
            last_words = time.monotonic() + 5.0
            while not self._keeper.stdout.closed and time.monotonic() < last_words:
                self._hear(0.1)
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()
            left = self._bury(max(deadline - time.monotonic(), 10.0))
            if left:
                named = ", ".join(str(one.pid) for one in left)
                raise ServerError(
                    f"The server on port {self.port} could not be stopped: process {named} does "
                    "not end even when killed; look at it with ps, it may hang in a driver."
                )
            self._stopped = True
            _SERVERS.discard(self)
            if not self._on_cpu:
                # Ordinary memory is back when a process is gone; a driver may take longer.
                self._wait_memory(available)
            if self._claim is not None:
                claims.release(self._claim)

    def _bury(self, timeout_s: float) -> list[procs.Identity]:
        """What is left of the server, after killing it. Normally nothing is."""
        # Without its keeper the warden still stops the server in order: give it the time.
        wardens = [self._warden] if self._warden else []
        left = procs.wait_gone(wardens, 10.0)
        left += [one for one in self.processes() if one not in left]
        for one in left:
            procs.send(one, signal.SIGKILL)
        return procs.wait_gone(left, timeout_s)

    def _wait_memory(self, at_stop: int | None, timeout_s: float = 15.0) -> None:
        """Wait until memory the server held is available again (a GPU that shares it, say).

        Other programs take and give memory too, so the wait ends when nine tenths are back, or
        when nothing has come back for a second.
        """
        if at_stop is None or self._memory_before is None:
            return
        target = at_stop + 0.9 * (self._memory_before - at_stop)
        deadline = time.monotonic() + timeout_s
        best, last_gain = -1, time.monotonic()
        while time.monotonic() < deadline:
            now = procs.memory_available() or 0
            if now >= target:
                return
            if now > best + (64 << 20):
                best, last_gain = now, time.monotonic()
            elif time.monotonic() - last_gain > 1.0:
                return
            time.sleep(0.1)


def _members(
    mark: object, session: int | None, main: procs.Identity | None, pipe: object
) -> list[procs.Identity]:
    """Living processes of one server, by what they have in common whatever became of their parents.

    Its mark in the environment, its process group (led by the main process, in the keeper's
    session), or its output pipe, whose reading end is the warden's.
    """
    found = procs.marked(MARK, mark) if isinstance(mark, str) and mark else []
    if main is None or main.boot != procs.boot_id():
        return found
    others = procs.grouped(session, main.pid, main.boot, main.start) if session else []
    if type(pipe) is int and pipe > 0:
        others += procs.holding(f"pipe:[{pipe}]")
    return found + [one for one in dict.fromkeys(others) if one not in found]


def _on_cpu(argv: tuple[str, ...]) -> bool:
    return ("--device", "cpu") in itertools.pairwise(argv) or "--device=cpu" in argv


# --------------------------------------------------------------------------- all servers


@atexit.register
def _stop_at_exit() -> None:
    for server in list(_SERVERS):
        with contextlib.suppress(Exception):
            server.stop()


def _records(runs: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = Path(runs) / STATE_FOLDER
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            record = {}
        yield path, record if isinstance(record, dict) else {}


def stop_all(runs: Path, timeout_s: float = 30) -> list[str]:
    """Stop every server recorded under `runs`, whoever started it; one line for each stopped.

    Only a process whose pid, start time and boot id are the recorded ones is signalled: a record
    from before a reboot, or whose pid now belongs to another program, is just removed.

    Raises:
        ServerError: a server could not be stopped.
    """
    lines, failed = [], []
    for path, record in _records(runs):
        where = f"the server on port {record.get('port')} ({record.get('log')})"
        found, left = _stop_recorded(record, timeout_s)
        if left:
            failed.append(f"{where}: process {', '.join(str(one.pid) for one in left)}")
            continue
        if found:
            lines.append(f"Stopped {where}.")
        tmp = record.get("tmp")
        if isinstance(tmp, str) and os.path.basename(tmp).startswith("sparkling-"):
            shutil.rmtree(tmp, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        (Path(runs) / STATE_FOLDER).rmdir()
    if failed:
        raise ServerError("Could not stop " + "; ".join(failed) + ".")
    return lines


def _stop_recorded(record: dict[str, Any], timeout_s: float) -> tuple[bool, list[procs.Identity]]:
    """Whether anything of a recorded server ran, and what of it still does."""
    keeper, warden, main = (
        procs.Identity.from_json(record.get(name)) for name in ("keeper", "warden", "server")
    )
    mark = record.get("id")
    everyone = [one for one in (keeper, warden, main) if procs.is_alive(one)]
    # Its workers may have outlived all three.
    workers = _members(mark, keeper.pid if keeper else None, main, record.get("pipe"))
    everyone += [one for one in workers if one not in everyone]
    # The keeper stops the rest in order; without it the warden, without both only the main
    # process knows how to.
    for one in (keeper, warden, main):
        if procs.send(one, signal.SIGTERM):
            procs.wait_gone(everyone, timeout_s)
            break
    left = [one for one in everyone if procs.is_alive(one)]
    for one in left:
        procs.send(one, signal.SIGKILL)
    return bool(everyone), procs.wait_gone(left, 10.0)
