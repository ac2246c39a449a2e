"""What an optimizer needs is found whatever its learning rate and the dtype of the parameters are."""

from __future__ import annotations

import pytest
import torch
from torch import optim

import dpfuse
from dpfuse.sharded.groups import ParamGroups

RATES = [1.0, 1e-2, 1e-4, 1e-7, 0.0]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Ratio(optim.SGD):
    """Makes the update of each tensor in proportion to its norm: LAMB, and with a small `trust` LARS."""

    def __init__(self, params, lr=0.1, trust=1.0):
        super().__init__(params, lr)
        self.trust = trust

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(self.trust * param.norm() / param.grad.norm())
        return super().step()


class Lars(Ratio):
    """LARS with its usual factor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, trust=1e-3)


class DecayOfMatrices(optim.SGD):
    """Decays matrices only."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() > 1:
                    param.mul_(1 - 0.01 * group["lr"])
        return super().step()


class Normed(optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        total = torch.stack([one.grad.norm() for one in params]).norm()
        for one in params:
            one.grad.div_(total)
        return super().step()


class Counts(optim.SGD):
    """Counts its steps under a key of its state that is no parameter, and makes each step smaller."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["count"]["steps"] = count = self.state["count"].get("steps", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] / count)


class NarrowOnly(optim.SGD):
    """Works with 16 bits only."""

    def step(self, closure=None):
        assert all(param.dtype.itemsize == 2 for group in self.param_groups for param in group["params"])
        return super().step(closure)


def trainer(kind, dtype=torch.float32, **settings):
    params = [torch.nn.Parameter(torch.zeros(3, 3, dtype=dtype))]
    groups = ParamGroups(kind, params, settings, divided=True)
    groups.try_out(None)
    return groups.trainers[0]


ELEMENTWISE = [
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD, optim.Rprop,
]  # fmt: skip
OF_TENSORS = [optim.Adafactor, Ratio, Lars, DecayOfMatrices]
every_rate = pytest.mark.parametrize("rate", RATES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_rate
@every_dtype
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_an_elementwise_optimizer_gets_parts(kind, dtype, rate):
    found = trainer(kind, dtype, lr=rate)
    assert (found.needs_whole, found.keeps_elsewhere) == (False, False)


@every_rate
@every_dtype
@pytest.mark.parametrize("kind", OF_TENSORS)
def test_an_optimizer_of_tensors_gets_whole_ones(kind, dtype, rate):
    assert trainer(kind, dtype, lr=rate).needs_whole


@every_rate
@every_dtype
def test_an_optimizer_of_all_tensors_at_once_is_refused(dtype, rate):
    with pytest.raises(ValueError, match="it updates a matrix differently if there is another one"):
        trainer(Normed, dtype, lr=rate)


@every_rate
def test_a_rate_that_is_a_tensor_is_tried_too(rate):
    assert not trainer(optim.AdamW, lr=torch.tensor(rate)).needs_whole


def test_an_optimizer_of_16_bits_only_is_tried_with_these():
    assert not trainer(NarrowOnly, torch.bfloat16, lr=0.1).needs_whole


@every_rate
def test_a_state_of_no_parameter_is_noticed(rate):
    assert trainer(Counts, lr=rate).keeps_elsewhere


def states(rank, size, rate):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    optimizer = dpfuse.ShardedOptimizer(model, optim.Adafactor, lr=rate)
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    return {key: tuple(value.shape) for key, value in optimizer.state_dict()["state"][0].items() if value.dim()}


@every_rate
def test_adafactor_keeps_rows_and_columns(ranks, rate):
    expected = {"row_var": (64, 1), "col_var": (1, 64)}
    assert ranks(states, rate) == [expected, expected]
