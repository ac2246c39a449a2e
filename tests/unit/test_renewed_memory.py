"""Private gradients lie in a buffer, which gets new memory while a program holds one: what holds one, and what not."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse.engine.delivery import Private, RenewedViews
from dpfuse.engine.renewed_memory import RenewedMemory

pytestmark = pytest.mark.usefixtures("group")

LARGE = 256  # width of a layer whose weight is packed as soon as it is ready
HUGE = 740  # of one whose weight travels in its own memory, beside a buffer of the others
SMALL = 8


@pytest.fixture
def renewals(monkeypatch):
    """Counts how often a buffer got new memory."""
    counted = []
    note = RenewedMemory._note

    def noted(memory):
        counted.append(memory)
        note(memory)

    monkeypatch.setattr(RenewedMemory, "_note", noted)
    return counted


def net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def trained(width, wrap=dpfuse.DistributedDataParallel, **options):
    model = wrap(net(width), **options)
    for step in range(3):
        backward(model, width, step)
    return model


def backward(model, width, step, *, set_to_none=True):
    model.zero_grad(set_to_none=set_to_none)
    model(torch.full((2, width), step / 10 + 0.1)).sum().backward()


def saved_by_a_graph(grad):
    """The graph is all that holds it: its backward gives the gradient back."""
    factor = torch.ones((), requires_grad=True)
    product = (grad * factor).sum()
    return lambda: torch.autograd.grad(product, factor, retain_graph=True)[0]


def kept_by_a_thread(grad):
    started, ended = threading.Event(), threading.Event()
    sums = []

    def run(grad=grad):
        started.set()
        ended.wait(20)
        sums.append(grad.clone())

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(20)

    def read():
        ended.set()
        thread.join(20)
        return sums[0]

    return read


HOLDS = {
    "a name": lambda grad: grad,
    "a list": lambda grad: [grad][0],
    "a view": lambda grad: grad.view(-1)[:3],
    "detached": lambda grad: grad.detach(),
    ".data": lambda grad: grad.data,
    "an array of numpy": lambda grad: grad.numpy(),
    "a part of an array": lambda grad: grad.numpy()[1:],
    "dlpack": lambda grad: torch.utils.dlpack.from_dlpack(grad),
    "its storage": lambda grad: torch.tensor([]).set_(grad.untyped_storage(), grad.storage_offset(), (4,)),
    "a graph": saved_by_a_graph,
    "a thread": kept_by_a_thread,
    "another .grad": lambda grad: holder_of(grad).grad,
    "an unpickled view of shared memory": lambda grad: grad.share_memory_(),
}


def holder_of(grad):
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def value_of(held):
    held = held() if callable(held) else held
    return torch.as_tensor(held).clone()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [SMALL, LARGE, HUGE])
@pytest.mark.parametrize("hold", HOLDS)
def test_what_a_program_holds_is_never_written_again(hold, width, renewals):
    model, theirs = trained(width), trained(width, TorchDDP)
    renewals.clear()
    held = HOLDS[hold](model.module[2].weight.grad)
    expected = HOLDS[hold](theirs.module[2].weight.grad)
    for step in range(3, 6):
        backward(model, width, step)
        backward(theirs, width, step)
        assert_alike(model, theirs)
    renewed = int(width != HUGE)
    assert len(renewals) == renewed, "the first backward gave the buffer new memory, which nothing holds"
    assert torch.equal(value_of(held), value_of(expected))


def assert_alike(model, theirs):
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)


def test_gradients_that_travel_in_place_do_not_lie_in_the_buffer():
    model = trained(HUGE)
    buffers = [bucket.parts.buffer for bucket in model.reducer.buckets]
    outside = {name for name, _ in model.module.named_parameters()}.difference(*(buffer.names for buffer in buffers))
    assert outside == {"0.weight", "2.weight"}
    for buffer in buffers:
        low, high = buffer.table.storage_range
        assert all(low <= param.grad.data_ptr() < high for param in buffer.params)
    kinds = {bool(bucket.parts.buffer.params): type(bucket.parts.delivery) for bucket in model.reducer.buckets}
    assert kinds == {True: RenewedViews, False: Private}


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_loops_keep_the_memory(optimizer, set_to_none, width, renewals):
    model, theirs = trained(width), trained(width, TorchDDP)
    assert {type(bucket.parts.delivery) for bucket in model.reducer.buckets} == {RenewedViews}
    stepping = [optimizer(one.parameters(), lr=0.01) for one in (model, theirs)]
    renewals.clear()
    addresses = []
    for step in range(3, 7):
        for one, each in zip((model, theirs), stepping, strict=True):
            backward(one, width, step, set_to_none=set_to_none)
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            each.step()
        assert_alike(model, theirs)
        addresses.append([param.grad.data_ptr() for param in model.parameters()])
    assert renewals == []
    assert all(each == addresses[0] for each in addresses)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_accumulated_gradients_stay_where_they_are(width, renewals):
    model, theirs = trained(width), trained(width, TorchDDP)
    renewals.clear()
    for one in (model, theirs):
        for step in range(4):  # with the gradients of the steps before, which are averaged again
            one(torch.full((2, width), step / 10 + 0.1)).sum().backward()
    assert renewals == []
    assert_alike(model, theirs)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_gradient_that_a_program_holds_and_adds_to_stays_that_object(width):
    """As with torch's class: without zero_grad, the name and `.grad` are one tensor, which gets the mean."""
    model, theirs = trained(width), trained(width, TorchDDP)
    for one in (model, theirs):
        kept = one.module[0].weight.grad
        for step in range(2):
            one(torch.full((2, width), step / 10 + 0.1)).sum().backward()
        assert one.module[0].weight.grad is kept
    assert_alike(model, theirs)


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_memory_that_a_program_assigned_gets_the_mean(width, zeroed):
    model, theirs = trained(width), trained(width, TorchDDP)
    for one in (model, theirs):
        given = torch.zeros_like(one.module[2].weight)
        for step in range(3):
            one.zero_grad()
            one.module[2].weight.grad = given.zero_() if zeroed else given
            one(torch.full((2, width), step / 10 + 0.1)).sum().backward()
            assert one.module[2].weight.grad is given
    assert_alike(model, theirs)


@pytest.mark.parametrize("replacement", ["another", "none", "moved"])
def test_what_another_hook_replaces_after_the_bucket_was_sent_gets_the_mean(replacement, renewals):
    """A hook of the first layer changes the gradient of the last one, whose bucket is on its way."""
    models = [dpfuse.DistributedDataParallel(net(SMALL), bucket_cap_mb=1e-4), TorchDDP(net(SMALL), bucket_cap_mb=1e-4)]
    for model in models:
        first, last = model.module[0].weight, model.module[4].weight

        def replace(_grad, last=last):
            if replacement == "another":
                last.grad = torch.zeros_like(last)
            elif replacement == "moved":
                last.grad.data = torch.zeros_like(last)
            else:
                last.grad = None

        for step in range(3):
            backward(model, SMALL, step)
        first.register_hook(replace)
        backward(model, SMALL, 3)
    assert_alike(*models)


def test_copies_and_pickles_have_memory_of_their_own(renewals):
    model = trained(SMALL)
    before = [param.grad.clone() for param in model.parameters()]
    renewals.clear()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    renewals.clear()
    for twin in twins:
        for step in range(3):
            backward(twin, SMALL, step + 3)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, value)
    backward(model, SMALL, 5)
    assert_alike(model, twins[0])
    assert_alike(*twins)


def test_what_torch_save_stores_of_a_gradient_comes_back():
    """The bytes of the whole bucket are stored, as of any tensor that shares its memory."""
    model = trained(SMALL)
    stored = io.BytesIO()
    torch.save(model.module[0].weight.grad, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored), model.module[0].weight.grad)


def test_gradients_are_ordinary_tensors():
    model = trained(SMALL)
    for param in model.parameters():
        grad = param.grad
        assert type(grad) is torch.Tensor
        assert not grad._is_view()
        assert grad.is_contiguous()
        assert not grad.requires_grad
    first, second = (param.grad for param in list(model.parameters())[:2])
    version = second._version
    first.add_(1)
    assert second._version == version, "a graph that saved one gradient does not mind writes to another"


@pytest.mark.parametrize("width", [SMALL, HUGE])
def test_without_memory_for_a_new_buffer_the_backward_fails_and_the_next_one_works(width, monkeypatch):
    model = trained(width)
    held = model.module[2].bias.grad
    buffer = model.reducer.buckets[0].parts.buffer
    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(type(buffer), "renew", lambda buffer: (_ for _ in ()).throw(RuntimeError("no memory is left")))
        with pytest.raises(dpfuse.DPFuseError, match="no memory is left"):
            model(torch.ones(2, width)).sum().backward()
    theirs = trained(width, TorchDDP)
    for one in (model, theirs):
        backward(one, width, 5)
    assert_alike(model, theirs)
    del held
