"""Optimizers that need whole tensors: each rank updates those that it owns."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn, optim

import dpfuse
from dpfuse.comm import collective
from dpfuse.errors import DPFuseError
from tests.sharded.against_ddp import DDP, batch, bits_differ, network
from tests.sharded.test_sizes import nbytes_of

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 0.01, "weight_decay": 0.1}


def halves(net):
    """The matrices inside the network, and the others."""
    inner = [net.first.weight, net.second.weight]
    ids = set(map(id, inner))
    return inner, [param for param in net.parameters() if id(param) not in ids]


class Two:
    """Muon and AdamW, each with its own parameters."""

    def __init__(self, net):
        inner, others = halves(net)
        self.muon, self.adamw = optim.Muon(inner, **MUON), optim.AdamW(others, **ADAMW)

    def step(self):
        self.muon.step()
        self.adamw.step()

    def zero_grad(self):
        self.muon.zero_grad()
        self.adamw.zero_grad()


def sharded(model, net, **options):
    inner, others = halves(net)
    groups = [{"params": inner, "optimizer_class": optim.Muon, **MUON}, {"params": others}]
    return dpfuse.ShardedOptimizer(model, optim.AdamW, groups, **ADAMW, **options)


def train(model, optimizer, steps, rank, micro=1, scheduler=None):
    for step in steps:
        for number in range(micro):
            inside = model.no_sync() if number < micro - 1 else torch.enable_grad()
            with inside:
                model(batch(micro * step + number, rank, torch.float32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def beside_ddp(rank, size, options, steps, micro, peer):
    """The steps after which bits differ; and whether states differ from those of the two plain optimizers."""
    theirs = DDP(network()) if peer == "ddp" else dpfuse.DataParallel(network(), deterministic=True)
    ours = dpfuse.DataParallel(copy.deepcopy(theirs.module), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
    two, one = Two(theirs.module), sharded(ours, ours.module, **options)
    differing = []
    for step in range(steps):
        for model, optimizer in ((theirs, two), (ours, one)):
            train(model, optimizer, [step], rank, micro)
        if bits_differ([*theirs.module.parameters()], [*ours.module.parameters()]):
            differing.append(step)
    found = one.state_dict()
    states = [found["state"][index] for index in sorted(found["state"])]
    expected = [state for plain in (two.muon, two.adamw) for state in plain.state_dict()["state"].values()]
    assert [list(state) for state in states] == [list(state) for state in expected]
    values = [[v for state in each for v in state.values()] for each in (states, expected)]
    assert [{k: v for k, v in g.items() if k != "params"} for g in found["param_groups"]] == [
        {k: v for k, v in plain.state_dict()["param_groups"][0].items() if k != "params"}
        for plain in (two.muon, two.adamw)
    ]
    return differing, bits_differ(*values)


# Muon's products in 16 bits take seconds for a few steps, and minutes on some CPUs.
LONG = [pytest.param(*each, marks=pytest.mark.slow) for each in (({}, 40, 1), ({}, 20, 3), ({}, 200, 1))]


@pytest.mark.parametrize(("options", "steps", "micro"), [({}, 6, 1), *LONG], ids=str)
def test_muon_and_adamw_have_the_bits_of_ddp_on_two_ranks(ranks, options, steps, micro):
    assert ranks(beside_ddp, options, steps, micro, "ddp", timeout=240) == [([], False)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 4])
def test_more_ranks_have_the_bits_of_ordered_sums(ranks, size):
    assert ranks(beside_ddp, {}, 30, 1, "ordered", size=size) == [([], False)] * size


class Factored(optim.Adafactor):
    """Says by itself what it needs, and what its updates cost."""

    needs_whole_tensors = True

    @staticmethod
    def update_cost(shape):
        return float(torch.Size(shape).numel())


@pytest.mark.parametrize("kind", [optim.Adafactor, Factored])
def test_other_optimizers_of_whole_tensors(ranks, kind):
    assert ranks(factored, kind) == [False, False]


def factored(rank, size, kind):
    seen = []
    for whole in (True, False):
        model = dpfuse.DataParallel(network())
        optimizer = (
            dpfuse.ShardedOptimizer(model, kind, lr=0.01) if whole else optim.Adafactor(model.parameters(), lr=0.01)
        )
        train(model, optimizer, range(6), rank)
        state = optimizer.state_dict()["state"]
        values = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
        seen.append([*model.module.parameters(), *values])
    return bits_differ(*seen)


def resumed(rank, size, folder):
    """Training goes on from a checkpoint with the same bits, also with other buckets."""
    model = dpfuse.DataParallel(network())
    optimizer = sharded(model, model.module)
    train(model, optimizer, range(3), rank)
    dpfuse.save_checkpoint(folder, model, optimizer, step=3)
    again = dpfuse.DataParallel(network(), comm_buffer_size=0.05, last_comm_buffer_size=0.01)
    other = sharded(again, again.module)
    dpfuse.load_checkpoint(folder, again, other)
    for one, each in ((model, optimizer), (again, other)):
        train(one, each, range(3, 6), rank)
    return bits_differ([*model.module.parameters()], [*again.module.parameters()])


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_states_of_whole_tensors_are_saved_and_loaded(ranks, size, tmp_path):
    assert ranks(resumed, str(tmp_path), size=size) == [False] * size


def grown(rank, size):
    """Groups that are added to an optimizer whose first group is another class's."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].requires_grad_(False)
    net[2].requires_grad_(False)
    model = dpfuse.DataParallel(net)
    muon = {"params": [net[0].weight], "optimizer_class": optim.Muon}
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, [muon, {"params": [net[0].bias]}], **ADAMW)
    net[1].requires_grad_(True)
    optimizer.add_param_group({"params": [*net[1].parameters()]})
    net[2].requires_grad_(True)
    optimizer.add_param_group({"params": [net[2].weight], "optimizer_class": optim.Muon})
    optimizer.add_param_group({"params": [net[2].bias]})
    with pytest.raises(ValueError, match="got SGD, expected one of Muon, AdamW, with which the ShardedOptimizer was"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "optimizer_class": optim.SGD})
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    return [sorted(state[index]) for index in range(6)]


def test_an_added_group_is_of_the_class_of_the_optimizer_unless_it_names_another(ranks):
    muon, adamw = ["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]
    assert ranks(grown) == [[muon, adamw, adamw, adamw, muon, adamw]] * 2


class Odd(Factored):
    """Keeps an object of its own class in its state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["odd"] = Odd


def test_a_state_that_cannot_be_sent_is_an_error_on_every_rank(rank, size):
    model = dpfuse.DataParallel(nn.Linear(8, 8))
    optimizer = dpfuse.ShardedOptimizer(model, Odd, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(DPFuseError, match=f"rank {rank}: rank 0 has a state of a whole tensor that cannot be sent"):
        optimizer.state_dict()


MADE = []


class KeptMuon(optim.Muon):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        MADE.append(self)


def shares(rank, size):
    """Bytes of the momentum on this rank, over that of all matrices."""
    model = dpfuse.DataParallel(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))))
    plain = optim.Muon(model.parameters(), lr=0.01)
    MADE.clear()
    optimizer = None
    for step in range(3):
        if step == 1:
            optimizer = dpfuse.ShardedOptimizer(model, KeptMuon, lr=0.01)
        model(torch.randn(3, 64)).sum().backward()
        (plain if optimizer is None else optimizer).step()
        model.zero_grad()
    kept = [one for one in MADE if one.param_groups[0]["params"][0].numel() > 24]  # and not those of the trial
    return nbytes_of(kept) / nbytes_of([plain])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_has_its_share_of_equal_matrices(ranks, size):
    for share in ranks(shares, size=size):
        assert share == pytest.approx(1 / size, rel=0.01)


def bytes_sent(rank, size, extra):
    """Bytes that this rank sends in a step, and those of all parameters."""
    model = dpfuse.DataParallel(network(), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
    optimizer = sharded(model, model.module, **extra)
    train(model, optimizer, range(2), rank)
    sent = []

    def to_all(parts, flat, group, lengths=()):
        own = lengths[rank] if lengths else flat.numel() // size
        sent.append((flat.numel() - own) * flat.element_size())
        return all_to_all(parts, flat, group, lengths)

    def of_part(flat, bounds, group):
        sent.append((size - 1) * (bounds[rank + 1] - bounds[rank]) * flat.element_size())
        return gather_parts(flat, bounds, group)

    def of_equal_parts(flat, part, group):
        sent.append((size - 1) * part.nbytes)
        return gather_into(flat, part, group)

    all_to_all, gather_parts = collective.start_all_to_all, collective.start_all_gather_parts
    gather_into = collective.start_all_gather_into
    counted = {
        "start_all_to_all": to_all,
        "start_all_gather_parts": of_part,
        "start_all_gather_into": of_equal_parts,
    }
    with mock.patch.multiple(collective, **counted):
        train(model, optimizer, [2], rank)
    assert len(sent) > 2 * len(model.bucket_plan.buckets)  # a bucket with both kinds travels in two pieces
    return sum(sent), sum(param.nbytes for param in model.module.parameters())


@pytest.mark.parametrize("extra", [{}, {"step_in_backward": True}], ids=str)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_many_bytes_travel_as_in_an_all_reduce(ranks, size, extra):
    found = ranks(bytes_sent, extra, size=size)
    in_a_ring = 2 * (size - 1) * found[0][1]  # of all ranks together
    assert sum(sent for sent, _ in found) / in_a_ring == pytest.approx(1, abs=0.02)  # and padding
