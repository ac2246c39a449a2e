"""After a synchronised backward, buffers are rank 0's on every rank, whatever happened; a forward sends nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dpfuse
from dpfuse import DPFuseError
from tests.distributed.failures.test_interruptions import Fuse
from tests.operations import Operations


class Net(nn.Module):
    """Batch norm, and an embedding whose gradient may be sparse."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, tokens, fails=False):
        return self.layers(Fuse.apply(self.words(tokens), fails))


def state_of(model):
    return torch.cat([buffer.double().flatten() for buffer in model.module.buffers()])


def of_rank_0(state):
    state = state.clone()
    dist.broadcast(state, 0)
    return state


def batch(rank, step):
    return torch.randint(7, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


WAYS = {
    "paddle": lambda: dpfuse.DataParallel(Net(), broadcast_buffers=True),
    "torch": lambda: dpfuse.DistributedDataParallel(Net()),
    "small buckets": lambda: dpfuse.DistributedDataParallel(Net(), bucket_cap_mb=1e-5),
    "sparse": lambda: dpfuse.DistributedDataParallel(Net(sparse=True)),
    "narrow": lambda: dpfuse.DistributedDataParallel(Net(), wire_dtype=torch.bfloat16),
    "deterministic": lambda: dpfuse.DistributedDataParallel(Net(), deterministic=True),
    "accumulating": lambda: dpfuse.DistributedDataParallel(Net(), accumulate_in_buckets=True),
}


def train(rank, size, way, hook):
    torch.manual_seed(0)
    model = WAYS[way]()
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    for step in range(6):
        inside = step in (2, 3)
        with model.no_sync() if inside else contextlib.nullcontext():
            with Operations() as forward:
                loss = model(batch(rank, step)).square().sum()
            own = state_of(model)
            expected = own if inside else of_rank_0(own)
            assert inside or torch.equal(own, expected) == (rank == 0)
            with Operations() as backward:
                loss.backward()
        assert torch.equal(state_of(model), expected), step
        # No backward came before the first forward. None has synchronised before 3 and 4, but they end a window.
        assert forward.names.count("broadcast_") == (step == 0), step
        assert backward.names.count("broadcast_") >= (not inside), step
        assert not (inside and "broadcast_" in backward.names)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hook", [False, True], ids=["", "hook"])
@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_those_of_rank_0_after_each_synchronised_backward(ranks, way, hook):
    if hook and way in ("paddle", "narrow", "deterministic", "accumulating"):
        pytest.skip("it has no hooks, or refuses them")
    ranks(train, way, hook)


def evaluate(rank, size):
    torch.manual_seed(0)
    model = dpfuse.DistributedDataParallel(Net())
    model(batch(rank, 0)).square().sum().backward()
    model.eval()
    with torch.no_grad():
        return model(batch(7, 7)).tolist(), {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_and_checkpoints_do_not_depend_on_the_rank(ranks, size):
    results = ranks(evaluate, size=size)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=str)
def test_an_interrupted_backward_sends_them_too(rank, size, failing):
    torch.manual_seed(0)
    model = dpfuse.DistributedDataParallel(Net())
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    loss = model(batch(rank, 2), fails=rank in failing).sum()
    expected = of_rank_0(state_of(model))
    with pytest.raises(KeyError if rank in failing else DPFuseError):
        loss.backward()
    if rank in failing:  # the others wait until it comes to a forward, of any kind
        model.eval()
        model(batch(rank, 3))
        model.train()
    if len(failing) < size:
        assert torch.equal(state_of(model), expected)
        model(batch(rank, 4)).sum().backward()
    expected = of_rank_0(state_of(model))
    loss = model(batch(rank, 5)).sum()
    loss.backward()
    assert rank or not torch.equal(state_of(model), expected)
    assert torch.equal(state_of(model), of_rank_0(state_of(model)))


def first_and_last_buffer(rank, size):
    """The first buffer comes after the first backward, and goes again."""
    model = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    seen = []
    for step in range(6):
        if step == 2:
            model.module[0].register_buffer("late", torch.zeros(3))
        if step == 4:
            del model.module[0].late
        loss = model(torch.ones(2, 4)).sum()
        if 2 <= step < 4:
            model.module[0].late += rank + 1
        with Operations() as backward:
            loss.backward()
        seen.append("broadcast_" in backward.names)
        if 2 <= step < 4:
            assert model.module[0].late.tolist() == [step - 1.0] * 3
    return seen


def test_a_module_without_buffers_sends_none_until_it_has_one(ranks):
    for seen in ranks(first_and_last_buffer):
        assert seen[1] is False
        assert seen[2:4] == [True, True]
        assert seen[5] is False


def test_a_rank_that_cannot_send_them_leaves_the_group(rank, size):
    alone = dist.new_group([rank], use_local_synchronization=True)  # peers would wait for this rank, until it ends
    model = dpfuse.DistributedDataParallel(Net(), process_group=alone)
    model(batch(rank, 0)).sum().backward()
    loss = model(batch(rank, 1)).sum()

    def broken(source):
        raise MemoryError("planted")

    model._sync.buffers._buffers.start = broken
    with pytest.raises(MemoryError, match="planted"):
        loss.backward()
    with pytest.raises(DPFuseError, match=r"has failed in an earlier backward \(MemoryError: planted"):
        model(batch(rank, 2))
