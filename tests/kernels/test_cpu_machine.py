"""When the CPU's kernels apply, and what happens where they do not."""

from __future__ import annotations

import importlib.util
import logging
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, paged_attention
from pallas_kernels.packed import pack
from tests.kernels.batches import Shape, make_batch
from tests.kernels.marks import needs_cpu_kernels

pytestmark = needs_cpu_kernels


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch):
    """What the machine lacks is found out, and logged, once in a process."""
    del monkeypatch  # it is undone after the caches have been cleared again
    for cache in (cpu._unusable, cpu._log):
        cache.cache_clear()
    yield
    for cache in (cpu._unusable, cpu._log):
        cache.cache_clear()


def _find_numba(monkeypatch, found):
    find_spec = importlib.util.find_spec

    def find(name, *package):
        return found if name == "numba" else find_spec(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def _age_numba(monkeypatch):
    monkeypatch.setattr("numba.__version__", "0.61.2")


def _without(name):
    def patch(monkeypatch):
        has = cpu.instruction_sets() - {name}
        monkeypatch.setattr(cpu, "instruction_sets", lambda: has)

    return patch


# name: (what makes it so, the reason given)
MACHINES = {
    "no numba": (lambda m: _find_numba(m, None), "numba is not installed; pip install"),
    "old numba": (_age_numba, "numba 0.61.2 is older than"),
    "switched off": (
        lambda m: m.setenv("PALLAS_KERNELS_CPU", "0"),
        "PALLAS_KERNELS_CPU=0 is set",
    ),
    "no avx2": (_without("avx2"), "the processor lacks avx2"),
    "no fma": (_without("fma"), "the processor lacks fma"),
    "another system": (
        lambda m: m.setattr(platform, "system", lambda: "Darwin"),
        "Darwin on x86_64 is not Linux on x86_64",
    ),
    "another processor": (
        lambda m: m.setattr(platform, "machine", lambda: "aarch64"),
        "Linux on aarch64 is not Linux on x86_64",
    ),
}
ANOTHER_BACKEND = (
    lambda m: m.setattr(jax, "default_backend", lambda: "tpu"),
    "JAX runs on tpu",
)


@pytest.fixture
def batch():
    shape = Shape(tokens=8, rows=2, columns=4, kv_heads=2, groups=2, head_size=32)
    return tuple(map(jnp.asarray, make_batch(shape, [1, 6], [20, 33])))


def test_this_machine_has_kernels():
    assert cpu.unavailable() is None


@pytest.mark.parametrize(
    ("patch", "reason"),
    [*MACHINES.values(), ANOTHER_BACKEND],
    ids=[*MACHINES, "another backend"],
)
def test_a_machine_without_kernels_says_why_and_takes_xla(
    patch, reason, batch, monkeypatch
):
    expected = paged_attention(*batch, scale=0.2, implementation="xla")
    patch(monkeypatch)
    assert reason in cpu.unavailable()
    with pytest.raises(NotImplementedError, match=reason):
        paged_attention(*batch, scale=0.2, implementation="cpu")
    with pytest.raises(NotImplementedError, match=reason):
        pack(jnp.zeros((1, 16, 32)))
    np.testing.assert_array_equal(paged_attention(*batch, scale=0.2), expected)


@pytest.mark.parametrize(("patch", "reason"), MACHINES.values(), ids=MACHINES)
def test_the_reason_is_logged_once(patch, reason, batch, monkeypatch, caplog):
    patch(monkeypatch)
    for _ in range(3):
        paged_attention(*batch, scale=0.2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "paged attention" in caplog.text
    assert reason in caplog.text


def test_a_backend_with_kernels_of_its_own_logs_nothing(batch, monkeypatch, caplog):
    patch, _ = ANOTHER_BACKEND
    patch(monkeypatch)
    paged_attention(*batch, scale=0.2)
    assert not caplog.records


@pytest.mark.parametrize("head_size", [24, 272])
def test_a_head_size_that_no_kernel_takes_goes_to_xla(head_size):
    shape = Shape(tokens=2, rows=2, columns=2, kv_heads=1, groups=1)
    batch = make_batch(shape._replace(head_size=head_size), [1, 1], [3, 20])
    batch = tuple(map(jnp.asarray, batch))
    with pytest.raises(NotImplementedError, match=f"head size {head_size} "):
        paged_attention(*batch, scale=0.2, implementation="cpu")
    np.testing.assert_array_equal(
        paged_attention(*batch, scale=0.2),
        paged_attention(*batch, scale=0.2, implementation="xla"),
    )


def test_a_numba_that_does_not_load_is_a_numba_that_is_not_there(batch, monkeypatch):
    _find_numba(monkeypatch, importlib.util.find_spec("numba"))
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba" in cpu.unavailable()
    paged_attention(*batch, scale=0.2)
