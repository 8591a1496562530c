"""tunix's rollout engine against the real package, in a cluster of its own.

Runs where google-tunix is installed: docs/rl.md says how.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed")

import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.rollout import base_rollout

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.adapters.tunix import JaxserveRollout
from jaxserve.models import load
from pallas_kernels import cpu
from tests.models.dense_oracle import llama_logprobs

TINY = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "tiny_llama"
CONFIG = EngineConfig(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    block_size=4,
    max_logprobs=0,
)
PROMPTS = ["five words are a prompt", "two words", "and so on, and on"]

# tunix asks JAX for promotions that this suite forbids elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


class Words:
    """Ids of words, by their letters; 0 pads, 1 begins and 2 ends."""

    def encode(self, text: str) -> list[int]:
        return [3 + sum(map(ord, word)) % 60 for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


class Actor(nnx.Module):
    """The decoder's parameters as an nnx module."""

    def __init__(self, params):
        self.embed = nnx.Param(params["embed"])
        self.head = nnx.Param(params["head"])
        self.norm = nnx.Param(params["norm"])
        self.layers = nnx.Dict(
            {name: nnx.Param(stack) for name, stack in params["layers"].items()}
        )


@pytest.fixture(scope="module")
def tiny():
    """A decoder and its weights in the plain layout."""
    with pytest.MonkeyPatch.context() as off:
        off.setattr(cpu, "unavailable", lambda: "the weights are to be plain")
        return load(TINY, "float32")[:2]


def engine(tiny, params=None) -> JaxserveRollout:
    model, first = tiny
    actor = Actor(first if params is None else params)
    return JaxserveRollout(actor, Words(), model=model, config=CONFIG)


def asked(**fields) -> base_rollout.RolloutConfig:
    fields = {"max_tokens_to_generate": 6, "max_prompt_length": 8} | fields
    return base_rollout.RolloutConfig(return_logprobs=True, **fields)


def checked(tiny, params, output) -> None:
    """Its log-probabilities are the model's, by a forward pass in numpy."""
    for prompt, tokens, logprobs in zip(
        PROMPTS, output.tokens, output.logprobs, strict=True
    ):
        ids = [1, *Words().encode(prompt)]
        every = llama_logprobs(tiny[0].config, params, [*ids, *tokens])
        wanted = [every[len(ids) - 1 + i, token] for i, token in enumerate(tokens)]
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


def test_outputs_are_the_engines_in_tunix_form(tiny) -> None:
    model, params = tiny
    output = engine(tiny).generate(PROMPTS, asked(temperature=0.0))
    greedy = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[2])
    direct = Engine(model, params, CONFIG)
    prompts = [[1, *Words().encode(prompt)] for prompt in PROMPTS]
    for i, prompt in enumerate(prompts):
        direct.add_request(str(i), prompt, greedy)
    done = {}
    while direct.has_unfinished_requests():
        done |= {out.request_id: out.outputs[0].token_ids for out in direct.step()}
    assert [row.tolist() for row in output.tokens] == [done[i] for i in "012"]
    assert output.text == [Words().decode(row) for row in output.tokens]
    assert output.logits is None
    padded = [[0] * (8 - len(prompt)) + prompt for prompt in prompts]
    assert output.left_padded_prompt_tokens.tolist() == padded
    checked(tiny, params, output)


def test_logps_of_given_completions_are_those_of_a_forward_pass(tiny) -> None:
    model, params = tiny
    prompts = np.array([[0, 0, 1, 5], [1, 0, 7, 0], [0, 0, 0, 9]], np.int32)
    completions = np.array([[3, 2, 0], [8, 9, 4], [2, 0, 0]], np.int32)
    found = engine(tiny).get_per_token_logps(
        jax.numpy.asarray(prompts), jax.numpy.asarray(completions)
    )
    for row, (prompt, answer) in enumerate(
        [([1, 5], [3, 2, 0]), ([1, 0, 7, 0], [8, 9, 4]), ([9], [2, 0, 0])]
    ):
        every = llama_logprobs(model.config, params, [*prompt, *answer])
        wanted = [every[len(prompt) - 1 + i, token] for i, token in enumerate(answer)]
        np.testing.assert_allclose(found[row], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "more", "fields"),
    [
        ({"top_k": None, "top_p": None}, {}, {"top_k": 0, "top_p": 1.0}),
        ({"top_k": 3, "top_p": 0.5}, {}, {"top_k": 3, "top_p": 0.5}),
        ({}, {}, {"stop_ids": (2,), "ignore_eos": False, "seed": None}),
        ({"eos_tokens": [4, 5]}, {}, {"stop_ids": (4, 5), "ignore_eos": True}),
        ({"seed": 7}, {}, {"seed": 7}),
        ({"seed": jax.random.PRNGKey(7)}, {}, {"seed": 7 << 32}),
        ({"seed": jax.random.key(7)}, {}, {"seed": 7 << 32}),
        ({}, {"min_p": 0.2}, {"min_p": 0.2, "temperature": 0.9, "max_tokens": 6}),
    ],
)
def test_every_field_of_the_config_is_honoured(tiny, config, more, fields) -> None:
    sampling = engine(tiny)._sampling(asked(**config), more)
    assert {name: getattr(sampling, name) for name in fields} == fields


def test_a_prompt_longer_than_asked_widens_the_array(tiny) -> None:
    output = engine(tiny).generate(PROMPTS, asked(max_prompt_length=4))
    assert output.left_padded_prompt_tokens.shape == (3, 8)


def test_a_hook_maps_parameters_of_other_names(tiny) -> None:
    model, params = tiny
    actor = nnx.Dict(everything=Actor(params))
    made = JaxserveRollout(
        actor,
        Words(),
        model=model,
        config=CONFIG,
        to_params=lambda state: nnx.to_pure_dict(state)["everything"],
    )
    checked(tiny, params, made.generate(PROMPTS, asked()))


def test_a_cluster_samples_with_the_weights_that_it_trains(tiny) -> None:
    model, params = tiny
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        cluster = rl_cluster.RLCluster(
            actor=Actor(params),
            tokenizer=Words(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh={
                    role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)
                },
                rollout_engine=functools.partial(
                    JaxserveRollout, model=model, config=CONFIG
                ),
                offload_to_cpu=False,
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.sgd(1e-3), eval_every_n_steps=10, max_steps=10
                ),
                rollout_config=asked(),
            ),
        )
        rollout = cluster.rollout
        assert isinstance(rollout, JaxserveRollout)
        trained, stats = cluster.actor_trainer.model, rollout.rollouts.engine.stats
        state, compiles = nnx.state(trained, nnx.Param), []
        for update in range(4):
            checked(tiny, nnx.to_pure_dict(state), cluster.generate(PROMPTS))
            assert rollout.rollouts.engine.weight_version == update
            compiles.append(stats()["compiles"])
            state = jax.tree.map(lambda x: x * 1.1, state)
            nnx.update(trained, state)
            cluster.sync_weights()  # forbids transfers between host and device
    # The first update forgets cached blocks, by a launch that nothing else had needed.
    assert compiles[1] <= compiles[0] + 1 and len(set(compiles[1:])) == 1
