"""Cached blocks on host and disk: faults of other engines as cases, and what is found
where, by hand.

The hash model reads back what came from a tier, so a block of another prompt, salt or
weight version, or half a block, shows in the tokens.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve import EngineConfig
from jaxserve import engine as engine_module
from jaxserve.executors import disk as disk_module
from jaxserve.executors.jax_executor import JaxExecutor, open_store
from jaxserve.executors.link import LinkCost
from jaxserve.kv_tiers.disk_store import DiskStore
from jaxserve.models.hash_model import HashModel
from tests.engine.harness import JAX, SIM_C, Served, by_priority, config, serve
from tests.serving import direct, workload

PROMPT = list(range(20, 37))  # 17 tokens: four blocks of 4 and one token
THROUGH = dataclasses.replace(
    JAX, num_disk_blocks=200, tier_write="through", preemption_mode="recompute"
)


def on_disk(folder: Path, config: EngineConfig = THROUGH, *, cost=SIM_C, **more):
    """An engine whose blocks go to files in a folder."""

    def make(model, params, shape):
        store = open_store(str(folder), model, params, shape)
        return JaxExecutor(model, params, shape, cost=cost, store=store)

    return Served(config, executor=make, **more)


def files(folder: Path) -> list[Path]:
    """Of blocks, in column order."""
    found = folder.rglob("*.kv")
    return sorted(found, key=lambda path: int(path.name.split(".")[2]))


# Found again --------------------------------------------------------------------------


def test_a_host_hit_costs_its_copy_and_no_prefill() -> None:
    """One slot of five blocks: each prompt drives the other's blocks to the host."""
    shape = config(4, 1, 1, max_num_seqs=1, num_blocks=5, num_swap_blocks=20)
    served = Served(shape, link=LinkCost(block_s=0.001, fixed_s=0.002))
    other = [90] * 17
    served.run("a", PROMPT, 1)
    served.run("other", other, 1)
    assert served.stats()["host_cached_blocks"] == 4
    again = served.run("again", PROMPT, 1)
    assert again.num_cached_tokens == 16
    assert again.outputs[0].token_ids == direct(PROMPT, 1)
    stats = served.stats()
    assert (stats["prefix_hits_tokens"], stats["host_hits_tokens"]) == (16, 16)
    (admitted,) = served.of("admitted", "again")
    assert (admitted.data["cached_tokens"], admitted.data["restored_tokens"]) == (0, 16)
    # A launch that only asks, 2 ms and 4 blocks, a launch that only restores, and one
    # of a token: nothing else takes logical time.
    assert again.metrics.ttft_s == pytest.approx(0.006 + 0.011)


def test_others_run_while_a_hit_is_filled() -> None:
    shape = config(4, 1, 1, max_num_seqs=1, num_blocks=5, num_swap_blocks=20)
    served = Served(shape, policy=by_priority(), link=LinkCost(block_s=1.0))
    served.run("a", PROMPT, 1)
    served.run("other", [90] * 17, 1)
    served.add("again", PROMPT, 2, priority=-1)
    served.until(lambda: any(moves.fetch for moves in served.recorder.moves))
    served.add("later", [5, 6, 7], 3)
    served.until(lambda: len(served.tokens("later")) == 3)
    assert not served.tokens("again")
    served.finish()
    assert served.tokens("again") == direct(PROMPT, 2)
    assert served.outputs["again"].num_cached_tokens == 16


@pytest.mark.parametrize("write", ["on_eviction", "through"])
def test_a_conversation_restored_after_a_restart_computes_its_tail(
    write: str, tmp_path: Path
) -> None:
    shape = dataclasses.replace(THROUGH, tier_write=write)
    first = on_disk(tmp_path, shape)
    answer = first.run("turn 1", PROMPT, 8).outputs[0].token_ids
    first.engine.close()
    second = on_disk(tmp_path, shape)
    history = [*PROMPT, *answer, 3, 1, 4]  # 28 tokens; KV of 24 was written
    again = second.run("turn 2", history, 4)
    assert again.num_cached_tokens == 24
    assert again.outputs[0].token_ids == direct(history, 4)
    stats = second.stats()
    assert (stats["disk_hits_tokens"], stats["loaded_blocks"]) == (24, 6)
    assert stats["prefill_tokens"] == 28 - 24


def test_a_salt_is_found_again_after_a_restart_and_no_other(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    for salt in ("a", None):
        assert first.run(f"{salt}", PROMPT, 1, cache_salt=salt).num_cached_tokens == 0
    first.engine.close()
    second = on_disk(tmp_path)
    for name, salt, cached in (("1", "b", 0), ("2", "a", 16), ("3", None, 16)):
        found = second.run(name, PROMPT, 1, cache_salt=salt)
        assert found.num_cached_tokens == cached
        assert found.outputs[0].token_ids == direct(PROMPT, 1)
    assert second.stats()["failed_loads"] == 0


def test_an_engine_that_was_killed_leaves_what_it_wrote_through(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tests.engine.test_cases_tiers import on_disk, PROMPT\n"
        "served = on_disk(Path(sys.argv[1]), cost=None)\n"
        "served.add('r', PROMPT, 30)\n"
        "while True:\n"
        "    served.step()\n"
        "    time.sleep(0.01)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    end_s = time.monotonic() + 120
    while len(files(tmp_path)) < 4 and time.monotonic() < end_s:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    served = on_disk(tmp_path)
    again = served.run("r", PROMPT, 8)
    assert again.outputs[0].token_ids == direct(PROMPT, 8)
    assert again.num_cached_tokens == 16


# Faults -------------------------------------------------------------------------------


def truncate(paths: list[Path]) -> int:
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    return 2


def delete(paths: list[Path]) -> int:
    paths[1].unlink()
    return 1


def swap(paths: list[Path]) -> int:
    one, two = paths[0].read_bytes(), paths[3].read_bytes()
    paths[0].write_bytes(two)
    paths[3].write_bytes(one)
    return 0


def flip(paths: list[Path]) -> int:
    data = bytearray(paths[3].read_bytes())
    data[-1] ^= 1
    paths[3].write_bytes(data)
    return 3


@pytest.mark.parametrize("harm", [truncate, delete, swap, flip])
def test_ps7_a_damaged_file_is_a_miss(
    harm: Callable[[list[Path]], int], tmp_path: Path
) -> None:
    """PS7 a, b, e (LMCache#4991, #3292, #207): it was served as KV, or crashed."""
    first = on_disk(tmp_path)
    first.run("a", PROMPT, 1)
    first.engine.close()
    good = harm(files(tmp_path)) if len(files(tmp_path)) == 4 else -1
    assert good >= 0
    # What is missing already is not even looked for.
    served = on_disk(tmp_path)
    served.engine.step()
    again = served.run("b", PROMPT, 8)
    assert again.outputs[0].token_ids == direct(PROMPT, 8)
    assert again.num_cached_tokens == 4 * good
    stats = served.stats()
    assert stats["failed_loads"] == (
        0 if harm is delete else (2 if harm is swap else 1)
    )
    # Computed again, they are written again, and found by the next.
    served.engine.close()
    third = on_disk(tmp_path)
    assert third.run("c", PROMPT, 8).num_cached_tokens == 16
    assert third.tokens("c") == direct(PROMPT, 8)
    assert third.stats()["failed_loads"] == 0


class Faulty(DiskStore):
    """A store whose disk fails as it is told to."""

    fault: Callable[[], None] = staticmethod(lambda: None)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self.fault()
        except OSError:
            path.write_bytes(data[: len(data) // 2])
            raise
        super()._write(path, data)

    def _read(self, path: Path) -> bytes:
        self.fault()
        return super()._read(path)


def faulty(folder: Path, config: EngineConfig, fault: Callable[[], None], **more):
    """An engine on such a disk, in wall time."""

    def make(model, params, shape):
        store = open_store(str(folder), model, params, shape)
        store.__class__ = Faulty
        store.fault = fault
        return JaxExecutor(model, params, shape, store=store)

    return Served(config, executor=make, **more)


def no_space() -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_ps7_a_write_that_fails_is_a_miss(tmp_path: Path) -> None:
    """PS7 c: a failed write stayed findable."""
    served = faulty(tmp_path, THROUGH, no_space)
    served.run("a", PROMPT, 8)
    stats = served.stats()
    assert stats["saved_blocks"] == stats["disk_blocks"] == 0
    assert stats["failed_saves"] == 6  # 24 rows
    assert [path for path in tmp_path.rglob("*") if path.suffix != ".lock"] == [
        path for path in tmp_path.rglob("*") if path.is_dir()
    ]
    assert served.run("b", PROMPT, 8).outputs[0].token_ids == direct(PROMPT, 8)


def test_ps7_a_look_up_while_the_write_is_under_way_is_a_miss() -> None:
    """PS7 d. Files take a second; of three blocks on the device none stays."""
    shape = config(
        4, 1, 1, max_num_seqs=1, num_blocks=5, num_disk_blocks=50, tier_write="through"
    )
    served = Served(shape, disk=LinkCost(fixed_s=1.0))
    served.add("a", PROMPT, 1)
    served.add("other", [90] * 17, 1)
    served.add("again", PROMPT, 1)
    served.until(lambda: bool(served.tokens("again")))
    assert served.outputs["again"].num_cached_tokens == 0
    assert served.tokens("again") == direct(PROMPT, 1)
    served.finish()
    assert served.stats()["failed_loads"] == 0


def test_al5_a_load_that_never_ends_times_out(tmp_path: Path) -> None:
    """AL5: if the completion never comes, a timeout frees what waits, and tells."""
    first = on_disk(tmp_path)
    first.run("a", PROMPT, 1)
    first.engine.close()
    stuck = [True]

    def hang() -> None:
        while stuck[0]:
            time.sleep(0.01)

    shape = dataclasses.replace(THROUGH, transfer_timeout_s=0.2)
    served = faulty(tmp_path, shape, hang)
    served.add("b", PROMPT, 8)
    served.until(lambda: bool(served.outputs) and served.reason("b") is not None)
    assert served.tokens("b") == direct(PROMPT, 8)
    assert served.stats()["timed_out_loads"] == 1
    stuck[0] = False
    served.finish()


def test_a_disk_that_cannot_be_written_serves_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    path.write_text("in the way")
    served = on_disk(path / "folder")
    assert served.run("a", PROMPT, 8).outputs[0].token_ids == direct(PROMPT, 8)
    assert served.stats()["failed_saves"] == 6


def trouble(rng: random.Random, folder: Path) -> None:
    """What may befall a disk."""
    kind = rng.random()
    if kind < 0.05:
        raise OSError(errno.EIO, "input/output error")
    if kind < 0.10:
        no_space()
    if kind < 0.15:
        time.sleep(rng.choice([0.001, 0.02]))
    if kind < 0.20:
        some = list(folder.rglob("*.kv"))
        if some:
            path = rng.choice(some)
            try:
                if rng.random() < 0.5:
                    path.unlink()
                else:
                    path.write_bytes(path.read_bytes()[: rng.randrange(200)])
            except OSError:
                pass  # another thread was first


def under_faults(seed: int, folder: Path, jobs: int) -> dict[str, float]:
    """Serve random jobs in tight memory on a failing disk; what came of it."""
    rng = random.Random(seed)
    shape = dataclasses.replace(
        JAX,
        num_blocks=16,
        num_swap_blocks=rng.choice([0, 12]),
        num_disk_blocks=rng.choice([20, 200]),
        preemption_mode=rng.choice(["disk", "auto", "swap"]),
        tier_write=rng.choice(["through", "on_eviction"]),
        launches_in_flight=rng.choice([1, 2]),
        transfer_timeout_s=rng.choice([0.005, 30.0]),
    )
    served = faulty(
        folder,
        shape,
        functools.partial(trouble, random.Random(seed), folder),
        policy=by_priority(),
    )
    work = workload(seed, jobs, spread_s=0.0)
    serve(served, [*work, *work])
    served.engine.settle_tiers()
    served.check_nothing_is_left()
    for i, job in enumerate([*work, *work]):
        assert served.tokens(str(i)) == job.expected()
    stats = served.stats()
    served.engine.close()
    return stats


def test_a_failing_disk_under_load_loses_nothing(tmp_path: Path) -> None:
    seen = [under_faults(seed, tmp_path, 40) for seed in range(3)]
    for name in ("failed_loads", "failed_saves", "loaded_blocks", "preemptions"):
        assert sum(stats[name] for stats in seen) > 0, name


@pytest.mark.slow
def test_a_failing_disk_for_minutes_loses_nothing(tmp_path: Path) -> None:
    end_s, seed = time.monotonic() + 180, 1000
    while time.monotonic() < end_s:
        under_faults(seed, tmp_path / str(seed % 3), 60)
        seed += 1


# Isolation ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_another_salt_finds_nothing_and_the_same_all(tier: str) -> None:
    """PC5 in the tiers below the device, both directions."""
    room = {"num_swap_blocks": 40} if tier == "host" else {"num_disk_blocks": 40}
    shape = config(
        4, 1, 1, max_num_seqs=1, num_blocks=5, preemption_mode="recompute", **room
    )
    served = Served(shape)
    for name, salt, cached in (
        ("a", "a", 0),
        ("a again", "a", 16),
        ("b", "b", 0),
        ("none", None, 0),
        ("a still", "a", 16),
        ("none again", None, 16),
    ):
        served.run(f"drives all out {name}", [90] * 17, 1, cache_salt=f"other {name}")
        found = served.run(name, PROMPT, 1, cache_salt=salt)
        assert found.num_cached_tokens == cached, name
        assert found.outputs[0].token_ids == direct(PROMPT, 1)
    assert served.stats()[f"{tier}_hits_tokens"] == 3 * 16


@pytest.mark.parametrize("room", ["num_swap_blocks", "num_disk_blocks"])
def test_pc7_other_weights_find_nothing_in_any_tier(room: str) -> None:
    """PC7 (lmdeploy#4917, vllm#9744): old KV was served after an update."""
    shape = config(4, 1, 1, num_blocks=11, tier_write="through", **{room: 40})
    served = Served(shape)
    short = list(range(1, 10))
    assert served.run("1", short, 1).num_cached_tokens == 0
    assert served.run("2", short, 1).num_cached_tokens == 8
    served.add("mid", PROMPT, 12)
    served.until(lambda: len(served.tokens("mid")) == 4)
    served.engine.update_params(HashModel().init_params(), "keep")
    stats = served.stats()
    assert stats["host_cached_blocks"] == stats["disk_blocks"] == 0
    assert served.run("3", short, 1).num_cached_tokens == 0
    assert served.run("4", short, 1).num_cached_tokens == 8
    served.finish()
    assert served.tokens("mid") == direct(PROMPT, 12)
    # What was under way then is found by nobody, and what came since is.
    assert served.run("5", PROMPT, 1).num_cached_tokens == 0
    assert served.run("6", PROMPT, 1).num_cached_tokens == 16


def test_weights_of_another_version_do_not_read_each_other_s_files(
    tmp_path: Path,
) -> None:
    first = on_disk(tmp_path)
    first.run("a", PROMPT, 1)
    first.engine.close()
    assert len(files(tmp_path)) == 4
    second = on_disk(tmp_path)
    second.engine.update_params(HashModel().init_params())
    assert second.stats()["disk_blocks"] == 0
    assert second.run("a", PROMPT, 1).num_cached_tokens == 0
    second.engine.close()


# Shared -------------------------------------------------------------------------------


def test_two_engines_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_LOOK_S", 0.0)
    one, two = (on_disk(tmp_path, cost=None) for _ in "ab")
    one.run("a", PROMPT, 1)
    end_s = time.monotonic() + 60
    while two.stats()["disk_blocks"] < 4 and time.monotonic() < end_s:
        two.run(f"looks {time.monotonic()}", [1], 1)
    assert two.run("a", PROMPT, 8).num_cached_tokens == 16
    assert two.tokens("a") == direct(PROMPT, 8)
    # One erases what the other still counts on.
    one.engine.reset_prefix_cache()
    one.engine.settle_tiers()
    one.engine.close()
    three = on_disk(tmp_path)
    assert three.run("b", PROMPT, 8).outputs[0].token_ids == direct(PROMPT, 8)
    two.engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_quota_is_kept_after_every_write(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by chains that are longer than it, and by requests that are swapped to
    disk."""
    rng = random.Random(seed)
    quota = rng.choice([3, 5, 12])
    shape = dataclasses.replace(
        JAX,
        num_blocks=16,
        num_disk_blocks=quota,
        preemption_mode="disk",
        tier_write=("through", "on_eviction")[seed % 2],
    )
    save, counts = DiskStore.save, []

    def counted(store: DiskStore, label, payload) -> None:
        save(store, label, payload)
        counts.append(len([*tmp_path.rglob("*.kv")]))

    monkeypatch.setattr(DiskStore, "save", counted)
    served = on_disk(tmp_path, shape, policy=by_priority())
    serve(served, workload(seed, 40, spread_s=0.0))
    served.engine.settle_tiers()
    served.check_nothing_is_left()
    served.engine.close()
    assert max(counts) == quota


def test_a_quota_is_kept_and_children_leave_before_parents(tmp_path: Path) -> None:
    shape = dataclasses.replace(THROUGH, num_disk_blocks=5)
    served = on_disk(tmp_path, shape)
    for i in range(6):
        served.run(str(i), [40 + i] * 17, 1)
        assert served.stats()["disk_blocks"] <= 5
        columns = [int(path.name.split(".")[2]) for path in files(tmp_path)]
        assert len(columns) <= 5
    served.engine.close()
    again = on_disk(tmp_path, shape)
    last = again.run("last", [45] * 17, 1)
    assert last.num_cached_tokens == 16


def test_a_disk_that_hangs_does_not_keep_the_engine_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(engine_module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(DiskStore, "_write", lambda *args: hangs.wait())
    shape = dataclasses.replace(THROUGH, transfer_timeout_s=0.1)
    served = on_disk(tmp_path, shape, cost=None)
    served.add("a", PROMPT, 3)
    served.until(lambda: not served.engine.has_unfinished_requests())
    assert served.tokens("a") == direct(PROMPT, 3)
    with pytest.raises(TimeoutError, match="blocks have been on their way to disk"):
        served.engine.settle_tiers()
    with pytest.warns(UserWarning, match="the engine is closed anyway"):
        served.engine.close()
    hangs.set()
