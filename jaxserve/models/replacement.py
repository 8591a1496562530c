"""New weights for a model that runs: whether they can take the old ones' place.

Owns the comparison. Never sees a checkpoint or an engine.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from jaxserve.models.base import Model, Params
from jaxserve.models.mesh import off_mesh, on_auto_axes


@off_mesh
def replacement(model: Model, current: Params, new: Params) -> Params:
    """The new weights, as the compiled programs take them.

    Arrays that are on a device stay where and as they are, sharding included (but see
    `on_auto_axes`); others are brought to the default device once. Weights in the
    model's plain layout are laid out as the current ones are (`Model.prepare`,
    O(weights)).

    Raises:
      ValueError: naming the first leaf of other shape or dtype, or the one that is
        missing or has no place.
    """
    new = on_auto_axes(new)
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
    return jax.tree.map(_settled, new)


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
