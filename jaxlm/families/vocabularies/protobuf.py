"""The wire format of Protocol Buffers, as far as a SentencePiece model needs it, read and written."""

import struct
from collections.abc import Iterator

from jaxlm.core.errors import InputError

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a message: an int for a varint, otherwise bytes.

    Raises InputError if the message is cut off or has an unknown wire type (protobuf.dev, Encoding).
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire)
        if wire == _LENGTH:
            size, at = _varint(message, at)
        if size is None or not number:
            raise InputError(f"no field of a Protocol Buffer begins with {key}")
        if size > len(message) - at:
            raise InputError(f"a field of {size} bytes is cut off")
        yield number, message[at : at + size]
        at += size


def field(number: int, value: int | float | bytes) -> bytes:
    """Return a field of a message: an int as a varint, a float in four bytes, bytes with their length."""
    if isinstance(value, float):
        return _encoded(number << 3 | _FOUR_BYTES) + struct.pack("<f", value)
    if isinstance(value, int):
        return _encoded(number << 3 | _VARINT) + _encoded(value)
    return _encoded(number << 3 | _LENGTH) + _encoded(len(value)) + value


def signed(value: int) -> int:
    """Return the int32 that a varint stands for."""
    return value - 2**64 if value >= 2**63 else value


def float32(value: bytes) -> float:
    """Return the number in four bytes."""
    return struct.unpack("<f", value)[0]


def _encoded(value: int) -> bytes:
    value %= 2**64
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise InputError("a number is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise InputError("a number has more than 64 bits")
