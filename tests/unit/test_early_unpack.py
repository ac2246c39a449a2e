"""The order in which a side stream is given work and joined, with streams that pretend; and what it keeps alive."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dpfuse.engine.buckets import early_unpack
from dpfuse.engine.buckets.early_unpack import EarlyGradients, SideStream
from torch import nn

import dpfuse
from dpfuse.engine import collective
from tests.streams import PretendedStreams

CUDA = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    pretended = PretendedStreams()
    pretended.install(monkeypatch)
    return pretended


class Work:
    def __init__(self, streams, error=None):
        self.streams, self.error = streams, error

    def wait(self):
        self.streams.log.append(f"{self.streams.current.name} waits for the work")
        if self.error is not None:
            raise self.error


def note(streams, text, grads=()):
    streams.log.append(f"{text} on {streams.current.name}")


def param_with_grad():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.zeros(3)
    return param


def test_what_is_queued_runs_behind_the_work_on_the_side_and_is_joined_once(streams):
    side = SideStream(CUDA)
    side.join()
    assert streams.log == [], "nothing was queued, so nothing is waited for"
    for name in ("first", "second"):
        assert side.queue(Work(streams), partial(note, streams, name), [name])
    assert streams.current.name == "main"
    order = ["side waits for the work", "first on side", "side waits for the work", "second on side"]
    assert streams.log == order
    side.join()
    side.join()
    assert streams.log == [*order, "main waits for side"]


def test_memory_is_held_until_the_streams_are_joined(streams):
    side, memory = SideStream(CUDA), torch.zeros(3)
    gone = weakref.ref(memory)
    side.queue(Work(streams), lambda: None, [memory])
    del memory
    assert gone() is not None
    side.join()
    assert streams.log[-1] == "main waits for side"
    assert gone() is None


def test_memory_that_nobody_joined_outlives_the_side_stream_until_it_is_done(streams):
    early_unpack._orphans.clear()
    side, memory = SideStream(CUDA), torch.zeros(3)
    gone = weakref.ref(memory)
    side.queue(Work(streams), lambda: None, [memory])
    del side, memory
    gc.collect()
    assert gone() is not None
    event = early_unpack._orphans[0][0]
    event.passed = True
    SideStream(CUDA)
    gc.collect()
    assert early_unpack._orphans == []
    assert gone() is None


@pytest.mark.parametrize("fails", ["the work", "the unpack"])
def test_what_cannot_be_queued_is_left_to_whoever_delivers(streams, fails):
    param, side = param_with_grad(), SideStream(CUDA)
    early = EarlyGradients([param], side)
    work = Work(streams, RuntimeError("planted") if fails == "the work" else None)

    def unpack(grads):
        if fails == "the unpack":
            raise ValueError("planted")

    early.write(work, [param.grad], unpack, None)
    assert early.delivered() == set()
    early.join()
    assert streams.log[-1] == "main waits for side", "some of it may have been queued"


def test_only_gradients_that_are_the_parameters_alone_are_written(streams):
    side = SideStream(CUDA)

    def written(param, grad=None):
        early = EarlyGradients([param], side)
        early.write(Work(streams), [param.grad if grad is None else grad], partial(note, streams, "unpack"), None)
        return early.delivered() == {0}

    assert written(param_with_grad())
    viewed = param_with_grad()
    view = viewed.grad.view(3)
    assert not written(viewed)
    del view
    assert written(viewed)
    graphed = param_with_grad()
    graphed.grad = torch.zeros(3, requires_grad=True)
    assert not written(graphed)
    heard = param_with_grad()
    for _ in range(2):
        heard.register_post_accumulate_grad_hook(lambda param: None)
    assert not written(heard)
    streams.current = streams.new("capture", captured=True)
    assert not written(param_with_grad())


def test_a_gradient_that_was_replaced_or_moved_is_not_taken_for_delivered(streams):
    params = [param_with_grad() for _ in range(4)]
    early = EarlyGradients(params, SideStream(CUDA))
    early.write(Work(streams), [param.grad for param in params], lambda grads: None, None)
    params[1].grad = torch.ones(3)
    params[2].grad.data = torch.ones(3)
    params[3].grad = None
    assert early.delivered() == {0}
    assert early.delivered() == set()


def test_what_was_written_and_is_lost_becomes_zeros_but_nothing_else(streams):
    params = [param_with_grad() for _ in range(2)]
    early = EarlyGradients(params, SideStream(CUDA))
    early.write(Work(streams), [param.grad for param in params], lambda grads: [g.fill_(7) for g in grads], None)
    params[1].grad = torch.ones(3)
    early.lose()
    assert params[0].grad.eq(0).all()
    assert params[1].grad.eq(1).all()
    assert early.delivered() == set()


def test_the_host_is_never_held_up(monkeypatch):
    monkeypatch.setattr(collective, "_is_nccl", lambda group, device: True)
    assert collective.waits_on_streams(None, CUDA)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert not collective.waits_on_streams(None, CUDA)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setattr(collective, "_is_nccl", lambda group, device: False)
    assert not collective.waits_on_streams(None, CUDA)


def test_on_the_cpu_nothing_is_unpacked_early(group):
    assert early_unpack.side_stream_on(dist.group.WORLD, torch.device("cpu")) is None


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pretend(monkeypatch, streams):
    monkeypatch.setattr(collective, "waits_on_streams", lambda group, device: True)
    monkeypatch.setattr("dpfuse.engine.buckets.bucket.LEAST", 0)
    streams.initialized = False  # of graphs there is nothing here
    unpack = dpfuse.engine.buckets.bucket.GradBucket._unpack

    def noted(bucket, targets, *, matched=True):
        note(streams, f"unpack {bucket._label.split()[1]}")
        unpack(bucket, targets, matched=matched)

    monkeypatch.setattr(dpfuse.engine.buckets.bucket.GradBucket, "_unpack", noted)


def test_a_backward_unpacks_all_but_the_last_bucket_on_the_side_and_joins_before_it_ends(streams, group, monkeypatch):
    pretend(monkeypatch, streams)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model = dpfuse.DistributedDataParallel(net, bucket_cap_mb=5e-5)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    count = len(model.bucket_plan.buckets)
    assert count > 2
    assert streams.log == [f"unpack {order} on main" for order in range(count)], "the first is recorded"
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        streams.log.clear()
        model(x).sum().backward()
        on_side = [f"unpack {order} on side" for order in range(count - 1)]
        assert streams.log == [*on_side, "main waits for side", f"unpack {count - 1} on main"]


def test_views_and_small_gradients_are_not_unpacked_early(streams, group, monkeypatch):
    pretend(monkeypatch, streams)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model = dpfuse.DistributedDataParallel(net, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    assert all(bucket.early is None for bucket in model.reducer.buckets)
    monkeypatch.setattr("dpfuse.engine.buckets.bucket.LEAST", 1000)
    model = dpfuse.DistributedDataParallel(net, bucket_cap_mb=1e-4)
    assert all(bucket.early is None for bucket in model.reducer.buckets)
