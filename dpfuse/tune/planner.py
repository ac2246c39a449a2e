"""The buckets with which the last gradient lands first: an exact dynamic program. Knows no published rule."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfuse.engine.plan import BucketPlan, size_in_bytes
from dpfuse.tune.cost import CostTable, Floats
from dpfuse.tune.groups import plan_from_groups
from dpfuse.tune.timeline import Timeline

__all__ = ["lower_bound", "optimal_plan"]

MAX_STATES = 1 << 21  # beyond that neighbours are joined before planning
TIGHT = 1 << 32  # what a bucket counts that must not take longer than expected; all others count 1
ROUNDING = 2.0**-50  # per gradient, as a part of the time: more than a sum and a difference can be off by


@dataclass(frozen=True)
class _Kind:
    """Gradients that may share buckets: those of one dtype and device, or the sparse ones of these."""

    runs: list[list[int]]  # parameter indices, in the order of their gradients; what a run holds is never parted
    places: list[int]  # of each run's last gradient among all, from 0
    sums: Floats  # bytes of the first j runs, for j = 0 … n
    first: list[int]  # first[j]: a bucket that ends with run j may begin behind this many runs, or later


def optimal_plan(
    timeline: Timeline,
    cost: CostTable,
    *,
    comm_buffer_size: float = math.inf,
    last_comm_buffer_size: float = math.inf,
    margin: float = 0.5,
) -> BucketPlan:
    """The plan whose last bucket lands first, among all that send gradients in the order in which they come.

    A bucket is a run of gradients that follow each other in `timeline.order`. It is sent once the last of them is
    ready and the bucket before has landed, and then takes `cost` of its bytes; the last bucket is sent when
    backward has ended, as the wrappers do it. Many plans end together, since most of communication is hidden
    anyhow. Of these one is taken with few buckets which stay hidden even if they all take longer than expected.

    Gradients of different dtypes or devices never share a bucket, and a sparse one has its own. All buckets share
    one link and are sent in the order in which they are complete. This is planned exactly as well, over all
    combinations of how much of each kind was sent. Only where there are more than two million of these (a thousand
    gradients of each of two kinds are one million), neighbours are joined until there are fewer, and the plan is the
    best for the joined ones.

    Args:
        timeline: when gradients are ready.
        cost: seconds by bytes.
        comm_buffer_size: limit of a bucket in MB; like everywhere in dpfuse a bucket may pass it by its first or its
            last gradient.
        last_comm_buffer_size: limit in MB of the last bucket of each dtype and device.
        margin: by which part of its expected time each bucket may be slower without being noticed, where that costs
            nothing if it is not slower. 0 gives fewer buckets that are easily late.

    Returns:
        The plan; `simulate(timeline, plan, cost)` tells what to expect of it.

    Raises:
        TypeError, ValueError: a limit or the margin is no number, negative or NaN.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import CostTable, Timeline, optimal_plan
        >>> specs = [dpfuse.ParamSpec(name, (250_000,), "float32") for name in "abcd"]
        >>> timeline = Timeline.synthetic(specs, 0.004)
        >>> [bucket.params for bucket in optimal_plan(timeline, CostTable.affine(1e-4, 4e9)).buckets]
        [(2, 3), (1,), (0,)]

    Source: the recurrence `end(j) = min over i < j of max(end(i), ready(j)) + cost(bytes(i … j))`.
    """
    cap = size_in_bytes(comm_buffer_size, "comm_buffer_size")
    last_cap = size_in_bytes(last_comm_buffer_size, "last_comm_buffer_size")
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin must be a part of the expected time >= 0, such as 0.5, got {margin!r}")
    kinds = _kinds(timeline, cap, last_cap)
    walk = _walk(timeline, kinds)
    end = _earliest_ends(kinds, walk, cost)
    groups = _fewest_buckets(kinds, walk, cost, end, margin)
    return plan_from_groups(
        timeline.specs, groups, comm_buffer_size=comm_buffer_size, last_comm_buffer_size=last_comm_buffer_size
    )


def lower_bound(timeline: Timeline, cost: CostTable) -> float:
    """Seconds before which no plan can have landed, contiguous or not: what is ready late has yet to be sent.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import CostTable, Timeline, lower_bound
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec("a", (10**6,), "float32")], 0.004)
        >>> lower_bound(timeline, CostTable.affine(0.001, 4e9))
        0.006
    """
    sizes = np.array([timeline.nbytes[index] for index in timeline.order], float)
    ready = np.array([timeline.ready[index] for index in timeline.order])
    rest = np.cumsum(sizes[::-1])[::-1]
    return float(max((ready + cost.cheapest(rest)).max(), timeline.backward_end + cost(float(sizes.min()))))


def _kinds(timeline: Timeline, cap: float, last_cap: float) -> list[_Kind]:
    members: dict[Hashable, list[int]] = {}
    for index in timeline.order:
        spec = timeline.specs[index]
        members.setdefault((spec.dtype, spec.device, spec.sparse), []).append(index)
    most = _runs_per_kind([len(indices) for indices in members.values()])
    places = {index: place for place, index in enumerate(timeline.order)}
    kinds = []
    for indices, count in zip(members.values(), most, strict=True):
        sparse = timeline.specs[indices[0]].sparse
        runs = [[index] for index in indices] if sparse else _joined(indices, timeline.nbytes, count)
        nbytes = [sum(timeline.nbytes[index] for index in run) for run in runs]
        first = list(range(-1, len(runs))) if sparse else _first_begins(nbytes, cap)
        if not sparse:
            first[-1] = max(first[-1], _first_begins(nbytes, last_cap)[-1])
        kinds.append(_Kind(runs, [places[run[-1]] for run in runs], np.append(0.0, np.cumsum(nbytes)), first))
    return kinds


def _runs_per_kind(counts: Sequence[int]) -> list[int]:
    """How many runs of each kind there may be, so that there are not too many combinations."""
    most = list(counts)
    while math.prod(count + 1 for count in most) > MAX_STATES:
        most[most.index(max(most))] -= max(1, max(most) // 16)
    return most


def _joined(indices: Sequence[int], nbytes: Sequence[int], count: int) -> list[list[int]]:
    """At most `count` runs of neighbours, of about the same number of bytes."""
    if count >= len(indices):
        return [[index] for index in indices]
    sums = np.cumsum([nbytes[index] for index in indices], dtype=float)
    runs: dict[int, list[int]] = {}
    for index, before in zip(indices, sums - sums[0], strict=True):
        runs.setdefault(int(before / max(sums[-1], 1.0) * count), []).append(index)
    return list(runs.values())


def _first_begins(nbytes: Sequence[int], cap: float) -> list[int]:
    """By its end, the first begin of a bucket that is below the cap without the larger of its ends, or is one run."""
    begin, total, begins = 0, 0, [0]
    for end, size in enumerate(nbytes):
        total += size
        while begin < end and total - max(nbytes[begin], size) >= cap:
            total -= nbytes[begin]
            begin += 1
        begins.append(begin)
    return begins


def _walk(timeline: Timeline, kinds: Sequence[_Kind]) -> list[tuple[int, int, float]]:
    """Kind, number within it (from 1) and time of every run, in the order in which they are complete."""
    steps = sorted(
        (place, kind, number) for kind, one in enumerate(kinds) for number, place in enumerate(one.places, start=1)
    )
    times = [timeline.ready[timeline.order[place]] for place, _, _ in steps]
    times[-1] = timeline.backward_end  # the bucket with this one is sent then
    return [(kind, number, time) for (_, kind, number), time in zip(steps, times, strict=True)]


def _earliest_ends(kinds: Sequence[_Kind], walk: Sequence[tuple[int, int, float]], cost: CostTable) -> Floats:
    """By how much was sent of each kind: when the last of that can have landed."""
    end = np.full([len(kind.runs) + 1 for kind in kinds], np.inf)
    end[(0,) * len(kinds)] = 0.0
    complete = [0] * len(kinds)
    for kind, number, ready in walk:
        before, behind = _states(complete, kind, kinds[kind].first[number], number)
        times = cost(kinds[kind].sums[number] - kinds[kind].sums[before[kind]])
        end[behind] = (np.maximum(np.moveaxis(end[before], kind, -1), ready) + times).min(axis=-1)
        complete[kind] = number
    return end


def _fewest_buckets(
    kinds: Sequence[_Kind], walk: Sequence[tuple[int, int, float]], cost: CostTable, end: Floats, margin: float
) -> list[list[int]]:
    """Backwards from the end, of what still ends in time: fewest without margin, fewest at all, then latest begin."""
    due = np.full(end.shape, -np.inf)  # when the link must be free for the rest to end in time
    worth: NDArray[np.int64] = np.full(end.shape, np.iinfo(np.int64).max)  # buckets of the rest, see TIGHT
    choice: NDArray[np.int32] = np.zeros(end.shape, np.int32)  # where in the walk the next bucket ends
    due[(-1,) * len(kinds)] = end[(-1,) * len(kinds)] * (1 + ROUNDING * len(walk))
    worth[(-1,) * len(kinds)] = 0
    complete = [len(kind.runs) for kind in kinds]
    for place, (kind, number, ready) in reversed(list(enumerate(walk))):
        complete[kind] = number - 1
        before, behind = _states(complete, kind, kinds[kind].first[number], number)
        limit = due[behind][..., None]
        if not (limit >= ready).any():
            continue
        times = cost(kinds[kind].sums[number] - kinds[kind].sums[before[kind]])
        end_, due_, worth_, choice_ = (np.moveaxis(array[before], kind, -1) for array in (end, due, worth, choice))
        earliest = np.maximum(end_, ready)
        safe = earliest <= limit - times * (1 + margin)
        latest = limit - times * np.where(safe, 1 + margin, 1)
        buckets = worth[behind][..., None] + np.where(safe, 1, TIGHT)
        better = (earliest <= latest) & ((buckets < worth_) | ((buckets == worth_) & (latest > due_)))
        np.copyto(due_, latest, where=better)
        np.copyto(worth_, buckets, where=better)
        choice_[better] = place
    groups, state = [], [0] * len(kinds)
    while state != [len(kind.runs) for kind in kinds]:
        kind, number, _ = walk[choice[tuple(state)]]
        assert number > state[kind]
        groups.append([index for run in kinds[kind].runs[state[kind] : number] for index in run])
        state[kind] = number
    return groups


def _states(
    complete: Sequence[int], kind: int, first: int, number: int
) -> tuple[tuple[slice, ...], tuple[int | slice, ...]]:
    """The states before and behind a bucket that ends with run `number` of `kind`, the last of all to be complete."""
    others = [slice(0, count + 1) for count in complete]
    before = tuple(slice(first, number) if place == kind else other for place, other in enumerate(others))
    behind = tuple(number if place == kind else other for place, other in enumerate(others))
    return before, behind
