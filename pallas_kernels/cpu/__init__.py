"""Kernels for x86 CPUs: XLA custom calls written in numba, no compiler at install.

Owns when they apply. Nothing here imports numba before it is known to be there; where
the kernels do not apply, `NotImplementedError` says why, and the first time so does the
log, for XLA then does the work several times more slowly.

Release mode checks no address, for the host guarantees what the kernels read: a plan
names only blocks that a slot holds, and room for every row that is written (see
docs/design.md). `PALLAS_KERNELS_CHECKED=1` in the environment makes each call check its
table, lengths and addresses, and fail with an error; the tests run so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import platform
from typing import Any

import jax

_OLDEST_NUMBA = (0, 66)
_MOST_HEAD = 256

PANEL = 32
"""Columns of a packed weight that lie together."""


def unavailable() -> str | None:
    """Why no kernel here applies in this process; None if they do."""
    if jax.default_backend() != "cpu":
        return f"JAX runs on {jax.default_backend()}"
    return _unusable()


@functools.cache
def _unusable() -> str | None:
    if os.environ.get("PALLAS_KERNELS_CPU") == "0":
        return "PALLAS_KERNELS_CPU=0 is set"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()} is not Linux on x86_64"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install 'jaxserve[cpu]'"
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:  # as with a NumPy that it does not know
        return f"numba does not load: {error}"
    if tuple(map(int, numba.__version__.split(".")[:2])) < _OLDEST_NUMBA:
        oldest = ".".join(map(str, _OLDEST_NUMBA))
        return f"numba {numba.__version__} is older than {oldest}"
    if missing := {"avx2", "fma"} - instruction_sets():
        return f"the processor lacks {', '.join(sorted(missing))}"
    return None


def instruction_sets() -> frozenset[str]:
    """What numba compiles for, in LLVM's names (NUMBA_CPU_FEATURES sets it)."""
    registry = importlib.import_module("numba.core.registry")
    features = registry.cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array | int,
    *,
    scale: float,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `pallas_kernels.api.paged_attention`."""
    del num_decode  # a decode row is a chunk of one token
    calls = _calls(pages, soft_cap)
    out = calls.attend(
        q.astype(pages.dtype),
        pages,
        table,
        kv_lens,
        cu_q_lens,
        scale=scale,
        window=window,
        checked=_checked(),
    )
    return out.astype(q.dtype)


def rotary_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array | int,
    *,
    scale: float,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.api.rotary_attention`."""
    del num_decode
    return _calls(pages, soft_cap).write_and_attend(
        qkv,
        cos,
        sin,
        pages,
        page_ids,
        offsets,
        table,
        kv_lens,
        cu_q_lens,
        scale=scale,
        window=window,
        checked=_checked(),
    )


def _calls(pages: jax.Array, soft_cap: float | None) -> Any:
    """The calls, where the attention kernels take such pages and options."""
    reason = unavailable()
    head = pages.shape[-1]
    if reason is None and (head % 16 or not 32 <= head <= _MOST_HEAD):
        reason = f"head size {head} is no multiple of 16 from 32 to {_MOST_HEAD}"
    if reason is None and soft_cap is not None:
        reason = f"logits are bounded by {soft_cap=}"
    if reason is not None:
        refuse("paged attention", reason)
    from pallas_kernels.cpu import calls  # only now: it needs numba

    return calls


def _checked() -> bool:
    return os.environ.get("PALLAS_KERNELS_CHECKED", "0") not in ("", "0")


def refuse(what: str, reason: str) -> None:
    """Raise NotImplementedError, and log the reason once if it is a CPU's."""
    if jax.default_backend() == "cpu":
        _log(what, reason)
    raise NotImplementedError(reason)


@functools.cache
def _log(what: str, reason: str) -> None:
    logging.getLogger(__name__).warning("%s runs in XLA: %s", what, reason)
