"""Buckets of every make in every state: illegal moves raise, and what a buffer held before leaves no trace."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.engine import collective
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.bucket import FLIGHT, FREE, LANDED, BucketState, Surroundings
from dpfuse.engine.exchanges.hooked import Hooked, HookedRows
from dpfuse.engine.exchanges.in_place import InPlace
from dpfuse.engine.exchanges.ordered import OrderedSum
from dpfuse.engine.exchanges.sparse import SparseRows
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.feeds.eager import Eager
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.report import ALL_WELL, Outcome, Reading, Report
from dpfuse.engine.window import Window
from dpfuse.errors import DPFuseError

LEGAL = {FREE: {"send", "send_empty"}, FLIGHT: {"wait", "discard"}, LANDED: {"deliver", "discard"}}
MOVES = {
    "send": lambda bucket: bucket.send(Outcome(), complete=False),
    "send_empty": lambda bucket: bucket.send_empty(Outcome()),
    "wait": lambda bucket: bucket.wait(),
    "deliver": lambda bucket: bucket.deliver(),
    "discard": lambda bucket: bucket.discard(),
}


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
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
    "eager": plain,
    "ordered": lambda module: plain(module, deterministic=True),
    "accumulating": lambda module: plain(module, accumulate_in_buckets=True),
    "hooked": hooked,
}
PARTS = {  # what some bucket of these wrappers has, besides the sparse one
    "in place": InPlace,
    "eager": Eager,
    "ordered": OrderedSum,
    "accumulating": Accumulating,
    "hooked": Hooked,
}
every_make = pytest.mark.parametrize("make", WRAPS)


def wrapped(make, monkeypatch):
    if make in ("in place", "eager"):
        folder = "exchanges.in_place" if make == "in place" else "feeds.eager"
        monkeypatch.setattr(f"dpfuse.engine.{folder}.LARGE", 64)
    torch.manual_seed(0)
    return WRAPS[make](Net())


def backward(model, step=0):
    model(torch.tensor([step % 6, (step + 2) % 6])).square().sum().backward()


def alone(step, times=1):
    """Half the sum of the gradients of these steps, without any wrapper."""
    torch.manual_seed(0)
    net = Net()
    for number in range(step, step + times):
        backward(net, number)
    return [param.grad * 0.5 for param in net.parameters()]


def assert_gradients(model, expected, make):
    for (name, param), wanted in zip(model.module.named_parameters(), expected, strict=True):
        got = param.grad.to_dense() if param.grad.is_sparse else param.grad
        wanted = wanted.to_dense() if wanted.is_sparse else wanted
        if make == "bfloat16":
            torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7, msg=name)
        else:
            torch.testing.assert_close(got, wanted, msg=name)


@every_make
@pytest.mark.parametrize("state", BucketState, ids=lambda state: state.name)
def test_every_illegal_move_of_every_bucket_is_an_error(make, state, monkeypatch):
    model = wrapped(make, monkeypatch)
    backward(model)
    parts = set()
    for bucket in model.reducer.buckets:
        parts |= {type(bucket.parts.feed), type(bucket.parts.exchange)}
        if state is not FREE:
            MOVES["send"](bucket)
        if state is LANDED:
            bucket.wait()
        for name, move in MOVES.items():
            if name not in LEGAL[state]:
                with pytest.raises(DPFuseError, match=f"is {state.name}, expected .*; this is a bug in dpfuse"):
                    move(bucket)
                assert bucket.state is state, f"{name} has moved it"
        if bucket.busy:
            bucket.discard()
        assert bucket.state is FREE
    assert (HookedRows if make == "hooked" else SparseRows) in parts
    assert make not in PARTS or PARTS[make] in parts


@pytest.mark.parametrize("moves", ["wait", "deliver", "discard", "send send", "send deliver", "send wait send"])
def test_an_illegal_move_names_the_bucket_its_parameters_and_its_state(group, moves):
    (bucket,) = one_bucket(group, [nn.Parameter(torch.ones(3))])
    *legal, illegal = moves.split()
    for move in legal:
        MOVES[move](bucket)
    text = rf"^bucket 0 \(1.14e-05 MB\) with parameters p0… is {bucket.state.name}, expected \w+; this is a bug in dpf"
    with pytest.raises(DPFuseError, match=text):
        MOVES[illegal](bucket)


def one_bucket(group, params, **options):
    plan = plan_buckets([ParamSpec(f"p{i}", tuple(param.shape), "float32") for i, param in enumerate(params)])
    assembly = Assembly(group, Surroundings(None, []), **options)
    return assembly.make(plan, params)


def with_report(group, size=2):
    """Arguments of `one_bucket` for a report of this rank, among so many."""

    class Group:
        def rank(self):
            return 0

        def size(self):
            return size

    def make_report(count, dtype, device):
        return Report(Group(), count, [], Window(), dtype, device)

    return {"make_report": make_report}


def test_padding_and_gaps_of_a_buffer_stay_zero(group):
    params = [nn.Parameter(torch.ones(n)) for n in (3, 1, 5)]
    (bucket,) = one_bucket(group, params, views=True, **with_report(group))
    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, float("nan") if step else 1.0)
        bucket.send(Outcome(), complete=True)
        bucket.wait()
        bucket.deliver()
        flat = bucket.parts.buffer.flat
        filled = torch.zeros_like(flat, dtype=torch.bool)
        for slot in bucket.plan.slots:
            filled[slot.offset : slot.offset + slot.numel] = True
        assert flat.numel() - bucket.parts.report.numel == bucket.plan.numel
        filled[bucket.plan.numel :] = True  # the report
        assert (flat[~filled] == 0).all()
        assert (~filled).sum() == 1 + 3 + 3


def poison(model):
    for bucket in model.reducer.buckets:
        for view in bucket.parts.buffer.table.views:
            view.fill_(255 if view.dtype == torch.uint8 else float("nan"))


@every_make
@pytest.mark.parametrize("set_to_none", [True, False])
def test_poisoned_buffers_leave_no_trace(make, set_to_none, monkeypatch):
    model = wrapped(make, monkeypatch)
    for step in range(4):
        if set_to_none:
            model.zero_grad()
            poison(model)
        else:
            poison(model)
            model.zero_grad(set_to_none=False)  # views of the buffers are zeroed, and all that is private is poisoned
        backward(model, step)
        assert_gradients(model, alone(step), make)


@every_make
def test_what_was_accumulated_outlives_the_buckets_of_the_first_plan(make, monkeypatch):
    """The plan changes after the first synchronised backward, whose gradients are accumulated on."""
    model = wrapped(make, monkeypatch)
    backward(model, 0)
    with model.no_sync():
        backward(model, 1)
    if make != "accumulating":  # else it has its gradients there
        unused = [bucket for bucket in model.reducer.buckets if not holds_gradients(bucket)]
        for bucket in unused:
            bucket.parts.buffer.clear()
            for view in bucket.parts.buffer.table.views:
                view.fill_(float("nan"))
    backward(model, 2)
    # Each average is averaged again with what was added to it.
    (a, b, c) = (alone(step) for step in range(3))
    expected = [(x.to_dense() / 2 + y.to_dense() + z.to_dense()) for x, y, z in zip(a, b, c, strict=True)]
    assert_gradients(model, expected, make)


def holds_gradients(bucket):
    """Whether some `.grad` lies in its buffer, which may be that of a bucket of the first plan."""
    low, high = bucket.parts.buffer.table.storage_range
    grads = [param.grad for param in bucket.params if param.grad is not None and not param.grad.is_sparse]
    return any(low <= grad.data_ptr() < high for grad in grads)


def test_a_view_of_a_buffer_of_the_first_plan_keeps_its_values():
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), None, 0, 0)
    model(torch.ones(2, 3)).sum().backward()
    first = [param.grad for param in model.parameters()]
    values = [grad.clone() for grad in first]
    kept = [
        not any(holds_gradients(bucket) for bucket in model.reducer.buckets if param in set(bucket.params))
        for param in model.parameters()
    ]
    for step in range(2):
        model.zero_grad()
        model(torch.full((2, 3), 3.0 + step)).sum().backward()
        assert all(torch.equal(grad, value) for grad, value, k in zip(first, values, kept, strict=True) if k)
