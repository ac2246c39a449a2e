"""Training steps of DistributedDataParallel beside torch's, in the same processes: equal bit for bit."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel, DPFuseError
from tests.distributed.averaging.test_against_ddp import (
    Checkpointed,
    Convolutional,
    Mlp,
    ReentrantCheckpointed,
    SeveralDtypes,
    Tied,
    WithNestedBackward,
)
from tests.operations import Operations
from tests.torch_ddp import needs_argument, since_torch, torch_ddp

CLASSES = (DistributedDataParallel, TorchDDP)


class Normed(nn.Module):
    """BatchNorm layers, a buffer of its own, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.zeros(2, 3), persistent=False)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        self.steps += 1
        self.drift += x.mean()
        return self.layers(x) + self.drift[0]


def built(net: type[nn.Module], rank: int, *, differ: bool = False) -> nn.Module:
    torch.manual_seed(rank if differ else 0)
    module = net()
    if differ:
        for buffer in module.buffers():
            buffer += rank + 1
    return module


def both(module: nn.Module, **options: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated
        return [wrap(copy.deepcopy(module), **options) for wrap in (DistributedDataParallel, torch_ddp)]


def batch(rank: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + number), dtype=dtype)


def of_rank_0(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().clone()
    dist.broadcast(tensor, 0)
    return tensor


def assert_equal_models(
    ours: Any, theirs: Any, where: str, *, sent: bool = True, ignored: Collection[str] = ()
) -> None:
    """`sent`: the last backward has sent buffers. The next forward of torch's class takes rank 0's, ours has them."""
    for (name, a), b in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} {where}"
        assert (a.grad is None) == (b.grad is None), f"gradient of {name} {where}"
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad), f"gradient of {name} {where}"
            assert a.grad.stride() == b.grad.stride(), f"gradient of {name} {where}"
    for (name, a), b in zip(ours.module.named_buffers(), theirs.module.buffers(), strict=True):
        assert torch.equal(a, of_rank_0(b) if sent and name not in ignored else b), f"buffer {name} {where}"


def train(rank: int, size: int, net: type[nn.Module], options: dict[str, Any], differ: bool, steps: int = 6) -> None:
    models = both(built(net, rank, differ=differ), **options)
    assert_equal_models(*models, "after construction", sent=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(rank, step), step).square().mean().backward()
        assert_equal_models(*models, f"in step {step}", sent=models[0].forward_sync_buffers)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_models(*models, "in the end", sent=models[0].forward_sync_buffers)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "a cap": {"bucket_cap_mb": 100 / 2**20},
    "a cap and views": {"bucket_cap_mb": 300 / 2**20, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "search": {"find_unused_parameters": True},
}
NETS = [
    Normed, Mlp, Convolutional, Tied, SeveralDtypes, Checkpointed, ReentrantCheckpointed, WithNestedBackward,
]  # fmt: skip


@pytest.mark.one_in(7)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("net", NETS)
def test_steps_equal_torchs_bitwise(ranks, net, option):
    if option == "search" and net in (ReentrantCheckpointed, WithNestedBackward):
        pytest.skip("torch refuses: expected to mark a variable ready only once")
    ranks(train, net, OPTIONS[option], True)


BUFFERS: list[dict[str, Any]] = [
    {"broadcast_buffers": True}, {"broadcast_buffers": False}, {"forward_sync_buffers": False},
    {"forward_sync_buffers": True, "init_sync": False}, {"broadcast_buffers": False, "init_sync": False},
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    # Without this argument, torch cannot send buffers at first and not later.
    [pytest.param(each, marks=needs_argument(*{*each} & {"forward_sync_buffers"})) for each in BUFFERS],
    ids=str,
)
def test_buffers_travel_when_torchs_do(ranks, options):
    """They differ from rank to rank at first."""
    ranks(train, Normed, options, True)


def test_require_forward_param_sync_holds_for_one_forward(rank, size):
    models = both(built(Normed, rank))
    for step, flag in enumerate([True, False, True, False, False, True]):
        for model in models:
            model.require_forward_param_sync = flag
            model(batch(rank, step)).sum().backward()
            assert model.require_forward_param_sync is True
        assert_equal_models(*models, f"in step {step}")
        torch.testing.assert_close(models[0].module.steps, torch.tensor(step + 1))
    for model in models:
        model.broadcast_buffers = False
        model(batch(rank, 9)).sum().backward()
    drift = models[0].module.drift
    assert rank or torch.equal(drift, models[1].module.drift)
    assert torch.equal(drift, of_rank_0(drift)) == (rank == 0), "with the broadcast switched off"


def test_buffers_travel_again_from_the_forward_on_before_which_that_is_switched_on(rank, size):
    models = both(built(Normed, rank), broadcast_buffers=True)
    for step in range(6):
        for model in models:
            model.broadcast_buffers = step >= 3
            model(batch(rank, step)).sum().backward()
        assert_equal_models(*models, f"in step {step}", sent=step >= 3)
        drift = models[0].module.drift
        assert torch.equal(drift, of_rank_0(drift)) == (rank == 0 or step >= 3), f"in step {step}"


def test_buffers_cannot_travel_if_the_module_was_wrapped_without_that(rank, size):
    model = DistributedDataParallel(built(Normed, rank), forward_sync_buffers=False)
    model.forward_sync_buffers = True
    with pytest.raises(DPFuseError, match=f"rank {rank}: forward_sync_buffers was set to True, .*Wrap it with forward"):
        model(batch(rank, 0))
    model.forward_sync_buffers = False
    model(batch(rank, 0)).sum().backward()
    without = DistributedDataParallel(nn.Linear(6, 2), forward_sync_buffers=False)
    without.forward_sync_buffers = True
    without(batch(rank, 0)).sum().backward()


PATTERNS = ["ss", "sns", "nns", "nsns", "snnss"]  # s: outside of no_sync(), n: inside


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by_attribute", [False, True], ids=["no_sync", "attribute"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_and_buffers_of_an_accumulation_equal_torchs(rank, size, pattern, by_attribute):
    models = both(built(Normed, rank))
    for model in models:
        model(batch(rank, 99)).sum().backward()  # the buckets are rebuilt behind it
    for step in range(3):
        for number, kind in enumerate(pattern):
            for model in models:
                with contextlib.nullcontext() if kind == "s" or by_attribute else model.no_sync():
                    model.require_backward_grad_sync = model.require_backward_grad_sync and kind == "s"
                    model(batch(rank, 10 * step + number)).sum().backward()
                model.require_backward_grad_sync = True
            assert_equal_models(*models, f"in step {step}, micro-batch {number}", sent=kind == "s")
        for model in models:
            model.zero_grad()


def test_ignored_parameters_and_buffers_are_left_to_themselves(rank, size):
    names = ["layers.0.weight", "layers.1.running_mean", "layers.4.bias", "steps"]
    module = built(Normed, rank, differ=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    own = {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if name in names}
    models = both(module)
    for name, tensor in own.items():
        assert torch.equal(models[0].module.state_dict()[name], tensor), name
    assert [spec.name for spec in models[0].bucket_plan.specs if spec.name in names] == []
    for step in range(4):
        for model in models:
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        assert_equal_models(*models, f"in step {step}", ignored=names)
    gathered = [torch.empty_like(own["layers.0.weight"]) for _ in range(size)]
    dist.all_gather(gathered, models[0].module.layers[0].weight.grad)
    assert not torch.equal(*gathered)


def test_without_init_sync_nothing_is_sent_at_construction(rank, size):
    for model_class in CLASSES:
        module = built(Normed, rank, differ=True)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with Operations() as done:
            model = model_class(module, init_sync=False)
        if model_class is DistributedDataParallel:
            assert done.collectives == []
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    with Operations() as done:
        DistributedDataParallel(built(Normed, rank, differ=True))
    assert done.collectives


def test_another_process_group_is_used_from_the_next_step_on(rank, size):
    groups = [dist.new_group([0]), dist.new_group([1])]
    models = both(built(Mlp, rank))
    for step in range(6):
        if step == 3:
            for model in models:
                model._update_process_group(groups[rank])
        for model in models:
            model.zero_grad()
            model(batch(rank, step), step).sum().backward()
        assert_equal_models(*models, f"in step {step}")
    assert models[0].process_group is groups[rank]
    assert "world_size=1" in repr(models[0])


class Scaled(nn.Module):
    """A buffer that backward needs, and batch norm in both modes, whose backward holds its statistics."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.fixed = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        self.fixed.eval()
        return self.fixed(self.norm(self.layer(x) * self.scale))


@since_torch(2, 12, "torch's class marks what a graph holds as written")
def test_buffers_that_a_graph_holds_may_be_sent_before_its_backward(rank, size):
    net = Scaled()
    models = [TorchDDP(copy.deepcopy(net)), DistributedDataParallel(copy.deepcopy(net))]
    for step in range(3):
        for model in models:
            model.zero_grad()
            real, fake = (
                model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank + 2 * i))) for i in (0, 1)
            )
            (real.square().sum() - fake.sum()).backward()
        for (name, theirs), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), (name, step)
        for theirs, ours in zip(models[0].buffers(), models[1].buffers(), strict=True):
            assert torch.equal(ours, of_rank_0(theirs))


def test_all_buffers_travel_in_one_broadcast_and_none_without_gradients(rank, size):
    model = DistributedDataParallel(built(Normed, rank))
    with Operations() as done:
        model(batch(rank, 0))
    assert [name for name, _ in done.collectives] == ["broadcast_"]
    # What arrives counts as written. A graph that would be refused for that keeps the buffer that it has.
    version = model.module.drift._version
    model(batch(rank, 0))
    assert model.module.drift._version == version + (1 if rank == 0 else 2)
    with torch.no_grad(), Operations() as done:
        model(batch(rank, 1))
    assert done.collectives == []
