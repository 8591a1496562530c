"""An engine as a value: what resumes it does what it would have done."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import EngineConfig, Snapshot
from jaxserve.models.hash_model import HashModel
from jaxserve.scheduling.policies import fcfs, get_policy
from tests.engine.harness import EXECUTORS, JAX, Served, by_priority, config
from tests.engine.test_cases_tiers import THROUGH, faulty, no_space
from tests.serving import direct, workload

PROMPT = [5, 6, 7, 8, 9, 10, 11]
TIGHT = config(
    4,
    1,
    2,
    num_blocks=11,
    max_num_seqs=3,
    max_model_len=48,
    num_swap_blocks=10,
    num_disk_blocks=20,
    tier_write="through",
)


# Programs of its own, for the device; another test has a shape that others share.
BOTH = pytest.mark.parametrize(
    "executor", ["definition", pytest.param("device", marks=pytest.mark.slow)]
)


def _loaded(shape: EngineConfig, executor: str, policy: str) -> Served:
    """An engine in the middle of tight memory, with tiers and a fork."""
    served = Served(shape, executor=EXECUTORS[executor], policy=get_policy(policy))
    for i, job in enumerate(workload(5, 14, spread_s=0.05)):
        served.submit(str(i), job.prompt, job.params, arrival_time=job.arrival_s)
    served.until(lambda: served.stats()["preemptions"] >= 1)
    forked = next(n for n, o in served.outputs.items() if not o.finished)
    served.engine.fork(forked, "fork")
    served.step()
    return served


def _rest(served: Served, since: int) -> list[Any]:
    """Plans and moves from one on, as what can be compared."""
    plans = served.recorder.plans[since:]
    return [[np.asarray(field).tolist() for field in plan] for plan in plans] + [
        repr(moves) for moves in served.recorder.moves[since:]
    ]


@BOTH
@pytest.mark.parametrize("policy", ["fcfs", "mlfq", "sjf:history"])
@pytest.mark.parametrize("launches", [1, 2])
def test_the_same_plans_and_the_same_tokens(
    executor: str, policy: str, launches: int, tmp_path: Path
) -> None:
    shape = dataclasses.replace(
        TIGHT, launches_in_flight=launches, preemption_mode="swap", num_disk_blocks=0
    )
    served = _loaded(shape, executor, policy)
    path = tmp_path / "engine.snapshot"
    served.engine.snapshot().save(path)
    since = len(served.recorder.plans)
    told, deltas = dict(served.outputs), {n: list(d) for n, d in served.deltas.items()}
    served.finish()
    assert len(served.recorder.plans) > since + 5
    for _ in range(2):  # a snapshot is a value: it can be resumed again
        other = Served(shape, executor=EXECUTORS[executor], policy=get_policy(policy))
        other.outputs = dict(told)
        other.deltas = {name: list(had) for name, had in deltas.items()}
        other.engine.restore(Snapshot.load(path))
        other.finish()
        assert _rest(other, 0) == _rest(served, since)
        assert other.outputs.keys() == served.outputs.keys()
        for name, output in served.outputs.items():
            assert other.outputs[name] == output, name
        mine, theirs = served.stats(), other.stats()
        for stats in (mine, theirs):
            for name in [n for n in stats if n.endswith("_s") or n == "compiles"]:
                del stats[name]  # of this machine
        assert mine == theirs


@BOTH
def test_what_is_lost_with_a_disk_is_computed_again(executor: str) -> None:
    """Files are no part of a snapshot: another engine's directory has none of them."""
    shape = dataclasses.replace(TIGHT, preemption_mode="disk", num_swap_blocks=0)
    served = _loaded(shape, executor, "fcfs")
    snapshot = served.engine.snapshot()
    told, deltas = dict(served.outputs), {n: list(d) for n, d in served.deltas.items()}
    served.finish()
    other = Served(shape, executor=EXECUTORS[executor])
    other.outputs, other.deltas = told, deltas
    other.engine.restore(snapshot)
    other.finish()
    for name, output in served.outputs.items():
        assert other.outputs[name].outputs == output.outputs, name


def test_another_policy_goes_on_with_the_requests() -> None:
    """Two slots of four requests: who is next is what the policies differ in."""
    served = Served(config(4, 1, 1, num_blocks=64), policy=fcfs())
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 2)):
        served.add(name, [ord(name) - 90, *PROMPT], 6, priority=priority)
    served.until(lambda: len(served.tokens("a")) == 3)
    snapshot = served.engine.snapshot()
    orders = {}
    for key, policy in (("same", None), ("priority", by_priority())):
        other = Served(config(4, 1, 1, num_blocks=64), policy=fcfs())
        other.outputs = dict(served.outputs)
        other.engine.restore(snapshot, policy)
        other.finish()
        orders[key] = [e.request_id for e in other.of("admitted")]
        for name in "abcd":
            assert other.tokens(name) == direct([ord(name) - 90, *PROMPT], 6)
    assert orders == {"same": ["c", "d"], "priority": ["d", "c"]}


def test_a_quantum_that_was_used_counts_under_the_new_policy() -> None:
    """MLFQ hears how many tokens each has had: one that has run long ranks behind one
    that has just come."""
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=1), policy=fcfs())
    served.add("long", PROMPT, 20)
    served.until(lambda: len(served.tokens("long")) == 9)
    served.add("new", PROMPT[:3], 3)
    served.step()
    snapshot = served.engine.snapshot()
    other = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=1), policy=fcfs())
    other.outputs = dict(served.outputs)
    other.engine.restore(snapshot, get_policy("mlfq(quanta=(4, 16))"))
    other.finish()
    ends = [e.request_id for e in other.of("finished")]
    assert ends == ["new", "long"]
    assert other.tokens("long") == direct(PROMPT, 20)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    served = Served(config(4, 1, 1, num_blocks=64))
    served.add("a", PROMPT, 6)
    served.until(lambda: len(served.tokens("a")) == 2)
    snapshot = served.engine.snapshot()
    other = Served(config(4, 1, 1, num_blocks=32))
    with pytest.raises(ValueError, match="the snapshot's config="):
        other.engine.restore(snapshot)
    other = Served(config(4, 1, 1, num_blocks=64), policy=get_policy("mlfq"))
    with pytest.raises(ValueError, match="the snapshot's policy=.*give restore a pol"):
        other.engine.restore(snapshot)
    other = Served(config(4, 1, 1, num_blocks=64))
    other.add("b", PROMPT, 4)
    other.engine.update_params(HashModel().init_params(mark=2))
    with pytest.raises(ValueError, match="of another model or other weights"):
        other.engine.restore(snapshot)
    other.finish()
    assert len(other.tokens("b")) == 4
    path = tmp_path / "x"
    snapshot.save(path)
    whole = path.read_bytes()
    for data, message in (
        (whole[:-9], "is damaged"),
        (b"other" + whole, "must be a snapshot of this version"),
        (whole[:20] + pickle.dumps(7), "holds a int"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            Snapshot.load(path)
    served.finish()


def test_an_idle_engine_and_its_cache() -> None:
    served = Served(config(4, 1, 1, num_blocks=64))
    served.run("a", PROMPT, 3)
    other = Served(config(4, 1, 1, num_blocks=64))
    other.engine.restore(served.engine.snapshot())
    assert other.engine.now() == served.engine.now()
    assert other.run("b", PROMPT, 3).num_cached_tokens == 4


def test_what_the_disk_was_doing_is_not_the_snapshots(tmp_path: Path) -> None:
    """Writes of the time between are under way when the engine goes back."""
    gate = threading.Event()
    gate.set()
    served = faulty(tmp_path, THROUGH, lambda: None if gate.wait(60) else no_space())
    prompt = list(range(20, 37))
    served.run("a", prompt, 1)
    snapshot = served.engine.snapshot()
    gate.clear()
    served.add("b", [90] * 17, 40)
    served.until(lambda: served.recorder.moves[-1].save != ())
    disk = served.recorder.inner._transfers._disk
    wait = disk.outcomes
    disk.outcomes = lambda: gate.set() or wait()  # who waits for the disk need not long
    served.engine.restore(snapshot)
    gate.set()
    wait()
    served.engine.settle_tiers()
    for name in ("c", "c again"):
        assert served.run(name, [90] * 17, 4).outputs[0].token_ids == direct(
            [90] * 17, 4
        )
    assert served.run("d", prompt, 4).outputs[0].token_ids == direct(prompt, 4)
    served.engine.close()


def test_the_device_goes_on_in_another_engine() -> None:
    """With a request that is swapped out, one that waits, and one that was forked."""
    shape = dataclasses.replace(JAX, num_swap_blocks=30, preemption_mode="swap")
    engines = [
        Served(shape, executor=EXECUTORS["device"], policy=by_priority())
        for _ in range(2)
    ]
    served, other = engines
    for i in range(9):
        served.add(f"{i}", [i, *PROMPT], 20)
    served.until(lambda: len(served.tokens("0")) == 7)  # a block that is not full
    served.add("urgent", [90], 12, priority=-1)
    served.until(lambda: served.stats()["swapped_blocks"] > 0)
    served.engine.fork("0", "fork")
    served.step()
    other.outputs = dict(served.outputs)
    other.engine.restore(served.engine.snapshot())
    for one in engines:
        one.finish()
        for i in range(9):
            assert one.tokens(f"{i}") == direct([i, *PROMPT], 20)
        assert one.tokens("fork") == direct([0, *PROMPT], 20)
        assert one.tokens("urgent") == direct([90], 12)
