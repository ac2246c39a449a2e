"""Buckets that a user gives, on real ranks: they are sent as they are, and gradients are those of torch's DDP."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.model.plan_from_groups import plan_from_groups

GROUPS = [[1, 4, 5], [0, 2], [3]]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def plan():
    return plan_from_groups(dpfuse.plan_buckets(net()).specs, GROUPS)


def grads_of(model, rank):
    found = []
    for number in range(3):
        model.zero_grad()
        torch.manual_seed(10 * number + rank)
        model(torch.randn(4, 8)).square().mean().backward()
        found.append([param.grad.clone() for param in model.parameters()])
    return found


def train(rank, size, path, face, options):
    model = getattr(dpfuse, face)(net(), plan=path, **options)
    sent = []
    with dpfuse.time_communication(model) as times:
        ours = grads_of(model, rank)
    sent = [list(bucket.params) for bucket in model.bucket_plan.buckets]
    theirs = grads_of(TorchDDP(net()), rank)
    equal = all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
    return sent, times.collectives, equal


@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_given_buckets_are_sent_and_gradients_are_ddps(ranks, tmp_path, face, options):
    path = tmp_path / "plan.json"
    plan().save(path)
    for sent, collectives, equal in ranks(train, str(path), face, options, size=2, timeout=60):
        assert sent == GROUPS
        assert equal
        assert options or collectives == 9  # three steps of three buckets


def wrap_with(rank, size, paths):
    try:
        dpfuse.DataParallel(net(), plan=paths[rank])
    except (DPFuseError, ValueError) as error:
        return str(error)
    return ""


def test_other_plans_on_the_ranks_are_an_error_on_all(ranks, tmp_path):
    plan().save(tmp_path / "a.json")
    dpfuse.plan_buckets(net()).save(tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{}")
    texts = ranks(wrap_with, [str(tmp_path / "a.json"), str(tmp_path / "b.json")], size=2, timeout=60)
    assert all("a given plan of 3 buckets" in text and "a given plan of 1 buckets" in text for text in texts)
    texts = ranks(wrap_with, [str(tmp_path / "a.json"), "ramp"], size=2, timeout=60)
    assert all("option plan = given" in text for text in texts)
    texts = ranks(wrap_with, [str(tmp_path / "a.json"), str(tmp_path / "c.json")], size=2, timeout=60)
    assert all("c.json" in text and "expected format" in text for text in texts)


def change_module(rank, size, path):
    model = dpfuse.DataParallel(net(), plan=path)
    model(torch.ones(2, 8)).sum().backward()
    model.module.append(nn.Linear(2, 2))
    for param in model.module[3].parameters():
        dist.broadcast(param.data, 0)
    with pytest.warns(UserWarning, match="buckets are made by the rule again: plan is of another model") as warned:
        model(torch.ones(2, 8)).sum().backward()
    return model.bucket_plan.tuned, len(model.bucket_plan.specs), warned[0].filename == __file__


def test_a_changed_module_gets_buckets_by_the_rule(ranks, tmp_path):
    plan().save(tmp_path / "plan.json")
    assert ranks(change_module, str(tmp_path / "plan.json"), size=2, timeout=60) == [(False, 8, True)] * 2


def copy_without_file(rank, size, path):
    model = dpfuse.DataParallel(net(), plan=path)
    dist.barrier()
    if rank == 0:
        Path(path).unlink()
    dist.barrier()
    twin = copy.deepcopy(model)
    return [list(bucket.params) for bucket in twin.bucket_plan.buckets]


def test_a_copy_needs_no_file(ranks, tmp_path):
    plan().save(tmp_path / "plan.json")
    assert ranks(copy_without_file, str(tmp_path / "plan.json"), size=2, timeout=60) == [GROUPS] * 2


def tune_ddp(rank, size):
    model = dpfuse.DistributedDataParallel(net(), plan="auto")
    for _ in range(20):
        model(torch.ones(2, 8)).sum().backward()
        if model.tuning.done:
            break
    return model.tuning.done, model.tuning.error


def test_auto_tunes_ddps_face(ranks):
    assert ranks(tune_ddp, size=2, timeout=60) == [(True, "")] * 2
