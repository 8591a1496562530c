"""Models: decoder families, checkpoint loading, tokenizers.

Names are imported when first used, so that importing a corner of this package (the
protocol, the detokenizer) costs neither a checkpoint library nor a tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.models.loading import load as load
    from jaxserve.models.locate import smollm2_path as smollm2_path

__all__ = ["load", "smollm2_path"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from jaxserve.models.loading import load

        return load
    if name == "smollm2_path":
        from jaxserve.models.locate import smollm2_path

        return smollm2_path
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
