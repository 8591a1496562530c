"""Random engines whose requests are forked and drawn several times, whose weights are
replaced, whose memory is released, and which go on as another engine's snapshot.

All of it at random moments, on the definition of the device. Each output token is
compared with the model's definition, applied to the tokens before it under the marks of
the weights that their KV rows can have been computed with.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from jaxserve import RequestOutput, SamplingParams
from jaxserve.models.hash_model import HashModel, next_token
from jaxserve.outputs import CompletionOutput, joined
from jaxserve.scheduling.policies import Policy, fcfs, get_policy
from tests.engine.harness import Served, by_priority, equals, random_config
from tests.processing import Numbers, log_softmax, process_as, random_fields
from tests.serving import draw, logits_around

MODEL = HashModel()


def histories(length: int, oldest: int, newest: int) -> Iterator[tuple[int, ...]]:
    """Every way in which rows can be of weight versions: in order, the last the newest,
    for whoever computes a row computes all that follow."""
    versions = range(oldest, newest + 1)
    for older in itertools.combinations_with_replacement(versions, length - 1):
        yield (*older, newest)


@dataclasses.dataclass
class Asked:
    """One request as its caller knows it.

    Attributes:
      begun: output that a fork has from its parent. first: index of its first sample.
    """

    prompt: list[int]
    params: SamplingParams
    begun: list[int] = dataclasses.field(default_factory=list)
    first: int = 0
    seen: RequestOutput | None = None
    aborted: bool = False


class Client:
    """Sends random orders to an engine, and keeps what it is told."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        config = random_config(self.rng)
        if self.rng.random() < 0.15:
            config = dataclasses.replace(
                config, batching="static", num_swap_blocks=0, num_disk_blocks=0
            )
        self.config = config
        self.marks = [0]  # by weight version
        self.oldest = [0]  # version that a row may be of, by version in use
        self.asked: dict[str, Asked] = {}
        self.samples: dict[str, int] = {}  # taken, by the request that a family is of
        self.family: dict[str, str] = {}
        self.done: dict[str, int] = dict.fromkeys(
            ("forks", "updates", "kept", "releases", "snapshots", "samples"), 0
        )
        self.served = self._served(self._policy())

    def _policy(self) -> Policy:
        make = self.rng.choice([fcfs, by_priority, equals, lambda: get_policy("mlfq")])
        return make()

    def _served(self, policy: Policy) -> Served:
        return Served(
            self.config,
            policy=policy,
            seed=self.rng.randrange(99),
            tokenizer=Numbers(),
        )

    @property
    def engine(self):
        return self.served.engine

    # Orders ---------------------------------------------------------------------------

    def submit(self) -> None:
        rng, name = self.rng, f"r{len(self.asked)}"
        base = [rng.randrange(97) for _ in range(rng.randint(1, 18))]
        if self.asked and rng.random() < 0.5:  # what others have begun with
            base = rng.choice(list(self.asked.values())).prompt + base[:3]
        random_ = rng.random() < 0.6
        fields = random_fields(rng) if rng.random() < 0.5 else {}
        fields.pop("min_tokens", None)  # nothing stops here
        params = SamplingParams(
            n=rng.choice([1, 1, 2, 4]),
            temperature=1.0 if random_ else 0.0,
            seed=rng.randrange(5) if random_ else None,
            max_tokens=rng.randint(1, 18),
            output_kind=rng.choice(["cumulative", "delta", "final_only"]),
            **fields,
        )
        self.asked[name] = Asked(base[:24], params)
        self.family[name], self.samples[name] = name, params.n
        self.done["samples"] += params.n - 1
        self.engine.add_request(
            name,
            base[:24],
            params,
            priority=rng.randrange(3),
            arrival_time=self.engine.now() + rng.choice([0.0, 0.0, 0.05]),
        )

    def fork(self) -> None:
        names = [n for n in self.engine._clients.live if self.asked[n].params.n == 1]
        if not names:
            return
        parent, name = self.rng.choice(names), f"r{len(self.asked)}"
        self.engine._loop.drain()
        if parent not in self.engine._clients.live:
            return
        had = self.engine._clients.live[parent].lives[0].request.output
        kind = self.rng.choice(["cumulative", "delta", "final_only"])
        params = dataclasses.replace(
            self.asked[parent].params,
            max_tokens=len(had) + self.rng.randint(1, 9),
            output_kind=kind,
        )
        root = self.family[name] = self.family[parent]
        self.asked[name] = Asked(
            self.asked[parent].prompt, params, list(had), self.samples[root]
        )
        self.samples[root] += 1
        self.engine.fork(parent, name, params)
        self.done["forks"] += 1

    def abort(self) -> None:
        if self.engine._clients.live:
            name = self.rng.choice(list(self.engine._clients.live))
            self.asked[name].aborted = True
            assert self.engine.abort_request(name)

    def update(self) -> None:
        version = len(self.marks)
        modes = ["wait", "wait" if self.config.batching == "static" else "recompute"]
        if version - self.oldest[-1] <= 2:  # so that few histories are possible
            modes += ["keep", "keep"]
        mode = self.rng.choice(modes)
        self.marks.append(self.rng.randrange(200))
        self.oldest.append(self.oldest[-1] if mode == "keep" else version)
        params = MODEL.init_params(mark=self.marks[-1])
        assert self.engine.update_params(params, mode) == version
        self.done["updates"] += mode != "keep"
        self.done["kept"] += mode == "keep"

    def release(self) -> None:
        if self.config.batching == "static":
            return
        self.engine.release_kv()
        if self.rng.random() < 0.3:
            self.update()
        if self.rng.random() < 0.3:
            self.abort()
        self.engine.restore_kv()
        self.done["releases"] += 1

    def move(self) -> None:
        """Go on as another engine, perhaps under another policy."""
        snapshot = self.engine.snapshot()
        other = None if self.rng.random() < 0.5 else self._policy()
        new = self._served(self.engine._scheduler.policy)
        new.engine.update_params(MODEL.init_params(mark=self.marks[-1]))
        new.engine.restore(snapshot, other)
        self.served = new
        self.done["snapshots"] += 1

    def step(self) -> None:
        for output in self.engine.step():
            asked = self.asked[output.request_id]
            assert asked.seen is None or not asked.seen.finished, "told after its end"
            if asked.params.output_kind == "delta" and asked.seen is not None:
                output = joined(asked.seen, output)
            elif asked.seen is not None:
                pairs = zip(asked.seen.outputs, output.outputs, strict=True)
                for old, new in pairs:
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
            if asked.params.output_kind == "final_only":
                assert output.finished
            asked.seen = output

    def run(self) -> None:
        orders = [self.submit] * 4 + [self.fork] * 2 + [self.abort, self.update]
        orders += [self.release, self.move, self.engine.reset_prefix_cache]
        for _ in range(3):
            self.submit()
        for _ in range(self.rng.randint(20, 60)):
            self.step()
            if len(self.asked) < 14 and self.rng.random() < 0.4:
                order = self.rng.choice(orders)
                order() if order != orders[-1] else self.engine.reset_prefix_cache()
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    # What is right --------------------------------------------------------------------

    def check(self) -> None:
        for name, asked in self.asked.items():
            assert asked.seen is not None and asked.seen.finished, name
            assert [c.index for c in asked.seen.outputs] == list(range(asked.params.n))
            for completion in asked.seen.outputs:
                self._check_one(name, asked, completion)
            self._check_scores(name, asked)
        self.engine.settle_tiers()
        self.served.check_nothing_is_left()
        stats = self.engine.stats()
        assert stats["free_blocks"] + stats["cached_blocks"] == self.config.num_blocks
        if not self.config.enable_prefix_caching:
            assert stats["cached_blocks"] == 0
        self.engine.reset_prefix_cache()
        assert self.engine.stats()["free_blocks"] == self.config.num_blocks

    def _next(self, context: list[int], history: tuple[int, ...]) -> int:
        """What follows, where the rows are of these versions."""
        rows = zip(context, history, strict=True)
        return next_token([token + self.marks[version] for token, version in rows])

    def _check_scores(self, name: str, asked: Asked) -> None:
        """Of weights that may have been replaced on the way."""
        assert asked.seen is not None
        rows = asked.seen.prompt_logprobs
        if asked.params.prompt_logprobs is None or asked.aborted:
            assert rows is None or asked.aborted
            return
        assert rows is not None and len(rows) == len(asked.prompt), name
        for k, row in enumerate(rows[1:], start=1):
            versions = range(len(self.marks))
            nexts = {
                self._next(asked.prompt[:k], history)
                for v in versions
                for history in histories(k, self.oldest[v], v)
            }
            token = asked.prompt[k]
            possible = [log_softmax(logits_around(next_))[token] for next_ in nexts]
            assert row is not None
            assert min(abs(p - row[token].logprob) for p in possible) < 1e-5

    def _check_one(self, name: str, asked: Asked, told: CompletionOutput) -> None:
        output = told.token_ids
        assert output[: len(asked.begun)] == asked.begun
        versions = [s.version for s in told.weight_versions for _ in range(*s[1:])]
        assert len(versions) == len(output) and versions == sorted(versions)
        sample = asked.first + told.index
        known: set[tuple[int, ...]] = set()  # versions that its rows can be of
        for k in range(len(asked.begun), len(output)):
            context, now = [*asked.prompt, *output[:k]], versions[k]
            oldest = self.oldest[now]
            # Either its rows stayed, or they were computed again since the last token.
            since = oldest if k == len(asked.begun) else max(oldest, versions[k - 1])
            possible = {(*h, now) for h in known if min(h) >= oldest}
            possible |= set(histories(len(context), since, now))
            next_ = {h: self._next(context, h) for h in possible}
            right = set()
            for token in set(next_.values()):
                logits = process_as(
                    asked.params, logits_around(token), asked.prompt, output[:k]
                )
                drawn = draw(logits, asked.params.seed, len(context), sample)
                if drawn == output[k]:
                    right.add(token)
            known = {h for h in possible if next_[h] in right}
            assert known, f"{name}, sample {told.index}, token {k}"
        if told.finish_reason == "abort":
            assert asked.aborted
        else:
            limit = min(
                asked.params.max_tokens or 0,
                64 - len(asked.prompt),
                self.config.num_blocks * self.config.block_size - len(asked.prompt) + 1,
            )
            assert told.finish_reason == "length" and len(output) == limit


def _check(seeds: range) -> dict[str, int]:
    total: dict[str, int] = {}
    for seed in seeds:
        client = Client(seed)
        try:
            client.run()
            client.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        preemptions = client.engine.stats()["preemptions"]
        for name, count in {**client.done, "preemptions": preemptions}.items():
            total[name] = total.get(name, 0) + int(count)
    return total


@pytest.mark.parametrize("block", range(4))
def test_every_output_is_that_of_its_weights(block: int) -> None:
    done = _check(range(25 * block, 25 * block + 25))
    # The orders do what they are for.
    assert all(count > 0 for count in done.values()), done


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(40))
def test_every_output_is_that_of_its_weights_in_many_runs(block: int) -> None:
    _check(range(10_000 + 50 * block, 10_050 + 50 * block))
