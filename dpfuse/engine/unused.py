"""Unused parameters: which of them no rank has used, and the warnings that name them. Touches no gradient.

The second warning is of parameters that keep other buckets waiting, since they never become ready.

A bucket packs zeros for a parameter without a gradient. If some rank has used it, every rank gets the mean. If none
has, its `.grad` stays as it was. The flags of the report say which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpfuse.engine import messages
from dpfuse.engine.report import Report

__all__ = ["UnusedParameters"]

HELD_UP = 4  # backwards in a row in which one bucket holds others up, before a warning names it


class UnusedParameters:
    """The unused parameters of one model on this rank.

    Args:
        rank: of this process.
        warns: whether to warn, once, of parameters without a gradient, and of a bucket that holds others up.
    """

    def __init__(self, rank: int, *, warns: bool) -> None:
        self._rank = rank
        self._warns = warns
        self._warned = False

    def untouched(self, missing: Sequence[int], report: Report) -> frozenset[int]:
        """Return those of the `missing` registration indices that no rank has used. Waits for the device."""
        return frozenset(missing) - report.used_somewhere(missing)

    def warning(self, missing: Sequence[int], untouched: int, names: Sequence[str]) -> str | None:
        """Return the warning of the first backward with missing parameters, of which `untouched` were used nowhere.

        Args:
            missing: registration indices.
            untouched: a number.
            names: of all parameters, by registration index.
        """
        if self._warned or not self._warns or not missing:
            return None
        self._warned = True
        return messages.unused(self._rank, [names[index] for index in sorted(missing)], untouched)

    def held_up(self, backwards: int, names: Sequence[str]) -> str | None:
        """Return the warning of parameters that kept other buckets waiting in so many backwards in a row, once."""
        if backwards == HELD_UP and names and self._warns:
            return messages.held_up(self._rank, names, HELD_UP)
        return None

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Do not warn of missing parameters in this block: this rank has no inputs."""
        warned, self._warned = self._warned, True
        try:
            yield
        finally:
            self._warned = warned
