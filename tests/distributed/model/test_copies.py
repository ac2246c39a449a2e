"""Copies of a wrapper keep synchronising; a wrapper that is gone leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse import DataParallel, DPFuseError
from dpfuse.comm import collective
from tests.freed import still_held

# Several buckets, so that the ready order matters for the rebuild.
SMALL = {"comm_buffer_size": 100 / 2**20, "last_comm_buffer_size": 40 / 2**20}


def net(rank: int = 0) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_gradients(module: nn.Module, size: int, step: int) -> list[Tensor]:
    """What every rank must have: computed here, from all ranks' batches, on a copy without any hook."""
    twin = copy.deepcopy(module)
    total = [torch.zeros_like(param) for param in twin.parameters()]
    for rank in range(size):
        twin.zero_grad()
        twin(batch(rank, step)).square().sum().backward()
        for value, param in zip(total, twin.parameters(), strict=True):
            value += param.grad / size
    return total


def assert_synchronises(model: DataParallel, rank: int, size: int, steps: int = 3) -> None:
    """Trains some steps, the bucket rebuild among them; each gradient must be the mean over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        expected = mean_gradients(model.module, size, step)
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        for param, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean, rtol=1e-5, atol=1e-5)
            everyones = [torch.empty_like(param.grad) for _ in range(size)]
            dist.all_gather(everyones, param.grad)
            assert all(torch.equal(everyones[0], other) for other in everyones)
        optimizer.step()


def hook_count(module: nn.Module) -> list[int]:
    return [len(param._post_accumulate_grad_hooks or {}) for param in module.parameters()]


@contextmanager
def reductions() -> Iterator[list[Tensor]]:
    """The buffers that are all-reduced inside."""
    real, sent = collective.all_reduce, []
    collective.all_reduce = lambda flat, group: (sent.append(flat), real(flat, group))[1]
    try:
        yield sent
    finally:
        collective.all_reduce = real


def by_deepcopy(model: Any) -> Any:
    return copy.deepcopy(model)


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [by_deepcopy, by_pickle, by_torch_save]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps_before", [0, 3], ids=["fresh", "trained"])
@pytest.mark.parametrize("duplicate", WAYS)
def test_a_copy_keeps_synchronising_and_leaves_the_original_alone(
    rank: int, size: int, duplicate: Callable[[Any], Any], steps_before: int
) -> None:
    model = DataParallel(net(rank), **SMALL, find_unused_parameters=True)
    if steps_before:
        assert_synchronises(model, rank, size, steps_before)
    clone = duplicate(model)
    assert type(clone) is DataParallel
    assert all(a is not b and torch.equal(a, b) for a, b in zip(model.parameters(), clone.parameters(), strict=True))
    assert hook_count(clone) == hook_count(model) == [1] * 8
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert_synchronises(clone, rank, size)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    # Neither disturbs the other, in whatever order they run.
    assert_synchronises(model, rank, size, 2)
    assert_synchronises(clone, rank, size, 1)
    # The copy is still a whole wrapper: it loads unprefixed names as a part of another module, too.
    parent = nn.ModuleDict({"child": clone})
    parent.load_state_dict({f"child.{key}": value for key, value in weights.items()})
    assert all(torch.equal(value, weights[key]) for key, value in clone.state_dict().items())


@pytest.mark.parametrize("duplicate", WAYS)
def test_a_copy_keeps_options_attributes_and_the_no_sync_state(
    rank: int, size: int, duplicate: Callable[[Any], Any]
) -> None:
    model = DataParallel(net(), **SMALL, gradient_as_bucket_view=False)
    model.note = ["kept"]
    with model.no_sync():
        clone = duplicate(model)
    assert model.require_backward_grad_sync is True
    assert clone.require_backward_grad_sync is False
    assert clone.note == ["kept"]
    alone = copy.deepcopy(clone.module)
    clone(batch(rank, 0)).square().sum().backward()
    alone(batch(rank, 0)).square().sum().backward()
    torch.testing.assert_close(clone.module[0].weight.grad, alone[0].weight.grad)
    clone.require_backward_grad_sync = True
    assert_synchronises(clone, rank, size)
    assert all(param.grad._base is None for param in clone.parameters())


@pytest.mark.parametrize("duplicate", WAYS)
def test_a_wrapper_inside_a_copied_module_is_copied_once(rank: int, size: int, duplicate: Callable[[Any], Any]) -> None:
    parent = nn.ModuleDict({"one": DataParallel(net(rank), **SMALL)})
    parent["same"] = parent["one"]
    clone = duplicate(parent)
    assert clone["one"] is clone["same"] is not parent["one"]
    assert hook_count(clone["one"]) == [1] * 8
    assert_synchronises(clone["one"], rank, size)


class Subclass(DataParallel):
    """With state of its own, as users write it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__(layers, **SMALL)
        self.calls = 0

    def forward(self, *inputs: Any) -> Any:
        self.calls += 1
        return super().forward(*inputs)


@pytest.mark.parametrize("duplicate", WAYS)
def test_a_subclass_is_copied_as_what_it_is(rank: int, size: int, duplicate: Callable[[Any], Any]) -> None:
    model = Subclass(net(rank))
    model(batch(rank, 0)).sum().backward()
    clone = duplicate(model)
    assert type(clone) is Subclass
    assert clone.calls == 1
    assert_synchronises(clone, rank, size)
    assert (model.calls, clone.calls) == (1, 4)


def test_over_another_group_deepcopy_works_and_pickle_is_an_error(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    model = DataParallel(net(rank), **SMALL, group=group)
    assert_synchronises(copy.deepcopy(model), rank, size)
    for duplicate in (by_pickle, by_torch_save):
        with pytest.raises(DPFuseError, match=r"group other than the default.*cannot be pickled.*state_dict"):
            duplicate(model)
    named = DataParallel(net(rank), **SMALL, group=dist.group.WORLD)
    assert_synchronises(by_pickle(named), rank, size)
    assert_synchronises(model, rank, size)


def test_a_deleted_wrapper_takes_its_hooks_along_and_the_module_can_be_wrapped_again(rank: int, size: int) -> None:
    module = net(rank)
    for options in (SMALL, {**SMALL, "gradient_as_bucket_view": False}, {}):
        model = DataParallel(module, **options)
        assert hook_count(module) == [1] * 8
        assert_synchronises(model, rank, size)
        with reductions() as sent:
            model(batch(rank, 0)).square().sum().backward()
        assert len(sent) == len(model.bucket_plan.buckets)
        del model
        assert hook_count(module) == [0] * 8
    # Without a wrapper the module is alone again.
    module.zero_grad()
    module(batch(rank, 0)).square().sum().backward()
    twin = copy.deepcopy(module)
    twin.zero_grad()
    twin(batch(rank, 0)).square().sum().backward()
    for param, own in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, own.grad)


def test_a_deleted_wrapper_leaves_the_users_own_hooks(rank: int, size: int) -> None:
    module, calls = net(rank), []
    module[0].weight.register_post_accumulate_grad_hook(lambda param: calls.append("before"))
    model = DataParallel(module, **SMALL)
    module[0].weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    assert_synchronises(model, rank, size)
    del model
    module(batch(rank, 0)).sum().backward()
    assert calls == ["before", "after"] * 4


def test_two_wrappers_of_one_module_still_average_rightly(rank: int, size: int) -> None:
    module = net(rank)
    first = DataParallel(module, **SMALL)
    second = DataParallel(module, **SMALL)
    assert_synchronises(second, rank, size)
    del first
    assert hook_count(module) == [1] * 8
    assert_synchronises(second, rank, size)
    nested = DataParallel(second, **SMALL)
    expected = mean_gradients(module, size, 0)
    for _ in range(3):
        module.zero_grad()
        nested(batch(rank, 0)).square().sum().backward()
        for param, mean in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["unused", "rebuilt", "trained"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_nothing_outlives_the_wrapper_and_its_module(rank: int, size: int, views: bool, steps: int) -> None:
    gc.collect()
    module = net(rank)
    model = DataParallel(module, **SMALL, gradient_as_bucket_view=views)
    for step in range(steps):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
    kept: list[Any] = [module, model, model.reducer, *module.parameters()]
    kept += model.reducer.buckets
    kept += [bucket.parts.buffer.flat for bucket in model.reducer.buckets]
    kept += [param.grad for param in module.parameters() if param.grad is not None]
    references = [weakref.ref(thing) for thing in kept]
    kept.clear()
    del module, model
    held = still_held(references)
    assert not held, held


def test_hooks_are_removed_at_once_not_when_the_collector_runs(rank: int, size: int) -> None:
    gc.collect()
    gc.disable()
    try:
        module = net(rank)
        model = DataParallel(module, **SMALL)
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        gone = weakref.ref(model)
        del model
        assert gone() is None
        assert hook_count(module) == [0] * 8
    finally:
        gc.enable()


@pytest.mark.ranks(timeout=15)
def test_a_wrapper_deleted_between_forward_and_backward_does_not_hang(rank: int, size: int) -> None:
    module = net(rank)
    loss = DataParallel(module, **SMALL)(batch(rank, 0)).square().sum()
    gc.collect()
    loss.backward()
    twin = copy.deepcopy(module)
    twin.zero_grad()
    twin(batch(rank, 0)).square().sum().backward()
    local = twin[0].weight.grad
    mean = mean_gradients(module, size, 0)[0]
    got = module[0].weight.grad
    # Averaged or not, but nothing between the two.
    assert torch.allclose(got, mean, atol=1e-5) or torch.allclose(got, local, atol=1e-5)
    assert_synchronises(DataParallel(module, **SMALL), rank, size)


def test_a_copy_without_a_process_group_passes_calls_through(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    with pytest.warns(UserWarning, match="no process group"):
        model = DataParallel(net())
    for duplicate in WAYS:
        with pytest.warns(UserWarning, match="no process group"):
            clone = duplicate(model)
        clone(batch(0, 0)).sum().backward()
        assert clone.module[0].weight.grad is not None
        assert model.module[0].weight.grad is None
