"""What is left behind: old buckets are freed, and an error in between leaves nothing half done."""

from __future__ import annotations

import gc
import weakref
from time import monotonic, sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.comm import collective, votes
from dpfuse.engine.plan import rebuild_plan
from tests.freed import still_held

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
OPTIONS = {
    "views": {},
    "private": {"gradient_as_bucket_view": False},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "deterministic": {"deterministic": True},
    "checks": {"check_finite": "raise"},
    "accumulating": {"accumulate_in_buckets": True},
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def step(model, rank):
    model(torch.full((2, 16), 1.0 + rank)).square().sum().backward()


def synchronisers():
    """What synchronises the gradients of a wrapper, and has its buffers."""
    return [weakref.ref(one) for one in gc.get_objects() if type(one).__name__ == "GradSync"]


def buffers_of(model):
    """The flat buffers of which gradients are views."""
    bases = {id(param.grad._base): param.grad._base for param in model.parameters() if param.grad is not None}
    return [weakref.ref(base) for base in bases.values() if base is not None]


def another_group(rank, size, views):
    gc.collect()
    before = len(synchronisers())
    model = dpfuse.DistributedDataParallel(net(), gradient_as_bucket_view=views)
    gone = []
    for _ in range(4):
        for _ in range(2):
            model.zero_grad()
            step(model, rank)
        gone += buffers_of(model)
        model._update_process_group(dist.new_group([*range(size)]))
    assert bool(gone) == views
    model.zero_grad()
    step(model, rank)
    held = still_held(gone, within=3.0)
    return held, max(1, len(synchronisers()) - before)  # those of earlier tests may go meanwhile


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_another_process_group_frees_what_belonged_to_the_one_before(ranks, views):
    assert ranks(another_group, views) == [([], 1)] * 2


def deleted(rank, size, face, options, keeps_module):
    model = FACES[face](net(), **options)
    gc.collect()
    inner, known = model.module, len(synchronisers())
    assert known > 0
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            step(model, rank)
        step(model, rank)
    gone = buffers_of(model)
    model.zero_grad()
    gone += [weakref.ref(model)]
    if not keeps_module:
        del inner
    del model
    held = still_held(gone, within=3.0)
    return held, known - len(synchronisers())


@pytest.mark.parametrize(
    "keeps_module", [pytest.param(True, marks=pytest.mark.slow), False], ids=["module kept", "module gone"]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_wrapper_that_is_deleted_frees_its_buffers(ranks, options, keeps_module):
    assert ranks(deleted, "dp", OPTIONS[options], keeps_module) == [([], 1)] * 2


def test_a_ddp_wrapper_that_is_deleted_frees_its_buffers(ranks):
    assert ranks(deleted, "ddp", {"gradient_as_bucket_view": True}, True) == [([], 1)] * 2


def freed(rank, size, options, make, counts):
    """Return what is held of modules that were wrapped and trained for so many steps, and then dropped."""
    held = []
    for face in (*FACES.values(), dpfuse.replicate):
        for steps in counts:
            module = make()
            model = face(module, **({} if face is dpfuse.replicate else options))
            module.trainer = [model] if make is net else None  # as a module of Lightning has its own training loop
            for _ in range(steps):
                step(model, rank)
            gone = [*map(weakref.ref, (module, model, *module.parameters()))]
            del module, model
            held.append(still_held(gone, within=3.0))
    return held


@pytest.mark.parametrize("options", OPTIONS)
def test_a_module_that_leads_to_its_wrapper_is_freed(ranks, options):
    assert ranks(freed, OPTIONS[options], net, (0, 1, 3)) == [[[]] * 9] * 2


class KeepsOutput(nn.Module):
    """Keeps what its last forward has returned, as modules do whose loss is read for a log."""

    def __init__(self):
        super().__init__()
        self.net, self.last = net(), None

    def forward(self, x):
        self.last = self.net(x)
        return self.last


@pytest.mark.parametrize("options", OPTIONS)
def test_a_module_that_keeps_its_output_is_freed(ranks, options):
    assert ranks(freed, OPTIONS[options], KeepsOutput, (1, 3)) == [[[]] * 6] * 2


def dropped_before_its_backward(rank, size, face):
    module = nn.Linear(2, 1, bias=False)
    found = []
    for _ in range(3):
        module.zero_grad()
        loss = FACES[face](module)(torch.full((1, 2), 1.0 + rank)).sum()
        gc.collect()
        loss.backward(retain_graph=True)
        found.append(module.weight.grad.tolist())
    return found


@pytest.mark.parametrize("face", FACES)
def test_a_wrapper_that_is_dropped_before_its_backward_still_averages(ranks, face):
    assert ranks(dropped_before_its_backward, face) == [[[[1.5, 1.5]]] * 3] * 2


def rebuilt(rank, size):
    model = dpfuse.DataParallel(net(), None, 0.001, 0.0005)
    step(model, rank)
    first = buffers_of(model)
    assert first
    for _ in range(2):
        model.zero_grad()
        step(model, rank)
    in_use = [
        bucket.parts.buffer.flat for bucket in model.reducer.buckets
    ]  # a bucket that stayed as it is keeps its own
    return still_held([one for one in first if not any(one() is flat for flat in in_use)], within=3.0)


def test_the_buffers_of_the_first_plan_are_freed_once_no_gradient_is_in_them(ranks):
    assert ranks(rebuilt) == [[], []]


def rebuilt_without_a_collection(rank, size):
    gc.collect()
    gc.disable()
    try:
        model = dpfuse.DataParallel(net(), None, 0.001, 0.0005)
        report = weakref.ref(model.reducer.in_use.report)  # has parts of the last buffer, and so all of its memory
        for _ in range(3):
            model.zero_grad()
            step(model, rank)
        limit = monotonic() + 3.0  # a thread of gloo may still have them
        while report() is not None and monotonic() < limit:
            sleep(0.01)
        return report() is None
    finally:
        gc.enable()


def test_the_buffers_of_the_first_plan_need_no_garbage_collection(ranks):
    assert ranks(rebuilt_without_a_collection) == [True, True]


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_an_agreement_on_buckets_that_raises_is_repeated_after_the_next_backward(rank, size, views):
    """The agreement on the buckets, after the first synchronised backward, raises on all ranks, once."""
    model = dpfuse.DataParallel(net(), None, 0.001, 0.0005, gradient_as_bucket_view=views)
    golden = model.bucket_plan
    with mock.patch.object(votes, "agree_on_order", side_effect=dpfuse.DPFuseError("planted")) as agree:
        with pytest.raises(dpfuse.DPFuseError, match="planted"):
            step(model, rank)
        assert agree.called
    assert model.bucket_plan == golden
    assert not model.reducer.rebuilt
    plans = []
    for number in range(3):
        model.zero_grad()
        step(model, rank)
        plans.append(model.bucket_plan)
        bare = net()
        for other in range(size):
            step(bare, other)
        for got, total in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(got.grad, total.grad / size, msg=lambda text: f"{number} after: {text}")  # noqa: B023
    ready = [5, 4, 3, 2, 1, 0]  # in backward the last layer comes first, and in each its bias before its weight
    assert plans == [rebuild_plan(golden, ready)] * 3
    assert model.reducer.rebuilt


class Coalescing:
    """A group like NCCL's, whose second all-reduce raises; and so may the end of the coalescing."""

    def __init__(self, *, ends=True):
        self.calls = []
        self.ends = ends

    def size(self):
        return 2

    def _start_coalescing(self, device):
        self.calls.append("start")

    def _end_coalescing(self, device):
        self.calls.append("end")
        if not self.ends:
            raise RuntimeError("cannot end")
        return mock.Mock()

    def allreduce(self, tensors, options):
        self.calls.append("all-reduce")
        if self.calls.count("all-reduce") == 2:
            raise MemoryError("planted")


@pytest.mark.parametrize("ends", [True, False])
def test_a_collective_that_raises_leaves_no_coalescing_open(ends):
    def two(group):
        return collective.coalesced(lambda: [group.allreduce([], None) for _ in range(2)], torch.device("cpu"), group)

    group = Coalescing(ends=ends)
    with pytest.raises(MemoryError, match="planted"):
        two(group)
    assert group.calls == ["start", "all-reduce", "all-reduce", "end"]
    group = Coalescing()
    group.calls += ["all-reduce"] * 2  # none raises any more
    two(group)
    assert group.calls[2:] == ["start", "all-reduce", "all-reduce", "end"]
