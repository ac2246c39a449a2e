"""DPF-L07: optimizers of the ranks step on the same parameters with other learning rates."""

from __future__ import annotations

from collections.abc import Sequence

from dpfuse.rules.seen import Seen, Traces, common_steps
from dpfuse.rules.windows import class_of

__all__ = ["BACKWARDS", "find", "mean_of", "note"]

BACKWARDS = 2  # running
REMEDY = "Step each schedule equally often on every rank, and give one that depends on a loss the mean over the ranks."
RANKS = 6  # of which a trace tells the rates

Own = Sequence[tuple[str, Sequence[float]]]  # learning rates of this rank, each with the name of its optimizer


def note(
    backwards: int, rank: int, size: int, own: Own, total: float, *, comparable: bool, same: bool
) -> tuple[int, str | None]:
    """Return how many averaged backwards running had other rates on some rank, and what is said of it.

    Args:
        backwards: how many these were before.
        rank: of this process.
        size: the number of ranks.
        own: the rates of this rank.
        total: the sum of the means of all ranks.
        comparable: whether all ranks know their rates, and have them for the same parameters.
        same: whether all ranks have the same.
    """
    backwards = backwards + 1 if comparable and not same else 0
    if backwards < BACKWARDS:
        return backwards, None
    here = ", ".join(f"{name} {', '.join(map(str, rates))}" for name, rates in own)
    mean = mean_of(own)
    who = "the other rank has" if size == 2 else "the other ranks have"
    return backwards, (
        f"rank {rank}: in {BACKWARDS} steps running, the learning rates were not the same on all {size} "
        f"ranks, for the same parameters. Rank {rank} has {here}, with a mean of {mean:.6g}; {who} a mean of "
        f"{(total - mean) / (size - 1):.6g}. Expected equal ones; the weights of the ranks drift apart. {REMEDY}"
    )


def mean_of(own: Own) -> float:
    """Return the mean of the learning rates of all optimizers; 0 where there is none."""
    all_rates = [rate for _, rates in own for rate in rates]
    return sum(all_rates) / max(1, len(all_rates))


def find(traces: Traces) -> Seen | None:
    """Tell of the first step before which the rates of an optimizer differ between ranks, with that of each rank."""
    for step in range(common_steps(traces)):
        lines = {rank: trace.steps[step] for rank, trace in traces.items()}
        rates = {rank: ", ".join(str(group.get("lr")) for group in line["settings"]) for rank, line in lines.items()}
        if len(set(rates.values())) > 1:
            each = ", ".join(f"rank {rank} has {rate}" for rank, rate in [*rates.items()][:RANKS])
            more = ", …" if len(rates) > RANKS else ""
            return Seen(
                "other learning rates",
                f"the learning rates of {class_of(traces[0], lines[0]['optimizer'])} differ between ranks, first in "
                f"step {step}: {each}{more}. Expected equal ones; the weights of the ranks drift apart. {REMEDY}",
            )
    return None
