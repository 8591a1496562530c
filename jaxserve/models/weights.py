"""From named tensors to the decoder's parameters, whatever file they lie in.

Owns the parameter pytree, the check that every tensor is used once, and the bound on
host memory: one layer's tensor is read at a time, in slices of rows. Never sees a file
format: a source answers to Hugging Face's tensor names.

The pytree: embed [V, d]; layers, each leaf with a leading axis L: attention_norm [d],
qkv [d, (Hq+2Hkv)D], output [HqD, d], mlp_norm [d], gate_up [d, 2F], down [F, d];
norm [d]; and head [V, d] unless tied. Norms are float32, the rest the config's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.base import Params
from jaxserve.models.decoder import DecoderConfig

SLICE_BYTES = 1 << 24
"""Most bytes of a tensor, as float32, held beside its destination while it is read."""


class TensorSource(Protocol):
    """Tensors of one checkpoint by Hugging Face name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that is a parameter, and its shape."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) of the first axis, in any floating dtype."""
        ...


def load_params(config: DecoderConfig, source: TensorSource) -> Params:
    """Read every parameter of `config` to the default device.

    Raises ValueError naming the tensors that are missing, unexpected or misshapen.
    """
    _check(config, source)
    dtype = np.dtype(config.dtype)
    params: dict[str, Any] = {
        "embed": jax.device_put(_read(source, EMBEDDING, dtype)),
        "layers": {
            name: _stacked(config.num_layers, parts, source, dtype)
            for name, parts in _LAYER_PARTS.items()
        },
        "norm": jax.device_put(_read(source, FINAL_NORM, _F32)),
    }
    if not config.tied:
        params["head"] = jax.device_put(_read(source, HEAD, dtype))
    return params


_F32 = np.dtype(np.float32)
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_LAYER_PARTS = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Which tensors of a layer make one parameter, side by side along its last axis."""


def _layer_name(index: int, part: str) -> str:
    return f"model.layers.{index}.{part}.weight"


def _expected_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    d, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (c.intermediate_size, d),
        "mlp.up_proj": (c.intermediate_size, d),
        "mlp.down_proj": (d, c.intermediate_size),
    }
    shapes = {
        _layer_name(index, part): shape
        for index in range(c.num_layers)
        for part, shape in layer.items()
    }
    shapes[EMBEDDING] = (c.vocab_size, d)
    shapes[FINAL_NORM] = (d,)
    if not c.tied:
        shapes[HEAD] = (c.vocab_size, d)
    return shapes


def _check(config: DecoderConfig, source: TensorSource) -> None:
    expected, found = _expected_shapes(config), dict(source.shapes)
    if config.tied and HEAD in found and _same(source, HEAD, EMBEDDING):
        del found[HEAD]  # some exporters write the tied head out
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not fit its config (tied={config.tied}): "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{name} has shape {tuple(found[name])} and the config says {shape}"
            )


def _same(source: TensorSource, one: str, other: str) -> bool:
    shape = source.shapes[one]
    return shape == source.shapes.get(other) and all(
        np.array_equal(source.rows(one, *span), source.rows(other, *span))
        for span in _slices(shape)
    )


def _some(names: list[str], most: int = 8) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _stacked(
    num_layers: int, parts: tuple[str, ...], source: TensorSource, dtype: np.dtype
) -> jax.Array:
    """One parameter of every layer, [L, ...]; a matrix [N, K] of the file is [K, N]."""
    stack = None
    for index in range(num_layers):
        names = [_layer_name(index, part) for part in parts]
        if len(source.shapes[names[0]]) == 1:
            layer = _read(source, names[0], _F32)
        else:
            layer = _side_by_side(source, names, dtype)
        if stack is None:
            stack = jnp.empty((num_layers, *layer.shape), layer.dtype)
        stack = _put(stack, layer, index)
    assert stack is not None
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    return stack.at[index].set(layer)  # in place: the stack is never there twice


def _side_by_side(
    source: TensorSource, names: list[str], dtype: np.dtype
) -> np.ndarray:
    shapes = [source.shapes[name] for name in names]
    out = np.empty((shapes[0][1], sum(shape[0] for shape in shapes)), dtype)
    offset = 0
    for name, shape in zip(names, shapes, strict=True):
        for start, stop in _slices(shape):
            rows = source.rows(name, start, stop).astype(dtype)
            out[:, offset + start : offset + stop] = rows.T
        offset += shape[0]
    return out


def _read(source: TensorSource, name: str, dtype: np.dtype) -> np.ndarray:
    shape = source.shapes[name]
    out = np.empty(shape, dtype)
    for start, stop in _slices(shape):
        out[start:stop] = source.rows(name, start, stop)
    return out


def _slices(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    row_bytes = 4 * int(np.prod(shape[1:]))
    step = max(1, SLICE_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])
