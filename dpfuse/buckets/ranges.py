"""Named ranges around what a bucket does, for the profiler. Imports nothing of dpfuse."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

__all__ = ["ranged"]

_NOTHING = nullcontext()  # one for all: making a context costs more than entering it


def ranged(name: str, label: str) -> AbstractContextManager[object]:
    """A range of that name; costs next to nothing while no profiler is running."""
    if _profiler_enabled():
        return torch.profiler.record_function(f"{name} ({label})")
    return _NOTHING
