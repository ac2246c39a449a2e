"""A checkpoint holds the buckets: so three ranks that resume get the bits of a training without an interruption."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

SAVED, STEPS = 3, 7
CAPS = {"comm_buffer_size": 0.004, "last_comm_buffer_size": 0.001}


class Unordered(nn.Module):
    """Uses its layers in another order than it registers them, so that buckets change after the first backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(7))

    def forward(self, inputs):
        for place in (4, 1, 6, 0, 3, 5, 2):
            inputs = inputs + torch.tanh(self.layers[place](inputs))
        return inputs


def compiled(module):
    """What `torch.compile` returns is a module around the wrapper; this back end compiles nothing."""
    return torch.compile(dpfuse.DataParallel(module, **CAPS), backend="eager")


WRAPPERS = {
    "compiled": compiled,
    "DataParallel": lambda module, **options: dpfuse.DataParallel(module, **{**CAPS, **options}),
    "DistributedDataParallel": lambda module: dpfuse.DistributedDataParallel(module, bucket_cap_mb=0.004),
    "float8": lambda module: dpfuse.DataParallel(module, wire_dtype=torch.float8_e4m3fn, **CAPS),
    "not in order": lambda module: dpfuse.DataParallel(module, find_unused_parameters=True, **CAPS),
}


def made(wrapper, **options):
    torch.manual_seed(3)
    model = WRAPPERS[wrapper](Unordered(), **options)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model, optimizer, rank, start, stop):
    for step in range(start, stop):
        inputs = torch.randn(5, 17, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [param.tolist() for param in model.parameters()]


def interrupted(rank, size, folder, wrapper, times):
    """Train without an interruption, and with some; return whether the weights are the same bits, and the buckets."""
    whole = made(wrapper)
    first = whole[0].bucket_plan.layout
    train(*whole, rank, 0, STEPS)
    part = made(wrapper)
    done = 0
    for each in range(times):
        train(*part, rank, done, SAVED + each)
        done = SAVED + each
        dpfuse.save_checkpoint(folder, *part, step=done)
        part = made(wrapper)
        assert dpfuse.load_checkpoint(folder, *part).step == done
        assert part[0].bucket_plan.layout == whole[0].bucket_plan.layout != first
    train(*part, rank, done, STEPS)
    assert part[0].bucket_plan.layout == whole[0].bucket_plan.layout
    return weights(part[0]) == weights(whole[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_three_ranks_go_on_with_the_same_bits(ranks, tmp_path, wrapper, times):
    assert ranks(interrupted, str(tmp_path), wrapper, times, size=3) == [True] * 3


def test_two_ranks_with_a_wire_of_8_bits_go_on_with_the_same_bits(ranks, tmp_path):
    assert ranks(interrupted, str(tmp_path), "float8", 1) == [True] * 2


def layouts(rank, size, folder, case):
    """Save a training; return whether another one begins with its buckets, and which it has after a step."""
    saved = made("DataParallel")
    if case != "saved before the first step":
        train(*saved, rank, 0, 1)
    dpfuse.save_checkpoint(folder, *saved, step=1)
    options = {
        "another size": {"comm_buffer_size": 0.01},
        "deterministic": {"deterministic": True},
        "given": {"plan": dpfuse.DataParallel(Unordered(), comm_buffer_size=0.01).bucket_plan},
    }
    torch.manual_seed(4)
    model, optimizer = made("DataParallel", **options.get(case, {}))
    if case == "after a backward":
        train(model, optimizer, rank, 0, 1)
    before = model.bucket_plan.layout
    dpfuse.load_checkpoint(folder, model, optimizer)
    loaded = model.bucket_plan.layout
    train(model, optimizer, rank, 1, 2)
    return loaded == before, loaded == saved[0].bucket_plan.layout, model.bucket_plan.layout == loaded


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("the same options", (False, True, True)),
        ("saved before the first step", (True, True, False)),
        ("another size", (True, False, False)),
        ("deterministic", (True, False, True)),
        ("given", (True, False, True)),
        ("after a backward", (True, True, True)),
    ],
)
def test_buckets_are_taken_only_where_the_same_ones_would_come_again(ranks, tmp_path, case, expected):
    assert ranks(layouts, str(tmp_path), case) == [expected] * 2
    file = torch.load(next(tmp_path.glob("*.pt")), weights_only=True)
    assert ("plan" in file) == (case != "saved before the first step")


def one_cannot(rank, size, folder):
    """On rank 1 a backward has planned the buckets again already; the first ones of rank 0 stay until its own does."""
    saved = made("DataParallel")
    train(*saved, rank, 0, 1)
    dpfuse.save_checkpoint(folder, *saved, step=1)
    model, optimizer = made("DataParallel")
    before = model.bucket_plan.layout
    model.reducer.rebuilt = rank == 1
    dpfuse.load_checkpoint(folder, model, optimizer)
    model.reducer.rebuilt = False
    same = model.bucket_plan.layout == before
    train(model, optimizer, rank, 1, 2)
    return same, model.bucket_plan.layout == saved[0].bucket_plan.layout


def test_all_ranks_keep_their_buckets_if_one_of_them_cannot_use_those_of_the_file(ranks, tmp_path):
    assert ranks(one_cannot, str(tmp_path)) == [(True, True)] * 2


def over_a_pair(rank, size, folder):
    """Ranks 1 and 2 train, as a group of their own."""
    pair = dist.new_group([1, 2])
    if rank == 0:
        return True
    saved = made("DataParallel", group=pair)
    train(*saved, rank, 0, 1)
    dpfuse.save_checkpoint(folder, *saved, step=1)
    again = made("DataParallel", group=pair)
    dpfuse.load_checkpoint(folder, *again)
    return again[0].bucket_plan.layout == saved[0].bucket_plan.layout


def test_a_group_of_some_ranks_goes_on_with_its_buckets(ranks, tmp_path):
    assert ranks(over_a_pair, str(tmp_path), size=3) == [True] * 3


def inside_a_window(rank, size, folder):
    """What has accumulated in the buckets before a file is loaded is averaged with what comes after it."""
    gradients = []
    for loads in (False, True):
        saved = made("DataParallel")
        train(*saved, rank, 0, 1)
        dpfuse.save_checkpoint(folder, *saved, step=int(loads))
        model, optimizer = made("DataParallel", accumulate_in_buckets=True)
        model.load_state_dict(saved[0].state_dict())
        with model.no_sync():
            model(torch.full((2, 17), rank + 1.0)).sum().backward()
        if loads:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dpfuse.load_checkpoint(folder, model, optimizer)
        model(torch.ones(2, 17)).sum().backward()
        gradients.append([param.grad.tolist() for param in model.parameters()])
    return gradients[0] == gradients[1]


def test_loading_inside_a_window_loses_nothing_that_has_accumulated(ranks, tmp_path):
    assert ranks(inside_a_window, str(tmp_path)) == [True] * 2


def on_other_ranks(rank, size, folder):
    model, optimizer = made("DataParallel")
    before = model.bucket_plan.layout
    dpfuse.load_checkpoint(folder, model, optimizer, random_state=False)
    return model.bucket_plan.layout == before


def test_another_number_of_ranks_plans_its_own_buckets(ranks, tmp_path):
    ranks(layouts, str(tmp_path), "the same options")
    assert ranks(on_other_ranks, str(tmp_path), size=3) == [True] * 3


def a_shard_of_each(rank, size, folder):
    """A sharded optimizer keeps the buckets with which it was made, and with them its parts."""
    model, _ = made("DataParallel")
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer, rank, 0, SAVED)
    dpfuse.save_checkpoint(folder, model, optimizer, step=SAVED)
    again, _ = made("DataParallel")
    optimizer_again = dpfuse.ShardedOptimizer(again, torch.optim.SGD, lr=0.1, momentum=0.9)
    dpfuse.load_checkpoint(folder, again, optimizer_again)
    train(model, optimizer, rank, SAVED, STEPS)
    train(again, optimizer_again, rank, SAVED, STEPS)
    return weights(model) == weights(again)


def test_sharded_optimizers_go_on_with_the_same_bits(ranks, tmp_path):
    assert ranks(a_shard_of_each, str(tmp_path), size=3) == [True] * 3
