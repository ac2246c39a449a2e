"""What a rule has seen in the traces of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpfuse.trace_file import RankTrace

__all__ = ["SHOWN", "Seen", "Traces", "common_steps", "name_list", "rank_list"]

Traces = Mapping[int, RankTrace]  # of a run, by rank
SHOWN = 3  # names of a list


@dataclass(frozen=True)
class Seen:
    """One thing.

    Args:
        title: in a few words.
        text: what it is, what was expected, and what to do.
        step, rank, parameter: of the place, where they are known.
    """

    title: str
    text: str
    step: int | None = None
    rank: int | None = None
    parameter: str = ""


def common_steps(traces: Traces) -> int:
    """Return how many steps every rank has written."""
    return min((len(trace.steps) for trace in traces.values()), default=0)


def name_list(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are.

    Example:
        >>> from dpfuse.rules.seen import name_list
        >>> name_list(["a", "b"]), name_list(["a", "b", "c", "d"])
        ('a, b', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def rank_list(ranks: Sequence[int]) -> str:
    """Return these ranks as the beginning of a sentence.

    Example:
        >>> from dpfuse.rules.seen import rank_list
        >>> rank_list([1]), rank_list([1, 2])
        ('Rank 1', 'Ranks 1, 2')
    """
    return f"Rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
