"""Errors between ranks, of copies and of ZeRO's overlap: of torch's type and gist, beside torch's class."""

from __future__ import annotations

import copy
import pickle
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel, DPFuseError
from tests.patience import patience

BOTH = (TorchDDP, DistributedDataParallel)


def wrap(cls, module, group=None):
    """The error of the constructor, if any."""
    try:
        cls(module, process_group=group)
    except Exception as error:
        return error
    return None


def test_a_different_number_of_parameters_is_an_error_on_all_ranks_as_in_torch(rank, size):
    theirs, ours = (wrap(cls, nn.Linear(2, 2, bias=rank == 0)) for cls in BOTH)
    assert isinstance(theirs, RuntimeError)
    assert isinstance(ours, RuntimeError)
    assert "expects same model across all ranks" in str(theirs)
    assert "expected the same on every rank" in str(ours)
    assert "'bias'" in str(ours) or "parameter bias" in str(ours)


@pytest.mark.slow
def test_a_different_shape_is_an_error_on_all_ranks_where_torch_has_one_on_some(rank, size):
    # Rank 0 of torch notices nothing and waits for a peer that has raised, so it gets little time.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=patience(2)))
    theirs = wrap(TorchDDP, nn.Linear(2, 2 + rank), group)
    ours = wrap(DistributedDataParallel, nn.Linear(2, 2 + rank))
    if rank == 1:
        assert isinstance(theirs, RuntimeError)
        assert re.search(r"sizes \[3, 2\].*appears not to match sizes of the same param in process 0", str(theirs))
    assert isinstance(ours, RuntimeError)
    assert re.search(r"rank 1 has .*shape=\(3, 2\).*rank 0 has .*shape=\(2, 2\)", str(ours))


def test_only_the_default_group_can_be_pickled_as_in_torch(rank, size):
    group = dist.new_group([0, 1])
    for cls in BOTH:
        model = cls(nn.Linear(2, 2), process_group=group)
        for way in (copy.deepcopy, pickle.dumps):
            if way is copy.deepcopy and cls is DistributedDataParallel:
                continue  # works: the copy has the same group
            with pytest.raises(RuntimeError, match="default process group"):
                way(model)


def zero(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)


def test_zeros_overlap_is_refused_over_gloo_as_with_torchs_class(rank, size):
    for cls in BOTH:
        model = cls(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP with ZeRO may meet hangs"):
            hook_with_zero_step(allreduce_hook, model, zero(model))
        plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            hook_with_zero_step(allreduce_hook, model, plain)


def test_zeros_overlap_finds_what_it_asks_of_the_wrapper(rank, size):
    """As if it were not gloo: one bucket, so that there is nothing that may hang."""
    torch.manual_seed(0)
    net, runs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []
    for cls in BOTH:
        model = cls(copy.deepcopy(net))
        assert not model._has_rebuilt_buckets
        optimizer = zero(model)
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
        run = []
        for step in range(6):
            model.zero_grad()
            model(torch.full((2, 3), rank + 0.1 * step)).square().sum().backward()
            optimizer.step()
            run.append([param.detach().clone() for param in model.parameters()])
        assert model._has_rebuilt_buckets
        runs.append(run)
    for theirs, ours in zip(*runs, strict=True):
        assert all(map(torch.equal, theirs, ours))
    assert not torch.equal(runs[1][0][0], runs[1][-1][0])


def test_the_error_classes_are_torchs():
    assert issubclass(DPFuseError, RuntimeError)
