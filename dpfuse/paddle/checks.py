"""Checks of the arguments of Paddle's APIs that several of them take. Knows no model and no program."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["instance", "number"]

T = TypeVar("T")


def instance(name: str, value: Any, kind: type[T], remedy: str = "") -> T:
    """Return `value`, which must be an instance of `kind`. The text of the error ends with `remedy`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be an instance of {kind.__name__}, got {type(value).__name__}{remedy and f'; {remedy}'}"
        )
    return value


def number(name: str, value: Any) -> float:
    """Return `value`, which must be an integer or a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return value
