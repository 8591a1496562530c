"""What has become of a request, told anew as events to who has not heard of it.

Owns that story. Never sees a policy.
"""

from __future__ import annotations

from typing import Any

from jaxserve.core import Event, Request


def arrived(request: Request, time_s: float) -> Event:
    """The event that a plan sees a request for the first time."""
    return _event(
        request,
        "arrived",
        time_s,
        arrival_s=request.arrival_s,
        prompt_tokens=len(request.prompt),
        priority=request.priority,
        user=request.user,
        deadline_s=request.deadline_s,
    )


def retold(request: Request, slot: int | None, prompt_tokens: int) -> list[Event]:
    """How far a request has got, as if it had just happened.

    Args:
      slot: None if it has none now.
      prompt_tokens: that it has computed.
    """
    time_s = request.arrival_s
    told = [arrived(request, time_s)]
    if request.num_cached_tokens is None:
        return told
    where = -1 if slot is None else slot
    cached = request.num_cached_tokens
    told.append(
        _event(
            request,
            "admitted",
            time_s,
            slot=where,
            cached_tokens=cached,
            restored_tokens=0,
            context_tokens=len(request.prompt),
            first=True,
        )
    )
    told.append(
        _event(
            request,
            "progressed",
            time_s,
            slot=where,
            prompt_tokens=max(prompt_tokens - cached, 0),
            output_tokens=len(request.output),
        )
    )
    if slot is None:
        lost = len(request.prompt) + len(request.output)
        told.append(
            _event(
                request,
                "preempted",
                time_s,
                slot=where,
                mode="recompute",
                lost_tokens=lost,
            )
        )
    return told


def _event(request: Request, kind: str, time_s: float, **data: Any) -> Event:
    return Event(kind, time_s, request.request_id, {"index": request.index, **data})
