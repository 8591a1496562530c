"""From named tensors to the decoder's parameters, whatever file they lie in.

Owns the parameter pytree, the check that every tensor is used once, and the bound on
host memory: one layer's tensor is read at a time, in slices of rows. Never sees a file
format: a source answers to Hugging Face's tensor names.

The pytree: embed [V, d]; layers, each leaf with a leading axis L: attention_norm [d],
qkv [d, (Hq+2Hkv)D], output [HqD, d], mlp_norm [d], gate_up [d, 2F], down [F, d], and
where the config has them qkv_bias [(Hq+2Hkv)D], q_norm and k_norm [D], output_norm and
down_norm [d]; norm [d]; and head [V, d] unless tied. Norms and biases are float32, the
rest the config's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.base import Params
from jaxserve.models.decoder_config import DecoderConfig

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


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """How a file holds what the decoder computes with, where not as llama's do.

    Attributes:
      fused: queries, keys and values are one tensor, gate and up another.
      norm_offset: what is added to the scales of every norm.
      rotary_dim: leading numbers of a head that turn, as pairs (i, i + rotary_dim / 2);
        None: all.
    """

    fused: bool = False
    norm_offset: float = 0.0
    rotary_dim: int | None = None


def load_params(
    config: DecoderConfig, source: TensorSource, layout: TensorLayout | None = None
) -> Params:
    """Read every parameter of `config` to the default device.

    Raises ValueError naming the tensors that are missing, unexpected or misshapen.
    """
    layout = layout or TensorLayout()
    parts = _layer_parts(config, layout)
    _check(config, parts, source)
    dtype = np.dtype(config.dtype)
    params: dict[str, Any] = {
        "embed": jax.device_put(_read(source, EMBEDDING, dtype)),
        "layers": {
            name: _stacked(config, layout, name, tuple(tensors), source)
            for name, tensors in parts.items()
        },
        "norm": jax.device_put(_norm(source, FINAL_NORM, layout)),
    }
    if not config.tied:
        params["head"] = jax.device_put(_read(source, HEAD, dtype))
    return params


_F32 = np.dtype(np.float32)
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_Parts = dict[str, dict[str, tuple[int, ...]]]


def _layer_parts(c: DecoderConfig, layout: TensorLayout) -> _Parts:
    """For each parameter of a layer the tensors that make it, side by side along its
    last axis, and their shapes."""
    d, f = c.hidden_size, c.intermediate_size
    sizes = {"q": c.num_heads * c.head_dim}
    sizes["k"] = sizes["v"] = c.num_kv_heads * c.head_dim
    qkv = {f"self_attn.{x}_proj.weight": (n, d) for x, n in sizes.items()}
    gate_up = {f"mlp.{x}_proj.weight": (f, d) for x in ("gate", "up")}
    if layout.fused:
        qkv = {"self_attn.qkv_proj.weight": (sum(sizes.values()), d)}
        gate_up = {"mlp.gate_up_proj.weight": (2 * f, d)}
    parts: _Parts = {
        "attention_norm": {"input_layernorm.weight": (d,)},
        "qkv": qkv,
        "output": {"self_attn.o_proj.weight": (d, sizes["q"])},
        "mlp_norm": {"post_attention_layernorm.weight": (d,)},
        "gate_up": gate_up,
        "down": {"mlp.down_proj.weight": (d, f)},
    }
    if c.qkv_bias:
        parts["qkv_bias"] = {f"self_attn.{x}_proj.bias": (n,) for x, n in sizes.items()}
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            parts[name] = {f"self_attn.{name}.weight": (c.head_dim,)}
    if c.post_norms:  # and then the norm of this name is behind the attention
        parts["output_norm"] = parts["mlp_norm"]
        parts["mlp_norm"] = {"pre_feedforward_layernorm.weight": (d,)}
        parts["down_norm"] = {"post_feedforward_layernorm.weight": (d,)}
    return parts


def _layer_name(index: int, part: str) -> str:
    return f"model.layers.{index}.{part}"


def _check(c: DecoderConfig, parts: _Parts, source: TensorSource) -> None:
    expected = {
        _layer_name(index, part): shape
        for index in range(c.num_layers)
        for tensors in parts.values()
        for part, shape in tensors.items()
    }
    expected[EMBEDDING] = (c.vocab_size, c.hidden_size)
    expected[FINAL_NORM] = (c.hidden_size,)
    if not c.tied:
        expected[HEAD] = (c.vocab_size, c.hidden_size)
    found = dict(source.shapes)
    if c.tied and HEAD in found and _same(source, HEAD, EMBEDDING):
        del found[HEAD]  # some exporters write the tied head out
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not fit its config (tied={c.tied}): "
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
    c: DecoderConfig,
    layout: TensorLayout,
    parameter: str,
    parts: tuple[str, ...],
    source: TensorSource,
) -> jax.Array:
    """One parameter of every layer, [L, ...]; a matrix [N, K] of the file is [K, N]."""
    stack = None
    for index in range(c.num_layers):
        names = [_layer_name(index, part) for part in parts]
        if parameter.endswith("norm"):
            layer = _norm(source, names[0], layout)
        elif parameter.endswith("bias"):
            layer = np.concatenate([_read(source, name, _F32) for name in names])
        else:
            layer = _side_by_side(source, names, np.dtype(c.dtype))
        if parameter in ("qkv", "qkv_bias") and layout.rotary_dim is not None:
            layer = layer[..., _rotary_order(c, layout.rotary_dim)]
        if stack is None:
            stack = jnp.empty((c.num_layers, *layer.shape), layer.dtype)
        stack = _put(stack, layer, index)
    assert stack is not None
    return stack


def _rotary_order(c: DecoderConfig, rotary_dim: int) -> np.ndarray:
    """The file's column for each of qkv, so that pairs are (i, i + D/2) of all of D.

    The order of a head's numbers is free as long as queries and keys share it: pairs
    that turn come first, and those that do not fill the halves up.
    """
    half, turning = c.head_dim // 2, rotary_dim // 2
    idle = half - turning
    first = [*range(turning), *range(rotary_dim, rotary_dim + idle)]
    second = [*range(turning, rotary_dim), *range(rotary_dim + idle, c.head_dim)]
    columns = np.arange((c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
    columns = columns.reshape(-1, c.head_dim)
    turned = c.num_heads + c.num_kv_heads
    columns[:turned] = columns[:turned, first + second]
    return columns.reshape(-1)


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


def _norm(source: TensorSource, name: str, layout: TensorLayout) -> np.ndarray:
    return _read(source, name, _F32) + np.float32(layout.norm_offset)


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
