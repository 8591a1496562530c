"""What one field of a configuration may hold: the checks that several fields share.

Each error names the field, its value, the rule and the remedy.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence


def integer(field: str, value: object, low: int, hint: str = "") -> int:
    """The value as an int, or ValueError."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or int(value) < low:  # type: ignore[call-overload]
        raise ValueError(f"{field}={value!r} must be an integer >= {low}{hint}")
    return int(value)  # type: ignore[call-overload]


def real(field: str, value: object, low: float, high: float, hint: str = "") -> float:
    """The value as a float, or ValueError; NaN is in no range."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high:  # type: ignore[operator]
        span = f"[{low:g}, {high:g}]"
        raise ValueError(f"{field}={value!r} must be a number in {span}{hint}")
    return float(value)  # type: ignore[arg-type]


def one_of(field: str, value: object, known: Sequence[str]) -> None:
    """ValueError if the value is none of those known."""
    if value not in known:
        raise ValueError(f"{field}={value!r} must be one of {list(known)}")


def flag(field: str, value: object) -> None:
    """ValueError if the value is no bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r} must be True or False")


def several(field: str, value: object, what: str) -> tuple:
    """A collection's items, none for None, or ValueError."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ValueError(f"{field}={value!r} must be {what}, or None")
    return tuple(value)


def texts(field: str, value: object) -> tuple[str, ...] | None:
    """A collection of non-empty strings, None for none, or ValueError."""
    found = several(field, value, "a non-empty string, or several")
    for one in found:
        if not isinstance(one, str) or not one:
            raise ValueError(f"{field}={one!r} must be a non-empty string, or several")
    return found or None


def ids(field: str, value: object) -> tuple[int, ...]:
    """A collection of token ids, or ValueError."""
    found = several(field, value, "several, each an integer >= 0")
    return tuple(integer(field, token, 0) for token in found)
