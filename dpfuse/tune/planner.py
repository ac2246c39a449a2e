"""Finds the buckets with which the last bucket lands earliest, by dynamic programming. Knows no other rule."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfuse.arguments import a_callable, instance, real
from dpfuse.engine.plan import BucketPlan, size_in_bytes
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune.cost import CostTable, Floats
from dpfuse.tune.timeline import Timeline

__all__ = ["optimal_plan"]

MAX_STATES = 1 << 21  # with more states, adjacent gradients are joined before planning
TIGHT = 1 << 32  # weight of a bucket without margin; a bucket with margin has weight 1
ROUNDING = 2.0**-50  # per gradient, as a part of the time: more than the rounding error of a sum and a difference


@dataclass(frozen=True)
class _Kind:
    """Gradients that may share buckets: one dtype, one device, and either all dense or all sparse."""

    runs: list[list[int]]  # parameter indices, in the order of their gradients; a run is never split
    places: list[int]  # position of each run's last gradient among all gradients, from 0
    sums: Floats  # bytes of the first j runs, for j = 0 … n
    first: list[int]  # first[j]: a bucket that ends with run j may begin after this many runs, or later


def optimal_plan(
    timeline: Timeline,
    cost: CostTable,
    *,
    comm_buffer_size: float = math.inf,
    last_comm_buffer_size: float = math.inf,
    margin: float = 0.5,
) -> BucketPlan:
    """Return the plan with which the last bucket lands earliest, if gradients are sent in the order of `timeline`.

    A bucket holds consecutive gradients of `timeline.order`. It is sent when its last gradient is ready and the bucket
    before it has landed, and takes the `cost` of its bytes. The last bucket is sent when backward has ended, as the
    wrappers do it. Many plans end at the same time, because most communication is hidden. Among these the planner takes
    one with few buckets that stay hidden even if each takes longer than expected.

    Gradients of different dtypes or devices never share a bucket, and a sparse gradient has its own bucket. All buckets
    share one link and are sent in the order in which they are complete. The planner tries all combinations of how much
    of each kind was sent. If there are more than two million combinations, it first joins adjacent gradients, and the
    plan is optimal for the joined gradients. (A thousand gradients of each of two kinds give one million.)

    Args:
        timeline: when gradients are ready.
        cost: seconds by bytes.
        comm_buffer_size: limit of a bucket in MB. As everywhere in dpfuse, a bucket may exceed it by its first or its
            last gradient.
        last_comm_buffer_size: limit in MB of the last bucket of each dtype and device.
        margin: fraction of its expected time by which each bucket may be slower and stay hidden. The planner keeps this
            margin where it costs nothing. 0 gives fewer buckets, which are exposed sooner.

    Raises:
        TypeError, ValueError: A limit or the margin is no number, negative or NaN.

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
    instance("timeline", timeline, Timeline, "a Timeline")
    a_callable("cost", cost, "a CostTable, or another function of bytes")
    real("margin", margin)
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin must be a fraction of the expected time >= 0, such as 0.5, got {margin!r}")
    kinds = _kinds(timeline, cap, last_cap)
    walk = _walk(timeline, kinds)
    end = _earliest_ends(kinds, walk, cost)
    groups = _fewest_buckets(kinds, walk, cost, end, margin)
    return plan_from_groups(
        timeline.specs, groups, comm_buffer_size=comm_buffer_size, last_comm_buffer_size=last_comm_buffer_size
    )


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
    """Return the largest number of runs of each kind that keeps the number of combinations within MAX_STATES."""
    most = list(counts)
    while math.prod(count + 1 for count in most) > MAX_STATES:
        most[most.index(max(most))] -= max(1, max(most) // 16)
    return most


def _joined(indices: Sequence[int], nbytes: Sequence[int], count: int) -> list[list[int]]:
    """Return at most `count` runs of adjacent gradients with about equal numbers of bytes."""
    if count >= len(indices):
        return [[index] for index in indices]
    sums = np.cumsum([nbytes[index] for index in indices], dtype=float)
    runs: dict[int, list[int]] = {}
    for index, before in zip(indices, sums - sums[0], strict=True):
        runs.setdefault(int(before / max(sums[-1], 1.0) * count), []).append(index)
    return list(runs.values())


def _first_begins(nbytes: Sequence[int], cap: float) -> list[int]:
    """Return for each end of a bucket its first possible begin.

    A bucket has one run, or is below the cap without the larger of its first and last run.
    """
    begin, total, begins = 0, 0, [0]
    for end, size in enumerate(nbytes):
        total += size
        while begin < end and total - max(nbytes[begin], size) >= cap:
            total -= nbytes[begin]
            begin += 1
        begins.append(begin)
    return begins


def _walk(timeline: Timeline, kinds: Sequence[_Kind]) -> list[tuple[int, int, float]]:
    """Return kind, number within the kind (from 1) and time of every run, in the order in which they are complete."""
    steps = sorted(
        (place, kind, number) for kind, one in enumerate(kinds) for number, place in enumerate(one.places, start=1)
    )
    times = [timeline.ready[timeline.order[place]] for place, _, _ in steps]
    times[-1] = timeline.backward_end  # the bucket with this run is sent then
    return [(kind, number, time) for (_, kind, number), time in zip(steps, times, strict=True)]


def _earliest_ends(kinds: Sequence[_Kind], walk: Sequence[tuple[int, int, float]], cost: CostTable) -> Floats:
    """Return the earliest time at which all runs sent so far can have landed, by the number sent of each kind."""
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
    """Return the groups of a plan that ends at the earliest time, chosen from the end of the walk to its begin.

    Prefer few buckets without margin, then few buckets, then a late begin.
    """
    due = np.full(end.shape, -np.inf)  # time at which the link must be free for the rest
    worth: NDArray[np.int64] = np.full(end.shape, np.iinfo(np.int64).max)  # weighted buckets of the rest, see TIGHT
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
    """Return the states before and after a bucket that ends with run `number` of `kind`, the last complete run."""
    others = [slice(0, count + 1) for count in complete]
    before = tuple(slice(first, number) if place == kind else other for place, other in enumerate(others))
    behind = tuple(number if place == kind else other for place, other in enumerate(others))
    return before, behind
