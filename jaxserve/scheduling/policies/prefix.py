"""Policies that look at how much of a prompt is in the prefix cache.

Owns prefix_affinity and prefix_sjf. Never sees a block: the view counts cached tokens.
The cache may change with every plan, so those that have never run are ranked at each.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.scheduling.policies.base import Order, Policy, View
from jaxserve.scheduling.policies.combine import bounded_wait
from jaxserve.scheduling.policies.queues import fcfs


def prefix_affinity(skip_limit: int | None = 100) -> Policy:
    """Longest cached prefix first (SGLang's LPM, Zheng et al. 2024), then FCFS.

    Serves requests of one prefix together, while the cache still holds it. One that
    shares nothing waits for all that do, at most until skip_limit later arrivals have
    passed it.

    Args:
      skip_limit: as in `bounded_wait`; None is no bound.
    """
    return _bounded(_by(lambda view: -view.cached_tokens), skip_limit)


def prefix_sjf(skip_limit: int | None = 100) -> Policy:
    """Fewest prompt tokens left to compute first, then FCFS.

    Shortest job first for prefills: what is cached costs nothing. A long prompt waits
    for all shorter ones, at most until skip_limit later arrivals have passed it; with
    no bound, a stream of short prompts keeps it waiting for ever.

    Args:
      skip_limit: as in `bounded_wait`; None is no bound.
    """
    return _bounded(
        _by(lambda view: view.prompt_tokens - view.cached_tokens), skip_limit
    )


def _by(key: Callable[[View], int]) -> Policy:
    """Smallest key first among those that have never run; those that have, come before
    them in order of arrival, so that a preempted request is not sorted anew."""

    def has_run(view: View) -> bool:
        return view.running or view.preemptions > 0

    def rank(state: None, view: View, now_s: float) -> tuple[float, Order]:
        place = (view.arrival_s, view.index)
        return 0, (0, *place) if has_run(view) else (1, key(view), *place)

    return fcfs()._replace(
        rank=rank,
        until=lambda state, view, now_s: None if has_run(view) else now_s,
    )


def _bounded(policy: Policy, skip_limit: int | None) -> Policy:
    return policy if skip_limit is None else bounded_wait(policy, skip_limit)
