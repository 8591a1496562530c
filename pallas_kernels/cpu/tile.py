"""The one inner loop: a few rows times a packed panel of 16 to 64 columns.

    C[r, n] (+)= sum over k of A[r, k] * B[k, n],   r < rows <= rows_at_once(kind)

A is read row by row, B step by step: one step holds, for each column, one 32-bit word:
one float, or a pair of two bf16 that meet a pair of A's row. The sums live in registers
and run over k in order, so that a value does not depend on the number of rows or on
where the row stands among them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types

from pallas_kernels.cpu import amx
from pallas_kernels.cpu.kinds import FLOATS
from pallas_kernels.cpu.llvm import (
    I32,
    I64,
    V16F,
    V16I,
    V32B,
    builtin,
    call,
    floats,
    fma,
    has,
    ints,
    pointer,
    prefetch_line,
    spread,
)

_MAX_ROWS = 12  # x 2 vectors of sums, 2 of B and one of A: 27 of 32 registers

MAX_ROWS = max(_MAX_ROWS, amx.MAX_ROWS)
"""The most rows that any machine takes at once."""

TILES = amx.Tiles() if amx.permitted() else None
"""How AMX is used in this process, where the machine has it."""


def _dot_native(b: Any, a: Any, w: Any, c: Any) -> Any:
    w, a = b.bitcast(w, V32B), b.bitcast(a, V32B)
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, c, w, a)


def _dot_pairs(b: Any, a: Any, w: Any, c: Any) -> Any:
    """As the instruction does: the later of a pair first, one rounding each."""
    high = ints(-65536)
    for part in (
        lambda x: b.and_(x, high),
        lambda x: b.shl(x, ints(16)),
    ):
        c = fma(b, b.bitcast(part(a), V16F), b.bitcast(part(w), V16F), c)
    return c


def _dot_floats(b: Any, a: Any, w: Any, c: Any) -> Any:
    return fma(b, b.bitcast(a, V16F), b.bitcast(w, V16F), c)


def _emit(b, dot, rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead, pace):
    """The loop for a fixed number of rows and vectors."""

    def at(row, j):
        offset = b.add(b.mul(ldc, ir.Constant(I64, row)), ir.Constant(I64, 64 * j))
        return pointer(b, b.add(c, offset))

    starts = [
        b.load(at(r, j), typ=V16F, align=4) if add else floats(0)
        for r in range(rows)
        for j in range(vectors)
    ]
    before = b.block
    loop, after = b.append_basic_block("k"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(I64)
    k.add_incoming(ir.Constant(I64, 0), before)
    sums = []
    for start in starts:
        phi = b.phi(V16F)
        phi.add_incoming(start, before)
        sums.append(phi)
    word = b.add(w, b.mul(k, ldw))
    ws = [
        b.load(pointer(b, b.add(word, ir.Constant(I64, 64 * j))), typ=V16I, align=4)
        for j in range(vectors)
    ]
    lines = b.add(ahead, b.mul(k, pace))
    for offset in (0, 64):
        prefetch_line(b, pointer(b, b.add(lines, ir.Constant(I64, offset))))
    new = []
    for r in range(rows):
        row = b.add(a, b.mul(lda, ir.Constant(I64, r)))
        value = b.load(
            pointer(b, b.add(row, b.shl(k, ir.Constant(I64, 2)))), typ=I32, align=4
        )
        value = spread(b, value)
        for j in range(vectors):
            new.append(dot(b, value, ws[j], sums[r * vectors + j]))
    following = b.add(k, ir.Constant(I64, 1))
    k.add_incoming(following, b.block)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, steps), loop, after)
    b.position_at_end(after)
    for i, value in enumerate(new):
        b.store(value, at(i // vectors, i % vectors), align=4)


def _tiles(kind: Any) -> amx.Tiles | None:
    """How AMX does this kind, if the machine that is compiled for has it."""
    if kind is FLOATS.numba_type or not has("amx-bf16"):
        return None
    return TILES


def _choose(b: Any, selector: Any, choices: dict[int, Any]) -> None:
    """Emit a switch; each choice emits its case. No other value may occur."""
    done = b.append_basic_block("chosen")
    nowhere = b.append_basic_block("impossible")
    switch = b.switch(selector, nowhere)
    b.position_at_end(nowhere)
    b.unreachable()
    for value, emit in choices.items():
        block = b.append_basic_block(f"case{value}")
        switch.add_case(ir.Constant(selector.type, value), block)
        b.position_at_end(block)
        emit()
        b.branch(done)
    b.position_at_end(done)


@builtin
def rows_at_once(typingctx, kind):
    """The most rows that `multiply` takes, a constant of the machine."""
    del typingctx

    def generate(context, builder, signature, args):
        del builder, args
        tiles = _tiles(signature.args[0])
        return ir.Constant(I64, amx.MAX_ROWS if tiles else _MAX_ROWS)

    return types.int64(kind), generate


@builtin
def configure(typingctx, kind, rows):
    """Make ready for `multiply` with `rows` rows, and if they are 32 also with 16."""
    del typingctx

    def generate(context, builder, signature, args):
        if tiles := _tiles(signature.args[0]):
            amx.emit_configure(builder, tiles, args[1])
        return context.get_dummy_value()

    return types.void(kind, rows), generate


@builtin
def release(typingctx, kind):
    """Undo `configure`."""
    del typingctx

    def generate(context, builder, signature, args):
        del args
        if tiles := _tiles(signature.args[0]):
            tiles.release(builder)
        return context.get_dummy_value()

    return types.void(kind), generate


@builtin
def multiply(
    typingctx, kind, rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead, pace
):
    """C (+)= A * B, for the rows, 1 to rows_at_once(kind), that `configure` was told.

    Args:
      kind: FLOATS or PAIRS, what a 32-bit word of A and B is.
      vectors: how many times 16 columns: 1, 2, or for up to half as many rows 4.
      add: whether C counts, or is overwritten.
      a, w, c: addresses of A, B and C; lda, ldc: bytes between rows of A and of C;
        ldw: bytes between steps of B, whose vectors lie side by side.
      steps: words of a row of A; bytes of it that are a multiple of 64.
      ahead, pace: memory from `ahead` on is fetched, `pace` bytes a step, a multiple
        of 4 up to 128.
    """
    del typingctx
    words = (rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead, pace)

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        b, (_, rows, vectors, add, *rest) = builder, args
        if tiles := _tiles(kind):
            more = b.zext(b.icmp_signed(">", rows, ir.Constant(I64, 16)), I64)
            sizes = [(h, v) for h in (1, 2) for v in (1, 2, 4) if h * v <= 4]
            cases = {
                8 * (h - 1) + v: partial(amx.emit, b, tiles, h, v, add, *rest)
                for h, v in sizes
            }
            _choose(b, b.add(b.shl(more, ir.Constant(I64, 3)), vectors), cases)
        else:
            dot = _dot_native if has("avx512bf16") else _dot_pairs
            dot = _dot_floats if kind is FLOATS.numba_type else dot
            selector = b.add(b.shl(rows, ir.Constant(I64, 3)), vectors)
            selector = b.add(b.shl(selector, ir.Constant(I64, 1)), add)
            cases = {
                16 * r + 2 * v + plus: partial(_emit, b, dot, r, v, plus, *rest)
                for r in range(1, _MAX_ROWS + 1)
                for v in (1, 2, 4)
                for plus in (0, 1)
                if r * v <= 2 * _MAX_ROWS
            }
            _choose(b, selector, cases)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * len(words)), generate


@njit
def whole_rows(kind, rows):
    """How many rows are computed for `rows` of them, and need room in A and C."""
    if rows_at_once(kind) < amx.MAX_ROWS or rows <= amx.SIDE:
        return rows
    return (rows + amx.SIDE - 1) // amx.SIDE * amx.SIDE


@njit
def product(kind, rows, columns, add, a, lda, w, ldw, steps, c, ldc):
    """`multiply` for any number of columns in whole vectors."""
    # Few rows have too few sums to keep the multipliers busy, unless they are wide.
    most = 4 if rows <= rows_at_once(kind) // 2 else 2
    column = 0
    while column < columns:
        left = (columns - column) // 16
        vectors = most if left >= most else min(left, 2)
        multiply(
            kind,
            rows,
            vectors,
            add,
            a,
            lda,
            w + 4 * column,
            ldw,
            steps,
            c + 4 * column,
            ldc,
            a,
            0,
        )
        column += 16 * vectors
