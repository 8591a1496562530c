"""Swap, disk or recompute: what each would cost a victim, in seconds.

Owns the formulas, and the fit of a machine's rates to what was measured. Never sees a
request, a plan or a clock: facts come in as numbers.

Where every cost is linear in tokens, length cancels: swapping wins if a token's bytes
over the bandwidth are less than its prefill time. A choice by victim is real because of
the way out, the link's queue, what survives in the prefix cache, attention's growth,
and the others whose launches grow by what is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

Mode = Literal["recompute", "swap", "disk", "auto", "article"]
"""How victims are preempted: always one way, or by a rule (see `choose`)."""

Way = Literal["recompute", "swap", "disk"]
"""How one victim is."""

_PRIOR = 1e-3  # measurements that the proportions of a guess count for


class Victim(NamedTuple):
    """What would be lost of a request.

    Attributes:
      input_tokens: of its prompt.
      context_tokens: that it must have before it samples again: prompt and output.
      kept_tokens: leading ones whose KV is expected to be found in the cache if it is
        computed again.
      blocks: that would be copied back if it is not.
      stored: those of them that are below the device already.
      others: requests that share its launches. What is computed again makes the launch
        longer for each of them; what is copied does not.
    """

    input_tokens: int
    context_tokens: int
    kept_tokens: float
    blocks: float
    stored: float = 0.0
    others: int = 0


class Rates(NamedTuple):
    """What a machine takes.

    Attributes:
      token_s: seconds of a prompt token.
      pair_s: seconds of each token that a prompt token attends to.
      out_s, in_s: seconds of a block on its way to the host, and back.
      transfer_s: of any transfer.
      save_s, load_s: seconds of a block from the host to disk, and back.
      disk_transfer_s: of any transfer between them.
    """

    token_s: float
    pair_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    transfer_s: float = 0.0
    save_s: float = 0.0
    load_s: float = 0.0
    disk_transfer_s: float = 0.0


class Queues(NamedTuple):
    """Seconds until a way is free."""

    link_s: float = 0.0
    disk_s: float = 0.0


IDLE = Queues()


def prefill_pairs(start: float, end: float) -> float:
    """Tokens that the prompt tokens [start, end) attend to, themselves included."""
    return (end * (end + 1) - start * (start + 1)) / 2


def recompute_s(victim: Victim, rates: Rates) -> float:
    """Seconds to compute a victim's lost tokens again."""
    kept, end = victim.kept_tokens, victim.context_tokens
    pairs_s = prefill_pairs(kept, end) * rates.pair_s
    return (end - kept) * rates.token_s + pairs_s


def swap_s(victim: Victim, rates: Rates, queue_s: float = 0.0) -> float:
    """Seconds to copy a victim's blocks out and in again.

    Args:
      queue_s: until the link is free.
    """
    out_s = (victim.blocks - victim.stored) * rates.out_s
    ways_s = out_s + victim.blocks * rates.in_s
    return queue_s + 2 * rates.transfer_s + ways_s


def disk_s(victim: Victim, rates: Rates, queues: Queues = IDLE) -> float:
    """Seconds to copy a victim's blocks out to disk and in again."""
    save_s = (victim.blocks - victim.stored) * rates.save_s
    ways_s = save_s + victim.blocks * rates.load_s
    there_s = queues.disk_s + 2 * rates.disk_transfer_s + ways_s
    return swap_s(victim, rates, queues.link_s) + there_s


def break_even_tokens_s(bandwidth: float, token_bytes: int) -> float:
    """Prefill speed, in tokens a second, at which both ways take equally long, one way
    over the link and all else left out: B / kappa. Below it swapping wins.

    Args:
      bandwidth: of the link, bytes a second. token_bytes: KV bytes of a token.
    """
    return bandwidth / token_bytes


def costs_s(victim: Victim, rates: Rates, queues: Queues = IDLE) -> dict[Way, float]:
    """Seconds that each way takes."""
    return {
        "recompute": recompute_s(victim, rates),
        "swap": swap_s(victim, rates, queues.link_s),
        "disk": disk_s(victim, rates, queues),
    }


def choose(
    mode: Mode,
    victim: Victim,
    rates: Rates,
    queues: Queues = IDLE,
    room: Collection[Way] = ("recompute", "swap", "disk"),
) -> Way:
    """How to preempt a victim.

    Args:
      mode: "auto" compares how long each way delays the victim, and all others that
        computing again delays. "article" is a published rule of
        thumb, kept for study: M_KV / B < n_input / S, the bytes of all tokens over the
        link's bandwidth against the prompt's tokens over the prefill speed. It leaves
        out the way to the host and the tokens generated. What has no room on the host
        goes to disk, and without room there it is computed again.
      room: ways for which there is room; "recompute" needs none.
    """
    if mode == "auto":
        costs = costs_s(victim, rates, queues)
        costs["recompute"] *= 1 + victim.others
        return min((way for way in costs if way in room), key=costs.__getitem__)
    article = victim.blocks * rates.in_s < victim.input_tokens * rates.token_s
    if mode == "recompute" or (mode == "article" and not article):
        return "recompute"
    if mode != "disk" and "swap" in room:
        return "swap"
    return "disk" if "disk" in room else "recompute"


class Fit:
    """A linear function without constant, fitted to what is measured as it comes.

    Least squares on relative errors, for a launch that takes 10 times as long shall not
    count 100 times as much; no coefficient is negative. What the measurements do not
    tell apart is shared in the proportions of the guess: noise in a few launches that
    are much alike would make the coefficients any size.

    Args:
      guess: coefficients to start from, all above 0. Their proportions stay the prior;
        their size does not count once anything is measured.
      memory: how much a measurement counts after the next one, under 1 to forget.
    """

    def __init__(self, guess: Sequence[float], *, memory: float = 0.98):
        self._unit = np.array(guess, np.float64)
        self._memory = memory
        # Of rows x * guess / y: sums of their products, and of themselves.
        self._products = np.zeros((len(guess), len(guess)))
        self._sum = np.zeros(len(guess))
        self._weights: np.ndarray | None = np.ones(len(guess))  # None: to be solved

    def observe(self, x: Sequence[float], y: float) -> None:
        """Take in that x came to y; y > 0."""
        row = np.array(x, np.float64) * self._unit / y
        self._products = self._memory * self._products + np.outer(row, row)
        self._sum = self._memory * self._sum + row
        self._weights = None

    def _solve(self) -> np.ndarray:
        """The weights of the guess that fit best, none negative."""
        # The guess times this fits best; proportions are measured against that.
        scale = self._sum.sum() / self._products.sum()
        prior = _PRIOR * np.eye(len(self._unit))
        products, sums = scale**2 * self._products + prior, scale * self._sum + _PRIOR
        free = np.ones(len(self._unit), bool)
        weights = np.zeros(len(self._unit))
        while free.any():
            weights[free] = np.linalg.solve(products[np.ix_(free, free)], sums[free])
            if (weights >= 0).all():
                break
            free[np.argmin(weights)] = False
            weights[~free] = 0.0
        return scale * weights

    @property
    def coefficients(self) -> np.ndarray:
        """f64[len(guess)], none negative."""
        if self._weights is None:
            self._weights = self._solve()
        return self._weights * self._unit

    def __call__(self, x: Sequence[float]) -> float:
        """What x is expected to come to."""
        return float(np.array(x, np.float64) @ self.coefficients)
