"""float32 copies of parameters in 16 bits."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn, optim

import dpfuse
from dpfuse.sharded import elementwise_shard
from dpfuse.sharded.adamw_one_pass import step_in_one_pass
from tests.sharded.against_ddp import DDP, bits_differ
from tests.sharded.test_sizes import MADE, Kept, nbytes_of

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


class Narrow(nn.Module):
    """Linear layers in bfloat16, with a norm in float32 between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 120, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(120)
        self.last = nn.Linear(120, 37, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x).float())).bfloat16())


def batch(step, rank):
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(1000 * step + rank)).bfloat16()


def backward(model, step, rank):
    model(batch(step, rank)).float().square().mean().backward()


def wrapped(net):
    return dpfuse.DataParallel(net, comm_buffer_size=0.01, last_comm_buffer_size=0.001)


def by_hand(params, copies, plain):
    """A step of `plain`, which updates float32 copies."""
    for param, copy in zip(params, copies, strict=True):
        copy.grad = param.grad.float()
    plain.step()
    with torch.no_grad():
        for param, copy in zip(params, copies, strict=True):
            param.copy_(copy)


def classes(net, muon):
    """Arguments of an optimizer: AdamW, or Muon for the matrices."""
    params = list(net.parameters())
    if not muon:
        return [{"params": params}]
    matrices = [param for param in params if param.dim() == 2]
    rest = [param for param in params if param.dim() != 2]
    return [{"params": matrices, "optimizer_class": optim.Muon}, {"params": rest}]


def beside_ddp(rank, size, muon):
    """Steps after which bits differ from those of DDP and an update by hand, and whether the copies differ."""
    theirs, ours = DDP(Narrow()), wrapped(Narrow())
    params = [*theirs.module.parameters()]
    copies = [nn.Parameter(param.detach().float()) for param in params]
    groups = classes(nn.ParameterList(copies), muon)
    plain = [group.pop("optimizer_class", optim.AdamW)(**group, **SETTINGS) for group in groups]
    own = classes(ours.module, muon)
    for group in own:
        group |= SETTINGS
    sharded = dpfuse.ShardedOptimizer(ours, optim.AdamW, own, **SETTINGS, master_dtype=torch.float32)
    differing = []
    for step in range(60):
        for model in (theirs, ours):
            backward(model, step, rank)
        by_hand(params, copies, _Both(plain))
        sharded.step()
        theirs.zero_grad()
        sharded.zero_grad()
        if bits_differ(params, [*ours.module.parameters()]):
            differing.append(step)
    state = sharded.state_dict()
    numbers = [param for group in sharded.param_groups for param in group["params"]]
    found = {id(param): state["state"][index] for index, param in enumerate(numbers)}
    narrow = [
        (found[id(param)]["master_param"], copy)
        for param, copy in zip(ours.module.parameters(), copies, strict=True)
        if param.dtype == torch.bfloat16
    ]
    assert len(narrow) == 3
    assert all("master_param" not in found[id(param)] for param in ours.module.norm.parameters())
    return differing, bits_differ(*map(list, zip(*narrow, strict=True)))


class _Both:
    def __init__(self, optimizers):
        self.step = lambda: [each.step() for each in optimizers]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("muon", [False, True], ids=["AdamW", "Muon"])
def test_updates_in_float32_have_the_bits_of_ddp_and_copies_by_hand(ranks, muon):
    assert ranks(beside_ddp, muon) == [([], False)] * 2


def in_one_pass(rank, size):
    """The largest distance of copies and states from those of torch's operations, in units of the last digit."""
    found = []
    for one_pass in (False, True):
        calls = []

        def stepped(*args, calls=calls):
            calls.append(1)
            step_in_one_pass(*args)

        with (
            mock.patch.object(elementwise_shard, "takes_one_pass", lambda *_, one_pass=one_pass: one_pass),
            mock.patch.object(elementwise_shard, "step_in_one_pass", stepped),
        ):
            model = wrapped(Narrow())
            optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, **SETTINGS, master_dtype=torch.float32)
            for step in range(5):
                backward(model, step, rank)
                optimizer.step()
                optimizer.zero_grad()
            assert bool(calls) == one_pass
            state = optimizer.state_dict()["state"]
            narrow = [0, 1, 4]  # in bfloat16
            weights = [param.detach() for param in model.module.parameters() if param.dtype == torch.bfloat16]
            masters = [state[index]["master_param"] for index in narrow]
            assert not bits_differ(weights, [master.bfloat16() for master in masters])
            found.append([*masters, *(state[i][key] for i in narrow for key in ("step", "exp_avg", "exp_avg_sq"))])
    return max(((one - other).abs() / (other.abs() + 1e-8)).max().item() for one, other in zip(*found, strict=True))


def test_one_pass_does_what_the_optimizer_of_torch_does(ranks):
    for largest in ranks(in_one_pass):
        assert largest < 1e-2  # one digit of a weight in 16 bits changes the next gradients


def memory(rank, size):
    """Bytes of parameters, their copies and states on this rank, for each parameter."""
    net = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 400), nn.Linear(400, 3)).bfloat16()
    model = dpfuse.DataParallel(net)
    MADE.clear()
    optimizer = dpfuse.ShardedOptimizer(model, Kept, master_dtype=torch.float32)
    for _ in range(3):
        model(torch.randn(3, 300).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = [param for one in MADE for group in one.param_groups for param in group["params"]]
    copies = [one for one in tensors if one.dtype == torch.float32 and one.numel() > 24]  # and not those of the trial
    params = list(net.parameters())
    return (bytes_behind(params) + bytes_behind(copies) + nbytes_of(MADE)) / sum(param.numel() for param in params)


def bytes_behind(tensors):
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_parameter_takes_two_bytes_and_twelve_over_n(ranks, size):
    for nbytes in ranks(memory, size=size):
        assert nbytes == pytest.approx(2 + 12 / size, rel=0.01)


def resumed(rank, size, state=None, model_state=None):
    """Weights after three more steps from a state, and what a state dict holds then."""
    model = wrapped(Narrow())
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, **SETTINGS, master_dtype=torch.float32)
    if state is not None:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
    for step in range(3) if state is None else range(3, 6):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    if state is None:
        for step in range(3, 6):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in model.module.parameters()], saved


def test_copies_are_saved_and_loaded_exactly(ranks):
    (weights, (state, model_state)), _ = ranks(resumed)
    assert state["state"][0]["master_param"].dtype == torch.float32
    (again, _), _ = ranks(resumed, state, model_state)
    assert not bits_differ(weights, again)
    (three, (later, _)), *_ = ranks(resumed, state, model_state, size=3)
    assert later["state"].keys() == state["state"].keys()
    assert len(three) == len(weights)


def test_small_updates_add_up_and_written_weights_are_followed(rank, size):
    """A program writes weights between two steps, and the copies follow; small updates are kept in between."""
    model = wrapped(Narrow())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=1e-6, master_dtype=torch.float32)
    weight = model.module.first.weight
    with torch.no_grad():
        weight.fill_(0.5)  # a number of 16 bits near zero would change
    before = weight.detach().clone()
    for step in range(20):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weight, before)  # in 16 bits nothing is seen yet
    master = optimizer.state_dict()["state"][0]["master_param"]
    assert not torch.equal(master, before.float())
    with torch.no_grad():
        weight.fill_(2.0)
    backward(model, 20, rank)
    optimizer.step()
    after = optimizer.state_dict()["state"][0]["master_param"]
    assert (after - 2.0).abs().max() < 1e-3
    assert torch.equal(weight, after.bfloat16())
