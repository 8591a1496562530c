"""GGUF files: names, row order, every quantisation in slices, what is refused."""

from __future__ import annotations

import pathlib

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxserve.models.gguf_checkpoint import GGUFFile, hf_name, unpermuted_rows

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"


def test_ml1_row_order_of_one_head_of_eight():
    """ML1 (vllm-metal#480): q and k rows were left in the file's order."""
    file_order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    pick = unpermuted_rows(1, 8)
    assert pick.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert file_order[pick].tolist() == list(range(8))


def test_ml1_row_order_keeps_to_its_head():
    # Four query heads and two KV heads of four rows: each head is undone by itself.
    assert unpermuted_rows(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert unpermuted_rows(4, 4).tolist()[8:] == [8, 10, 9, 11, 12, 14, 13, 15]


def test_ml3_gguf_without_an_output_tensor_is_tied():
    assert GGUFFile(FIXTURES / "tiny_llama_tied" / "model.gguf").config("float32").tied
    assert not GGUFFile(FIXTURES / "tiny_llama" / "model.gguf").config("float32").tied


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("blk.11.attn_q.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
    ],
)
def test_gguf_names(name, wanted):
    assert hf_name(name) == wanted


def gguf_file(path, add, architecture="llama"):
    """A GGUF of two heads of eight with what `add(writer)` puts in."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


QUANTISED = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits or kind.name in ("F32", "F16")
]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_quantisation_reads_in_slices_as_in_one_piece(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = max(block, 32)
    # Bytes below 60, so that no half-precision scale among them is infinite or NaN.
    raw = np.random.default_rng(0).integers(
        0, 60, (16, columns // block * size), dtype=np.uint8
    )
    if kind.name in ("F32", "F16"):
        raw = raw.view({"F32": np.float32, "F16": np.float16}[kind.name])
    whole = gguf.dequantize(raw, kind)
    assert whole.shape == (16, columns)

    def add(writer):
        for name in ("blk.0.ffn_up.weight", "blk.0.attn_q.weight"):
            writer.add_tensor(name, raw, raw_dtype=kind)

    file = gguf_file(tmp_path / "a.gguf", add)
    plain, permuted = (
        "model.layers.0.mlp.up_proj.weight",
        ("model.layers.0.self_attn.q_proj.weight"),
    )
    assert file.shapes[plain] == (16, columns)
    np.testing.assert_array_equal(file.rows(plain, 0, 16), whole)
    np.testing.assert_array_equal(file.rows(plain, 5, 9), whole[5:9])
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    np.testing.assert_array_equal(file.rows(permuted, 3, 11), whole[order[3:11]])


def test_a_type_that_gguf_cannot_read_names_the_tensor(tmp_path):
    data = np.ones((16, 4), np.int8)
    file = gguf_file(
        tmp_path / "a.gguf", lambda w: w.add_tensor("blk.0.ffn_up.weight", data)
    )
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight is stored as I8"):
        file.rows("model.layers.0.mlp.up_proj.weight", 0, 1)


def test_gguf_refusals(tmp_path):
    with pytest.raises(ValueError, match="architecture='mamba'.*known: llama"):
        gguf_file(tmp_path / "a.gguf", lambda w: None, "mamba")
    with pytest.raises(ValueError, match="one of 3 parts.*--merge"):
        gguf_file(tmp_path / "b.gguf", lambda w: w.add_uint16("split.count", 3))
    file = gguf_file(tmp_path / "c.gguf", lambda w: None)
    with pytest.raises(ValueError, match="lacks llama.embedding_length"):
        file.config("float32")


def test_ml5_bfloat16_in_gguf(tmp_path):
    x = np.concatenate(
        [np.array([1.0, -3.140625]), np.arange(22)], dtype=ml_dtypes.bfloat16
    ).reshape(3, 8)
    assert x.tobytes()[:4] == bytes.fromhex("803F 49C0")
    file = gguf_file(
        tmp_path / "a.gguf",
        lambda writer: writer.add_tensor(
            "output_norm.weight",
            x.view(np.uint8),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        ),
    )
    assert file.shapes["model.norm.weight"] == (3, 8)
    rows = file.rows("model.norm.weight", 0, 3)
    np.testing.assert_array_equal(rows, x.astype(np.float32))
    np.testing.assert_array_equal(file.rows("model.norm.weight", 1, 2), rows[1:2])


def test_half_a_file_and_another_format_are_named(tmp_path):
    whole = (FIXTURES / "tiny_llama" / "model.gguf").read_bytes()
    for content in (whole[:-4000], whole[:500], b"not a model at all"):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.gguf is no whole GGUF file"):
            GGUFFile(tmp_path / "a.gguf")
