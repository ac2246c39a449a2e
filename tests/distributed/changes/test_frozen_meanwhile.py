"""Parameters that are frozen and unfrozen around a change of the module: undone changes, and models that take turns."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse import DPFuseError

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}


class Net(nn.ModuleDict):
    def forward(self, x):
        for key in self:
            x = self[key](x)
        return x


def net(names="ABC"):
    torch.manual_seed(0)
    return Net({name: nn.Linear(4, 4) for name in names})


def batch(rank, step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def right_step(model, rank, size, step):
    """A step in which each parameter that trains gets the mean, and no other one gets anything."""
    model.zero_grad()
    bare = copy.deepcopy(model.module)
    for module in (bare, model):
        module(batch(rank, step)).square().sum().backward()
    for (name, got), local in zip(model.module.named_parameters(), bare.parameters(), strict=True):
        assert (got.grad is not None) == got.requires_grad, (step, name)
        if got.requires_grad:
            mean = local.grad / size
            dist.all_reduce(mean)
            torch.testing.assert_close(got.grad, mean)


def evaluate(model):
    """With gradients, so that a change of the module is seen."""
    model.eval()
    model(torch.ones(2, 4))
    model.train()


def add_and_remove(module):
    module["D"] = nn.Linear(4, 4)
    module["B"].requires_grad_(False)
    yield
    del module["D"]


def replace_and_restore(module):
    before = module["C"]
    module["C"] = nn.Linear(4, 4)
    module["A"].requires_grad_(False)
    yield
    module["C"] = before


def convert_and_restore(module):
    module["C"].double()
    module["B"].weight.requires_grad_(False)
    yield
    module["C"].float()


def remove_and_restore(module):
    before = dict(module)
    del module["B"]
    module["D"] = nn.Linear(4, 4)
    before["B"].requires_grad_(False)
    yield
    module.clear()
    module.update(before)


CHANGES = [add_and_remove, replace_and_restore, convert_and_restore, remove_and_restore]


@pytest.mark.parametrize("face", FACES)
def test_a_change_may_be_undone_while_another_parameter_is_frozen(rank, size, face):
    for change in CHANGES:
        for alone in (False, True):  # whether only rank 1 has made the change, which the others never see
            model = FACES[face](net())
            right_step(model, rank, size, 0)
            if rank == 1 or not alone:
                steps = change(model.module)
                next(steps)
                if change is not convert_and_restore:
                    evaluate(model)
                next(steps, None)
                for param in model.parameters() if alone else ():
                    param.requires_grad_(True)
            for step in range(1, 3):
                right_step(model, rank, size, step)
            model.module.requires_grad_(True)
            right_step(model, rank, size, 3)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("before", [0, 1])
def test_freezing_again_undoes_unfreezing(rank, size, face, before):
    module = net()
    module["C"].requires_grad_(False)
    model = FACES[face](module)
    for step in range(before):
        right_step(model, rank, size, step)
    if rank == 1:
        module["C"].requires_grad_(True)
    for _ in range(2):
        with pytest.raises(DPFuseError, match=r"changed on rank 1 of 2 .* or undo it"):
            model(batch(rank, 1)).sum().backward()
    module["C"].requires_grad_(False)
    for step in range(3):
        right_step(model, rank, size, step)
    module["C"].requires_grad_(True)
    for step in range(3):
        right_step(model, rank, size, step)


@pytest.mark.parametrize("face", FACES)
def test_a_part_of_what_was_unfrozen_may_be_frozen_again(rank, size, face):
    module = net()
    module["B"].requires_grad_(False)
    module["C"].requires_grad_(False)
    model = FACES[face](module)
    right_step(model, rank, size, 0)
    module["B"].requires_grad_(True)
    module["C"].requires_grad_(True)
    if rank == 1:
        evaluate(model)  # so that one rank plans for what the others never see
    module["B"].requires_grad_(False)
    for step in range(1, 4):
        right_step(model, rank, size, step)
    module["B"].requires_grad_(True)
    right_step(model, rank, size, 4)


OPTIONS = {
    "default": {},
    "unused": {"find_unused_parameters": True},
    "private": {"gradient_as_bucket_view": False},
    "deterministic": {"deterministic": True},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("options", OPTIONS)
def test_models_that_take_turns_are_not_planned_in_each_turn(rank, size, face, options):
    module = net()
    module["C"].requires_grad_(False)
    model = FACES[face](module, **OPTIONS[options])
    plans = []
    for step in range(9):
        turn = "ABC"[step % 3]
        for name in module:
            module[name].requires_grad_(name == turn)
        right_step(model, rank, size, step)
        plans.append(model._sync.grads.plan)
    # In the first step with C, all ranks learn of it and drop the others, which come back in the steps after that.
    assert all(plan is plans[-1] for plan in plans[5:])
    assert [spec.name for spec in plans[-1].specs] == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("face", FACES)
def test_a_model_that_is_unfrozen_layer_by_layer_and_frozen_again_is_followed(rank, size, face):
    """Another layer is added meanwhile, and one is removed, while others are frozen."""
    module = net("ABCD")
    for name in "ABC":
        module[name].requires_grad_(False)
    model = FACES[face](module)
    for step, name in enumerate("DCBA"):
        module[name].requires_grad_(True)
        right_step(model, rank, size, step)
    module["B"].requires_grad_(False)
    module["D"].weight.requires_grad_(False)
    module["E"] = nn.Linear(4, 4)
    right_step(model, rank, size, 5)
    assert len(model._sync.grads.plan.specs) == 7  # of what is frozen nothing travels
    module["B"].requires_grad_(True)
    right_step(model, rank, size, 6)
    del module["C"]
    module["E"].requires_grad_(False)
    module["F"] = nn.Linear(4, 4)
    right_step(model, rank, size, 7)
    module["E"].requires_grad_(True)
    module["D"].weight.requires_grad_(True)
    for step in range(8, 11):
        right_step(model, rank, size, step)
    names = [name for name, _ in module.named_parameters()]
    assert [spec.name for spec in model._sync.grads.plan.specs] == names


def local_mean(model, param, rank, step):
    """Run a local backward, and return the mean of what it left in the gradient of `param`."""
    with model.no_sync():
        model(batch(rank, step)).square().sum().backward()
    mean = param.grad / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@pytest.mark.parametrize("when", ["change first", "change last", "new one frozen"])
def test_what_a_window_accumulated_is_averaged_although_it_was_frozen_beside_a_change(rank, size, when):
    model = dpfuse.DataParallel(net("AB"), check_training="log")
    for step in range(3):
        right_step(model, rank, size, step)
    model.zero_grad()
    param = model.module["A"].bias
    if when != "change last":
        model.module["B"] = nn.Linear(4, 4)
    if when == "new one frozen":
        with model.no_sync():
            model(batch(rank, 3)).square().sum().backward()
        param = model.module["B"].bias
        param.grad = None
    mean = local_mean(model, param, rank, 4)
    if when == "change last":
        model.module["B"] = nn.Linear(4, 4)
    param.requires_grad_(False)
    model(batch(rank, 5)).square().sum().backward()
    torch.testing.assert_close(param.grad, mean)
    right_step(model, rank, size, 6)


@pytest.mark.parametrize("option", [{"accumulate_in_buckets": True}, {"gradient_scale": 1.0}], ids=str)
def test_a_pending_change_may_change_again(rank, size, option):
    """Parameters of the first change have hooks already, which are not those of another wrapper."""
    model = dpfuse.DataParallel(net("AB"), check_training="log", **option)
    for step in range(3):
        model(batch(rank, step)).square().sum().backward()
    model.module["C"] = nn.Linear(4, 4)
    evaluate(model)
    model.module["A"].bias.requires_grad_(False)
    model.module["D"] = nn.Linear(4, 4)
    model.zero_grad()
    bare = copy.deepcopy(model.module)
    for module in (bare, model):
        module(batch(rank, 4)).square().sum().backward()
    for got, local in zip(model.parameters(), bare.parameters(), strict=True):
        if got.requires_grad:
            dist.all_reduce(local.grad)
            scale = 1 if "gradient_scale" in option else size
            torch.testing.assert_close(got.grad, local.grad / scale)
