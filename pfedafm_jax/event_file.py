"""TensorBoard's event files, written and read without TensorFlow or TensorBoard.

A file is a row of records, each a length and some bytes with a checksum (CRC-32C) after either; the bytes are an `Event`, a
protocol buffer of which we need few fields. A record that was cut off, as by kill -9 or a full disk, is not read.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BUCKETS = 40  # of a histogram
VERSION = b"brain.Event:2"  # from this one on, TensorBoard drops what a start of a session replaces


class Event(NamedTuple):
    """What is read of an event."""

    wall_time: float
    step: int
    tags: tuple[str, ...]
    content: bytes  # the whole of it, as it can be written again


def encode_event(
    step: int,
    wall_time: float,
    scalars: Mapping[str, float] | None = None,
    histograms: Mapping[str, np.ndarray] | None = None,
) -> bytes:
    """An event with numbers and distributions by name; what is not finite is left out."""
    values = [
        _text(1, tag) + b"\x15" + struct.pack("<f", value)
        for tag, value in (scalars or {}).items()
        if np.isfinite(value)
    ]
    for tag, numbers in (histograms or {}).items():
        finite = np.asarray(numbers, np.float64).reshape(-1)
        finite = finite[np.isfinite(finite)]
        if finite.size:
            values.append(_text(1, tag) + _bytes(5, _histogram(finite)))
    return _moment(wall_time, step) + _bytes(5, b"".join(_bytes(1, value) for value in values))


def encode_start(wall_time: float) -> list[bytes]:
    """The first two events of a file: its version, and that a session starts at step 0, which voids all files before."""
    return [_moment(wall_time, 0) + _bytes(3, VERSION), _moment(wall_time, 0) + _bytes(7, b"\x08\x01")]


def framed(content: bytes) -> bytes:
    """An event as a record of the file."""
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked(crc32c(length))) + content + struct.pack("<I", masked(crc32c(content)))


def read_events(path: str | Path) -> Iterator[Event]:
    """The events of a file with a step, up to its end or the first record that is cut off or damaged."""
    data, place = Path(path).read_bytes(), 0
    while place + 12 <= len(data):
        length, check = struct.unpack_from("<QI", data, place)
        end = place + 12 + length
        if check != masked(crc32c(data[place : place + 8])) or end + 4 > len(data):
            return
        content = data[place + 12 : end]
        if struct.unpack_from("<I", data, end)[0] != masked(crc32c(content)):
            return
        fields = dict(_fields(content))
        if 5 in fields:
            tags = [dict(_fields(value))[1].decode() for _, value in _fields(fields[5])]
            yield Event(struct.unpack("<d", fields[1])[0], fields.get(2, 0), tuple(tags), content)
        place = end + 4


def _histogram(values: np.ndarray) -> bytes:
    """`HistogramProto`; shares all have the same buckets, from 0 to 1, so that rounds can be compared."""
    shares = values.min() >= 0 and values.max() <= 1
    counts, edges = np.histogram(values, BUCKETS, range=(0, 1) if shares else None)
    numbers = (values.min(), values.max(), values.size, values.sum(), np.square(values).sum())
    content = b"".join(struct.pack("<Bd", 8 * field + 1, number) for field, number in enumerate(numbers, start=1))
    return content + _bytes(6, edges[1:].astype("<f8").tobytes()) + _bytes(7, counts.astype("<f8").tobytes())


# ---------------------------------------------------------------------------------------------- protocol buffers


def _moment(wall_time: float, step: int) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _number(step)


def _number(value: int) -> bytes:
    """A whole number, seven bits a byte, the last byte below 128."""
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes([*content, value])


def _bytes(field: int, content: bytes) -> bytes:
    return _number(8 * field + 2) + _number(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message by number: whole numbers as such, everything else as bytes."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        field, kind = divmod(number(), 8)
        if kind == 0:
            yield field, number()
            continue
        size = {1: 8, 5: 4}.get(kind) or number()
        yield field, data[place : place + size]
        place += size


# ---------------------------------------------------------------------------------------------- checksums


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc, table = 0xFFFFFFFF, _CRC_TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A checksum as the records store it: turned by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
