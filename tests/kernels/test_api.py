"""Which implementation `paged_attention` takes, and what it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import api, paged_attention
from tests.kernels.batches import Shape, make_batch

SHAPE = Shape(tokens=2, rows=2, columns=2, kv_heads=2, groups=2, head_size=8)


@pytest.fixture
def batch():
    return make_batch(SHAPE, [1, 1], [3, 20])


def _refuse(reason):
    def attend(*args, **kwargs):
        raise NotImplementedError(reason)

    return attend


def _accept(value):
    def attend(q, *args, scale, **options):
        return jnp.full_like(q, value * scale)

    return attend


def test_the_first_that_accepts_is_taken(batch, monkeypatch):
    table = {"a": _refuse("no"), "b": _accept(2.0), "c": _accept(3.0)}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table)
    assert np.unique(paged_attention(*batch, scale=0.5)) == 1.0
    assert np.unique(paged_attention(*batch, scale=0.5, implementation="c")) == 1.5


def test_a_named_implementation_does_not_fall_through(batch, monkeypatch):
    table = {"a": _refuse("needs a GPU"), "b": _accept(2.0)}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        paged_attention(*batch, scale=1.0, implementation="a")


def test_all_reasons_are_reported_when_none_accepts(batch, monkeypatch):
    table = {"a": _refuse("D=8 is too small"), "b": _refuse("needs a TPU")}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table)
    with pytest.raises(ExceptionGroup) as caught:
        paged_attention(*batch, scale=1.0)
    assert [str(e) for e in caught.value.exceptions] == [
        "D=8 is too small",
        "needs a TPU",
    ]
    assert [e.__notes__ for e in caught.value.exceptions] == [
        ["from implementation 'a'"],
        ["from implementation 'b'"],
    ]


def test_an_error_of_another_kind_is_not_swallowed(batch, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError

    table = {"a": broken, "b": _accept(2.0)}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table)
    with pytest.raises(ZeroDivisionError):
        paged_attention(*batch, scale=1.0)


def test_an_unknown_name_lists_the_known(batch):
    with pytest.raises(ValueError, match="'cuda' is unknown.*'xla'.*'reference'"):
        paged_attention(*batch, scale=1.0, implementation="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((2, 4), np.float32)}, r"q of shape \(2, 4\) must be \[T, Hq"),
        ({"q": np.zeros((2, 4, 16), np.float32)}, r"end in \(2, D\) with D=16 of q"),
        ({"q": np.zeros((2, 3, 8), np.float32)}, "Hq=3 of q must be a multiple of"),
        ({"q": np.zeros((2, 4, 8), np.float16)}, "q of float16 and pages of float32"),
        ({"pages": np.zeros((6, 16, 2, 2, 8), np.int8)}, "pages of int8 must be"),
        ({"kv_lens": np.zeros(3, np.int32)}, r"kv_lens of shape \(3,\)"),
        ({"cu_q_lens": np.zeros(2, np.int32)}, r"cu_q_lens of shape \(2,\)"),
        ({"num_decode": np.zeros(1, np.int32)}, r"num_decode of shape \(1,\)"),
    ],
)
def test_bad_arguments_are_named(batch, change, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch._replace(**change), scale=1.0)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_leaves_out_the_token_itself_is_refused(batch, window):
    with pytest.raises(ValueError, match=f"window={window} must be at least 1"):
        paged_attention(*batch, scale=1.0, window=window)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": jnp.zeros(1, jnp.int32)}, r"window of int32\[1\] must be i32\[\]"),
        ({"window": jnp.float32(3)}, r"window of float32\[\] must be i32\[\]"),
        ({"soft_cap": 0.0}, r"soft_cap=0\.0 must be above 0"),
        ({"soft_cap": float("nan")}, "soft_cap=nan must be above 0"),
    ],
)
def test_options_without_a_meaning_are_named(batch, option, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch, scale=1.0, **option)
