"""What a compiled library offers, needs and holds for a GPU, read from its file: nothing is loaded.

ELF of 64 bits, little-endian (x86-64 and aarch64), by the System V gABI: the dynamic symbol table
(section type 11) names what a loader finds, the dynamic section (type 6) what it loads besides.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DYNAMIC, _DYNSYM = 6, 11
_NEEDED = 1
_FATBIN = 0xBA55ED50
_SYMBOL, _SECTION, _ENTRY = struct.Struct("<IBBHQQ"), struct.Struct("<IIQQQQIIQQ"), "<qQ"


@dataclass(frozen=True)
class Library:
    """Names that a library exports, and the libraries that it wants loaded with it."""

    exports: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()


def read(path: Path) -> Library | None:
    """What `path` exports and needs; None when it is no such library, or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except (OSError, ValueError, struct.error, IndexError):
        return None


def _read(data: mmap.mmap) -> Library | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    if size != _SECTION.size or not count:
        return None
    sections = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
    exports: set[str] = set()
    needs: list[str] = []
    for section in sections:
        kind, link = section[1], section[6]
        if kind == _DYNSYM:
            exports |= set(_exported(data, section, sections[link]))
        elif kind == _DYNAMIC:
            for tag, value in struct.iter_unpack(_ENTRY, _body(data, section)):
                if tag == _NEEDED:
                    needs.append(_text(data, sections[link], value))
    return Library(frozenset(exports), tuple(needs))


def _body(data: mmap.mmap, section: tuple[int, ...]) -> bytes:
    start, size = section[4], section[5]
    if start + size > len(data):
        raise ValueError("a section beyond the end of the file")
    return data[start : start + size]


def _text(data: mmap.mmap, strings: tuple[int, ...], at: int) -> str:
    start = strings[4] + at
    return data[start : data.find(b"\0", start)].decode("ascii", "replace")


def _exported(data: mmap.mmap, section: tuple[int, ...], strings: tuple[int, ...]) -> Iterator[str]:
    """Defined symbols that are visible outside: global or weak, in some section, not hidden."""
    for name, info, other, where, _value, _size in _SYMBOL.iter_unpack(_body(data, section)):
        if info >> 4 in (1, 2) and where and other & 3 in (0, 3):
            yield _text(data, strings, name)


def gpu_codes(path: Path) -> dict[str, int]:
    """The GPU code inside a compiled file: architecture ("sm_121") → how many parts.

    Read from the headers of the fat binaries (magic 0xBA55ED50; each entry has kind, header size,
    payload size and architecture at fixed places), which stay plain where the code is compressed.
    Checked against files that nvcc 13.0 compiled for sm_121a and sm_90a.
    """
    data, found, at = path.read_bytes(), {}, 0
    magic = struct.pack("<I", _FATBIN)
    while (at := data.find(magic, at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6) if at + 16 <= len(data) else (0, 0)
        here, end = at + header, at + header + size
        while header == 16 and here + 32 <= min(end, len(data)):
            kind, _, entry, payload = struct.unpack_from("<HHIQ", data, here)
            arch = struct.unpack_from("<I", data, here + 28)[0]
            if entry < 32 or kind not in (1, 2):
                break
            name = f"{'compute' if kind == 1 else 'sm'}_{arch}"
            found[name] = found.get(name, 0) + 1
            here += entry + payload
        at += 4
    return found
