"""Finds what differs, once all ranks have heard that something does: an exchange of all ranks. Decides nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.rules.w01_weights_differ import Measured
from dpfuse.weights.hashing import Hashing

__all__ = ["Differences", "Distances", "compare", "measure"]

NOTHING = -(1 << 63)  # the smallest number of 64 bits: what a rank says that takes no part
BUDGET = 64 << 20  # bytes of parameters that are sent to measure how far they differ


@dataclass(frozen=True)
class Differences:
    """Which weights differ.

    Args:
        turn: the largest number of a slice that a rank has hashed.
        strangers: ranks whose tensors cannot be compared with those of the others.
        always: places of tensors that differed in each of the earlier moments and differ now.
        ever: places of those that differ in one of these.
    """

    turn: int
    strangers: tuple[int, ...] = ()
    always: tuple[int, ...] = ()
    ever: tuple[int, ...] = ()


@dataclass(frozen=True)
class Distances:
    """How far the ranks lie apart.

    Args:
        reference: the rank with which all are compared: of the largest set of equal ranks, the lowest.
        measured: of each rank that differs, how far it lies from `reference`.
        count: the number of tensors that were measured, from the first on.
        first: the averaged backward after which the tensors were equal, as far as any rank knows.
        suspects: ranks that have seen what may have made the weights differ.
    """

    reference: int
    measured: dict[int, Measured]
    count: int
    first: int
    suspects: tuple[int, ...]


@torch.no_grad()
def compare(
    hashing: Hashing | None,
    earlier: Sequence[Tensor | None],
    turn: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    takes_part: bool,
) -> Differences:
    """Compare the tensors of all ranks, one by one; to be called on every rank.

    Args:
        hashing: of this rank's tensors; None where it has none.
        earlier: their hashes at earlier moments, as many on all ranks, each [tensors] int64; None are those of now.
        turn: of this rank.
        group: the ranks.
        device: on which the group communicates.
        takes_part: whether this rank's weights count.
    """
    digest, count = 0, 0
    if hashing is not None:
        count = len(hashing.names)
        digest = int.from_bytes(hashlib.blake2b(hashing.describe().encode(), digest_size=7).digest(), "big")
    own = torch.tensor([digest, turn if takes_part else -1], device=device)
    digests, turns = zip(*(row.tolist() for row in collective.all_gather(own, group)), strict=True)
    next_turn = max(turns) if max(turns) >= 0 else turn
    strangers = tuple(rank for rank, other in enumerate(digests) if other != digests[0])
    if strangers or hashing is None:
        return Differences(next_turn, strangers)
    if not takes_part:
        values = torch.full((2, len(earlier) + 1, count), NOTHING, device=device)
    else:
        now = hashing.each().to(device)
        rows = torch.stack([*(now if one is None else one.to(device) for one in earlier), now])
        values = torch.stack((rows, ~rows))  # the largest of the complements is that of the smallest
    collective.all_reduce_max(values, group)
    differs = values[0].ne(~values[1])
    always, ever = (which.nonzero().flatten().tolist() for which in (differs.all(0), differs.any(0)))
    return Differences(next_turn, always=tuple(always), ever=tuple(ever))


@torch.no_grad()
def measure(
    hashing: Hashing | None,
    after_step: Tensor | None,
    places: Sequence[int],
    first: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    suspects: bool,
) -> Distances:
    """Measure how far the ranks lie apart in tensors that differ; to be called on every rank with the same places.

    Args:
        hashing: of this rank's tensors; None takes no part.
        after_step: their hashes after the step, [tensors] int64, which tell what ranks are equal; None are those of
            now.
        places: of the tensors.
        first: the averaged backward after which they were equal, as far as this rank knows.
        group: the ranks.
        device: on which the group communicates.
        suspects: whether this rank has seen what may have made the weights differ.
    """
    memories = [None if hashing is None else hashing.memory_of(place) for place in places]
    mine = NOTHING
    if hashing is not None:
        hashes = hashing.each() if after_step is None else after_step
        mine = _joined(hashes[list(places)].tolist())
    rows = [int(row) for row in collective.all_gather(torch.tensor([mine], device=device), group)]
    sets: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        if row != NOTHING:
            sets.setdefault(row, []).append(rank)
    largest = max(sets.values(), key=len)
    reference = largest[0]
    total, count = _Distance(), 0
    sizes = [0 if memory is None else memory.numel() * memory.element_size() for memory in memories]
    agreed = torch.tensor(sizes or [0], device=device)
    collective.all_reduce_max(agreed, group)
    budget = BUDGET
    for memory, size in zip(memories, agreed[: len(memories)].tolist(), strict=True):
        if count and size > budget:
            break
        budget -= size
        count += 1
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        own = None if memory is None else _bytes_of(memory)
        if own is not None and own.numel() == size:
            data.copy_(own)
        collective.broadcast(data, group, source=reference)
        if memory is not None and own is not None and own.numel() == size:
            total.add(memory, data.to(memory.device))
    own_row = [total.elements, total.largest, total.bits, total.factor or 0.0, first, float(suspects)]
    told = torch.tensor(own_row, dtype=torch.float64, device="cpu")
    found = [each.tolist() for each in collective.all_gather(told.to(device), group)]
    measured = {
        rank: Measured(int(found[rank][0]), found[rank][1], found[rank][2] == 1, found[rank][3])
        for rank, row in enumerate(rows)
        if row not in (NOTHING, rows[reference])
    }
    with_cause = tuple(rank for rank, row in enumerate(found) if row[5])
    return Distances(reference, measured, count, max(int(row[4]) for row in found), with_cause)


class _Distance:
    """Adds up how far tensors lie apart."""

    def __init__(self) -> None:
        self.elements = 0
        self.largest = 0.0
        self.bits = 0
        self.factor: float | None = None  # 0 once there is no common one

    def add(self, own: Tensor, other: Tensor) -> None:
        """Add a tensor, [elements], and the bytes of that of the other rank."""
        reference = other.view(own.dtype)
        changed = _bytes_of(own).ne(other).view(own.numel(), -1).any(1)
        count = int(changed.sum())
        self.elements += count
        if not count:
            self.factor = 0.0
            return
        ours, theirs = own[changed], reference[changed]
        bits = _bytes_of(ours).bitwise_xor(_bytes_of(theirs))
        self.bits += sum(int((bits >> place & 1).sum()) for place in range(8))
        if ours.is_complex():
            ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
        gap = (ours.double() - theirs.double()).abs().nan_to_num(nan=float("inf"))
        self.largest = max(self.largest, gap.max().item())
        self._compare_factor(own, reference, count)

    def _compare_factor(self, own: Tensor, reference: Tensor, changed: int) -> None:
        if own.is_complex() or self.factor == 0.0 or not own.dtype.is_floating_point:
            self.factor = 0.0
            return
        usable = reference.ne(0)
        if changed < int(usable.sum()) or int(usable.sum()) < 2:
            self.factor = 0.0
            return
        ratios = own[usable].double() / reference[usable].double()
        middle = ratios.median().item()
        close = 16 * torch.finfo(own.dtype).eps * abs(middle)
        if not bool((ratios - middle).abs().le(close).all()):
            self.factor = 0.0
        elif self.factor is None:
            self.factor = float(f"{middle:.4g}")
        elif abs(self.factor - middle) > 1e-3 * abs(middle):
            self.factor = 0.0


def _bytes_of(memory: Tensor) -> Tensor:
    if memory.is_complex():
        memory = torch.view_as_real(memory)
    return memory.contiguous().view(-1).view(torch.uint8)


def _joined(hashes: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(list(hashes)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
