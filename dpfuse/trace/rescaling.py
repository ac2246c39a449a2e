"""Whether the program has scaled or cut a gradient: judged by a few of its elements before and after. Knows no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpfuse.engine.gradient_change import Change, change_of
from dpfuse.engine.sample import Sample, values_of

__all__ = ["Pair", "rescaled"]


@dataclass(frozen=True)
class Pair:
    """Samples of the gradient of one parameter at two times.

    Args:
        place: of the parameter.
        before, now: the samples.
    """

    place: int
    before: Sample
    now: Sample


def rescaled(pairs: Sequence[Pair]) -> list[int]:
    """Return the places of the gradients that were scaled or cut between the two times. Waits for the device.

    An addition gives the same after each batch as at the end, and so does a mask.
    """
    changes = ((pair.place, change_of(values_of(pair.before).cpu(), values_of(pair.now).cpu())) for pair in pairs)
    return [place for place, change in changes if change is Change.RESCALED]
