"""Readers, on files of three rows written by hand."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from jaxserve.workloads import Chain, Job, ideal_prefix_hit, traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.0319601,3180,8
2023-11-17 00:00:01,110,27"""


@pytest.fixture
def write(tmp_path: pathlib.Path):
    def to(name: str, text: str) -> pathlib.Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_azure_times_are_exact_to_100_ns_across_midnight(write) -> None:
    assert traces.read_azure(write("a.csv", AZURE)) == (
        Job(0.0, 4808, 10),
        Job(0.0520001, 3180, 8),
        Job(1.02004, 110, 27),
    )


def test_azure_of_2024_has_a_time_zone_and_may_be_out_of_order(write) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:01.500000+00:00,5,6\n"
        "2024-05-10 00:00:00.009930+00:00,7,8\n"
    )
    found = traces.read_azure(write("a.csv", text))
    assert found == (Job(0.0, 7, 8), Job(1.49007, 5, 6))


def test_burstgpt_leaves_failures_out(write) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,GPT-4,300,0,300,API log\n"
        "118,GPT-4,417,276,693,API log\n"
    )
    assert traces.read_burstgpt(write("b.csv", text)) == (
        Job(5.0, 472, 18, tags={"model": "ChatGPT", "log_type": "Conversation log"}),
        Job(118.0, 417, 276, tags={"model": "GPT-4", "log_type": "API log"}),
    )


def test_vtc_clients_are_users(write) -> None:
    text = "req_time_s,client,prompt_len,output_len\n0.0,13,5,199\n0.25,2,36,137\n"
    assert traces.read_vtc_arena(write("v.csv", text)) == (
        Job(0.0, 5, 199, user="13"),
        Job(0.25, 36, 137, user="2"),
    )


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]},
    {"timestamp": 40, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]},
    {"timestamp": 277, "input_length": 600, "output_length": 3, "hash_ids": [0, 3]},
]


@pytest.mark.parametrize("zipped", [False, True])
def test_mooncake_blocks_make_chains(tmp_path: pathlib.Path, zipped: bool) -> None:
    text = "\n".join(map(json.dumps, MOONCAKE)).encode()
    path = tmp_path / ("m.jsonl.gz" if zipped else "m.jsonl")
    path.write_bytes(gzip.compress(text) if zipped else text)
    found = traces.read_mooncake(path)
    assert found == (
        Job(0.0, 1100, 6, chain=Chain((0, 1, 2), 512)),
        Job(0.04, 1024, 4, chain=Chain((0, 1), 512)),
        Job(0.277, 600, 3, chain=Chain((0, 3), 512)),
    )
    # Blocks 0 and 1 return, then block 0: 3 of 7 blocks, 1536 of 2724 tokens.
    assert ideal_prefix_hit(found) == (3 / 7, 1536 / 2724)


def test_blocks_of_another_size_may_leave_the_cut_one_unnamed(write) -> None:
    row = {"timestamp": 1, "input_length": 40, "output_length": 1, "hash_ids": [4, 5]}
    path = write("s.jsonl", json.dumps(row) + "\n")
    (job,) = traces.read_mooncake(path, block_tokens=16)
    assert job.chain == Chain((4, 5), 16)
    with pytest.raises(ValueError, match="length 2 .* 512 tokens .* set block_tokens"):
        traces.read_mooncake(path)


def test_lmsys_predictions_become_tags(write) -> None:
    text = (
        "output_tokens,pred_binary_class,pred_multi_class,pred_latency_s,model\n"
        "40,0,1,0.02401,vicuna-13b\n"
        "511,1,4,0.01051,vicuna-13b\n"
    )
    found = traces.read_lmsys_outputs(write("l.csv", text))
    assert found.tokens == (40, 511)
    assert found.tags == (
        {"pred_binary_class": "0", "pred_multi_class": "1"},
        {"pred_binary_class": "1", "pred_multi_class": "4"},
    )


def test_a_byte_order_mark_and_windows_lines_are_read(write) -> None:
    text = "\ufeff" + AZURE.replace("\n", "\r\n")
    assert len(traces.read_azure(write("a.csv", text))) == 3


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (traces.read_azure, "TIME,ContextTokens\n", r"f:1: column 'TIMESTAMP' is mis"),
        (traces.read_azure, "", r"f:1: column 'TIMESTAMP' is missing; the header"),
        (traces.read_azure, AZURE.split("\n")[0], "f: it holds no requests; give"),
        (
            traces.read_azure,
            AZURE.replace("3180", "3180.5"),
            "f:3: ContextTokens='3180.5' must be an integer >= 1; mend",
        ),
        (
            traces.read_azure,
            AZURE.replace(",27", ",0"),
            "f:4: GeneratedTokens='0' must be an integer >= 1; mend",
        ),
        (traces.read_azure, AZURE.replace(",27", ""), "f:4: GeneratedTokens is missin"),
        (
            traces.read_azure,
            AZURE.replace("11-17 00:00:01", "11-31 00:00:01"),
            "f:4: TIMESTAMP='2023-11-31 00:00:01' must be a UTC time such as .*; mend",
        ),
        (
            traces.read_azure,
            AZURE.replace("00:00:01", "00:00:01+02:00"),
            r"f:4: TIMESTAMP='2023-11-17 00:00:01\+02:00' must be a UTC time",
        ),
        (
            traces.read_burstgpt,
            "Timestamp,Model,Request tokens,Response tokens,Log Type\nx,m,1,1,l\n",
            "f:2: Timestamp='x' must be a number; mend",
        ),
        (
            traces.read_vtc_arena,
            "req_time_s,client,prompt_len,output_len\nnan,1,1,1\n",
            "f:2: req_time_s='nan' must be a number; mend",
        ),
        (
            traces.read_lmsys_outputs,
            "output_tokens,pred_binary_class,pred_multi_class\n9,-1,0\n",
            "f:2: pred_binary_class='-1' must be an integer >= 0; mend",
        ),
        (
            traces.read_lmsys_outputs,
            "output_tokens,pred_binary_class,pred_multi_class\n",
            "f: no rows follow the header; give",
        ),
        (traces.read_mooncake, json.dumps(MOONCAKE[0]) + "\n{", "f:2: no JSON .*; men"),
        (traces.read_mooncake, "[]", r"f:1: \[\] must be a JSON object; mend"),
        (
            traces.read_mooncake,
            json.dumps(MOONCAKE[0] | {"output_length": None}),
            "f:1: output_length=None must be an integer >= 1; mend",
        ),
        (
            traces.read_mooncake,
            json.dumps(MOONCAKE[0] | {"hash_ids": 3}),
            "f:1: hash_ids=3 must be a list of block ids; mend",
        ),
        (
            traces.read_mooncake,
            json.dumps(MOONCAKE[0] | {"hash_ids": [0, 1, -2]}),
            "f:1: hash_ids=-2 must be an integer >= 0; mend",
        ),
        (traces.read_mooncake, "", "f: it holds no requests; give"),
    ],
)
def test_errors_name_file_line_column_and_remedy(
    write, reader, text: str, message: str
) -> None:
    path = write("f", text)
    with pytest.raises(ValueError, match=message) as caught:
        reader(path)
    assert str(caught.value).startswith(str(path))
