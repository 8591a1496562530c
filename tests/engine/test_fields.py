"""Every field of `SamplingParams` does what it says, and none is dropped (contract 8).

On a model whose logits are given, so that each output is worked out by hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve import Engine, SamplingParams
from tests.engine.fixed_logits import CONFIG, MODEL, VOCAB, Fixed
from tests.engine.harness import Served, config
from tests.processing import Numbers
from tests.serving import direct, greedy

STEPS = pytest.mark.parametrize(("steps", "launches"), [(1, 1), (1, 3), (4, 2)])
TWO_BEST = [0, 1, 3, 2, -4, 2.5]  # 2 > 5 (a stop id) > 3 > 1 > 0 > 4

# For each field: parameters under which it matters, and what it is set to.
MATTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n": ({"temperature": 9.0, "seed": 1}, {"n": 2}),
    "temperature": ({"temperature": 0.0, "seed": 1}, {"temperature": 4.0}),
    "top_k": ({"temperature": 9.0, "seed": 1}, {"top_k": 1}),
    "top_p": ({"temperature": 9.0, "seed": 1}, {"top_p": 0.1}),
    "min_p": ({"temperature": 9.0, "seed": 1}, {"min_p": 1.0}),
    "seed": ({"temperature": 9.0, "seed": 1}, {"seed": 2}),
    "max_tokens": ({}, {"max_tokens": 7}),
    "min_tokens": ({"logit_bias": {5: 9}}, {"min_tokens": 2}),
    "stop": ({}, {"stop": "2 2"}),
    "stop_token_ids": ({}, {"stop_token_ids": [2]}),
    "ignore_eos": ({"logit_bias": {5: 9}}, {"ignore_eos": True}),
    "output_kind": ({}, {"output_kind": "final_only"}),
    "logprobs": ({}, {"logprobs": 1}),
    "prompt_logprobs": ({}, {"prompt_logprobs": 1}),
    "presence_penalty": ({}, {"presence_penalty": 2.0}),
    "frequency_penalty": ({}, {"frequency_penalty": 2.0}),
    "repetition_penalty": ({}, {"repetition_penalty": 9.0}),
    "logit_bias": ({}, {"logit_bias": {3: 2.0}}),
    "allowed_token_ids": ({}, {"allowed_token_ids": [0, 3]}),
    "bad_words": ({}, {"bad_words": ["2"]}),
    "detokenize": ({}, {"detokenize": False}),
    "skip_special_tokens": (
        {"logit_bias": {5: 9}, "ignore_eos": True},
        {"skip_special_tokens": False},
    ),
    "include_stop_str_in_output": (
        {"stop": "2 2"},
        {"include_stop_str_in_output": True},
    ),
    "skip_reading_prefix_cache": ({}, {"skip_reading_prefix_cache": True}),
}
REFUSED = {"spaces_between_special_tokens"}  # but for its default


@pytest.fixture(scope="module")
def fixed() -> Fixed:
    made = Fixed(TWO_BEST, tokenizer=Numbers())
    made.run(SamplingParams(temperature=0.0, max_tokens=1))  # the prompt is cached now
    return made


def test_every_field_is_here() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == MATTERS.keys() | REFUSED


@pytest.mark.parametrize("field", MATTERS)
def test_a_field_that_is_ignored_is_noticed(fixed: Fixed, field: str) -> None:
    """LI7 (llama.cpp#7381, mlx-vlm#2112): fields accepted but not passed on."""
    base, more = MATTERS[field]
    assert field in more
    told = []
    for fields in (base, base | more):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **fields})
        (output,) = fixed.serve(params)
        told.append((dataclasses.replace(output, metrics=None), fixed.told))  # type: ignore[arg-type]
    assert told[0] != told[1]


def test_every_field_reaches_the_request() -> None:
    """LI7: a round trip, and the caller's collections stay the caller's."""
    values = {field: more[field] for field, (_, more) in MATTERS.items()}
    values |= {"stop": ["x"], "max_tokens": 9, "temperature": 0.5}
    params = SamplingParams(**(values | {"detokenize": True}))
    served = Served(config(4, 1, 1, max_logprobs=1), tokenizer=Numbers())
    served.engine.add_request("r", [1], params)
    got = served.engine._clients.live["r"].lives[0].request.params
    for field, value in values.items():
        kept = getattr(got, field)
        if field == "logit_bias":
            kept = dict(kept)
        elif isinstance(value, list):
            kept = list(kept)
        elif field == "detokenize":
            value = True
        assert kept == value, field
    assert dataclasses.replace(params, seed=3).logit_bias == params.logit_bias


# Logits processors, by hand -----------------------------------------------------------


def tokens(logits: list[float], count: int, schedule=(1, 1), **fields) -> list[int]:
    """Greedy output on given logits, after a prompt of 1s."""
    steps, launches = schedule
    engine = Fixed(logits, steps, launches, Numbers())
    params = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, **fields
    )
    return engine.run(params)[0].token_ids


@STEPS
@pytest.mark.parametrize(
    ("logits", "fields", "expected"),
    [
        ([1, 2, 3], {"logit_bias": {0: 2.5}}, [0, 0]),
        ([1, 2, 3], {"logit_bias": {0: 1.5, 7: 100}}, [2, 2]),  # -inf stays so
        ([1, 2, 3], {"logit_bias": {2: -100, 1: -0.5}}, [1, 1]),
        ([1, 2, 3], {"allowed_token_ids": [1, 0]}, [1, 1]),
        ([1, 2, 3], {"allowed_token_ids": [0]}, [0, 0]),
        ([1, 2, 3], {"bad_words": ["2"]}, [1, 1]),
        ([1, 2, 3], {"bad_words": ["2", "1"]}, [0, 0]),
        # Never 2 after 2.
        ([1, 2, 3], {"bad_words": ["2 2"]}, [2, 1, 2, 1]),
        # The prompt's last token is 1, but a word must lie in the output.
        ([1, 2, 3], {"bad_words": ["1 2"]}, [2, 2]),
        ([1, 2, 3], {"bad_words": ["2 2", "2 1 2"]}, [2, 1, 1, 2, 1, 1]),
        ([1, 2, 3], {"bad_words": [" ".join("2" * 16)]}, [*[2] * 15, 1, 2]),
        # Output alone: the prompt's 1 is not penalized. Then 1.5, 2, 1; 1.5, 0.5, 1.
        ([1, 2, 3], {"presence_penalty": 1.5}, [2, 1, 2, 2]),
        ([1, 3, 2], {"presence_penalty": 2.0}, [1, 2, 0, 1]),
        # 3; 2.25; 1.5 < 2; 1.5 > 1.25; 0.75 < 1.25; 0.75, 0.5 < 1.
        ([1, 2, 3], {"frequency_penalty": 0.75}, [2, 2, 1, 2, 1, 0]),
        # The 1 that was drawn gains on the likelier 0 that was not.
        (
            [2.25, 2, 2.5],
            {"bad_words": ["2 2", "2 0", "1 2"], "frequency_penalty": -2.0},
            [2, 1, 1, 1],
        ),
        # The prompt too: 1 has 3 / 2 from the first token on.
        ([1, 3, 2], {"repetition_penalty": 2.0}, [2, 1, 1]),
        ([1, 2, 3], {"repetition_penalty": 4.0}, [2, 0, 2, 2]),
        # Negative ones are multiplied: -2 is -10, then -1 is -5.
        ([-1, -2, -4], {"repetition_penalty": 5.0}, [0, 2, 0, 0]),
        ([1.5, 1.25, 2], {"repetition_penalty": 0.5}, [1, 1]),
        # Biases first: (2 + 2) / 2 < 2.5; the other way round 2 / 2 + 2 > 2.5.
        (
            [1, 2, 2.5],
            {"logit_bias": {1: 2}, "repetition_penalty": 2.0},
            [2, 1],
        ),
        # Repetition first: 3.25 / 2 - 0.5 < 1.25; else (3.25 - 0.5) / 2 > 1.25.
        (
            [-9, 2.5, 3.25, 1.0],
            {"repetition_penalty": 2.0, "presence_penalty": 0.5},
            [2, 1, 2],
        ),
        # All at once: 2 barred, 1 -> 2 - 2 after its first, 0 -> 1 + 0.5.
        (
            [1, 2, 3, 9],
            {
                "allowed_token_ids": [0, 1, 2],
                "bad_words": ["2"],
                "logit_bias": {0: 0.5},
                "frequency_penalty": 2.0,
            },
            [1, 0, 1, 0],
        ),
    ],
)
def test_outputs_by_hand(logits, fields, expected, steps: int, launches: int) -> None:
    assert tokens(logits, len(expected), (steps, launches), **fields) == expected


def test_a_slot_keeps_nothing_of_its_last_request(fixed: Fixed) -> None:
    """Four slots: plain requests after ones with every table, and beside them."""
    heavy = SamplingParams(
        temperature=0.0,
        max_tokens=3,
        allowed_token_ids=[0, 4],
        logit_bias={0: -100},
        bad_words=["4"],
        repetition_penalty=5.0,
    )
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    done = fixed.run(heavy, plain, heavy, plain, *[plain] * 8, heavy)
    assert [c.token_ids for c in done] == [
        [0, 0, 0] if i in (0, 2, 12) else [2, 2, 2] for i in range(13)
    ]


def test_logprobs_are_of_the_distribution_before_all_of_it() -> None:
    engine = Fixed([9, 8, 7, 6])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        logprobs=1,
        allowed_token_ids=[3, 2],
        logit_bias={3: 5.0},
        presence_penalty=2.0,
    )
    (done,) = engine.run(params)
    assert done.token_ids == [3, 3, 3, 3]
    for row in done.logprobs:
        assert {i: e.rank for i, e in row.items()} == {0: 1, 3: 4}
        assert row[3].logprob == pytest.approx(-3.4402, abs=5e-5)
    assert done.cumulative_logprob == pytest.approx(4 * -3.4402, abs=2e-4)
    (plain,) = engine.run(dataclasses.replace(params, logprobs=None))
    assert plain.cumulative_logprob is None


def test_drawn_tokens_follow_the_processed_distribution() -> None:
    """A bias of log 3 makes a token three times as likely; two are excluded."""
    engine = Fixed([0, 0, 0, 0])
    params = SamplingParams(
        max_tokens=38, logit_bias={1: float(np.log(3))}, allowed_token_ids=[1, 2]
    )
    runs = [dataclasses.replace(params, seed=seed) for seed in range(40)]
    drawn = [token for done in engine.run(*runs) for token in done.token_ids]
    assert set(drawn) == {1, 2}
    # 1,520 draws: the standard deviation of a share of 0.75 is 0.011.
    assert np.mean(np.array(drawn) == 1) == pytest.approx(0.75, abs=0.055)


# Prompt log-probabilities -------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("prompt", [1, 2, 4, 5, 10])
def test_prompt_logprobs_by_hand(prompt: int, steps: int, launches: int) -> None:
    """Chunks of at most 4: the token after a chunk is in none of the launch."""
    engine = Fixed([9, 8, 7, 6], steps, launches)
    asked = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    plain = SamplingParams(temperature=0.0, max_tokens=2)
    for _ in range(2):  # the second finds the prompt cached
        outputs = engine.serve(asked, plain, asked, prompt=prompt)
        assert outputs[1].prompt_logprobs is None
        for output in (outputs[0], outputs[2]):
            assert output.num_cached_tokens == 0
            assert output.prompt_logprobs is not None
            first, *rows = output.prompt_logprobs
            assert first is None and len(rows) == prompt - 1
            for row in rows:
                assert row is not None and list(row) == [0, 1]
                assert [e.rank for e in row.values()] == [1, 2]
                assert row[0].logprob == pytest.approx(-0.4402, abs=5e-5)
                assert row[1].logprob == pytest.approx(-1.4402, abs=5e-5)


def test_prompt_logprobs_0_tells_of_the_prompts_tokens_alone() -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = Fixed([9, 8, 7, 6]).serve(asked)
    assert output.prompt_logprobs is not None
    assert [list(row or ()) for row in output.prompt_logprobs] == [[], *[[1]] * 9]


# Text ---------------------------------------------------------------------------------


def text(fixed: Fixed, **fields) -> str:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **fields})
    return fixed.run(params)[0].text


def test_text_fields_by_hand(fixed: Fixed) -> None:
    assert text(fixed) == "2 2 2 2 2 "
    assert text(fixed, detokenize=False) == ""
    assert text(fixed, stop="2 2") == ""
    assert text(fixed, stop="2 2", include_stop_str_in_output=True) == "2 2"
    assert text(fixed, stop="2 2", min_tokens=4) == "2 2 "
    # An id that stops is text only if that is asked for.
    stops = {"stop_token_ids": [2]}
    assert text(fixed, **stops) == ""
    assert text(fixed, **stops, include_stop_str_in_output=True) == "2 "
    special = {"logit_bias": {5: 9}}
    assert text(fixed, **special) == ""
    assert text(fixed, **special, skip_special_tokens=False) == ""
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text(fixed, **special, **shown) == "5 "
    assert text(fixed, **special, ignore_eos=True) == ""
    both = text(fixed, **special, ignore_eos=True, skip_special_tokens=False)
    assert both == "5 5 5 5 5 "


# The cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_skip_reading_prefix_cache_reads_none_and_writes(caching: bool) -> None:
    served = Served(config(4, 1, 1, enable_prefix_caching=caching))
    prompt = list(range(20, 33))

    def run(name: str, **fields) -> int:
        output = served.run(name, prompt, 4, **fields)
        assert served.tokens(name) == direct(prompt, 4)
        return output.num_cached_tokens

    assert run("first", skip_reading_prefix_cache=True) == 0
    assert run("second", skip_reading_prefix_cache=True) == 0
    before = served.stats()["prefix_queries_tokens"]
    assert run("third") == 12 * caching
    assert run("fourth", skip_reading_prefix_cache=False) == 12 * caching
    assert run("fifth", prompt_logprobs=0) == 0
    assert served.stats()["prefix_queries_tokens"] - before == 2 * len(prompt)
    # It computed the blocks again, beside those that are cached or in their place.
    assert served.free() == served.stats()["num_blocks"]


# What cannot be served ----------------------------------------------------------------

NARROW = dataclasses.replace(CONFIG, max_logit_bias=2, max_bad_words=1)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias has the token id 8.*\[0, 8\)"),
        ({"allowed_token_ids": [0, 9]}, "allowed_token_ids has the token id 9"),
        ({"logit_bias": {0: 1, 1: 1, 2: 1}}, "has 3 tokens.*max_logit_bias=2.*raise"),
        ({"bad_words": ["1 2", "2 1"]}, "come to 2 sequences.*max_bad_words=1.*raise"),
        ({"bad_words": [" "]}, "bad_words=' ' must come to a token"),
        ({"bad_words": [" ".join("1" * 17)]}, "comes to 17 tokens.*not exceed 16"),
        (
            {"allowed_token_ids": [1], "bad_words": ["1"]},
            r"allowed_token_ids=\[1\] leaves no token.*bad_words=\['1'\]",
        ),
        ({"allowed_token_ids": [1], "bad_words": ["2 1"]}, "leaves no token"),
        (
            {"allowed_token_ids": [5, 6], "min_tokens": 1},
            r"leaves no token.*min_tokens=1, the stop ids \[5, 6\]",
        ),
        ({"prompt_logprobs": 4}, "prompt_logprobs=4 must not exceed max_logprobs=3"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, complaint: str) -> None:
    engine = Engine(MODEL, {}, NARROW, tokenizer=Numbers())
    with pytest.raises(ValueError, match=complaint):
        engine.add_request("r", [1], SamplingParams(max_tokens=4, **fields))
    assert engine.holds_nothing()


def test_text_fields_need_a_tokenizer() -> None:
    engine = Fixed([1, 2, 3]).engine
    for fields in ({"bad_words": ["a"]}, {"stop": "a"}):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            engine.add_request("r", [1], SamplingParams(**fields))

    class Bare:
        def decode(self, ids):
            return ""

    engine = Fixed([1, 2, 3], tokenizer=Bare()).engine
    with pytest.raises(ValueError, match="skip_special_tokens=False needs a tokenizer"):
        engine.add_request("r", [1], SamplingParams(skip_special_tokens=False))
    with pytest.raises(ValueError, match="bad_words=.'a'. needs a tokenizer"):
        engine.add_request("r", [1], SamplingParams(bad_words=["a"]))
    assert engine.holds_nothing()


def test_rules_of_two_fields_name_both() -> None:
    with pytest.raises(ValueError, match="detokenize=False .*stop=.'a'"):
        SamplingParams(detokenize=False, stop="a")
    with pytest.raises(ValueError, match="skip_reading_prefix_cache=.*prompt_logprobs"):
        SamplingParams(skip_reading_prefix_cache=False, prompt_logprobs=0)
    assert greedy(1).reads_cache and not greedy(1, prompt_logprobs=0).reads_cache
