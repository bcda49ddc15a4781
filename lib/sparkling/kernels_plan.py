"""What a lane's stages compile, what of it is there, and what may be used for the rest. Looks only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkling import (
    gpus,
    kernels_flashinfer,
    kernels_humming,
    kernels_jobs,
    kernels_ninja,
    machine,
    memory,
    toolpath,
)
from sparkling.errors import SparklingError, UsageError
from sparkling.kernels_flashinfer import Built, NoGenerator

if TYPE_CHECKING:
    from sparkling.lane import Lane
    from sparkling.recipe import Launch, Recipe

GIB = 2**30
TOOLS = ("ninja", "nvcc", "c++")
COMMAND = "sparkling kernels build"
CUTLASS = "flashinfer_mxfp4"
HUMMING = "Humming: NVRTC"


@dataclass(frozen=True)
class Item:
    """One set of kernels: who compiles it and where it stands. state: "built", "not built", "not
    here" (this lane compiles none of it) or "cannot tell"."""

    stage: str
    kernels: str
    compiler: str
    state: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class Plan:
    """What `plan` found. `jobs` is None where not even one compiler fits (see `refusal`)."""

    lane: str
    items: tuple[Item, ...]
    tools: dict[str, str]
    jobs: int | None
    refusal: str
    available: int
    cores: int
    notices: tuple[str, ...] = ()
    found: tuple[Built, ...] = ()
    humming: tuple[kernels_humming.Entry, ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def ready(self) -> bool:
        """Whether nothing that applies here is left to build."""
        return not self.problems and all(item.state in ("built", "not here") for item in self.items)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "items": [vars(item) for item in self.items],
            "found": [{**vars(one), "path": str(one.path)} for one in self.found],
            "humming": kernels_humming.rows(self.humming),
            "notices": list(self.notices),
            "problems": list(self.problems),
            "ready": self.ready,
        }

    def view(self) -> Any:
        """As a `show.View`."""
        from sparkling import show

        rows = [
            {
                "stage": item.stage,
                "kernels": item.kernels,
                "compiled by": item.compiler,
                "state": item.state,
                "": item.detail + (f"; {item.remedy}" if item.remedy else ""),
            }
            for item in self.items
        ]
        view = show.table(rows, title="Kernels that a stage compiles, if it finds none")
        facts = [(name, where) for name, where in self.tools.items()]
        facts.append(("memory available", f"{self.available / GIB:.1f} GiB"))
        facts.append(("compilers at once", str(self.jobs) if self.jobs else self.refusal))
        view += show.table(facts, ["", "here"], title="What may be used for building")
        if self.found:
            built = [
                (str(one.path), {True: "fits", False: "does not", None: "?"}[one.fits], one.why)
                for one in self.found
            ]
            view += show.table(built, ["found", "", "why"])
        if self.humming:
            view += show.table(kernels_humming.rows(self.humming), title="Humming's cache")
        for line in (*self.problems, *self.notices):
            view += show.note(f"{line[0].upper()}{line[1:]}.")
        return view

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def __str__(self) -> str:
        return str(self.view())

    __repr__ = __str__


# -- looking -------------------------------------------------------------------------------------


def environment(lane: Lane, launch: Launch) -> dict[str, str]:
    """The environment that the server of this launch will have, and so the one to build in."""
    from sparkling import server

    return server.child_environment(launch.env, lane.server_python)


def capability(lane: Lane, look: Callable[[], gpus.Gpus] = gpus.look) -> str | None:
    """The first GPU's compute capability; the Spark's on the spark lane; None on a CPU."""
    if lane.kind == "cpu":
        return None
    seen = look()
    told = seen.all[0].capability if seen.all else None
    return told or ("12.1" if lane.kind == "spark" else None)


def known_arch(arch: str) -> str:
    """An architecture as nvcc and FlashInfer take it, "12.1a".

    Raises:
        UsageError: it is not written so, or lacks the letter that says for exactly which GPUs.
    """
    if not re.fullmatch(r"\d+\.\d[af]", arch):
        raise UsageError(
            f"--arch {arch!r} is not written as FlashInfer wants it: a capability and its letter, "
            f"like {kernels_flashinfer.SPARK_ARCH} for a Spark."
        )
    return arch


def stage_launch(lane: Lane, stage: str) -> Launch:
    """A stage of the lane; where the lane cannot run it, the Spark's."""
    from sparkling import recipe

    book = recipe.load(lane.recipe_path, root=lane.root)
    if book.available(stage):
        book = recipe.load("ling-3.0-flash", root=lane.root)
    if lane.edition in book.editions:
        book = book.with_edition(lane.edition)  # each is told its switches in its own way
    return book.render(stage, model=lane.model, cache=lane.cache)


def _book(lane: Lane) -> Recipe:
    from sparkling import recipe

    return recipe.load(lane.recipe_path, root=lane.root)


def plan(
    lane: Lane,
    env: Mapping[str, str] = os.environ,
    *,
    arch: str | None = None,
    look: Callable[[], gpus.Gpus] = gpus.look,
) -> Plan:
    """Look at what the lane's stages compile, and at what is there. Builds and starts nothing.

    Args:
        arch: for which GPU, as "12.1a"; the one that is here when not given.

    Raises:
        UsageError: CUDA_HOME is no toolkit, MAX_JOBS has a value that would do harm, or no such arch.
    """
    tools = toolpath.tools(lane.server_python, env, names=TOOLS)
    here, cores = machine.host_memory(), machine.cpus()
    count, refusal, notices = None, "", ()
    try:
        found = kernels_jobs.jobs(here.available, cores, env)
        count, notices = found.count, found.notices
    except UsageError:
        raise
    except SparklingError as error:
        refusal = str(error).rstrip(".")
    items, built, humming, problems = [], [], [], []
    seen = known_arch(arch)[:-1] if arch else capability(lane, look)
    for stage in _book(lane).ladder:
        launch = stage_launch(lane, stage)
        backend = launch.value("moe-runner-backend")
        if launch.value("device") == "cpu":
            items.append(
                Item(stage, "none", "", "not here", "SGLang's CPU path compiles no kernels")
            )
        elif backend == CUTLASS and not built and not problems:
            item, built, more = _cutlass(lane, launch, stage, seen, tools)
            items.append(item)
            problems += more
        elif backend == "humming" and all(item.compiler != HUMMING for item in items):
            humming = kernels_humming.inventory(
                kernels_humming.cache_folder(environment(lane, launch))
            )
            items.append(_humming(stage, humming, seen, _shapes(launch)))
    return Plan(
        lane=lane.kind,
        items=tuple(items),
        tools={name: str(tool) for name, tool in tools.items()},
        jobs=count,
        refusal=refusal,
        available=here.available,
        cores=cores,
        notices=notices,
        found=tuple(built),
        humming=tuple(humming),
        problems=tuple(problems),
    )


def _cutlass(
    lane: Lane,
    launch: Launch,
    stage: str,
    seen: str | None,
    tools: Mapping[str, toolpath.Tool],
) -> tuple[Item, list[Built], list[str]]:
    name, by = f"CUTLASS MXFP4 experts ({kernels_flashinfer.MODULE})", "FlashInfer: ninja and nvcc"
    env = environment(lane, launch)
    if seen is not None and not seen.startswith("12."):
        detail = f"a GPU of capability {seen} takes another module, compiled at its first start"
        return Item(stage, name, by, "not here", detail), [], []
    roots = kernels_flashinfer.roots(env)
    try:
        rules = kernels_flashinfer.rules(lane.server_python, env, arch=f"{seen or '12.1'}a")
    except SparklingError as error:
        state = "not built" if isinstance(error, NoGenerator) else "cannot tell"
        remedy = COMMAND if isinstance(error, NoGenerator) else ""
        return (
            Item(stage, name, by, state, str(error).rstrip("."), remedy),
            kernels_flashinfer.built(roots),
            [],
        )
    if rules.ready_made:
        detail = f"compiled kernels are installed: {rules.ready_made[0]}"
        return Item(stage, name, by, "built", detail), kernels_flashinfer.built(roots, rules), []
    left = None
    if tools["ninja"].path:
        left = kernels_ninja.pending(rules.folder, rules.ninja, ninja=tools["ninja"].path, env=env)
    found = kernels_flashinfer.built(roots, rules, left)
    detail = f"{rules.targets} targets, {'?' if left is None else left} to build in {rules.folder}"
    state = "cannot tell" if left is None else "not built" if left else "built"
    remedy = "" if state == "built" else COMMAND
    return Item(stage, name, by, state, detail, remedy), found, rules.problems(f"{seen or '12.1'}a")


def _shapes(launch: Launch) -> dict[tuple[int, int], str]:
    """The matrices that Humming is asked for; {} where the model's sizes are unknown."""
    found = memory.sizes(launch)
    return kernels_humming.shapes(found.known()) if found is not None else {}


def _humming(
    stage: str,
    entries: list[kernels_humming.Entry],
    seen: str | None,
    wanted: Mapping[tuple[int, int], str],
) -> Item:
    arch = f"sm_{(seen or '12.1').replace('.', '')}"
    mine = [one for one in entries if one.current and one.arch.startswith(arch) and one.shape]
    each = {shape: sum(one.shape == shape for one in mine) for shape in wanted}
    old, others = len(kernels_humming.stale(entries)), len(mine) - sum(each.values())
    told = [f"{count} for {n} × {k} ({wanted[n, k]})" for (n, k), count in each.items()]
    detail = f"kernels for {arch}: {', '.join(told) or len(mine)}"
    detail += f", {others} for other models" if wanted and others else ""
    detail += f", {old} stale" if old else ""
    there = all(each.values()) if wanted else bool(mine)
    remedy = "" if there else f"sparkling kernels warm {stage}"
    state = "built" if there else "not built"
    return Item(stage, "MXFP4 experts for each shape", HUMMING, state, detail, remedy)
