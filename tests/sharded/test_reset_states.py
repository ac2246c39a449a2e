"""States of a sharded optimizer that a program resets, and parameter groups that it changes, beside the plain one."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.one_in import one_in

WAYS = {
    "del": lambda optimizer, param: optimizer.state.__delitem__(param),
    "pop": lambda optimizer, param: optimizer.state.pop(param, None),
    "empty entry": lambda optimizer, param: optimizer.state.__setitem__(param, {}),
}
WAYS_FOR_ALL = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "assign": lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
    "assign a dict": lambda optimizer: setattr(optimizer, "state", {}),
    "each": lambda optimizer: [optimizer.state.pop(param) for param in list(optimizer.state)],
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}, {}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {}),
    "RMSprop, in backward": (torch.optim.RMSprop, {"lr": 0.01}, {"step_in_backward": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, {}),
}


def make(kind, settings, options, seed=4):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    plain = copy.deepcopy(net)
    model = dpfuse.DataParallel(net)
    groups = [{"params": list(net[0].parameters())}, {"params": [*net[2].parameters(), *net[3].parameters()]}]
    mine = dpfuse.ShardedOptimizer(model, kind, groups, **options, **settings)
    return model, mine, plain, kind(plain.parameters(), **settings)


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, plain, plain_optimizer, rank, size, step):
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()
    plain_optimizer.zero_grad()
    (sum(plain(batch(other, step)).square().mean() for other in range(size)) / size).backward()
    plain_optimizer.step()


def check(model, plain):
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("way", one_in(3, WAYS))
@pytest.mark.parametrize("kind", one_in(2, OPTIMIZERS))
def test_entries_are_reset_as_in_a_plain_optimizer(rank, size, kind, way):
    model, optimizer, plain, plain_optimizer = both = make(*OPTIMIZERS[kind])
    for step in range(12):
        train(*both, rank, size, step)
        if step in (2, 3, 7):
            for place in (0, 2) if step == 2 else (1,):
                WAYS[way](optimizer, list(model.parameters())[place])
                plain_optimizer.state.pop(list(plain.parameters())[place])
    check(model, plain)
    ours, other = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    for number, state in other.items():
        if "step" in state:
            assert float(ours[number]["step"]) == float(state["step"])


@pytest.mark.parametrize("way", one_in(2, WAYS_FOR_ALL))
@pytest.mark.parametrize("kind", one_in(4, OPTIMIZERS))
def test_all_states_are_reset_as_in_a_plain_optimizer(rank, size, kind, way):
    model, optimizer, plain, plain_optimizer = both = make(*OPTIMIZERS[kind])
    for step in range(8):
        train(*both, rank, size, step)
        if step in (2, 4):
            assert len(optimizer.state) == len(list(model.parameters()))
            WAYS_FOR_ALL[way](optimizer)
            plain_optimizer.state.clear()
            assert len(optimizer.state) == 0
            assert optimizer.state_dict()["state"] == {}
    check(model, plain)


def test_states_of_masters_are_reset(rank, size):
    """Beside a twin that loads a state dict without the entry."""
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        model = dpfuse.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).bfloat16())
        models.append((model, dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, master_dtype=torch.float32)))
    for step in range(6):
        for number, (model, optimizer) in enumerate(models):
            optimizer.zero_grad()
            model(batch(rank, step).bfloat16()).float().square().mean().backward()
            optimizer.step()
            if step == 2 and number == 0:
                del optimizer.state[model.module[0].bias]
            elif step == 2:
                state = optimizer.state_dict()
                entry = state["state"][1]
                state["state"][1] = {
                    key: value if key == "master_param" else torch.zeros_like(value) for key, value in entry.items()
                }
                optimizer.load_state_dict(state)
    for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_is_an_empty_dict_that_takes_writes(rank, size):
    model, optimizer, plain, _ = both = make(*OPTIMIZERS["AdamW"])
    assert list(optimizer.state.items()) == []
    train(*both, rank, size, 0)
    first = model.module[0].weight
    wrong = [
        lambda: optimizer.state[first],
        lambda: optimizer.state.get(first),
        lambda: [value.zero_() for state in optimizer.state.values() for value in state.values()],
        lambda: [value.zero_() for _, state in optimizer.state.items() for _, value in state.items()],
        lambda: [
            value.zero_() for state in optimizer.state.values() for _, value in state.items() if torch.is_tensor(value)
        ],
        lambda: [torch.zeros_like(value) for state in optimizer.state.values() for _, value in state.items()],
        lambda: [value.shape for state in optimizer.state.values() for _, value in state.items()],
        lambda: [value.data for state in optimizer.state.values() for _, value in state.items()],
        lambda: [state["exp_avg"] for state in optimizer.state.values()],
        lambda: [state.update(step=0) for state in optimizer.state.values()],
        lambda: [state.clear() for state in optimizer.state.values()],
        lambda: dict(optimizer.state),
        lambda: {**optimizer.state},
        lambda: copy.copy(optimizer.state),
        lambda: copy.deepcopy(optimizer.state),
        lambda: optimizer.state.setdefault(first, {}),
        lambda: optimizer.state.popitem(),
        lambda: optimizer.state.update({first: {"step": torch.ones(())}}),
        lambda: optimizer.state.__setitem__(first, {"step": torch.ones(())}),
        lambda: setattr(optimizer, "state", {first: {"step": torch.ones(())}}),
    ]
    for use in wrong:
        with pytest.raises(dpfuse.DPFuseError, match="delete its entry on every rank"):
            use()
    assert first in optimizer.state
    assert list(optimizer.state) == list(model.parameters())
    assert optimizer.state.get(torch.ones(2), 5) == 5
    with pytest.raises(KeyError):
        del optimizer.state[torch.ones(2)]
    train(*both, rank, size, 1)
    check(model, plain)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_a_reset_on_one_rank_is_an_error_on_all(rank, size, kind):
    model, optimizer, *_ = both = make(*OPTIMIZERS[kind])
    train(*both, rank, size, 0)
    if rank == 1:
        del optimizer.state[model.module[0].weight]
    optimizer.zero_grad()
    out = model(batch(rank, 1))
    with pytest.raises(dpfuse.DPFuseError, match="reset other states of its ShardedOptimizer"):
        out.square().mean().backward()
    dist.barrier()


def replace_dict(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.02}


def replace_list(optimizer):
    optimizer.param_groups = [{**group, "lr": 0.02} for group in optimizer.param_groups]


def replace_params(optimizer):
    for group in optimizer.param_groups:
        group["params"] = list(reversed(group["params"]))
        group["lr"] = 0.02


@pytest.mark.parametrize("change", [replace_dict, replace_list, replace_params], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", one_in(3, ["AdamW", "RMSprop, in backward", "Adafactor"]))
def test_groups_that_are_replaced_by_equal_ones_are_used(rank, size, kind, change):
    model, optimizer, plain, _ = make(*OPTIMIZERS[kind])
    plain_optimizer = OPTIMIZERS[kind][0](
        [{"params": list(plain[0].parameters())}, {"params": [*plain[2].parameters(), *plain[3].parameters()]}],
        **OPTIMIZERS[kind][1],
    )
    for step in range(6):
        if step == 3:
            change(optimizer)
            (replace_dict if change is replace_dict else replace_list)(plain_optimizer)
        train(model, optimizer, plain, plain_optimizer, rank, size, step)
    check(model, plain)


def drop(optimizer):
    optimizer.param_groups[1]["params"].pop()


def add(optimizer):
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(2)))


def swap(optimizer):
    optimizer.param_groups.reverse()


def remove_group(optimizer):
    optimizer.param_groups.pop()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", [drop, add, swap, remove_group], ids=lambda one: one.__name__)
@pytest.mark.parametrize("ranks_that_change", [(0, 1), (1,)], ids=str)
def test_groups_of_other_parameters_are_an_error_on_all_ranks(rank, size, change, ranks_that_change):
    model, optimizer, *_ = both = make(*OPTIMIZERS["AdamW"])
    train(*both, rank, size, 0)
    if rank in ranks_that_change:
        change(optimizer)
    model.zero_grad()
    loss = model(batch(rank, 1)).square().mean()
    if len(ranks_that_change) == 1:
        with pytest.raises(dpfuse.DPFuseError, match="changed its param_groups"):
            loss.backward()
    else:
        loss.backward()
        with pytest.raises(dpfuse.DPFuseError, match="param_groups of a ShardedOptimizer"):
            optimizer.step()
    dist.barrier()
