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
from dpfuse.engine.events import Events, Watcher
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
from dpfuse.engine.report import ALL_WELL, Outcome, Reading
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


@pytest.mark.parametrize("moves", ["wait", "deliver", "discard", "send send", "send deliver", "send wait send"])
def test_an_illegal_move_names_the_bucket_its_parameters_and_its_state(group, moves):
    (bucket,) = one_bucket(group, [nn.Parameter(torch.ones(3))])
    *legal, illegal = moves.split()
    for move in legal:
        MOVES[move](bucket)
    text = rf"^bucket 0 \(1.14e-05 MB\) with parameters p0… is {bucket.state.name}, expected \w+; this is a bug in dpf"
    with pytest.raises(DPFuseError, match=text):
        MOVES[illegal](bucket)


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
    poison_buckets(model.reducer.buckets)


def poison_buckets(buckets):
    for bucket in buckets:
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


@every_make
def test_what_was_accumulated_outlives_the_buckets_of_the_first_plan(make, monkeypatch):
    """The plan changes after the first synchronised backward, whose gradients are accumulated on."""
    model = wrapped(make, monkeypatch)
    backward(model, 0)
    with model.no_sync():
        backward(model, 1)
    if make != "accumulating":  # else the gradients are there
        poison_buckets(bucket for bucket in model.reducer.buckets if not holds_gradients(bucket))
    backward(model, 2)
    # Each average is averaged again with what was added to it.
    (a, b, c) = (alone(step) for step in range(3))
    expected = [(x.to_dense() / 2 + y.to_dense() + z.to_dense()) for x, y, z in zip(a, b, c, strict=True)]
    assert_gradients(model, expected, make)


def holds_gradients(bucket):
    """Whether some `.grad` lies in its buffer, which may be that of a bucket of the first plan."""
    grads = [param.grad for param in bucket.params if param.grad is not None and not param.grad.is_sparse]
    return any(lies_in(grad, [bucket]) for grad in grads)


def lies_in(grad, buckets):
    """Whether a gradient lies in the buffer of one of these buckets."""
    ranges = [bucket.parts.buffer.table.storage_range for bucket in buckets]
    return any(low <= grad.data_ptr() < high for low, high in ranges)


class Mixed(nn.Module):
    """Becomes ready in another order than that of its registration."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x):
        return self.last(self.first(x))


def test_a_view_of_a_buffer_of_the_first_plan_keeps_its_values_where_the_plan_has_changed():
    model = dpfuse.DataParallel(Mixed(), None, 4e-5, 4e-5)
    planned = [bucket.params for bucket in model.bucket_plan.buckets]
    model(torch.ones(2, 3)).sum().backward()
    kept = [index for index, param in enumerate(model.parameters()) if not lies_in(param.grad, model.reducer.buckets)]
    rebuilt = [bucket.params for bucket in model.bucket_plan.buckets]
    same = {index for bucket in rebuilt if bucket in planned for index in bucket}
    assert 0 < len(kept) == 4 - len(same), "a bucket that is still the same has kept its buffer"
    views = [param.grad for param in model.parameters()]
    values = [grad.clone() for grad in views]
    for step in range(2):
        model.zero_grad()
        model(torch.full((2, 3), 3.0 + step)).sum().backward()
        assert all(torch.equal(views[index], values[index]) for index in kept)


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


def test_a_bucket_delivers_the_mean_and_tells_that_all_is_well(group):
    params = two_params()
    (bucket,) = one_bucket(group, params, scale=0.5, make_report=make_report)
    outcome = Outcome()
    bucket.send(outcome, complete=True)
    bucket.wait()
    assert landed(bucket) == (ALL_WELL, {0, 1})
    bucket.deliver()
    assert [param.grad.tolist() for param in params] == [[0.5] * 3, [1.0] * 5]
    assert outcome == Outcome()


@pytest.mark.parametrize("views", [True, False])
def test_an_empty_bucket_sends_zeros_and_touches_no_gradient(group, views):
    params = two_params()
    (bucket,) = one_bucket(group, params, views=views, make_report=make_report)
    send_and_deliver(bucket)
    bucket.send_empty(Outcome(failed=True))
    bucket.wait()
    assert bucket._sent is not bucket.parts.buffer.flat
    assert bucket._sent[: bucket.plan.numel].eq(0).all()
    assert landed(bucket) == (Reading(any_failed=True, any_well=False, rank=0), {0, 1})
    bucket.discard()
    assert [param.grad.tolist() for param in params] == [[1.0] * 3, [2.0] * 5]


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


@pytest.mark.parametrize("views", [True, False])
def test_a_missing_gradient_sends_zeros_and_gets_the_mean_unless_no_rank_has_used_it(group, views):
    for untouched, expected in ((set(), [0.0] * 5), ({1}, None)):
        params = two_params()
        params[1].grad = None
        (bucket,) = one_bucket(group, params, views=views, make_report=make_report)
        outcome = Outcome()
        bucket.send(outcome, complete=False)
        assert (outcome.missing, bucket.missing) == ((1,), [1])
        bucket.wait()
        assert landed(bucket) == (ALL_WELL, {0})
        bucket.deliver(untouched)
        assert params[0].grad.tolist() == [1.0] * 3
        assert (params[1].grad is None) if expected is None else (params[1].grad.tolist() == expected)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("left", [True, False], ids=["a gradient is left", "no gradient"])
def test_a_frozen_parameter_sends_zeros_and_keeps_what_it_has(group, views, left):
    params = two_params()
    kept = params[1].grad = torch.full((5,), 7.0) if left else None
    (bucket,) = one_bucket(group, params, views=views, make_report=make_report)
    outcome = Outcome(frozen=frozenset([1]))
    bucket.send(outcome, complete=True)
    assert (outcome.missing, bucket.missing) == ((), [])
    bucket.wait()
    assert bucket.parts.buffer.gradients.views[1].eq(0).all()
    bucket.deliver()
    assert params[0].grad.tolist() == [1.0] * 3
    assert params[1].grad is kept
    assert kept is None or kept.eq(7).all()


@pytest.mark.parametrize("views", [True, False])
def test_a_gradient_that_does_not_fit_sends_zeros_and_tells_the_peers(group, views):
    params = two_params()
    params[1].data = torch.ones(4)
    params[1].grad = torch.ones(4)
    (bucket,) = one_bucket(group, two_params(), views=views, make_report=make_report)
    bucket.bind(params)
    outcome = Outcome()
    bucket.send(outcome, complete=True)
    assert isinstance(bucket.error, ValueError)
    assert outcome.error is bucket.error
    bucket.wait()
    assert bucket.parts.buffer.gradients.flat.eq(0).all() or not views
    assert landed(bucket)[0] == Reading(any_failed=True, any_well=False, rank=0)
    bucket.discard()
    assert params[0].grad.tolist() == [1.0] * 3, "no view was handed out"


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


class NotedWatcher(Watcher):
    """Notes what watchers are told."""

    def __init__(self):
        self.log = []

    def bucket_sent(self, tensors, work, *, is_last):
        self.log.append(("sent", len(tensors), is_last))

    def bucket_waited_for(self, flat):
        self.log.append(("wait begins", flat.numel()))

    def bucket_landed(self):
        self.log.append(("wait ends",))


@pytest.mark.parametrize("empty", [True, False])
def test_watchers_are_told_how_a_bucket_travels(group, empty):
    watcher = NotedWatcher()
    params = two_params()
    plan = plan_buckets([ParamSpec(f"p{i}", tuple(param.shape), "float32") for i, param in enumerate(params)], 0, 0)
    events = Events()
    first, last = Assembly(group, surroundings(events), make_report=make_report).make(plan, params)
    events.add(watcher)  # at any time
    for bucket in (first, last):
        MOVES["send_empty" if empty else "send"](bucket)
    for bucket in (first, last):
        bucket.wait()
    sizes = [bucket.parts.buffer.flat.numel() for bucket in (first, last)]
    waits = [entry for size in sizes for entry in (("wait begins", size), ("wait ends",))]
    assert watcher.log == [("sent", 1, False), ("sent", 1, True), *waits]


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
