"""Columns of text from a Parquet file, as data sets on a hub hold them.

Only what such files use is read (https://parquet.apache.org/docs/file-format/): flat columns of
byte arrays, plain or by dictionary, data pages of version 1 and 2, uncompressed, Snappy or gzip.
Anything else is refused by name. It saves the notebooks a dependency of forty megabytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkling.errors import SparklingError

MAGIC = b"PAR1"
_BYTE_ARRAY = 6
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8
_CODECS = {0: "none", 1: "Snappy", 2: "gzip"}
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
MOST_BYTES = 1 << 30


def strings(data: bytes, names: Sequence[str]) -> dict[str, list[str]]:
    """The named columns, every value of every row group in order.

    Raises SparklingError where the file is damaged, lacks a column, or uses what is not read here.
    """
    try:
        return _strings(data, names)
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, zlib.error, TypeError) as error:
        raise SparklingError(f"the Parquet file is damaged ({error})") from None


def _strings(data: bytes, names: Sequence[str]) -> dict[str, list[str]]:
    if data[:4] != MAGIC or data[-4:] != MAGIC:
        raise SparklingError("it is no Parquet file")
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = _Thrift(data, len(data) - 8 - size).struct()
    out: dict[str, list[str]] = {name: [] for name in names}
    optional = {e[4].decode(): e.get(3, 0) == 1 for e in footer[2][1:] if 1 in e}
    for group in footer[4]:
        for chunk in group[1]:
            meta = chunk[3]
            name = b".".join(meta[3]).decode()
            if name not in out:
                continue
            if meta[1] != _BYTE_ARRAY:
                raise SparklingError(f"its column {name} holds no text")
            out[name] += [v.decode() for v in _chunk(data, meta, optional.get(name, False))]
    missing = [name for name in names if name not in optional]
    if missing:
        raise SparklingError(f"it has no column {missing[0]}")
    if any(len(values) != footer[3] for values in out.values()):
        raise SparklingError("its columns are shorter than it says")
    return out


def _chunk(data: bytes, meta: Mapping[int, Any], optional: bool) -> Iterator[bytes]:
    at = min(meta[9], meta.get(11) or meta[9])
    left, dictionary = meta[5], []
    while left > 0:
        reader = _Thrift(data, at)
        head = reader.struct()
        body = data[reader.at : reader.at + head[3]]
        at = reader.at + head[3]
        kind = head[1]
        if kind == _DICTIONARY:
            page = _unpacked(body, meta[4], head[2])
            dictionary = list(_plain(page, head[7][1]))
            continue
        if kind == _DATA:
            count, encoding = head[5][1], head[5][2]
            page = _unpacked(body, meta[4], head[2])
            if optional:
                (levels,) = struct.unpack_from("<I", page)
                _all_there(page[4 : 4 + levels], count)
                page = page[4 + levels :]
        elif kind == _DATA_V2:
            v2 = head[8]
            count, encoding = v2[1], v2[4]
            levels = v2[5] + v2[6]
            if v2[2]:
                raise SparklingError("it has empty cells")
            packed = body[levels:]
            page = _unpacked(packed, meta[4], head[2] - levels) if v2.get(7, True) else packed
        else:
            continue  # an index page
        left -= count
        if encoding == _PLAIN:
            yield from _plain(page, count)
        elif encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
            yield from (dictionary[i] for i in _indices(page[1:], page[0], count))
        else:
            raise SparklingError(f"its encoding {encoding} is not read here")


def _plain(page: bytes, count: int) -> Iterator[bytes]:
    at = 0
    for _ in range(count):
        (size,) = struct.unpack_from("<I", page, at)
        at += 4 + size
        if at > len(page):
            raise IndexError("a value ends behind its page")
        yield page[at - size : at]


def _all_there(levels: bytes, count: int) -> None:
    if any(level != 1 for level in _indices(levels, 1, count)):
        raise SparklingError("it has empty cells")


def _indices(data: bytes, width: int, count: int) -> Iterator[int]:
    """Numbers of `width` bits in Parquet's mixture of runs and packed groups of eight."""
    at, given, size = 0, 0, (width + 7) // 8
    while given < count:
        header, at = _varint(data, at)
        if header & 1:
            groups = header >> 1
            packed = int.from_bytes(data[at : at + groups * width], "little")
            if at + groups * width > len(data) and width:
                raise IndexError("packed numbers end behind their page")
            at += groups * width
            number = min(groups * 8, count - given)
            mask = (1 << width) - 1
            for i in range(number):
                yield packed >> (i * width) & mask
        else:
            number = min(header >> 1, count - given)
            value = int.from_bytes(data[at : at + size], "little")
            at += size
            for _ in range(number):
                yield value
        if not header:
            raise IndexError("an empty run")
        given += number


# -- compression ---------------------------------------------------------------------------------


def _unpacked(body: bytes, codec: int, size: int) -> bytes:
    if codec not in _CODECS:
        raise SparklingError(f"its compression {codec} is not read here")
    if not 0 <= size <= MOST_BYTES:
        raise IndexError("a page of impossible size")
    page = _snappy(body) if codec == 1 else zlib.decompress(body, 47) if codec else body
    if len(page) != size:
        raise IndexError("a page has another size than it says")
    return page


def _snappy(data: bytes) -> bytes:
    """https://github.com/google/snappy/blob/main/format_description.txt"""
    size, at = _varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        kind, length = tag & 3, tag >> 2
        at += 1
        if kind == 0:
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(data[at : at + extra], "little")
                at += extra
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if kind == 1:
            length, offset = (length & 7) + 4, (tag >> 5) << 8 | data[at]
            at += 1
        else:
            wide = 2 if kind == 2 else 4
            length, offset = length + 1, int.from_bytes(data[at : at + wide], "little")
            at += wide
        if not 0 < offset <= len(out):
            raise IndexError("a copy from before the beginning")
        start = len(out) - offset
        for i in range(length):  # it may run into what it writes
            out.append(out[start + i])
    if len(out) != size:
        raise IndexError("Snappy data of another size than it says")
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


# -- Thrift's compact protocol ---------------------------------------------------------------------


@dataclass
class _Thrift:
    """Structures of the compact protocol as {field number: value}, names being of no use here."""

    data: bytes
    at: int

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            step, kind = head >> 4, head & 15
            number = number + step if step else self._zigzag()
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return self._byte() == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            self.at += 8
            return struct.unpack_from("<d", self.data, self.at - 8)[0]
        if kind == 8:
            size, self.at = _varint(self.data, self.at)
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in (9, 10):
            head = self._byte()
            size = head >> 4
            if size == 15:
                size, self.at = _varint(self.data, self.at)
            return [self._value(head & 15) for _ in range(size)]
        if kind == 12:
            return self.struct()
        raise IndexError(f"a field of kind {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _zigzag(self) -> int:
        value, self.at = _varint(self.data, self.at)
        return value >> 1 ^ -(value & 1)
