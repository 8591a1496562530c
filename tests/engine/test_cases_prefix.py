"""Faults of other engines in the prefix cache, as cases.

Each test is the case with its numbers, then its kind: other block sizes, launches in
flight and steps a launch.
"""

from __future__ import annotations

import pytest

from tests.engine.harness import (
    BLOCK_SIZES,
    EVERY_KIND,
    EXECUTORS,
    JAX,
    Served,
    config,
)
from tests.serving import direct


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pc1_a_prompt_of_whole_blocks(executor: str) -> None:
    """PC1 (nano-vllm#144, vllm#11186): all cached left nothing to run; then a fix broke
    the chain."""
    served = Served(JAX, executor=EXECUTORS[executor])
    prompt = list(range(1, 9))
    outputs = [served.run(f"{i}", prompt, 5) for i in range(3)]
    assert [o.num_cached_tokens for o in outputs] == [0, 4, 4]
    assert [o.outputs[0].token_ids for o in outputs] == [[79, 70, 75, 57, 77]] * 3
    longer = served.run("longer", [*prompt, 79, 70, 75, 57, 77], 2)
    assert longer.num_cached_tokens == 12


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc1_of_every_kind(b: int, launches: int, steps: int) -> None:
    """PC1: prompts of k whole blocks; decode-filled blocks are found as well."""
    served = Served(config(b, launches, steps, num_blocks=64))
    for blocks in (1, 2, 5):
        prompt = [(7 * blocks + i) % 97 for i in range(blocks * b)]
        expected = direct(prompt, b + 1)
        for run in range(3):
            output = served.run(f"{blocks} {run}", prompt, b + 1)
            assert output.outputs[0].token_ids == expected
            assert output.num_cached_tokens == (b * (blocks - 1) if run else 0)
        longer = served.run(f"{blocks} longer", prompt + expected, 1)
        filled = blocks + 1  # the last block holds b outputs; it is full at the end
        if launches == 1:
            assert longer.num_cached_tokens == filled * b
        # With launches in flight its tokens are read after it was given up: a loss.
        assert longer.num_cached_tokens >= blocks * b


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc1_what_fitted_once_fits_again(b: int, launches: int, steps: int) -> None:
    """PC1, BA1: a request that fills every block, again with its blocks still cached.

    A fully cached prompt computes its last block anew beside the cached one; both must
    not be kept from the request that needs the room.
    """
    served = Served(config(b, launches, steps, num_blocks=4))
    prompt = [i % 97 for i in range(1, 2 * b + 1)]
    for run in range(3):
        output = served.run(f"{run}", prompt, 2 * b + 1)  # 4 b rows: all four blocks
        assert output.outputs[0].token_ids == direct(prompt, 2 * b + 1)
        assert output.outputs[0].finish_reason == "length"


def test_pc1_a_duplicate_pins_no_memory() -> None:
    """PC1: who computes cached blocks again holds no more than without a cache."""
    held = {}
    for caching in (False, True):
        served = Served(config(4, 1, 1, num_blocks=32, enable_prefix_caching=caching))
        prompt = list(range(1, 9))
        served.run("first", prompt, 17)
        served.add("again", prompt, 17)
        served.until(lambda: len(served.tokens("again")) == 16)  # noqa: B023
        held[caching] = 32 - served.free()
    assert held[False] == 6  # 8 + 15 rows
    assert held[True] <= held[False]


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc1_duplicates_and_a_reset(b: int, launches: int, steps: int) -> None:
    """PC1, PC7: two hold the same block twice, the cache is forgotten, a third names it
    anew; whoever ends first, no name is given to two blocks."""
    for ends_first, longest in ((0, 1), (1, 0), (2, 0), (0, 2)):
        served = Served(config(b, launches, steps, num_blocks=100, max_num_seqs=4))
        prompt = [i % 97 for i in range(1, 2 * b + 1)]
        lengths = [12] * 3
        lengths[ends_first], lengths[longest] = 6, 30
        for i, length in enumerate(lengths):
            if i == 2:
                served.engine.reset_prefix_cache()
            served.add(f"{i}", prompt, length)
            served.step()
        served.finish()
        for i, length in enumerate(lengths):
            assert served.tokens(f"{i}") == direct(prompt, length)
        for i in range(100 // (40 // b) + 2):  # and everything is evicted once
            served.run(f"fill {i}", [50 + i] * 40, 1)
        served.engine.reset_prefix_cache()
        assert served.stats()["free_blocks"] == 100


def test_pc3_hits_are_looked_up_when_the_request_runs() -> None:
    """PC3 (vllm#18957): a hit length remembered from a failed admission."""
    served = Served(config(4, 1, 1, num_blocks=4, max_num_seqs=1))
    served.run("X", range(1, 9), 1)
    assert served.stats()["idle_cached_blocks"] == 2
    served.add("H", range(50, 63), 4)
    served.add("R", range(1, 10), 1)
    served.finish()
    (admitted,) = served.of("admitted", "R")
    assert admitted.data["cached_tokens"] == 0
    assert admitted.data["context_tokens"] == 9
    assert served.tokens("R") == [0]
    assert served.tokens("H") == direct(range(50, 63), 4)


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc3_of_every_kind(b: int, launches: int, steps: int) -> None:
    """PC3: with a slot to spare too, where only memory makes R wait."""
    for slots in (1, 2):
        served = Served(config(b, launches, steps, num_blocks=4, max_num_seqs=slots))
        x = [i % 97 for i in range(1, 2 * b + 1)]
        served.run("X", x, 1)
        h = [(50 + i) % 97 for i in range(3 * b + 1)]
        served.add("H", h, b)
        served.add("R", [*x, 96], 1)
        served.finish()
        assert served.outputs["R"].num_cached_tokens == 0
        assert served.tokens("R") == direct([*x, 96], 1)
        assert served.tokens("H") == direct(h, b)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pc5_salts_share_nothing(executor: str) -> None:
    """PC5 (vllm#17045): the salted stranger sees exactly the cold time."""
    served = Served(JAX, executor=EXECUTORS[executor])
    cached, ttft_ms = [], []
    for i, salt in enumerate(["a", "a", "b", None, None]):
        output = served.run(f"{i}", range(1, 10), 1, cache_salt=salt)
        cached.append(output.num_cached_tokens)
        assert output.metrics.ttft_s is not None
        ttft_ms.append(1000 * output.metrics.ttft_s)
    assert cached == [0, 8, 0, 0, 8]
    assert ttft_ms == pytest.approx([19, 11, 19, 19, 11])
    with pytest.raises(ValueError, match="cache_salt='' must be a non-empty string"):
        served.add("empty", [1], 1, cache_salt="")


@pytest.mark.parametrize("b", BLOCK_SIZES)
def test_pc5_of_every_kind(b: int) -> None:
    """PC5: salts that look like tokens, like one another's heads, or like no salt."""
    served = Served(config(b, 2, 4, num_blocks=64))
    prompt = [(i * i) % 97 for i in range(2 * b + 1)]
    salts = [None, "a", "aa", "b", "None", "\x00", "a\x00", "weights", "0"]
    for repeat in range(2):
        for salt in salts:
            output = served.run(f"{salt} {repeat}", prompt, 1, cache_salt=salt)
            assert output.num_cached_tokens == 2 * b * repeat
            assert output.outputs[0].token_ids == direct(prompt, 1)
