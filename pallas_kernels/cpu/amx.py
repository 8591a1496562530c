"""The inner loop on AMX: blocks of 32 rows x 32 columns, 16 words of each at a time.

Owns the tile registers: between `Tiles.configure` and `Tiles.release` they are the
caller's, who keeps the time between short, for to set them up takes as long as 20
products. A register holds 16 rows of 64 bytes. Two of rows and two of columns make four
sums, so that each load serves two products: tiles come from memory no faster than that.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pallas_kernels.cpu.llvm import I64, call, pointer, prefetch_line

MAX_ROWS = 32
"""Rows of two registers."""

SIDE = 16
"""Rows of a register, and words of a row of it."""

_I8 = ir.IntType(8)
_P8 = _I8.as_pointer()
_A, _B = 4, 6  # and the register after each; the sums are in 0 to 3
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def permitted() -> bool:
    """Whether Linux lets this process use tiles; it has to be asked."""
    libc = ctypes.CDLL(None)
    return libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _int(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


class Tiles:
    """The instructions, as LLVM knows them; a test puts others in their place."""

    def configure(self, b: Any, first: Any, second: Any) -> None:
        """Set the registers' heights, and clear them; all are 64 bytes wide.

        Sums 0 and 1 and the first of A become `first` rows high, sums 2 and 3 and the
        second of A `second`, B 16.
        """

        def heights(value: Any, *registers: int) -> Any:
            return b.mul(value, _int(sum(1 << 8 * r for r in registers)))

        high = b.add(heights(first, 0, 1, _A), heights(second, 2, 3, _A + 1))
        high = b.add(high, heights(_int(SIDE), _B, _B + 1))
        wide = _int(0x0040_0040_0040_0040)
        place = cgutils.alloca_once(b, ir.ArrayType(I64, 8))
        none, palette = _int(0), _int(1)
        for i, word in enumerate((palette, none, wide, wide, none, none, high, none)):
            b.store(word, b.gep(place, [none, _int(i)]))
        call(b, "llvm.x86.ldtilecfg", ir.VoidType(), b.bitcast(place, _P8))

    def zero(self, b: Any, register: int) -> None:
        """Clear a register."""
        call(b, "llvm.x86.tilezero", ir.VoidType(), ir.Constant(_I8, register))

    def load(self, b: Any, register: int, address: Any, stride: Any) -> None:
        """Read a register's rows, `stride` bytes apart."""
        self._move(b, "llvm.x86.tileloadd64", register, address, stride)

    def store(self, b: Any, register: int, address: Any, stride: Any) -> None:
        """Write a register's rows, `stride` bytes apart."""
        self._move(b, "llvm.x86.tilestored64", register, address, stride)

    def _move(
        self, b: Any, name: str, register: int, address: Any, stride: Any
    ) -> None:
        place = b.inttoptr(address, _P8)
        call(b, name, ir.VoidType(), ir.Constant(_I8, register), place, stride)

    def dot(self, b: Any, sums: int, left: int, right: int) -> None:
        """sums[m, n] += left[m, k] * right[k, n], pairs of bf16 in each word."""
        registers = (ir.Constant(_I8, r) for r in (sums, left, right))
        call(b, "llvm.x86.tdpbf16ps", ir.VoidType(), *registers)

    def release(self, b: Any) -> None:
        """Give the registers back."""
        call(b, "llvm.x86.tilerelease", ir.VoidType())


def emit_configure(b: Any, tiles: Tiles, rows: Any) -> None:
    """Set up for `rows` rows at once, up to 32: 16 and the others, or as many twice."""
    many = b.icmp_signed(">", rows, _int(SIDE))
    first = b.select(many, _int(SIDE), rows)
    tiles.configure(b, first, b.select(many, b.sub(rows, _int(SIDE)), rows))


def emit(
    b: Any,
    tiles: Tiles,
    halves: int,
    vectors: int,
    add: Any,
    a: Any,
    lda: Any,
    w: Any,
    ldw: Any,
    steps: Any,
    c: Any,
    ldc: Any,
    ahead: Any,
    pace: Any,
) -> None:
    """As `tile.multiply`, for up to 16 rows in each of `halves`, 1 or 2, of the block.

    `halves` x `vectors` is at most 4.
    """

    def plus(x: Any, offset: int) -> Any:
        return b.add(x, _int(offset))

    sums = [
        (2 * half + j, b.add(plus(c, 64 * j), b.mul(ldc, _int(SIDE * half))))
        for half in range(halves)
        for j in range(vectors)
    ]
    known = b.icmp_signed("!=", add, _int(0))
    with b.if_else(known) as (then, otherwise):
        with then:
            for register, place in sums:
                tiles.load(b, register, place, ldc)
        with otherwise:
            for register, _ in sums:
                tiles.zero(b, register)
    with cgutils.for_range(b, b.sdiv(steps, _int(SIDE))) as chunk:
        words = b.mul(chunk.index, _int(SIDE))
        near = b.add(ahead, b.mul(words, pace))
        with cgutils.for_range(b, b.sdiv(pace, _int(64 // SIDE))) as line:
            prefetch_line(b, pointer(b, b.add(near, b.shl(line.index, _int(6)))))
        row = b.add(a, b.shl(words, _int(2)))
        panel = b.add(w, b.mul(words, ldw))
        for half in range(halves):
            tiles.load(b, _A + half, b.add(row, b.mul(lda, _int(SIDE * half))), lda)
        for j in range(vectors):
            tiles.load(b, _B + j % 2, plus(panel, 64 * j), ldw)
            for half in range(halves):
                tiles.dot(b, 2 * half + j, _A + half, _B + j % 2)
    for register, place in sums:
        tiles.store(b, register, place, ldc)
