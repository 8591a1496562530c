"""Blocks as files: what was written comes back, and anything else is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

from jaxserve.kv_tiers.block_file import (
    HEADER_BYTES,
    Damaged,
    Layout,
    decode,
    encode,
    file_bytes,
    layout,
)
from jaxserve.moves import Label

KEY, PARENT, SALT = b"key of 16 bytes.", b"parent, 16 bytes", b"salt tag, 16 b.."
MODEL = b"fingerprint 16 b"
LABEL = Label(KEY, PARENT, column=5, weight_version=3, salt_tag=SALT)


def rows(shape: tuple[int, ...], dtype: type, seed: int = 0) -> np.ndarray:
    """Random bits, those of NaNs among them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return bits.view(dtype).reshape(shape)


def form(payload: Mapping[str, np.ndarray]) -> Layout:
    return layout({name: (array.shape, array.dtype) for name, array in payload.items()})


SMALL = {"kv": np.arange(6, dtype=np.uint8).reshape(2, 3)}


def by_hand(body: bytes, **fields: bytes) -> bytes:
    """The file of a block, a header field after the other."""
    parts = {
        "magic": b"jaxservK",
        "format": bytes([1, 0, 0, 0]),
        "column": bytes([5, 0, 0, 0]),
        "bytes": len(body).to_bytes(8, "little"),
        "weights": bytes([3, 0, 0, 0, 0, 0, 0, 0]),
        "key": KEY,
        "parent": PARENT,
        "salt": SALT,
        "model": MODEL,
        "digest": hashlib.blake2b(body, digest_size=16).digest(),
        "padding": bytes(16),
    }
    assert all(len(parts[name]) == len(value) for name, value in fields.items())
    return b"".join((parts | fields).values()) + body


@pytest.mark.parametrize(
    "payload",
    [
        {"kv": rows((3, 4, 2, 2, 8), ml_dtypes.bfloat16)},
        {"kv": rows((1, 16, 1, 2, 4), np.float32), "extra": rows((5, 7), np.int8)},
        {
            "b": rows((2, 3), ml_dtypes.float8_e4m3fn, 1),
            "a": rows((2, 3), np.float16, 2),
            "c": rows((4,), np.float64, 3),
        },
    ],
    ids=lambda payload: "+".join(payload),
)
def test_a_block_comes_back_bit_by_bit(payload: dict[str, np.ndarray]) -> None:
    data = encode(LABEL, MODEL, payload)
    size = sum(array.nbytes for array in payload.values())
    assert form(payload).payload_bytes == size
    assert len(data) == file_bytes(size) == HEADER_BYTES + size
    back = decode(data, LABEL, MODEL, form(payload))
    assert back.keys() == payload.keys()
    for group, array in payload.items():
        assert back[group].dtype == array.dtype and back[group].shape == array.shape
        assert back[group].tobytes() == array.tobytes()


def test_the_format_by_hand() -> None:
    """Another version must read what this one wrote, or refuse it by FORMAT."""
    payload = {
        "z": np.array([[1, 2]], "<u2"),
        "a": np.array([7.0], "<f4"),
    }
    body = bytes([0, 0, 0xE0, 0x40, 1, 0, 2, 0])  # "a", then "z"
    assert encode(LABEL, MODEL, payload) == by_hand(body)
    plain = decode(by_hand(body), LABEL, MODEL, form(payload))
    np.testing.assert_array_equal(plain["z"], payload["z"], strict=True)
    np.testing.assert_array_equal(plain["a"], payload["a"], strict=True)


def test_rows_are_written_in_c_order_wherever_they_lie_in_memory() -> None:
    whole = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for view in (whole.transpose(2, 0, 1), whole[:, ::2], np.asfortranarray(whole)):
        assert encode(LABEL, MODEL, {"kv": view}) == encode(
            LABEL, MODEL, {"kv": view.copy(order="C")}
        )
    back = decode(
        encode(LABEL, MODEL, {"kv": whole.T}), LABEL, MODEL, form({"kv": whole.T})
    )
    np.testing.assert_array_equal(back["kv"], whole.T, strict=True)


@pytest.mark.parametrize(
    "wrong",
    [
        LABEL._replace(key=PARENT),
        LABEL._replace(parent=KEY),
        LABEL._replace(column=6),
        LABEL._replace(weight_version=4),
        LABEL._replace(weight_version=-3),
        LABEL._replace(salt_tag=b""),
        LABEL._replace(salt_tag=KEY),
    ],
)
def test_a_file_is_read_as_no_other_block(wrong: Label) -> None:
    data = encode(LABEL, MODEL, SMALL)
    decode(data, LABEL, MODEL, form(SMALL))
    with pytest.raises(Damaged):
        decode(data, wrong, MODEL, form(SMALL))
    with pytest.raises(Damaged):
        decode(encode(wrong, MODEL, SMALL), LABEL, MODEL, form(SMALL))


def test_a_file_is_read_for_no_other_model() -> None:
    data = encode(LABEL, MODEL, SMALL)
    with pytest.raises(Damaged):
        decode(data, LABEL, b"another one, 16b", form(SMALL))
    with pytest.raises(Damaged):
        decode(data, LABEL, MODEL, layout({"kv": ((2, 4), np.dtype(np.uint8))}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", b"jaxservX"),
        ("format", bytes([2, 0, 0, 0])),
        ("column", bytes([6, 0, 0, 0])),
        ("bytes", bytes([7, 0, 0, 0, 0, 0, 0, 0])),
        ("weights", bytes([2, 0, 0, 0, 0, 0, 0, 0])),
        ("key", PARENT),
        ("parent", KEY),
        ("salt", bytes(16)),
        ("model", KEY),
        ("digest", bytes(16)),
        ("padding", bytes(15) + b"\1"),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: bytes) -> None:
    body = SMALL["kv"].tobytes()
    decode(by_hand(body), LABEL, MODEL, form(SMALL))
    with pytest.raises(Damaged):
        decode(by_hand(body, **{field: value}), LABEL, MODEL, form(SMALL))


def test_a_changed_byte_anywhere_is_refused() -> None:
    data = encode(LABEL, MODEL, SMALL)
    for at in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            bad = bytearray(data)
            bad[at] ^= change
            with pytest.raises(Damaged):
                decode(bytes(bad), LABEL, MODEL, form(SMALL))


def test_a_file_that_is_too_short_or_too_long_is_refused() -> None:
    data = encode(LABEL, MODEL, SMALL)
    for end in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:end], LABEL, MODEL, form(SMALL))
    for more in (b"\0", data):
        with pytest.raises(Damaged):
            decode(data + more, LABEL, MODEL, form(SMALL))


def test_a_header_is_read_with_no_other_contents() -> None:
    other = {"kv": SMALL["kv"][::-1]}
    first, second = (encode(LABEL, MODEL, payload) for payload in (SMALL, other))
    with pytest.raises(Damaged):
        decode(first[:HEADER_BYTES] + second[HEADER_BYTES:], LABEL, MODEL, form(SMALL))


@pytest.mark.parametrize(
    ("rows_of", "expected"),
    [
        ({"kv": ((3, 4), np.dtype(np.float32))}, 48),
        (
            {
                "b": ((2,), np.dtype(ml_dtypes.bfloat16)),
                "a": ((5, 1, 2), np.dtype(np.int8)),
            },
            14,
        ),
    ],
)
def test_a_layout_says_how_long_a_block_is(rows_of: dict, expected: int) -> None:
    made = layout(rows_of)
    assert made.payload_bytes == expected
    assert [name for name, _, _ in made.groups] == sorted(rows_of)
