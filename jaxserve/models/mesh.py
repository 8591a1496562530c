"""Devices and meshes of the program around: what of them reaches an engine.

Owns how weights are taken where they lie. Never sees a model.

JAX types arrays by a mesh with Explicit axes, as `jax.make_mesh` makes it, and all that
is made and compiled while a mesh is set by that one. An engine lies where its weights
do. Its programs leave layouts to the compiler, and are the same wherever the engine is
called from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.models.base import Params

_P = ParamSpec("_P")
_T = TypeVar("_T")

_NONE = Mesh(np.empty((), object), ())


def off_mesh(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, run as if no mesh were set (`jax.set_mesh`)."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with jax.set_mesh(_NONE):
            return function(*args, **kwargs)

    return run


@off_mesh
def on_auto_axes(params: Params) -> Params:
    """The weights where they are, not copied, with Auto axes for Explicit ones."""
    return jax.tree.map(_on_auto_axes, params)


def beside(params: Params, tree: _T) -> _T:
    """The arrays where weights lie, on every device of a mesh; those of weights that
    were put nowhere stay."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and leaf.committed:
            where = leaf.sharding
            if isinstance(where, NamedSharding):
                where = NamedSharding(where.mesh, PartitionSpec())
            return jax.device_put(tree, where)
    return tree


def _on_auto_axes(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return leaf
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return leaf
    auto = Mesh(mesh.devices, mesh.axis_names)
    kind = sharding.memory_kind
    return jax.device_put(leaf, NamedSharding(auto, sharding.spec, memory_kind=kind))
