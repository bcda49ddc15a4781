"""Humming's kernel cache: what is in it, for which GPU and shape, and what has gone stale.

Humming (0.1.12, `humming/jit/compiler.py`) keeps one folder for each kernel, named by the hash of its
`signature.txt`: compiler, flags, kernel expression, code, and the modification times of its own
headers. An installation that is made again therefore compiles everything again, though nothing in it
changed; the old folders stay. Only reading happens here, and neither Humming nor a GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkling.architecture import Shape
from sparkling.errors import UsageError

KERNEL = "kernel.cubin"
SIGNATURE = "signature.txt"
_FOLDER = re.compile(r"[0-9a-f]{16}")
_ARCH = re.compile(r"(?:--gpu-architecture=|code=)(sm_\w+?)\b")
_SHAPE = re.compile(r"Shape<\s*(\d+),\s*(\d+),\s*(\d+)\s*>")
_TYPE = re.compile(r"^\s*(FloatingPoint|Integer)Type<([^>]*)>,?\s*$", re.M)
_NAMES = {"float16e8m7": "bfloat16", "float16e5m10": "float16", "float32e8m23": "float32"}

MtimeOf = Callable[[str], float | None]


def _mtime(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


@dataclass(frozen=True)
class Entry:
    """One cached kernel. `shape` is (N, K) of the weights; `types` by Humming's names (activations,
    weights, output, scales). `current`: whether a server of that installation would
    take it; `why` says what stands against it."""

    folder: Path
    compiler: str  # "nvrtc 13.0"
    arch: str  # "sm_121a"
    shape: tuple[int, int] | None
    types: tuple[str, ...]
    version: str | None  # of humming-kernels, where its installation still tells
    bytes: int
    current: bool
    why: str = ""


def cache_folder(env: Mapping[str, str]) -> Path:
    """Where Humming keeps its kernels in this environment.

    Raises:
        UsageError: HUMMING_CACHE_DIR begins with a tilde, which Humming does not expand.
    """
    told = env.get("HUMMING_CACHE_DIR")
    if told is None:
        return Path(env.get("HOME") or Path.home()) / ".humming" / "cache"
    if told.startswith("~"):
        raise UsageError(
            f"HUMMING_CACHE_DIR={told} begins with a tilde, which Humming does not expand: the cache "
            "would lie in a folder called ~; give the whole path."
        )
    return Path(told)


def inventory(cache: Path, mtime: MtimeOf = _mtime) -> list[Entry]:
    """Every kernel of a cache, current ones first. An empty list where there is no cache."""
    if not cache.is_dir():
        return []
    folders = [one for one in cache.iterdir() if one.is_dir() and _FOLDER.fullmatch(one.name)]
    found = [entry for one in sorted(folders) if (entry := _entry(one, mtime)) is not None]
    return sorted(found, key=lambda e: (not e.current, e.arch, e.shape or (0, 0), e.folder.name))


def _entry(folder: Path, mtime: MtimeOf) -> Entry | None:
    try:
        text = (folder / SIGNATURE).read_text(errors="replace")
    except OSError:
        return None
    compiler, version, flags, expression = (*text.split("$$", 4)[:4], "", "", "", "")[:4]
    arch = _ARCH.search(flags)
    shape = _SHAPE.search(expression)
    name = compiler.removesuffix("Compiler").lower()
    headers = _headers(text.rsplit("$$", 1)[-1])
    kernel = folder / KERNEL
    why = _stale(headers, mtime)
    if not kernel.is_file():
        why = "not finished: its compiler failed or was ended"
    return Entry(
        folder=folder,
        compiler=f"{name} {version.rpartition('+')[2]}".strip(),
        arch=arch[1] if arch else "?",
        shape=(int(shape[2]), int(shape[3])) if shape else None,
        types=tuple(_type(kind, rest) for kind, rest in _TYPE.findall(expression)),
        version=_version(headers),
        bytes=kernel.stat().st_size if kernel.is_file() else 0,
        current=not why,
        why=why,
    )


def _type(kind: str, rest: str) -> str:
    """`FloatingPointType<4, 2, 1>` of C++ as Humming prints it, "float4e2m1" (`humming/dtypes.py`)."""
    words = [word.strip() for word in rest.split(",")]
    if kind == "Integer":
        return f"{'' if words[0] == 'true' else 'u'}int{words[-1]}"
    name = "float{}e{}m{}".format(*(words + ["?"] * 3)[:3])
    return _NAMES.get(name, name)


def shapes(of: Shape) -> dict[tuple[int, int], str]:
    """(N, K) of every expert matrix that Humming multiplies by → what it is.

    Gate and up are one matrix. Seen in the cache of an H200: 256 × 256 and 256 × 128 for Sparklet,
    whose hidden size is 256 and whose experts are 128 wide.
    """
    return {
        (2 * of.expert_width, of.hidden): "gate and up",
        (of.hidden, of.expert_width): "down",
    }


def _headers(text: str) -> dict[str, float]:
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _stale(headers: Mapping[str, float], mtime: MtimeOf) -> str:
    """Why a server would compile it again, "" if it would not."""
    if not headers:
        return "its signature does not tell of which installation it is"
    for path, then in headers.items():
        now = mtime(path)
        if now is None:
            return f"of an installation that is gone ({_site(path)})"
        if now != then:
            return f"older than the installation in {_site(path)}"
    return ""


def _site(header: str) -> str:
    return header.partition("/humming/include/")[0] or header


def _version(headers: Mapping[str, float]) -> str | None:
    for path in headers:
        for info in Path(_site(path)).glob("humming_kernels-*.dist-info"):
            return info.name.removesuffix(".dist-info").rpartition("-")[2]
        break
    return None


def stale(entries: Sequence[Entry]) -> list[Entry]:
    """Those that no server would take."""
    return [entry for entry in entries if not entry.current]


def rows(entries: Sequence[Entry]) -> list[dict[str, object]]:
    """For a table."""
    return [
        {
            "kernel": entry.folder.name,
            "GPU": entry.arch,
            "N × K": f"{entry.shape[0]} × {entry.shape[1]}" if entry.shape else "",
            "types": ", ".join(entry.types),
            "compiler": entry.compiler,
            "Humming": entry.version or "?",
            "kB": entry.bytes / 1e3,
            "state": "current" if entry.current else f"stale: {entry.why}",
        }
        for entry in entries
    ]
