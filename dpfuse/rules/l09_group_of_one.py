"""DPF-L09: gradients are averaged over one rank."""

from __future__ import annotations

from dpfuse.rules.seen import Seen, Traces

__all__ = ["TITLE", "find", "is_alone", "text_of"]

TITLE = "a group of one rank"


def is_alone(size: int, ranks: int, *, is_mesh: bool) -> bool:
    """Whether a model of a larger job is wrapped with a group of one rank by mistake.

    Args:
        size: of the group.
        ranks: of the job.
        is_mesh: whether the group is a dimension of a device mesh. Such a one may have one rank, as where a model is
            only divided.
    """
    return size == 1 < ranks and not is_mesh


def text_of(rank: int, ranks: int) -> str:
    """Return what a training says on this rank of a job of so many."""
    return (
        f"rank {rank}: a model was wrapped with a group of one rank, and the job has {ranks}. Its "
        "gradients are not averaged. Expected a group of several ranks. Leave the group out for all ranks of the "
        "job, or call dist.new_group() with the ranks that train together."
    )


def find(traces: Traces) -> Seen | None:
    """Say that the job has one rank."""
    if traces[0].settings["ranks"] > 1:
        return None
    text = "the process group has one rank, so nothing is averaged; start several ranks, or leave the wrapper out"
    return Seen(TITLE, text)
