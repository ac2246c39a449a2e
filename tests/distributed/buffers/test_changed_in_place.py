"""Buffers that change in place: another shape, memory or dtype in the same tensor, on all ranks or on one.

After each backward a buffer with one shape on all ranks is rank 0's, and one of several shapes is each rank's own. Only
in the step in which rank 0's has got another shape, the other ranks get the values that rank 0 sent last.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

FACES = {
    "paddle": partial(dpfuse.DataParallel, broadcast_buffers=True),
    "torch": dpfuse.DistributedDataParallel,
}


def resize(buffer, length):
    buffer.resize_(length)


def assign_data(buffer, length):
    buffer.data = torch.empty(length)


def assign_slice(buffer, length):
    """The address stays."""
    room = torch.empty(20)
    buffer.data = room[: len(buffer)]
    buffer.data = room[:length]


def set_to_tensor(buffer, length):
    buffer.set_(torch.empty(length))


def set_to_storage(buffer, length):
    buffer.set_(torch.empty(30).untyped_storage(), 10, (length,), (2,))


def resize_storage(buffer, length):
    buffer.untyped_storage().resize_(4 * length)
    buffer.set_(buffer.untyped_storage(), 0, (length,), (1,))


CHANGES = [resize, assign_data, assign_slice, set_to_tensor, set_to_storage, resize_storage]
# The lengths of rank 0 and rank 1, from one forward on. The first backward sends what has changed in the first forward.
SCHEDULES = {
    "in the first forward": {0: (8, 8)},
    "grows on rank 1": {2: (3, 8), 5: (8, 8)},
    "grows on rank 0": {2: (8, 3), 5: (8, 8)},
    "grows on rank 0 in the first forward": {0: (8, 3)},
    "shrinks": {1: (1, 1), 3: (1, 2), 4: (0, 2), 5: (5, 5)},
    "apart": {1: (4, 5), 2: (5, 4), 3: (6, 6)},
}


class Net(nn.Module):
    """Buffers of one dtype on both sides of the one that changes, so that bytes in the wrong place are seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("before", torch.zeros(4))
        self.register_buffer("changing", torch.zeros(3))
        self.register_buffer("after", torch.zeros(5))
        self.register_buffer("matrix", torch.zeros(2, 3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("numbers", torch.zeros(3, dtype=torch.int64))
        self.change = lambda: None

    def forward(self, x, value):
        self.change()
        for number, (_, buffer) in enumerate(self.named_buffers()):
            buffer.fill_(value + number)
        return self.layers(x) * self.changing.sum().div(max(1, len(self.changing)))


def value_of(rank, step):
    return 100 * rank + 10 * step


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def expected_grads(model, step, size):
    """The mean of the gradients of all ranks, whose forwards multiply by what they have filled the buffer with."""
    found = []
    for rank in range(size):
        scale = value_of(rank, step) + 1 if model.lengths[rank] else 0.0
        loss = (model.layers(batch(rank, step)) * scale).square().mean()
        found.append(torch.autograd.grad(loss, list(model.layers.parameters())))
    return [sum(each) / size for each in zip(*found, strict=True)]


def check_buffers(net, rank, step, *, differ=(), late=()):
    """Those in `differ` are of several shapes; those in `late` have got another one on rank 0 in this step."""
    for number, (name, buffer) in enumerate(net.named_buffers()):
        of_rank = rank if name in differ else 0
        want = torch.full_like(buffer, value_of(of_rank, step) + number)
        if rank != 0 and name in late:
            want.fill_(value_of(0, step - 1) + number if step else 0.0)
        assert torch.equal(buffer, want), (name, step, buffer, want)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("face", FACES)
def test_another_shape(rank, size, face, change, schedule):
    model = FACES[face](Net())
    net = model.module
    net.lengths = (3, 3)
    for step in range(7):
        late = False
        if step in SCHEDULES[schedule]:
            before, net.lengths = net.lengths, SCHEDULES[schedule][step]
            late = before[0] == before[1] == net.lengths[1] != net.lengths[0]
            changes = before[rank] != net.lengths[rank]
            net.change = partial(change, net.changing, net.lengths[rank]) if changes else (lambda: None)
        model.zero_grad()
        model(batch(rank, step), value_of(rank, step)).square().mean().backward()
        net.change = lambda: None
        for param, grad in zip(model.parameters(), expected_grads(net, step, size), strict=True):
            torch.testing.assert_close(param.grad, grad)
        differ = ["changing"] if len(set(net.lengths)) > 1 else []
        check_buffers(net, rank, step, differ=differ, late=["changing"] if late else [])
        assert net.changing.numel() == net.lengths[rank]


def rotate(buffer):
    buffer.data = buffer.data.t()


def turn(buffer):
    buffer.t_()


def flatten(buffer):
    buffer.data = buffer.data.reshape(6)


@pytest.mark.parametrize("ranks_that_change", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("change", [rotate, turn, flatten], ids=lambda change: change.__name__)
def test_another_shape_at_the_same_address(rank, size, change, ranks_that_change):
    model = dpfuse.DistributedDataParallel(Net())
    for step in range(5):
        if step == 2 and rank in ranks_that_change:
            change(model.module.matrix)
        model(batch(rank, step), value_of(rank, step)).sum().backward()
        differ = ["matrix"] if step >= 2 and len(ranks_that_change) == 1 else []
        late = ["matrix"] if step == 2 and ranks_that_change == (0,) else []
        check_buffers(model.module, rank, step, differ=differ, late=late)


def test_other_strides_of_a_square(rank, size):
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("matrix", torch.zeros(2, 2))

        def forward(self, x):
            return self.layer(x)

    model = dpfuse.DistributedDataParallel(Square())
    for step in range(4):
        if step == 2 and rank == 1:
            model.module.matrix.t_()
        model.module.matrix.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * step + 100 * rank)
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.matrix.tolist() == [[1.0 + 10 * step, 2.0 + 10 * step], [3.0 + 10 * step, 4.0 + 10 * step]]


def test_freed_memory_is_left_alone_until_it_is_back(rank, size):
    """As programs do that move what they do not need now to another device."""
    model = dpfuse.DistributedDataParallel(Net())
    storage = model.module.before.untyped_storage()
    model.module.forward = lambda x, value: model.module.layers(x)
    for step in range(8):
        for number, (name, buffer) in enumerate(model.module.named_buffers()):
            if name != "before" or storage.size():
                buffer.fill_(value_of(rank, step) + number)
        if step in (2, 5):
            storage.resize_(0)
        model(batch(rank, step), None).sum().backward()
        if storage.size():
            check_buffers(model.module, rank, step)
        else:
            assert model.module.after.tolist() == [value_of(0, step) + 2] * 5
            storage.resize_(16 if step == 3 else 0)
            if step == 6:
                storage.resize_(16)


def test_a_dtype_that_changes_in_place_on_all_ranks(rank, size):
    model = dpfuse.DistributedDataParallel(Net())
    for step in range(5):
        if step == 2:
            model.module.after.data = model.module.after.data.double()
        model(batch(rank, step), value_of(rank, step)).sum().backward()
        check_buffers(model.module, rank, step)
    assert model.module.after.dtype == torch.float64


def test_a_dtype_that_changes_in_place_on_one_rank_is_an_error_on_all(rank, size):
    model = dpfuse.DistributedDataParallel(Net())
    model(batch(rank, 0), value_of(rank, 0)).sum().backward()
    if rank == 1:
        model.module.after.data = model.module.after.data.to(torch.bfloat16)
    out = model(batch(rank, 1), value_of(rank, 1))
    with pytest.raises(dpfuse.DPFuseError, match=r"buffer 'after' is float32.*another dtype or device on rank 1"):
        out.sum().backward()
    dist.barrier()


def test_a_lazy_buffer_that_was_added_gets_its_shape_in_place(rank, size):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            if nn.parameter.is_lazy(self.mean):
                self.mean.materialize((3,))
                self.mean.zero_()
            self.mean.add_(x.mean(0))
            return self.layer(x)

    model = dpfuse.DataParallel(Lazy(), broadcast_buffers=True)
    model.module.register_buffer("mean", nn.parameter.UninitializedBuffer())
    total = torch.zeros(3)
    for step in range(4):
        x = torch.full((2, 3), 1.0 + rank + 10 * step)
        model(x).sum().backward()
        total += torch.full((3,), 1.0 + 10 * step)
        assert torch.equal(model.module.mean, total), step


def test_a_change_between_wrapping_and_the_first_forward(rank, size):
    """Rank 0's shape differs before anything was sent: rank 1 keeps its own values."""
    net = Net()
    net.changing.fill_(7.0)
    model = dpfuse.DistributedDataParallel(net)
    if rank == 0:
        net.changing.resize_(8).fill_(9.0)
    net.forward = lambda x: net.layers(x)
    for step in range(3):
        model(batch(rank, step)).sum().backward()
        assert net.changing.tolist() == ([9.0] * 8 if rank == 0 else [7.0] * 3)


@pytest.mark.parametrize("face", FACES)
def test_a_copy_of_a_model_whose_buffer_has_changed_settles_on_it(rank, size, face):
    """Between the change and the next backward."""
    module = nn.Linear(4, 4)
    module.register_buffer("seen", torch.zeros(3))
    model = FACES[face](module)
    model(torch.ones(2, 4)).sum().backward()
    model.module.seen.resize_(5).fill_(rank)
    model = copy.deepcopy(model)
    for step in range(3):
        model.module.seen.fill_(10 * step + rank)
        model(torch.ones(2, 4)).sum().backward()
        assert model.module.seen.tolist() == [10 * step] * 5
