"""Which parameters several wrappers average, such as those of an encoder of two models. Knows no hook and no bucket."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["backwards_begun", "count_backward", "look_again", "shared"]

shared: set[int] = set()  # ids of such parameters; empty in nearly every program
_begun = 0


def count_backward() -> int:
    """Note that a wrapper begins a backward while some parameters are shared; return how many have."""
    global _begun
    _begun += 1
    return _begun


def backwards_begun() -> int:
    """Return how many such backwards have begun."""
    return _begun


def look_again(of_wrappers: Iterable[Iterable[int]]) -> None:
    """Find them again.

    Args:
        of_wrappers: the ids of the parameters of each wrapper.
    """
    seen: set[int] = set()
    found: set[int] = set()
    for ids in map(set, of_wrappers):
        found |= seen & ids
        seen |= ids
    shared.intersection_update(found)  # never empty in between: another thread may read it
    shared.update(found)
