"""Values as they are at one moment, so that a later change shows.

Owns the walk through containers, arrays, objects and what functions close over. Never
changes what it walks.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_ATOMS = (type(None), bool, int, str, bytes)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)


def frozen(value: Any, *, _outer: tuple[int, ...] = ()) -> Any:
    """The value's content as nested tuples of atoms, equal exactly if the content is.

    A value inside itself and what cannot be looked into (modules, classes) stand by
    their identity.
    """
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, float):
        return value if value == value else "NaN"
    if isinstance(value, _OPAQUE) or id(value) in _outer:
        return id(value)
    outer = (*_outer, id(value))

    def inner(part: Any) -> Any:
        return frozen(part, _outer=outer)

    if isinstance(value, np.ndarray | np.generic):
        return ("array", np.shape(value), tuple(np.ravel(value).tolist()))
    if isinstance(value, Mapping):
        return tuple((inner(k), inner(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(inner, value), key=repr))
    if isinstance(value, list | tuple):
        return tuple(map(inner, value))
    if isinstance(value, types.FunctionType):
        return id(value), tuple(inner(part) for part in _closed_over(value))
    if hasattr(value, "__dict__"):
        return type(value).__name__, inner(vars(value))
    try:
        return pickle.dumps(value)
    except Exception:
        return id(value)


def _closed_over(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function keeps between calls: its cells and the defaults of arguments."""
    yield getattr(function, "__defaults__", None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def leaves(value: Any) -> int:
    """How many atoms the value holds, elements of arrays counted each."""

    def count(part: Any) -> int:
        return sum(map(count, part)) if isinstance(part, tuple) else 1

    return count(frozen(value))
