"""From a Python function to a handler that XLA calls: compiled, cached, registered.

Owns the names by which compiled code finds addresses, and what its cache on disk goes
by. Never sees a call.
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
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from pallas_kernels.cpu import amx
from pallas_kernels.cpu.kinds import Kind
from pallas_kernels.cpu.llvm import I64, builtin


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
