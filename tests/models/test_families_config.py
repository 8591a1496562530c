"""What the config.json of released checkpoints means, and which ones are refused."""

from __future__ import annotations

import math

import pytest

from jaxserve.models import load
from jaxserve.models.families import describe
from tests.models import tiny_families

RELEASED = {
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-3-1b-it": {  # with no word of tied embeddings
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
}


def read(name: str, longest: int | None = None, **fields):
    config = RELEASED[name] | fields
    return describe(config, eos_ids=(), dtype="float32", longest=longest)


def frequency(theta: float, pair: int, dim: int) -> float:
    return pytest.approx(theta ** (-2 * pair / dim), rel=1e-5)


def test_mistral_slides_in_every_layer():
    config, _ = read("Mistral-7B-v0.1")
    (kind,) = config.attention
    assert kind.window == 4096 and config.layer_kinds == ()
    assert kind.rope.frequencies[63] == frequency(1e4, 63, 128)
    assert read("Mistral-7B-v0.1", sliding_window=None).config.attention[0][1] is None


def test_qwen2_has_biases_and_slides_only_where_told():
    config, _ = read("Qwen2.5-0.5B")
    assert config.qkv_bias and not config.qk_norm and config.tied
    assert [kind.window for kind in config.attention] == [None]
    config, _ = read("Qwen2.5-0.5B", use_sliding_window=True)
    windows = [config.attention[kind].window for kind in config.layer_kinds]
    assert windows == [None] * 21 + [32768] * 3


def test_qwen3_normalises_heads_and_knows_yarn():
    config, _ = read("Qwen3-0.6B")
    assert config.qk_norm and not config.qkv_bias
    assert config.head_dim == 128 and config.context_length == 40960
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    config, _ = read("Qwen3-0.6B", rope_scaling=yarn)
    assert config.context_length == 131072
    rope = config.attention[0].rope
    assert rope.factors[0] == pytest.approx(0.1 * math.log(4) + 1)
    # The fastest pair keeps its frequency; the slowest is stretched by the factor.
    assert rope.frequencies[0] == 1.0
    assert rope.frequencies[63] * 4 == frequency(1e6, 63, 128)


def test_gemma3_has_five_local_layers_to_a_global_one():
    config, layout = read("gemma-3-1b-it")
    kinds = [config.attention[kind] for kind in config.layer_kinds]
    globals_ = [index for index, kind in enumerate(kinds) if kind.window is None]
    assert globals_ == [5, 11, 17, 23]
    assert {kind.window for kind in kinds} == {None, 512}
    assert kinds[0].rope.frequencies[100] == frequency(1e4, 100, 256)
    assert kinds[5].rope.frequencies[100] == frequency(1e6, 100, 256)
    assert config.tied and config.qk_norm and config.post_norms
    assert config.activation == "gelu_tanh"
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == pytest.approx(33.941125)
    assert config.attention_soft_cap is config.logit_soft_cap is None
    assert layout.norm_offset == 1


def test_gemma3_scales_the_rope_of_global_layers_alone():
    config, _ = read(
        "gemma-3-1b-it", rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    local, whole = (config.attention[config.layer_kinds[i]].rope for i in (0, 5))
    assert local.frequencies[0] == 1.0
    assert whole.frequencies[0] == 0.125


def test_smollm3_leaves_every_fourth_layer_without_rope():
    config, _ = read("SmolLM3-3B")
    kinds = [config.attention[kind] for kind in config.layer_kinds]
    turns = [any(kind.rope.frequencies) for kind in kinds]
    assert turns == [True, True, True, False] * 9
    assert config.tied  # which its config does not say
    assert kinds[0].rope.frequencies[1] == frequency(5e6, 1, 128)


@pytest.mark.parametrize(
    ("longest", "divisor"), [(4096, 1.0), (4097, 2.0), (None, 2.0)]
)
def test_phi4_turns_three_quarters_of_a_head(longest, divisor):
    config, layout = read("Phi-4-mini", longest)
    (kind,) = config.attention
    assert kind.window == 262144 and config.context_length == 131072
    assert layout.fused and layout.rotary_dim == 96
    frequencies, factors = kind.rope
    assert frequencies[47] * divisor == frequency(1e4, 47, 96)
    assert frequencies[48:] == (0.0,) * 16
    # The square root of 1 + ln 32 / ln 4096, over the context's growth of 32.
    assert factors == (pytest.approx(1.1902380714238083),) * 48 + (1.0,) * 16


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Mistral-7B-v0.1", {"hidden_act": "gelu"}, "hidden_act='gelu'.*only 'silu'"),
        (
            "Mistral-7B-v0.1",
            {"layer_types": ["sliding_attention", "full_attention"] * 16},
            "layer_types=.*MistralForCausalLM; only 'sliding_attention'",
        ),
        (
            "Mistral-7B-v0.1",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 in rope_parameters .*MistralForCausalLM",
        ),
        ("Mistral-7B-v0.1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "window=0 must be at least 1"),
        ("Mistral-7B-v0.1", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ("Qwen3-0.6B", {"attention_bias": True}, "attention_bias=True.*Qwen3"),
        (
            "Qwen3-0.6B",
            {"layer_types": ["chunked_attention"] * 28},
            "layer_types=.*must name 'full_attention' or 'sliding_attention'",
        ),
        (
            "Qwen3-0.6B",
            {"layer_types": ["sliding_attention"] * 28},
            "layer_types has 'sliding_attention', and the config no sliding_window",
        ),
        (
            "Qwen3-0.6B",
            {"rope_scaling": {"rope_type": "yarn", "factor": None}},
            "rope_type='yarn' needs factor",
        ),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (
            "gemma-3-1b-it",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True.*Gemma3",
        ),
        ("SmolLM3-3B", {"mlp_bias": True}, "mlp_bias=True"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        (
            "Phi-4-mini",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type='yarn'.*Phi3ForCausalLM; known: 'default', 'longrope'",
        ),
        (
            "Phi-4-mini",
            {"rope_scaling": {"type": "su", "long_factor": [1.0] * 64}},
            "long_factor of rope_type='longrope' has 64 entries.*need 48",
        ),
        (
            "gemma-3-1b-it",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "Gemma3ForConditionalGeneration.*known: LlamaForCausalLM, Mistral",
        ),
    ],
)
def test_what_has_no_code_is_refused_by_name(name, fields, message):
    with pytest.raises(ValueError, match=message):
        read(name, **fields)


@pytest.mark.parametrize(
    ("variant", "other", "message"),
    [
        ("qwen2", "MistralForCausalLM", r"unexpected model\.layers\.0.*k_proj\.bias"),
        ("mistral", "Qwen2ForCausalLM", r"missing model\.layers\.0.*k_proj\.bias"),
        ("mistral", "Qwen3ForCausalLM", r"missing model\.layers\.0.*k_norm\.weight"),
        ("mistral", "Phi3ForCausalLM", r"missing .*mlp\.gate_up_proj\.weight"),
        ("phi3", "LlamaForCausalLM", r"unexpected .*mlp\.gate_up_proj\.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_family_are_named(
    variant, other, message, tmp_path
):
    directory = tiny_families.write(
        tmp_path, variant, architectures=[other], layer_types=...
    )
    with pytest.raises(ValueError, match=message):
        load(directory, "float32")
