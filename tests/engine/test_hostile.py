"""Hostile callers: callbacks that act or raise, interrupts, resets, values at the edge.

What is accepted must be served; what fails must leave everything else untouched, or
stop the engine and say so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.core import Event
from jaxserve.executors.sim_executor import Truth
from jaxserve.models.hash_model import HashModel
from jaxserve.scheduling.policies import fcfs
from tests.engine.harness import SIM_C, Served, sim_executor
from tests.engine.reference_executor import ReferenceExecutor
from tests.serving import direct

CONFIG = EngineConfig(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=4,
    num_blocks=40,
    max_logprobs=2,
)
A, B = list(range(1, 10)), [5, 6, 7, 8, 9]


def config(**fields: object) -> EngineConfig:
    return dataclasses.replace(CONFIG, **fields)  # type: ignore[arg-type]


def listen(served: Served, act: Callable[[Event], None]) -> None:
    """Let a callback act on the engine, after the harness has kept the event."""

    def on_event(event: Event) -> None:
        served.events.append(event)
        act(event)

    served.engine._reports._on_event = on_event


# Callbacks ---------------------------------------------------------------------------


@pytest.mark.parametrize("launches", [1, 2, 3])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize(
    "kind", ["arrived", "admitted", "progressed", "finished", "launch"]
)
def test_a_callback_may_abort(kind: str, other: bool, launches: int) -> None:
    """At any event, its own request or another one in the same launch."""
    served = Served(config(launches_in_flight=launches))
    ended: list[str] = []

    def act(event: Event) -> None:
        if event.kind == kind and event.request_id in ("a", None):
            served.engine.abort_request("b" if other else "a")

    listen(served, act)
    served.add("a", A, 5)
    served.add("b", B, 6)
    while served.engine.has_unfinished_requests():
        ended += [o.request_id for o in served.step() if o.finished]
    assert sorted(ended) == ["a", "b"]  # each told once
    assert served.engine.holds_nothing()
    for name, expected in (("a", direct(A, 5)), ("b", direct(B, 6))):
        got = served.tokens(name)
        assert got == expected[: len(got)]
        assert served.reason(name) == "abort" or got == expected
        assert len(served.of("finished", name)) == 1
    assert served.run("c", A, 5).outputs[0].token_ids == direct(A, 5)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_callback_aborts_at_the_last_token(steps: int) -> None:
    served = Served(config(num_scheduler_steps=steps))
    made = 0

    def act(event: Event) -> None:
        nonlocal made
        if event.kind == "progressed":
            made += event.data["output_tokens"]
            if made == 5:
                served.engine.abort_request("a")

    listen(served, act)
    served.add("a", A, 5)
    served.finish()
    assert served.tokens("a") == direct(A, 5)
    assert len(served.of("finished", "a")) == 1


@pytest.mark.parametrize("launches", [1, 2])
def test_a_callback_aborts_everything_and_resets_the_cache(launches: int) -> None:
    """A reset must not start a launch inside of another's planning."""
    served = Served(config(launches_in_flight=launches))
    served.run("warm", A, 2)

    def act(event: Event) -> None:
        if event.kind == "admitted" and event.request_id == "a":
            served.engine.abort_request("a")
            served.engine.reset_prefix_cache()

    listen(served, act)
    served.add("a", A, 5)
    served.finish()
    assert served.reason("a") == "abort"
    assert served.run("b", A, 5).outputs[0].token_ids == direct(A, 5)
    served.engine.reset_prefix_cache()
    assert served.stats()["free_blocks"] == 40


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(
    "kind", ["arrived", "admitted", "progressed", "finished", "launch"]
)
def test_a_callback_that_raises_loses_nothing(kind: str, launches: int) -> None:
    """The error reaches the caller of `step`; outputs and launches stay."""
    served = Served(config(launches_in_flight=launches))
    armed = True

    def act(event: Event) -> None:
        nonlocal armed
        if armed and event.kind == kind:
            armed = False
            raise ZeroDivisionError

    listen(served, act)
    served.add("a", A, 2)
    served.add("b", B, 6)
    with pytest.raises(ZeroDivisionError):
        served.finish()
    served.finish()
    assert served.tokens("a") == direct(A, 2) and served.reason("a") == "length"
    assert served.tokens("b") == direct(B, 6) and served.reason("b") == "length"


# Interrupts and errors ---------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 16])  # with and without a block taken meanwhile
@pytest.mark.parametrize("launches", [1, 2, 3])
@pytest.mark.parametrize("where", ["submit", "result"])
def test_an_interrupted_launch_is_not_lost(
    where: str, launches: int, size: int
) -> None:
    """Ctrl-C while the executor waits or compiles: the next step goes on from there."""
    served = Served(config(launches_in_flight=launches, block_size=size))
    executor, calls = served.recorder.inner, 0
    real = getattr(executor, where)

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    setattr(executor, where, interrupted)
    served.add("a", A, 5)
    served.add("b", B, 6)
    with pytest.raises(KeyboardInterrupt):
        served.finish()
    served.finish()
    assert served.tokens("a") == direct(A, 5) and served.reason("a") == "length"
    assert served.tokens("b") == direct(B, 6) and served.reason("b") == "length"


@pytest.mark.parametrize("launches", [1, 2])
def test_interrupts_leave_no_more_launches_in_flight(launches: int) -> None:
    """Before it plans, the engine has read all but as many as it may have unread."""
    served = Served(config(launches_in_flight=launches))
    real, calls = served.recorder.inner.result, 0

    def interrupted(ticket):
        nonlocal calls
        calls += 1
        if calls in (2, 4, 6):
            raise KeyboardInterrupt
        return real(ticket)

    served.recorder.inner.result = interrupted
    served.add("a", A, 12)
    unread = []
    while served.engine.has_unfinished_requests():
        with contextlib.suppress(KeyboardInterrupt):
            served.step()
        unread.append(len(served.recorder.plans) - len(served.recorder.outputs))
    assert max(unread) <= launches and calls > 6
    assert served.tokens("a") == direct(A, 12)


def test_an_error_while_planning_stops_the_engine_and_says_so() -> None:
    """A plan half made is lost: nothing may run on from it, nor wait for ever."""

    def rank(state, view, now_s):  # a policy that takes a deadline for granted
        return 0, (-view.deadline_s, view.index)

    served = Served(CONFIG, policy=fcfs()._replace(rank=rank))
    served.add("a", A, 2, deadline_s=1.0)
    served.until(lambda: served.tokens("a") != [])
    served.add("bad", B, 3)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the engine has stopped.*unary -"):
            served.step()


# Resets ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_reset_before_the_first_step_of_a_request_keeps_its_output(
    tokens: int,
) -> None:
    served = Served(CONFIG)
    served.run("a", A, 5)
    served.add("b", B, tokens)
    served.engine.reset_prefix_cache()
    told = []
    while served.engine.has_unfinished_requests():
        told += [o.outputs[0].token_ids for o in served.step()]
    # The reset may have taken a step: what that told comes with the next.
    assert told[-1] == direct(B, tokens)
    assert told == [direct(B, len(ids)) for ids in told]


# Values at the edge ------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2**31, 2**32, 2**63, 2**200])
def test_any_min_tokens_bars_stops_for_as_long_as_the_request_may_run(
    tokens: int,
) -> None:
    """Refused, or honoured; never a number that wraps, nor an engine that hangs."""
    try:
        params = SamplingParams(
            temperature=0.0, max_tokens=None, min_tokens=tokens, stop_token_ids=[66]
        )
    except ValueError:
        return
    served = Served(config(max_model_len=20))
    served.engine.add_request("a", A, params)  # greedily 0, 66, ...
    served.finish()
    assert served.reason("a") == "length" and len(served.tokens("a")) == 11
    assert 66 not in served.tokens("a")


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, ids) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


def test_a_min_tokens_of_an_unsigned_type_is_a_number_like_others() -> None:
    """np.uint8(0) - 1 is 255."""
    model = HashModel()
    engine = Engine(
        model,
        model.init_params(),
        CONFIG,
        tokenizer=Letters(),
        executor=lambda model, params, shape: ReferenceExecutor(shape, SIM_C),
    )
    stop = Letters().decode([66])
    for min_tokens in (0, np.uint8(0)):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=5,
            stop=stop,
            min_tokens=min_tokens,  # type: ignore[arg-type]
        )
        engine.add_request("a", A, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids == [0, 66]
        assert outputs[-1].outputs[0].stop_reason == stop


@pytest.mark.parametrize(
    ("field", "make", "kept"),
    [
        ("stop", lambda: (s for s in ["a", "b"]), ("a", "b")),
        ("stop_token_ids", lambda: iter([3, 4]), (3, 4)),
        ("stop_token_ids", lambda: np.array([3, 4]), (3, 4)),
        ("stop", lambda: np.array(["a", "b"]), ("a", "b")),
    ],
)
def test_stops_are_honoured_or_refused_by_name(field, make, kept) -> None:
    """An iterator is empty the second time it is read."""
    try:
        params = SamplingParams(**{field: make()})
    except ValueError as error:
        assert field in str(error) and "must" in str(error)
        return
    assert tuple(getattr(params, field)) == kept


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_a_false_value_is_not_nothing(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, {}, [], "", False])
def test_false_parameters_are_refused(value: object) -> None:
    served = Served(CONFIG)
    with pytest.raises(ValueError, match="must be SamplingParams"):
        served.engine.add_request("a", A, value)  # type: ignore[arg-type]
    assert served.engine.holds_nothing()


def test_sizes_of_numpy_types_are_sizes_like_others() -> None:
    small = {"max_num_seqs": np.uint8(4), "block_size": np.uint8(4)}
    wide = {"max_num_batched_tokens": np.int16(400), "num_blocks": np.int16(32_700)}
    for fields in (small, wide):
        plain = {name: int(value) for name, value in fields.items()}
        one = config(**fields)
        other = config(**plain)
        blocks = one.num_blocks
        assert blocks is not None and one == other
        assert one.shape(blocks) == other.shape(int(blocks))
    with pytest.raises(ValueError, match="block_size=.*24.* nearest are 16 and 32"):
        config(block_size=np.int64(24))


def test_a_truth_that_is_too_short_is_found() -> None:
    """It neither stops nor has as many tokens as the request may sample."""
    served = Served(CONFIG, executor=sim_executor({0: Truth([5] * 3, stops=False)}))
    served.add("a", A, 10)
    with pytest.raises((ValueError, RuntimeError), match="truth"):
        served.finish()
