"""Sampling, against the probabilities it must draw from, row by row.

Every call is of one of two (R, V), so that few programs compile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core import ADMIT_FIELDS, Request, random_seed
from jaxserve.device import processors, sampling
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan_builder import PlanBuilder
from tests.device.row_params import ROWS, VOCAB, rows, softmax
from tests.engine.harness import JAX

DRAWS = 4096  # rows of the distribution tests, each with a position of its own


WORDS = 6  # their vocabulary


@jax.jit
def sample(x, params):
    shape = JAX.shape(8)
    tables = processors.init(x.shape[1], shape)
    return sampling.sample(x, tables, params, len(x), shape)


row_keys = jax.jit(sampling.row_keys)


# Quantiles of chi-square at 1 - 1e-6 (tables), by degrees of freedom: a fixed seed that
# passes stays passing, and a wrong distribution of 4,096 draws is far beyond.
CHI_SQUARE = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9}


def draws(logits: list[float], **fields: object) -> np.ndarray:
    """How often each id was drawn in DRAWS independent draws."""
    padded = [*logits, *[-np.inf] * (WORDS - len(logits))]
    tiled = np.tile(np.array(padded, np.float32), (DRAWS, 1))
    tokens = np.asarray(sample(tiled, rows(DRAWS, **fields)))
    return np.bincount(tokens, minlength=WORDS)


def check_draws(counts: np.ndarray, expected: np.ndarray) -> None:
    """Nothing outside the support, and chi-square within it."""
    support = expected > 0
    assert counts[~support].sum() == 0
    if support.sum() == 1:
        return
    goal = expected[support] * DRAWS
    statistic = ((counts[support] - goal) ** 2 / goal).sum()
    assert statistic < CHI_SQUARE[int(support.sum()) - 1], (counts, goal)


LOGITS = [1.0, 2.0, 3.0, 0.0, 2.5]


def test_the_key_is_the_documented_one() -> None:
    seeds = [0, 1, 42, 2**31, 2**32 - 1, 42, 42, 42]
    index = [0, 0, 0, 0, 0, 3, 0, 3]
    position = [0, 9, 9, 9, 9, 9, 2**20, 2**20]
    params = rows(ROWS, seed=seeds, sample_index=index, position=position)
    expected = [
        jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(jax.random.key(s), i), p)
        )
        for s, i, p in zip(seeds, index, position, strict=True)
    ]
    got = jax.random.key_data(row_keys(params))
    np.testing.assert_array_equal(got, np.stack(expected))


def test_a_draw_is_argmax_of_logits_plus_the_keys_gumbel_noise() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 3
    temperature = np.array([0.5, 1, 2, 1, 1, 1, 4, 1], np.float32)
    params = rows(ROWS, seed=np.arange(ROWS) + 7, temperature=temperature)
    expected = []
    for row in range(ROWS):
        key = jax.random.fold_in(jax.random.key(row + 7), 0)
        noise = jax.random.gumbel(
            jax.random.fold_in(key, row), (VOCAB,), dtype=jnp.float32
        )
        expected.append(int(np.argmax(logits[row] / temperature[row] + noise)))
    assert np.asarray(sample(logits, params)).tolist() == expected


@pytest.mark.parametrize("used", [0, 1, 8, 9, 19, 20])
def test_rows_that_do_not_matter_change_no_token(used) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(20, VOCAB)).astype(np.float32) * 3
    params = rows(20, seed=np.arange(20), temperature=np.arange(20) % 3)
    expected = np.asarray(sample(logits, params))[:used]
    logits[used:] = np.nan
    shape = JAX.shape(8)
    choose = jax.jit(sampling.sample, static_argnums=4)
    actual = choose(logits, processors.init(VOCAB, shape), params, used, shape)
    np.testing.assert_array_equal(actual[:used], expected)


def test_the_admitted_seed_is_the_key_of_jax_random() -> None:
    """From SamplingParams to key data: any seed below 2**32 is jax.random.key(seed)."""
    for seed in (0, 42, 2**31 + 5, 2**32 - 1):
        builder = PlanBuilder(JAX.shape(8), 16)
        request = Request("r", 3, [1], SamplingParams(seed=seed), max_output_tokens=1)
        builder.admit.append((0, request))
        row = builder.build(engine_seed=9).admit[0]
        at = ADMIT_FIELDS.index("seed_high")
        assert ADMIT_FIELDS[at + 1] == "seed_low"
        np.testing.assert_array_equal(
            row[at : at + 2].view(np.uint32), jax.random.key_data(jax.random.key(seed))
        )
    # Larger and negative ones keep all of their 64 bits.
    assert random_seed(0, 0, 2**32 + 1) == 2**32 + 1
    assert random_seed(0, 0, -1) == 2**64 - 1
    # Unseeded: by the engine's seed and the order of submission.
    streams = {random_seed(e, i, None) for e in (0, 1) for i in range(50)}
    assert len(streams) == 100


def test_a_row_sees_neither_its_mates_nor_its_place() -> None:
    """SA1 (vllm#51226, mlx-lm#1580): the same row among any others, anywhere."""
    rng = np.random.default_rng(1)
    mine = rng.normal(size=VOCAB).astype(np.float32) * 2
    tokens = set()
    for trial in range(12):
        at = trial % ROWS
        logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 5
        logits[at] = mine
        params = rows(
            ROWS,
            seed=rng.integers(0, 2**63, ROWS),
            position=rng.integers(0, 99, ROWS),
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0], ROWS),
            top_k=rng.choice([0, 1, 5, 1000], ROWS),
            top_p=rng.choice([0.0, 0.5, 1.0], ROWS),
            min_p=rng.choice([0.0, 0.2], ROWS),
            barred=rng.integers(-1, VOCAB, (ROWS, 2)),
        )
        mate = {"seed": 42, "position": 11, "temperature": 1.0, "min_p": 0.0}
        mate |= {"top_k": 0, "top_p": 1.0, "barred": -1}
        key = np.array([0, mate.pop("seed")], np.uint32)
        fields = {name: np.array(getattr(params, name)) for name in mate}
        for name, value in mate.items():
            fields[name][at] = value
        keys = np.array(params.key)
        keys[at] = key
        params = params._replace(key=keys, **fields)
        tokens.add(int(sample(logits, params)[at]))
    noise = jax.random.gumbel(
        jax.random.fold_in(jax.random.fold_in(jax.random.key(42), 0), 11), (VOCAB,)
    )
    assert tokens == {int(np.argmax(mine + noise))}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_the_logits(temperature: float) -> None:
    counts = draws(LOGITS, temperature=temperature, seed=5)
    expected = np.zeros(WORDS)
    expected[:5] = softmax(np.array(LOGITS) / temperature)
    check_draws(counts, expected)


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        # softmax(LOGITS) = .0627 .1703 .4631 .0231 .2809; of the best three .5065 .3072
        # .1863.
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [2, 4]),
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 1000}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [2]),
        ({"top_p": 0.46}, [2]),
        ({"top_p": 0.5}, [2, 4]),
        ({"top_p": 0.8}, [1, 2, 4]),
        ({"top_p": 0.97}, [0, 1, 2, 4]),
        ({"min_p": 0.5}, [2, 4]),
        ({"min_p": 0.1}, [0, 1, 2, 4]),
        ({"min_p": 1.0}, [2]),
        # top_p is of what top_k left: 0.5 of the best three is one token.
        ({"top_k": 3, "top_p": 0.5}, [2]),
        ({"top_k": 3, "top_p": 0.9}, [1, 2, 4]),
        ({"top_k": 4, "min_p": 0.3}, [1, 2, 4]),
        # Temperature first: at 4 the distribution is flat enough for top_p to keep all.
        ({"top_p": 0.8, "temperature": 4.0}, [0, 1, 2, 4]),
    ],
)
def test_what_is_cut_off_is_never_drawn_and_the_rest_in_proportion(
    fields: dict, ids: list[int]
) -> None:
    scaled = np.array(LOGITS) / fields.get("temperature", 1.0)
    expected = np.zeros(WORDS)
    expected[ids] = softmax(scaled[ids])
    check_draws(draws(LOGITS, seed=11, **fields), expected)


def test_barred_ids_are_never_drawn_by_any_row() -> None:
    barred = np.tile(np.array([2, -1], np.int32), (DRAWS, 1))
    barred[DRAWS // 2 :] = [4, 2]
    expected = np.zeros(WORDS)
    for ids in ([0, 1, 3, 4], [0, 1, 3]):
        expected[ids] += softmax(np.array(LOGITS)[ids]) / 2
    counts = draws(LOGITS, barred=barred, seed=3)
    check_draws(counts, expected)
    greedy = draws(LOGITS, barred=barred, temperature=0.0)
    assert greedy.tolist() == [0, DRAWS // 2, 0, 0, DRAWS // 2, 0]


def test_temperature_zero_beside_a_random_row() -> None:
    """SA3 (vllm#2937, #1623): a greedy row leaves its mates' probabilities alone."""
    temperature = np.ones(DRAWS, np.float32)
    temperature[::4] = 0
    tiled = np.tile(np.array([1, 2, 3, *[-np.inf] * 3], np.float32), (DRAWS, 1))
    tokens = np.asarray(sample(tiled, rows(DRAWS, temperature=temperature, seed=1)))
    assert (tokens[::4] == 2).all()
    counts = np.bincount(tokens[temperature > 0], minlength=WORDS)
    share = counts / counts.sum()
    # 3,072 draws: the standard deviation of a share is at most 0.009.
    np.testing.assert_allclose(share[:3], [0.0900, 0.2447, 0.6652], atol=0.045)
    assert not counts[3:].any()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-40])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """SA3: no division by a number so small that it gives inf or NaN."""
    assert SamplingParams(temperature=temperature).greedy
    builder = PlanBuilder(JAX.shape(8), 16)
    params = SamplingParams(temperature=temperature)
    request = Request("r", 0, [1], params, max_output_tokens=1)
    builder.admit.append((0, request))
    bits = builder.build(0).admit[0][ADMIT_FIELDS.index("temperature")]
    given = np.array(bits, np.int32).view(np.float32)
    assert (draws([1, 2, 3], temperature=given) == [0, 0, DRAWS, 0, 0, 0]).all()


def test_the_smallest_random_temperature_is_finite() -> None:
    """1e-5 is not greedy: the row is divided, and must not come out inf or NaN."""
    assert not SamplingParams(temperature=1e-5).greedy
    for logits in ([1, 2, 3], [1e4, -1e4, 2e4], [0, 100, 9]):
        best = int(np.argmax(logits))
        assert draws(logits, temperature=1e-5)[best] == DRAWS
        assert draws(logits, temperature=1e-5, top_p=0.9)[best] == DRAWS


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 0}, {"top_k": 1000}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": -1}],
)
def test_extremes_leave_the_likeliest(fields: dict) -> None:
    """SA3 (gemma#585, lattice#225): top_k=0 is not "token 0", nor top_p=0 none."""
    assert draws([0, 100, 9], **fields)[1] == DRAWS


@pytest.mark.parametrize("vocab", [97, 128, 1024])
def test_argmax_takes_the_first_of_equals(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    x = rng.integers(0, 4, size=(50, vocab)).astype(np.float32)  # many equals
    x[0] = -np.inf
    x[1] = 3.0
    expected = np.argmax(x, axis=-1)  # numpy's is the first by definition
    assert np.array_equal(sampling.argmax(jnp.asarray(x)), expected)
