"""Process groups that are written in Python, and that torch.distributed does not know: trained beside torch's DDP."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse.comm.abilities import backend_of
from dpfuse.comm.waiting import board_of


class StrictWork(dist._Work):
    """A work whose `wait` wants its argument, as torch's DDP gives it."""

    def __init__(self, work, tensors):
        super().__init__()
        self._work, self._tensors = work, tensors

    def wait(self, timeout):
        assert isinstance(timeout, timedelta)
        return self._work.wait()

    def get_future(self):
        return self._work.get_future()


class FutureWork(dist._Work):
    """A work that a future completes, with its result, as wrappers for fault tolerance have them."""

    def __init__(self, work, tensors):
        super().__init__()
        self._future = work.get_future().then(lambda done: done.value())

    def wait(self, timeout=timedelta(0)):
        self._future.wait()
        return True

    def get_future(self):
        return self._future


class ElsewhereWork(dist._Work):
    """A work whose future has the result; that of an all-reduce is not in the tensors that were given."""

    def __init__(self, work, tensors):
        super().__init__()
        work.wait()
        self._future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout=timedelta(0)):
        return True

    def get_future(self):
        return self._future


class PythonGroup(dist.ProcessGroup):
    """Gloo's collectives, each as a work of `kind`. It lists no devices and is registered nowhere."""

    def __init__(self, kind, store, rank, size):
        super().__init__(rank, size)
        self._kind, self._rank, self._size = kind, rank, size
        self._inner = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def getBackendName(self):  # noqa: N802  # torch's names
        return "python-over-gloo"

    def getSize(self):  # noqa: N802
        return self._size

    def allreduce(self, tensors, options):
        if self._kind is ElsewhereWork:
            tensors = [tensor.clone() for tensor in tensors]
        return self._kind(self._inner.allreduce(tensors, options), tensors)

    def broadcast(self, tensors, options):
        return self._kind(self._inner.broadcast(tensors, options), tensors)

    def allgather(self, outputs, inputs, options):
        return self._kind(self._inner.allgather(outputs, inputs, options), outputs)

    def alltoall_base(self, output, values, output_sizes, sizes, options):
        return self._kind(self._inner.alltoall_base(output, values, output_sizes, sizes, options), [output])

    def _allgather_base(self, output, values, options):
        return self._kind(self._inner._allgather_base(output, values, options), [output])


def joined(kind, name, rank, size):
    return PythonGroup(kind, dist.PrefixStore(f"{kind.__name__} {name}", _get_default_store()), rank, size)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def train(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for part in range(2):
            x = torch.randn(4, 6, generator=generator)
            if part == 0:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.module.parameters()]


def paddles(net, group, **sizes):
    return dpfuse.DataParallel(net, group=group, broadcast_buffers=True, **sizes)


def torchs(net, group, **options):
    return dpfuse.DistributedDataParallel(net, process_group=group, **options)


WRAPS = {
    "torch's face": torchs,
    "torch's face, views": partial(torchs, gradient_as_bucket_view=True),
    "Paddle's face": paddles,
    "several buckets": partial(paddles, comm_buffer_size=1e-4, last_comm_buffer_size=1e-4),
}


def beside_ddp(rank, size, kind):
    theirs = train(TorchDDP(Net(), process_group=joined(kind, "theirs", rank, size)), rank)
    for name, wrap in WRAPS.items():
        group = joined(kind, name, rank, size)
        model = wrap(Net(), group)
        assert "backend=python-over-gloo" in repr(model)
        ours = train(model, rank)
        assert all(map(torch.equal, ours, theirs)), name
    return backend_of(group)


@pytest.mark.parametrize("kind", [StrictWork, FutureWork, ElsewhereWork])
def test_a_job_over_an_unknown_group_trains_bitwise_like_ddp_over_it(ranks, kind):
    assert ranks(beside_ddp, kind) == ["python-over-gloo"] * 2


@pytest.mark.parametrize("kind", [StrictWork, ElsewhereWork])
def test_all_that_sends_takes_such_a_group(rank, size, kind):
    group = joined(kind, "manual", rank, size)
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    for param in params:
        param.grad = torch.full_like(param, float(rank + 1))
    dpfuse.fused_allreduce_gradients(params, group)
    assert all(param.grad.eq(1.5).all() for param in params)
    for options in ({"deterministic": True}, {"wire_dtype": torch.bfloat16}, {"accumulate_in_buckets": True}):
        model = dpfuse.DataParallel(Net(), group=joined(kind, str(options), rank, size), **options)
        model(torch.full((4, 6), float(rank))).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
        norms = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(norms, model.grad_norm().reshape(1))
        assert norms[0] == norms[1], "the gradients are the same on both ranks"


def a_peer_that_fails(rank, size, kind):
    model = dpfuse.DataParallel(Net(), group=joined(kind, "faults", rank, size))
    model(torch.ones(4, 6)).sum().backward()
    if rank == 1:
        planted = model.module.layers[0].bias.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(4, 6)).sum().backward()
        planted.remove()
    else:
        with pytest.raises(dpfuse.DPFuseError, match="rank 1"):
            model(torch.ones(4, 6)).sum().backward()
    model.zero_grad()
    model(torch.ones(4, 6)).sum().backward()


def test_a_failure_is_named_over_such_a_group(ranks):
    ranks(a_peer_that_fails, StrictWork)


class DoneWork(dist._Work):
    """A work that was done when it began. It counts how often it is waited for."""

    def __init__(self, group, result):
        super().__init__()
        self._group, self._future = group, torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout):
        self._group.waits += 1
        return True

    def get_future(self):
        return self._future


class Lonely(dist.ProcessGroup):
    """A group of one rank, without any back end."""

    def __init__(self):
        super().__init__(0, 1)
        self.waits = 0

    def getBackendName(self):  # noqa: N802  # torch's names
        return "lonely"

    def getSize(self):  # noqa: N802
        return 1

    def allreduce(self, tensors, options):
        return DoneWork(self, tensors)

    def broadcast(self, tensors, options):
        return DoneWork(self, tensors)

    def allgather(self, outputs, inputs, options):
        outputs[0][0].copy_(inputs[0])
        return DoneWork(self, outputs)


@pytest.mark.parametrize("views", [True, False])
def test_a_group_of_one_rank_needs_no_default_group(views):
    assert not dist.is_initialized()
    group, net = Lonely(), Net()
    model = dpfuse.DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=views)
    before = group.waits
    model(torch.ones(4, 6)).sum().backward()
    assert group.waits > before
    grads = [param.grad.clone() for param in net.parameters()]
    net.zero_grad()
    net(torch.ones(4, 6)).sum().backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(net.parameters(), grads, strict=True))


def where_it_waits(rank, size, kind):
    group = joined(kind, "idle", rank, size)
    model = dpfuse.DataParallel(Net(), group=group)
    model(torch.ones(4, 6)).sum().backward()
    board = board_of(group)
    return board.waits % 2, board.device_done is None


@pytest.mark.parametrize("kind", [StrictWork, FutureWork])
def test_a_work_that_never_says_that_it_is_completed_is_not_waited_for_between_steps(ranks, kind):
    """Else an idle program would end after `stall_timeout`."""
    assert ranks(where_it_waits, kind) == [(0, True)] * 2
