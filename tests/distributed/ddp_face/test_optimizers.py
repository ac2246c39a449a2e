"""Optimizers that step in backward: the weights are those of torch's class, or of a step after backward."""

from __future__ import annotations

import copy
import functools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel, DPFuseError
from tests.distributed.ddp_face.without_streams import without_streams

SMALL = 100 / 2**20  # MB: several buckets
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.02}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        self.extra, self.never = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, extra=False):
        y = self.layers(x)
        return y + self.extra(x) if extra else y


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_same_weights(*models: nn.Module, step: int) -> None:
    for name, param in models[0].named_parameters():
        for other in models[1:]:
            assert torch.equal(param, other.get_parameter(name)), f"{name} in step {step}"


@pytest.mark.parametrize(
    ("case", "views", "before", "some"),
    [
        ("sgd", False, True, False),
        ("sgd", True, False, True),
        ("adam", True, True, False),
        ("adam", False, False, True),
    ],
)
def test_optimizers_applied_in_backward_give_torchs_weights(rank, size, case, views, before, some):
    optimizer, arguments = OPTIMIZERS[case]
    net, models = Net().layers, []
    for cls in (TorchDDP, DistributedDataParallel):
        mine = copy.deepcopy(net)
        params = list(mine.parameters())[:3] if some else list(mine.parameters())
        if before:
            _apply_optimizer_in_backward(optimizer, params, arguments)
        models.append(cls(mine, bucket_cap_mb=SMALL, gradient_as_bucket_view=views))
        if not before:
            _apply_optimizer_in_backward(optimizer, params, arguments)
    for step in range(5):
        with without_streams():
            for model in models:
                model.zero_grad()
                model(batch(rank, step)).square().sum().backward()
        assert_same_weights(*(model.module for model in models), step=step)
        for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
            assert (
                (ours.grad is None) == (theirs.grad is None) == (not some or hasattr(ours, "_in_backward_optimizers"))
            )
            if ours.grad is not None:
                mean = theirs.grad
                if not views:  # there torch leaves the other parameters with local gradients
                    mean = theirs.grad / size
                    dist.all_reduce(mean)
                assert torch.equal(ours.grad, mean)
    assert not torch.equal(net[0].weight, models[1].module[0].weight)


@pytest.mark.parametrize(
    ("case", "views", "some"),
    [("sgd", False, False), ("sgd", True, True), ("adam", True, False), ("adamw", False, False)],
)
def test_fused_optimizers_give_torchs_weights(rank, size, case, views, some):
    optimizer, arguments = OPTIMIZERS[case]
    net, models = Net().layers, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # functional optimizers are deprecated
        for cls in (TorchDDP, DistributedDataParallel):
            model = cls(copy.deepcopy(net), bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
            params = list(model.parameters())[:3] if some else None
            model._register_fused_optim(optimizer, optim_params=params, **arguments)
            models.append(model)
    for step in range(5):
        for model in models:
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        assert_same_weights(*(model.module for model in models), step=step)
        for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert not torch.equal(net[0].weight, models[1].module[0].weight)
    assert torch.equal(net[4].weight, models[1].module[4].weight) == some


@pytest.mark.one_in(4)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_they_go_with_accumulation_unused_parameters_hooks_and_views(rank, size, fused, hook, views):
    """Torch allows no hook here and no accumulation, so a step after backward is the oracle."""
    net = Net()
    plain = DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    mine = copy.deepcopy(net)
    if not fused:
        _apply_optimizer_in_backward(torch.optim.SGD, mine.parameters(), {"lr": 0.1, "momentum": 0.9})
    model = DistributedDataParallel(
        mine, bucket_cap_mb=SMALL, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    if fused:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
    if hook:
        for each in (plain, model):
            each.register_comm_hook(None, fp16_compress_hook)
    for step in range(5):
        weights = [param.detach().clone() for param in model.parameters()]
        for each in (plain, model):
            each.zero_grad()
            with each.no_sync():
                each(batch(rank, step), extra=rank == step % 2).sum().backward()
            if each is model:
                assert all(map(torch.equal, weights, model.parameters())), "stepped on local gradients"
            each(batch(rank, -step)).square().sum().backward()
        optimizer.step()
        assert_same_weights(plain.module, model.module, step=step)
        assert fused == (model.module.layers[0].weight.grad is not None)
    assert not torch.equal(net.extra.weight, model.module.extra.weight)
    assert torch.equal(net.never.weight, model.module.never.weight)


def test_optimizers_applied_after_the_first_step_or_a_change_step_on_means(rank, size):
    """Optimizers for parameters that were unfrozen or replaced, and for all after the first step."""
    arguments = {"lr": 0.1, "momentum": 0.9}
    net = Net().layers
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    model(batch(rank, 0)).sum().backward()
    model.zero_grad()
    plain = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=SMALL)
    torch.manual_seed(0)
    new = nn.Linear(9, 3)
    for each in (model, plain):
        each.module[0].requires_grad_(True)
        each.module[4] = copy.deepcopy(new)
    optimizer = torch.optim.SGD(plain.parameters(), **arguments)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), arguments)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(batch(rank, step)).square().sum().backward()
        optimizer.step()
        assert_same_weights(model.module, plain.module, step=step)
        assert all(param.grad is None for param in net.parameters())


def test_a_fused_optimizer_for_all_parameters_steps_on_later_ones_too(rank, size):
    net = Net().layers
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model._register_fused_optim(torch.optim.SGD, lr=0.1)
    model(batch(rank, 0)).sum().backward()
    model.zero_grad()
    torch.manual_seed(0)
    net[4] = nn.Linear(9, 3)
    weight = net[4].weight.detach().clone()
    model(batch(rank, 1)).sum().backward()
    torch.testing.assert_close(net[4].weight.detach(), weight - 0.1 * net[4].weight.grad)
    assert not torch.equal(net[4].weight, weight)


def test_each_optimizer_of_a_parameter_steps_once(rank, size):
    """Two optimizers for each parameter, a tied and an unused one: each steps once, with a rate that falls."""
    net = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)])
    net[1].weight = net[0].weight
    net.forward = lambda x: net[1](torch.tanh(net[0](x))) + (net[2](x) if rank else 0)
    plain = copy.deepcopy(list(net.parameters()))
    for arguments in ({"lr": 0.1}, {"lr": 0.01, "momentum": 0.9}):
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), arguments)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizers = [torch.optim.SGD(plain, lr=0.1), torch.optim.SGD(plain, lr=0.01, momentum=0.9)]
    theirs = _get_in_backward_optimizers(net)
    assert len(theirs) == 2 * len(plain)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (*optimizers, *theirs)]
    for step in range(4):
        before = [param.detach().clone() for param in net.parameters()]
        x = batch(rank, step)
        y = torch.tanh(x @ plain[0].T + plain[1]) @ plain[0].T + plain[2]
        y = y + x @ plain[3].T + plain[4] if rank else y
        y.square().sum().backward()
        for param in plain:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad / size
            dist.all_reduce(param.grad)
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        for param, other, old in zip(net.parameters(), plain, before, strict=True):
            torch.testing.assert_close(param, other)
            assert not torch.equal(param, old)


def test_a_backward_that_fails_on_one_rank_steps_on_none(rank, size):
    net = Net().layers
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(net, bucket_cap_mb=0)

    def spoil(grad):
        if rank == 1 and spoiled:
            raise ArithmeticError("no such gradient")

    spoiled = False
    net[0].weight.register_hook(spoil)
    model(batch(rank, 0)).sum().backward()
    weights = [param.detach().clone() for param in model.parameters()]
    spoiled = True
    with pytest.raises(ArithmeticError if rank == 1 else DPFuseError):
        model(batch(rank, 1)).sum().backward()
    assert all(map(torch.equal, weights, model.parameters()))
    spoiled = False
    model(batch(rank, 2)).sum().backward()
    for before, param in zip(weights, model.parameters(), strict=True):
        everywhere = [torch.zeros_like(param) for _ in range(size)]
        dist.all_gather(everywhere, param.detach())
        assert torch.equal(*everywhere)
        assert not torch.equal(before, param)


def test_ignored_parameters_keep_their_local_steps(rank, size):
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(net)
    model(batch(rank, 0)).sum().backward()
    for name, param in net.named_parameters():
        everywhere = [torch.zeros_like(param) for _ in range(size)]
        dist.all_gather(everywhere, param.detach())
        assert torch.equal(*everywhere) == (name != "0.weight")


@pytest.mark.filterwarnings("ignore")
def test_a_second_optimizer_is_refused_as_in_torch(group):
    for cls in (TorchDDP, DistributedDataParallel):
        model = cls(nn.Linear(2, 2))
        model._register_fused_optim(torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError):
            model._register_fused_optim(torch.optim.SGD, lr=0.1)
    net = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(net)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="there are optimizers in backward already"):
        model._register_fused_optim(torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_without_functional_form_is_torchs_error(group):
    for cls in (TorchDDP, DistributedDataParallel):
        with pytest.raises(ValueError, match="does not have a functional counterpart"):
            cls(nn.Linear(2, 2))._register_fused_optim(torch.optim.LBFGS)


@pytest.mark.filterwarnings("ignore")
def test_parameters_of_another_model_are_named(group):
    with pytest.raises(ValueError, match=re.escape("1 of the 1 optim_params are no trainable parameters")):
        DistributedDataParallel(nn.Linear(2, 2))._register_fused_optim(
            torch.optim.SGD, lr=0.1, optim_params=[nn.Parameter(torch.ones(1))]
        )


def test_an_optimizer_registered_with_torch_is_asked_to_register_itself(group):
    from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap as overlap

    class Mine(torch.optim.SGD):
        pass

    class Refusing(torch.optim.Adam):
        pass

    seen = []

    class Overlapped(overlap.OverlappedOptimizer):
        def __init__(self, cls, params, **arguments):
            super().__init__(cls)

        def register_ddp(self, ddp):
            if self.optim_cls is Refusing:
                super().register_ddp(ddp)
            seen.append(ddp)
            ddp.register_comm_hook(None, functools.partial(allreduce_hook))

        def register_fsdp(self, fsdp):
            raise NotImplementedError

    before = dict(overlap._registered_overlapped_optims)
    overlap._registered_overlapped_optims |= {Mine: Overlapped, Refusing: Overlapped}
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        model._register_fused_optim(Mine, lr=0.1)
        assert seen == [model]
        with pytest.raises(RuntimeError, match="does not support overlapped DDP"):
            DistributedDataParallel(nn.Linear(2, 2))._register_fused_optim(Refusing, lr=0.1)
    finally:
        overlap._registered_overlapped_optims.clear()
        overlap._registered_overlapped_optims.update(before)


def test_a_copy_has_no_optimizer(group):
    net = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(net)
    model(torch.ones(1, 2)).sum().backward()
    clone = copy.deepcopy(model)
    weight = clone.module.weight.detach().clone()
    clone(torch.ones(1, 2)).sum().backward()
    assert torch.equal(clone.module.weight, weight)
    assert clone.module.weight.grad is not None
