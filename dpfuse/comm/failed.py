"""Marks errors: that collectives raise, and of which the peers have heard. Knows no group and no tensor."""

from __future__ import annotations

import builtins
from typing import Any

__all__ = ["has_raised", "mark", "mark_told", "was_told"]

FAILED, TOLD = "_dpfuse_collective_failed", "_dpfuse_peers_told"  # in the `__dict__` of an error
GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11


def mark(error: BaseException) -> None:
    """Make `has_raised` true for an error, also where its class forbids attributes."""
    object.__getattribute__(error, "__dict__")[FAILED] = True


def has_raised(error: BaseException) -> bool:
    """Whether a collective has raised an error, or another error from which this one comes.

    It is then unknown in which collective the peers wait.
    """
    found = [error]
    for one in found:  # it grows meanwhile
        if FAILED in object.__getattribute__(one, "__dict__"):
            return True
        others = (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, GROUPS) else ()))
        found += [other for other in others if other is not None and all(other is not known for known in found)]
    return False


def mark_told(error: BaseException) -> None:
    """Make `was_told` true for an error."""
    object.__getattribute__(error, "__dict__")[TOLD] = True


def was_told(error: BaseException) -> bool:
    """Whether this rank has told its peers of an error, in the vote in which they waited for it."""
    return TOLD in object.__getattribute__(error, "__dict__")
