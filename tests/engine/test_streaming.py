"""Deltas: joined they are the whole answer, and what was told is never taken back.

Faults of other engines as cases, then random outputs, stop strings and preemptions
against a definition that decodes everything at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from jaxserve import RequestOutput, SamplingParams
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.models.hash_model import HashModel
from jaxserve.outputs import CompletionOutput
from tests.engine.harness import (
    JAX,
    SCHEDULES,
    SIM_C,
    Served,
    by_priority,
    config,
    jax_executor,
    preempt,
    preempt_at_every_output,
    sim_executor,
)
from tests.serving import direct

MODES = ["recompute", "swap", "disk"]
STREAM = SamplingParams(temperature=0.0, output_kind="delta", max_tokens=60)


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


class Pieces:
    """Token i is the i-th piece of bytes."""

    def __init__(self, *pieces: str | bytes):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        joined = b"".join(self.pieces[i] for i in ids)
        return joined.decode("utf-8", "replace")


def completions(served: Served, name: str = "r") -> list[CompletionOutput]:
    """Of a request's deltas, in order."""
    return [output.outputs[0] for output in served.deltas[name]]


def texts(served: Served) -> list[str]:
    return [completion.text for completion in completions(served)]


def scripted(
    pieces: Pieces,
    tokens: Sequence[int],
    schedule: tuple[int, int] = (1, 1),
    *,
    batching: str = "continuous",
    **fields: object,
) -> Served:
    """Serve a request "r" whose output ids are given, to its end."""
    launches, steps = schedule
    served = Served(
        config(4, launches, steps, num_blocks=64, batching=batching),
        tokenizer=pieces,
        executor=sim_executor({0: Truth(tokens, stops=False)}),
    )
    fields = {"max_tokens": len(tokens), **fields}
    served.submit("r", [1, 2, 3], dataclasses.replace(STREAM, **fields))  # type: ignore[arg-type]
    served.finish()
    return served


# Preemption ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_ps3_a_restart_repeats_and_loses_nothing(mode: str) -> None:
    """PS3 (sglang#39645, #39949, #20724): a client got two generations spliced, or K+N
    log-probabilities for N tokens."""
    shape = dataclasses.replace(
        JAX, preemption_mode=mode, num_swap_blocks=64, num_disk_blocks=64
    )

    def serve(preempted_at: tuple[int, ...], kind: str) -> Served:
        served = Served(
            shape, policy=by_priority(), tokenizer=Letters(), executor=jax_executor()
        )
        served.add("r", range(11, 17), 6, logprobs=2, output_kind=kind)
        for i in range(8):  # they hold the other slots, so that one more displaces r
            served.add(f"mate {i}", [i], 24, priority=-1)
        for outputs in preempted_at:
            served.until(lambda n=outputs: len(served.tokens("r")) == n)
            preempt(served)
        served.finish()
        lost = [e.data["mode"] for e in served.of("preempted", "r")]
        assert lost == [mode] * len(preempted_at)
        return served

    alone = serve((), "final_only").outputs["r"].outputs[0]
    served = serve((2, 4), "delta")
    tokens = [32, 28, 66, 46, 16, 95]
    assert [delta.token_ids for delta in completions(served)] == [[t] for t in tokens]
    assert "".join(texts(served)) == alone.text == Letters().decode(tokens)
    entries = [e for delta in completions(served) for e in delta.logprobs or []]
    assert len(entries) == 6 and alone.logprobs is not None
    for token, entry, expected in zip(tokens, entries, alone.logprobs, strict=True):
        assert list(entry) == list(expected) and token in entry
        for key in entry:
            assert entry[key].logprob == pytest.approx(expected[key].logprob, abs=1e-5)
            assert entry[key].rank == expected[key].rank
    # The hash model's logits are -0.25 for each step away from the likeliest.
    assert {e[t].rank for t, e in zip(tokens, entries, strict=True)} == {1}
    assert served.deltas["r"][-1].metrics.preemptions == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_ps3_of_every_kind(launches: int, steps: int, mode: str) -> None:
    """PS3: preempted as often as it can be; each token is sent once, in order."""
    shape = config(
        4,
        launches,
        steps,
        max_num_seqs=1,
        num_blocks=64,
        preemption_mode=mode,
        num_swap_blocks=64,
        num_disk_blocks=64,
    )
    served = Served(shape, policy=by_priority())
    served.add("r", range(5, 15), 20, output_kind="delta")
    preempt_at_every_output(served)
    # At every output but the last.
    assert len(served.of("preempted", "r")) >= 20 // (steps * launches) - 1
    sent = [token for delta in completions(served) for token in delta.token_ids]
    assert sent == direct(range(5, 15), 20)
    assert all(delta.token_ids for delta in completions(served))
    assert [output.finished for output in served.deltas["r"]][-2:] == [False, True]


def under_three_weights(launches: int, steps: int, kind: str) -> Served:
    """Serve a request "r" whose weights are replaced twice; by launches, so that any
    kind of output is served alike."""
    served = Served(config(4, launches, steps, num_blocks=64))
    served.add("r", range(5, 15), 30, output_kind=kind)
    for version in (1, 2):
        served.until(lambda n=3 * version: len(served.recorder.plans) >= n)
        weights = HashModel().init_params(version)
        assert served.engine.update_params(weights, "keep") == version
    served.finish()
    return served


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_a_delta_tells_the_weights_of_its_own_tokens(launches: int, steps: int) -> None:
    served = under_three_weights(launches, steps, "delta")
    at = 0
    for delta in completions(served):
        first = at
        for span in delta.weight_versions:
            assert span.start == at < span.end
            at = span.end
        assert at - first == len(delta.token_ids)
    joined = served.outputs["r"].outputs[0]
    assert [span.version for span in joined.weight_versions] == [0, 1, 2]
    whole = under_three_weights(launches, steps, "final_only")
    assert joined == whole.outputs["r"].outputs[0]


# Text ---------------------------------------------------------------------------------

FOX = Pieces("The quick", " br", "own", " fox", " jumps", " cat")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sd1_a_stop_string_over_tokens_is_not_streamed(
    schedule: tuple[int, int],
) -> None:
    """SD1 (SwiftLM#126, mlx-knife#68, vllm#3672): missed, or its first part sent."""
    served = scripted(FOX, [0, 1, 2, 3, 4], schedule, stop="own fox")
    assert "".join(texts(served)) == "The quick br"
    assert all("own" not in text for text in texts(served))
    last = completions(served)[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "own fox")
    sent = [token for delta in completions(served) for token in delta.token_ids]
    assert sent == [0, 1, 2, 3]  # up to the one that completes it, and none after
    if schedule == (1, 1):
        assert texts(served) == ["The quick", " br", "", ""]


def test_sd1_held_text_comes_with_a_later_delta() -> None:
    served = scripted(FOX, [0, 1, 2, 5], stop="own fox")
    assert texts(served) == ["The quick", " br", "", "own cat"]
    assert [delta.token_ids for delta in completions(served)] == [[0], [1], [2], [5]]


def test_sd1_held_text_comes_with_the_last_delta() -> None:
    served = scripted(FOX, [0, 1, 2], stop="own fox")
    assert texts(served) == ["The quick", " br", "own"]
    assert completions(served)[-1].finish_reason == "length"


def test_sd1_a_match_inside_a_piece() -> None:
    served = scripted(FOX, [0, 1], stop="ick")
    assert texts(served) == ["The qu"]
    assert completions(served)[0].token_ids == [0]


def test_held_text_comes_with_an_abort() -> None:
    truth = {0: Truth([0, 1, 2, 3], stops=False)}
    served = Served(
        config(4, 1, 1, num_blocks=64), tokenizer=FOX, executor=sim_executor(truth)
    )
    params = dataclasses.replace(STREAM, max_tokens=4, stop="own fox")
    served.submit("r", [1], params)
    served.until(lambda: len(served.tokens("r")) == 3)
    served.engine.abort_request("r")
    served.finish()
    last = completions(served)[-1]
    assert (last.text, last.token_ids) == ("own", [])
    assert last.finish_reason == "abort"


def test_sd3_a_character_over_tokens_comes_whole() -> None:
    """SD3 (ferrox#124, exo#1691, JetStream#22): half characters were shown."""
    smile = "\U0001f642".encode()
    served = scripted(Pieces(smile[:2], smile[2:]), [0, 1])
    assert texts(served) == ["", "\U0001f642"]
    assert [delta.token_ids for delta in completions(served)] == [[0], [1]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sd3_random_text_cut_at_random_bytes(schedule: tuple[int, int]) -> None:
    rng = random.Random(str(schedule))
    for _ in range(40):
        alphabet = "ab é€🙂\n"
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 20)))
        data = text.encode()
        places = range(1, len(data))
        cuts = sorted(rng.sample(places, min(len(places), rng.randint(0, 12))))
        pieces = [
            data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)
        ]
        served = scripted(Pieces(*pieces), range(len(pieces)), schedule)
        assert "".join(texts(served)) == text


def test_sd5_broken_bytes_are_at_most_three_tokens_late() -> None:
    """SD5 (sglang#34852): the wait for more never ended, and nothing was sent."""
    served = scripted(Pieces(b"\xff", "ok"), [0] * 50 + [1])
    sent = 0
    for i, text in enumerate(texts(served)[:-1], start=1):
        sent += len(text)
        assert sent >= i - 3
    assert "".join(texts(served)) == "\ufffd" * 50 + "ok"
    half = scripted(Pieces("a", b"\xe2\x82"), [0, 1])
    assert texts(half) == ["a", "\ufffd"]


# Of every kind ------------------------------------------------------------------------


def test_a_static_batch_answers_once() -> None:
    served = scripted(FOX, [0, 1, 2, 5], batching="static", logprobs=0)
    assert texts(served) == ["The quick brown cat"]
    assert completions(served)[0].token_ids == [0, 1, 2, 5]


def test_an_answer_aborted_while_it_waits_for_its_batch_was_aborted() -> None:
    """Its text had met the stop string, but that is not why it ended."""
    served = Served(
        config(4, 1, 1, num_blocks=64, batching="static"),
        tokenizer=FOX,
        executor=sim_executor(
            {0: Truth([0, 1, 2, 3], False), 1: Truth([0] * 9, stops=False)}
        ),
    )
    params = dataclasses.replace(STREAM, max_tokens=4, stop="own fox")
    served.submit("r", [1], params)
    served.submit("mate", [1], dataclasses.replace(STREAM, max_tokens=9))
    served.until(lambda: len(served.recorder.outputs) == 5)  # four have its tokens
    served.engine.abort_request("r")
    served.finish()
    (only,) = completions(served)
    assert (only.text, only.token_ids) == ("The quick br", [0, 1, 2, 3])
    assert (only.finish_reason, only.stop_reason) == ("abort", None)


def test_a_leap_is_told_in_one_delta() -> None:
    tokens = list(range(5)) * 4
    truth = {0: Truth(tokens, stops=False)}
    served = Served(
        config(4, 1, 1, num_blocks=64, enable_prefix_caching=False),
        executor=lambda model, params, shape: SimExecutor(
            shape, truth, SIM_C, jump=True
        ),
    )
    served.add("r", [1, 2, 3], 20, output_kind="delta")
    served.finish()
    sent = [token for delta in completions(served) for token in delta.token_ids]
    assert sent == tokens and len(completions(served)) < 20


def whole(
    pieces: Pieces, tokens: Sequence[int], stop: str | None
) -> tuple[list[int], str, str]:
    """(tokens, text, reason) of an output, by decoding all of it after each token."""
    for n in range(1, len(tokens) + 1):
        text = pieces.decode(tokens[:n])
        if stop and stop in text:
            return list(tokens[:n]), text[: text.index(stop)], "stop"
    return list(tokens), pieces.decode(tokens), "length"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_streams_are_the_whole_answers(
    schedule: tuple[int, int], mode: str
) -> None:
    """Few letters, so that stop strings begin often, end seldom, and overlap."""
    rng = random.Random(f"{schedule} {mode}")
    pieces = Pieces("a", "b", "ab", "ba", "aab", "c")
    stopped = preempted = 0
    for _ in range(6):
        outputs = [
            [rng.randrange(6) for _ in range(rng.randint(1, 16))] for _ in range(12)
        ]
        stops = [
            rng.choice([None, "".join(rng.choices("abc", k=rng.randint(1, 5)))])
            for _ in outputs
        ]
        served = Served(
            config(
                2,
                *schedule,
                max_num_seqs=3,
                num_blocks=14,
                preemption_mode=mode,
                num_swap_blocks=20,
                num_disk_blocks=20,
            ),
            policy=by_priority(),
            tokenizer=pieces,
            executor=sim_executor(
                {i: Truth(tokens, stops=False) for i, tokens in enumerate(outputs)}
            ),
        )
        for i, (tokens, stop) in enumerate(zip(outputs, stops, strict=True)):
            made = dataclasses.replace(STREAM, max_tokens=len(tokens), stop=stop)
            served.submit(
                f"{i}",
                [rng.randrange(9) for _ in range(rng.randint(1, 6))],
                made,
                priority=rng.randrange(3),
                arrival_time=rng.random() * 0.2,
            )
        served.finish()
        preempted += len(served.of("preempted"))
        for i, (tokens, stop) in enumerate(zip(outputs, stops, strict=True)):
            ids, text, reason = whole(pieces, tokens, stop)
            got: list[RequestOutput] = served.deltas[f"{i}"]
            parts = [output.outputs[0] for output in got]
            assert [t for part in parts for t in part.token_ids] == ids
            assert "".join(part.text for part in parts) == text
            assert parts[-1].finish_reason == reason
            assert [output.finished for output in got] == [False] * (len(got) - 1) + [
                True
            ]
            stopped += reason == "stop"
    assert stopped > 5 and preempted > 5
