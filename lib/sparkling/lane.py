"""Which kind of machine this is, and what follows from it.

A lane is `spark` (one NVIDIA DGX Spark: GB10, compute capability 12.1), `gpu` (any other NVIDIA
GPU) or `cpu` (everything else). It decides the recipe, the server's Python, the checkpoint and
the place of the runs; nothing else in the library asks what machine it runs on.

Environment, each optional: `SPARKLING_LANE` (wins over detection), `SPARKLING_ROOT`,
`SPARKLING_SERVER_PYTHON`, `SPARKLING_RECIPE` (a file or the name of one in `env/recipes`),
`SPARKLING_EDITION` (the build of SGLang, one of the recipe's editions), `SPARKLING_MODEL`,
`SPARKLING_RUNS`. Relative paths in them are taken from the working directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkling.commands import ask
from sparkling.errors import UsageError
from sparkling.files import absolute, working_folder

KINDS = ("spark", "gpu", "cpu")

RECIPES = {"spark": "ling-3.0-flash", "gpu": "ling-3.0-flash", "cpu": "sparklet"}

TINY = "tiny-ling"
"""The recipe of the tiny Ling, the constructed model that `sparkling tiny` builds."""

DRIVER_LIST = Path("/proc/driver/nvidia/gpus")
PROBE_TIMEOUT_S = 2.0  # nvidia-smi hangs rather than fails when a driver is wedged


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it; `capability` is like "12.1", None where it was not told."""

    name: str
    capability: str | None = None

    @property
    def is_spark(self) -> bool:
        return self.capability == "12.1" or "GB10" in self.name.upper().replace("-", " ").split()


@dataclass(frozen=True)
class Sighting:
    """What a probe saw: the GPUs, and one clause saying where from or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    note: str = "nvidia-smi is not installed"


Probe = Callable[[], Sighting]


@dataclass(frozen=True)
class Lane:
    """A kind of machine and the places that follow from it. All paths are absolute."""

    kind: str
    root: Path
    server_python: Path
    recipe_path: Path
    model: Path
    runs: Path
    reason: str
    edition: str = "stock"

    @property
    def cache(self) -> Path:
        """Where checkpoints, compiled kernels and other re-creatable things live."""
        return self.root / ".cache"

    @property
    def set_up(self) -> str:
        """What makes this lane's server environment, as a command."""
        folder = self.server_python.parent.parent
        if self.kind == "cpu" or folder == self.root / ".venv-server":
            return "./scripts/setup.sh"
        chosen = "" if self.edition == "stock" else f" --edition {self.edition}"
        return f"`sparkling setup --lane {self.kind}{chosen}`"


# -- the repository ------------------------------------------------------------------------------


def _is_root(path: Path) -> bool:
    return (path / "env" / "recipes").is_dir() and (path / "lib" / "sparkling").is_dir()


def find_root(env: Mapping[str, str] = os.environ, cwd: Path | None = None) -> Path:
    """Return the repository root: `SPARKLING_ROOT`, else upwards from `cwd`, else from this file.

    Raises:
        UsageError: `SPARKLING_ROOT` is not a checkout, or none was found.
    """
    told = env.get("SPARKLING_ROOT", "").strip()
    if told:
        root = absolute(told)
        if not _is_root(root):
            raise UsageError(
                f"SPARKLING_ROOT={told} is not a Sparkling checkout (it has no env/recipes and "
                "lib/sparkling); point it at the cloned repository or unset it."
            )
        return root
    for start in (cwd or working_folder(), Path(__file__)):
        here = start.absolute()
        for folder in (here, *here.parents):
            if _is_root(folder):
                return folder
    raise UsageError(
        "No Sparkling checkout was found above the working directory; run this inside the cloned "
        "repository or set SPARKLING_ROOT."
    )


# -- detection -----------------------------------------------------------------------------------


def _clean(field: str) -> str | None:
    text = field.strip().strip("[]").strip()
    return None if text.lower() in {"", "n/a", "not supported", "unknown error"} else text


def parse_smi(text: str) -> tuple[Gpu, ...]:
    """Parse `nvidia-smi --query-gpu=name[,compute_cap] --format=csv,noheader`.

    `[N/A]` and `[Not Supported]` are unknown, not values; lines that are no GPU are dropped.
    """
    gpus = []
    for line in text.splitlines():
        name, _, rest = line.partition(",")
        known = _clean(name)
        if known is None or not known.isprintable() or known.startswith("No devices"):
            continue
        capability = _clean(rest)
        if capability is not None and not capability.replace(".", "", 1).isdigit():
            capability = None
        gpus.append(Gpu(known, capability))
    return tuple(gpus)


def driver_list(proc: Path = DRIVER_LIST) -> tuple[Gpu, ...]:
    """The GPUs that the driver lists in /proc, by name only; nothing is asked that could hang."""
    listed = []
    for info in sorted(proc.glob("*/information")):
        with contextlib.suppress(OSError):
            for line in info.read_text(errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model" and _clean(value):
                    listed.append(Gpu(value.strip()))
    return tuple(listed)


def probe_gpus(
    command: str = "nvidia-smi",
    timeout_s: float = PROBE_TIMEOUT_S,
    proc: Path = DRIVER_LIST,
) -> Sighting:
    """Look for NVIDIA GPUs without importing anything; never raises, never waits over 2 × 2 s.

    `nvidia-smi` is asked first; a driver too old to know `compute_cap` is asked for the name
    alone; where it does not answer, the driver's own list in `/proc` is read.
    """
    note = ""
    for query in ("name,compute_cap", "name"):
        answer = ask((command, f"--query-gpu={query}", "--format=csv,noheader"), timeout_s)
        if isinstance(answer, str):
            note = answer
            break
        code, out = answer
        gpus = parse_smi(out) if code == 0 else ()
        if gpus:
            return Sighting(gpus, "nvidia-smi lists it")
        note = f"{command} lists no GPU" if code == 0 else f"{command} fails with code {code}"
    listed = driver_list(proc)
    if listed:
        return Sighting(listed, f"the driver lists it, though {note}")
    return Sighting((), note)


def _choose(kind: str, env: Mapping[str, str], probe: Probe) -> tuple[str, str]:
    asked, by = kind, "asked for"
    if asked == "auto":
        asked, by = env.get("SPARKLING_LANE", "").strip() or "auto", "SPARKLING_LANE says so"
    if asked != "auto":
        if asked not in KINDS:
            where = "SPARKLING_LANE" if kind == "auto" else "lane"
            raise UsageError(
                f"{where} {asked!r} is unknown; the lanes are auto, {', '.join(KINDS)}."
            )
        return asked, f"Lane {asked}: {by}."

    # An empty list hides every GPU from CUDA, hence from the server that we would start.
    if env.get("CUDA_VISIBLE_DEVICES", "unset").strip() in {"", "-1"}:
        return "cpu", "Lane cpu: CUDA_VISIBLE_DEVICES hides every GPU."
    seen = probe()
    for gpu in seen.gpus:
        if gpu.is_spark:
            return "spark", f"Lane spark: the GPU is {gpu.name} ({seen.note})."
    if seen.gpus:
        gpu = seen.gpus[0]
        detail = f", compute capability {gpu.capability}" if gpu.capability else ""
        return "gpu", f"Lane gpu: the GPU is {gpu.name}{detail}, not a GB10."
    return "cpu", f"Lane cpu: no NVIDIA GPU was found ({seen.note})."


# -- the lane ------------------------------------------------------------------------------------


def _place(env: Mapping[str, str], name: str) -> Path | None:
    told = env.get(name, "").strip()
    # `absolute`, not `resolve`: a virtual environment's python is a link that must stay one.
    return Path(os.path.normpath(absolute(told))) if told else None


def runs_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return where runs are kept, looking at neither the recipe nor the GPU.

    `sparkling stop` must work when a recipe is broken or a driver is wedged.
    """
    return _place(env, "SPARKLING_RUNS") or find_root(env) / "runs"


def tiny_model(root: Path) -> Path:
    """Return where the tiny Ling lives: where its own recipe says, whatever is in use.

    Raises:
        UsageError: that recipe cannot be read.
    """
    from sparkling import recipe as recipes

    return recipes.load(TINY, root=root).model


def detect(
    kind: str = "auto",
    *,
    edition: str | None = None,
    root: Path | str | None = None,
    env: Mapping[str, str] = os.environ,
    probe: Probe = probe_gpus,
) -> Lane:
    """Return the lane of this machine.

    Args:
        kind: `spark`, `gpu`, `cpu`, or `auto` to let `SPARKLING_LANE` and then the probe decide.
        edition: one of the recipe's; `SPARKLING_EDITION`, then the recipe decide when not given.
        root: repository root; found by `find_root` when not given.
        env: the environment to read.
        probe: what looks for GPUs; called only when nobody said which lane.

    Raises:
        UsageError: an unknown lane or edition, no checkout, or a recipe that cannot be read.
    """
    from sparkling import recipe as recipes

    chosen, reason = _choose(kind, env, probe)
    base = absolute(root) if root is not None else find_root(env)
    told = env.get("SPARKLING_RECIPE", "").strip()
    recipe_path = recipes.locate(told or RECIPES[chosen], root=base)
    # The recipe says where its checkpoint lives and which SGLang serves it: another one slots in
    # through the recipe alone.
    book = recipes.load(recipe_path, root=base)
    book = book.with_edition(edition or env.get("SPARKLING_EDITION", "").strip() or None)
    return Lane(
        kind=chosen,
        root=base,
        server_python=_place(env, "SPARKLING_SERVER_PYTHON")
        or base / book.built.environment / "bin" / "python",
        recipe_path=recipe_path,
        model=_place(env, "SPARKLING_MODEL") or book.model,
        runs=_place(env, "SPARKLING_RUNS") or base / "runs",
        reason=reason,
        edition=book.edition,
    )
