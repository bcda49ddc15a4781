"""The published builds of Ling-3.0, how large each is, and whether it fits this machine.

A build "fits" when its weights take at most 68 % of the memory that models are loaded into: the
share (SGLang's mem-fraction-static) above which a published run of this model exhausted a Spark and
locked its driver; the rest holds KV cache, graphs, draft and everybody else. It is "tight" up to the
whole memory, and "too large" beyond. Sizes are the publishers' or a survey's, with their source.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkling.errors import SparklingError
from sparkling.hubs import TITLES, Listing, gb

FRACTION = 0.68
ASKED = "listed by {hub} just now"


@dataclass(frozen=True)
class Build:
    """One published build. size: bytes, None where unknown; include: the files meant by it."""

    repo: str
    format: str
    size: int | None
    source: str
    here: str
    include: tuple[str, ...] = ()

    def fits(self, memory: int) -> str:
        """ "fits", "tight", "too large" or "unknown" for a memory of so many bytes."""
        if self.size is None:
            return "unknown"
        if self.size <= FRACTION * memory:
            return "fits"
        return "tight" if self.size < memory else "too large"


@dataclass(frozen=True, repr=False)
class Builds:
    """All builds beside one machine; shows itself as a table."""

    builds: tuple[Build, ...]
    memory: int
    disk: int
    where: str

    def rows(self) -> list[dict[str, str]]:
        return [
            {
                "build": b.repo,
                "format": b.format,
                "size": gb(b.size),
                "memory": b.fits(self.memory),
                "disk": "unknown"
                if b.size is None
                else "fits"
                if b.size < self.disk
                else "needs more",
                "what for": b.here,
                "size is from": b.source or "nobody: unknown here",
            }
            for b in self.builds
        ]

    def view(self) -> Any:
        """As a `show.View`."""
        from sparkling import show

        title = f"{gb(self.memory)} of memory ({self.where}), {gb(self.disk)} of disk free"
        return show.table(self.rows(), title=title)

    def __repr__(self) -> str:
        return str(self.view())

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    __str__ = __repr__

    def to_json(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "memory_source": self.where,
            "disk_free": self.disk,
            "builds": [
                {
                    "repo": b.repo,
                    "format": b.format,
                    "bytes": b.size,
                    "memory": b.fits(self.memory),
                    "source": b.source,
                }
                for b in self.builds
            ],
        }


def known() -> tuple[Build, ...]:
    """The builds of `facts/builds.toml`, in its order."""
    text = (Path(__file__).parent / "facts" / "builds.toml").read_text("utf-8")
    return tuple(
        Build(
            repo=b["repo"],
            format=b["format"],
            size=b.get("bytes"),
            source=b.get("source", ""),
            here=b["here"],
            include=tuple(b.get("include", ())),
        )
        for b in tomllib.loads(text)["build"]
    )


def survey(
    folder: Path, *, ask: Callable[[str], Listing] | None = None, builds: Sequence[Build] = ()
) -> Builds:
    """The builds for this machine and the disk of `folder`.

    ask: lists a repository (`hub_listing.listing`); called for sizes that are unknown only, and a
    hub that cannot be asked leaves them unknown. None asks nobody.
    """
    from sparkling import machine

    memory = machine.memory()
    known_builds = [_asked(b, ask) if ask and b.size is None else b for b in builds or known()]
    place = next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))
    kind = (
        "shared by CPU and GPU"
        if memory.unified
        else "the GPU's"
        if memory.gpu_total
        else memory.source
    )
    return Builds(tuple(known_builds), memory.model_total, shutil.disk_usage(place).free, kind)


def _asked(build: Build, ask: Callable[[str], Listing]) -> Build:
    import fnmatch

    try:
        listing = ask(build.repo)
    except SparklingError:
        return build
    files = [
        f
        for f in listing.files
        if not build.include or any(fnmatch.fnmatch(f.path, p) for p in build.include)
    ]
    if not files or any(f.size is None for f in files):
        return build
    size = sum(f.size or 0 for f in files)
    return replace(build, size=size, source=ASKED.format(hub=TITLES[listing.hub]))
