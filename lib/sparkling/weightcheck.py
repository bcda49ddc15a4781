"""Is a checkpoint folder whole? One sentence for each way in which it is not.

Structure is checked by reading each safetensors header ourselves, before any library trusts it:
no length is believed before it was compared with the file's size. Right size and right header do
not make right bytes, so `check` says which of the two it established: contents count as verified
only where a SHA-256 was compared (from the builder's or downloader's manifest, or as passed in).
A downloader's manifest also has each file's size and time at its hashing; a file that still has them
is not read again here (`sparkling weights verify --full` does).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkling.errors import UsageError

INDEX = "model.safetensors.index.json"
MANIFEST = "sparkling.json"
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class WeightsError(UsageError):
    """A checkpoint folder that cannot be served as it is."""


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header; `start` and `end` are offsets into the data, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Checked:
    """What `check` established."""

    folder: Path
    files: int
    tensors: int
    size: int  # bytes of all weight files
    hashed: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        depth = (
            "contents verified by SHA-256"
            if len(self.hashed) >= self.files
            else "structure whole, contents not compared with a checksum"
        )
        return (
            f"{self.files} weight file{'s' if self.files > 1 else ''}, {self.tensors} tensors, "
            f"{self.size / 1e6:,.1f} MB: {depth}"
        )


def header(path: Path) -> dict[str, Tensor]:
    """Read and check the header of one safetensors file against the file's size.

    Raises WeightsError with the cause in plain words: empty, too short, a Git LFS pointer, a web
    page, an impossible header length, a header cut off or mangled, data short or in excess,
    tensors that overlap, leave gaps or have the wrong number of bytes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(512)
            _not_something_else(path, start, size)
            length = int.from_bytes(start[:8], "little")
            if length > _MAX_HEADER or (length > size - 8 and start[8:9] != b"{"):
                raise WeightsError(
                    f"{path} claims a header of {length:,} bytes, which is impossible: this is "
                    "not a safetensors file, or its first bytes were overwritten; fetch it again."
                )
            if length > size - 8:
                raise WeightsError(
                    f"{path} is cut off inside its header ({size:,} of at least {length + 8:,} "
                    "bytes): fetch it again."
                )
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None
    tensors = _entries(path, raw)
    _tiles(path, tensors, size - 8 - length)
    return tensors


def _not_something_else(path: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise WeightsError(f"{path} is empty: fetch it again.")
    if start.startswith(b"version https://git-lfs"):
        raise WeightsError(
            f"{path} is a Git LFS pointer, not the weights: fetch the file itself "
            "(git lfs pull, or a download through the hub's client)."
        )
    opening = start.lstrip()[:64].lower()
    if opening.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise WeightsError(
            f"{path} is a web page (often a sign-in or error page), not weights: check your "
            "access to the repository and fetch it again."
        )
    if size < 8:
        raise WeightsError(f"{path} holds {size} bytes, too few for any weights: fetch it again.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _entries(path: Path, raw: bytes) -> dict[str, Tensor]:
    mangled = f"{path} has a mangled header"
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise WeightsError(f"{mangled} (not JSON): fetch it again.") from None
    if not isinstance(entries, dict):
        raise WeightsError(f"{mangled} (not a table of tensors): fetch it again.")
    notes = entries.pop("__metadata__", {})
    if not isinstance(notes, dict) or any(not isinstance(note, str) for note in notes.values()):
        raise WeightsError(f"{mangled} (its notes are not texts): fetch it again.")
    tensors = {}
    for name, entry in entries.items():
        try:
            start, end = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            numbers = (start, end, *shape)
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError
            bits = _BITS[dtype]
        except (TypeError, KeyError, ValueError):
            raise WeightsError(f"{mangled} (entry {name!r}): fetch it again.") from None
        count = 1
        for extent in shape:
            count *= extent
        if (count * bits + 7) // 8 != end - start:
            raise WeightsError(
                f"{path} gives {name!r} {end - start:,} bytes where {dtype} {list(shape)} needs "
                f"{(count * bits + 7) // 8:,}: fetch it again."
            )
        tensors[name] = Tensor(name, dtype, shape, start, end)
    if not tensors:
        raise WeightsError(f"{path} holds no tensors: fetch it again.")
    return tensors


def _tiles(path: Path, tensors: Mapping[str, Tensor], available: int) -> None:
    """The tensors must follow one another without gap or overlap and fill the data exactly."""
    position = 0
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if tensor.start != position:
            kind = "overlaps the one before it" if tensor.start < position else "leaves a gap"
            raise WeightsError(f"{path} has a mangled header ({tensor.name!r} {kind}).")
        position = tensor.end
    if available < position:
        raise WeightsError(
            f"{path} is short by {_bytes(position - available)}: the download was cut off; fetch "
            "it again."
        )
    if available > position:
        raise WeightsError(
            f"{path} is {_bytes(available - position)} too long: something was appended to it; "
            "fetch it again."
        )


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count:,} bytes"


def _json(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise WeightsError(f"{path} is not readable JSON: fetch the {what} again.") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} does not hold a table: fetch the {what} again.")
    return value


def _remedy(folder: Path) -> str:
    """How the checkpoint that belongs into `folder` is had, told by the place."""
    place = folder.absolute()
    if place.parts[-3:] == (".cache", "models", "tiny-ling"):
        return "build the tiny Ling with `sparkling tiny`"
    if place.parent.name == "models" and (place.parent.parent / "env" / "recipes").is_dir():
        return f"take it back from the repository (git checkout -- models/{place.name})"
    return "download it (`sparkling weights fetch` does it, or goes on), or name another folder"


def _shards(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the weight files and, where there is an index, tensor -> file."""
    index = folder / INDEX
    if index.is_file():
        mapping = _json(index, "index").get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise WeightsError(f"{index} lists no weights: fetch the index again.")
        names = sorted({str(name) for name in mapping.values()})
        if any(Path(name).name != name for name in names):
            raise WeightsError(f"{index} names files outside its folder: do not use it.")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightsError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files that its index names "
                f"({', '.join(missing[:3])}{more}): finish the download."
            )
        return names, mapping
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise WeightsError(f"{folder} holds no weights (*.safetensors): {_remedy(folder)}.")
    if len(names) > 1 and any("-of-" in name for name in names):
        raise WeightsError(
            f"{folder} holds {len(names)} weight files but no {INDEX}: fetch the index as well."
        )
    return names, {}


def headers(model_dir: Path | str) -> dict[str, dict[str, Tensor]]:
    """Weight file -> its tensors, for every file of a folder; headers only, each checked against
    its file's size. Raises WeightsError as `header` does, and when files or the index are missing."""
    folder = Path(model_dir)
    return {name: header(folder / name) for name in _shards(folder)[0]}


def _manifest_hashes(folder: Path) -> dict[str, str]:
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    hashes = _json(path, "manifest").get("sha256")
    return {str(k): str(v) for k, v in hashes.items()} if isinstance(hashes, dict) else {}


def _untouched(folder: Path) -> set[str]:
    """Files with the size and time that they had when the manifest's hashes were taken."""
    path = folder / MANIFEST
    rows = _json(path, "manifest").get("files") if path.is_file() else None
    same = set()
    for row in rows if isinstance(rows, list) else ():
        with contextlib.suppress(OSError, TypeError, KeyError):
            stat = (folder / row["path"]).stat()
            if (stat.st_size, stat.st_mtime_ns) == (row["size"], row["mtime_ns"]):
                same.add(row["path"])
    return same


def sha256(path: Path) -> str:
    """The file's SHA-256, read in pieces of 4 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check(
    model_dir: Path | str, *, hashes: Mapping[str, str] | None = None, contents: bool = True
) -> Checked:
    """Check a checkpoint folder; return what was established, raise WeightsError if it is broken.

    The structure of every weight file is checked. With `contents` each file with a known SHA-256
    is hashed as well: those in `hashes`, or else those in the folder's own manifest that were
    touched since it was written. Hashing reads every byte, minutes for the full-size model.
    """
    folder = Path(model_dir)
    if not folder.exists():
        raise WeightsError(f"There is no checkpoint at {folder}: {_remedy(folder)}.")
    if not folder.is_dir():
        raise WeightsError(f"{folder} is a file: give the folder that holds config.json.")
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder} has no config.json: it is not a whole checkpoint.")
    if not _json(folder / "config.json", "configuration").get("architectures"):
        raise WeightsError(f"{folder / 'config.json'} names no architecture: fetch it again.")
    names, mapping = _shards(folder)
    tensors: dict[str, dict[str, Tensor]] = {name: header(folder / name) for name in names}
    for tensor, name in mapping.items():
        if tensor not in tensors[name]:
            raise WeightsError(
                f"{folder / name} does not hold {tensor!r}, which the index promises: fetch both "
                "again."
            )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise WeightsError(f"{folder} has no tokenizer.json: finish the download.")
    known = dict(_manifest_hashes(folder) if hashes is None else hashes) if contents else {}
    same = _untouched(folder) if contents and hashes is None else set()
    for name, digest in known.items():
        if name in same:
            continue
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} lacks {name}: finish the download or build it again.")
        if sha256(folder / name) != digest:
            raise WeightsError(
                f"{folder / name} has the right form but not the right content (its SHA-256 "
                "differs): fetch or build it again."
            )
    return Checked(
        folder=folder,
        files=len(names),
        tensors=sum(len(found) for found in tensors.values()),
        size=sum((folder / name).stat().st_size for name in names),
        hashed=tuple(name for name in names if name in known),
    )


def inventory(model_dir: Path | str) -> list[dict[str, Any]]:
    """Bytes by part of the model, largest first, as rows for a table; reads headers only.

    Parts are told by Ling's tensor names; what is not recognised is listed as "other".
    """
    folder = Path(model_dir)
    layers = _json(folder / "config.json", "configuration").get("num_hidden_layers")
    names, _ = _shards(folder)
    tensors = [tensor for name in names for tensor in header(folder / name).values()]
    mla = {_layer(t.name) for t in tensors if ".kv_b_proj." in t.name}
    parts: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(_part(tensor.name, layers, mla), []).append(tensor)
    total = sum(t.end - t.start for t in tensors)
    rows = []
    for part, found in parts.items():
        size = sum(t.end - t.start for t in found)
        rows.append(
            {
                "part": part,
                "dtype": ", ".join(sorted({t.dtype for t in found})),
                "tensors": len(found),
                "MB": size / 1e6,
                "%": 100 * size / total,
            }
        )
    return sorted(rows, key=lambda row: (-row["MB"], row["part"]))


def _layer(name: str) -> int | None:
    before, found, after = name.partition("model.layers.")
    number = after.partition(".")[0]
    return int(number) if found and not before and number.isdecimal() else None


def _part(name: str, layers: Any, mla: set[int | None]) -> str:
    layer = _layer(name)
    if layer is None:
        whole = {"word_embeddings": "embedding", "lm_head": "LM head", "norm": "norms"}
        return next((part for key, part in whole.items() if key in name.split(".")), "other")
    if isinstance(layers, int) and layer >= layers:
        return "NEXTN layer"
    kinds = {
        ".shared_experts.": "shared expert",
        ".experts.": "routed experts",
        ".mlp.gate.": "router",
        ".mlp.": "dense MLP",
        ".attention.": "MLA attention" if layer in mla else "KDA attention",
        "layernorm.": "norms",
    }
    return next((part for key, part in kinds.items() if key in name), "other")
