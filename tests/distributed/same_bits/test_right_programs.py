"""Right programs that do more than train: they hear nothing, and have the same bits on 1 and on 3 ranks."""

from __future__ import annotations

import copy
import os
import random
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfuse
from tests.distributed.same_bits.program import digest, state_of

COUNT = 4


class Net(nn.Module):
    """A frozen BatchNorm, dropout, and a part that may be recomputed in backward."""

    def __init__(self, reentrant=None, width=8):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2)
        self.norm.eval()
        self.norm.running_mean.fill_(0.25)
        self.dropout = nn.Dropout(0.3)
        self.reentrant = reentrant

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def begin(self, x):
        return self.dropout(torch.tanh(self.norm(self.first(x))))

    def forward(self, x):
        if self.reentrant is None:
            return self.last(self.begin(x))
        x = x.clone().requires_grad_()
        return self.last(checkpoint(self.begin, x, use_reentrant=self.reentrant))


class Shared(nn.Module):
    """One layer, used several times, each time in a checkpoint that accumulates its gradient by itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.uses = 2

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(self.uses):
            x = checkpoint(lambda inner: torch.tanh(self.layer(inner)), x, use_reentrant=True)
        return x


class Growing(nn.Module):
    """Gets another layer while it is trained."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 8), nn.Identity(), nn.Linear(8, 2)

    def forward(self, x):
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.last(x + self.middle(x))


def wrapped(build=Net, face=dpfuse.DataParallel, **options):
    torch.manual_seed(3)
    return face(build(), fixed_micro_batches=COUNT, **options)


def data(number):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(number))


def loss(model, number):
    return model(data(number)).square().sum()


def usual(model, step, number):
    loss(model, 10 * step + number).backward()


def nothing(model, step):
    pass


def train(model, body=usual, after=nothing, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        for number in model.micro_batches():
            body(model, step, number)
        optimizer.step()
        optimizer.zero_grad()
        after(model, step)
    return digest(state_of(model.module))


def evaluate(model, step):
    model.eval()
    loss(model, step)
    with torch.no_grad():
        loss(model, step)
    model.train()


def evaluate_on_one(model, step):
    if dist.get_rank() == 0:
        evaluate(model, step)


def look_on_one(model, step):
    """A forward in training mode, for a log, of which no other rank knows."""
    if dist.get_rank() == 0:
        loss(model, step)


def look_before_one(model, step, number):
    """As that, for one of the micro-batches."""
    if number == 0:
        random_state = torch.get_rng_state()
        loss(model, step)
        torch.set_rng_state(random_state)
    usual(model, step, number)


def try_again(model, step, number):
    """The forward of one micro-batch fails at first."""
    if number == 1:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 5))
    usual(model, step, number)


def evaluate_before(model, step, number):
    evaluate(model, step)
    usual(model, step, number)


def penalty(model, step, number):
    value = loss(model, 10 * step + number)
    params = [param for param in model.parameters() if param.requires_grad]
    gradients = torch.autograd.grad(value, params, create_graph=True)
    (value + sum(gradient.square().sum() for gradient in gradients)).backward()


def gradient_alone(model, step):
    torch.autograd.grad(loss(model, step), list(model.parameters()))


def two_forwards(model, step, number):
    (loss(model, step + number) + loss(model, number)).backward()


def freeze_meanwhile(model, step):
    model.module.first.requires_grad_(step != 0)


def frozen_for_an_input(model, step, number):
    """The gradient of an input alone is computed, for which all parameters are frozen."""
    x = data(number).requires_grad_()
    model.requires_grad_(False)
    (change,) = torch.autograd.grad(model(x).square().sum(), x)
    model.requires_grad_(True)
    model(data(number) + 0.1 * change.sign()).square().sum().backward()


def in_autocast(model, step, number):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(model, 10 * step + number)
    value.backward()


def generator_and_discriminator():
    """Each has its loop; in that of the generator, the discriminator is frozen."""
    generator, critic = wrapped(), wrapped(partial(nn.Linear, 2, 1))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (generator, critic)]
    for step in range(3):
        for number in critic.micro_batches():
            with torch.no_grad():
                made = generator(data(number + step))
            critic(made).square().sum().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        critic.requires_grad_(False)
        for number in generator.micro_batches():
            critic(generator(data(number))).square().sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        critic.requires_grad_(True)
    return digest([*state_of(generator.module), *state_of(critic.module)])


def beside_a_usual_model():
    model, other = wrapped(), dpfuse.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)

    def step_of_other(_model, step):
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train(model, after=step_of_other)


def of_a_copy():
    model = wrapped()
    train(model)
    return train(copy.deepcopy(model))


def batches_first():
    """The loop ends where the batches of this rank end, so its iterator is never asked for a number too many."""
    model, draws = wrapped(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = model._sync.micro_loop.deal.of(dist.get_rank())
    for _ in range(3):
        for x, _number in zip(map(data, own), model.micro_batches(), strict=False):
            model(x).sum().backward()
        draws.append(float(torch.rand(1)))
        optimizer.step()
        optimizer.zero_grad()
    return digest([*state_of(model.module), torch.tensor(draws), torch.tensor(random.random())])


def changed(change):
    """A model that changes after two steps, and gets another optimizer."""
    model = wrapped(Growing)
    train(model, steps=2)
    torch.manual_seed(9)
    change(model.module)
    return train(model)


def grow(module):
    module.middle = nn.Linear(8, 8)


def with_hooks():
    model, seen = wrapped(), []
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
        param.register_post_accumulate_grad_hook(seen.append)
    return train(model)


def in_two_threads():
    os.environ["DPFUSE_THREADS"] = "2"
    try:
        model = wrapped(partial(Net, width=20_000))
        assert torch.get_num_threads() == 2
        return train(model, steps=2)
    finally:
        del os.environ["DPFUSE_THREADS"]
        torch.set_num_threads(1)


def in_eval_mode():
    model = wrapped()
    model.eval()
    return train(model)


PROGRAMS = {
    "plain": lambda: train(wrapped()),
    "forty steps": lambda: train(wrapped(), steps=40),
    "torch's face": lambda: train(wrapped(face=dpfuse.DistributedDataParallel)),
    "evaluation": lambda: train(wrapped(), after=evaluate),
    "evaluation on one rank": lambda: train(wrapped(), after=evaluate_on_one),
    "evaluation inside the loop": lambda: train(wrapped(), body=evaluate_before),
    "a look on one rank": lambda: train(wrapped(), after=look_on_one),
    "a look at one micro-batch": lambda: train(wrapped(), body=look_before_one),
    "another try": lambda: train(wrapped(), body=try_again),
    "a penalty on gradients": lambda: train(wrapped(), body=penalty),
    "gradients that are not averaged": lambda: train(wrapped(), after=gradient_alone),
    "two forwards": lambda: train(wrapped(), body=two_forwards),
    "a layer that is frozen for one step": lambda: train(wrapped(), after=freeze_meanwhile),
    "frozen for an input": lambda: train(wrapped(), body=frozen_for_an_input),
    "autocast": lambda: train(wrapped(), body=in_autocast),
    "reentrant checkpoints": lambda: train(wrapped(partial(Net, True))),
    "checkpoints": lambda: train(wrapped(partial(Net, False))),
    "a layer that is used twice": lambda: train(wrapped(Shared)),
    "a layer that is added": lambda: changed(grow),
    "another dtype": lambda: changed(nn.Module.double),
    "hooks": with_hooks,
    "two threads": in_two_threads,
    "training in eval mode": in_eval_mode,
    "a generator and a discriminator": generator_and_discriminator,
    "beside a usual model": beside_a_usual_model,
    "of a copy": of_a_copy,
    "batches first": batches_first,
    "a large layer": lambda: train(wrapped(partial(Net, width=250_000)), steps=2),
}


def told(rank, size, names):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: PROGRAMS[name]() for name in names}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_right_programs_hear_nothing_and_have_the_same_bits(ranks):
    (alone,) = ranks(told, list(PROGRAMS), size=1)
    for three in ranks(told, list(PROGRAMS), size=3):
        assert three == alone
    same = ("plain", "torch's face", "evaluation", "evaluation on one rank", "evaluation inside the loop")
    looks = ("a look on one rank", "a look at one micro-batch", "another try")
    checkpoints = ("gradients that are not averaged", "reentrant checkpoints", "checkpoints", "beside a usual model")
    assert {alone[name] for name in (*same, *looks, *checkpoints)} == {alone["plain"]}


@pytest.mark.ranks(size=3)
def test_a_group_of_some_ranks_has_loops_of_its_own(rank, size):
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    model = wrapped(group=pair)
    numbers = [number for number in model.micro_batches() if usual(model, 0, number) is None]
    assert numbers == ([0, 1] if rank == 0 else [2, 3])
