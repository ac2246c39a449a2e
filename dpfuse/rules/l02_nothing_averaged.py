"""DPF-L02: an optimizer makes step after step on gradients of one rank alone.

No backward is averaged in that time, so the ranks compare nothing. Local SGD looks the same and is right: the finding
goes to a log. If no backward was averaged before either, the ranks compare what they had in the end.
"""

from __future__ import annotations

__all__ = ["STEPS", "note", "text_of", "text_of_weights"]

STEPS = 20  # in a row, after which it is said


def note(steps: int, *, averaged: bool, local: bool) -> int:
    """Return how many steps in a row were made on local gradients.

    Args:
        steps: how many these were before.
        averaged: whether a backward was synchronised since the last step.
        local: whether one was not, and has written the gradient.

    Example:
        >>> from dpfuse.rules.l02_nothing_averaged import note
        >>> note(7, averaged=False, local=True), note(7, averaged=True, local=True)
        (8, 0)
    """
    return 0 if averaged else steps + local


def text_of(rank: int, steps: int, optimizer: str) -> str:
    """Return what a training says after so many steps of an optimizer of this class."""
    return (
        f"rank {rank}: {optimizer} made {steps} steps in a row on gradients of this rank alone. No backward "
        "was synchronised in this time. If the ranks are not to train apart, leave no_sync(), or set "
        "require_backward_grad_sync to True, before the forward of the last batch before a step."
    )


def text_of_weights(rank: int, steps: int, optimizer: str) -> str:
    """Return what a training says if the ranks never had weights in common, in so many steps of an optimizer."""
    return (
        f"rank {rank}: no backward was synchronised since the model was wrapped. In {steps} steps of {optimizer} no "
        "two ranks had the same weights; expected the same weights on all ranks after each step. Leave no_sync(), or "
        "set require_backward_grad_sync to True, before the forward of the last batch before a step."
    )
