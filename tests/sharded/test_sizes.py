"""Three and four ranks; the memory of each, and the bytes that travel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import dpfuse
from dpfuse.comm.abilities import Abilities, answers_of
from tests.operations import Operations
from tests.sharded.against_ddp import bits_differ, trained_beside


def in_order(net):
    """A plain model whose sums are formed in the order of the ranks, too."""
    return dpfuse.DataParallel(net, deterministic=True)


def compared(rank, size):
    """Steps after which bits differ, the largest distance from DDP, and whether all ranks have the same weights."""
    differing, _, ours, _, _ = trained_beside(optim.AdamW, 30, peer=in_order, lr=0.01)
    weights = torch.cat([param.detach().flatten() for param in ours.module.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everywhere, weights)
    _, theirs, ours, _, _ = trained_beside(optim.SGD, 30, lr=0.1)
    pairs = zip(theirs.module.parameters(), ours.module.parameters(), strict=True)
    largest = max((one - other).abs().max().item() for one, other in pairs)
    return differing, largest, bits_differ(everywhere[1:], everywhere[:-1])


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks_have_the_bits_of_ordered_sums_and_are_close_to_ddp(ranks, size):
    for differing, largest, apart in ranks(compared, size=size):
        assert differing == []
        assert 0 < largest < 1e-5
        assert not apart


MADE = []


class Kept(optim.AdamW):
    """Remembers every optimizer that was made."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        MADE.append(self)


def nbytes_of(optimizers):
    """The bytes of the memory behind the states of these optimizers; those of one number are left out."""
    states = [state for one in optimizers for state in one.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}.values())


def step(model, optimizer):
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def memory_and_bytes(rank, size):
    """Bytes of the states, and bytes that this rank sends in a step, over those of DDP and a plain optimizer."""
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 400), nn.Linear(400, 3)))
    plain = optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, plain)
    with Operations() as whole:
        step(model, plain)
    MADE.clear()
    sharded = dpfuse.ShardedOptimizer(model, Kept)
    for _ in range(3):
        step(model, sharded)
    with Operations() as divided:
        step(model, sharded)
    return nbytes_of(MADE) / nbytes_of([plain]), divided.sent(size) / whole.sent(size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_has_its_share_of_the_states_and_as_many_bytes_travel(ranks, size):
    for memory, wire in ranks(memory_and_bytes, size=size):
        assert memory == pytest.approx(1 / size, rel=0.01)
        assert wire == pytest.approx(1, abs=0.01)


def scattered(rank, size):
    """The largest distance of weights where the back end scatters sums, and the memory for what others send."""
    answers_of(dist.group.WORLD)["cpu"] = Abilities(scatters=True)
    try:
        _, theirs, ours, _, _ = trained_beside(optim.SGD, 20, lr=0.1)
    finally:
        answers_of(dist.group.WORLD).clear()
    pairs = zip(theirs.module.parameters(), ours.module.parameters(), strict=True)
    idle = ours._sync._dividing._incoming._idle
    return max((one - other).abs().max().item() for one, other in pairs), sum(memory.nbytes for memory in idle)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [2, 3])
def test_a_back_end_that_scatters_sums_needs_no_memory_for_them(ranks, size):
    for largest, nbytes in ranks(scattered, size=size):
        assert largest < 1e-5
        assert nbytes == 0
