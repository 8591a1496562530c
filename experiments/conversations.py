"""Prompts that grow out of earlier ones, and engines that answer them in turn.

Owns the scenarios of prefix reuse and what is measured of each request. A scenario asks
and is answered; whether by a model or a simulation it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments import common
from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.executors.cost_model import StepCost
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.simulation import VOCAB_SIZE, NoModel


class Answer(NamedTuple):
    """What one request came to; times in seconds, the rest in tokens."""

    scenario: str
    turn: int
    prompt: int
    cached: int
    output: int
    ttft_s: float


Ask = Callable[[list[int], int], tuple[list[int], int, float]]
"""(prompt, output tokens wanted) to (output, tokens found in the cache, TTFT)."""


def model(caching: bool) -> tuple[Ask, int]:
    """SmolLM2, one request at a time; and how many tokens it knows."""
    llm = common.make_llm(enable_prefix_caching=caching)

    def ask(prompt: list[int], outputs: int) -> tuple[list[int], int, float]:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        ttft_s = output.metrics.ttft_s
        assert ttft_s is not None
        return output.outputs[0].token_ids, output.num_cached_tokens, ttft_s

    return ask, 49_000


def simulated(config: EngineConfig, cost: StepCost) -> tuple[Ask, int]:
    """A simulation, whose outputs are random tokens; and how many there are."""
    truth: dict[int, Truth] = {}
    rng = np.random.default_rng(common.seed())

    engine = Engine(
        NoModel(),
        None,
        config,
        executor=lambda model, params, shape: SimExecutor(shape, truth, cost),
    )

    def ask(prompt: list[int], outputs: int) -> tuple[list[int], int, float]:
        index = len(truth)
        tokens = rng.integers(0, VOCAB_SIZE, outputs).tolist()
        truth[index] = Truth(tokens, stops=False)
        params = SamplingParams(max_tokens=outputs, output_kind="final_only")
        engine.add_request(str(index), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                ttft_s = output.metrics.ttft_s
                assert ttft_s is not None
                return tokens, output.num_cached_tokens, ttft_s
        raise AssertionError("a request has no answer")

    return ask, VOCAB_SIZE


def shared_system_prompt(ask: Ask, words: Words) -> Iterator[Answer]:
    """Ten questions behind one system prompt."""
    system = words(384)
    for turn in range(10):
        yield _answer("system prompt", turn, ask, system + words(32), 8)[0]


def conversation(ask: Ask, words: Words) -> Iterator[Answer]:
    """Eight turns, each with all before it: 40 new tokens and 48 of the answer."""
    history: list[int] = words(24)
    for turn in range(8):
        history += words(40)
        answer, output = _answer("conversation", turn, ask, history, 48)
        yield answer
        history += output


def agent(ask: Ask, words: Words) -> Iterator[Answer]:
    """A long context, and a tool's result of 60 tokens each turn."""
    history: list[int] = words(480)
    for turn in range(6):
        answer, output = _answer("agent loop", turn, ask, history, 16)
        yield answer
        history += output + words(60)


def edit(ask: Ask, words: Words, block_size: int) -> Iterator[Answer]:
    """One token of 512 is changed at a depth: all before its block is found.

    Raises:
      ValueError: more or less than that was computed.
    """
    base = words(512)
    ask(base, 1)
    for turn, depth in enumerate((0, 100, 255, 256, 400, 511)):
        prompt = base.copy()
        prompt[depth] = (prompt[depth] + 1) % 1000
        answer, _ = _answer(f"edit at {depth}", turn, ask, prompt, 1)
        expected = min(depth, len(base) - 1) // block_size * block_size
        if answer.cached != expected:
            raise ValueError(
                f"an edit at {depth} found {answer.cached} tokens in the cache, but "
                f"blocks of {block_size} before it hold {expected}"
            )
        yield answer


def _answer(
    scenario: str, turn: int, ask: Ask, prompt: list[int], outputs: int
) -> tuple[Answer, list[int]]:
    output, cached, ttft_s = ask(list(prompt), outputs)
    told = Answer(scenario, turn, len(prompt), cached, len(output), ttft_s)
    return told, output


Words = Callable[[int], list[int]]
"""So many tokens that were never used before."""


def words(vocab_size: int) -> Words:
    """Random tokens of a vocabulary, by the seed."""
    rng = np.random.default_rng(common.seed() + 1)
    return lambda n: rng.integers(1000, vocab_size, n).tolist()


def run_all(ask: Ask, vocab_size: int, block_size: int) -> Sequence[Answer]:
    """Every scenario, in turn."""
    new = words(vocab_size)
    answers = [*shared_system_prompt(ask, new), *conversation(ask, new)]
    return [*answers, *agent(ask, new), *edit(ask, new, block_size)]
