"""A module that changes after wrapping, on all ranks alike: the gradients are the mean, from the first step on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse import DataParallel, DistributedDataParallel
from tests.operations import Operations

FACES = {"paddle": DataParallel, "torch": DistributedDataParallel}


class Net(nn.Module):
    """Layers of several kinds; `side` uses one of two, and what is added later is used if it is there."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.sides = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])
        self.head = nn.Sequential(nn.Sequential(nn.Linear(4, 2, bias=False)))
        self.more = nn.ModuleList()

    def forward(self, x, side):
        x = self.frozen(torch.tanh(self.norm(self.first(x.to(self.first.weight.dtype)))))
        x = self.head(self.sides[side](x))
        for layer in self.more:
            x = layer(x)
        return x


def replace_parameter(net):
    net.first.bias = nn.Parameter(torch.randn(5, dtype=net.first.weight.dtype))


def replace_layer(net):
    net.head[0][0] = nn.Linear(4, 2, dtype=net.first.weight.dtype)


def add_layer(net):
    net.more.append(nn.Linear(2, 2, dtype=net.first.weight.dtype))


def fill_an_empty_place(net):
    net.head[0][0].bias = nn.Parameter(torch.zeros(2, dtype=net.first.weight.dtype))


def unfreeze(net):
    net.frozen.weight.requires_grad_(True)


def replace_everything(net):
    fresh = Net().to(net.first.weight.dtype)
    for name, child in fresh.named_children():
        setattr(net, name, child)


def convert(net):
    net.to(torch.float32 if net.first.weight.dtype is torch.float64 else torch.float64)


def assign(net):
    state = {name: torch.randn_like(value) if "num" not in name else value for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def grow(net):
    weight = net.head[0][0].weight
    weight.grad, weight.data = None, torch.randn(len(weight) + 4, 4, dtype=weight.dtype)


def freeze_and_replace(net):
    net.first.requires_grad_(False)
    net.sides[1] = nn.Linear(5, 4, dtype=net.first.weight.dtype)


def shuffle_and_unfreeze(net):
    net.sides[0], net.sides[1] = net.sides[1], net.sides[0]
    net.frozen.bias.requires_grad_(True)


CHANGES = [
    replace_parameter, replace_layer, add_layer, fill_an_empty_place, unfreeze, replace_everything, convert, assign,
    grow, freeze_and_replace, shuffle_and_unfreeze,
]  # fmt: skip


class Pair:
    """A wrapped module, and a bare one that goes the same way alone; `check` compares it with the mean of those."""

    def __init__(self, rank, size, face, **options):
        torch.manual_seed(0)
        net = Net()
        self.rank, self.size, self.steps = rank, size, 0
        self.bare = copy.deepcopy(net)
        self.wrapped = FACES[face](net, find_unused_parameters=True, **options)

    def change(self, change):
        for net in (self.wrapped.module, self.bare):
            torch.manual_seed(self.steps)
            change(net)

    def backward(self, sync=True):
        self.steps += 1
        torch.manual_seed(100 * self.steps + self.rank)
        x = torch.randn(4, 3)
        side = (self.rank + self.steps) % 2 if self.steps % 3 else 0
        self.bare(x, side).square().sum().backward()
        with self.wrapped.no_sync(enabled=not sync):
            self.wrapped(x, side).square().sum().backward()

    def check(self):
        theirs = dict(self.bare.named_parameters())
        for name, param in self.wrapped.module.named_parameters():
            grad = theirs[name].grad
            used = torch.tensor(float(grad is not None))
            dist.all_reduce(used)
            if not used or not param.requires_grad:
                assert param.grad is None or not param.requires_grad, name
                continue
            mean = (torch.zeros_like(theirs[name]) if grad is None else grad) * (1 / self.size)
            dist.all_reduce(mean)
            assert param.grad.dtype == param.dtype
            if self.size == 2:
                assert torch.equal(param.grad, mean), f"step {self.steps}: {name} {param.grad} {mean}"
            else:
                torch.testing.assert_close(param.grad, mean)

    def step(self):
        self.backward()
        self.check()
        self.zero_grad()

    def zero_grad(self):
        for net in (self.wrapped, self.bare):
            net.zero_grad()


def followed(rank, size, change, views, face, options=()):
    pair = Pair(rank, size, face, gradient_as_bucket_view=views, **dict(options))
    for _ in range(2):
        pair.step()
    pair.change(change)
    for _ in range(3):
        pair.step()
    planned = [spec.name for spec in pair.wrapped.bucket_plan.specs]
    assert planned == [name for name, param in pair.wrapped.module.named_parameters() if param.requires_grad]
    pair.change(change)
    pair.step()
    pair.change(freeze_and_replace)
    for _ in range(2):
        pair.step()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("views", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["views", "private"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_all_ranks_is_followed(ranks, change, views):
    ranks(followed, change, views, "torch" if views else "paddle")


def changed_in_a_window(rank, size, change, views):
    pair = Pair(rank, size, "paddle", gradient_as_bucket_view=views)
    for before_first_step in (True, False):
        pair.backward(sync=False)
        pair.change(change)
        pair.backward(sync=False)
        if not before_first_step:
            pair.change(unfreeze)
        pair.backward(sync=False)
        pair.backward()
        pair.check()
        pair.backward(sync=False)  # on top of the means, as without a change
        pair.bare.zero_grad()
        pair.zero_grad()
        pair.step()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_that_was_accumulated_gets_lost(ranks, change, views):
    ranks(changed_in_a_window, change, views)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("change", [add_layer, replace_parameter, unfreeze, convert])
def test_nothing_that_was_accumulated_in_views_gets_lost(rank, size, change, views):
    """What is accumulated lies in the old buffers, where `.grad` is a view of them."""
    pair = Pair(rank, size, "torch", gradient_as_bucket_view=views)
    for _ in range(2):
        pair.step()
    pair.backward()
    for theirs, ours in zip(pair.bare.parameters(), pair.wrapped.module.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    pair.backward(sync=False)
    pair.change(change)
    pair.backward(sync=False)
    pair.backward()
    pair.check()


def test_a_module_with_a_scale_follows(ranks):
    ranks(followed, replace_layer, True, "paddle", {"gradient_scale": 0.5})


@pytest.mark.parametrize(
    "change", [add_layer, *(pytest.param(each, marks=pytest.mark.slow) for each in (replace_everything, convert))]
)
def test_three_ranks_follow(ranks, change):
    ranks(followed, change, True, "torch", size=3)
    ranks(changed_in_a_window, change, False, size=3)


@pytest.mark.parametrize("change", [replace_everything, add_layer, convert])
def test_one_rank_follows(ranks, change):
    ranks(followed, change, True, "paddle", size=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize(
    "change", [replace_parameter, replace_layer, add_layer, unfreeze, assign, shuffle_and_unfreeze]
)
def test_a_change_between_forward_and_backward_counts_from_the_next_forward_on(rank, size, change, views):
    """The gradients are those of the parameters that computed; what is new comes in with the next forward."""
    pair = Pair(rank, size, "paddle", gradient_as_bucket_view=views)
    pair.step()
    x = torch.full((4, 3), 1.0 + rank).cumsum(0)
    losses = [net(x, 0).square().sum() for net in (pair.bare, pair.wrapped)]
    pair.change(change)
    for loss in losses:
        loss.backward()
    pair.check()
    pair.zero_grad()
    for _ in range(3):
        pair.step()


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_conversion_between_forward_and_backward_is_right_or_an_error_on_every_rank(rank, size, views, everywhere):
    model = DataParallel(nn.Linear(3, 2), gradient_as_bucket_view=views)
    x = torch.full((4, 3), 1.0 + rank)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    loss = model(x).sum()
    if everywhere or rank == 1:
        model.double()
    if views:  # which must have the parameter's dtype
        text = r"rank \d could not pack" if everywhere or rank else "failed on rank 1 of 2"
        with pytest.raises(dpfuse.DPFuseError, match=text):
            loss.backward()
    else:
        loss.backward()
        assert torch.equal(model.weight.grad, torch.full((2, 3), 4 * 1.5))
    model.double()
    model.zero_grad()
    model(x.double()).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 4 * 1.5, dtype=torch.float64))


def copied(rank, size):
    pair = Pair(rank, size, "torch")
    pair.step()
    for change in (convert, replace_everything):
        pair.change(change)
        for copied in (copy.deepcopy(pair.wrapped), pickle.loads(pickle.dumps(pair.wrapped))):
            other = Pair(rank, size, "torch")
            other.wrapped, other.bare = copied, copy.deepcopy(pair.bare)
            other.step()
            other.change(unfreeze)
            other.step()
        pair.backward(sync=False)
        half = copy.deepcopy(pair.wrapped)  # while the change is still to be told
        half.zero_grad()
        half(torch.ones(4, 3), 0).sum().backward()
        pair.backward()
        pair.check()
        pair.zero_grad()
        pair.wrapped._update_process_group(dist.group.WORLD)
        pair.step()


def test_copies_and_other_groups_work_after_a_change(ranks):
    ranks(copied)


def test_a_module_that_is_frozen_as_a_whole_comes_back(rank, size):
    """A network whose gradients pass through but not into it, as a GAN's second one."""
    pair = Pair(rank, size, "torch")
    pair.step()
    for net in (pair.wrapped, pair.bare):
        net.requires_grad_(False)
    x = torch.ones(4, 3, requires_grad=True)
    for change in (None, convert):
        if change is not None:
            pair.change(change)
        for _ in range(2):
            pair.wrapped(x, 0).sum().backward()
            assert all(param.grad is None for param in pair.wrapped.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        pair.wrapped(torch.ones(4, 3), 0).sum().backward()
    for net in (pair.wrapped.module, pair.bare):
        net.requires_grad_(True)
    for _ in range(2):
        pair.step()


def test_a_change_that_was_undone_is_none(rank, size):
    pair = Pair(rank, size, "paddle")
    pair.step()
    kept = pair.wrapped.module.head
    pair.wrapped.module.head = nn.Sequential(nn.Linear(4, 2))
    with pair.wrapped.no_sync():
        pair.wrapped(torch.ones(4, 3), 0).sum().backward()
    pair.wrapped.module.head = kept
    pair.zero_grad()
    plan = pair.wrapped.bucket_plan
    for _ in range(2):
        pair.step()
    assert pair.wrapped.bucket_plan is plan


@pytest.mark.parametrize("undo", [False, True], ids=["followed", "undone"])
def test_a_feature_that_is_added_while_a_change_is_pending_follows_the_change(rank, size, undo):
    """A weight is given between the forward that has seen a change and its backward: the buckets are made again."""
    pair = Pair(rank, size, "paddle")
    pair.step()
    kept = pair.wrapped.module.head
    pair.change(replace_layer)
    if undo:
        with pair.wrapped.no_sync():
            pair.wrapped(torch.ones(4, 3), 0).sum().backward()
        pair.zero_grad()
        pair.wrapped.module.head, pair.bare.head = kept, copy.deepcopy(kept)
    x = torch.full((4, 3), 1.0 + rank)
    loss = pair.wrapped(x, 0).sum()
    pair.wrapped.set_gradient_weight(2.0)
    loss.backward()
    twin = copy.deepcopy(pair.wrapped.module)
    twin.zero_grad()
    twin(x, 0).sum().backward()
    for (name, param), other in zip(pair.wrapped.module.named_parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            dist.all_reduce(other.grad)
            torch.testing.assert_close(param.grad, other.grad / size, msg=name)


def collectives_of(rank, size):
    """How many collectives each step calls: one, but for the first, and for that with the change."""
    pair = Pair(rank, size, "paddle")
    counts = []
    for change in (None, None, convert, None, None):
        if change is not None:
            pair.change(change)
        with Operations() as done:
            pair.backward()
        counts.append(len(done.collectives))
        pair.zero_grad()
    return counts


def test_a_step_without_change_costs_no_collective(ranks):
    for _, before, changing, after, later in ranks(collectives_of):
        assert before == after == later < changing
