"""Loops on XLA's own thread pool.

A loop's items are claimed one by one from a slot, by the calling thread and by tasks in
the pool. The caller waits only for items that were claimed, so a pool that is busy or
too small makes a loop slower and never hangs it. All that a task reads before it has
claimed an item is the one word it claims from; what it reads afterwards stands still
until the item is reported done. So a task that comes late finds nothing left, or helps
with whatever loop uses the slot by then.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types

from pallas_kernels.cpu import compiling, ffi
from pallas_kernels.cpu.llvm import I64, builtin
from pallas_kernels.cpu.vector import (
    add_atomic,
    load_atomic,
    pause,
    store_atomic,
    store_i64,
    swap_atomic,
    yield_core,
)


@builtin
def _do(typingctx, function, x, y):
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
compiling.define("pallas_kernels_slots", (_slots.ctypes.data + 63) // 64 * 64)


@njit
def _claim(slot):
    """An item of the slot's loop that nobody else has, or -1."""
    while True:
        left = load_atomic(slot + _LEFT)
        if left <= 0:
            return -1
        if swap_atomic(slot + _LEFT, left, left - 1):
            return ffi.word(slot + _ITEMS, 0) - left


@njit
def _help(slot):
    """Do items of a slot's loop until none is left; whether any was done."""
    item = _claim(slot)
    found = item >= 0
    while item >= 0:
        _do(ffi.word(slot + _BODY, 0), ffi.word(slot + _WORK, 0), item)
        add_atomic(slot + _DONE, 1)
        item = _claim(slot)
    return found


@njit
def _serve(slot):
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


@njit
def _take_slot():
    """A slot for one loop alone, or 0 when all are in use."""
    for i in range(_SLOTS):
        slot = compiling.address_of("pallas_kernels_slots") + i * _SLOT_BYTES
        if load_atomic(slot + _TAKEN) == 0 and swap_atomic(slot + _TAKEN, 0, 1):
            return slot
    return 0


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
            _do(body, work, i)
        return
    store_i64(slot + _BODY, body)
    store_i64(slot + _WORK, work)
    store_i64(slot + _ITEMS, items)
    store_atomic(slot + _DONE, 0)
    store_atomic(slot + _LEFT, items)
    wanted = min(items, ffi.num_threads(frame, slot + _REQUEST)) - 1
    for _ in range(wanted - load_atomic(slot + _LINGERING)):
        task = compiling.address_of("pallas_kernels_task")
        ffi.schedule(frame, task, slot, slot + _REQUEST)
    _help(slot)
    looks = 0
    while load_atomic(slot + _DONE) < items:
        looks += 1
        pause()
        if looks % _PATIENCE == 0:
            yield_core()
    store_atomic(slot + _TAKEN, 0)


def _make_task() -> int:
    """The address of the function that the pool runs."""
    version = compiling.version()

    def task(slot):
        compiling.keep(version)
        _serve(slot)
        return 0

    return compiling.compiled(compiling.HANDLER, task)


compiling.define("pallas_kernels_task", _make_task())
