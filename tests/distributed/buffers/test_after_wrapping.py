"""The module after wrapping: buffers that are to stay equal, and changes that are none for the parameters."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.model.signature import ModelSignature
from tests.distributed.processes import start
from tests.patience import patience


def buffers_follow_rank_0(rank, size, broadcast):
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=broadcast)
    norm = model.module[1]
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 3)).sum().backward()
        model.zero_grad()
    model(torch.zeros(8, 3))  # the same batch everywhere: what still differs comes from the batches before
    return norm.running_mean.tolist(), norm.num_batches_tracked.item()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_sent_before_each_forward_only_if_asked(ranks, broadcast):
    first, second = ranks(buffers_follow_rank_0, broadcast)
    assert (first == second) is broadcast
    assert first[1] == second[1] == 4


def equal_in_a_second_forward(rank, size):
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.seen = []

        def forward(self, x):
            self.seen.append((self.mean.tolist(), self.count.item()))
            return self.weight * x.sum()

    model = dpfuse.DataParallel(Reading(), broadcast_buffers=True)
    for step in range(3):
        first = model(torch.ones(1))
        model.mean.fill_(10.0 * step + rank)
        model.count.fill_(10 * step + rank)
        second = model(torch.ones(1))  # no backward has sent them since the first one, so this forward does
        model.mean.fill_(10.0 * step + 5 + rank)
        (first + second).backward()
    with torch.no_grad():
        model(torch.ones(1))
    return model.seen


def test_buffers_are_those_of_rank_0_in_a_second_forward_and_after_backward(ranks):
    seen = [([0.0] * 3, 0)]
    for step in range(3):
        seen += [([10.0 * step] * 3, 10 * step), ([10.0 * step + 5] * 3, 10 * step)]
    assert ranks(equal_in_a_second_forward) == [seen] * 2


def test_the_rank_that_sends_buffers_does_not_wait_for_its_peers(rank, size):
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=True)
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if rank:
            store.wait([f"sent {step}"], timedelta(seconds=30))
        with torch.no_grad():
            model.module[1].running_mean.fill_(10.0 * step + rank)
        model(torch.zeros(8, 3))
        if not rank:
            store.set(f"sent {step}", "")
        # The forward keeps nine tenths of the mean and adds a tenth of the bias; rank 1's own would be 0.9 more.
        assert (model.module[1].running_mean - 9.0 * step).abs().max() < 0.1


def test_buffers_arrive_though_their_sender_has_nothing_left_to_do(tmp_path):
    arguments = ("-m", "tests.distributed.scripts.last_forward", tmp_path)
    processes = [start(*arguments, rank, warm=True) for rank in range(2)]
    try:
        for process in processes:
            output, errors = process.communicate(timeout=patience(60))
            assert process.returncode == 0, (output, errors)
    finally:
        for process in processes:
            process.kill()


def test_other_changes_of_a_module_are_none(rank, size):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    model = dpfuse.DataParallel(net, find_unused_parameters=True)
    x = torch.full((2, 3), 1.0 + rank)

    def same_as_mean_of_bare():
        model.zero_grad()
        model(x).sum().backward()
        mean = torch.autograd.grad(net(torch.full((2, 3), 1.5)).sum(), list(net.parameters()), allow_unused=True)
        for param, expected in zip(net.parameters(), mean, strict=True):
            torch.testing.assert_close(param.grad, expected)

    same_as_mean_of_bare()  # the network is linear where it is positive, so its gradients' mean is that of the mean
    net[1] = nn.Identity()
    same_as_mean_of_bare()
    net.append(nn.Identity())
    same_as_mean_of_bare()
    net[2] = nn.Identity()  # takes two parameters away
    same_as_mean_of_bare()
    net[4] = nn.Sequential(net[0], nn.Unflatten(1, (4, 1)), nn.Flatten(0))  # a second place for known parameters
    net[3] = nn.Linear(4, 3, bias=False).requires_grad_(False)  # a layer that nobody trains
    model.zero_grad()
    model(x).sum().backward()
    assert net[0].weight.grad is not None
    assert len(model.bucket_plan.specs) == 6  # those of the beginning; nothing has been planned again


class Normed(nn.Module):
    """A norm without parameters, which only buffers tell from another; `seen` has those that its forwards saw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.seen = []

    def forward(self, x):
        self.seen.append({name: buffer.clone() for name, buffer in self.named_buffers()})
        return self.norm(self.layer(x))


FACES = {
    "paddle": partial(dpfuse.DataParallel, broadcast_buffers=True),
    "torch": partial(dpfuse.DistributedDataParallel, forward_sync_buffers=True),
}


def step(model, rank):
    model(torch.randn(4, 3) + 10 * rank).sum().backward()
    model.zero_grad()


def norm_was_replaced(rank, size, face, local_first):
    model = FACES[face](Normed())
    step(model, rank)
    if local_first:
        with model.no_sync():
            step(model, rank)
    model.module.norm = nn.BatchNorm1d(3, affine=False)
    if local_first:
        with model.no_sync():
            step(model, rank)
    for _ in range(3):
        step(model, rank)
    return [seen["norm.running_mean"].tolist() for seen in model.module.seen[-2:]]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("local_first", [True, False])
def test_buffers_of_a_module_that_replaced_another_are_those_of_rank_0(ranks, face, local_first):
    first, second = ranks(norm_was_replaced, face, local_first)
    assert first[-1] == second[-1] != [0.0] * 3
    if not local_first:  # torch sends none before the first forward behind no_sync()
        assert first == second


class Late(nn.Module):
    """Has no buffer until a forward, or the program, registers one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.registers = None

    def forward(self, x):
        if self.registers is not None:
            self.register_buffer("late", self.registers)
            self.registers = None
        return self.layer(x)


MOMENTS = ["before the forward", "inside it", "after it"]


def first_buffers(rank, size, face, moments):
    net = Late()
    model = FACES[face](net)
    for number in range(4):
        moment = moments[rank] if number == 2 else None
        value = torch.full((3,), 10.0 * rank + 1)
        if moment == "before the forward":
            net.register_buffer("late", value)
        if moment == "inside it":
            net.registers = value
        loss = model(torch.ones(2, 3)).sum()
        if moment == "after it":
            net.register_buffer("late", value)
        loss.backward()
        model.zero_grad()
        if number >= 2:
            assert net.late.tolist() == [number - 1.0] * 3
            net.late.add_(1.0)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("first", MOMENTS)
@pytest.mark.parametrize("second", MOMENTS)
def test_a_model_without_buffers_may_get_some_at_any_time_before_a_backward(ranks, face, first, second):
    ranks(first_buffers, face, (first, second))


def add_buffer(net):
    net.register_buffer("extra", torch.full((5,), 7.0))


def convert_buffer(net):
    net.norm.num_batches_tracked = net.norm.num_batches_tracked.int()


def remove_buffers(net):
    net.norm = nn.Identity()


def buffers_changed_on(changed, change, face, rank):
    model = FACES[face](Normed())
    net, kept = model.module, model.module.norm
    for _ in range(2):
        step(model, rank)
    if rank == changed:
        change(net)
    own = {name: buffer.clone() for name, buffer in net.named_buffers()}
    step(model, rank)
    if change is add_buffer and rank == changed:
        assert net.extra.tolist() == own["extra"].tolist()
    assert kept.running_var.tolist() != [1.0] * 3
    if rank != changed:
        change(net)
    for _ in range(2):
        model.zero_grad()
        step(model, rank)
    return [(name, buffer.tolist()) for name, buffer in net.seen[-1].items()]


def buffers_changed_on_one_rank(rank, size, change, face):
    return [buffers_changed_on(changed, change, face, rank) for changed in range(size)]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("change", [add_buffer, remove_buffers])
def test_buffers_that_one_rank_has_alone_are_left_to_it_until_all_have_them(ranks, change, face):
    first, second = ranks(buffers_changed_on_one_rank, change, face)
    assert first == second


def converted_on_one_rank(rank, size, face):
    for changed in range(size):
        model = FACES[face](Normed())
        for _ in range(2):
            step(model, rank)
        if rank == changed:
            convert_buffer(model.module)
        for _ in range(2):  # until it is mended
            model.zero_grad()
            here = "int32" if changed == 0 else "int64"
            text = (
                rf"buffer 'norm.num_batches_tracked' is {here} \(\) on cpu on rank 0, and has another dtype .* rank 1"
            )
            loss = model(torch.full((4, 3), 1.0 + rank) * torch.arange(4.0)[:, None]).square().sum()
            with pytest.raises(dpfuse.DPFuseError, match=text):
                loss.backward()
            grads = [param.grad.clone() for param in model.module.parameters()]
            for grad in grads:
                mean = grad.clone()
                torch.distributed.broadcast(mean, 0)
                assert torch.equal(grad, mean), "gradients are averaged all the same"
        if rank != changed:
            convert_buffer(model.module)
        for _ in range(2):
            model.zero_grad()
            step(model, rank)
    return [(name, buffer.tolist()) for name, buffer in model.module.seen[-1].items()]


@pytest.mark.parametrize("face", FACES)
def test_a_buffer_that_one_rank_has_converted_is_an_error_on_all_until_it_is_mended(ranks, face):
    first, second = ranks(converted_on_one_rank, face)
    assert first == second


class Alike(nn.Linear):
    """Equal to any other of its kind."""

    def __eq__(self, other):
        return isinstance(other, Alike)

    __hash__ = nn.Linear.__hash__


def test_a_module_that_equals_another_is_not_taken_for_it():
    model = nn.Sequential(Alike(2, 2), nn.Linear(2, 2))
    signature = ModelSignature(model)
    assert signature.change() is None
    model[0] = Alike(2, 2)
    assert not signature.unchanged()
    assert signature.change() == "parameter '0.weight' was replaced"
