"""Linear layers whose weights were packed once, for any number of rows.

    linear       out = x W                    f32[T, N]
    add_linear   out = y + x W, in place      f32[T, N]
    gated        out = silu(x G) * (x U)      [T, F], dtype of the weights
    gated_gelu   out = gelu(x G) * (x U)      likewise; GELU's tanh approximation

Of the rows, an operand says how many count: what the padding behind them becomes is
undefined, and costs nothing. A panel is 32 columns of W, or 16 of G beside the same 16
of U, with all of K: what one core multiplies all rows by before it goes on.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pallas_kernels.cpu import PANEL, compiling, ffi
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.kinds import Kind, element, put
from pallas_kernels.cpu.loops import loop
from pallas_kernels.cpu.tile import MAX_ROWS, configure, multiply, release, rows_at_once

_DISTANCE = 4096  # bytes ahead in the panel, where memory is the limit
_BLOCK_ROWS = 128  # of x that an item takes

_NO_LAYER = ffi.text("layer must be from 0 to L - 1 of the weights [L, K, N]")

LINEAR, ADD, GATED, GATED_GELU = range(4)
_ONE, _LEAST_GATE, _MINUS_LOG2_E = map(np.float32, (1, -87, -np.log2(np.e)))
_GELU = np.float32(2 * np.sqrt(2 / np.pi))
_GELU_CUBIC = np.float32(0.044715 * 2 * np.sqrt(2 / np.pi))


@njit(inline="always")
def _blocks(rows):
    return (rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS


@njit
def _gate(kind, rows, c, out, stride, mode):
    """silu or gelu of the left half of each row of c, times the right half."""
    for i in range(rows):
        gate, up = vec.load(c + 128 * i), vec.load(c + 128 * i + 64)
        # Below -87 the gate is 0 to float32's precision, and exp(-gate) overflows.
        gate = vec.at_least(gate, _LEAST_GATE)
        inner = gate
        if mode == GATED_GELU:
            # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
            square = vec.mul(gate, gate)
            cubic = vec.mul_add(square, vec.fill(_GELU_CUBIC), vec.fill(_GELU))
            inner = vec.at_least(vec.mul(gate, cubic), _LEAST_GATE)
        less = vec.exp2(vec.mul(inner, vec.fill(_MINUS_LOG2_E)))
        gate = vec.div(gate, vec.add(vec.fill(_ONE), less))
        put(kind, out + i * stride, vec.mul(gate, up))


@njit
def _panel(kind, frame, item):
    """Multiply some rows by one panel."""
    x, w = ffi.argument(frame, 0), ffi.argument(frame, 1)
    layer = vec.load_i32(ffi.data(ffi.argument(frame, 2)))
    mode = vec.load_i32(ffi.data(ffi.argument(frame, 3)))
    gated = mode == GATED or mode == GATED_GELU
    out = ffi.result(frame, 0)
    rows = ffi.leading(x, ffi.argument(frame, 4))
    panels, steps = ffi.size(w, 1), ffi.size(w, 2)
    blocks = _blocks(rows)
    panel, block = item // blocks, item % blocks
    row, stop = rows * block // blocks, rows * (block + 1) // blocks
    lda = 4 * steps
    panel_bytes = 4 * PANEL * steps
    b = ffi.data(w) + (layer * panels + panel) * panel_bytes
    width = 16 * element(kind) if gated else 4 * PANEL
    stride = width * panels
    c = ffi.data(out) + panel * width
    scratch = np.empty(MAX_ROWS * PANEL, np.float32)
    tiles = (stop - row + rows_at_once(kind) - 1) // rows_at_once(kind)
    most = (stop - row + tiles - 1) // tiles
    # One tile reads its panel from memory. More of them fetch what is probably this
    # core's next panel meanwhile, each its share, and find their own one near.
    following = b + 2 * panel_bytes if panel + 2 < panels else b
    pace = (4 * PANEL // tiles + 3) // 4 * 4
    ready = 0
    for tile in range(tiles):
        first = row + tile * most
        count = min(most, stop - first)
        if count != ready:
            configure(kind, count)
            ready = count
        target = scratch.ctypes.data if gated else c + first * stride
        multiply(
            kind,
            count,
            2,
            1 if mode == ADD else 0,
            ffi.data(x) + first * lda,
            lda,
            b,
            4 * PANEL,
            steps,
            target,
            4 * PANEL if gated else stride,
            b + _DISTANCE if tiles == 1 else following + tile * pace * steps,
            pace,
        )
        if gated:
            _gate(kind, count, target, c + first * stride, stride, mode)
    release(kind)
    return scratch[0]


@njit
def _run(kind, frame, body):
    if ffi.is_query(frame):
        return 0
    layer = vec.load_i32(ffi.data(ffi.argument(frame, 2)))
    if layer < 0 or layer >= ffi.size(ffi.argument(frame, 1), 0):
        return ffi.refuse(frame, _NO_LAYER.ctypes.data)
    rows = ffi.leading(ffi.argument(frame, 0), ffi.argument(frame, 4))
    panels = ffi.size(ffi.argument(frame, 1), 1)
    loop(frame, body, frame, panels * _blocks(rows))
    return 0


@compiling.once
def target(kind: Kind) -> str:
    """The name of the FFI target for a kind; compiles it the first time."""
    version, name = compiling.version(), f"pallas_kernels_linear_{kind.name}"
    body = f"{name}_panel"

    def panel(frame, item):
        compiling.keep(version)
        _panel(kind, frame, item)

    def handler(frame):
        compiling.keep(version)
        return _run(kind, frame, compiling.address_of(body))

    compiling.define(body, compiling.compiled(compiling.BODY, panel))
    compiling.register(name, compiling.compiled(compiling.HANDLER, handler))
    return name
