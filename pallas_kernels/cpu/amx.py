"""The inner loop on AMX: tiles of 16 rows x 16 columns, 16 words of each at a time.

Owns the tile registers for the length of one call: they are set up, used and given back
in it. What is left of a row after whole chunks of 16 words is the caller's.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.llvm import I64, call, pointer, prefetch_line

CHUNK = 16
"""Words of a row that one instruction takes in."""

_I8 = ir.IntType(8)
_A, _B = 4, 5  # tile registers; the sums are in 0 to 3
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def permitted() -> bool:
    """Whether Linux lets this process use tiles; it has to be asked."""
    libc = ctypes.CDLL(None)
    return libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


class Tiles:
    """The instructions, as LLVM knows them; a test puts others in their place."""

    def configure(self, b: Any, rows: int) -> None:
        """Make the sums and A `rows` rows high, and B 16; all are 64 bytes wide."""
        config = bytearray(64)
        config[0] = 1  # the palette
        for register in range(_B + 1):
            config[16 + 2 * register] = 64
            config[48 + register] = CHUNK if register == _B else rows
        name = f"pallas_kernels_tiles_{rows}"
        kind = ir.ArrayType(_I8, 64)
        place: Any = b.module.globals.get(name)
        if place is None:
            place = ir.GlobalVariable(b.module, kind, name)
            place.linkage, place.global_constant = "internal", True
            place.initializer = ir.Constant(kind, config)
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


_P8 = _I8.as_pointer()


def emit(
    b: Any,
    tiles: Tiles,
    rows: int,
    vectors: int,
    add: int,
    a: Any,
    lda: Any,
    w: Any,
    ldw: Any,
    chunks: Any,
    c: Any,
    ldc: Any,
    ahead: Any,
) -> None:
    """As `tile.multiply`, for `chunks` of 16 steps, at least one."""

    def plus(x: Any, offset: int) -> Any:
        return b.add(x, ir.Constant(I64, offset))

    tiles.configure(b, rows)
    for j in range(vectors):
        if add:
            tiles.load(b, j, plus(c, 64 * j), ldc)
        else:
            tiles.zero(b, j)
    before = b.block
    loop, after = b.append_basic_block("chunk"), b.append_basic_block("chunks_done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(I64)
    k.add_incoming(ir.Constant(I64, 0), before)
    words = b.mul(k, ir.Constant(I64, CHUNK))
    lines = b.add(ahead, b.shl(words, ir.Constant(I64, 7)))
    for line in range(2 * CHUNK):
        prefetch_line(b, pointer(b, plus(lines, 64 * line)))
    tiles.load(b, _A, b.add(a, b.shl(words, ir.Constant(I64, 2))), lda)
    panel = b.add(w, b.mul(words, ldw))
    for j in range(vectors):
        tiles.load(b, _B, plus(panel, 64 * j), ldw)
        tiles.dot(b, j, _A, _B)
    following = b.add(k, ir.Constant(I64, 1))
    k.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, chunks), loop, after)
    b.position_at_end(after)
    for j in range(vectors):
        tiles.store(b, j, plus(c, 64 * j), ldc)
    tiles.release(b)
