"""Checks of what a user passes. Each names the argument, says what it got and what it expected. Knows nothing else."""

from __future__ import annotations

import operator
import os
from numbers import Real
from typing import Any

__all__ = ["a_callable", "a_path", "flag", "instance", "integer", "real"]


def instance(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str, remedy: str = "") -> None:
    """Raise TypeError unless `value` is of one of these kinds, which are `wanted` in words."""
    if not isinstance(value, kinds):
        _refuse(name, value, wanted, remedy)


def a_callable(name: str, value: Any, wanted: str, remedy: str = "") -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        _refuse(name, value, wanted, remedy)


def a_path(name: str, value: Any, example: str) -> None:
    """Raise TypeError unless `value` is a path of a file or folder, such as `example`."""
    instance(name, value, (str, os.PathLike), "a path", f"pass for example {example!r}")


def flag(name: str, value: Any) -> bool:
    """Return `value`, which must be True or False.

    Raises:
        TypeError: it is neither.
    """
    instance(name, value, bool, "True or False", f"pass for example {name}=True")
    return bool(value)


def real(name: str, value: Any, wanted: str = "a number", remedy: str = "") -> None:
    """Raise TypeError unless `value` is a number of Python or numpy, and not True or False."""
    if not isinstance(value, Real) or isinstance(value, bool):
        _refuse(name, value, wanted, remedy)


def integer(name: str, value: Any, least: int) -> int:
    """Return `value`, which must be a whole number of at least `least`; of Python, numpy or torch.

    Raises:
        TypeError, ValueError: it is none.
    """
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if whole < least:
        raise ValueError(f"{name} must be at least {least}, got {whole}")
    return whole


def _refuse(name: str, value: Any, wanted: str, remedy: str) -> None:
    ending = f"; {remedy}" if remedy else ""
    raise TypeError(f"{name} must be {wanted}, got {value!r:.100} of type {type(value).__name__}{ending}")
