"""Is this checkpoint what it should be? Form, content and tensors, each said for itself.

* form: every shard's header read and its size checked, the index obeyed (`weightcheck`);
* content: SHA-256 of every file the manifest names. A file whose size and time are those at its last
  hashing is not read again unless `full`. Only hashed content is called verified;
* tensors: names, dtypes and shapes against what the architecture needs (`architecture`). SGLang
  skips a name it does not know and leaves a missing tensor uninitialised, both without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkling import architecture, weightcheck, weights_manifest
from sparkling.errors import SparklingError, UsageError
from sparkling.files import read_json
from sparkling.hubs import TITLES, gb
from sparkling.weightcheck import Checked, WeightsError
from sparkling.weights_manifest import FORMAT, Manifest, Row


@dataclass(frozen=True)
class Tensors:
    """The tensors of the files against those of the architecture. `unused`: there, and left out by
    SGLang on purpose. `unknown`: why nothing could be compared, "" when it was."""

    expected: int = 0
    found: int = 0
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unused: int = 0
    unknown: str = ""

    @property
    def ok(self) -> bool | None:
        """True, False, or None where the architecture is not one we know."""
        return None if self.unknown else not (self.missing or self.extra or self.wrong)

    def __str__(self) -> str:
        if self.unknown:
            return f"tensors not compared with an architecture: {self.unknown}"
        if self.ok:
            also = f", and {self.unused} that SGLang leaves out" if self.unused else ""
            return f"all {self.expected:,} tensors have the names, dtypes and shapes SGLang needs{also}"
        parts = [
            f"{len(names)} {what} ({_some(names)})"
            for what, names in (
                ("missing, which SGLang would leave uninitialised", self.missing),
                ("of another dtype or shape", self.wrong),
                ("unknown, which SGLang would skip", self.extra),
            )
            if names
        ]
        return f"tensors are not those of the architecture: {'; '.join(parts)}"


@dataclass(frozen=True, repr=False)
class Verified:
    """What `verify` established. hashed: files read now; trusted: hashed before, untouched since;
    bare: weight files of which no checksum is known."""

    checked: Checked
    tensors: Tensors
    hashed: tuple[str, ...]
    trusted: tuple[str, ...]
    bare: tuple[str, ...]
    manifest: Manifest | None = field(repr=False, default=None)

    @property
    def verified(self) -> bool:
        """Whether every weight file has been hashed and has the known content."""
        return not self.bare

    @property
    def ok(self) -> bool:
        """Whether nothing is known to be wrong (a broken file raises before this is asked)."""
        return self.tensors.ok is not False

    def require(self) -> Verified:
        """Itself. Raises WeightsError when the tensors are not those of the architecture."""
        if not self.ok:
            raise WeightsError(
                f"{self.checked.folder} cannot be served rightly: {self.tensors}; fetch it again, or "
                "use an SGLang that knows this checkpoint."
            )
        return self

    @property
    def origin(self) -> str:
        """Where the checksums come from."""
        if self.manifest is None:
            return "no manifest"
        about = self.manifest.about
        if not about.get("repo"):
            return str(about.get("what") or "a manifest of ours")
        commit = str(about.get("commit") or "no commit")[:12]
        hub = TITLES.get(str(about.get("hub")), str(about.get("hub")))
        return f"{about['repo']} from {hub}, {commit}, fetched {about.get('when')}"

    def __str__(self) -> str:
        c = self.checked
        form = f"{c.files} weight file{'s' if c.files > 1 else ''}, {gb(c.size)}: the form is whole"
        if not self.verified:
            content = f"content not verified, no checksum is known of {_some(self.bare)}"
        else:
            hub = self.manifest.compared if self.manifest else 0
            how = [f"{len(self.hashed)} hashed now"] if self.hashed else []
            how += [f"{len(self.trusted)} hashed before and untouched"] if self.trusted else []
            content = f"content verified by SHA-256 ({', '.join(how)}; {self.origin}"
            content += f"; {hub} equal to the hub's checksum)" if hub else ")"
        return f"{form}; {content}; {self.tensors}."

    def view(self) -> Any:
        """As a `show.View`: one line a question."""
        from sparkling import show

        c, rows = self.checked, []
        rows.append(
            ("form", show.MARK[True], f"{c.files} files, {c.tensors:,} tensors, {gb(c.size)}")
        )
        if self.verified:
            said = (
                f"{len(self.hashed)} hashed now, {len(self.trusted)} untouched since; {self.origin}"
            )
        else:
            said = f"not verified: no checksum of {_some(self.bare)}"
        rows.append(("content", show.MARK[True if self.verified else None], said))
        rows.append(("tensors", show.MARK[self.tensors.ok], str(self.tensors)))
        return show.table(rows, ["asked", "", "found"], title=str(c.folder.name))

    def __repr__(self) -> str:
        return str(self.view())

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def to_json(self) -> dict[str, Any]:
        t = self.tensors
        return {
            "folder": str(self.checked.folder),
            "ok": self.ok,
            "verified": self.verified,
            "files": self.checked.files,
            "tensors": self.checked.tensors,
            "bytes": self.checked.size,
            "hashed": list(self.hashed),
            "trusted": list(self.trusted),
            "without_checksum": list(self.bare),
            "origin": self.origin,
            "architecture": {
                "ok": t.ok,
                "expected": t.expected,
                "missing": list(t.missing),
                "extra": list(t.extra),
                "wrong": list(t.wrong),
                "unused": t.unused,
                "unknown": t.unknown,
            },
        }


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def verify(
    model_dir: Path | str,
    *,
    full: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> Verified:
    """Check a checkpoint folder. Raises WeightsError with the cause where a file is broken.

    full: hash every file, also those untouched since they were hashed. progress: called with the
    file's name and the bytes read. Tensors that are not the architecture's do not raise: they are
    in the result (`ok`, `tensors`).
    """
    folder = Path(model_dir)
    checked = weightcheck.check(folder, contents=False)
    manifest = weights_manifest.read(folder)
    rows = dict(manifest.rows) if manifest else {}
    hashed, trusted = contents(folder, rows, full=full, progress=progress)
    if manifest is not None and hashed and manifest.about.get("format") == FORMAT:
        manifest = weights_manifest.refreshed(folder, manifest, hashed)
        with contextlib.suppress(SparklingError):  # a folder that cannot be written to
            weights_manifest.write(folder, manifest)
    names, _ = weightcheck._shards(folder)
    return Verified(
        checked=checked,
        tensors=tensors(folder),
        hashed=tuple(hashed),
        trusted=tuple(trusted),
        bare=tuple(name for name in names if name not in rows),
        manifest=manifest,
    )


def contents(
    folder: Path,
    rows: dict[str, Row],
    *,
    full: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> tuple[dict[str, Row], list[str]]:
    """(rows of files hashed now, names of files trusted). Raises WeightsError for other content."""
    hashed: dict[str, Row] = {}
    trusted: list[str] = []
    lost = [name for name in rows if not (folder / name).is_file()]
    if lost:
        raise WeightsError(
            f"{folder} lacks {_some(lost)}, which its manifest names: fetch the checkpoint again, "
            "which asks for the missing files only."
        )
    differing = []
    for name, row in rows.items():
        if not full and row.untouched(folder):
            trusted.append(name)
            continue
        told = (lambda count, name=name: progress(name, count)) if progress else None
        now = weights_manifest.row_of(folder, name, progress=told)
        if now.sha256 != row.sha256:
            differing.append(name)
        hashed[name] = now
    if differing:
        raise WeightsError(
            f"{folder / differing[0]} has the right form but not the right content (its SHA-256 "
            f"differs){f', and {len(differing) - 1} more files' if len(differing) > 1 else ''}: "
            "fetch or build it again."
        )
    return hashed, trusted


def tensors(model_dir: Path | str) -> Tensors:
    """Compare names, dtypes and shapes in the headers with the architecture of config.json."""
    folder = Path(model_dir)
    names, _ = weightcheck._shards(folder)
    found = {
        t.name: (t.dtype, t.shape) for n in names for t in weightcheck.header(folder / n).values()
    }
    try:
        expected = architecture.expected(read_json(folder / "config.json"))
    except UsageError as error:
        return Tensors(found=len(found), unknown=str(error).rstrip("."))
    beyond = [name for name in found if name not in expected]
    unused = [name for name in beyond if architecture.unused(name)]
    return Tensors(
        expected=len(expected),
        found=len(found),
        missing=tuple(name for name in expected if name not in found),
        extra=tuple(sorted(set(beyond) - set(unused))),
        wrong=tuple(
            f"{name}: {_spec(found[name])} where {_spec(want)} is needed"
            for name, want in expected.items()
            if name in found and not architecture.fits(want, found[name])
        ),
        unused=len(unused),
    )


def _spec(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]} {list(spec[1])}"
