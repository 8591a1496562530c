"""Meshes of the program around: what of them reaches compiled programs, and what not.

Owns how weights that lie on a mesh are taken. Never sees a model.

JAX types arrays by a mesh with Explicit axes, as `jax.make_mesh` makes it, and all that
is made and compiled while a mesh is set by that one. Of an engine only the weights lie
on a mesh. Its programs leave layouts to the compiler, and are the same wherever the
engine is called from.
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
    """Arrays on every device of the mesh that the weights lie on, if they do on one."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return jax.device_put(tree, NamedSharding(sharding.mesh, PartitionSpec()))
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
