"""DPF-L05: all ranks compute on the same batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from dpfuse.rules.seen import Seen, Traces, common_steps

__all__ = ["STEPS", "TITLE", "Batch", "Batches", "find", "find_parts", "note", "text_of"]

TITLE = "the same batches on every rank"
STEPS = 8  # in a row, in which the hashes of all ranks were equal, and other ones than in the step before
DO = "give the loader a DistributedSampler, or let the rank be part of the seed with which samples are drawn"


@dataclass(frozen=True)
class Batch:
    """What is known of one batch of all ranks.

    Args:
        own: a hash of the inputs of this rank; None where a rank has none.
        same: whether all ranks have this hash.
        parallel: whether the gradients of all ranks are known to be the same.
    """

    own: Hashable
    same: bool
    parallel: bool


@dataclass(frozen=True)
class Batches:
    """What is remembered.

    Args:
        row: how many batches in a row were other ones than those before.
        before: the hash of the last one.
        differ: whether ranks have had different ones.
        parallel: whether gradients are known to be the same in one batch of the row.
    """

    row: int = 0
    before: Hashable = None
    differ: bool = False
    parallel: bool = False


def note(memory: Batches, batch: Batch) -> Batches:
    """Return what is remembered after one more batch.

    Example:
        >>> from dpfuse.rules.l05_same_batches import Batch, Batches, note
        >>> note(note(Batches(), Batch(1, same=True, parallel=False)), Batch(2, same=True, parallel=True))
        Batches(row=2, before=2, differ=False, parallel=True)
    """
    if batch.own is None:
        return replace(memory, row=0)
    return Batches(
        0 if batch.own == memory.before else memory.row + 1,
        batch.own,
        memory.differ or not batch.same,
        batch.parallel or (memory.parallel and memory.row > 0),
    )


def text_of(rank: int, memory: Batches) -> str:
    """Return what a training says after `STEPS` batches.

    Equal inputs alone prove nothing: each rank may take its part of the batch in forward, or have other targets, or
    noise of its own. So they are a mistake only where all ranks have the same gradient, too.
    """
    seen = (
        f"rank {rank}: in {memory.row} steps in a row, hashes of all inputs of the model were equal on all ranks, "
        "and other ones than in the step before."
    )
    if memory.parallel:
        return (
            f"{seen} Every rank computes on the same batches, so more ranks do not mean more data. Expected other "
            f"batches on each rank: {DO}. If equal inputs are meant, pass "
            'check_training="log" to the wrapper.'
        )
    return (
        f"{seen} The gradients of the ranks differ, as where each rank takes its part of the batch in forward, or "
        f"has other targets. If the batches are equal by mistake, and only dropout differs, {DO}."
    )


def find(traces: Traces) -> Seen | None:
    """Say that all ranks got the same inputs, and computed the same gradients from them."""
    if len(traces) < 2 or _same(traces) is not True:
        return None
    return Seen(
        TITLE,
        "all ranks got the same inputs in every step, and computed the same gradients from them; give each rank "
        "its own part of the data, such as with torch's DistributedSampler",
    )


def find_parts(traces: Traces) -> Seen | None:
    """Say that ranks with equal inputs have computed other gradients. It may be meant so."""
    if _same(traces) is not False:
        return None
    return Seen(
        "the same inputs on every rank",
        "all ranks got the same inputs in every step, and computed other gradients from them. That is right where "
        "each rank takes its part of the inputs in forward, or has other targets. If only dropout differs, give "
        "each rank its own part of the data, such as with torch's DistributedSampler.",
    )


def _same(traces: Traces) -> bool | None:
    """Whether ranks with equal inputs computed equal gradients, in one step at least; None where inputs differ."""
    memories = [*accumulate(_batches(traces), note, initial=Batches())][1:]
    if len({one.before for one in memories}) < 2 or memories[-1].differ:
        return None
    for step in range(common_steps(traces)):
        gradients = [[one.get("local") for one in trace.steps[step]["backwards"]] for trace in traces.values()]
        if any(gradients[0]) and all(row == gradients[0] for row in gradients):
            return True
    return False


def _batches(traces: Traces) -> Iterator[Batch]:
    """Yield the batch of each forward of a run, as far as its inputs are known."""
    for step in range(common_steps(traces)):
        inputs = [[one["inputs"] for one in trace.steps[step]["forwards"]] for trace in traces.values()]
        for number in range(max(map(len, inputs))):
            row = {each[number] if number < len(each) else "" for each in inputs}
            yield Batch(min(row), len(row) == 1, parallel=False)
