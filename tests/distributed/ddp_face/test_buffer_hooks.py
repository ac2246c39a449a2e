"""Buffers that a user's hook synchronises: torch's numbers at torch's times, and waited for before backward returns."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from dpfuse import DistributedDataParallel, DPFuseError
from tests.torch_ddp import since_torch, torch_ddp

BOTH = (TorchDDP, DistributedDataParallel)


class Net(nn.Module):
    """A buffer that differs from rank to rank, and one that counts forwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("local", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        with torch.no_grad():
            self.local.add_(x.sum())
            self.count.add_(1)
        return self.layer(x) + self.local


def sum_buffers(state, named_buffers):
    state.append(list(named_buffers))
    works = [dist.all_reduce(buffer, async_op=True) for buffer in named_buffers.values()]
    return [work.get_future() for work in works]


def sum_and_wait(state, named_buffers):
    for future in sum_buffers(state, named_buffers):
        future.wait()


@pytest.mark.parametrize(("before", "wait"), [(True, True), (False, True), (False, False)])
def test_a_buffer_hook_does_what_it_does_for_torch(rank, size, before, wait):
    net, models, calls = Net(), [], ([], [])
    location = Location.PRE_FORWARD if before else Location.POST_FORWARD
    for cls, state in zip(BOTH, calls, strict=True):
        model = cls(copy.deepcopy(net))
        # Torch lets a sum that nobody has waited for run into the next forward.
        hook = sum_and_wait if wait or cls is TorchDDP else sum_buffers
        model._register_buffer_comm_hook(state, hook, *([] if location is Location.POST_FORWARD else [location]))
        models.append(model)
    for step in range(4):
        x = torch.full((2, 3), rank + 1.0 + step)
        for model in models:
            model.zero_grad()
            if step == 1:  # torch decides by the switch of the forward before
                with model.no_sync():
                    model(x).sum().backward()
            model(x).sum().backward()
        for (name, theirs), ours in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
            assert torch.equal(ours, theirs), (name, step)
        for theirs, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert calls[0] == calls[1] == [["local", "count"]] * len(calls[0])
    assert len(calls[0]) > 3


def mean(state, named_buffers):
    for buffer in named_buffers.values():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


@pytest.mark.parametrize(
    "before", [pytest.param(False, marks=since_torch(2, 12, "torch's class marks what a graph holds as written")), True]
)
def test_a_hook_may_write_what_a_backward_holds(rank, size, before):
    """Batch norm's backward holds what the hook writes."""
    net, models = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), []
    for cls in BOTH:
        models.append(cls(copy.deepcopy(net)))
        models[-1]._register_buffer_comm_hook(None, mean, Location.PRE_FORWARD if before else Location.POST_FORWARD)
    for step in range(3):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        for model in models:
            model.zero_grad()
            model(x).square().sum().backward()
        for theirs, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for theirs, ours in zip(models[0].buffers(), models[1].buffers(), strict=True):
            assert torch.equal(ours, theirs)


def slow_sum(state, named_buffers):
    """A future that is set long after backward's own work is done."""
    future = dist.all_reduce(named_buffers["local"], async_op=True).get_future()

    def finish(_):
        import time

        time.sleep(0.3)
        state.append("done")

    return [future.then(finish)]


def test_backward_returns_when_the_futures_are_done(rank, size):
    state = []
    model = DistributedDataParallel(Net())
    model._register_buffer_comm_hook(state, slow_sum)
    for step in range(2):
        model(torch.ones(2, 3)).sum().backward()
        assert state == ["done"] * (step + 1)


def broadcast(model, named_buffers):
    model._default_broadcast_coalesced(list(named_buffers.values()))


def test_a_hook_may_send_rank_0s_buffers_as_without_it(rank, size):
    for cls in BOTH:
        net = Net()
        model = cls(net)
        model._register_buffer_comm_hook(model, broadcast, Location.PRE_FORWARD)
        for step in range(2):
            net.local.fill_(rank + step)
            model(torch.zeros(2, 3)).sum().backward()
            assert torch.equal(net.local, torch.full((2,), float(step))), cls


def join_with_hook(rank, size):
    model = DistributedDataParallel(Net())
    model._register_buffer_comm_hook([], sum_and_wait, Location.PRE_FORWARD)
    with model.join():
        for _ in range(2 + rank):
            model(torch.ones(2, 3)).sum().backward()
    late = DistributedDataParallel(Net())
    late._register_buffer_comm_hook([], sum_and_wait)
    with pytest.raises(DPFuseError, match="a buffer hook that runs after the forward"), late.join():
        pass
    return [buffer.tolist() for buffer in model.buffers()]


def test_ranks_without_input_call_the_hook_too(ranks):
    one, other = ranks(join_with_hook)
    assert one == other


def test_what_is_no_hook_is_torchs_error(group):
    for cls in BOTH:
        with pytest.raises(AssertionError, match="hook must be callable, got int"):
            cls(Net())._register_buffer_comm_hook(None, 5)


@pytest.mark.parametrize("result", [torch.futures.Future(), [1], 5])
def test_what_is_no_list_of_futures_is_named(group, result):
    model = DistributedDataParallel(Net())
    model._register_buffer_comm_hook(None, lambda state, buffers: result)
    with pytest.raises(TypeError, match="must return None or a list of futures, got"):
        model(torch.ones(1, 3))


def test_nothing_is_called_where_nothing_would_be_sent(group):
    for wrap in (torch_ddp, DistributedDataParallel):
        calls = []
        model = wrap(Net(), forward_sync_buffers=False)
        model._register_buffer_comm_hook(calls, sum_and_wait)
        model(torch.ones(1, 3)).sum().backward()
        assert calls == []


def test_the_hook_keeps_no_wrapper_alive_and_goes_into_no_copy(group):
    net, calls = Net(), []
    model = DistributedDataParallel(net)
    model._register_buffer_comm_hook(calls, sum_and_wait, Location.PRE_FORWARD)
    clone = copy.deepcopy(model)
    clone(torch.ones(1, 3)).sum().backward()
    assert calls == []
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not net.layer.weight._post_accumulate_grad_hooks
