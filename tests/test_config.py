"""What is refused, and how: the field, its value and the remedy are in the message.

Bad input must leave the requests that run alone.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxserve import EngineConfig, SamplingParams
from jaxserve.config import bucket
from jaxserve.models.base import num_blocks, num_disk_blocks, num_swap_blocks
from jaxserve.models.hash_model import HashModel
from tests.engine.harness import Served, config
from tests.serving import direct

NAN, INF = float("nan"), float("inf")

# field: what is refused of it, and what the message must say besides field and value.
SAMPLING = {
    "n": ([0, -1, 1.5, NAN, "1", True, None], "integer >= 1"),
    "temperature": ([-0.1, NAN, INF, -INF, "hot", None, True], "0 is greedy"),
    "top_k": ([-2, 1.0, 0.5, NAN, INF, "1", True, None], "integer >= -1.*keeps all"),
    "top_p": ([-0.1, 1.1, NAN, INF, "1", True, None], r"in \[0, 1\].*1 keeps all"),
    "min_p": ([-0.1, 1.1, NAN, INF, "0", False, None], r"in \[0, 1\].*0 keeps all"),
    "seed": ([1.0, NAN, "1", True, 2**64, -(2**63) - 1], r"< 2\*\*64, or None"),
    "max_tokens": ([0, -1, 1.5, NAN, INF, "9", True], ">= 1, or None for no limit"),
    "min_tokens": ([-1, 1.0, NAN, "1", True, None], "integer >= 0"),
    "stop": (["", [""], ["a", 1], 5, b"a"], "non-empty string"),
    "stop_token_ids": ([[-1], [1.0], ["1"], [True], [None], 5], "integer >= 0"),
    "ignore_eos": ([1, 0, None, "no"], "must be True or False"),
    "output_kind": (["deltas", None, 1], "one of .'cumulative', 'delta', 'fi"),
    "logprobs": ([-1, 1.0, NAN, "1", True], ">= 0, or None for none"),
    "prompt_logprobs": ([-1, 1.0, NAN, "1", True], ">= 0, or None for none"),
    "presence_penalty": ([-2.1, 2.1, NAN, INF, "0", None], r"\[-2, 2\].*0 is none"),
    "frequency_penalty": ([-2.1, 2.1, NAN, -INF, True], r"\[-2, 2\].*0 is none"),
    "repetition_penalty": (
        [0, -1, 1e-40, NAN, INF, 1e39, None],
        "number in.*1 is none",
    ),
    "logit_bias": (["a", 5, [1], [(1, 2, 3)]], "token id"),
    "allowed_token_ids": ([[], [-1], [1.0], [True], 5], "integer >= 0|None allows"),
    "bad_words": (["a", [""], ["a", 1], 5], "non-empty string"),
    "detokenize": ([1, 0, None, "no"], "must be True or False"),
    "skip_special_tokens": ([1, 0, None, "no"], "must be True or False"),
    "spaces_between_special_tokens": ([False, 1, None], "must be True: the text"),
    "include_stop_str_in_output": ([1, 0, None, "no"], "must be True or False"),
    "skip_reading_prefix_cache": ([1, 0, "no"], "must be True or False"),
}
ENGINE = {
    "max_model_len": ([1, 0, 2.0, True, None], "integer >= 2: a prompt and an output"),
    "max_num_seqs": ([0, -1, 1.5, True, None, "8"], "integer >= 1"),
    "max_num_batched_tokens": ([0, 1.5, True, None], "integer >= 1"),
    "block_size": ([0, -16, 16.0, True, None], "integer >= 1"),
    "num_blocks": ([0, -1, 1.5, True, "9"], ">= 1, or None"),
    "preemption_mode": (["swop", None, 1], "'recompute', 'swap', 'disk', 'auto'"),
    "disk_cache_dir": ([3, True], "must be a path, a string, or None"),
    "disk_cache_bytes": ([-1, 1.5, None, True], ">= 0"),
    "num_disk_blocks": ([-1, 1.5, True, "9"], ">= 0, or None"),
    "tier_write": (["back", None], "'never', 'on_eviction', 'through'"),
    "tier_eviction": (["fifo", None], "'lru', 'lfu', 'cost'"),
    "transfer_timeout_s": ([-1, NAN, INF, "1", None], r"in \[0, 1e\+06\]"),
    "swap_space_bytes": ([-1, 1.5, None, True], ">= 0"),
    "num_swap_blocks": ([-1, 1.5, True, "9"], ">= 0, or None"),
    "cache_bytes": ([0, 1e9, True, None], "integer >= 1"),
    "enable_prefix_caching": (["no", 1, 0, None], "must be True or False"),
    "num_scheduler_steps": ([0, 1.5, True, None], "integer >= 1"),
    "launches_in_flight": ([0, 4, 1.5, True, None], "integer >= 1|1, 2 or 3"),
    "max_chunk_tokens": ([0, -1, 1.5, True], ">= 1, or None"),
    "batching": (["dynamic", None, True], "one of .'continuous', 'static'"),
    "prefill": (["mixed", None, 1], "one of .'chunked', 'prefill_first', 'decode_f"),
    "skip_limit": ([-1, 0.5, True, None], "integer >= 0"),
    "seed": ([-1, 0.5, True, None], "integer >= 0"),
    "max_logprobs": ([-1, 0.5, True, None], "integer >= 0"),
    "max_logit_bias": ([-1, 0.5, True, None], "integer >= 0"),
    "max_bad_words": ([-1, 0.5, True, None], "integer >= 0"),
}
REFUSED = [
    pytest.param(cls, field, value, hint, id=f"{cls.__name__} {field}={value!r}")
    for cls, table in ((SamplingParams, SAMPLING), (EngineConfig, ENGINE))
    for field, (values, hint) in table.items()
    for value in values
]


@pytest.mark.parametrize("prefill", ["prefill_first", "decode_first"])
def test_a_static_batch_has_no_prefill_mode(prefill) -> None:
    with pytest.raises(ValueError, match=f"prefill='{prefill}' must be 'chunked'"):
        EngineConfig(batching="static", prefill=prefill)


def test_every_field_is_in_the_tables() -> None:
    for cls, table in ((SamplingParams, SAMPLING), (EngineConfig, ENGINE)):
        assert {field.name for field in dataclasses.fields(cls)} == table.keys()


@pytest.mark.parametrize(("cls", "field", "value", "hint"), REFUSED)
def test_a_bad_value_is_refused_by_name(cls, field: str, value, hint: str) -> None:
    """A ValueError with the field, the value (of a list, the bad one) and the rule."""
    with pytest.raises(ValueError, match=rf"^{field}=.*({hint})") as error:
        cls(**{field: value})
    parts = list(value) if value and isinstance(value, list | bytes) else [value]
    assert any(f"{field}={part!r}" in str(error.value) for part in parts)


@pytest.mark.parametrize("cls", [SamplingParams, EngineConfig])
@pytest.mark.parametrize(
    "field",
    ["structured_outputs", "extra_args", "logits_processors", "best_of"],
)
def test_what_is_not_there_yet_is_refused_by_name(cls, field: str) -> None:
    with pytest.raises(TypeError, match=f"'{field}'"):
        cls(**{field: 1})


@pytest.mark.parametrize("bias", [NAN, INF, -INF, 100.5, "1", None, True])
def test_a_bad_bias_is_refused_with_its_token(bias) -> None:
    complaint = rf"^logit_bias\[7\]={bias!r} must be .*\[-100, 100\].*bad_words"
    with pytest.raises(ValueError, match=complaint):
        SamplingParams(logit_bias={3: 1.0, 7: bias})
    with pytest.raises(ValueError, match="^logit_bias=-7 must be an integer >= 0"):
        SamplingParams(logit_bias={-7: 1.0})


def test_rules_of_two_fields_name_both() -> None:
    with pytest.raises(ValueError, match=r"min_tokens=5 .*max_tokens=4.*lower it"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(
        ValueError, match=r"max_num_batched_tokens=8 .*max_num_seqs=9.*raise it"
    ):
        EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)
    for bad, low, high in ((24, 16, 32), (3, 2, 4), (1000, 512, 1024)):
        match = f"block_size={bad} must be a power of two; nearest are {low} and {high}"
        with pytest.raises(ValueError, match=match):
            EngineConfig(block_size=bad)


def test_what_is_allowed_at_the_edges() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=0, min_p=1, seed=-(2**63))
    SamplingParams(seed=2**64 - 1, max_tokens=1, min_tokens=1, logprobs=0, stop="x")
    SamplingParams(max_tokens=None, min_tokens=99, stop=[], stop_token_ids=[])
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logprobs=np.int8(1))
    EngineConfig(block_size=1, max_num_seqs=1, max_num_batched_tokens=1)
    EngineConfig(num_blocks=1, max_model_len=2, launches_in_flight=3, max_logprobs=0)
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_params_are_values_and_the_callers_lists_stay_the_callers() -> None:
    ids, stop = [3, 4], ["a"]
    params = SamplingParams(stop_token_ids=ids, stop=stop)
    ids.append(5)
    stop.append("b")
    assert params == SamplingParams(stop_token_ids=(3, 4), stop=("a",))
    assert len({params, SamplingParams(stop_token_ids=[3, 4], stop=["a"])}) == 1
    assert params.stop_ids == (3, 4) and params.stop_strings == ("a",)
    assert hash(EngineConfig()) == hash(EngineConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("ids", [[0], [3], [3, 4]])
def test_ids_in_an_array_are_honoured_or_refused(ids: list[int]) -> None:
    """Contract 8: np.array([0]) is falsy, and must not be dropped for it."""
    try:
        params = SamplingParams(stop_token_ids=np.array(ids))  # type: ignore[arg-type]
    except ValueError as error:
        assert "stop_token_ids" in str(error)
        return
    assert list(params.stop_ids) == ids


def test_a_number_past_every_float_is_a_value_error() -> None:
    for field in ("temperature", "top_p", "min_p"):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: 10**400})


# Shapes -------------------------------------------------------------------------------


def test_buckets_hold_what_they_are_asked_to() -> None:
    assert [bucket(n, (2, 4, 9)) for n in (0, 1, 2, 3, 4, 5, 9)] == [
        *(2, 2, 2),
        *(4, 4),
        *(9, 9),
    ]
    with pytest.raises(ValueError, match=r"10 exceeds the largest bucket of \(2, 4, 9"):
        bucket(10, (2, 4, 9))


@pytest.mark.parametrize(
    ("fields", "free", "rows", "tokens"),
    [
        # Eight rows at least, then fourfold; tokens from 128 on, and the row buckets.
        ({}, False, (8, 32, 64), (8, 32, 64, 128, 512)),
        ({"max_num_seqs": 5, "max_num_batched_tokens": 37}, False, (5,), (5, 37)),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 9}, False, (8, 9), (8, 9)),
        (
            {"max_num_seqs": 300, "max_num_batched_tokens": 317},
            False,
            (8, 32, 128, 300),
            (8, 32, 128, 300, 317),
        ),
        # Where nothing is computed for padding, few and many rows, decodes and prompts.
        ({}, True, (8, 64), (8, 64, 512)),
        ({"max_num_seqs": 5, "max_num_batched_tokens": 37}, True, (5,), (5, 37)),
        ({"max_num_seqs": 300}, True, (8, 300), (8, 300, 512)),
    ],
)
def test_the_compiled_set_is_small_and_holds_every_launch(
    fields: dict, free: bool, rows: tuple, tokens: tuple
) -> None:
    made = EngineConfig(**fields)
    shape = made.shape(10, padding_is_free=free)
    assert shape.row_buckets == rows and shape.token_buckets == tokens
    listed = shape.launch_shapes()
    assert len(listed) == len(set(listed)) <= 2 + len(rows) * len(tokens)
    used = {shape.launch_shape(1, 0)}
    for r in range(1, made.max_num_seqs + 1):
        for t in range(r, made.max_num_batched_tokens + 1):
            launch = shape.launch_shape(r, t)
            assert launch[0] >= r and launch[1] >= max(t, launch[0])
            used.add(launch)
    assert used == set(listed)  # nothing is compiled that no launch can need
    # A handle retired in a plan is not reused in it: K names beside one for each block.
    assert shape.num_handles == 10 + shape.max_edits


def test_blocks_of_an_engine_are_what_fits() -> None:
    """A block of the hash model is 4 B bytes."""
    model = HashModel()
    base = EngineConfig(max_model_len=64, max_num_seqs=2, block_size=16)
    assert num_blocks(model, base) == 8  # two sequences of four blocks
    assert num_blocks(model, dataclasses.replace(base, num_blocks=3)) == 3
    assert num_blocks(model, dataclasses.replace(base, cache_bytes=5 * 64 + 63)) == 5
    with pytest.raises(
        ValueError, match=r"cache_bytes=255 holds 3 blocks of 64 .*=64 needs 4.*256"
    ):
        num_blocks(model, dataclasses.replace(base, cache_bytes=255))
    assert num_swap_blocks(model, base) == 0
    assert num_swap_blocks(model, dataclasses.replace(base, num_swap_blocks=7)) == 7
    assert (
        num_swap_blocks(model, dataclasses.replace(base, swap_space_bytes=5 * 64 + 63))
        == 5
    )
    assert num_disk_blocks(model, base) == 0
    assert num_disk_blocks(model, dataclasses.replace(base, num_disk_blocks=7)) == 7
    disk = {"disk_cache_dir": "kv", "disk_cache_bytes": 5 * (128 + 64) + 191}
    assert num_disk_blocks(model, dataclasses.replace(base, **disk)) == 5
    with pytest.raises(ValueError, match="disk_cache_bytes=9 needs a disk_cache_dir"):
        EngineConfig(disk_cache_bytes=9)


# Bad input to an engine that is at work -----------------------------------------------

BAD = {
    "empty prompt": ({"prompt": []}, r"prompt_token_ids=\[\] must hold at least one"),
    "text": ({"prompt": "hi"}, "type str must be a sequence of token ids"),
    "bytes": ({"prompt": b"hi"}, "type bytes must be a sequence of token ids"),
    "nothing": ({"prompt": None}, "type NoneType must be a sequence"),
    "a number": ({"prompt": np.array(3)}, "prompt_token_ids"),
    "two axes": ({"prompt": np.zeros((2, 2), int)}, r"prompt_token_ids\[0\]="),
    "negative id": ({"prompt": [1, -1]}, r"prompt_token_ids\[1\]=-1 .*\[0, 97\)"),
    "id too large": ({"prompt": [97]}, r"prompt_token_ids\[0\]=97 .*\[0, 97\)"),
    "real id": ({"prompt": [1.0]}, r"prompt_token_ids\[0\]=1.0 must be an integer"),
    "bool id": ({"prompt": [True]}, r"prompt_token_ids\[0\]=True must be an integer"),
    "over memory": ({"prompt": [1] * 41}, r"41 tokens.*10 KV blocks.*hold 40.*raise"),
    "id in use": ({"name": "good"}, "request_id='good' is in use.*choose another"),
    "no id": ({"name": ""}, "request_id='' must be a non-empty string"),
    "id of a number": ({"name": 7}, "request_id=7 must be a non-empty string"),
    "params of a dict": ({"params": {"n": 1}}, "type dict must be SamplingParams"),
    "too many logprobs": (
        {"params": SamplingParams(logprobs=3)},
        "logprobs=3 must not exceed max_logprobs=2; lower it or raise",
    ),
    "a stop string": (
        {"params": SamplingParams(stop="end")},
        r"stop=\['end'\] needs a tokenizer.*use stop_token_ids",
    ),
    "a stop id too large": (
        {"params": SamplingParams(stop_token_ids=[97])},
        r"stop_token_ids=97 must be in \[0, 97\)",
    ),
    "many stop ids": (
        {"params": SamplingParams(stop_token_ids=range(9))},
        "9 stop ids, which must not exceed 8; drop some",
    ),
    "priority": ({"priority": 1.5}, "priority=1.5 must be an integer of 32 bits"),
    "a huge priority": ({"priority": 2**31}, "priority=2147483648 must be an int"),
    "no priority": ({"priority": None}, "priority=None must be an integer"),
    "arrival": ({"arrival_time": NAN}, "arrival_time=nan must be a finite number"),
    "arrival never": ({"arrival_time": INF}, "arrival_time=inf must be a finite"),
    "arrival of text": ({"arrival_time": "now"}, "arrival_time='now' must be a finite"),
    "arrival past floats": ({"arrival_time": 10**400}, "arrival_time"),
    "deadline": ({"deadline_s": NAN}, "deadline_s=nan must be a finite number"),
    "user": ({"user": 3}, "user=3 must be a string or None"),
    "tags": ({"tags": {"a": 1}}, "tags={'a': 1} must map strings to strings"),
    "tags of a list": ({"tags": ["a"]}, r"tags=\['a'\] must map strings"),
    "empty salt": ({"cache_salt": ""}, "cache_salt='' must be a non-empty string"),
    "salt of bytes": ({"cache_salt": b"a"}, "cache_salt=b'a' must be a non-empty"),
    # JSON can hold half of a surrogate pair; UTF-8 cannot.
    "salt of half a character": ({"cache_salt": "\ud800"}, "cache_salt"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_and_the_others_run_on(kind: str) -> None:
    """LI1 (vllm#7746), and every other way to be wrong."""
    fields, match = BAD[kind]
    fields = {"name": "bad", "prompt": list(range(9)), "params": None, **fields}
    served = Served(config(4, 2, 2, num_blocks=10, max_logprobs=2))
    served.add("good", range(1, 10), 5)
    served.step()
    before = served.stats()
    name, prompt, params = (fields.pop(key) for key in ("name", "prompt", "params"))
    with pytest.raises(ValueError, match=match):
        served.engine.add_request(name, prompt, params, **fields)
        served.finish()  # what is accepted must be served
    assert {**served.stats(), "host_s": 0} == {**before, "host_s": 0}
    served.finish()
    assert served.tokens("good") == [0, 66, 60, 39, 14]
    assert {e.request_id for e in served.of("arrived")} == {"good"}
    assert served.run("next", [2, 7, 1], 4).outputs[0].token_ids == [29, 56, 54, 80]


NUMPY = {
    "seed": np.int64(42),
    "unsigned seed": np.uint32(42),
    "top_k": np.int32(3),
    "max_tokens": np.int8(5),
    "min_tokens": np.uint8(2),
    "temperature": np.float32(0.0),
    "top_p": np.float64(0.5),
    "stop_token_ids": [np.int64(95)],
}


@pytest.mark.parametrize("field", NUMPY)
def test_numpy_numbers_are_served_like_others(field: str) -> None:
    """What validation accepts must not overflow or fail later, in a plan."""
    name = field.removeprefix("unsigned ")
    value = NUMPY[field]
    plain = [int(v) for v in value] if isinstance(value, list) else value.item()
    base = {"temperature": 1.0 if name == "seed" else 0.0, "seed": 3, "max_tokens": 5}
    prompt = [i % 97 for i in range(260)]  # longer than a byte counts
    tokens = []
    for one in (value, plain):
        served = Served(config(4, 1, 1, num_blocks=80, max_model_len=300))
        params = SamplingParams(**{**base, name: one})
        served.engine.add_request("r", prompt, params)
        served.finish()
        tokens.append(served.tokens("r"))
    assert tokens[0] == tokens[1] and len(tokens[0]) == 5


def test_terms_of_every_accepted_kind() -> None:
    served = Served(config(4, 1, 1, num_blocks=10))
    served.add("a", np.arange(9, dtype=np.uint8), 2, priority=np.int64(3))
    served.add("b", tuple(range(9)), 2, tags={"a": "b"}, user="", deadline_s=-1)
    served.add("c", range(9), 2, arrival_time=np.float32(0.0), cache_salt="\N{SNOWMAN}")
    served.finish()
    assert {name: served.tokens(name) for name in "abc"} == dict.fromkeys(
        "abc", direct(range(9), 2)
    )
    assert all(type(t) is int for t in served.outputs["a"].prompt_token_ids)
    assert not math.isnan(served.outputs["c"].metrics.arrival_s or 0.0)
