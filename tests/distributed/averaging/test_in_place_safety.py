"""Large private gradients that must not be reduced where they lie, and backwards that do not go well."""

from __future__ import annotations

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine.exchanges.in_place import _GradientInPlace
from tests.distributed.in_place import (
    ALL,
    Mlp,
    Net,
    Shared,
    Tied,
    batch,
    each_alone,
    grads,
    large_from,
    mean_over_ranks,
    right_steps,
    twice,
    ways,
    with_all_large,
)

# Gradients that are not the parameter's alone


def gradient_of_others(rank, size):
    bare = Shared()
    model, local = each_alone(copy.deepcopy(bare)), copy.deepcopy(bare)
    for step in range(4):
        for one in (model, local):
            one.zero_grad()
            one(batch(rank, step)).square().sum().backward()
        for param, alone in zip(model.parameters(), local.parameters(), strict=True):
            assert torch.equal(param.grad, mean_over_ranks(alone.grad, size))
    assert ways(model) == {"early": False, "late.weight": True, "late.bias": True}


def gradient_that_is_held_for_a_step(rank, size):
    bare = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model, local = dpfuse.DistributedDataParallel(copy.deepcopy(bare)), copy.deepcopy(bare)
    held = None
    for step in range(6):
        for one in (model, local):
            one.zero_grad()
        if step in (2, 4):  # backward adds to a tensor of which the program keeps a view
            model.module[1].bias.grad = torch.zeros(3)
            held = model.module[1].bias.grad.view(3, 1)
        for one in (model, local):
            one(batch(rank, step)).square().sum().backward()
        for param, alone in zip(model.parameters(), local.parameters(), strict=True):
            assert torch.equal(param.grad, mean_over_ranks(alone.grad, size))
        if step:  # behind the first one the buckets are new
            assert ways(model) == {"0.weight": True, "0.bias": True, "1.weight": True, "1.bias": held is None}
        held = None


def test_only_the_step_in_which_a_program_holds_a_gradient_copies_it(ranks):
    ranks(with_all_large, gradient_that_is_held_for_a_step)


class Twins(nn.Module):
    """Both gradients are views of one tensor: autograd hands it to each of them."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(2, 10))

    def forward(self, x):
        return (self.one.view(20) + self.other.view(20)) * x.sum()


def gradients_that_are_one(rank, size, bucket_size):
    model = dpfuse.DistributedDataParallel(Twins(), bucket_cap_mb=bucket_size)
    local = copy.deepcopy(model.module)
    for step in range(4):
        for one in (model, local):
            one.zero_grad()
            one(batch(rank, step)).square().sum().backward()
        assert local.one.grad.data_ptr() == local.other.grad.data_ptr()
        for param, alone in zip(model.parameters(), local.parameters(), strict=True):
            assert torch.equal(param.grad, mean_over_ranks(alone.grad, size))
    assert not any(ways(model).values())


def test_a_gradient_that_backward_still_reads_is_not_overwritten(ranks):
    ranks(with_all_large, gradient_of_others)


@pytest.mark.parametrize("bucket_size", [1e-9, 25])
def test_gradients_that_share_their_memory_are_averaged_once(ranks, bucket_size):
    ranks(with_all_large, gradients_that_are_one, bucket_size)


def values(rank, count=12):
    return torch.arange(1.0, count + 1) * (rank + 1)


@torch.inference_mode()
def inferred(rank):
    return values(rank).view(3, 4).clone()


KINDS = {
    "plain": lambda rank: values(rank).view(3, 4).clone(),
    "transposed": lambda rank: values(rank).view(4, 3).t().clone(),
    "strided": lambda rank: values(rank, 24).view(3, 8)[:, ::2],
    "expanded": lambda rank: values(rank, 1).expand(3, 4),
    "numpy": lambda rank: torch.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4) * (rank + 1)),
    "shared memory": lambda rank: values(rank).view(3, 4).share_memory_(),
    "negative": lambda rank: torch._neg_view(values(rank).view(3, 4)).detach(),
    "with a graph": lambda rank: values(rank).requires_grad_().view(3, 4) * 1,
    "a parameter": lambda rank: nn.Parameter(values(rank).view(3, 4)),
    "a subclass": lambda rank: nn.Parameter(values(rank).view(3, 4).clone(), requires_grad=False),
    "from inference": lambda rank: inferred(rank),
    "a view": lambda rank: values(rank, 20)[4:16].view(3, 4),
    "part of more": lambda rank: values(rank, 20).detach().as_strided((3, 4), (4, 1), 4).detach(),
}
IN_PLACE = {"plain", "part of more"}  # of the last one nobody has the rest
REPLACED = {"expanded", "from inference"}  # they cannot be written


def set_by_hand(rank, size, kind, here):
    """One rank's gradient is unusual, the others' are not."""
    module = nn.ModuleDict({"used": nn.Linear(6, 2), "spare": nn.Linear(4, 3, bias=False)})
    module.forward = lambda x: module["used"](x)
    model = each_alone(module, find_unused_parameters=True)
    spare = module["spare"].weight
    for step in range(3):
        model.zero_grad()
        kind_here = kind if rank in here else "plain"
        given = spare.grad = KINDS[kind_here](rank)
        kept = given.detach().clone()
        model(batch(rank, step)).sum().backward()
        assert torch.equal(spare.grad, mean_over_ranks(kept, size))
        assert not step or ways(model)["spare.weight"] == (kind_here in IN_PLACE)
        assert (spare.grad is given) == (kind_here not in REPLACED)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("here", [[0], [0, 1]], ids=["rank 0", "all"])
def test_gradients_that_were_set_by_hand_are_averaged(ranks, kind, here):
    ranks(with_all_large, set_by_hand, kind, here)


class Bunch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.used = (nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, x):
        return (x.sum() * self.used).sum()


def overlapping(rank, size, same):
    """Two gradients with elements in common, as views of what the user keeps, or as one tensor."""
    module = Bunch()
    model = each_alone(module, find_unused_parameters=True)
    for step in range(3):
        memory = values(rank)
        expected = mean_over_ranks(memory, size)
        module.one.grad, module.other.grad = (memory[:8].clone(),) * 2 if same else (memory[:8], memory[4:])
        module.used.grad = None
        model(batch(rank, step)).backward()
        assert torch.equal(module.one.grad, expected[:8])
        assert torch.equal(module.other.grad, expected[:8] if same else expected[4:])
    assert ways(model) == {"one": False, "other": False, "used": True}


@pytest.mark.parametrize("same", [False, True])
def test_gradients_that_overlap_are_averaged(ranks, same):
    ranks(with_all_large, overlapping, same)


# Who reads or changes gradients meanwhile


def hook_behind_ours(rank, size):
    bare = Tied()
    model, local = each_alone(copy.deepcopy(bare)), copy.deepcopy(bare)
    read = {}
    for name, param in model.module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: read.update({name: param.grad.clone()}))
    for step in range(3):
        for one in (model, local):
            one.zero_grad()
            one(batch(rank, step), 0).square().sum().backward()
        for (name, param), alone in zip(model.module.named_parameters(), local.parameters(), strict=True):
            assert torch.equal(read[name], alone.grad)
            assert torch.equal(param.grad, mean_over_ranks(alone.grad, size))
    assert not any(ways(model).values())


def test_a_hook_on_the_parameter_reads_what_was_accumulated(ranks):
    ranks(with_all_large, hook_behind_ours)


def take_away(param):
    param.grad = None


def replace(param):
    param.grad = torch.full_like(param, 7.0)


def give_a_view(param):
    param.grad = torch.full((7, *param.shape), 7.0)[3]


def move(param):
    param.grad.data = torch.full_like(param, 7.0)


@pytest.mark.parametrize("change", [take_away, replace, give_a_view, move])
def test_a_gradient_that_is_changed_after_it_was_sent_gets_the_mean_all_the_same(rank, size, change):
    """The gradient of a layer that was sent is changed when an earlier layer's arrives."""

    def scenario():
        model = each_alone(Mlp())
        first, *_, last = (layer.weight for layer in model.module.layers if isinstance(layer, nn.Linear))
        first.register_hook(lambda _: change(last))
        seen = []
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step), 0).square().mean().backward()
            seen += grads(model)
        return seen

    twice(scenario)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_keep_it(rank, size):
    def scenario():
        model = each_alone(Tied())
        seen = []
        for step in range(3):
            model.zero_grad()
            x = batch(rank, step)
            model(x, 0).square().sum().backward(create_graph=True)
            assert all(param.grad.requires_grad for param in model.parameters())
            seen += grads(model)
            sum(param.grad.square().sum() for param in model.parameters()).backward()
            seen += grads(model)
            for param in model.parameters():
                param.grad = None  # a graph that leads to itself
        return seen

    twice(scenario)


# When a backward does not go well


def interrupted(rank, size, blown, bucket_size):
    model = dpfuse.DistributedDataParallel(Net(), bucket_cap_mb=bucket_size, find_unused_parameters=True)
    for _ in range(2):
        right_steps(model, rank, size)
        model.zero_grad()
        with pytest.raises(KeyError if rank in blown else dpfuse.DPFuseError, match=r"planted|failed on rank"):
            model(batch(rank, 0, 4), rank in blown).sum().backward()
        right_steps(model, rank, size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bucket_size", [1e-9, 25])
@pytest.mark.parametrize("blown", [[0], [0, 1]], ids=["one", "all"])
def test_an_interrupted_backward_costs_only_that_step(ranks, blown, bucket_size):
    ranks(with_all_large, interrupted, blown, bucket_size)


def wrong_gradient(rank, size, bucket_size):
    """What cannot be packed lies beside gradients that can be reduced in place, or behind them."""
    model = dpfuse.DistributedDataParallel(Net(), bucket_cap_mb=bucket_size, find_unused_parameters=True)
    right_steps(model, rank, size)
    model.zero_grad()
    if rank == 1:
        model.module.spare.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 could not pack|failed on rank 1"):
        model(batch(rank, 0, 4)).sum().backward()
    right_steps(model, rank, size)


@pytest.mark.parametrize("bucket_size", [1e-9, 25])
def test_a_gradient_that_cannot_travel_is_an_error_on_all_ranks(ranks, bucket_size):
    ranks(with_all_large, wrong_gradient, bucket_size)


def changed_on_one_rank(rank, size):
    """The changed rank plays one backward in the old layout, in which no gradient is touched."""
    model = each_alone(Net(), find_unused_parameters=True)
    right_steps(model, rank, size)
    model.zero_grad()
    with model.no_sync():
        model(batch(rank, 0, 4)).sum().backward()
    accumulated = grads(model.module.layers)
    if rank == 0:
        model.module.late = nn.Parameter(torch.ones(1))
    with pytest.raises(dpfuse.DPFuseError, match="changed on rank 0"):
        model(0 * batch(rank, 1, 4)).mul(0).sum().backward()
    if rank == 0:
        for param, before in zip(model.module.layers.parameters(), accumulated, strict=True):
            assert torch.equal(param.grad, before)
        del model.module.late
    right_steps(model, rank, size)


def test_a_rank_whose_model_changed_touches_no_gradient(ranks):
    ranks(with_all_large, changed_on_one_rank)


class OftenUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.often = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, uses=True):
        return self.always(x) + self.often(x) if uses else self.always(x)


def test_a_copy_that_was_made_in_inference_mode_is_written_outside_of_it(rank, size):
    with large_from(ALL):
        model = each_alone(OftenUsed(), find_unused_parameters=True)
        for step in range(5):
            model.zero_grad()
            loss = model(batch(rank, step), step < 4).sum()
            with torch.inference_mode(step == 3):
                loss.backward()
            expected = sum(batch(other, step).sum(0) for other in range(size)) / size
            torch.testing.assert_close(model.module.always.weight.grad.clone(), expected.expand(3, 6))
        assert model.module.often.weight.grad is None


def test_without_memory_for_a_copy_nothing_is_sent_in_its_place(rank, size):
    """The peers wait until there is memory. They would fail if they got fewer elements than they send."""
    with large_from(ALL):
        model = each_alone(nn.Linear(6, 3))
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step)).sum().backward()
        exchange = model.reducer.buckets[0].parts.exchange
        full = mock.patch.object(_GradientInPlace, "_table_for_copy", side_effect=RuntimeError("no memory is left"))
        with full, pytest.raises(RuntimeError, match="no memory is left"):
            exchange.empty(0.5)
        exchange.empty(0.5)
        assert [flat.tolist() for flat in exchange.tensors(torch.empty(0))] in ([[0.0] * 18], [[0.0] * 3])
