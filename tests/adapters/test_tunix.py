"""tunix's rollout engine against the real package, in a cluster of its own.

Runs where google-tunix is installed: docs/rl.md says how.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed")

import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
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
STEPS = 15  # of a learner
PROMPTS = ["five words are a prompt", "two words", "and so on, and on"]

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


@pytest.fixture
def promotions():
    """tunix's own, which this suite forbids elsewhere; its threads have them too."""
    names = ("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, ("allow", "standard"), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


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


def cluster(tiny, actor, optimizer, **models) -> rl_cluster.RLCluster:
    """tunix's cluster on one device, which samples with jaxserve."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    places = (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role: mesh for role in places},
        rollout_engine=functools.partial(JaxserveRollout, model=tiny[0], config=CONFIG),
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=100, max_steps=100
        ),
        rollout_config=asked(),
    )
    return rl_cluster.RLCluster(
        actor=actor, tokenizer=Words(), cluster_config=config, **models
    )


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


class Scaled(Actor):
    """An actor of which tunix trains a part."""

    def __init__(self, params):
        super().__init__(params)
        self.scale = nnx.LoRAParam(jnp.ones(()))


def test_a_part_of_the_weights_is_enough_to_send(tiny) -> None:
    model, params = tiny

    def merged(state):
        plain = nnx.to_pure_dict(state)
        return plain | {"head": plain["head"] * plain.pop("scale")}

    made = JaxserveRollout(
        Scaled(params), Words(), model=model, config=CONFIG, to_params=merged
    )
    checked(tiny, params, made.generate(PROMPTS, asked()))
    trained = Scaled(params)
    trained.scale[...] = jnp.float32(1.5)
    made.update_params(nnx.state(trained, nnx.LoRAParam), (nnx.LoRAParam,))
    wanted = params | {"head": params["head"] * 1.5}
    checked(tiny, wanted, made.generate(PROMPTS, asked()))
    assert made.rollouts.engine.weight_version == 1


class Trained(Actor):
    """An actor that tunix can call: prompts are padded on the left."""

    def __init__(self, model, params):
        super().__init__(params)
        self.decoder = model

    def __call__(self, tokens, positions=None, cache=None, attention_mask=None):
        at = jnp.arange(tokens.shape[1])[None, :]
        pads = (jnp.cumsum(tokens != 0, axis=1) == 0).sum(axis=1, keepdims=True)
        left = jnp.take_along_axis(tokens, (at + pads) % tokens.shape[1], axis=1)
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        places = jnp.broadcast_to(at, tokens.shape)
        logits = self.decoder.sequence_logits(params, left, places)
        back = (at - pads) % tokens.shape[1]
        return jnp.take_along_axis(logits, back[:, :, None], axis=1), cache


@pytest.mark.usefixtures("promotions")
def test_a_learner_of_tunix_learns(tiny) -> None:
    """GRPO with a reward for odd ids; the actor is shared, so weights are not sent."""
    model, params = tiny
    means = []

    def odd(prompts, completions, **kwargs):
        shares = [
            float(np.mean([int(word) % 2 for word in text.split()] or [0]))
            for text in completions
        ]
        means.append(np.mean(shares))
        return shares

    made = cluster(
        tiny,
        Trained(model, params),
        optax.adam(1e-2),
        reference=Trained(model, params),
    )
    grpo = GRPOConfig(num_generations=4, num_iterations=2, beta=0.01)
    learner = GRPOLearner(rl_cluster=made, algo_config=grpo, reward_fns=odd)
    learner.train([{"prompts": np.array(PROMPTS)} for _ in range(STEPS)])
    assert len(means) == STEPS
    assert np.mean(means[:3]) < 0.6 and np.mean(means[-3:]) > 0.8
    assert made.rollout.rollouts.engine.weight_version == STEPS - 1


@pytest.mark.usefixtures("promotions")
def test_a_cluster_samples_with_the_weights_that_it_trains(tiny) -> None:
    model, params = tiny
    made = cluster(tiny, Actor(params), optax.sgd(1e-3))
    rollout = made.rollout
    assert isinstance(rollout, JaxserveRollout)
    trained, stats = made.actor_trainer.model, rollout.rollouts.engine.stats
    state, compiles = nnx.state(trained, nnx.Param), []
    for update in range(4):
        checked(tiny, nnx.to_pure_dict(state), made.generate(PROMPTS))
        assert rollout.rollouts.engine.weight_version == update
        compiles.append(stats()["compiles"])
        state = jax.tree.map(lambda x: x * 1.1, state)
        nnx.update(trained, state)
        made.sync_weights()  # forbids transfers between host and device
    # The first update forgets cached blocks, by a launch that nothing else had needed.
    assert compiles[1] <= compiles[0] + 1 and len(set(compiles[1:])) == 1
