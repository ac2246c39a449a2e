"""What autotune refuses, and failures while it plans: told on all ranks, and training goes on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.tune import autotune, tuning
from tests.distributed.changes.test_autotune import CHEAP, net, step


def planning_fails(rank, size, where):
    def fail(*args, **kwargs):
        raise MemoryError("no room")

    model = dpfuse.DataParallel(net())
    result = autotune(model, steps=1, cost=None if where == "zeros" else CHEAP)
    for number in range(2):
        step(model, number)
    before = model.bucket_plan.layout
    with pytest.MonkeyPatch.context() as monkey:
        if rank == (0 if where == "optimal_plan" else 1):
            monkey.setattr(tuning if where != "zeros" else torch, where, fail)
        with pytest.warns(UserWarning, match="autotune has changed nothing: .*no room"):
            step(model, 2)
    assert result.done
    assert result.kept is False
    assert "failed on rank" in result.explain()
    assert "no room" in result.explain()
    grads = step(model, 3)
    assert model.bucket_plan.layout == before
    return grads


@pytest.mark.parametrize("where", ["optimal_plan", "zeros"])
def test_what_fails_on_one_rank_is_told_on_all_and_training_goes_on(ranks, where):
    grads, others = ranks(planning_fails, where)
    assert all(map(torch.equal, grads, others))


def called_differently(rank, size, who):
    model = dpfuse.DataParallel(net())
    step(model, 0)
    if who == "all":
        autotune(model, steps=1 + rank, cost=CHEAP)
        text = "differs between ranks: rank 1 has 'autotune: 2 steps"
    elif rank == who:
        autotune(model, steps=1, cost=CHEAP)
        text = rf"rank {rank}: autotune was called .* on rank {who} of 2"
    else:
        text = rf"changed on rank {who} of 2 .* not on rank {rank}.*A call of autotune is a change, too"
    with pytest.raises(DPFuseError, match=text):
        step(model, 1)
    if who == "all" or rank != who:
        autotune(model, steps=1, cost=CHEAP)
    for number in range(6):
        grads = step(model, number)
    assert model.tuning.done
    return grads


@pytest.mark.parametrize("who", [0, 1, "all"])
def test_ranks_that_call_it_differently_raise_and_may_repair_it(ranks, who):
    grads, others = ranks(called_differently, who)
    assert all(map(torch.equal, grads, others))


def automatic(rank, size):
    model = dpfuse.DataParallel(net(), plan="auto")
    for number in range(13):
        grads = step(model, number)
    assert model.tuning.done
    assert len(model.tuning.before.total) == 5
    return model.bucket_plan.layout, grads


def test_auto_is_a_plan(ranks):
    (plan, grads), (other, others) = ranks(automatic, timeout=90)
    assert plan == other
    assert all(map(torch.equal, grads, others))


def test_other_words_are_refused_and_auto_must_be_meant_by_all(rank, size):
    for value in ("automatic", "25", ""):
        with pytest.raises(TypeError, match="must be a number of MB or None, got"):
            dpfuse.DataParallel(net(), comm_buffer_size=value)
    with pytest.raises(DPFuseError, match="option plan = "):
        dpfuse.DataParallel(net(), plan="auto" if rank else "ramp")
    with pytest.raises((ValueError, DPFuseError), match="plan is 'best', which cannot be read"):
        dpfuse.DataParallel(net(), plan="best" if rank else "auto")
    dist.barrier()


def test_a_word_as_a_size_is_refused_on_all_ranks(rank, size):
    for face, name in ((dpfuse.DataParallel, "comm_buffer_size"), (dpfuse.DistributedDataParallel, "bucket_cap_mb")):
        with pytest.raises((TypeError, DPFuseError), match=f"{name} must be a number of MB.*, got 'auto'"):
            face(net(), **({name: "auto"} if rank else {}))
    dist.barrier()


def test_auto_without_a_group_passes_through():
    with pytest.warns(UserWarning, match="process group"):
        model = dpfuse.DataParallel(net(1, 4), plan="auto")
    assert model.tuning is None


def test_bad_calls_are_refused(rank, size):
    model = dpfuse.DataParallel(net(1, 4))
    for arguments, kind in (({"steps": 0}, ValueError), ({"comm_buffer_size": -1}, ValueError)):
        with pytest.raises(kind):
            autotune(model, **arguments)
    assert model.tuning is None
    result = autotune(model, steps=1, cost=CHEAP)
    step(model, 0, 4)
    with pytest.raises(DPFuseError, match="while it records this model"):
        autotune(model)
    while not result.done:
        step(model, 1, 4)
    autotune(model, steps=1)


def test_communication_hooks_and_recording_exclude_each_other(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = dpfuse.DistributedDataParallel(net(1, 4))
    result = autotune(model, steps=1, cost=CHEAP)
    with pytest.raises(DPFuseError, match="was registered with autotune, which records, expected one of the two"):
        model.register_comm_hook(None, allreduce_hook)
    while not result.done:
        step(model, 0, 4)
    model.register_comm_hook(None, allreduce_hook)
    step(model, 1, 4)
    with pytest.raises(DPFuseError, match="on a model with the communication hook allreduce_hook, expected one"):
        autotune(model)


def test_a_model_that_passes_through_cannot_be_tuned():
    with (
        pytest.warns(UserWarning, match="process group"),
        pytest.raises(DPFuseError, match="only passes calls through"),
    ):
        autotune(dpfuse.DataParallel(nn.Linear(4, 4)))
