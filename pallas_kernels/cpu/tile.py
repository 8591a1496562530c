"""The one inner loop: a few rows times a packed panel of 16 or 32 columns.

    C[r, n] (+)= sum over k of A[r, k] * B[k, n],   r < rows <= MAX_ROWS

A is read row by row, B step by step: one step holds, for each column, one 32-bit word:
one float, or a pair of two bf16 that meet a pair of A's row. The sums live in registers
and run over k in order, so that a value does not depend on the number of rows or on
where the row stands among them.
"""

from __future__ import annotations

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
    builtin,
    floats,
    fma,
    ints,
    pointer,
    prefetch_line,
    spread,
)

MAX_ROWS = 12
"""12 rows x 2 vectors of sums, 2 of B and one of A: 27 of AVX-512's 32 registers."""


TILES = amx.Tiles() if amx.permitted() else None
"""How AMX is used in this process, where the machine has it."""


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_V32B = ir.VectorType(_BFloat(), 32)


def _dot_native(b: Any, a: Any, w: Any, c: Any) -> Any:
    kind = ir.FunctionType(V16F, [V16F, _V32B, _V32B])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, [c, b.bitcast(w, _V32B), b.bitcast(a, _V32B)])


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


def _emit(b, dot, rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead):
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
    lines = b.add(ahead, b.shl(k, ir.Constant(I64, 7)))
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


def _has(context: Any, feature: str) -> bool:
    """Whether the machine that is compiled for has an instruction set."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


def _emit_pairs(b, tiles, dot, rows, vectors, add, a, lda, w, ldw, steps, *rest):
    """Whole chunks on tiles, and what is left of a row, if anything, as elsewhere."""
    c, ldc, ahead = rest
    if tiles is None:
        _emit(b, dot, rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead)
        return
    chunks = b.sdiv(steps, ir.Constant(I64, amx.CHUNK))
    done = b.mul(chunks, ir.Constant(I64, amx.CHUNK))
    some = b.icmp_signed(">", chunks, ir.Constant(I64, 0))
    with b.if_else(some) as (then, otherwise):
        with then:
            amx.emit(
                b, tiles, rows, vectors, add, a, lda, w, ldw, chunks, c, ldc, ahead
            )
            with b.if_then(b.icmp_signed(">", steps, done)):
                a_left = b.add(a, b.shl(done, ir.Constant(I64, 2)))
                w_left = b.add(w, b.mul(done, ldw))
                left = b.sub(steps, done)
                _emit(
                    b, dot, rows, vectors, 1, a_left, lda, w_left, ldw, left, c, ldc, a
                )
        with otherwise:
            _emit(b, dot, rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead)


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
def multiply(typingctx, kind, rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead):
    """C (+)= A * B, for 1 to MAX_ROWS rows and 1 or 2 vectors of 16 columns.

    Args:
      kind: FLOATS or PAIRS, what a 32-bit word of A and B is.
      add: whether C counts, or is overwritten.
      a, w, c: addresses of A, B and C; lda, ldc: bytes between rows of A and of C;
        ldw: bytes between steps of B, whose vectors lie side by side.
      steps: words of a row of A, at least 1.
      ahead: two cache lines are fetched from here on at each step.
    """
    del typingctx
    words = (rows, vectors, add, a, lda, w, ldw, steps, c, ldc, ahead)

    def generate(context, builder, signature, args):
        _, rows, vectors, add, *rest = args
        tiles = None
        if signature.args[0] is FLOATS.numba_type:
            dot = _dot_floats
        else:
            dot = _dot_native if _has(context, "avx512bf16") else _dot_pairs
            tiles = TILES if _has(context, "amx-bf16") else None
        selector = builder.add(
            builder.shl(rows, ir.Constant(I64, 4)),
            builder.add(builder.shl(vectors, ir.Constant(I64, 1)), add),
        )
        _choose(
            builder,
            selector,
            {
                16 * r + 2 * v + plus: lambda r=r, v=v, plus=plus: _emit_pairs(
                    builder, tiles, dot, r, v, plus, *rest
                )
                for r in range(1, MAX_ROWS + 1)
                for v in (1, 2, 4)
                for plus in (0, 1)
                if r * v <= 2 * MAX_ROWS
            },
        )
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * len(words)), generate


@njit
def product(kind, rows, columns, add, a, lda, w, ldw, steps, c, ldc):
    """`multiply` for any number of rows, and of columns in whole vectors."""
    row = 0
    while row < rows:
        count = min(rows - row, MAX_ROWS)
        # Few rows have too few sums to keep the multipliers busy, unless they are wide.
        most = 4 if count <= MAX_ROWS // 2 else 2
        column = 0
        while column < columns:
            left = (columns - column) // 16
            vectors = most if left >= most else min(left, 2)
            multiply(
                kind,
                count,
                vectors,
                add,
                a + row * lda,
                lda,
                w + 4 * column,
                ldw,
                steps,
                c + row * ldc + 4 * column,
                ldc,
                a,
            )
            column += 16 * vectors
        row += count
