"""What config.json of each family means, in the decoder's terms.

Owns the names of Hugging Face's config fields, their defaults, and which values have
code here; anything else that would change the arithmetic is refused by name. Never sees
a file or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxserve.models.decoder_config import AttentionKind, DecoderConfig
from jaxserve.models.rope import Rope, no_rope, read_rope
from jaxserve.models.weights import TensorLayout

Fields = Mapping[str, Any]
"""config.json, of its text part if it has several."""

FULL, SLIDING = "full_attention", "sliding_attention"


class Described(NamedTuple):
    """A checkpoint: what to compute, and how its files hold the parameters."""

    config: DecoderConfig
    layout: TensorLayout


class _Traits(NamedTuple):
    """What a family adds to a plain decoder."""

    layers: list[AttentionKind]  # one a layer
    options: Mapping[str, Any] = {}  # fields of DecoderConfig
    layout: TensorLayout = TensorLayout()


class _Family(NamedTuple):
    """One architecture of transformers.

    Attributes:
      traits: of a config, given the most positions a sequence will have.
      defaults: what a field means that the file leaves out, where it is no plain
        decoder's.
      only: fields that change the arithmetic, beside those of `_ONLY`, and the one
        value that has code.
    """

    traits: Callable[[Fields, int | None], _Traits]
    defaults: Mapping[str, Any] = {}
    only: Mapping[str, Any] = {}


_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Fields that change the arithmetic of every family, and the one value known here."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
"""Fields that every config has, by the decoder's names."""


def describe(
    fields: Fields, *, eos_ids: Iterable[int], dtype: str, longest: int | None = None
) -> Described:
    """The decoder that a config describes.

    Args:
      fields: config.json, `architectures` included.
      longest: most positions that a sequence will have, where that is known.

    Raises ValueError naming the architecture or field that has no code here.
    """
    architectures = fields.get("architectures") or ["none"]
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise ValueError(
            f"architectures={architectures!r} is not supported; "
            f"known: {', '.join(FAMILIES)}"
        )
    c = {**family.defaults, **fields}
    for field, wanted in {**_ONLY, **family.only}.items():
        if c.get(field) not in (None, wanted) and wanted is not ...:
            raise ValueError(
                f"{field}={c[field]!r} in config.json is not supported for "
                f"{architectures[0]}; only {wanted!r} is"
            )
    for field in _SIZES.values():
        if c.get(field) is None:
            raise ValueError(f"config.json lacks {field}; is it whole?")
    traits = family.traits(c, longest)
    kinds = tuple(dict.fromkeys(traits.layers))
    options: dict[str, Any] = {
        **{name: c[field] for name, field in _SIZES.items()},
        "num_kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": _head_dim(c),
        "attention": kinds,
        "tied": bool(c.get("tie_word_embeddings", False)),
        "context_length": _context_length(c),
        "eos_ids": tuple(sorted(eos_ids)),
        "dtype": dtype,
        **traits.options,
    }
    if len(kinds) > 1:
        options["layer_kinds"] = tuple(map(kinds.index, traits.layers))
    return Described(DecoderConfig(**options), traits.layout)


# --- families -------------------------------------------------------------------------


def _llama(c: Fields, longest: int | None) -> _Traits:
    return _Traits(_alike(c, None, longest))


def _mistral(c: Fields, longest: int | None) -> _Traits:
    return _Traits(_alike(c, c["sliding_window"], longest))


def _qwen2(c: Fields, longest: int | None) -> _Traits:
    layers = _by_type(c, _qwen_types(c), _qwen_window(c), longest)
    return _Traits(layers, {"qkv_bias": True})


def _qwen3(c: Fields, longest: int | None) -> _Traits:
    layers = _by_type(c, _qwen_types(c), _qwen_window(c), longest)
    return _Traits(layers, {"qk_norm": True})


def _qwen_window(c: Fields) -> int | None:
    return c["sliding_window"] if c["use_sliding_window"] else None


def _qwen_types(c: Fields) -> list[str]:
    window, first = _qwen_window(c), c["max_window_layers"]
    return [
        SLIDING if window is not None and index >= first else FULL
        for index in range(c["num_hidden_layers"])
    ]


def _gemma3(c: Fields, longest: int | None) -> _Traits:
    pattern = c["sliding_window_pattern"]
    types = [
        SLIDING if (index + 1) % pattern else FULL
        for index in range(c["num_hidden_layers"])
    ]
    options = {
        "qk_norm": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "attention_scale": c["query_pre_attn_scalar"] ** -0.5,
        "attention_soft_cap": c.get("attn_logit_softcapping"),
        "logit_soft_cap": c.get("final_logit_softcapping"),
        "embedding_scale": c["hidden_size"] ** 0.5,
    }
    layers = _by_type(c, types, c["sliding_window"], longest)
    return _Traits(layers, options, TensorLayout(norm_offset=1.0))


def _smollm3(c: Fields, longest: int | None) -> _Traits:
    count, every = c["num_hidden_layers"], c["no_rope_layer_interval"]
    turns = c.get("no_rope_layers")  # 1 where a layer has rope
    if turns is None:
        turns = [(index + 1) % every != 0 for index in range(count)]
    if len(turns) < count:
        raise ValueError(
            f"no_rope_layers has {len(turns)} entries and num_hidden_layers={count}"
        )
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    types = [
        FULL if window is None or turns[index] else SLIDING for index in range(count)
    ]
    layers = [
        layer if turned else layer._replace(rope=no_rope(_head_dim(c)))
        for layer, turned in zip(
            _by_type(c, types, window, longest), turns, strict=False
        )
    ]
    return _Traits(layers)


def _phi3(c: Fields, longest: int | None) -> _Traits:
    parameters = _rope_parameters(c)
    if (kind := parameters["rope_type"]) not in (None, "default", "longrope", "su"):
        raise ValueError(
            f"rope_type={kind!r} in config.json is not supported for Phi3ForCausalLM; "
            "known: 'default', 'longrope'"
        )
    share = parameters.get("partial_rotary_factor") or c.get("partial_rotary_factor")
    rotary_dim = int(_head_dim(c) * (share or 1.0))
    layout = TensorLayout(
        fused=True, rotary_dim=None if rotary_dim == _head_dim(c) else rotary_dim
    )
    layers = _alike(c, c.get("sliding_window"), longest, rotary_dim)
    return _Traits(layers, layout=layout)


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(_llama),
    "MistralForCausalLM": _Family(_mistral, {"sliding_window": 4096}),
    "Qwen2ForCausalLM": _Family(_qwen2, _QWEN),
    "Qwen3ForCausalLM": _Family(_qwen3, {**_QWEN, "head_dim": 128}),
    "Gemma3ForCausalLM": _Family(
        _gemma3,
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        {
            "hidden_act": ...,  # it has another name here
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": False,
        },
    ),
    "SmolLM3ForCausalLM": _Family(
        _smollm3,
        {"no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "Phi3ForCausalLM": _Family(
        _phi3,
        {"original_max_position_embeddings": 4096},
        {"partial_rotary_factor": ...},
    ),
}
"""By the name in `architectures`. `...`: any value has code."""


# --- fields ---------------------------------------------------------------------------


def _context_length(c: Fields) -> int:
    """YaRN's factor stretches a context that the config gives unstretched."""
    whole, rope = c["max_position_embeddings"], _rope_parameters(c, FULL)
    if rope["rope_type"] != "yarn":
        return whole
    return max(whole, int(rope["factor"] * rope["original_max_position_embeddings"]))


def _head_dim(c: Fields) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _alike(
    c: Fields, window: int | None, longest: int | None, rotary_dim: int | None = None
) -> list[AttentionKind]:
    """Every layer the same; `layer_types` may say nothing else."""
    kind = AttentionKind(_rope(c, longest, None, rotary_dim), window)
    usual = FULL if window is None else SLIDING
    if set(c.get("layer_types") or ()) - {usual}:
        raise ValueError(
            f"layer_types={c['layer_types']!r} is not supported for "
            f"{c['architectures'][0]}; only {usual!r} in all layers is"
        )
    return [kind] * c["num_hidden_layers"]


def _by_type(
    c: Fields, types: list[str], window: int | None, longest: int | None
) -> list[AttentionKind]:
    """Layers by `layer_types`; by `types` where the config has none."""
    types = c.get("layer_types") or types
    if len(types) != c["num_hidden_layers"] or set(types) - {FULL, SLIDING}:
        raise ValueError(
            f"layer_types={types!r} must name {FULL!r} or {SLIDING!r} for each of "
            f"num_hidden_layers={c['num_hidden_layers']}"
        )
    if SLIDING in types and window is None:
        raise ValueError(
            f"layer_types has {SLIDING!r}, and the config no sliding_window in use"
        )
    limits = {FULL: None, SLIDING: window}
    kinds = {
        kind: AttentionKind(_rope(c, longest, kind), limits[kind])
        for kind in set(types)
    }
    return [kinds[kind] for kind in types]


def _rope(
    c: Fields,
    longest: int | None,
    layer_type: str | None,
    rotary_dim: int | None = None,
) -> Rope:
    parameters = _rope_parameters(c, layer_type)
    share = parameters.get("partial_rotary_factor", 1.0)
    if rotary_dim is None and share != 1:
        raise ValueError(
            f"partial_rotary_factor={share!r} in rope_parameters is not supported for "
            f"{c['architectures'][0]}; only 1.0 is"
        )
    return read_rope(_head_dim(c), parameters, rotary_dim=rotary_dim, longest=longest)


def _rope_parameters(c: Fields, layer_type: str | None = None) -> dict[str, Any]:
    """All spellings: `rope_parameters` of transformers 5, one set or one a layer type,
    and before it `rope_theta` beside `rope_scaling`, whose kind was once called "type".
    """
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = c.get("rope_theta") or 10000.0
    nested = FULL in scaling or SLIDING in scaling
    if layer_type == SLIDING and "rope_local_base_freq" in c:  # Gemma 3
        theta = c["rope_local_base_freq"]
        scaling = scaling if nested else {}
    if nested:
        scaling = scaling.get(layer_type) or {}
    whole = c["max_position_embeddings"]
    context = (
        c.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or whole
    )
    kind = scaling.get("rope_type") or scaling.get("type")
    implied = {"factor": whole / context} if kind in ("longrope", "su") else {}
    return {
        **implied,
        **{name: value for name, value in scaling.items() if value is not None},
        "original_max_position_embeddings": context,
        "rope_type": kind,
        "rope_theta": scaling.get("rope_theta") or theta,
    }
