"""What a post-accumulate hook of a program makes of a gradient is averaged, as by torch's class, whenever it came."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.engine.autograd import ReadyHooks

SMALL = 1e-5  # MB: each parameter has a bucket of its own
STEPS = 6
FACES = ["DataParallel", "DistributedDataParallel"]


def wrapped(module, face, views=True, **options):
    """Return the module in one of the two classes, and an equal one in torch's class."""
    torchs = nn.parallel.DistributedDataParallel(
        copy.deepcopy(module), bucket_cap_mb=SMALL, gradient_as_bucket_view=views, **options
    )
    if face == "DataParallel":
        sizes = {"comm_buffer_size": SMALL, "last_comm_buffer_size": SMALL}
    else:
        sizes = {"bucket_cap_mb": SMALL}
    return getattr(dpfuse, face)(module, gradient_as_bucket_view=views, **sizes, **options), torchs


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def batch(rank, step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def double(param):
    param.grad.mul_(2)


def clip(param):
    param.grad.clamp_(-0.05, 0.05)


def replace(param):
    param.grad = param.grad * 3


def add_noise(param):
    param.grad.add_(torch.full_like(param, 0.25))


def put(module, hook=double):
    """Put a hook on each parameter, and return the handles."""
    return [param.register_post_accumulate_grad_hook(hook) for param in module.parameters()]


def step_of(model, rank, step):
    """Run a backward, and return the gradients. The two kinds of zeroing take turns."""
    model(batch(rank, step)).square().sum().backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad(set_to_none=step % 2 == 0)
    return found


def assert_as_torch(pair, rank, before_step=lambda module, step: None, steps=STEPS, run=step_of):
    for step in range(steps):
        found = []
        for model in pair:
            before_step(model.module, step)
            found.append(run(model, rank, step))
        for (name, _), ours, theirs in zip(pair[0].named_parameters(), *found, strict=True):
            assert torch.equal(ours, theirs), f"step {step}: {name} is {ours}, and {theirs} with torch's class"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("ranks_with_hooks", [(0, 1), (1,)], ids=["all", "one_rank"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_hook_that_is_added_after_wrapping_changes_what_is_averaged(rank, size, ranks_with_hooks, first, face, views):
    def add(module, step):
        if step == first and rank in ranks_with_hooks:
            put(module)

    assert_as_torch(wrapped(net(), face, views), rank, add)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hook", [clip, replace, add_noise])
@pytest.mark.parametrize("face", FACES)
def test_a_hook_may_clip_and_replace_gradients_and_add_to_them(rank, size, face, hook):
    assert_as_torch(wrapped(net(), face), rank, lambda module, step: step == 2 and put(module, hook))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("face", FACES)
def test_it_may_be_on_any_one_parameter(rank, size, face, place):
    def add(module, step):
        if step == 2:
            [*module.parameters()][place].register_post_accumulate_grad_hook(double)

    assert_as_torch(wrapped(net(), face), rank, add)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "graph"])
@pytest.mark.parametrize("face", FACES)
def test_hooks_may_go_and_come_before_and_after_wrapping(rank, size, face, options):
    module = net()
    first = {}

    def change(module, step):
        if step == 2:
            put(module, add_noise)
        if step in (3, 5):
            for handle in first.pop(id(module), ()):
                handle.remove()
            first[id(module)] = put(module, clip)

    put(module)  # a copy has none of it
    pair = wrapped(module, face, **options)
    put(pair[1].module)
    assert_as_torch(pair, rank, change, steps=8)


def added_in_forward(module):
    """Add the hooks in the fourth forward."""

    def hook(*_):
        module.forwards = getattr(module, "forwards", 0) + 1
        if module.forwards == 4:
            put(module)

    module[2].register_forward_pre_hook(hook)


def added_in_backward(module):
    """Add a hook to each parameter in the fourth backward, when its gradient is known and not yet accumulated."""

    def adding(param):
        calls = []

        def hook(grad):
            calls.append(grad)
            if len(calls) == 4:
                param.register_post_accumulate_grad_hook(double)

        return hook

    for param in module.parameters():
        param.register_hook(adding(param))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "graph"])
@pytest.mark.parametrize("prepare", [added_in_forward, added_in_backward])
@pytest.mark.parametrize("face", FACES)
def test_a_hook_may_be_added_while_the_step_runs(rank, size, face, prepare, options):
    pair = wrapped(net(), face, **options)
    for model in pair:
        prepare(model.module)
    assert_as_torch(pair, rank)


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("face", FACES)
def test_a_hook_acts_on_each_backward_of_a_window(rank, size, face, views):
    def window(model, rank, step):
        with model.no_sync():
            for more in (100, 200):
                model(batch(rank, more + step)).square().sum().backward()
        return step_of(model, rank, step)

    pair = wrapped(net(), face, views)
    assert_as_torch(pair, rank, lambda module, step: step == 2 and put(module, clip), run=window)


@pytest.mark.parametrize("face", FACES)
def test_a_window_in_the_buckets_has_what_a_hook_adds_in_each_backward(rank, size, face):
    def window(model, rank, step):
        with model.no_sync():
            model(batch(rank, 100 + step)).square().sum().backward()
        return step_of(model, rank, step)

    torchs = wrapped(net(), face)[1]
    sizes = {"comm_buffer_size": SMALL} if face == "DataParallel" else {"bucket_cap_mb": SMALL}
    ours = getattr(dpfuse, face)(net(), accumulate_in_buckets=True, **sizes)
    for step in range(STEPS):
        if step == 2:
            put(ours.module, add_noise)
            put(torchs.module, add_noise)
        for mine, theirs in zip(window(ours, rank, step), window(torchs, rank, step), strict=True):
            torch.testing.assert_close(mine, theirs)  # the sum has another order


class _SumOfRanks(torch.autograd.Function):
    """Has a collective in backward, which must be called in the same place among the buckets on every rank."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class WithCollectives(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = _SumOfRanks.apply(layer(x).tanh())
        return x


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "graph"])
@pytest.mark.parametrize("face", FACES)
def test_a_hook_of_one_rank_holds_no_bucket_back_until_after_another_collective(rank, size, face, options):
    torch.manual_seed(0)
    pair = wrapped(WithCollectives(), face, **options)
    assert_as_torch(pair, rank, lambda module, step: step == 3 and rank == 1 and put(module))


def means(module, rank, size, step, hook):
    """Return the gradients of the ranks for a step, changed by a hook, and averaged by hand."""
    alone = copy.deepcopy(module)
    alone(batch(rank, step)).square().sum().backward()
    for param in alone.parameters():
        hook(param)
        dist.all_reduce(param.grad)
    return [param.grad / size for param in alone.parameters()]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("first", [0, 2])
def test_a_backward_that_no_output_announces_averages_what_a_hook_has_made(rank, size, face, first):
    model = wrapped(net(), face)[0]
    for step in range(5):
        if step == first:
            put(model.module)
        expected = means(model.module, rank, size, step, double if step >= first else lambda param: None)
        model.module(batch(rank, step)).square().sum().backward()
        for param, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean)
        model.zero_grad()


def test_two_wrappers_of_one_module_let_the_hooks_of_the_program_come_first(rank, size):
    """What the second one averages is the same on all ranks already."""
    module = net()
    outer = wrapped(wrapped(module, "DataParallel")[0], "DataParallel")[0]
    for step in range(5):
        if step == 2:
            handles = put(module)
        expected = means(module, rank, size, step, double if step in (2, 3) else lambda param: None)
        outer(batch(rank, step)).square().sum().backward()
        for param, mean in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean)
        outer.zero_grad()
        if step == 3:
            for handle in handles:
                handle.remove()
    assert all(len(param._post_accumulate_grad_hooks) == 2 for param in module.parameters())


def test_a_step_without_hooks_of_the_program_asks_for_no_order(rank, size, monkeypatch):
    asked = []
    monkeypatch.setattr(ReadyHooks, "come_last", lambda hooks, param: asked.append(param) or True)
    model = wrapped(net(), "DataParallel")[0]
    for step in range(4):
        step_of(model, rank, step)
    assert not asked
    put(model.module)
    step_of(model, rank, 4)
    assert asked
