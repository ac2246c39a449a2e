"""The module after wrapping: buffers that are to stay equal, and parameters that are not what they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse


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


def equal_before_forward(rank, size):
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
        model.mean.fill_(10.0 * step + rank)
        model.count.fill_(10 * step + rank)
        model(torch.ones(1)).backward()
    with torch.no_grad():
        model(torch.ones(1))
    return model.seen


def test_every_rank_computes_with_the_buffers_of_rank_0(ranks):
    sent = [([10.0 * step] * 3, 10 * step) for step in range(3)]
    assert ranks(equal_before_forward) == [[*sent, sent[-1]]] * 2


def replace(model):
    model.module[0].bias = nn.Parameter(torch.zeros(4))
    return "parameter '0.bias' was replaced"


def unfreeze(model):
    model.module[1].weight.requires_grad_(True)
    return "parameter '1.weight' was unfrozen"


def add(model):
    model.module[1].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    return "parameter '1.extra' was added"


def replace_layer(model):
    model.module[0] = nn.Linear(3, 4)
    return "parameter '0.weight' was replaced"


def add_layer(model):
    model.module.append(nn.Linear(1, 1))
    return "parameter '2.weight' was added"


def replace_nested_layer(model):
    model.module[2][0] = nn.Linear(1, 1)
    return "parameter '2.0.weight' was replaced"


def changed(rank, size, change):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    if change is replace_nested_layer:
        net.append(nn.Sequential(nn.Linear(1, 1)))
    net[1].weight.requires_grad_(False)
    model = dpfuse.DataParallel(net)
    model(torch.ones(2, 3)).sum().backward()
    text = f"rank {rank}: {change(model)} after the module was wrapped"
    with pytest.raises(dpfuse.DPFuseError, match=text) as error:
        model(torch.ones(2, 3))
    assert "Wrap the module again, on every rank" in str(error.value)
    with torch.no_grad():
        model(torch.ones(2, 3))  # evaluation communicates nothing and may go on
    model = dpfuse.DataParallel(model.module)
    model(torch.full((2, 3), 1.0 + rank)).sum().backward()


@pytest.mark.parametrize("change", [replace, unfreeze, add, replace_layer, add_layer, replace_nested_layer])
def test_a_change_of_the_parameters_is_a_named_error(ranks, change):
    ranks(changed, change)


def harmless(rank, size):
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
    replaced = nn.Linear(4, 3)
    net[3] = replaced
    with pytest.raises(dpfuse.DPFuseError, match=r"parameter '3.weight' was replaced"):
        model(x)


def test_other_changes_of_a_module_are_none(ranks):
    ranks(harmless)


def converted(rank, size, views):
    """All parameters become float64, on both ranks or on rank 1 only."""
    for everywhere in (True, False):
        model = dpfuse.DataParallel(nn.Linear(3, 4), gradient_as_bucket_view=views)
        x = torch.ones(2, 3)
        model(x).sum().backward()
        model.zero_grad()
        if everywhere or rank == 1:
            model.double()
            x = x.double()
            expected = rf"rank {rank} could not pack its gradients: Slot 'weight' got dtype torch.float64, expected"
        else:
            expected = "the backward failed on rank 1 of 2, and rank 0 cannot have its gradients"
        with pytest.raises(dpfuse.DPFuseError, match=expected):
            model(x).sum().backward()


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_a_converted_module_is_an_error_on_every_rank(ranks, views):
    ranks(converted, views)
