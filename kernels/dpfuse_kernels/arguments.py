"""Checks of the types of arguments, for what is made once per plan; what runs for each bucket has none."""

from __future__ import annotations

from typing import Any

__all__ = ["instance", "whole"]


def instance(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError unless `value` is of one of these kinds, which are `wanted` in words. A text is no sequence.

    Example:
        >>> instance("flat", [1.0], tuple, "a tuple")
        Traceback (most recent call last):
        TypeError: flat is [1.0] of type list, expected a tuple. Pass one.
    """
    if not isinstance(value, kinds) or isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.100} of type {type(value).__name__}, expected {wanted}. Pass one.")


def whole(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError unless `value` is an int of at least `least`.

    Example:
        >>> whole("chunk", 0, 1)
        Traceback (most recent call last):
        ValueError: chunk is 0, expected at least 1. Correct it.
    """
    instance(name, value, int, "an integer")
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}. Correct it.")
