"""XLA's typed FFI from numba: what a call frame holds, and what XLA is asked.

Owns the layout of the C structs (xla/ffi/api/c_api.h, FFI versions 0.3 to 0.5) as
64-bit words. Never sees what a kernel computes.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types

from pallas_kernels.cpu.llvm import I64, builtin
from pallas_kernels.cpu.vector import load_i32, load_i64, store_i32, store_i64

# Words of XLA_FFI_CallFrame, XLA_FFI_Api and XLA_FFI_Buffer.
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 1, 2, 3, 9, 14
_ERROR_CREATE, _SCHEDULE, _NUM_THREADS = 6, 17, 18
_DATA, _DIMENSIONS = 3, 5
_METADATA = 1  # type of the extension that asks for the version
_INVALID_ARGUMENT = 3


@njit(inline="always")
def word(address, index):
    """The 64-bit word number `index` at an address."""
    return load_i64(address + 8 * index)


@njit(inline="always")
def num_arguments(frame):
    """How many operands a call has."""
    return word(frame, _ARGUMENTS - 2)


@njit(inline="always")
def argument(frame, index):
    """The buffer that is operand number `index` of a call."""
    return word(word(frame, _ARGUMENTS), index)


@njit(inline="always")
def result(frame, index):
    """The buffer that is result number `index` of a call."""
    return word(word(frame, _RESULTS), index)


@njit(inline="always")
def data(buffer):
    """The address of a buffer's first element."""
    return word(buffer, _DATA)


@njit(inline="always")
def size(buffer, axis):
    """The size of one axis of a buffer."""
    return word(word(buffer, _DIMENSIONS), axis)


@njit
def leading(buffer, count):
    """How many leading rows of a buffer count, by an i32[] operand."""
    return min(size(buffer, 0), max(0, load_i32(data(count))))


@njit
def is_query(frame):
    """Whether the call only asks for the handler's version, which is then answered."""
    extension = word(frame, _EXTENSION)
    if extension == 0 or load_i32(extension + 8) != _METADATA:
        return False
    metadata = word(extension, 3)
    store_i32(metadata + 24, 0)
    store_i32(metadata + 28, 3)
    return True


@builtin
def _invoke(typingctx, function, x):
    """Call a C function that takes a 64-bit word and returns one."""
    del typingctx

    def generate(context, builder, signature, args):
        del context, signature
        kind = ir.FunctionType(I64, [I64])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(function, x), generate


@njit
def num_threads(frame, room):
    """How many threads XLA's pool has; `room` is the address of 5 words to work in."""
    store_i64(room, 32)
    store_i64(room + 8, 0)
    store_i64(room + 16, word(frame, _CONTEXT))
    store_i64(room + 24, room + 32)
    failed = _invoke(word(word(frame, _API), _NUM_THREADS), room)
    return 1 if failed != 0 else word(room, 4)


@njit
def schedule(frame, task, what, room):
    """Have XLA's pool call the C function at `task` with a word; `room` as above."""
    store_i64(room, 40)
    store_i64(room + 8, 0)
    store_i64(room + 16, word(frame, _CONTEXT))
    store_i64(room + 24, task)
    store_i64(room + 32, what)
    _invoke(word(word(frame, _API), _SCHEDULE), room)


def text(message: str) -> np.ndarray:
    """A message as the bytes of a C string, to be a constant of a kernel."""
    return np.frombuffer(message.encode() + b"\0", np.uint8)


@njit
def refuse(frame, message):
    """An XLA error that carries the C string at `message`; to be returned."""
    words = np.zeros(4, np.int64)
    words[0], words[2], words[3] = 32, message, _INVALID_ARGUMENT
    error = _invoke(word(word(frame, _API), _ERROR_CREATE), words.ctypes.data)
    return error + words[1]  # which is 0: keeps the words alive until here
