"""Refusals that every generator shares; each names field, value, rule and remedy."""

from __future__ import annotations

import math
import numbers


def count(field: str, value: object, low: int, remedy: str) -> int:
    """The value as an int of at least `low`, or ValueError."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or int(value) < low:  # type: ignore[call-overload]
        raise ValueError(f"{field}={value!r} must be an integer >= {low}; {remedy}")
    return int(value)  # type: ignore[call-overload]


def above(field: str, value: object, low: float, remedy: str) -> float:
    """The value as a finite float greater than `low`, or ValueError."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not low < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{field}={value!r} must be a number > {low:g}; {remedy}")
    return float(value)  # type: ignore[arg-type]
