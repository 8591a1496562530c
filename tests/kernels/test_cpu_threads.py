"""CPU kernels in several Python threads at once, which share one thread pool of XLA."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import packed, paged_attention
from tests.kernels.batches import Shape, make_batch
from tests.kernels.marks import needs_cpu_kernels

pytestmark = needs_cpu_kernels
CALLS = 200
PATIENCE = 120  # seconds that a thread may take; it needs less than one

_attend = functools.partial(paged_attention, scale=0.125, implementation="cpu")


def _random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def _attention(shape: Shape, q_lens, kv_lens) -> Callable[[], jax.Array]:
    return functools.partial(jax.jit(_attend), *make_batch(shape, q_lens, kv_lens))


def _linear(rows: int, inner: int, columns: int) -> Callable[[], jax.Array]:
    weight = packed.pack(jnp.asarray(_random(1, inner, columns)))
    x = _random(rows, inner)
    return functools.partial(jax.jit(lambda x, w: packed.linear(x, w, 0)), x, weight)


def _scanned(shape: Shape, q_lens, kv_lens, layers: int) -> Callable[[], jax.Array]:
    """Attention and a linear layer by turns, inside one program."""
    q, *rest = make_batch(shape, q_lens, kv_lens)
    size = q.shape[1] * q.shape[2]
    weight = packed.pack(jnp.asarray(_random(layers, size, size)) / size**0.5)

    @jax.jit
    def forward(q, weight, *rest):
        def layer(q, i):
            y = _attend(q, *rest).reshape(len(q), size)
            return packed.linear(y, weight, i).reshape(q.shape), None

        return lax.scan(layer, q, jnp.arange(layers))[0]

    return functools.partial(forward, q, weight, *rest)


TINY = Shape(2, 2, 2, kv_heads=2, groups=1, head_size=32)
SMALL = Shape(12, 6, 6, kv_heads=2, groups=2, head_size=32)
PROGRAMS = {
    "tiny": (lambda: _attention(TINY, [1, 1], [20, 9]), lambda: _linear(2, 16, 64)),
    "different": (
        lambda: _attention(SMALL, [1, 1, 1, 8], [70, 90, 0, 64]),
        lambda: _linear(130, 64, 320),
    ),
    "scans": (
        lambda: _scanned(TINY, [1, 1], [20, 9], 6),
        lambda: _scanned(SMALL, [1, 1, 1, 8], [70, 90, 0, 64], 3),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_threads_get_what_each_gets_alone(name):
    programs = [make() for make in PROGRAMS[name]]
    expected = [np.asarray(program()) for program in programs]
    start = threading.Barrier(len(programs))
    outs: list[list[np.ndarray]] = [[] for _ in programs]

    def work(program, out):
        start.wait(PATIENCE)
        for _ in range(CALLS):
            out.append(np.asarray(program()))

    threads = [
        threading.Thread(target=work, args=args, daemon=True)
        for args in zip(programs, outs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for out, value in zip(outs, expected, strict=True):
        assert len(out) == CALLS
        for other in out:
            np.testing.assert_array_equal(other, value)


_FIRST_USE = """
import sys, threading
import jax.numpy as jnp
from pallas_kernels import packed

weight = packed.pack(jnp.ones((1, 16, 32)))
start = threading.Barrier(4)
results = []

def work():
    start.wait()
    results.append(float(packed.linear(jnp.ones((1, 16)), weight, 0).sum()))

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [512.0] * 4, results
"""


def test_threads_may_use_a_kernel_for_the_first_time_together():
    subprocess.run(
        [sys.executable, "-c", _FIRST_USE],
        check=True,
        timeout=PATIENCE,
        capture_output=True,
    )
