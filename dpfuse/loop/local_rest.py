"""The rule of DPF-L01: a step on a mean over the ranks to which later backwards have added what one rank has."""

from __future__ import annotations

from dpfuse.loop.findings import REST, findings
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["check_rest"]


def check_rest(watched: WatchedGradient, optimizer: str, rank: int, *, raises: bool) -> None:
    """Raise, or warn, if an optimizer is about to step on a mean and what later backwards of one rank have added.

    Args:
        watched: a gradient of the optimizer.
        optimizer: its name.
        rank: of this process.
        raises: whether that is an error.

    Raises:
        DPFuseError: that is so, and `raises`.
    """
    if not (watched.rest and watched.was_kept):
        return
    one = watched.rest == 1
    backwards = "one backward" if one else f"{watched.rest} backwards"
    means = "A synchronised backward has" if watched.means == 1 else f"{watched.means} synchronised backwards have"
    line = f" (the last at {watched.rest_line})" if watched.rest_line and not one else ""
    line = f" (at {watched.rest_line})" if watched.rest_line and one else line
    text = (
        f"rank {rank}: {optimizer} steps on gradients that are not the mean over the ranks. {means} written the "
        f"gradient of {watched.name!r}, and then {backwards} that {'was' if one else 'were'} not synchronised{line}; "
        "expected the synchronised backward as the last one before the step. The forward decides: enter no_sync(), or "
        "set require_backward_grad_sync, before the forward of each batch, and synchronise the last batch before the "
        "step."
    )
    if raises:
        raise findings.error(REST, f'{text} To go on all the same, pass check_loop="warn" to the wrapper.')
    findings.warn(REST, text)
