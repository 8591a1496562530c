"""RMS norm (Zhang and Sennrich, 2019), each row by itself.

    out[t] = x[t] / sqrt(mean(x[t]**2) + epsilon) * scale[layer]

XLA adds up a row in an order that depends on how many rows there are; here it does not.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pallas_kernels.cpu import compiling, ffi
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.kinds import Kind, element, put
from pallas_kernels.cpu.loops import loop

# Operands: f32[T, D], f32[L, D], i32[], f32[], i32[] rows that count. Result: [T, D].
_X, _SCALE, _LAYER, _EPSILON, _COUNT = range(5)

_ROWS = 4  # of one item
_NO_LAYER = ffi.text("layer must be from 0 to L - 1 of the scales [L, K]")


@njit
def _normalize(kind, frame, item):
    x, scales = ffi.argument(frame, _X), ffi.argument(frame, _SCALE)
    rows, width = ffi.leading(x, ffi.argument(frame, _COUNT)), ffi.size(x, 1)
    layer = vec.load_i32(ffi.data(ffi.argument(frame, _LAYER)))
    epsilon = vec.load_f32(ffi.data(ffi.argument(frame, _EPSILON)))
    scale = ffi.data(scales) + layer * width * 4
    for row in range(item * _ROWS, min(rows, (item + 1) * _ROWS)):
        source = ffi.data(x) + row * width * 4
        out = ffi.data(ffi.result(frame, 0)) + row * width * element(kind)
        squares = vec.fill(np.float32(0))
        for i in range(0, width, 16):
            values = vec.load(source + 4 * i)
            squares = vec.mul_add(values, values, squares)
        mean = vec.total(squares) / np.float32(width)
        factor = vec.fill(np.float32(1) / np.sqrt(mean + epsilon))
        for i in range(0, width, 16):
            values = vec.mul(vec.load(source + 4 * i), factor)
            put(kind, out + i * element(kind), vec.mul(values, vec.load(scale + 4 * i)))


@njit
def _run(kind, frame, body):
    if ffi.is_query(frame):
        return 0
    layer = vec.load_i32(ffi.data(ffi.argument(frame, _LAYER)))
    if layer < 0 or layer >= ffi.size(ffi.argument(frame, _SCALE), 0):
        return ffi.refuse(frame, _NO_LAYER.ctypes.data)
    rows = ffi.leading(ffi.argument(frame, _X), ffi.argument(frame, _COUNT))
    loop(frame, body, frame, (rows + _ROWS - 1) // _ROWS)
    return 0


@compiling.once
def target(kind: Kind) -> str:
    """The name of the FFI target for a kind; compiles it the first time."""
    version, name = compiling.version(), f"pallas_kernels_norm_{kind.name}"
    body = f"{name}_rows"

    def rows(frame, item):
        compiling.keep(version)
        _normalize(kind, frame, item)

    def handler(frame):
        compiling.keep(version)
        return _run(kind, frame, compiling.address_of(body))

    compiling.define(body, compiling.compiled(compiling.BODY, rows))
    compiling.register(name, compiling.compiled(compiling.HANDLER, handler))
    return name
