"""KV memory given back between rollouts, and taken again."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxserve import EngineConfig
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.models.hash_model import HashModel
from tests.engine.harness import EXECUTORS, JAX, Served, config, jax_executor
from tests.serving import direct

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("mode", ["recompute", "swap", "disk", "auto"])
@pytest.mark.parametrize("launches", [1, 2])
def test_requests_go_on_where_they_were(
    executor: str, mode: str, launches: int
) -> None:
    """Those that run, wait, and come meanwhile."""
    # Two slots, or nine.
    base = config(4, 1, 1, num_blocks=64) if executor == "definition" else JAX
    shape = dataclasses.replace(
        base,
        launches_in_flight=launches,
        preemption_mode=mode,
        num_swap_blocks=40,
        num_disk_blocks=40,
    )
    served, run = Served(shape, executor=EXECUTORS[executor]), min(base.max_num_seqs, 3)
    for name in "abc":
        served.add(name, [ord(name) - 90, *PROMPT], 12)
    served.until(lambda: len(served.tokens("a")) >= 3)
    served.engine.release_kv()
    served.engine.release_kv()  # it is already
    served.add("d", PROMPT, 5)
    stats = served.stats()
    assert stats["running"] == 0 and stats["waiting"] == 4
    assert stats["free_blocks"] == 64 and stats["cached_blocks"] == 0
    with pytest.raises(RuntimeError, match="call restore_kv before step"):
        served.engine.step()
    served.engine.restore_kv()
    served.finish()
    for name in "abc":
        assert served.tokens(name) == direct([ord(name) - 90, *PROMPT], 12)
    assert served.tokens("d") == direct(PROMPT, 5)
    stats = served.stats()
    by_swap, by_disk = stats["preemptions_by_swap"], stats["preemptions_by_disk"]
    # "auto" takes what is cheapest by its own measurements.
    expected = {"recompute": (0, 0), "swap": (run, 0), "disk": (0, run)}
    assert (by_swap, by_disk) == expected.get(mode, (by_swap, by_disk))


def test_the_memory_is_free_meanwhile() -> None:
    served = Served(JAX, executor=jax_executor())
    served.run("a", PROMPT, 3)
    inner = served.recorder.inner
    assert isinstance(inner, JaxExecutor)
    pages = list(inner.state.pages.values())
    size = pages[0].nbytes
    assert any(array is pages[0] for array in jax.live_arrays())
    served.engine.release_kv()
    assert all(page.is_deleted() for page in pages) and not inner.state.pages
    served.engine.restore_kv()
    assert next(iter(inner.state.pages.values())).nbytes == size
    compiles = served.stats()["compiles"]
    assert served.run("b", PROMPT, 3).outputs[0].token_ids == direct(PROMPT, 3)
    assert served.stats()["compiles"] == compiles


def test_what_is_cached_goes_to_the_tiers() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, num_swap_blocks=10))
    served.run("a", PROMPT * 3, 2)
    served.engine.release_kv()
    assert served.stats()["host_cached_blocks"] == 5
    served.engine.restore_kv()
    assert served.run("b", PROMPT * 3, 2).num_cached_tokens == 20


def test_weights_change_and_requests_are_aborted_meanwhile() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, num_swap_blocks=10))
    served.add("a", PROMPT, 9)
    served.add("b", PROMPT, 9)
    served.until(lambda: len(served.tokens("a")) >= 3)
    served.engine.release_kv()
    served.engine.update_params(HashModel().init_params(mark=3))
    served.engine.reset_prefix_cache()
    assert served.engine.abort_request("a")
    assert served.engine.abort_request("b")
    assert [o.finished for o in served.step()] == [True, True]  # nobody is left
    served.engine.settle_tiers()  # takes the memory again
    served.check_nothing_is_left()
    served.run("c", PROMPT, 2)


def test_a_static_batch_that_runs_keeps_its_memory() -> None:
    shape: EngineConfig = config(4, 1, 1, num_blocks=64, batching="static")
    served = Served(shape)
    served.add("a", PROMPT, 4)
    served.step()
    with pytest.raises(RuntimeError, match="serve or abort them first"):
        served.engine.release_kv()
    served.finish()
    served.engine.release_kv()
    served.engine.restore_kv()
    assert served.run("b", PROMPT, 4).outputs[0].token_ids == direct(PROMPT, 4)
