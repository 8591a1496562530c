"""Weights of an engine: where they may lie, and whether new ones can take their place.

Owns the comparison. Never sees a checkpoint or an engine.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.sharding import AxisType

from jaxserve.models.base import Model, Params


def replacement(model: Model, current: Params, new: Params) -> Params:
    """The new weights, as the compiled programs take them.

    Arrays that are on a device stay where and as they are, sharding included; others
    are brought to the default device once. Weights in the model's plain layout are laid
    out as the current ones are (`Model.prepare`, O(weights)).

    Raises:
      ValueError: naming the first leaf of other shape or dtype, the one that is missing
        or has no place, or as `check_mesh`.
    """
    if not _alike(current, new):
        new = _prepared(model, current, new)
    pairs = zip(
        tree_util.tree_leaves_with_path(new),
        tree_util.tree_leaves(current),
        strict=True,
    )
    for (path, leaf), old in pairs:
        found = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        if (found.shape, found.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"params{tree_util.keystr(path)} is {found.dtype}{list(found.shape)} "
                f"and must be {old.dtype}{list(old.shape)}, as what it replaces; "
                "convert it, or make another engine"
            )
    check_mesh(new)
    return jax.tree.map(_settled, new)


def check_mesh(params: Params) -> None:
    """Check that programs can take weights from where they lie.

    Raises:
      ValueError: naming the first leaf on a mesh that has an Explicit axis.
    """
    for path, leaf in tree_util.tree_leaves_with_path(params):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"params{tree_util.keystr(path)} is sharded over a mesh with axes of "
                f"the types {mesh.axis_types}, and the engine's programs leave layouts "
                "to the compiler: none may be Explicit; put it on a mesh of "
                "AxisType.Auto"
            )


def _alike(current: Params, new: Params) -> bool:
    return tree_util.tree_structure(current) == tree_util.tree_structure(new)


def _prepared(model: Model, current: Params, new: Params) -> Params:
    prepare = getattr(model, "prepare", None)
    problem = "params have another structure than the weights they replace"
    if prepare is not None:
        try:
            new = prepare(new)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{problem}: {error!r}; pass the model's own") from error
    if _alike(current, new):
        return new
    have, need = (
        {tree_util.keystr(path) for path, _ in tree_util.tree_leaves_with_path(params)}
        for params in (new, current)
    )
    differ = [f"{key} is missing" for key in sorted(need - have)]
    differ += [f"{key} has no place" for key in sorted(have - need)]
    what = ", ".join(differ[:3]) or "their containers differ"
    raise ValueError(f"{problem}: {what}; pass a pytree of the same structure")


def _settled(leaf: Any) -> jax.Array:
    """The leaf as an array on a device, of a type that compiled programs know."""
    array = jnp.asarray(leaf)
    # A weak type, as of a scaled Python number, would be another program.
    return jax.lax.convert_element_type(array, array.dtype)
