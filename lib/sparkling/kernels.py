"""Kernels, compiled before they are needed: what applies here, what is there, and building the rest.

    kernels.plan(lane)      looks only: which stage needs what, what is built, what may be used for it
    kernels.build(lane)     FlashInfer's CUTLASS experts, nothing loaded, under the memory gate
    kernels.check(lane)     are they what the server will load?

Humming's and Triton's kernels are compiled by running them, so a GPU has to be there: `kernels_probe`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkling import (
    claims,
    gpus,
    kernels_flashinfer,
    kernels_jobs,
    kernels_ninja,
    kernels_probe,
    machine,
    memory,
    procs,
    toolpath,
)
from sparkling.errors import SparklingError, UsageError
from sparkling.kernels_flashinfer import NoGenerator, Proof, Rules
from sparkling.kernels_ninja import Gate, Progress, Result
from sparkling.kernels_plan import (
    COMMAND,
    CUTLASS,
    TOOLS,
    Item,
    Plan,
    capability,
    environment,
    known_arch,
    plan,
    stage_launch,
)

if TYPE_CHECKING:
    from sparkling.lane import Lane
    from sparkling.recipe import Launch

__all__ = [
    "COMMAND",
    "Gate",
    "Item",
    "Plan",
    "Report",
    "build",
    "capability",
    "check",
    "environment",
    "plan",
    "stage_launch",
]

DESKTOP = 2**30 // 4  # what a browser or a window manager holds of a GPU, and no loaded model
BUILD = "the kernel build"


@dataclass(frozen=True)
class Report:
    """What `build` did. result is None when nothing had to be built."""

    rules: Rules
    result: Result | None
    proof: Proof
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        rules = {name: str(value) for name, value in vars(self.rules).items()}
        proof = {**vars(self.proof), "path": str(self.proof.path)}
        result = vars(self.result) if self.result else None
        return {"rules": rules, "result": result, "proof": proof, "note": self.note}


def _uses_cutlass(launch: Launch) -> None:
    """Raise UsageError for a stage on a GPU whose experts are not FlashInfer's."""
    backend = launch.value("moe-runner-backend")
    if launch.value("device") != "cpu" and backend != CUTLASS:
        raise UsageError(
            f"Stage {launch.stage} runs its experts with {backend or 'what SGLang chooses'}, not with "
            f"FlashInfer's CUTLASS kernels, so nothing is built for it; `sparkling kernels warm "
            f"{launch.stage}` compiles what it needs."
        )


# -- building ------------------------------------------------------------------------------------


def _nobody(need: int, ask: Callable[[], gpus.Holders], env: Mapping[str, str]) -> None:
    """Refuse while anything holds the GPU's memory, a server of ours or anybody's program, and while
    nobody knows. A desktop draws with it as well; that is no model."""
    held_by = ask()
    if isinstance(held_by, str):
        if env.get(memory.I_KNOW, "").strip() != "1":
            raise SparklingError(
                f"Nothing is compiled: {held_by}, so nobody knows whether a model holds the GPU's "
                "memory, and compilers beside one can lock the machine; have nvidia-smi answer (a "
                f"driver that hangs needs a reboot), or accept the risk with {memory.I_KNOW}=1."
            )
        held_by = {}
    for pid, used in held_by.items():
        if used is not None and used < DESKTOP:
            continue
        stat = procs.read_stat(pid)
        who = f"{stat.name} (pid {pid})" if stat else f"process {pid}"
        raise SparklingError(
            f"Nothing is compiled: {who} holds the GPU's memory, and compilers beside a loaded model "
            "can lock the machine; stop it first (`sparkling stop` for a server of ours)."
        )
    with claims.table() as held:
        available = machine.host_memory().available
        held.require(BUILD, need, device=True, available=available)


@contextlib.contextmanager
def _claimed(need: int) -> Iterator[None]:
    """While we build, nothing of ours is started."""
    who = procs.identify(os.getpid())
    with claims.table() as held:
        held.require(BUILD, need, device=True, available=None)
        path = held.add(f"build-{os.getpid()}", who, BUILD, need, device=True) if who else None
    try:
        yield
    finally:
        if path is not None:
            claims.release(path)


def build(
    lane: Lane,
    stage: str = "baseline",
    env: Mapping[str, str] = os.environ,
    *,
    arch: str | None = None,
    progress: Progress | None = None,
    look: Callable[[], gpus.Gpus] = gpus.look,
    holders: Callable[[], gpus.Holders] = gpus.holders,
    gate: Gate | None = None,
) -> Report:
    """Compile the CUTLASS experts that `stage` needs, with nothing loaded.

    Args:
        arch: what to compile for, as "12.1a"; the GPU's own when not given. Compiling for a Spark
            needs none: nvcc, cores and memory do.
        progress: called about twice a second.

    Raises:
        UsageError: nothing here compiles them; a tool is missing; CUDA_HOME is wrong.
        NoMemory: a server of ours holds the GPU's memory.
        SparklingError: anybody else holds it, or nobody knows; memory does not suffice; a file does
            not compile.
    """
    launch = stage_launch(lane, stage)
    seen = capability(lane, look)
    if arch is None:
        kernels_probe.needs_gpu(launch)
        arch = f"{seen or '12.1'}a"
    if not known_arch(arch).startswith("12."):
        raise UsageError(
            f"FlashInfer's {kernels_flashinfer.MODULE} is for compute capability 12.x, not {arch}: "
            "there is nothing to build here."
        )
    _uses_cutlass(launch)
    server_env = environment(lane, launch)
    toolpath.cuda_home(env)
    tools = toolpath.tools(lane.server_python, env, names=TOOLS)
    for name, tool in tools.items():
        if tool.path is None:
            raise UsageError(_missing(name, tool))
    nvcc = tools["nvcc"]
    if nvcc.number() and nvcc.number()[:2] < toolpath.NVCC_FOR_121:
        raise UsageError(
            f"{nvcc.path} is CUDA {nvcc.version}, which does not know {arch}; put a CUDA toolkit from "
            "12.9 first on PATH, or name it in CUDA_HOME."
        )
    gate = gate or Gate(lambda: machine.host_memory().available, machine.cpus())
    jobs = gate.jobs(env)  # refuses before anything is asked
    need = jobs.count * gate.each
    _nobody(need, holders, env)
    try:
        rules = kernels_flashinfer.rules(lane.server_python, server_env, arch=arch)
    except NoGenerator:
        rules = _rules_by_probe(lane, launch)
    if rules.ready_made:
        proof = Proof(rules.ready_made[0], True, "it came compiled with a package")
        return Report(rules, None, proof, "nothing to build")
    for problem in rules.problems(arch):
        raise SparklingError(
            f"The rules are not those that the server will look for: {problem}; nothing is built."
        )
    home = Path(rules.variable("cuda_home") or "/usr/local/cuda")
    for problem in kernels_flashinfer.toolkit_problems(home, kernels_flashinfer.SYSTEM_LIBRARIES):
        raise UsageError(f"The CUDA toolkit does not suffice: {problem}.")
    with _claimed(need), kernels_flashinfer.locked(rules):
        result = kernels_ninja.build(
            rules.folder,
            rules.ninja,
            ninja=str(tools["ninja"].path),
            env={**server_env, **{k: env[k] for k in (kernels_jobs.MAX_JOBS,) if k in env}},
            gate=gate,
            progress=progress,
        )
    proof = kernels_flashinfer.prove(rules, lane.server_python, server_env, gpu=bool(look().all))
    return Report(rules, result, proof)


def _missing(name: str, tool: toolpath.Tool) -> str:
    how = {
        "ninja": "install it into the server environment (pip install ninja)",
        "nvcc": "install a CUDA toolkit from 12.9 (cuda-toolkit-13-0), or name it in CUDA_HOME",
        "c++": "install a C++ compiler (g++)",
    }[name]
    return f"{name} was not found{f' ({tool.note})' if tool.note else ''}: {how}."


def _rules_by_probe(lane: Lane, launch: Launch) -> Rules:
    """Have a short-lived server with a few layers write the rules, and end it before it builds."""
    from sparkling import server

    folder = lane.cache / "kernel-probe"
    small = kernels_probe.launch(launch, kernels_probe.model(lane.model, folder / "model"))
    env = environment(lane, launch)
    roots = kernels_flashinfer.roots(env)
    # FlashInfer leaves a file alone that is as it should be, so old rules would never be told from
    # new ones. It writes them at every start; ninja goes by its own log.
    kernels_probe.forget_rules(roots, kernels_flashinfer.MODULE)
    # One job, stopped at once when the rules are there: nothing is compiled to an end.
    running = server.start(
        small,
        python=lane.server_python,
        log=folder / "rules.log",
        wait=False,
        runs=lane.runs,
        extra_env={kernels_jobs.MAX_JOBS: "1"},
    )
    with running:
        path = kernels_probe.wait_for_rules(roots, kernels_flashinfer.MODULE, running.alive)
    name = path.parent.name
    return Rules(
        version=path.parts[-5],
        sglang="as the server runs it",
        name=name,
        ninja=path,
        folder=path.parent,
        library=path.parent / f"{name}.so",
        lock=path.parent.parent / "tmp" / f"{name}.lock",
    )


def check(
    lane: Lane,
    stage: str = "baseline",
    env: Mapping[str, str] = os.environ,
    *,
    arch: str | None = None,
    look: Callable[[], gpus.Gpus] = gpus.look,
) -> Proof:
    """Whether the built experts are what the server of `stage` will load. Builds nothing.

    Raises:
        UsageError: nothing here compiles them.
        SparklingError: FlashInfer cannot be asked.
    """
    launch = stage_launch(lane, stage)
    seen = capability(lane, look)
    if arch is None:
        kernels_probe.needs_gpu(launch)
        arch = f"{seen or '12.1'}a"
    known_arch(arch)
    _uses_cutlass(launch)
    server_env = environment(lane, launch)
    rules = kernels_flashinfer.rules(lane.server_python, server_env, arch=arch)
    if rules.ready_made:
        return Proof(rules.ready_made[0], True, "it came compiled with a package")
    for problem in rules.problems(arch):
        return Proof(rules.library, False, problem)
    ninja = toolpath.tools(lane.server_python, env, names=("ninja",))["ninja"]
    if ninja.path is None:
        raise UsageError(_missing("ninja", ninja))
    left = kernels_ninja.pending(rules.folder, rules.ninja, ninja=ninja.path, env=server_env)
    if left:
        return Proof(rules.library, False, f"ninja would build {left} of {rules.targets} targets")
    return kernels_flashinfer.prove(rules, lane.server_python, server_env, gpu=bool(look().all))
