"""What numba lacks for kernels: raw memory, atomics, and vectors of 16 floats.

Addresses are int64 and count bytes. A vector is LLVM's <16 x float>: one register of
AVX-512, two of AVX2. Every function here is an intrinsic, a few machine instructions in
the place of the call; none checks an address.

bf16 travels as bits: a pair of two neighbours is one 32-bit word, the earlier one low.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from pallas_kernels.cpu.llvm import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    V16B,
    V16F,
    V16H,
    V16I,
    call,
    floats,
    fma,
    has,
    ints,
    op,
    pointer,
    prefetch_line,
    spread,
)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__("Vector16f")


vector = _Vector()
"""The numba type of a vector."""


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, V16F)


# --- scalars ---------------------------------------------------------------------


@op(types.int64, types.int64)
def load_i32(b, address):
    return b.sext(b.load(pointer(b, address), typ=I32, align=4), I64)


@op(types.int64, types.int64)
def load_i64(b, address):
    return b.load(pointer(b, address), typ=I64, align=8)


@op(types.void, types.int64, types.int64)
def store_i64(b, address, x):
    b.store(x, pointer(b, address), align=8)


@op(types.void, types.int64, types.int64)
def store_i32(b, address, x):
    b.store(b.trunc(x, I32), pointer(b, address), align=4)


@op(types.float32, types.int64)
def load_f32(b, address):
    return b.load(pointer(b, address), typ=F32, align=4)


@op(types.void, types.int64, types.float32)
def store_f32(b, address, x):
    b.store(x, pointer(b, address), align=4)


@op(types.int64, types.int64, types.int64)
def add_atomic(b, address, x):
    """Add to a word and return what it was."""
    return b.atomic_rmw("add", pointer(b, address), x, "seq_cst")


@op(types.int64, types.int64)
def load_atomic(b, address):
    return b.load_atomic(pointer(b, address), "seq_cst", 8, typ=I64)


@op(types.void, types.int64, types.int64)
def store_atomic(b, address, x):
    b.store_atomic(x, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@op(types.boolean, types.int64, types.int64, types.int64)
def swap_atomic(b, address, old, new):
    """Replace `old` by `new`; False if the word was not `old`."""
    pair = b.cmpxchg(pointer(b, address), old, new, "seq_cst", "seq_cst")
    return b.extract_value(pair, 1)


# --- vectors ---------------------------------------------------------------------


@op(vector, types.int64)
def load(b, address):
    return b.load(pointer(b, address), typ=V16F, align=4)


@op(types.void, types.int64, vector)
def store(b, address, x):
    b.store(x, pointer(b, address), align=4)


@op(vector, types.float32)
def fill(b, x):
    return spread(b, x)


@op(vector, vector, vector)
def add(b, x, y):
    return b.fadd(x, y)


@op(vector, vector, vector)
def sub(b, x, y):
    return b.fsub(x, y)


@op(vector, vector, vector)
def mul(b, x, y):
    return b.fmul(x, y)


@op(vector, vector, vector)
def div(b, x, y):
    return b.fdiv(x, y)


@op(vector, vector, vector, vector)
def mul_add(b, x, y, z):
    return fma(b, x, y, z)


@op(vector, vector, vector)
def larger(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@op(vector, vector, types.float32)
def at_least(b, x, least):
    """The lanes below `least` raised to it; NaN stays."""
    least = spread(b, least)
    return b.select(b.fcmp_ordered("<", x, least), least, x)


@op(vector, vector, types.int64, types.int64, types.float32)
def outside(b, x, first, stop, other):
    """x in the lanes [first, stop), `other` in those outside."""
    lane = ir.Constant(V16I, list(range(LANES)))
    low, high = (spread(b, b.trunc(n, I32)) for n in (first, stop))
    inside = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
    return b.select(inside, x, spread(b, other))


def _fold(b, x, combine):
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(x.type, ir.Undefined)
        kind = ir.VectorType(I32, width)
        halves = (
            b.shuffle_vector(x, undefined, ir.Constant(kind, list(range(i, i + width))))
            for i in (0, width)
        )
        x = combine(*halves)
    return b.extract_element(x, ir.Constant(I32, 0))


@op(types.float32, vector)
def total(b, x):
    """The sum of the lanes, always in the same order."""
    return _fold(b, x, b.fadd)


@op(types.float32, vector)
def largest(b, x):
    return _fold(b, x, lambda y, z: b.select(b.fcmp_ordered(">", y, z), y, z))


# 2**f for f in [-1/2, 1/2], minimax in relative error; the error is below 2e-7.
_EXP2 = (
    1.5403530393381609e-4,
    1.3333558146428443e-3,
    9.6181291076284772e-3,
    5.5504108664821580e-2,
    2.4022650695910072e-1,
    6.9314718055994531e-1,
    1.0,
)


@op(vector, vector)
def exp2(b, x):
    """2**x for x up to 127; exactly 0 below -126, where floats turn subnormal."""
    tiny = b.fcmp_ordered("<", x, floats(-126))
    if not has("avx512f"):
        x = b.select(tiny, floats(-126), x)
    whole = call(b, "llvm.rint.v16f32", V16F, x)
    rest = b.fsub(x, whole)
    value = floats(_EXP2[0])
    for c in _EXP2[1:]:
        value = fma(b, value, rest, floats(c))
    if has("avx512f"):  # one instruction, whatever the exponent
        everywhere, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        value = call(b, name, V16F, value, whole, floats(0), everywhere, nearest)
    else:
        bits = b.shl(b.add(b.fptosi(whole, V16I), ints(127)), ints(23))
        value = b.fmul(value, b.bitcast(bits, V16F))
    return b.select(tiny, floats(0), value)


def _round_bf16(b: Any, x: Any) -> Any:
    """bf16 bits; to nearest, ties to even."""
    if has("avx512bf16"):
        rounded = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", V16B, x)
        return b.bitcast(rounded, V16H)
    bits = b.bitcast(x, V16I)
    odd = b.and_(b.lshr(bits, ints(16)), ints(1))
    rounded = b.add(bits, b.add(odd, ints(0x7FFF)))
    # A NaN's payload would carry into the exponent, or be rounded to none.
    quiet = b.or_(bits, ints(0x400000))
    either = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(b.lshr(either, ints(16)), V16H)


@op(types.void, types.int64, vector)
def store_bf16(b, address, x):
    """Store 16 lanes as 16 bf16."""
    b.store(_round_bf16(b, x), pointer(b, address), align=2)


@op(vector, types.int64)
def load_bf16(b, address):
    """16 bf16 as floats."""
    halves = b.load(pointer(b, address), typ=V16H, align=2)
    return b.bitcast(b.shl(b.zext(halves, V16I), ints(16)), V16F)


@op(types.void, types.int64)
def prefetch(b, address):
    """Ask for the cache line at an address, if there is one."""
    prefetch_line(b, pointer(b, address))


@op(types.void)
def pause(b):
    """Let the sibling of a spinning core go ahead."""
    call(b, "llvm.x86.sse2.pause", ir.VoidType())


@op(types.void)
def yield_core(b):
    """Let another thread have the core."""
    call(b, "sched_yield", I32)


def _shuffle(b, x, y, order):
    kind = ir.VectorType(I32, len(order))
    return b.shuffle_vector(x, y, ir.Constant(kind, list(order)))


def _in_lanes(*order):
    """The same choice in each lane of four words; 4 and more is the second vector's."""
    return [4 * lane + k % 4 + LANES * (k // 4) for lane in range(4) for k in order]


# Of lanes 0 to 3 of one vector and of another: the even ones, the odd ones.
_EVEN_LANES = [4 * lane + k for lane in (0, 2, 4, 6) for k in range(4)]
_ODD_LANES = [4 * lane + k for lane in (1, 3, 5, 7) for k in range(4)]


def _transposed(b, rows):
    """16 vectors whose lanes are the rows', in shuffles that are one instruction."""
    low, high = _in_lanes(0, 4, 1, 5), _in_lanes(2, 6, 3, 7)
    pairs = [
        _shuffle(b, rows[i], rows[i + 1], order)
        for i in range(0, LANES, 2)
        for order in (low, high)
    ]
    low, high = _in_lanes(0, 1, 4, 5), _in_lanes(2, 3, 6, 7)
    fours = [
        _shuffle(b, pairs[i + half], pairs[i + half + 2], order)
        for i in range(0, LANES, 4)
        for half in (0, 1)
        for order in (low, high)
    ]
    # Lane l of fours[4 g + j] is column 4 l + j of rows 4 g to 4 g + 3.
    out = [None] * LANES
    for j in range(4):
        one, two, three, four = fours[j::4]
        for parity, lanes in enumerate((_EVEN_LANES, _ODD_LANES)):
            left = _shuffle(b, one, two, lanes)
            right = _shuffle(b, three, four, lanes)
            out[4 * parity + j] = _shuffle(b, left, right, _EVEN_LANES)
            out[4 * parity + j + 8] = _shuffle(b, left, right, _ODD_LANES)
    return out


@op(types.void, types.int64, types.int64, types.int64, types.int64)
def transpose(b, addresses, offset, out, stride):
    """Turn 16 rows of 16 words: word j of row i goes to out + j * stride + 4 * i.

    Row i is read at the address that word i of `addresses` holds, plus `offset`.
    """
    rows = []
    for i in range(LANES):
        place = b.add(addresses, ir.Constant(I64, 8 * i))
        row = b.add(b.load(pointer(b, place), typ=I64, align=8), offset)
        rows.append(b.load(pointer(b, row), typ=V16I, align=4))
    for j, row in enumerate(_transposed(b, rows)):
        place = b.add(out, b.mul(stride, ir.Constant(I64, j)))
        b.store(row, pointer(b, place), align=4)


@op(types.void, types.int64, types.int64, types.int64)
def interleave(b, x, y, out):
    """16 bf16 at x and 16 at y become 16 words at out: (x[i], y[i])."""
    x, y = (b.load(pointer(b, a), typ=V16H, align=2) for a in (x, y))
    order = [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]
    b.store(_shuffle(b, x, y, order), pointer(b, out), align=2)


@op(types.void, types.int64, types.int64)
def copy32(b, out, source):
    """Copy 32 bytes."""
    b.store(b.load(pointer(b, source), typ=V16H, align=2), pointer(b, out), align=2)


@op(types.void, types.int64)
def clear32(b, out):
    """Zero 32 bytes."""
    b.store(ir.Constant(V16H, [0] * LANES), pointer(b, out), align=2)


@op(types.float32, vector)
def first(b, x):
    """The first lane."""
    return b.extract_element(x, ir.Constant(I32, 0))
