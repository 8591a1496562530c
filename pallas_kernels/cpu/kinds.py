"""What a 32-bit word of a matrix is, as a type: kernels are compiled for each kind.

The functions here stand for something else in each kind. Only kernels may call them.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.imputils import lower_constant
from numba.extending import models, overload, register_model, typeof_impl

from pallas_kernels.cpu import vector as vec


class _KindType(types.Type):
    def __init__(self, name: str) -> None:
        super().__init__(f"Kind({name})")


register_model(_KindType)(models.OpaqueModel)


class Kind:
    """A value that a kernel passes on; only its type says anything."""

    def __init__(self, name: str, bytes_each: int) -> None:
        self.name = name
        self.bytes_each = bytes_each
        self.numba_type = _KindType(name)

    def __reduce__(self) -> str:
        # By name: numba's cache finds compiled code by the bytes that this pickles to.
        return self.name.upper()


@typeof_impl.register(Kind)
def _typeof(value: Kind, context: Any) -> _KindType:
    del context
    return value.numba_type


@lower_constant(_KindType)
def _lower(context: Any, builder: Any, kind: Any, value: Kind) -> Any:
    del builder, kind, value
    return context.get_dummy_value()


FLOATS = Kind("floats", 4)
"""One float32."""

PAIRS = Kind("pairs", 2)
"""Two bf16, neighbours along the axis that is summed over; the earlier one low."""


def element(kind):
    """Bytes of an element."""
    raise NotImplementedError


@overload(element, inline="always")
def _element(kind):
    size = 4 if kind is FLOATS.numba_type else 2
    return lambda kind: size


def put(kind, address, x):
    """Store 16 lanes as elements."""
    raise NotImplementedError


@overload(put, inline="always")
def _put(kind, address, x):
    if kind is FLOATS.numba_type:
        return lambda kind, address, x: vec.store(address, x)
    return lambda kind, address, x: vec.store_bf16(address, x)
