"""Every kind of bucket in every state: illegal moves raise, and what a buffer held before leaves no trace."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from dpfuse.engine.buckets.sparse_bucket import SparseBucket
from torch import nn

import dpfuse
from dpfuse.engine import collective
from dpfuse.engine.bucket import BucketState
from dpfuse.errors import DPFuseError

LEGAL = {
    BucketState.FREE: {"launch", "launch empty"},
    BucketState.FLIGHT: {"wait", "discard"},
    BucketState.LANDED: {"deliver", "discard"},
}
MOVES = {
    "launch": lambda bucket: bucket.launch(),
    "launch empty": lambda bucket: bucket.launch(empty=True),
    "wait": lambda bucket: bucket.wait(),
    "deliver": lambda bucket: bucket.deliver(),
    "discard": lambda bucket: bucket.discard(),
}


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Dense, sparse, complex and odd-sized parameters, so that there is padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 5, sparse=True)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return (self.second(torch.tanh(self.first(self.table(x)))) * self.turn).real


def plain(module, **options):
    return dpfuse.DataParallel(module, None, 1e-4, 1e-4, gradient_scale=0.5, **options)


def hooked(module):
    model = dpfuse.DistributedDataParallel(module, bucket_cap_mb=1e-4)
    model.register_comm_hook(None, halve)
    return model


def halve(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 0.5)
    return future


WRAPS = {
    "views": plain,
    "private": lambda module: plain(module, gradient_as_bucket_view=False),
    "bfloat16": lambda module: plain(module, wire_dtype=torch.bfloat16),
    "in place": lambda module: plain(module, gradient_as_bucket_view=False),
    "hooked": hooked,
}
every_kind = pytest.mark.parametrize("kind", WRAPS)


def wrapped(kind, monkeypatch):
    if kind == "in place":
        monkeypatch.setattr("dpfuse.engine.buckets.in_place_bucket.LARGE", 64)
    torch.manual_seed(0)
    return WRAPS[kind](Net())


def backward(model, step=0):
    model(torch.tensor([step % 6, (step + 2) % 6])).square().sum().backward()


def alone(step, times=1):
    """Half the sum of the gradients of these steps, without any wrapper."""
    torch.manual_seed(0)
    net = Net()
    for number in range(step, step + times):
        backward(net, number)
    return [param.grad * 0.5 for param in net.parameters()]


def assert_gradients(model, expected, kind):
    for (name, param), wanted in zip(model.module.named_parameters(), expected, strict=True):
        got = param.grad.to_dense() if param.grad.is_sparse else param.grad
        wanted = wanted.to_dense() if wanted.is_sparse else wanted
        if kind == "bfloat16":
            torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7, msg=name)
        else:
            torch.testing.assert_close(got, wanted, msg=name)


@every_kind
@pytest.mark.parametrize("state", BucketState, ids=lambda state: state.name)
def test_every_illegal_move_of_every_bucket_is_an_error(kind, state, monkeypatch):
    model = wrapped(kind, monkeypatch)
    backward(model)
    kinds = set()
    for bucket in model.reducer.buckets:
        kinds.add(type(bucket).__name__)
        if state is not BucketState.FREE:
            bucket.launch()
        if state is BucketState.LANDED:
            bucket.wait()
        for name, move in MOVES.items():
            if name not in LEGAL[state]:
                with pytest.raises(DPFuseError, match=f"is {state.name}, expected .*; this is a bug in dpfuse"):
                    move(bucket)
                assert bucket.state is state, f"{name} has moved it"
        if bucket.busy:
            bucket.discard()
        assert bucket.state is BucketState.FREE
    assert len(kinds) > 1


def poison(model):
    for bucket in model.reducer.buckets:
        if bucket._table is not None:
            for view in bucket._table.views:
                view.fill_(float("nan"))


@every_kind
@pytest.mark.parametrize("set_to_none", [True, False])
def test_poisoned_buffers_leave_no_trace(kind, set_to_none, monkeypatch):
    model = wrapped(kind, monkeypatch)
    for step in range(4):
        if set_to_none:
            model.zero_grad()
            poison(model)
        else:
            poison(model)
            model.zero_grad(set_to_none=False)  # views of the buffers are zeroed, and all that is private is poisoned
        backward(model, step)
        assert_gradients(model, alone(step), kind)


@every_kind
def test_what_was_accumulated_outlives_the_buckets_of_the_first_plan(kind, monkeypatch):
    """The plan changes after the first synchronised backward, whose gradients are accumulated on."""
    model = wrapped(kind, monkeypatch)
    backward(model, 0)
    first = [bucket._table.flat for bucket in model.reducer.buckets if bucket._table is not None]
    assert first == [], "the new buckets have no memory before they are used"
    with model.no_sync():
        backward(model, 1)
    poison(model)
    backward(model, 2)
    # Each average is averaged again with what was added to it.
    (a, b, c) = (alone(step) for step in range(3))
    expected = [(x.to_dense() / 2 + y.to_dense() + z.to_dense()) for x, y, z in zip(a, b, c, strict=True)]
    assert_gradients(model, expected, kind)


def test_a_view_of_a_buffer_of_the_first_plan_keeps_its_values():
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), None, 0, 0)
    model(torch.ones(2, 3)).sum().backward()
    kept = [param.grad for param in model.parameters()]
    values = [grad.clone() for grad in kept]
    for step in range(2):
        model.zero_grad()
        model(torch.full((2, 3), 3.0 + step)).sum().backward()
        assert all(map(torch.equal, kept, values))


class Done(dist.Work):
    """A work that holds nothing, as that of NCCL once somebody has waited for it."""

    def wait(self, timeout=None):
        return True


class Waiting:
    """Waits for each work as soon as it is sent, as whoever measures does on a stream of its own."""

    def __init__(self):
        self.rows = []

    def sent(self, tensors, work, *, is_last):
        self.rows += map(weakref.ref, tensors)


def test_what_a_sparse_bucket_sends_first_lives_until_it_has_landed(monkeypatch):
    model = plain(Net())
    model(torch.tensor([1])).sum().backward()
    bucket = next(bucket for bucket in model.reducer.buckets if isinstance(bucket, SparseBucket))
    monkeypatch.setattr(collective, "start_all_gather", lambda row, group: ([row.clone()], Done()))
    bucket.times = times = Waiting()
    bucket.launch()
    assert len(times.rows) == 1
    assert times.rows[0]() is not None
