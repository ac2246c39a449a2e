"""A right call of a public function or class, of which a test makes one argument wrong. Knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Call", "of", "undone", "values"]


@dataclass(frozen=True)
class Call:
    """A right call.

    Args:
        function: the public function or class, or what gets a wrapped model first.
        arguments: by name, for an empty folder; those that are left out here get no wrong value.
        free: arguments that get no wrong value, since any object is right.
    """

    function: Callable[..., Any]
    arguments: Callable[[Path], dict[str, Any]]
    free: tuple[str, ...] = ()


def values(**arguments: Any) -> Callable[[Path], dict[str, Any]]:
    """Arguments that are the same in each call."""
    return lambda _: dict(arguments)


def undone(function: Callable[..., Any]) -> Callable[..., None]:
    """A function that changes the process, as long as the context lasts that it returns."""

    def call(**arguments: Any) -> None:
        with function(**arguments):
            pass

    return call


def of(make: Callable[[], Any], method: str) -> Callable[..., Any]:
    """A method of a new object."""
    return lambda **arguments: getattr(make(), method)(**arguments)
