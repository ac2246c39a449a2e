"""DPF-W02: the ranks cannot compare their weights any more, since they hold other tensors."""

from __future__ import annotations

from collections.abc import Sequence

from dpfuse.rules.codes import OTHER_TENSORS
from dpfuse.rules.seen import rank_list

__all__ = ["text_of"]


def text_of(rank: int, ranks: Sequence[int]) -> str:
    """Return the message for this rank; `ranks` have other tensors than the others."""
    have = "has" if len(ranks) == 1 else "have"
    return (
        f"{OTHER_TENSORS}: rank {rank}: {rank_list(ranks)} {have} parameters of another name, shape or dtype than the "
        "other ranks, expected the same; weights are not compared any more. Change the module in the same way on every "
        "rank."
    )
