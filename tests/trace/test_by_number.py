"""Runs with fixed micro-batches on other numbers of ranks are compared by micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.trace.comparison import compare
from dpfuse.trace.process_trace import start_tracer, stop_tracer
from dpfuse.trace_file import read_folder

COUNT, STEPS = 6, 4


def train(rank, size, folder, plant=None, evaluates=False):
    """Train with a trace; `plant` says in which step, at which micro-batch and where something is changed."""
    tracer = start_tracer(folder)
    try:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.3), nn.Linear(9, 2))
        model = dpfuse.DataParallel(net, fixed_micro_batches=COUNT)
        tracer.add(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            for number in model.micro_batches():
                inputs, targets = torch.rand(3, 5), torch.rand(3, 2)
                if plant == ("inputs", step, number):
                    inputs = inputs + 1
                if plant == ("targets", step, number):
                    targets = targets + 1
                (model(inputs) - targets).square().mean().backward()
            if plant == ("weights", step, None):
                optimizer.param_groups[0]["lr"] = 0.02
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                model.eval()
                model(torch.ones(1, 5)).sum()  # with gradients that are never asked for
                model.train()
    finally:
        stop_tracer()


def difference(ranks, folder, sizes, plant=None, *, evaluates=False):
    for number, size in enumerate(sizes):
        ranks(train, folder / str(number), plant if number else None, evaluates, size=size)
    return compare(read_folder(folder / "0"), read_folder(folder / "1"))


@pytest.mark.parametrize("sizes", [(1, 2), (3, 2)])
def test_equal_runs_on_other_numbers_of_ranks_are_equal(ranks, tmp_path, sizes):
    assert difference(ranks, tmp_path, sizes, evaluates=True) is None


@pytest.mark.parametrize(
    ("plant", "cause", "batch"),
    [
        (("inputs", 2, 4), "data", (4, COUNT)),
        (("targets", 1, 0), "data", (0, COUNT)),
        (("weights", 1, None), "settings", None),
    ],
)
def test_the_first_difference_is_named_by_its_micro_batch(ranks, tmp_path, plant, cause, batch):
    found = difference(ranks, tmp_path, (3, 2), plant)
    assert (found.cause, found.step, found.batch, found.ranks) == (cause, plant[1], batch, ())
    assert "rank" not in found.place


def test_without_fixed_micro_batches_another_number_of_ranks_is_the_difference(ranks, tmp_path):
    ranks(train, tmp_path / "0", size=1)
    ranks(train, tmp_path / "1", size=2)
    runs = [read_folder(tmp_path / name) for name in ("0", "1")]
    for model in runs[1][0].models:
        del model["micro_batches"]
    assert "number of ranks" in compare(*runs).what
