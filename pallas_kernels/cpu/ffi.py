"""XLA's typed FFI from numba: call frames, and loops on XLA's own thread pool.

Owns the layout of the C structs (xla/ffi/api/c_api.h, FFI versions 0.3 to 0.5) as
64-bit words. Never sees what a kernel computes.

A loop's items are claimed one by one from a slot, by the calling thread and by tasks in
XLA's pool. The caller waits only for items that were claimed, so a pool that is busy or
too small makes a loop slower and never hangs it. All that a
task reads before it has claimed an item is the one word it claims from; what it reads
afterwards stands still until the item is reported done. So a task that comes late finds
nothing left, or helps with whatever loop uses the slot by then.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from pallas_kernels.cpu import amx
from pallas_kernels.cpu.kinds import Kind
from pallas_kernels.cpu.vector import (
    I64,
    add_atomic,
    builtin,
    load_atomic,
    load_i32,
    load_i64,
    pause,
    store_atomic,
    store_i32,
    store_i64,
    swap_atomic,
    yield_core,
)

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
def is_query(frame):
    """Whether the call only asks for the handler's version, which is then answered."""
    extension = word(frame, _EXTENSION)
    if extension == 0 or load_i32(extension + 8) != _METADATA:
        return False
    metadata = word(extension, 3)
    store_i32(metadata + 24, 0)
    store_i32(metadata + 28, 3)
    return True


@builtin(prefer_literal=True)
def address_of(typingctx, name):
    """The address that `define` gave to a name, a constant.

    Compiled code, cached on disk too, holds the name alone.
    """
    del typingctx
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context, builder, signature, args):
        del context, signature, args
        kind = ir.FunctionType(ir.VoidType(), [])
        place = cgutils.get_or_insert_function(builder.module, kind, name.literal_value)
        return builder.ptrtoint(place, I64)

    return types.int64(name), generate


def define(name: str, address: int) -> None:
    """Give an address to a name, before code that names it is loaded."""
    llvm.add_symbol(name, address)


@builtin
def _call1(typingctx, function, x):
    """Call a C function that takes a 64-bit word and returns one."""
    del typingctx

    def generate(context, builder, signature, args):
        del context, signature
        kind = ir.FunctionType(I64, [I64])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(function, x), generate


@builtin
def _call2(typingctx, function, x, y):
    """Call a C function that takes two 64-bit words and returns nothing."""
    del typingctx

    def generate(context, builder, signature, args):
        del context, signature
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return ir.Constant(I64, 0)

    return types.int64(function, x, y), generate


# Words of a slot: items left to claim, items done, items in all, the function that does
# one and what it works on, whether a loop uses the slot, how many tasks linger at it,
# and room for a request to XLA. Words that several cores write have lines of their own.
_LEFT, _DONE, _ITEMS, _BODY, _WORK, _TAKEN, _LINGERING, _REQUEST = (
    0,
    64,
    128,
    136,
    144,
    192,
    256,
    320,
)
_SLOT_BYTES, _SLOTS = 384, 64
_LINGER = 3000  # looks at a slot before a task that finds nothing there goes
_PATIENCE = 3000  # looks at a counter before the core is yielded

_slots = np.zeros(_SLOTS * _SLOT_BYTES // 8 + 8, np.int64)
define("pallas_kernels_slots", (_slots.ctypes.data + 63) // 64 * 64)


@njit
def _claim(slot):
    """An item of the slot's loop that nobody else has, or -1."""
    while True:
        left = load_atomic(slot + _LEFT)
        if left <= 0:
            return -1
        if swap_atomic(slot + _LEFT, left, left - 1):
            return word(slot + _ITEMS, 0) - left


@njit
def _help(slot):
    """Do items of a slot's loop until none is left; whether any was done."""
    item = _claim(slot)
    found = item >= 0
    while item >= 0:
        _call2(word(slot + _BODY, 0), word(slot + _WORK, 0), item)
        add_atomic(slot + _DONE, 1)
        item = _claim(slot)
    return found


def _task(slot):
    """What XLA's pool runs: help, and linger a while for the next loop.

    Waking a thread takes longer than most loops do.
    """
    add_atomic(slot + _LINGERING, 1)
    looks = 0
    while looks < _LINGER:
        if _help(slot):
            looks = 0
        else:
            looks += 1
            pause()
    add_atomic(slot + _LINGERING, -1)
    _help(slot)  # a loop that counted on this task may have begun
    return 0


@njit
def _take_slot():
    """A slot for one loop alone, or 0 when all are in use."""
    for i in range(_SLOTS):
        slot = address_of("pallas_kernels_slots") + i * _SLOT_BYTES
        if load_atomic(slot + _TAKEN) == 0 and swap_atomic(slot + _TAKEN, 0, 1):
            return slot
    return 0


@njit
def _num_threads(frame, slot):
    request = slot + _REQUEST
    store_i64(request, 32)
    store_i64(request + 8, 0)
    store_i64(request + 16, word(frame, _CONTEXT))
    store_i64(request + 24, request + 32)
    failed = _call1(word(word(frame, _API), _NUM_THREADS), request)
    return 1 if failed != 0 else word(request, 4)


@njit
def _schedule(frame, slot):
    request = slot + _REQUEST
    store_i64(request, 40)
    store_i64(request + 8, 0)
    store_i64(request + 16, word(frame, _CONTEXT))
    store_i64(request + 24, address_of("pallas_kernels_task"))
    store_i64(request + 32, slot)
    _call1(word(word(frame, _API), _SCHEDULE), request)


@njit
def loop(frame, body, work, items):
    """Do body(work, i) for every i in [0, items), on all threads of XLA's pool.

    Args:
      frame: the call that this is part of.
      body: address of a C function of two 64-bit words.
    """
    slot = _take_slot() if items > 1 else 0
    if slot == 0:
        for i in range(items):
            _call2(body, work, i)
        return
    store_i64(slot + _BODY, body)
    store_i64(slot + _WORK, work)
    store_i64(slot + _ITEMS, items)
    store_atomic(slot + _DONE, 0)
    store_atomic(slot + _LEFT, items)
    wanted = min(items, _num_threads(frame, slot)) - 1
    for _ in range(wanted - load_atomic(slot + _LINGERING)):
        _schedule(frame, slot)
    _help(slot)
    looks = 0
    while load_atomic(slot + _DONE) < items:
        looks += 1
        pause()
        if looks % _PATIENCE == 0:
            yield_core()
    store_atomic(slot + _TAKEN, 0)


def text(message: str) -> np.ndarray:
    """A message as the bytes of a C string, to be a constant of a kernel."""
    return np.frombuffer(message.encode() + b"\0", np.uint8)


@njit
def refuse(frame, message):
    """An XLA error that carries the C string at `message`; to be returned."""
    words = np.zeros(4, np.int64)
    words[0], words[2], words[3] = 32, message, _INVALID_ARGUMENT
    error = _call1(word(word(frame, _API), _ERROR_CREATE), words.ctypes.data)
    return error + words[1]  # which is 0: keeps the words alive until here


HANDLER = types.int64(types.int64)
"""Signature of a handler: call frame -> error or 0."""

BODY = types.void(types.int64, types.int64)
"""Signature of a loop's body."""


@functools.cache
def version() -> int:
    """A number that stands for the source of all kernels, and what Linux permits.

    Numba's cache on disk looks at the file of the function that is compiled, and at the
    values it closes over, but not at the files of the functions that it calls. So each
    one that is cached closes over this number.
    """
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(b"tiles" if amx.permitted() else b"no tiles")
    return int.from_bytes(digest.digest()[:7], "little")


@njit(inline="always")
def keep(version):
    """Nothing; a place to name `version` in."""


def compiled(signature: Any, function: Callable[..., Any]) -> int:
    """The address of a function as C calls it, compiled or taken from numba's cache."""
    try:
        made = cfunc(signature, cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        made = cfunc(signature)(function)  # nowhere to write: compile in every process
    address = made.address
    assert address is not None  # it is compiled
    _alive.append(made)
    return address


_alive: list[Any] = []


def once(make: Callable[[Kind], str]) -> Callable[[Kind], str]:
    """Make a target when it is first asked for; threads that ask meanwhile wait."""
    made: dict[Kind, str] = {}

    @functools.wraps(make)
    def target(kind: Kind) -> str:
        with _making:
            if kind not in made:
                made[kind] = make(kind)
            return made[kind]

    return target


_making = threading.Lock()


def register(name: str, address: int) -> None:
    """Make a handler the CPU's implementation of an FFI target."""
    capsule = jax.ffi.pycapsule(address)
    jax.ffi.register_ffi_target(name, capsule, platform="cpu", api_version=1)


define("pallas_kernels_task", compiled(HANDLER, _task))
