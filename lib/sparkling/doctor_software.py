"""The doctor's checks of what is installed and what can be reached: environments, tools, hubs."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkling import needs, toolpath
from sparkling.doctor import FAIL, OK, WARN, Check, Finding, Scene, not_here, ok
from sparkling.errors import UsageError

PYTHONS = ((3, 11), (3, 12))
SET_UP = "`sparkling setup` builds it"
HEADERS = "C headers of the server's Python"


def lane(scene: Scene) -> Iterator[Finding]:
    """Which lane and which build of SGLang was chosen, and why."""
    yield ok("lane", "lane", scene.lane.kind, "", scene.lane.reason)
    edition = scene.book.built
    others = [name for name in scene.book.editions if name != edition.name]
    why = f"Others: {', '.join(others)} (--edition)" if others else ""
    yield ok("edition", "edition of SGLang", f"{edition.name}: {edition.title}", "", why)


def python(scene: Scene) -> Finding:
    """The Python that runs this."""
    here = sys.version_info[:2]
    found = f"{platform.python_version()} ({sys.executable})"
    fits = here in PYTHONS
    remedy = "" if fits else "make the environment again with Python 3.12 (PYTHON=python3.12)"
    return Finding(
        "python", "Python of the notebooks", found, "3.11 or 3.12", OK if fits else FAIL, "", remedy
    )


def server(scene: Scene) -> Iterator[Finding]:
    """The server's environment: its Python, SGLang, the plugin where the edition wants it."""
    built, where = scene.book.built, scene.lane.server_python
    title, wanted = "server environment", built.title
    how = f"run {scene.lane.set_up}"  # of this lane and edition
    how += f", which builds it from {built.requirements}" if built.requirements else ""
    why = "SGLang's pins collide with the notebooks', so it has an environment of its own"
    if not where.is_file():
        yield Finding("server", title, f"there is no {where}", wanted, FAIL, why, how)
        yield not_here("server.headers", HEADERS, "there is no server environment yet")
        yield not_here("server.lock", "what was built", "there is no server environment yet")
        return
    code = (
        "import importlib.metadata as m, json, os, platform, sysconfig\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({'python': platform.python_version(), 'sglang': v('sglang'),"
        " 'plugin': v('sparkling-sglang'), 'torch': v('torch'),"
        " 'headers': os.path.isfile(sysconfig.get_path('include') + '/Python.h')}))"
    )
    answer = scene.ask((str(where), "-c", code), 30.0)
    try:
        told = json.loads(answer[1]) if not isinstance(answer, str) else {}
    except ValueError:
        told = {}
    if not told:
        note = answer if isinstance(answer, str) else f"{where} does not run"
        yield Finding("server", title, note, wanted, FAIL, why, how)
    else:
        lacks = [n for n, key in (("SGLang", "sglang"), ("torch", "torch")) if not told[key]]
        if built.build is None and not told["plugin"]:
            lacks.append("the plugin")
        found = f"Python {told['python']}, SGLang {told['sglang']}, torch {told['torch']}"
        found += f", plugin {told['plugin']}" if told["plugin"] else ""
        found += f"; without {' and '.join(lacks)}" if lacks else ""
        # The fork's variables do nothing in stock SGLang, and another version has other flags.
        stock = told["sglang"] == scene.book.sglang
        other = told["sglang"] is not None and stock != (built.build is None)
        found += f"; not what edition {built.name} is" if other else ""
        bad = bool(lacks) or other
        yield Finding("server", title, found, wanted, FAIL if bad else OK, why, how if bad else "")
    yield _headers(scene, told)
    yield _lock(scene, where)


def _headers(scene: Scene, told: Mapping[str, Any]) -> Finding:
    """Python.h, which Ubuntu ships apart from Python itself; uv's Pythons have it."""
    if not scene.gpu:
        return not_here("server.headers", HEADERS, "the cpu lane compiles nothing")
    there = told.get("headers")
    minor = ".".join(str(told.get("python", "3.12")).split(".")[:2])
    return Finding(
        "server.headers",
        HEADERS,
        {True: "Python.h is there", False: "no Python.h"}.get(there, "not told"),
        "Python.h of the server's Python",
        OK if there else WARN if there is None else FAIL,
        "Triton compiles a small C module with it at the server's first start, and fails without "
        "(sgl-project/sglang#18644)",
        "" if there else f"sudo apt install python{minor}-dev",
    )


def _lock(scene: Scene, where: Path) -> Finding:
    id, title = "server.lock", "what was built"
    built = scene.book.built
    if built.requirements is None:
        return not_here(id, title, "./scripts/setup.sh stamps this lane's environment by itself")
    from sparkling import environments

    state = environments.state(scene.lane.root, built, where)
    verdict = OK if state.current else WARN
    remedy = "" if state.current else "`sparkling setup` brings it up to date, or says what differs"
    needed = f"built and verified from {built.requirements}"
    return Finding(id, title, state.told, needed, verdict, "", remedy)


def checkpoint(scene: Scene) -> Finding:
    """The checkpoint, as the notebooks' own need has it."""
    found = needs.CHECKS["checkpoint"](scene.lane)
    verdict = {True: OK, False: FAIL, None: WARN}[found.ok]
    return Finding("checkpoint", found.need, found.found, "whole", verdict, "", found.remedy)


def tools(scene: Scene) -> Iterator[Finding]:
    """uv, ninja, nvcc, a C++ compiler and git, found as a server would find them."""
    seen = toolpath.tools(scene.lane.server_python, scene.env, ask=scene.ask)

    def finding(name: str, needed: str, why: str, remedy: str, missing: str = WARN) -> Finding:
        tool = seen[name]
        there = tool.path is not None
        told = str(tool) if there or not tool.note else tool.note
        verdict = OK if there else missing
        return Finding(f"tool.{name}", name, told, needed, verdict, why, "" if there else remedy)

    uv = "installs the server environment faster; pip does it too"
    yield finding("uv", "any, or none", uv, "", missing=OK)
    if not scene.gpu:
        for name in ("ninja", "nvcc", "c++"):
            yield not_here(f"tool.{name}", name, "the cpu lane compiles nothing")
    else:
        ninja = "FlashInfer calls plain `ninja`; it comes with the server environment"
        yield finding("ninja", "any", ninja, SET_UP, missing=FAIL)
        yield _nvcc(scene, seen["nvcc"])
        compiler = "compiles the host side of kernels"
        yield finding("c++", "any", compiler, "sudo apt install g++", missing=FAIL)
    if scene.book.built.build is None:
        yield not_here("tool.git", "git", "only the edition fork is built from a repository")
    else:
        yield finding("git", "any", "fetches the fork's source", "sudo apt install git", FAIL)


def _nvcc(scene: Scene, nvcc: toolpath.Tool) -> Finding:
    least = toolpath.NVCC_FOR_121 if scene.spark else (12, 0)
    needed = f"{'.'.join(map(str, least))} or newer"
    why = "FlashInfer's kernels are compiled with it; CUDA_HOME goes before PATH"
    try:
        toolpath.cuda_home(scene.env)
    except UsageError as error:
        remedy = "unset CUDA_HOME and CUDA_PATH, or correct them"
        return Finding("tool.nvcc", "nvcc", str(error).rstrip("."), needed, FAIL, why, remedy)
    if nvcc.path is None:
        remedy = "install the CUDA 13 toolkit, or set CUDA_HOME to where it is"
        return Finding("tool.nvcc", "nvcc", "not found", needed, FAIL, why, remedy)
    old = bool(nvcc.number()) and nvcc.number() < least
    verdict = FAIL if old else OK if nvcc.number() else WARN
    remedy = "set CUDA_HOME to a newer toolkit: an older one comes first" if old else ""
    return Finding("tool.nvcc", "nvcc", str(nvcc), needed, verdict, why, remedy)


TITLES = {"modelscope": "ModelScope", "huggingface": "Hugging Face"}


def hubs(scene: Scene) -> Iterator[Finding]:
    """Whether a hub can be reached, and whether there is a token for it. Tokens are never shown."""
    if not scene.gpu:
        for name, title in TITLES.items():
            why = "the cpu lane's models are in the repository"
            yield not_here(f"hub.{name}", title, why)
            yield not_here(f"token.{name}", f"token for {title}", why)
        return
    reached = scene.hubs()
    some = any(not isinstance(answer, str) for answer in reached.values())
    for name, title in TITLES.items():
        answer = reached.get(name, "not asked")
        there = not isinstance(answer, str)
        found = f"answers in {answer:.1f} s" if there else str(answer)
        verdict = OK if there else WARN
        remedy = "" if some else "copy the weights here by hand, or set a proxy in the environment"
        why = "One of the two is enough for the weights"
        yield Finding(f"hub.{name}", title, found, "one of the two", verdict, why, remedy)
        try:
            here = scene.token(name)
        except ImportError as error:  # a Python without the notebooks' packages
            why = f"its client cannot be asked: {error.name} is not installed"
            yield not_here(f"token.{name}", f"token for {title}", why)
            continue
        told = "there is one (not shown)" if here else "none"
        why = "The weights are public; a token only raises a hub's limits"
        yield ok(f"token.{name}", f"token for {title}", told, "none, or a valid one", why)


CHECKS: dict[str, Check] = {
    "lane": lane,
    "python": python,
    "server": server,
    "checkpoint": checkpoint,
    "tool": tools,
    "hub": hubs,
}
