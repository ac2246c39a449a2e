"""Keeps the garbage collector from disturbing a measurement."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep garbage collections inside the context from scanning the objects that exist already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
