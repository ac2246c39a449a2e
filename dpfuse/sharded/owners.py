"""Which rank owns which whole tensor: a balanced assignment by cost. Numbers only: knows no tensor."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace

__all__ = ["assign_owners", "muon_cost"]

LOOKS = 3_000_000  # looks at the load of a rank, for moves and swaps; a clock would let ranks disagree
GAIN = 1e-6  # of the largest load; a move or swap that gains less is not worth its time


def assign_owners(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Assign each item to one rank, so that the largest load of a rank is small. The result is the same on all ranks.

    Longest first: each item in the order of falling costs goes to the rank with the smallest load. Then items move
    and change places while the largest load falls. Ties go to the lower index and the lower rank.

    Args:
        costs: of each item, in any unit, not negative.
        loads: what each rank has already, in the same unit. It does not change.

    Returns:
        The rank that owns each item.

    Example:
        >>> assign_owners([3, 3, 2, 2, 2], [0, 0])
        [1, 1, 0, 0, 0]
        >>> assign_owners([3, 3, 2, 2, 2], [0, 12])
        [0, 0, 0, 0, 0]

    Source: Graham, Bounds on Multiprocessing Timing Anomalies (SIAM Journal on Applied Mathematics 17, 1969).
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    sizes = [float(costs[item]) for item in order]
    found = _longest_first(sizes, loads)
    _improve(sizes, found, loads)
    owners = [0] * len(order)
    for item, owner in zip(order, found, strict=True):
        owners[item] = owner
    return owners


def muon_cost(shape: Sequence[int]) -> int:
    """Return the floating-point operations of one Newton-Schulz update of a matrix, as `torch.optim.Muon` does it.

    Each of the 5 iterations has three products. With the m x n matrix X turned so that m <= n, they are X X^T
    (2 m² n operations), its square (2 m³), and the result times X (2 m² n). What is done element by element is not
    counted.

    Args:
        shape: [m, n], or [n, m].

    Example:
        >>> muon_cost((768, 3072)) == muon_cost((3072, 768)) == 5 * (4 * 768**2 * 3072 + 2 * 768**3)
        True

    Source: Jordan and others, Muon: an optimizer for hidden layers in neural networks (2024).
    """
    short, long = sorted(shape)
    return 5 * (4 * short**2 * long + 2 * short**3)


def _longest_first(sizes: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Give each item, in the order of the list, to the rank with the smallest load."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapify(heap)
    owners = []
    for size in sizes:
        load, rank = heap[0]
        owners.append(rank)
        heapreplace(heap, (load + size, rank))
    return owners


def _improve(sizes: Sequence[float], owners: list[int], loads: Sequence[float]) -> None:
    """Move an item of the most loaded rank, or swap it, while this helps."""
    held: list[list[tuple[float, int]]] = [[] for _ in loads]  # (size, place) of each rank's items, ascending
    for place in reversed(range(len(sizes))):
        held[owners[place]].append((sizes[place], place))
    for items in held:
        items.sort()
    totals = [load + sum(size for size, _ in items) for load, items in zip(loads, held, strict=True)]
    looks = LOOKS
    while looks > 0:
        top, change, rank = totals.index(max(totals)), None, 0
        for rank in sorted(range(len(loads)), key=totals.__getitem__):
            change = _change(held[top], held[rank], totals[top] - totals[rank], GAIN * totals[top])
            looks -= 1 + len(held[top])
            if change is not None:
                break
        if change is None:
            break
        looks -= len(loads)
        for source, target, item in ((top, rank, change[0]), (rank, top, change[1])):
            if item is not None:
                held[source].pop(bisect_left(held[source], item))
                insort(held[target], item)
                owners[item[1]] = target
        for each in (top, rank):
            totals[each] = loads[each] + sum(size for size, _ in held[each])


def _change(
    given: Sequence[tuple[float, int]], taken: Sequence[tuple[float, int]], gap: float, gain: float
) -> tuple[tuple[float, int], tuple[float, int] | None] | None:
    """Return an item to give, and one to take back or None, after which the larger of two loads is smallest.

    Args:
        given: (size, place) of the items of the rank with the larger load, ascending.
        taken: those of the other rank.
        gap: the larger load minus the other one.
        gain: by how much the larger load must fall, at least.
    """
    best, smallest = None, gap - gain
    for item in given:
        # The load that moves is the difference of both items; half the gap is best, and the whole gap changes nothing.
        near = bisect_left(taken, (item[0] - gap / 2, 0))
        for back in (None, *taken[max(near - 1, 0) : near + 1]):
            moved = item[0] - (back[0] if back else 0.0)
            if moved > 0 and max(moved, gap - moved) < smallest:
                best, smallest = (item, back), max(moved, gap - moved)
    return best
