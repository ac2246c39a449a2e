"""Weights after many steps are bitwise those of DDP and the plain optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import optim

import dpfuse
from tests.sharded.against_ddp import trained_beside

STEPS = 200


class Lion(optim.Optimizer):
    """A third party's optimizer, with a counter in its group."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                first, second = group["betas"]
                rate = group["lr"] / (1 + 0.01 * group["steps"])
                param.add_(torch.sign(state["mean"] * first + param.grad * (1 - first)), alpha=-rate)
                state["mean"].mul_(second).add_(param.grad, alpha=1 - second)


KINDS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW foreach": (optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
    "RMSprop": (optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "centered": True}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "ASGD": (optim.ASGD, {"lr": 0.05}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "Lion": (Lion, {"lr": 0.003}),
}


def with_marks(names, first):
    """Names of cases; those that are not among the first are slow."""
    return [pytest.param(name, marks=() if name in first else pytest.mark.slow) for name in names]


def differing(rank, size, kind, settings, steps=STEPS, how=None, buckets=3):
    steps, _, ours, plain, sharded = trained_beside(kind, steps, **(how or {}), **settings)
    expected, found = plain.state_dict(), sharded.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][key]), torch.as_tensor(value)), (index, key)
    assert len(ours.bucket_plan.buckets) >= buckets
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_bits_of_ddp(ranks, name):
    assert ranks(differing, *KINDS[name]) == [[], []]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, pytest.param({"check_finite": "raise"}, marks=pytest.mark.slow)], ids=str
)
def test_both_wrappers_and_their_options(ranks, face, options):
    how = {"face": face, "options": options}
    assert ranks(differing, *KINDS["AdamW"], 30, how) == [[], []]


def two_groups(net):
    """The second group has parameters between those of the first, and a rate of its own."""
    second = [net.norm.weight, net.norm.bias, net.second.weight, net.scale]
    ids = set(map(id, second))
    return [{"params": [p for p in net.parameters() if id(p) not in ids]}, {"params": second, "lr": 0.02}]


def warm_up(optimizer):
    return optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.03], total_steps=300)


HOWS = {
    "accumulation": {"micro": 3},
    "groups": {"groups": two_groups},
    "groups and a scheduler": {"groups": two_groups, "scheduler": warm_up},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "accumulation in buckets": {"micro": 3, "options": {"accumulate_in_buckets": True}},
    "greedy buckets": {"options": {"plan": "greedy"}},
}


@pytest.mark.parametrize("how", with_marks(HOWS, ("groups and a scheduler",)))
def test_programs_have_the_bits_of_ddp(ranks, how):
    kind = KINDS["Adam"]  # its update has the same bits in 16 bits, wherever an element lies
    assert ranks(differing, *kind, 60, HOWS[how]) == [[], []]


def clipped(step, model, optimizer):
    # After the first step the plain model reads its gradients one by one, since its buckets were just rebuilt. The sum
    # of their squares then differs in its last digit.
    assert model.clip_grad_norm_(0.3 if step else 1e3) > 0


@pytest.mark.parametrize("name", [pytest.param("momentum", marks=pytest.mark.slow), "AdamW"])
def test_clipping_has_the_bits_of_the_plain_optimizer_with_clipping(ranks, name):
    whole = {"comm_buffer_size": 1, "last_comm_buffer_size": 1}
    how = {"peer": dpfuse.DataParallel, "around": clipped, "options": whole}
    assert ranks(differing, *KINDS[name], 60, how, 1) == [[], []]


def fused(rank, size):
    """The largest distance of a weight from that of DDP and the same fused optimizer.

    Only a few steps: one differing last digit grows from step to step, since Adam divides by small numbers.
    """
    _, theirs, ours, _, _ = trained_beside(optim.AdamW, 5, lr=0.001, fused=True)
    pairs = zip(theirs.module.parameters(), ours.module.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def test_a_fused_optimizer_differs_in_last_digits_at_most(ranks):
    for largest in ranks(fused):
        assert largest < 1e-6
