"""DPF-L11: a sampler that shuffles gives the same order in each pass over its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpfuse.rules.seen import Seen

__all__ = ["PASSES", "find", "passes_of"]

PASSES = 3  # after which the epoch of a sampler was to be set


def passes_of(samplers: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of passes over each sampler whose epoch was never set, and was the same in all of them.

    Args:
        samplers: each has `epochs`, those of its passes, and `set`, whether `set_epoch` was called.
    """
    return [len(one["epochs"]) for one in samplers if not one["set"] and len(set(one["epochs"])) == 1]


def find(samplers: Sequence[dict[str, Any]]) -> Seen | None:
    """Say that it is so, of samplers as `passes_of` takes them."""
    count = max(passes_of(samplers), default=0)
    if count < PASSES:
        return None
    return Seen(
        "the same order in each epoch",
        f"the training made {count} passes over a DistributedSampler with shuffle=True, and set_epoch() was never "
        "called. The order depends on the epoch, so each pass has the same. Expected another order in each: call "
        "sampler.set_epoch(epoch) before each pass.",
    )
