"""Weights whose class is no plain tensor, as quantised ones under adapters: what torch's class trains is trained."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse.weights.compared_tensors import ComparedTensors
from tests.distributed.model.tensor_classes import KINDS, Adapted, Bytes, Closed, Codes, Strict

FACES = {
    "paddle": partial(dpfuse.DataParallel, broadcast_buffers=True, check_training="raise"),
    "torch": partial(dpfuse.DistributedDataParallel, check_training="raise"),
}
SENT = ["shown", "nested", "operations", "attributes", "strict", "dispatched", "jagged"]


@pytest.fixture(params=FACES)
def face(request):
    return request.param


@contextmanager
def told():
    """The lines that the checks of weights log meanwhile, from a warning on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dpfuse.weights")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, net, rank, size, steps=3):
    """Take steps; each gradient of the adapters is the mean of those of all ranks over this rank's weights."""
    trained = {name: param for name, param in net.named_parameters() if param.requires_grad and name != "base"}
    optimizer = torch.optim.SGD(trained.values(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        expected = []
        for other in range(size):
            expected.append(torch.autograd.grad(net(batch(other, step)).square().mean(), list(trained.values())))
        model(batch(rank, step)).square().mean().backward()
        for param, grads in zip(trained.values(), zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(param.grad, sum(grads) / size, rtol=1e-4, atol=1e-6)
        optimizer.step()


def of_all_ranks(tensor, size):
    rows = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(rows, tensor.detach().contiguous())
    return rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize("as_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("kind", SENT)
def test_all_ranks_get_the_bits_of_rank_0(rank, size, face, kind, as_buffer):
    net = Adapted(kind, seed=rank, as_buffer=as_buffer)
    kept, first = type(net.base), Adapted(kind, seed=0, as_buffer=as_buffer).weight()
    model = FACES[face](net)
    assert torch.equal(net.weight(), first)
    train(model, net, rank, size)
    assert torch.equal(net.weight(), first)
    assert type(net.base) is kept


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["bytes", "state", "sparse", "quantised"])
def test_what_is_the_same_on_all_ranks_and_cannot_be_sent_trains_without_a_word(rank, size, face, kind):
    net = Adapted(kind, seed=7)
    first = net.weight()
    with told() as lines:
        train(FACES[face](net), net, rank, size, steps=70)
    assert torch.equal(net.weight(), first)
    assert not lines


@pytest.mark.parametrize("kind", ["bytes", "state"])
def test_data_is_not_sent_under_other_scales(rank, size, face, kind):
    with pytest.raises(dpfuse.DPFuseError, match=r"parameter 'base', a Bytes, has in \.state.*not sent") as caught:
        FACES[face](Adapted(kind, seed=rank))
    assert len(set(texts(str(caught.value), size))) == 1


def texts(text, size):
    found = [None] * size
    dist.all_gather_object(found, text)
    return found


def test_an_attribute_that_is_a_buffer_of_the_module_is_sent_with_it(rank, size, face):
    net = Adapted("bytes", seed=rank)
    net.register_buffer("scale", net.base.state)
    train(FACES[face](net), net, rank, size)
    assert torch.equal(net.weight(), Adapted("bytes", seed=0).weight())


def test_an_attribute_of_a_trained_parameter_is_its_own(rank, size, face):
    class Marked(nn.Parameter):
        pass

    net = nn.Linear(6, 2)
    net.weight = Marked(net.weight.detach())
    net.weight.residual = torch.full((3,), float(rank))
    model = FACES[face](net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert net.weight.residual[0] == rank
    assert torch.equal(*of_all_ranks(net.weight, size))


@pytest.mark.parametrize(
    ("kind", "name"), [("shown", "base.codes"), ("nested", "base.inner.codes"), ("bytes", "base.state")]
)
def test_without_a_first_exchange_a_warning_names_what_differs(rank, size, kind, name):
    net = Adapted(kind, seed=rank)
    model = dpfuse.DistributedDataParallel(net, init_sync=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_alone(model, net, rank)
    (text,) = [str(each.message) for each in caught if issubclass(each.category, dpfuse.WeightsWarning)]
    assert f"'{name}'" in text


def train_alone(model, net, rank, steps=70):
    optimizer = torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "kept", "place"), [("shown", Codes, "flatten"), ("operations", Closed, "copy_")], ids=["read", "written"]
)
@pytest.mark.ranks(timeout=20)
def test_a_class_that_fails_on_one_rank_is_an_error_on_all(rank, size, face, kind, kept, place):
    net = Adapted(kind, seed=rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "fails_in", place if rank == 1 else "")
        with pytest.raises((dpfuse.DPFuseError, ValueError), match="parameter 'base', a "):
            FACES[face](net)


@pytest.mark.ranks(timeout=20)
def test_what_fails_on_one_rank_after_the_model_was_sent_is_an_error_on_all(rank, size, face):
    def fails(*_args, **_kwargs):
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(ComparedTensors, "memories", fails)
        with pytest.raises((dpfuse.DPFuseError, MemoryError), match="no room"):
            FACES[face](nn.Linear(6, 2))


@pytest.mark.parametrize("kind", ["sparse", "quantised"])
def test_what_differs_and_cannot_be_sent_is_said_once_in_the_log(rank, size, face, kind):
    net = Adapted(kind, seed=rank)
    own = net.weight()
    with told() as lines:
        train_alone(FACES[face](net), net, rank, steps=3)
    assert torch.equal(net.weight(), own)
    assert len(lines) == (1 if rank == 0 else 0)
    assert all("parameter 'base'" in text and "differs between ranks" in text for text in lines)


@pytest.mark.parametrize("kind", ["trained", "trained, strict"])
def test_a_class_that_trains_has_the_gradients_of_torchs_class(rank, size, face, kind):
    found = []
    for wrap in (FACES[face], TorchDDP):
        net = Adapted(kind, seed=rank)
        model = wrap(net)
        for step in range(3):
            net.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            grad = net.base.grad
            with torch.no_grad():
                found.append((grad.inside if hasattr(grad, "inside") else grad).clone())
                (net.base.inside if hasattr(net.base, "inside") else net.base.plain()).add_(found[-1], alpha=-0.1)
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert torch.equal(ours, theirs)


def test_a_buffer_inside_another_class_follows_rank_0_while_training(rank, size, face):
    net = Adapted("shown", seed=0, as_buffer=True)
    model = FACES[face](net)
    for step in range(4):
        if step == 2:
            net.base.codes = torch.full_like(net.base.codes, rank)
        with torch.no_grad():
            net.base.scale.add_(rank + step)
        model(batch(rank, step)).square().mean().backward()
        assert torch.equal(*of_all_ranks(net.base.codes, size))
        assert torch.equal(*of_all_ranks(net.base.scale, size))


@pytest.mark.parametrize("kind", ["shown", "nested", "operations", "strict"])
def test_weights_are_sent_again_when_asked_for(rank, size, face, kind):
    net = Adapted(kind, seed=0)
    model = FACES[face](net)
    other = Adapted(kind, seed=rank + 3)
    net.base = other.base
    model.synchronize_weights()
    assert torch.equal(net.weight(), Adapted(kind, seed=3).weight())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["shown", "operations", "bytes", "sparse", "quantised"])
def test_frozen_weights_of_other_classes_lie_beside_a_sharded_optimizer(rank, size, face, kind):
    net = Adapted(kind, seed=0)
    net.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    net.third = nn.Parameter(torch.ones(3).as_subclass(Strict), requires_grad=False)
    model = FACES[face](net)
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert torch.equal(*of_all_ranks(net.up.weight, size))


def test_a_sharded_optimizer_names_a_parameter_whose_values_are_elsewhere(rank, size, face):
    model = FACES[face](Adapted("trained", seed=0))
    with pytest.raises(ValueError, match="parameter 'base', a Wrapped"):
        dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)


def test_a_state_dict_and_a_checkpoint_keep_attributes_beside_the_data(rank, size, face, tmp_path):
    net = Adapted("bytes", seed=1)
    model = FACES[face](net)
    first, state = net.weight(), net.base.state
    folder = texts(str(tmp_path), size)[0]
    dpfuse.save_checkpoint(folder, model, step=1)
    with torch.no_grad():
        net.base.data.zero_()
    dpfuse.load_checkpoint(folder, model)
    assert torch.equal(net.weight(), first)
    assert net.base.state is state
    assert type(net.base) is Bytes


def test_a_nested_parameter_that_trains_is_named(rank, size, face):
    net = Adapted("jagged", seed=0)
    net.base = nn.Parameter(KINDS["jagged"](torch.ones(8, 6)))
    with pytest.raises(ValueError, match="parameter 'base' is nested"):
        FACES[face](net)
