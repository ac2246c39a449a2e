"""Gradients written on several streams: each kind of bucket is packed behind all of them, with streams that pretend."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dpfuse.engine.buckets import bucket as bucket_file
from dpfuse.engine.buckets import in_place_bucket
from dpfuse.engine.buckets.bucket import BucketState, GradBucket
from dpfuse.engine.buckets.hooked_bucket import HookedBucket, HookedSparseBucket
from dpfuse.engine.buckets.in_place_bucket import InPlaceBucket
from dpfuse.engine.buckets.sparse_bucket import SparseBucket
from torch import nn

import dpfuse
from dpfuse.engine.streams import WritingStreams, writers_on
from tests.streams import PretendedStreams

CUDA = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    pretended = PretendedStreams()
    pretended.install(monkeypatch)
    return pretended


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_are_none_on_the_cpu():
    assert writers_on(torch.device("cpu")) is None
    assert isinstance(writers_on(CUDA), WritingStreams)


def test_the_current_stream_waits_once_for_each_of_the_others(streams):
    writers = WritingStreams(CUDA)
    marked = []
    mark = writers.noting(marked.append)
    for stream in (side := streams.new("side"), streams.current, side, streams.new("other")):
        with streams.stream(stream):
            mark(stream.name)
    writers.precede()
    assert marked == ["side", "main", "side", "other"]
    assert streams.log == ["main waits for side", "main waits for other"]
    writers.precede()
    assert len(streams.log) == 2, "what was noted holds for one pack only"


def test_one_stream_waits_for_nothing(streams):
    writers = WritingStreams(CUDA)
    mark = writers.noting(lambda param: None)
    for _ in range(3):
        mark(None)
    writers.precede()
    assert streams.log == []


def test_a_captured_stream_waits_only_for_captured_ones(streams):
    writers = WritingStreams(CUDA)
    mark = writers.noting(lambda param: None)
    for stream in (streams.new("before the capture"), streams.new("inside", captured=True)):
        with streams.stream(stream):
            mark(None)
    with streams.stream(streams.new("capture", captured=True)):
        writers.precede()
    assert streams.log == ["capture waits for inside"]


def test_what_compiled_autograd_traces_notes_nothing(streams, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    writers = WritingStreams(CUDA)
    with streams.stream(streams.new("side")):
        writers.noting(lambda param: None)(None)
    writers.precede()
    assert streams.log == []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(self.table(x)))


def plain(model):
    pass


def hooked(model):
    model.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))


def done(buffer):
    future = torch.futures.Future()
    future.set_result(buffer)
    return future


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("prepare", [plain, hooked])
def test_every_bucket_is_packed_behind_all_streams_that_wrote_into_it(streams, group, views, prepare, monkeypatch):
    monkeypatch.setattr(bucket_file, "writers_on", lambda device: WritingStreams(CUDA))
    monkeypatch.setattr("dpfuse.engine.buckets.in_place_bucket.LARGE", 64)
    streams.initialized = False  # of graphs there is nothing here
    model = dpfuse.DistributedDataParallel(Net(), bucket_cap_mb=8e-5, gradient_as_bucket_view=views)
    prepare(model)
    sides = itertools.cycle([streams.new(f"side {i}") for i in range(3)])
    wrote: dict[str, str] = {}  # the stream of each parameter's gradient
    for name, param in model.module.named_parameters():
        param.register_hook(partial(write_on_a_side, streams, sides, wrote, name))
    main = streams.current
    # The last gradient is on its stream alone, and its bucket is sent from another one.
    model.module.table.weight.register_post_accumulate_grad_hook(lambda param: setattr(streams, "current", main))
    move, kinds = GradBucket._move, set()

    def launched(bucket, expected, to):
        if expected is BucketState.FREE and bucket.params:
            kinds.add(type(bucket))
            names = [model.bucket_plan.specs[index].name for index in bucket.plan.params]
            others = {wrote[name] for name in names} - {streams.current.name}
            waits = sorted(f"{streams.current.name} waits for {name}" for name in others)
            assert sorted(streams.log[: len(waits)]) == waits
            assert set(streams.log[len(waits) :]) <= {"read"}
            streams.log.clear()
        move(bucket, expected, to)

    take = in_place_bucket._LargeGradient.take

    def taken(large, *, empty):
        streams.log.append("read")
        take(large, empty=empty)

    monkeypatch.setattr(GradBucket, "_move", launched)
    monkeypatch.setattr(in_place_bucket._LargeGradient, "take", taken)
    most = 0
    for _ in range(3):
        wrote.clear()
        model(torch.tensor([1, 2, 2])).sum().backward()
        most = max(most, len(set(wrote.values())))
    assert most > 1
    assert kinds >= ({HookedBucket, HookedSparseBucket} if prepare is hooked else {SparseBucket})
    assert prepare is hooked or kinds >= {GradBucket if views else InPlaceBucket}


def write_on_a_side(streams, sides, wrote, name, grad):
    streams.current = next(sides)
    wrote[name] = streams.current.name
