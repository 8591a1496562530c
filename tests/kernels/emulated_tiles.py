"""AMX's tiles in plain LLVM, after Intel's description of the instructions.

`TDPBF16PS` sums the products of the even and of the odd elements of a chunk apart, in
order, and adds both to what was there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pallas_kernels.cpu import amx
from pallas_kernels.cpu.llvm import F32, I32, I64

_REGISTERS = 6
_SIDE = 16  # words of a tile's row, and rows of a full tile
_TILE = ir.ArrayType(ir.ArrayType(I32, _SIDE), _SIDE)


class EmulatedTiles(amx.Tiles):
    """Registers are arrays on the stack of the function that is being compiled."""

    def __init__(self) -> None:
        self._of: dict[Any, list[Any]] = {}
        self._registers: list[Any] = []
        self._rows = 0

    def configure(self, b: Any, rows: int) -> None:
        if b.function not in self._of:
            self._of[b.function] = [
                cgutils.alloca_once(b, _TILE) for _ in range(_REGISTERS)
            ]
        self._registers, self._rows = self._of[b.function], rows

    def _height(self, register: int) -> Any:
        full = register == _REGISTERS - 1
        return ir.Constant(I64, _SIDE if full else self._rows)

    def _word(self, b: Any, register: int, row: Any, column: Any) -> Any:
        zero = ir.Constant(I64, 0)
        return b.gep(self._registers[register], [zero, row, column])

    def _each(self, b: Any, register: int, do: Any) -> None:
        with cgutils.for_range(b, self._height(register)) as row:
            with cgutils.for_range(b, ir.Constant(I64, _SIDE)) as column:
                do(row.index, column.index)

    def zero(self, b: Any, register: int) -> None:
        def clear(row: Any, column: Any) -> None:
            b.store(ir.Constant(I32, 0), self._word(b, register, row, column))

        self._each(b, register, clear)

    def _memory(self, b: Any, address: Any, stride: Any, row: Any, column: Any) -> Any:
        offset = b.add(b.mul(row, stride), b.shl(column, ir.Constant(I64, 2)))
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
            with cgutils.for_range(b, ir.Constant(I64, _SIDE)) as k:
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
