"""Contexts around what a bucket does, which cost next to nothing where nothing is to be done. Imports no bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

__all__ = ["no_graph", "ranged", "ranged_without_graph"]

_NOTHING = nullcontext()  # one for all: making a context costs more than entering it


def ranged(name: str, label: str) -> AbstractContextManager[object]:
    """A range of that name, if a profiler is running."""
    if _profiler_enabled():
        return torch.profiler.record_function(f"{name} ({label})")
    return _NOTHING


def no_graph() -> AbstractContextManager[object]:
    """Gradients that carry a graph (create_graph=True) are packed by value."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def ranged_without_graph(name: str, label: str) -> AbstractContextManager[object]:
    """Both; mostly it is neither, and one context is entered for that."""
    return _both(name, label) if torch.is_grad_enabled() else ranged(name, label)


@contextmanager
def _both(name: str, label: str) -> Iterator[None]:
    with ranged(name, label), torch.no_grad():
        yield
