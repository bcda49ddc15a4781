"""Where the programs are that a server calls: ninja, nvcc, a C++ compiler; and uv, pip's fast kin.

A kernel that was started by absolute path has a bare PATH, and FlashInfer calls plain `ninja`: so the
folders of the server's Python and of ours come first, here and in what the server is given. FlashInfer
and PyTorch take nvcc from CUDA_HOME (or CUDA_PATH) before PATH, without looking at the value: one that
is no toolkit's folder (`:/usr/local/cuda` is common, from PATH-like exports) costs a failed compile
after minutes, so it is refused before anything starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkling.commands import Ask, ask
from sparkling.errors import UsageError

ASK_S = 2.0  # a version is a matter of milliseconds; all are asked at once
TOOLKIT = "/usr/local/cuda"
CUDA_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
VERSION_OF = {
    "ninja": ("--version",),
    "nvcc": ("--version",),
    "c++": ("--version",),
    "git": ("--version",),
    "uv": ("--version",),
}
_VERSION = {"nvcc": re.compile(r"release (\d+\.\d+)"), "": re.compile(r"(\d+(?:\.\d+)+)")}

NVCC_FOR_121 = (12, 9)
"""The first CUDA toolkit whose nvcc knows compute_121 (its release notes: sm_121 came with 12.9)."""

Which = Callable[[str, str], str | None]
"""The path of a program on a PATH, or None."""


def _which(name: str, path: str) -> str | None:
    return shutil.which(name, path=path)


@dataclass(frozen=True)
class Tool:
    """One program: where it is and what it says it is. path None: not found. `note`: why there is
    no version."""

    name: str
    path: str | None = None
    version: str | None = None
    note: str = ""

    def number(self) -> tuple[int, ...]:
        """The version to compare with; () when it is unknown."""
        return tuple(int(part) for part in (self.version or "").split(".") if part.isdigit())

    def __str__(self) -> str:
        if self.path is None:
            return "not found"
        return f"{self.version or self.note or 'version unknown'} ({self.path})"


def cuda_home(
    env: Mapping[str, str] = os.environ, exists: Callable[[str], bool] = os.path.exists
) -> str | None:
    """The CUDA toolkit that the environment names, without a trailing slash; None if it names none.

    Raises:
        UsageError: CUDA_HOME or CUDA_PATH is no folder of a CUDA toolkit.
    """
    for name in CUDA_VARIABLES:
        told = env.get(name, "").strip()
        if not told:
            continue
        bare = told.rstrip("/") or "/"
        if ":" in told:
            why = "is a list of folders, and one is wanted"
        elif not told.startswith("/"):
            why = "is no absolute path"
        elif not exists(bare):
            why = "does not exist"
        elif not exists(f"{bare}/bin/nvcc"):
            why = "holds no bin/nvcc"
        else:
            return bare
        raise UsageError(
            f"{name}={told!r} {why}; unset it, or set it to a CUDA toolkit such as {TOOLKIT}."
        )
    return None


def search_path(
    python: Path,
    env: Mapping[str, str] = os.environ,
    *,
    ours: Path | None = None,
    toolkit: str | None = None,
) -> str:
    """The PATH for a server run by `python`: its folder, ours, the environment's, the toolkit's.

    Args:
        ours: this process's interpreter (`sys.executable`).
        toolkit: a toolkit whose nvcc is taken when no earlier folder has one.
    """
    mine = ours or Path(sys.executable)
    folders = [str(python.parent), str(mine.parent)]
    folders += [one for one in env.get("PATH", os.defpath).split(os.pathsep) if one]
    if toolkit:
        folders.append(f"{toolkit}/bin")
    return os.pathsep.join(dict.fromkeys(folders))


def _toolkit(home: str | None, exists: Callable[[str], bool]) -> str | None:
    return home or (TOOLKIT if exists(f"{TOOLKIT}/bin/nvcc") else None)


def equip(
    env: MutableMapping[str, str],
    python: Path,
    exists: Callable[[str], bool] = os.path.exists,
) -> None:
    """Give a server's environment the PATH that `tools` looks at. An empty CUDA_HOME is taken out and
    a trailing slash cut off; a bad one is for `cuda_home` to refuse, and stays."""
    home = None
    with contextlib.suppress(UsageError):
        home = cuda_home(env, exists)
    for name in CUDA_VARIABLES:
        told = env.get(name, "").strip()
        if told:
            env[name] = told.rstrip("/") or "/"
        else:
            env.pop(name, None)
    env["PATH"] = search_path(python, env, toolkit=_toolkit(home, exists))


def tools(
    python: Path,
    env: Mapping[str, str] = os.environ,
    *,
    names: Sequence[str] = tuple(VERSION_OF),
    ask: Ask = ask,
    which: Which = _which,
    exists: Callable[[str], bool] = os.path.exists,
) -> dict[str, Tool]:
    """Find programs as a server run by `python` would, with their versions; at most about 2 s.

    nvcc is that of CUDA_HOME where that is set, as FlashInfer has it. A bad CUDA_HOME is a note of
    nvcc here, not an error.
    """
    note = ""
    try:
        home = cuda_home(env, exists)
    except UsageError as error:
        home, note = None, str(error)
    path = search_path(python, env, toolkit=_toolkit(home, exists))

    def look(name: str) -> Tool:
        if name == "nvcc" and note:
            return Tool(name, None, None, note)
        found = f"{home}/bin/nvcc" if name == "nvcc" and home else which(name, path)
        if found is None:
            return Tool(name)
        answer = ask((found, *VERSION_OF[name]), ASK_S)
        if isinstance(answer, str):
            return Tool(name, found, None, answer)
        code, text = answer
        said = _VERSION.get(name, _VERSION[""]).search(text)
        if code != 0 or said is None:
            return Tool(name, found, None, f"answers with code {code}")
        return Tool(name, found, said[1])

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return dict(zip(names, pool.map(look, names), strict=True))
