"""What a notebook needs, checked: each need with a tick or a cross, and what to do about a cross."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkling import _toml, machine
from sparkling.errors import SparklingError, UsageError
from sparkling.lane import Lane, tiny_model
from sparkling.machine import Memory

if TYPE_CHECKING:
    from sparkling.recipe import Edition

MEMORY_GIB = {"cpu": 4.0, "gpu": 85.0, "spark": 85.0}
"""Free memory that a server needs. cpu: what the tiny Ling was measured to take at most. Elsewhere
only for a model whose sum is unknown: the published gate (start with 85 GiB available)."""

DISK_GB = {"cpu": 1.0, "gpu": 80.0, "spark": 80.0}
"""Free disk for the checkpoint: 70.4 GB of shards and some room."""


@dataclass(frozen=True)
class Check:
    """One need. ok None: could not be found out, which stops nobody."""

    need: str
    ok: bool | None
    found: str
    remedy: str = ""


class Checks(list[Check]):
    """The needs of a notebook; shows itself as a table."""

    @property
    def ok(self) -> bool:
        """True unless a need is known to be unmet."""
        return all(c.ok is not False for c in self)

    def require(self) -> None:
        """Raise SparklingError with the first unmet need and its remedy."""
        for check in self:
            if check.ok is False:
                raise SparklingError(f"Not ready: {check.need}: {check.found}; {check.remedy}.")

    def view(self) -> Any:
        """As a `show.View`."""
        from sparkling import show

        if not self:
            return show.note("This notebook needs nothing.")
        rows = [
            {
                "": show.MARK[c.ok],
                "need": c.need,
                "found": c.found,
                "what to do": "" if c.ok else c.remedy,
            }
            for c in self
        ]
        columns = ["", "need", "found"] + (["what to do"] if any(not c.ok for c in self) else [])
        return show.table(rows, columns, title="Ready" if self.ok else "Not ready")

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def __str__(self) -> str:
        return str(self.view())

    __repr__ = __str__


def check(names: Iterable[str], lane: Lane) -> Checks:
    """Check every need of `names`. Raises UsageError for a name that is no check."""
    out = Checks()
    for name in names:
        if name not in CHECKS:
            raise UsageError(f"There is no check {name!r}{_toml.closest(name, CHECKS)}.")
        out.append(CHECKS[name](lane))
    return out


def _version_in(lane: Lane, package: str) -> str | None:
    """The version of a package in the server environment; None when it is not there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        done = subprocess.run(
            [str(lane.server_python), "-c", code], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _server(lane: Lane) -> Check:
    built = _edition(lane)
    # A build of its own has built in what the plugin does elsewhere.
    plain = built is None or built.build is None
    need = (
        f"a server environment with {'SGLang and the Sparkling plugin' if plain else built.title}"
    )
    remedy = f"run {lane.set_up}"
    if not lane.server_python.is_file():
        return Check(need, False, f"no {lane.server_python}", remedy)
    sglang = _version_in(lane, "sglang")
    if sglang is None:
        return Check(need, False, "SGLang is not installed in it", remedy)
    if not plain:
        return Check(need, True, f"SGLang {sglang}")
    plugin = _version_in(lane, "sparkling-sglang")
    if plugin is None:
        return Check(need, False, f"SGLang {sglang}, but no plugin", remedy)
    return Check(need, True, f"SGLang {sglang}, plugin {plugin}")


def _edition(lane: Lane) -> Edition | None:
    """The build of SGLang that this lane uses; None where its recipe cannot be read."""
    from sparkling import recipe

    try:
        return recipe.load(lane.recipe_path, root=lane.root).with_edition(lane.edition).built
    except SparklingError:
        return None


def shipped(lane: Lane) -> bool:
    """Whether the lane's checkpoint is one of the repository's own, so that none is downloaded."""
    return lane.model.absolute().parent == (lane.root / "models").absolute()


def _checkpoint(lane: Lane) -> Check:
    from sparkling import weightcheck

    need = f"the checkpoint {lane.model.name}"
    remedy = "run the notebook 20_weights"
    if lane.kind == "cpu":
        # The tiny Ling is built in its own place only; another one is the user's.
        ours = lane.model.absolute() == tiny_model(lane.root).absolute()
        remedy = (
            "run `sparkling tiny`"
            if ours
            else f"take {lane.model.name} back from the repository (git checkout models)"
            if shipped(lane)
            else "name the folder of a whole checkpoint"
        )
    if not lane.model.is_dir():
        return Check(need, False, "not there", remedy)
    try:
        weightcheck.check(lane.model)
    except SparklingError as problem:
        return Check(need, False, str(problem).rstrip("."), remedy)
    size = sum(p.stat().st_size for p in lane.model.glob("*.safetensors"))
    return Check(need, True, f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB")


def memory_gib(lane: Lane) -> tuple[float, float]:
    """GiB that must be available for a first stage of the lane's ladder to start, and for all.

    As a start reckons them (`memory.Need.least`), rounded up to a tenth."""
    if lane.kind == "cpu":
        return MEMORY_GIB["cpu"], MEMORY_GIB["cpu"]
    from sparkling import memory, recipe

    much = 2**50
    own = {} if lane.kind == "spark" else {"gpu_total": much, "gpu_available": much}
    here = Memory(much, much, "", unified=lane.kind == "spark", **own)
    try:
        book = recipe.load(lane.recipe_path, root=lane.root).with_edition(lane.edition)
        needs = [memory.need(book, one, model=lane.model, memory=here) for one in book.ladder]
    except SparklingError:
        return MEMORY_GIB[lane.kind], MEMORY_GIB[lane.kind]
    each = [math.ceil(one.least / 2**30 * 10) / 10 for one in needs]
    return min(each), max(each)


def _memory(lane: Lane) -> Check:
    want, _ = memory_gib(lane)
    # A container's limit counts, and a GPU's own memory where the model goes there.
    here = machine.host_memory() if lane.kind == "cpu" else machine.memory()
    free = here.model_available / 2**30
    need = f"{want:g} GiB of free memory"
    if here.untold:
        why = "have nvidia-smi answer first (a driver that hangs needs a reboot)"
        return Check(need, False, f"not told: nvidia-smi says nothing of {here.gpu}", why)
    return Check(
        need, free >= want, f"{free:.1f} GiB", "end what holds it; a stopped server gives it back"
    )


def _disk(lane: Lane) -> Check:
    want, place = DISK_GB[lane.kind], lane.root
    if shipped(lane):
        want = DISK_GB["cpu"]
    elif lane.kind != "cpu":
        # What is downloaded already, whole or in part, needs no room any more.
        have = sum(p.stat().st_size for p in lane.model.rglob("*") if p.is_file()) / 1e9
        want = max(DISK_GB["cpu"], round(want - have, 1))
        place = next((p for p in (lane.model, *lane.model.parents) if p.is_dir()), place)
    free = shutil.disk_usage(place).free / 1e9
    return Check(f"{want:g} GB of free disk", free >= want, f"{free:.1f} GB", "free some space")


def _gpu(lane: Lane) -> Check:
    need = "an NVIDIA GPU, or the cpu lane"
    if lane.kind == "cpu":
        return Check(need, True, "the cpu lane: SGLang on this machine's CPU")
    return Check(need, True, lane.reason.rstrip("."))


def _port(lane: Lane) -> Check:
    from sparkling import server

    need = "a free port on 127.0.0.1"
    try:
        return Check(need, True, str(server.free_port(30000)))
    except SparklingError:
        return Check(need, True, f"{server.free_port()} (30000 is taken)")


CHECKS: dict[str, Callable[[Lane], Check]] = {
    "server": _server,
    "checkpoint": _checkpoint,
    "memory": _memory,
    "disk": _disk,
    "gpu": _gpu,
    "port": _port,
}
"""Name in `cards.toml` → its check."""
