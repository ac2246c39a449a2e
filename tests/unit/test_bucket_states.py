"""Buckets of every make in every state: illegal moves raise, and what a buffer held before leaves no trace."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.comm import collective
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.averaging import Averaging, Wire
from dpfuse.engine.bucket import FLIGHT, FREE, LANDED, BucketState
from dpfuse.engine.delivery import Private, RenewedViews
from dpfuse.engine.exchanges.all_reduce import AllReduce
from dpfuse.engine.exchanges.hooked import HookedBuffer, HookedRows
from dpfuse.engine.exchanges.in_place import InPlace
from dpfuse.engine.exchanges.ordered import OrderedSum
from dpfuse.engine.exchanges.sparse import SparseRows
from dpfuse.engine.feature import Feature
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.feeds.eager import Eager
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.protocols import PackStep
from dpfuse.engine.reading import ALL_WELL, Outcome
from dpfuse.engine.settings import SyncSettings
from dpfuse.errors import DPFuseError
from tests.unit.engine_inputs import make_report, surroundings

pytestmark = pytest.mark.usefixtures("group")

LEGAL = {FREE: {"send", "send_empty"}, FLIGHT: {"wait", "discard"}, LANDED: {"deliver", "discard"}}
MOVES = {
    "send": lambda bucket: bucket.send(Outcome(), complete=False),
    "send_empty": lambda bucket: bucket.send_empty(Outcome()),
    "wait": lambda bucket: bucket.wait(),
    "deliver": lambda bucket: bucket.deliver(),
    "discard": lambda bucket: bucket.discard(),
}


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
    "copied": lambda module: plain(module, gradient_as_bucket_view=False),
    "bfloat16": lambda module: plain(module, wire_dtype=torch.bfloat16),
    "in place": lambda module: plain(module, gradient_as_bucket_view=False),
    "eager": plain,
    "ordered": lambda module: plain(module, deterministic=True),
    "accumulating": lambda module: plain(module, accumulate_in_buckets=True),
    "hooked": hooked,
}
PARTS = {  # what some bucket of these wrappers has, besides the sparse one
    "private": RenewedViews,
    "copied": Private,
    "in place": InPlace,
    "eager": Eager,
    "ordered": OrderedSum,
    "accumulating": Accumulating,
    "hooked": HookedBuffer,
}
every_make = pytest.mark.parametrize("make", WRAPS)


def wrapped(make, monkeypatch):
    if make in ("in place", "eager"):
        folder = "exchanges.in_place" if make == "in place" else "feeds.eager"
        monkeypatch.setattr(f"dpfuse.engine.{folder}.LARGE", 64)
    if make in ("in place", "copied"):
        monkeypatch.setattr("dpfuse.engine.assembly.COUNTS_REFERENCES", False)
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
        parts |= {type(bucket.parts.feed), type(bucket.parts.exchange), type(bucket.parts.delivery)}
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


def one_bucket(group, params, make_report=None, **settings):
    plan = plan_buckets([ParamSpec(f"p{i}", tuple(param.shape), "float32") for i, param in enumerate(params)])
    return Assembly(group, surroundings(), SyncSettings(**settings), make_report=make_report).make(plan, params)


def send_and_deliver(bucket):
    bucket.send(Outcome(), complete=True)
    bucket.wait()
    bucket.deliver()


def test_padding_and_gaps_of_a_buffer_stay_zero(group):
    params = [nn.Parameter(torch.ones(n)) for n in (3, 1, 5)]
    (bucket,) = one_bucket(group, params, views=True, make_report=make_report)
    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, float("nan") if step else 1.0)
        send_and_deliver(bucket)
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
            view.fill_(float("nan"))


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


class Done(dist.Work):
    """A work that holds nothing, as that of NCCL after a wait."""

    def wait(self, timeout=None):
        return True


def test_what_a_sparse_bucket_sends_first_lives_until_it_has_landed(monkeypatch):
    model = plain(Net())
    model(torch.tensor([1])).sum().backward()
    bucket = next(b for b in model.reducer.buckets if isinstance(b.parts.exchange, SparseRows))
    sent = []

    def gather(row, group):
        sent.append(weakref.ref(row))
        return [row.clone()], Done()

    monkeypatch.setattr(collective, "start_all_gather", gather)
    MOVES["send"](bucket)
    assert len(sent) == 1
    assert sent[0]() is not None
    bucket.wait()
    assert sent[0]() is None


# --- What one bucket does with gradients ---


def two_params():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    for number, param in enumerate(params, 1):
        param.grad = torch.full_like(param, float(number))
    return params


def landed(bucket):
    """What the report of a landed bucket says, and which parameters were used."""
    report = bucket.parts.report
    return report.read(Outcome(), wait=True, gather=False), report.used_somewhere([0, 1])


@pytest.mark.parametrize("kind", ["views", "private", "copied"])
@pytest.mark.parametrize("waits", [True, False])
def test_what_is_discarded_leaves_no_gradient_in_an_unfinished_sum(group, kind, waits, monkeypatch):
    if kind == "copied":
        monkeypatch.setattr("dpfuse.engine.assembly.COUNTS_REFERENCES", False)
    params = two_params()
    (bucket,) = one_bucket(group, params, views=kind == "views", make_report=make_report)
    bucket.send(Outcome(), complete=True)
    if waits:
        bucket.wait()
    bucket.discard()
    expected = [[1.0] * 3, [2.0] * 5] if kind == "copied" else [[0.0] * 3, [0.0] * 5]
    assert [param.grad.tolist() for param in params] == expected
    assert landed(bucket) == (ALL_WELL, {0, 1}), "the report is still to be read"


class FailsOnce(AllReduce):
    """Fails when it is to start, before a collective or in it."""

    def __init__(self, group, inside):
        super().__init__(group, torch.device("cpu"))
        self.inside, self.failed = inside, False

    def start(self, flat):
        if not self.failed:
            self.failed = True
            if self.inside:
                return collective.all_reduce(None, self.group)
            raise RuntimeError("planted")
        return super().start(flat)


@pytest.mark.parametrize("inside", [True, False])
def test_an_exchange_that_does_not_start_leaves_a_free_bucket(group, inside):
    """Where the collective itself has raised, the ranks no longer fit together."""
    left = []
    params = two_params()
    plan = plan_buckets([ParamSpec(f"p{i}", tuple(param.shape), "float32") for i, param in enumerate(params)])
    (bucket,) = Assembly(group, surroundings(leave=left.append), make_report=make_report).make(plan, params)
    bucket.parts = replace(bucket.parts, exchange=FailsOnce(group, inside))
    with pytest.raises(TypeError if inside else RuntimeError) as caught:
        bucket.send(Outcome(), complete=True)
    assert left == ([caught.value] if inside else [])
    assert bucket.state is FREE
    send_and_deliver(bucket)
    assert [param.grad.tolist() for param in params] == [[1.0] * 3, [2.0] * 5]


def test_a_wait_that_was_interrupted_is_repeated(group, monkeypatch):
    params = two_params()
    (bucket,) = one_bucket(group, params, make_report=make_report)
    bucket.send(Outcome(), complete=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bucket.parts.report, "landed", interrupt)
        bucket.wait()
    assert bucket.state is FLIGHT
    bucket.wait()
    bucket.deliver()
    assert [param.grad.tolist() for param in params] == [[1.0] * 3, [2.0] * 5]


def interrupt(*arguments):
    raise KeyboardInterrupt


class NotedStep(PackStep):
    """Notes what it is asked for, and fails when told to."""

    def __init__(self, log, fails=""):
        self.log, self.fails = log, fails

    def before(self, arguments):
        self._note("before", arguments)
        arguments.scale *= 2

    def after(self, arguments):
        self._note("after", arguments)

    def delivered(self, untouched):
        self.log.append(("delivered", set(untouched)))

    def _note(self, name, arguments):
        self.log.append((name, list(arguments.missing), arguments.scale, arguments.report is not None))
        if self.fails == name:
            raise DPFuseError(f"planted {name}")


class Steps(Feature):
    """One such step for each bucket."""

    def __init__(self, **how):
        self.log, self.how = [], how

    def step(self, order, bucket, buffer, report):
        return NotedStep(self.log, **self.how)


def bucket_with_step(group, params, **how):
    feature = Steps(**how)
    plan = plan_buckets([ParamSpec(f"p{i}", tuple(param.shape), "float32") for i, param in enumerate(params)])
    assembly = Assembly(group, surroundings(), make_report=make_report, features=[feature])
    (bucket,) = assembly.make(plan, params)
    return bucket, feature.log


def test_a_step_changes_the_arguments_of_one_launch_and_hears_of_the_delivery(group):
    params = two_params()
    params[1].grad = None
    bucket, log = bucket_with_step(group, params)
    bucket.send(Outcome(), complete=False)
    bucket.wait()
    bucket.deliver({1})
    assert log == [("before", [1], 1.0, False), ("after", [1], 2.0, True), ("delivered", {1})]
    assert params[0].grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_step_that_fails_sends_zeros_and_tells_the_peers(group, fails):
    params = two_params()
    bucket, log = bucket_with_step(group, params, fails=fails)
    outcome = Outcome()
    bucket.send(outcome, complete=True)
    assert str(outcome.error) == f"planted {fails}"
    bucket.wait()
    assert bucket.parts.buffer.gradients.views[0].eq(0).all()
    assert not landed(bucket)[0].all_well
    bucket.discard()
    assert [entry[0] for entry in log] == ["before", "after"][: 1 + (fails == "after")]
    assert params[0].grad.tolist() == [1.0] * 3


def test_other_factors_hold_from_the_next_send_on_and_never_change_what_travels(group):
    params = two_params()
    (bucket,) = one_bucket(group, params, make_report=make_report)
    bucket.average_by(Averaging("bfloat16", 0.25))
    assert bucket.averaging == Averaging("float32", 0.25)
    send_and_deliver(bucket)
    assert [param.grad.tolist() for param in params] == [[0.25] * 3, [0.5] * 5]


def test_a_bucket_is_used_again_for_other_parameters_and_keeps_none_of_them_alive(group):
    (bucket,) = one_bucket(group, two_params())
    params = two_params()
    bucket.bind(params)
    send_and_deliver(bucket)
    first = weakref.ref(params[0])
    del params
    bucket.bind(())
    assert first() is None


def test_a_report_travels_alone_where_its_bucket_is_narrow(group):
    params = two_params()
    gradients, report = one_bucket(group, params, wire=Wire("bfloat16"), make_report=make_report)
    assert gradients.parts.report is None
    assert (report.params, report.averaging.dtype, report.averaging.pre_scale) == ([], "float32", 1.0)
    for bucket in (gradients, report):
        bucket.send(Outcome(), complete=True)
    for bucket in (gradients, report):
        bucket.wait()
    assert landed(report) == (ALL_WELL, {0, 1})
    for bucket in (gradients, report):
        bucket.deliver()
    assert [param.grad.tolist() for param in params] == [[1.0] * 3, [2.0] * 5]
