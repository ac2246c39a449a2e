"""What DPF-L01 is asked about: the gradient of an optimizer that steps, and what backwards of this rank have added."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from dpfuse.findings import findings
from dpfuse.loop.watched_gradient import WatchedGradient
from dpfuse.rules.codes import REST
from dpfuse.rules.l01_local_rest import Looks, note, wants_look

__all__ = ["LocalRest"]


class LocalRest:
    """Has the ranks compare their weights where this rank suspects that they differ.

    Args:
        watched: a gradient of the optimizer.
        suspect: has the ranks compare, with what this rank has seen; returns False where they compare no weights.
    """

    def __init__(self, watched: WatchedGradient, suspect: Callable[[str], bool]) -> None:
        self._watched = watched
        self._suspect = suspect
        self._looks = Looks()

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at a gradient that has got more since its average; `optimizer` is about to step."""
        watched = self._watched
        kept = wants_look(self._looks) and watched.was_kept
        seen = type(optimizer).__name__, watched.name, watched.rest, watched.rest_line
        self._looks, text = note(self._looks, *seen, kept=kept)
        if text is not None and not self._suspect(text):
            findings.note(REST, watched.rank, f"rank {watched.rank}: {text}")
