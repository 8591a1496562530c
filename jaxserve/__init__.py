"""jaxserve: LLM serving as a JAX program, and a laboratory for its scheduling.

Names are imported when first used: the host half (`jaxserve.scheduling`, `.metrics`)
works without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine as AsyncEngine
    from jaxserve.async_engine import EngineStopped as EngineStopped
    from jaxserve.async_engine import QueueFull as QueueFull
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.engine import Engine as Engine
    from jaxserve.llm import LLM as LLM
    from jaxserve.outputs import RequestOutput as RequestOutput
    from jaxserve.rollout import Rollouts as Rollouts
    from jaxserve.sampling_params import SamplingParams as SamplingParams
    from jaxserve.simulation import simulate as simulate
    from jaxserve.snapshot import Snapshot as Snapshot

_HOME = {
    "LLM": "jaxserve.llm",
    "AsyncEngine": "jaxserve.async_engine",
    "EngineStopped": "jaxserve.async_engine",
    "QueueFull": "jaxserve.async_engine",
    "Engine": "jaxserve.engine",
    "EngineConfig": "jaxserve.config",
    "SamplingParams": "jaxserve.sampling_params",
    "RequestOutput": "jaxserve.outputs",
    "Rollouts": "jaxserve.rollout",
    "Snapshot": "jaxserve.snapshot",
    "simulate": "jaxserve.simulation",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineStopped",
    "QueueFull",
    "RequestOutput",
    "Rollouts",
    "SamplingParams",
    "Snapshot",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
