"""AMX's tiles in plain LLVM, after Intel's description of the instructions.

`TDPBF16PS` sums the products of the even and of the odd elements of a chunk apart, in
order, and adds both to what was there.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pallas_kernels.cpu import amx
from pallas_kernels.cpu.llvm import F32, I32, I64, call

_REGISTERS = 8
_SIDE = 16  # words of a tile's row, and rows of a full tile
_WORDS = _REGISTERS * _SIDE * _SIDE  # of the registers; their heights come behind
_PTR = ir.IntType(8).as_pointer()


def use_if_asked() -> None:
    """Put the emulation in the tiles' place where EMULATED_TILES=1 is set."""
    if os.environ.get("EMULATED_TILES") == "1":
        from pallas_kernels.cpu import tile  # only now: it needs numba

        tile.TILES = EmulatedTiles()
        tile.has = lambda name: name == "amx-bf16"


def _int(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


class EmulatedTiles(amx.Tiles):
    """Registers are memory of each thread's own, as the machine's are each core's."""

    def __init__(self) -> None:
        key = ctypes.c_uint()
        assert ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None) == 0
        self._key = ir.Constant(I32, key.value)

    def configure(self, b: Any, first: Any, second: Any) -> None:
        memory = call(b, "pthread_getspecific", _PTR, self._key)
        with b.if_then(b.icmp_unsigned("==", memory, ir.Constant(_PTR, None))):
            new = call(b, "calloc", _PTR, _int(_WORDS + _REGISTERS), _int(4))
            call(b, "pthread_setspecific", I32, self._key, new)
        full = _int(_SIDE)
        heights = (first, first, second, second, first, second, full, full)
        for register, height in enumerate(heights):
            b.store(b.trunc(height, I32), self._place(b, _int(_WORDS + register)))
            self.zero(b, register)

    def _place(self, b: Any, word: Any) -> Any:
        memory = call(b, "pthread_getspecific", _PTR, self._key)
        return b.gep(b.bitcast(memory, I32.as_pointer()), [word])

    def _height(self, b: Any, register: int) -> Any:
        return b.sext(b.load(self._place(b, _int(_WORDS + register))), I64)

    def _word(self, b: Any, register: int, row: Any, column: Any) -> Any:
        row = b.add(b.mul(row, _int(_SIDE)), column)
        return self._place(b, b.add(_int(register * _SIDE * _SIDE), row))

    def _each(self, b: Any, register: int, do: Any) -> None:
        with cgutils.for_range(b, self._height(b, register)) as row:
            with cgutils.for_range(b, _int(_SIDE)) as column:
                do(row.index, column.index)

    def zero(self, b: Any, register: int) -> None:
        def clear(row: Any, column: Any) -> None:
            b.store(ir.Constant(I32, 0), self._word(b, register, row, column))

        self._each(b, register, clear)

    def _memory(self, b: Any, address: Any, stride: Any, row: Any, column: Any) -> Any:
        offset = b.add(b.mul(row, stride), b.shl(column, _int(2)))
        return b.inttoptr(b.add(address, offset), I32.as_pointer())

    def load(self, b: Any, register: int, address: Any, stride: Any) -> None:
        def copy(row: Any, column: Any) -> None:
            value = b.load(self._memory(b, address, stride, row, column), align=4)
            b.store(value, self._word(b, register, row, column))

        self._each(b, register, copy)

    def store(self, b: Any, register: int, address: Any, stride: Any) -> None:
        def copy(row: Any, column: Any) -> None:
            value = b.load(self._word(b, register, row, column))
            b.store(value, self._memory(b, address, stride, row, column), align=4)

        self._each(b, register, copy)

    def dot(self, b: Any, sums: int, left: int, right: int) -> None:
        def half(word: Any, high: bool) -> Any:
            if high:
                bits = b.and_(word, ir.Constant(I32, -65536))
            else:
                bits = b.shl(word, ir.Constant(I32, 16))
            return b.bitcast(bits, F32)

        def element(row: Any, column: Any) -> None:
            parts = [cgutils.alloca_once(b, F32) for _ in range(2)]
            for part in parts:
                b.store(ir.Constant(F32, 0.0), part)
            with cgutils.for_range(b, _int(_SIDE)) as k:
                x = b.load(self._word(b, left, row, k.index))
                y = b.load(self._word(b, right, k.index, column))
                for high, part in enumerate(parts):
                    product = b.fmul(half(x, bool(high)), half(y, bool(high)))
                    b.store(b.fadd(b.load(part), product), part)
            place = self._word(b, sums, row, column)
            before = b.bitcast(b.load(place), F32)
            after = b.fadd(before, b.fadd(*[b.load(part) for part in parts]))
            b.store(b.bitcast(after, I32), place)

        self._each(b, sums, element)

    def release(self, b: Any) -> None:
        """Nothing is held."""
