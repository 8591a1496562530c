"""The decoder without a cache: the logits of transformers, and their gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import load
from jaxserve.models.random_params import random_params
from pallas_kernels import cpu
from tests.models import tiny_families
from tests.models.tiny_families import VARIANTS, max_model_len, reference


@functools.cache
def _loaded(variant: str, folder, kernels_off: str | None):
    del kernels_off
    directory = tiny_families.write(folder / variant, variant)
    return load(directory, "float32", max_model_len(variant))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    return lambda variant: _loaded(variant, folder, cpu.unavailable())


def batch(variant: str) -> tuple[np.ndarray, list[int]]:
    """The reference's sequences, padded on the right with what must not count."""
    rows = [[*row.prompt, *row.tokens[:-1]] for row in reference(variant)]
    tokens = np.full((len(rows), max(map(len, rows)) + 3), 5, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, [len(ids) for ids in rows]


def every(tokens: np.ndarray) -> jax.Array:
    """All positions."""
    return jnp.tile(jnp.arange(tokens.shape[1], dtype=jnp.int32), (len(tokens), 1))


CASES = [(variant, "xla") for variant in VARIANTS]
CASES += [("gemma3_soft_caps", "kernels"), ("qwen2", "kernels")]


@pytest.mark.parametrize(("variant", "arithmetic"), CASES)
def test_logits_are_those_of_transformers(
    variant, arithmetic, loaded, monkeypatch
) -> None:
    if arithmetic == "xla":
        monkeypatch.setattr(cpu, "unavailable", lambda: "this test is of XLA")
    decoder, params, _ = loaded(variant)
    tokens, lengths = batch(variant)
    logits = decoder.sequence_logits(params, jnp.asarray(tokens), every(tokens))
    rows = zip(np.asarray(logits), lengths, reference(variant), strict=True)
    for row, length, wanted in rows:
        np.testing.assert_allclose(row[:length], wanted.logits, atol=1e-4, rtol=0)


def test_only_the_positions_asked_for(loaded) -> None:
    decoder, params, _ = loaded("mistral")
    rows = batch("mistral")[0]
    tokens = jnp.asarray(rows)
    at = jnp.asarray([[7, 0, 3]] * len(tokens), jnp.int32)
    whole = np.asarray(
        decoder.sequence_logits(params, tokens, every(batch("mistral")[0]))
    )
    some = np.asarray(decoder.sequence_logits(params, tokens, at))
    np.testing.assert_allclose(some, whole[:, [7, 0, 3]], atol=1e-5)


@pytest.mark.parametrize("variant", ["gemma3_soft_caps", "qwen2", "smollm3"])
def test_random_weights_are_in_the_plain_layout(variant, loaded, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: "the weights are to be plain")
    decoder, params, _ = loaded(variant)
    drawn = random_params(decoder.config, jax.random.key(0))
    found, wanted = (
        jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (drawn, params)
    )
    assert found == wanted


# Windows, soft caps and all norms; biases. Among them every kind of weight.
@pytest.mark.parametrize("variant", ["gemma3_soft_caps", "qwen2"])
def test_the_gradient_is_the_slope(variant, loaded, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: "a gradient needs plain weights")
    decoder, params, _ = loaded(variant)
    tokens = batch(variant)[0]

    @jax.jit
    def loss(params) -> jax.Array:
        logs = jax.nn.log_softmax(
            decoder.sequence_logits(params, tokens, every(tokens))
        )
        return logs[:, ::3, ::7].mean()

    gradient = jax.grad(loss)(params)
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    for i, (path, slope) in enumerate(jax.tree_util.tree_leaves_with_path(gradient)):
        size = np.abs(leaves[i]).max()
        towards = size * rng.standard_normal(slope.shape, np.float32)

        def moved(by: float, i=i, towards=towards) -> float:
            new = [*leaves[:i], leaves[i] + by * towards, *leaves[i + 1 :]]
            return float(loss(jax.tree.unflatten(structure, new)))

        # Central differences, extrapolated (Richardson): float32 bears no small step.
        wide, near = ((moved(h) - moved(-h)) / (2 * h) for h in (1e-2, 5e-3))
        wanted = (4 * near - wide) / 3
        found = float(np.vdot(slope, towards))
        assert found == pytest.approx(wanted, rel=0.05, abs=2e-4), path
        assert np.abs(np.asarray(slope)).max() > 0, path
