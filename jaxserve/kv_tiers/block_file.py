"""A KV block as a file: a header that says what it is, then its bytes.

Owns the format. Never sees a directory. Little-endian; the header is HEADER, padded to
HEADER_BYTES; the payload is each group's rows [fold, B, ...] in C order, by name.

A file is read only if its header is that of the block that was asked for, field by
field, and its payload has the length and the digest that the header says.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxserve.kv_tiers.host_pool import Payload
from jaxserve.moves import Label

MAGIC = b"jaxservK"
FORMAT = 1
DIGEST_BYTES = 16
# magic, format, column, payload bytes, weight version, key, parent, salt tag,
# fingerprint of the model, digest of the payload
HEADER = struct.Struct("<8sIIQq16s16s16s16s16s")
HEADER_BYTES = 128


class Damaged(ValueError):
    """The file does not hold the block that was asked for; says why."""


class Layout(NamedTuple):
    """What a block of a model consists of: (shape, dtype) of each group's rows."""

    groups: tuple[tuple[str, tuple[int, ...], np.dtype], ...]  # by name

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.groups)


def layout(rows: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> Layout:
    """The layout of blocks with these groups: name -> (shape, dtype)."""
    groups = sorted(rows.items())
    return Layout(tuple((name, shape, dtype) for name, (shape, dtype) in groups))


def file_bytes(payload_bytes: int) -> int:
    """Bytes of a block's file."""
    return HEADER_BYTES + payload_bytes


def _header(label: Label, fingerprint: bytes, size: int, digest: bytes) -> bytes:
    return HEADER.pack(
        MAGIC,
        FORMAT,
        label.column,
        size,
        label.weight_version,
        label.key,
        label.parent,
        label.salt_tag,
        fingerprint,
        digest,
    ).ljust(HEADER_BYTES, b"\0")


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def encode(label: Label, fingerprint: bytes, payload: Payload) -> bytes:
    """The file of a block."""
    rows = (np.ascontiguousarray(payload[group]) for group in sorted(payload))
    data = b"".join(array.tobytes() for array in rows)
    return _header(label, fingerprint, len(data), _digest(data)) + data


def decode(data: bytes, label: Label, fingerprint: bytes, form: Layout) -> Payload:
    """The block that a file holds.

    Raises:
      Damaged: it is not this block's file, or not all of it.
    """
    size = form.payload_bytes
    if len(data) != file_bytes(size):
        raise Damaged(f"it has {len(data)} bytes instead of {file_bytes(size)}")
    body = memoryview(data)[HEADER_BYTES:]
    if data[:HEADER_BYTES] != _header(label, fingerprint, size, _digest(body)):
        raise Damaged("its header is not this block's, or its contents have changed")
    payload, start = {}, 0
    for name, shape, dtype in form.groups:
        end = start + math.prod(shape) * dtype.itemsize
        payload[name] = np.frombuffer(body[start:end], dtype).reshape(shape)
        start = end
    return payload
