"""CUDA streams that pretend: packs come behind all streams that wrote gradients, and a side stream is joined once."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine import streams as streams_file
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.exchanges.all_reduce import AllReduce
from dpfuse.engine.exchanges.hooked import HookedBuffer, HookedRows
from dpfuse.engine.exchanges.in_place import InPlace
from dpfuse.engine.exchanges.sparse import SparseRows
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.reading import Outcome
from dpfuse.engine.streams import HostCopy, SideStream, WritingStreams, _keep_until, writers_on
from dpfuse.engine.torch_private import OnStream, are_private, is_private
from tests.streams import PretendedWork

CUDA = torch.device("cuda", 0)


# --- The streams that wrote gradients ---


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
    assert writers.precede()
    assert marked == ["side", "main", "side", "other"]
    assert streams.log == ["main waits for side", "main waits for other"]
    assert not writers.precede()
    assert len(streams.log) == 2, "what was noted holds for one pack only"


def test_a_side_stream_waits_for_the_default_one(streams):
    writers = WritingStreams(CUDA)
    writers.noting(lambda param: None)(None)
    with streams.stream(streams.new("side")):
        assert writers.precede()
    assert streams.log == ["side waits for main"]


def test_one_stream_waits_for_nothing(streams):
    writers = WritingStreams(CUDA)
    mark = writers.noting(lambda param: None)
    for _ in range(3):
        mark(None)
    assert not writers.precede()
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
    monkeypatch.setattr("torch.compiler.is_dynamo_compiling", lambda: True)
    writers = WritingStreams(CUDA)
    with streams.stream(streams.new("side")):
        writers.noting(lambda param: None)(None)
    assert not writers.precede()
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


@pytest.fixture
def writing(streams, group, monkeypatch):
    """Wraps a net of which each gradient is written on one of three streams; returns also the stream of each."""
    monkeypatch.setattr("dpfuse.engine.assembly.writers_on", lambda device: WritingStreams(CUDA))
    streams.initialized = False  # of graphs there is nothing here
    nodes = []  # which nothing else keeps

    def wrap(net=Net, prepare=plain, **options):
        model = dpfuse.DistributedDataParallel(net(), bucket_cap_mb=8e-5, **options)
        prepare(model)
        sides = itertools.cycle([streams.new(f"side {i}") for i in range(3)])
        wrote: dict[str, str] = {}  # the stream of each parameter's gradient
        main = streams.current
        params = dict(model.module.named_parameters())
        for name, param in params.items():
            param.register_hook(partial(write_on_a_side, streams, sides, wrote, name))
        # Autograd calls what is queued for the end of a backward on the main stream, which has waited by then. A hook
        # of the node is called after those of the parameter, of which ours is the last.
        first = next(iter(params.values()))
        node = first.expand_as(first).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: setattr(streams, "current", main))
        nodes.append(node)
        return model, wrote

    return wrap


def write_on_a_side(streams, sides, wrote, name, grad):
    streams.current = next(sides)
    wrote[name] = streams.current.name


def assert_waited(streams, others):
    """The current stream has waited for these, before anything was read."""
    waits = sorted(f"{streams.current.name} waits for {name}" for name in others - {streams.current.name})
    assert sorted(streams.log[: len(waits)]) == waits
    assert set(streams.log[len(waits) :]) <= {"read"}
    streams.log.clear()


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("prepare", [plain, hooked])
def test_every_bucket_is_packed_behind_all_streams_that_wrote_into_it(streams, writing, views, prepare, monkeypatch):
    monkeypatch.setattr("dpfuse.engine.exchanges.in_place.LARGE", 64)
    start, take, exchanges = GradBucket._start, InPlace.take, set()
    model, wrote = writing(prepare=prepare, gradient_as_bucket_view=views)

    def started(bucket, flat, outcome):
        if bucket.params:
            exchanges.add(type(bucket.parts.exchange))
            names = [model.bucket_plan.specs[index].name for index in bucket.plan.params]
            at_end = not model.reducer.rebuilt or bucket is model.reducer.buckets[-1]
            assert_waited(streams, set() if at_end else {wrote[name] for name in names})
            early.append(not at_end)
        start(bucket, flat, outcome)

    def taken(exchange, *arguments):
        streams.log.append("read")
        return take(exchange, *arguments)

    monkeypatch.setattr(GradBucket, "_start", started)
    monkeypatch.setattr(InPlace, "take", taken)
    most, early = 0, []
    for _ in range(3):
        wrote.clear()
        model(torch.tensor([1, 2, 2])).sum().backward()
        most = max(most, len(set(wrote.values())))
    assert most > 1
    assert sum(early) > 1
    assert exchanges >= ({HookedBuffer, HookedRows} if prepare is hooked else {SparseRows})
    assert prepare is hooked or exchanges >= {AllReduce if views else InPlace}


def test_what_is_accumulated_is_packed_behind_all_streams_that_wrote_it(streams, writing, monkeypatch):
    def dense():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    model, wrote = writing(dense, gradient_as_bucket_view=True, accumulate_in_buckets=True)
    model(torch.ones(2, 4)).sum().backward()
    streams.log.clear()
    seen, pack = [], Accumulating.pack

    def packed(feed, grads, arguments):
        assert_waited(streams, {wrote[name] for name in feed._buffer.names})
        seen.append(len({wrote[name] for name in feed._buffer.names}))
        pack(feed, grads, arguments)

    monkeypatch.setattr(Accumulating, "pack", packed)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    assert max(seen) > 1


@pytest.mark.parametrize("several", [True, False])
def test_gradients_outlive_the_pack_where_several_streams_wrote_them(streams, writing, several):
    model, _ = writing(gradient_as_bucket_view=True)
    model(torch.tensor([1, 2, 2])).sum().backward()
    model.zero_grad()
    bucket = model.reducer.buckets[-1]
    main = streams.current
    for number, param in enumerate(bucket.params):
        param.grad = torch.ones_like(param)
        with streams.stream(streams.new(f"side {number}") if several else main):
            bucket.parts.writers.noting(lambda param: None)(param)
    grads = [weakref.ref(param.grad) for param in bucket.params]
    bucket.send(Outcome(), complete=True)
    gc.collect()
    assert [grad() is not None for grad in grads] == [several] * len(grads)
    bucket.discard()
    assert [grad() is not None for grad in grads] == [False] * len(grads)


# --- A stream that is entered ---


def test_a_stream_is_entered_and_left_with_its_device(monkeypatch):
    now = {"device": 1, 0: (70, 0, 1), 1: (71, 1, 1)}  # the current device, and the current stream of each

    def set_stream(stream_id, device_index, device_type):
        now.update({"device": device_index, device_index: (stream_id, device_index, device_type)})

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now["device"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda index: now.update(device=index), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: now[index], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", set_stream, raising=False)
    before = dict(now)
    on_stream = OnStream(SimpleNamespace(stream_id=9, device_index=0, device_type=1))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), on_stream:
            assert now == {"device": 0, 0: (9, 0, 1), 1: (71, 1, 1)}
            raise ZeroDivisionError
        assert now == before


def test_a_copy_keeps_its_memory_on_the_host():
    copy = HostCopy(torch.tensor([1.0, 2.0]))
    copy.wait()
    arrived = copy.arriving
    assert arrived.tolist() == copy.read() == [1.0, 2.0]
    copy.take(torch.tensor([1.0, 3.0]))
    copy.wait()
    assert copy.arriving is arrived
    assert arrived.tolist() == copy.read() == [1.0, 3.0]


def test_memory_of_the_host_outlives_the_kernel_that_writes_there():
    passed = False
    event = SimpleNamespace(query=lambda: passed)
    streams = SimpleNamespace(current=lambda: SimpleNamespace(record_event=lambda before: event))
    copy = HostCopy(torch.tensor([1.0, 2.0]))
    copy.late, copy._streams = True, streams
    copy.written()
    arriving = weakref.ref(copy.arriving)
    del copy
    gc.collect()
    assert arriving() is not None
    passed = True
    _keep_until(None, [])
    assert arriving() is None


# --- Who refers to a gradient ---


def shared(param):
    return param.grad.view(-1)


def named(param):
    return torch.nn.Parameter(torch.zeros(2)), param.grad  # a name in Python is no other owner


def owned(param):
    other = torch.nn.Parameter(torch.zeros_like(param))
    other.grad = param.grad
    return other


def with_a_graph(param):
    param.grad.requires_grad_(True)


@pytest.mark.parametrize(("hold", "private"), [(shared, False), (named, True), (owned, False), (with_a_graph, False)])
@pytest.mark.parametrize("place", [0, 1])
def test_gradients_are_private_if_each_of_them_is(hold, private, place):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2)
    grads = [param.grad for param in params]
    assert are_private(grads)
    held = hold(params[place])
    assert is_private(grads[place]) is private
    assert are_private(grads) is private
    assert are_private(grads, [grad.untyped_storage() for grad in grads]) is private
    del held


# --- A stream beside backward ---


def note(streams, text):
    streams.log.append(f"{text} on {streams.current.name}")


def test_what_is_queued_runs_behind_the_work_on_the_side_and_is_joined_once(streams):
    side = SideStream(CUDA)
    side.join()
    assert streams.log == [], "nothing was queued, so nothing is waited for"
    for name in ("first", "second"):
        assert side.queue(PretendedWork(streams), partial(note, streams, name), [name])
    assert streams.current.name == "main"
    order = ["side waits for the work", "first on side", "side waits for the work", "second on side"]
    assert streams.log == order
    side.join()
    side.join()
    assert streams.log == [*order, "main waits for side"]


@pytest.mark.parametrize("error", [ValueError("planted"), RuntimeError("planted")])
def test_what_cannot_be_queued_is_told_and_still_joined(streams, error):
    side = SideStream(CUDA)

    def fail():
        raise error

    assert not side.queue(PretendedWork(streams), fail, ["memory"])
    side.join()
    assert streams.log == ["side waits for the work", "main waits for side"], "some of it may have been queued"


def test_memory_is_held_until_the_streams_are_joined(streams):
    side, memory = SideStream(CUDA), torch.zeros(3)
    freed = weakref.ref(memory)
    side.queue(PretendedWork(streams), lambda: None, [memory])
    del memory
    assert freed() is not None
    side.join()
    assert streams.log[-1] == "main waits for side"
    assert freed() is None


def test_memory_of_a_side_stream_that_was_never_joined_lives_until_the_stream_is_done(streams):
    streams_file._orphans.clear()
    side, memory = SideStream(CUDA), torch.zeros(3)
    freed = weakref.ref(memory)
    side.queue(PretendedWork(streams), lambda: None, [memory])
    del side, memory
    gc.collect()
    assert freed() is not None
    event = streams_file._orphans[0][0]
    event.passed = True
    SideStream(CUDA)
    gc.collect()
    assert streams_file._orphans == []
    assert freed() is None
