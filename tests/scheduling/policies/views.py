"""Views of requests, for tests that ask a policy directly."""

from __future__ import annotations

from jaxserve.scheduling.policies import Policy, View

BLANK = View(
    index=0,
    arrival_s=0.0,
    prompt_tokens=1,
    output_tokens=0,
    max_output_tokens=1,
    cached_tokens=0,
    running=False,
    preemptions=0,
    priority=0,
    user=None,
    deadline_s=None,
    tags={},
    text=None,
)


def views(**requests: dict) -> dict[str, View]:
    """A view of each request by name, submitted in this order."""
    return {
        name: BLANK._replace(index=index, **fields)
        for index, (name, fields) in enumerate(requests.items())
    }


def ranked(policy: Policy, requests: dict[str, View], now_s: float = 0.0) -> str:
    """Their names, first to last, under a policy's first state."""
    state = policy.init()
    return "".join(
        sorted(requests, key=lambda name: policy.rank(state, requests[name], now_s))
    )
