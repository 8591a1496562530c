"""Emitting LLVM from numba: how an intrinsic is made, and what many of them emit.

Never sees a kernel. Addresses are int64 and count bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.cpu import instruction_sets

LANES = 16

builtin: Any = intrinsic
"""numba's decorator; its functions are called with one argument less than they take."""

I64, I32, I16, F32 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
V16F, V16I, V16H = (ir.VectorType(t, LANES) for t in (F32, I32, I16))
_PTR = ir.PointerType()


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


V16B, V32B = (ir.VectorType(_BFloat(), lanes) for lanes in (LANES, 2 * LANES))


def op(returns: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that emits LLVM: (builder, *values) -> value."""

    def make(emit: Callable[..., Any]) -> Any:
        def typing(context: Any, *args: Any) -> Any:
            del context, args

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                del signature
                value = emit(builder, *args)
                return context.get_dummy_value() if returns is types.void else value

            return returns(*takes), generate

        # numba reads the names of the arguments; the builder stands for the context.
        typing.__signature__ = inspect.signature(emit)
        typing.__name__ = emit.__name__
        typing.__doc__ = emit.__doc__
        return intrinsic(typing)

    return make


def pointer(b: Any, address: Any) -> Any:
    """The LLVM pointer of an address."""
    return b.inttoptr(address, _PTR)


def floats(value: float) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(V16F, [float(np.float32(value))] * LANES)


def ints(value: int) -> ir.Constant:
    """A constant vector of 32-bit integers."""
    return ir.Constant(V16I, [value] * LANES)


def has(name: str) -> bool:
    """Whether the machine that is compiled for has an instruction set."""
    return name in instruction_sets()


def call(b: Any, name: str, returns: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic or a C function by name."""
    kind = ir.FunctionType(returns, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", V16F, x, y, z)


def spread(b: Any, x: Any) -> Any:
    """One 32-bit value in all lanes."""
    kind = ir.VectorType(x.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    one = b.insert_element(undefined, x, ir.Constant(I32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(V16I, [0] * LANES))


def prefetch_line(b: Any, place: Any) -> None:
    """Ask for the cache line at an LLVM pointer, if there is one."""
    constants = (ir.Constant(I32, i) for i in (0, 2, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), place, *constants)
