"""An engine at one moment, as a value: taken, kept in a file, and resumed elsewhere.

Owns the format. What belongs to the engine that resumes (its policy's functions, its
tokenizer) stands in it by name. Never sees what the parts mean.

A snapshot is a pickle: load files from those whom you trust alone.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig, EngineShape
from jaxserve.scheduling.policies import Policy

_MAGIC = b"jaxserve snapshot 1\n"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What an engine knew between two launches; it never changes.

    It holds the KV pages in use, host memory of the tiers, queues, counts, outputs not
    yet returned and the policy's state. It does not hold weights, or files of a disk
    tier: what these have lost by then is computed again.

    Attributes:
      config, shape: of the engine.
      fingerprint: of its model and weights.
      policy: names of its policy's functions.
      time_s: on its clock; the engine that resumes goes on from there.
      data: the rest.
    """

    config: EngineConfig
    shape: EngineShape
    fingerprint: bytes
    policy: tuple[str, ...]
    time_s: float
    data: bytes = dataclasses.field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_bytes(_MAGIC + pickle.dumps(self))

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Read it from a file, whose maker is trusted: reading it may run code.

        Raises:
          ValueError: it is not one of this version, or not all of it.
        """
        data = Path(path).read_bytes()
        if not data.startswith(_MAGIC):
            raise ValueError(
                f"{path} must be a snapshot of this version, which begins with "
                f"{_MAGIC!r}; take it again"
            )
        try:
            found = pickle.loads(data[len(_MAGIC) :])
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise ValueError(
                f"{path} is damaged, or of other code: {error!r}; take it again"
            ) from error
        if not isinstance(found, cls):
            raise ValueError(f"{path} holds a {type(found).__name__}, not a snapshot")
        return found


def policy_names(policy: Policy) -> tuple[str, ...]:
    """What tells one policy's functions from another's; not what they close over."""
    return tuple(
        f"{getattr(part, '__module__', '')}.{getattr(part, '__qualname__', part)}"
        for part in policy
    )


def pack(state: Mapping[str, Any], theirs: Mapping[str, Any]) -> bytes:
    """The state as bytes.

    Args:
      theirs: by name, objects in it that belong to whoever unpacks it.
    """
    names = {id(value): name for name, value in theirs.items() if value is not None}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return names.get(id(obj))

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(dict(state))
    return file.getvalue()


def unpack(data: bytes, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The state again, with the unpacker's own objects in their places."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> Any:
            return theirs[pid]

    return Unpickler(io.BytesIO(data)).load()
