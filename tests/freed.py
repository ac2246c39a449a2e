"""Whether things that nobody wants any more are freed."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from time import monotonic, sleep
from typing import Any
from weakref import ReferenceType

from tests.patience import patience

__all__ = ["still_held"]


def still_held(references: Iterable[ReferenceType[Any]], within: float = 10.0) -> list[str]:
    """The types of what is still alive although it has had `within` seconds to go.

    Some time there must be: gloo's thread lets go of a collective's tensors only after it has said that they have
    landed, and for that it needs Python's lock, which who hears it may hold on to.
    """
    began = monotonic()
    while True:
        gc.collect()
        held = [type(thing).__name__ for thing in (reference() for reference in references) if thing is not None]
        if not held or monotonic() >= began + patience(within):
            return held
        sleep(0.01)
