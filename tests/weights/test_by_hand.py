"""Weights whose gradients are averaged by hand are compared, too: a difference is a warning on every rank."""

from __future__ import annotations

import gc
import re
import warnings
from contextlib import nullcontext
from functools import partial
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse import WeightsWarning
from tests.one_in import one_in
from tests.weights.drifts import DRIFTS, START, Network, Trial

BOUND = 64  # steps from the first that differs
FROZEN = ("frozen.weight", "frozen.bias")
AVERAGED = {name: drift for name, drift in DRIFTS.items() if not set(drift.named) & set(FROZEN)}


def train(rank, steps, module, optimizer, step_of, wrap=None, *, stop=True):
    """Train with averages by hand; return the steps and texts of warnings about weights."""
    model = module if wrap is None else wrap(module)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for step in range(steps):
        inputs = torch.randn(4, 6, generator=generator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with nullcontext() if wrap is None else model.no_sync():
                model(inputs).square().mean().backward()
            dpfuse.fused_allreduce_gradients(module.parameters())
        found += [(step, str(each.message)) for each in caught if isinstance(each.message, WeightsWarning)]
        if found and stop:
            break
        step_of(step)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("name", one_in(6, AVERAGED))
@pytest.mark.ranks(size=2, timeout=60)
def test_a_drift_is_named(rank, size, name):
    torch.manual_seed(0)
    drift, module = DRIFTS[name], Network()
    optimizer = drift.optimizer([param for param in module.parameters() if param.requires_grad])
    trial = Trial(module, optimizer, 0)

    def step_of(step):
        trial.step = step
        differs = rank == size - 1 and step >= START
        if differs and drift.before_step is not None:
            drift.before_step(trial)
        for _ in range(drift.steps if differs and step == START else 1):
            optimizer.step()
        if differs and drift.after_step is not None:
            drift.after_step(trial)

    ((step, text),) = train(rank, START + BOUND + 1, module, optimizer, step_of)
    assert START < step <= START + BOUND
    assert text.startswith(f"DPF-W01: rank {rank}: the weights of the ranks differ after the optimizer's step")
    assert "No gradient of" not in text
    pattern = r"different after the call of fused_allreduce_gradients\(\) (\d+) and before (\d+)"
    first, last = map(int, re.search(pattern, text).groups())
    assert first <= START + 1 < last <= step + 1, text
    place = int(re.search(r"parameters? 'parameter_list\[(\d+)\]'", text)[1])
    named = [name for name, _ in module.named_parameters()][place]
    assert named in (drift.named or dict(module.named_parameters())), text
    assert "model.synchronize_weights" not in text
    steps = [None] * size
    dist.all_gather_object(steps, step)
    assert len(set(steps)) == 1


def noise(module, rank):
    with torch.no_grad():
        module[0].weight += 0.01 * torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def owners_send(module, optimizers, rank, step):
    """Each rank steps its own parameters, and sends them behind the step."""
    optimizers[rank].step()
    for place, param in enumerate(module.parameters()):
        dist.broadcast(param.data, place % 2)


def first_steps(module, optimizers, rank, step):
    """Rank 0 steps, and sends its weights."""
    if rank == 0:
        optimizers[2].step()
    for param in module.parameters():
        dist.broadcast(param.data, 0)


def all_step(module, optimizers, rank, step):
    optimizers[2].step()


def noisy(module, optimizers, rank, step):
    optimizers[2].step()
    noise(module, rank)


def off(module):
    return dpfuse.DataParallel(module, check_training="off")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("steps_of", "wrap"),
    [(all_step, None), (all_step, dpfuse.DataParallel), (owners_send, None), (first_steps, None), (noisy, off)],
    ids=["all step", "wrapped", "owners send", "rank 0 steps", "noise under off"],
)
@pytest.mark.ranks(size=2, timeout=60)
def test_a_right_program_is_not_warned(rank, size, steps_of, wrap):
    module = network()
    params = list(module.parameters())
    optimizers = [torch.optim.SGD(some, lr=0.01, momentum=0.9) for some in (params[::2], params[1::2], params)]
    assert train(rank, 70, module, optimizers[2], partial(steps_of, module, optimizers, rank), wrap) == []


@pytest.mark.ranks(size=2, timeout=60)
def test_what_is_known_is_told_once_and_what_is_sent_again_is_compared_again(rank, size):
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step_of(step):
        optimizer.step()
        if step in (5, 140):
            noise(module, rank)
        if step == 75:
            dist.broadcast(module[0].weight.data, 0)

    found = train(rank, 220, module, optimizer, step_of, stop=False)
    assert len(found) == 2, found
    assert [re.search(r"parameter '(.*?)'", text)[1] for _, text in found] == ["parameter_list[0]"] * 2
    assert 5 < found[0][0] < 75 < 140 < found[1][0]


@pytest.mark.ranks(size=2, timeout=60)
def test_a_warning_that_is_an_error_leaves_the_group_usable(rank, size):
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with pytest.raises(WeightsWarning, match="DPF-W01"), warnings.catch_warnings():
        warnings.simplefilter("error", WeightsWarning)
        for _ in range(70):
            module(torch.ones(1, 6)).sum().backward()
            dpfuse.fused_allreduce_gradients(module.parameters())
            optimizer.step()
            noise(module, rank)
    grad = module[0].bias.grad.clone()
    others = [torch.empty_like(grad) for _ in range(size)]
    dist.all_gather(others, grad)
    assert torch.equal(*others), "the gradients of that call are averaged"
    dpfuse.fused_allreduce_gradients(module.parameters())


@pytest.mark.ranks(size=2, timeout=60)
def test_parameters_are_freed_with_the_module(rank, size):
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    assert train(rank, 3, module, optimizer, partial(all_step, module, [None, None, optimizer], rank)) == []
    kept = [ref(param) for param in module.parameters()]
    del module, optimizer
    gc.collect()
    assert [each() for each in kept] == [None] * 4
