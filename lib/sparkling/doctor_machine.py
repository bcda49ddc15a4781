"""The doctor's checks of memory, disk, limits, ports and whoever holds memory."""

from __future__ import annotations

from collections.abc import Iterator

from sparkling import doctor_processes, kernels_jobs, needs, ports
from sparkling.doctor import ANSWERS, FAIL, OK, WARN, Check, Finding, Scene, not_here, ok
from sparkling.errors import SparklingError, UsageError

GIB = 2**30
SPARK_TOTAL = 110 * GIB  # of its 128 GB, DGX OS shows about 119 GiB; published: "121 GB unified"
WEIGHTS = 71e9  # bytes; the files of Ling-3.0-flash-fp4 are 70.4 GB on the hub
CACHES = 9e9  # compiled kernels, the other model's files, logs: room, not a measurement
LARGE = 2 * GIB  # who holds less is not named
UNLOCK = "`sync; echo 3 | sudo tee /proc/sys/vm/drop_caches` gives it back at once"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def memory(scene: Scene) -> Iterator[Finding]:
    """Total, unified, container, available, droppable cache, swap."""
    m = scene.memory
    told = f"{_gib(m.total)} by {m.source}"
    if scene.spark:
        yield Finding(
            "memory.total",
            "memory, in all",
            told,
            f"about 119 GiB, at least {SPARK_TOTAL // GIB}",
            OK if m.total >= SPARK_TOTAL else FAIL,
            "A Spark has 128 GB for CPU and GPU together; weights, KV cache and system share it",
            ""
            if m.total >= SPARK_TOTAL
            else "look for a container's limit, or for reserved memory",
        )
    else:
        yield ok("memory.total", "memory, in all", told, "what the server needs, see available")
    yield _unified(scene)
    yield _container(scene)
    yield _available(scene)
    yield _cache(scene, needs.MEMORY_GIB[scene.lane.kind] * GIB)  # about what is really taken
    yield _swap(scene)


def _available(scene: Scene) -> Finding:
    m, (first, last) = scene.memory, needs.memory_gib(scene.lane)
    want = first * GIB
    if scene.lane.kind == "gpu" and m.untold:
        found, needed = f"not told: {scene.gpus.note}", _gib(last * GIB)
        why = "No server is started on a GPU whose memory nobody knows"
        return Finding("memory.available", "memory, available", found, needed, FAIL, why, ANSWERS)
    free = m.model_available if scene.lane.kind == "gpu" else m.available
    where = f" of the GPU's {_gib(m.gpu_total)}" if scene.lane.kind == "gpu" and m.gpu_total else ""
    verdict = FAIL if free < want else WARN if free < last * GIB else OK
    return Finding(
        "memory.available",
        "memory, available",
        _gib(free) + where,
        f"{_gib(last * GIB)} for every stage, {_gib(want)} for the first"
        if last > first
        else _gib(want),
        verdict,
        "A server is started only with room for weights, states and a KV cache of the whole context "
        "(`sparkling doctor` reckons as a start does)"
        if scene.gpu
        else "What the practice models were measured to take at most",
        "" if verdict == OK else "end what holds it (the check of servers names it)",
    )


def _unified(scene: Scene) -> Finding:
    title, seen = "GPU memory", scene.gpus
    if not seen.all:
        return not_here("memory.unified", title, f"there is no NVIDIA GPU here ({seen.note})")
    one = seen.all[0]
    if seen.unified:
        found = "unified: the GPU has none of its own; /proc/meminfo counts"
        why = "nvidia-smi has no figure for a GB10's memory, or a wrong one"
        return ok("memory.unified", title, found, "", why)
    total = _gib(one.memory_total) if one.memory_total else "not told"
    used = f", {_gib(one.memory_used)} in use" if one.memory_used is not None else ""
    needed = "unified" if scene.spark else ""
    verdict = WARN if scene.spark or not one.memory_total else OK
    why, remedy = ("", "") if one.asked else (seen.note, ANSWERS)
    return Finding("memory.unified", title, f"its own: {total}{used}", needed, verdict, why, remedy)


def _container(scene: Scene) -> Finding:
    m, title = scene.memory, "container's limit"
    if m.limit is None:
        return ok("memory.container", title, "none", "none, or room for the server")
    found = f"{_gib(m.limit)} of the machine's {_gib(m.host_total)}"
    why = "A server that goes over it is killed, though the machine has more"
    return Finding("memory.container", title, found, "none, or room for the server", OK, why)


def _cache(scene: Scene, want: float) -> Finding:
    m, title = scene.memory, "page cache that could be dropped"
    found = f"{_gib(m.page_cache)} at most; {_gib(m.free)} untouched"
    if not m.unified:
        why = "the kernel drops it by itself when memory is asked for"
        return ok("memory.cache", title, found, "", why)
    tight = m.free < want <= m.available
    why = "On unified memory a GPU allocation competes with cached files, such as weights just read"
    remedy = UNLOCK if tight else ""
    needed = f"{_gib(want)} untouched, or droppable"
    return Finding("memory.cache", title, found, needed, WARN if tight else OK, why, remedy)


def _swap(scene: Scene) -> Finding:
    m, title = scene.memory, "swap"
    used = m.swap_total - m.swap_free
    found = f"{_gib(m.swap_total)}, {_gib(used)} in use" if m.swap_total else "none"
    why = (
        "A Spark comes without: exhausted memory locks the driver until the power button is pressed, "
        "so the library keeps away from the end of it"
        if scene.spark
        else "A server whose memory is swapped out answers at a crawl"
    )
    busy = used > GIB
    remedy = "end what does not fit before measuring" if busy else ""
    return Finding("memory.swap", title, found, "none in use", WARN if busy else OK, why, remedy)


def disk(scene: Scene) -> Finding:
    """Room for the checkpoint, where it is to lie, and for caches."""
    model, title = scene.lane.model, "disk, free"
    # Whole files and the beginnings of others (`.fetch`) need no room any more.
    there = sum(p.stat().st_size for p in model.rglob("*") if p.is_file())
    fetched = scene.gpu and not needs.shipped(scene.lane)
    missing = max(0.0, WEIGHTS - there) if fetched else 0.0
    want = missing + (CACHES if scene.gpu else needs.DISK_GB["cpu"] * 1e9)
    found = scene.disk(model)
    enough = found.free >= want
    parts = (
        f"{missing / 1e9:.0f} GB of weights and {CACHES / 1e9:.0f} GB of room" if missing else ""
    )
    return Finding(
        "disk.weights",
        title,
        f"{found.free / 1e9:.1f} GB under {found.path}",
        f"{want / 1e9:.0f} GB" + (f": {parts}" if parts else ""),
        OK if enough else FAIL,
        "The files of Ling-3.0-flash-fp4 are 70.4 GB" if fetched else "Logs, caches, a small model",
        "" if enough else "free some space, or name another folder with SPARKLING_MODEL",
    )


def watchdog(scene: Scene) -> Finding:
    """Where a running server is ended for memory, and whether that was set to something."""
    from sparkling import memory

    title, total = "watchdog's limit", scene.memory.total
    needed = f"5 % of the memory, {_gib(memory.floor(total, {}))}"
    why = "A server is ended while there is still memory; at its end a Spark's driver locks up"
    try:
        end = memory.floor(total, scene.env)
    except UsageError as error:
        remedy = f"unset {memory.FLOOR}, or correct it: no server starts with it"
        return Finding("memory.watchdog", title, str(error).rstrip("."), needed, FAIL, why, remedy)
    if end < memory.floor(total, {}):
        found = f"{_gib(end)} by {memory.FLOOR}" if end else f"off by {memory.FLOOR}"
        return Finding(
            "memory.watchdog", title, found, needed, WARN, why, f"unset {memory.FLOOR} for a Spark"
        )
    return ok("memory.watchdog", title, f"ended below {_gib(end)} available", needed, why)


def jobs(scene: Scene) -> Finding:
    """How many compilers a build of kernels would start now."""
    title = "compilers at once"
    if not scene.gpu:
        return not_here("kernels.jobs", title, "the cpu lane compiles nothing")
    why = "More than fit are how a Spark locks up: 16 GiB are kept back, and each may take 8"
    needed = "at least 1"
    try:
        found = kernels_jobs.jobs(scene.memory.available, scene.cpus, scene.env)
    except UsageError as error:
        remedy = f"correct {kernels_jobs.MAX_JOBS} and {kernels_jobs.THREADS}, or unset them"
        return Finding("kernels.jobs", title, str(error).rstrip("."), needed, FAIL, why, remedy)
    except SparklingError as error:
        told = "none: " + str(error).removeprefix("Nothing is compiled: ").rstrip(".")
        return Finding("kernels.jobs", title, told, needed, WARN, why)
    return ok("kernels.jobs", title, "; ".join([str(found.count), *found.notices]), needed, why)


LEAST = {"open files": 4096, "processes": 4096, "locked memory": None, "address space": -1}
"""Least soft limit; -1: unlimited is wanted, None: nothing is wanted of it."""
ULIMIT = {"open files": "-n", "processes": "-u", "locked memory": "-l", "address space": "-v"}
WHY = {
    "open files": "sockets, shards and caches of several processes; SGLang raises it if it may",
    "processes": "threads count as processes",
    "locked memory": "only transfers between machines lock memory",
    "address space": "CUDA reserves far more addresses than it uses",
}


def limits(scene: Scene) -> Iterator[Finding]:
    """Soft limits of this process, which a server inherits."""
    for name, value in scene.limits().items():
        id, title, flag = f"limit.{name.replace(' ', '-')}", f"limit: {name}", ULIMIT[name]
        unit = " bytes" if name in ("locked memory", "address space") else ""
        found = "unlimited" if value is None else f"{value:,}{unit}"
        least = LEAST[name]
        if least is None:
            yield ok(id, title, found, "", WHY[name])
            continue
        needed = "unlimited" if least == -1 else f"{least:,}"
        enough = value is None or (least != -1 and value >= least)
        set_to = "unlimited" if least == -1 else str(least)
        remedy = "" if enough else f"`ulimit {flag} {set_to}` in the shell that starts this"
        yield Finding(id, title, found, needed, OK if enough else WARN, WHY[name], remedy)


def port(scene: Scene) -> Finding:
    """The default port, or who has it."""
    number, title = ports.DEFAULT_PORT, "port"
    if ports.can_bind(number):
        return ok("port", title, f"{number} is free", f"{number}, or any other")
    why = "Ours take the next free port by themselves; a client with a fixed address does not"
    found = f"{number} is taken by {ports.holder(number)}"
    return Finding("port", title, found, f"{number}, or any other", WARN, why, "or choose --port")


def servers(scene: Scene) -> Finding:
    """Servers, and what else holds memory. They are named; ending them is the user's decision."""
    on_gpu = scene.holders() if scene.gpus.perhaps else {}
    unknown = on_gpu if isinstance(on_gpu, str) else ""
    own = doctor_processes.ours(scene.lane.runs)
    found = doctor_processes.holders(scene.processes(), own, {} if unknown else on_gpu, LARGE)
    title, needed = "servers and others that hold memory", "none, while a server is to start"
    nobody = f"nobody holds {_gib(LARGE)} or more"
    if unknown:
        told = f"; who holds the GPU's is unknown: {unknown}"
        why = "Two models at once are how a Spark locks up"
        names = ", ".join(f"{one.what} (pid {one.pid})" for one in found[:6]) or nobody
        return Finding("servers", title, names + told, needed, WARN, why, ANSWERS)
    if not found:
        return ok("servers", title, nobody, needed)
    told = []
    for one in found[:6]:
        gpu = ", on the GPU too" if one.on_gpu is None else ""
        gpu = f" and {_gib(one.on_gpu)} on the GPU" if one.on_gpu else gpu
        where = f", port {one.port}" if one.port else ""
        told.append(f"{one.what} (pid {one.pid}{where}): {_gib(one.held)}{gpu}")
    more = [f"and {len(found) - 6} more"] if len(found) > 6 else []
    remedy = ["`sparkling stop` ends ours"] if own else []
    remedy += ["end the others yourself if they are not needed"] if len(found) > len(own) else []
    enough = scene.memory.model_available >= needs.memory_gib(scene.lane)[1] * GIB
    return Finding(
        "servers",
        title,
        "; ".join(told + more),
        needed,
        OK if enough and not own else WARN,
        "Two models at once are how a Spark locks up; nothing is ended here",
        "" if enough and not own else "; ".join(remedy),
    )


CHECKS: dict[str, Check] = {
    "memory": memory,
    "memory.watchdog": watchdog,
    "kernels.jobs": jobs,
    "disk.weights": disk,
    "limit": limits,
    "port": port,
    "servers": servers,
}
