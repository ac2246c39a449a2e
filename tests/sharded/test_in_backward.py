"""Parameters that are updated while backward runs."""

from __future__ import annotations

import copy
import time
from functools import partialmethod
from inspect import getgeneratorlocals
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.sharded.flat_params import FlatParams
from dpfuse.sharded.gradient import ShardedGradient
from dpfuse.sharded.in_backward import DEPTH
from tests.sharded.against_ddp import batch, bits_differ, network, trained_beside
from tests.sharded.test_elementwise import HOWS, KINDS, differing, with_marks
from tests.sharded.test_whole_tensors import ADAMW, halves

EXTRA = {"step_in_backward": True}
LATE = 0.2  # seconds by which rank 1 begins to send its updated part of a bucket later


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW", "Adagrad", "Lion"])
def test_two_ranks_have_the_bits_of_ddp(ranks, name):
    assert ranks(differing, *KINDS[name], 100, {"extra": EXTRA}) == [[], []]


PROGRAMS = ["accumulation", "groups and a scheduler", "float64", "bfloat16"]


@pytest.mark.parametrize("how", with_marks(PROGRAMS, ["groups and a scheduler"]))
def test_programs_have_the_bits_of_ddp(ranks, how):
    assert ranks(differing, *KINDS["Adam"], 60, HOWS[how] | {"extra": EXTRA}) == [[], []]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"check_finite": "raise"}, {"plan": "greedy"}], ids=str)
def test_options_of_the_wrapper(ranks, options):
    assert ranks(differing, *KINDS["AdamW"], 20, {"options": options, "extra": EXTRA}) == [[], []]


def in_order(rank, size):
    peer = lambda net: dpfuse.DataParallel(net, deterministic=True)  # noqa: E731
    return trained_beside(optim.AdamW, 30, peer=peer, extra=EXTRA, lr=0.01)[0]


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_more_ranks_have_the_bits_of_ordered_sums(ranks, size):
    assert ranks(in_order, size=size) == [[]] * size


def loss_of(model, step, rank):
    return model(batch(step, rank, torch.float32)).square().mean()


def clipped(rank, size, largest):
    """Weights that differ from those of a plain optimizer whose gradients are clipped by hand, and the norms."""
    peer = dpfuse.DataParallel(network(), comm_buffer_size=1, last_comm_buffer_size=1)
    model = dpfuse.DataParallel(network(), comm_buffer_size=1, last_comm_buffer_size=1)
    plain = optim.AdamW(peer.parameters(), lr=0.01)
    sharded = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.01, clip_by_last_norm=largest, **EXTRA)
    assert sharded.last_norm is None
    norm, norms = None, []
    for step in range(12):
        loss_of(peer, step, rank).backward()
        loss_of(model, step, rank).backward()
        now = peer.grad_norm()
        if norm is not None:
            factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
            torch._foreach_mul_([param.grad for param in peer.parameters()], factor)
        norm = now
        for optimizer in (plain, sharded):
            optimizer.step()
            optimizer.zero_grad()
        norms.append((sharded.last_norm / norm).item())
    pairs = zip(peer.parameters(), model.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs), norms


def test_gradients_are_clipped_by_the_norm_of_the_step_before(ranks):
    for largest, norms in ranks(clipped, 0.2):
        assert largest < 1e-5
        assert norms == pytest.approx([1.0] * 12, rel=1e-5)
    tight, loose = (ranks(clipped_weights, largest)[0] for largest in (0.01, 1e9))
    assert bits_differ(tight, loose)


def clipped_weights(rank, size, largest):
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1, clip_by_last_norm=largest, **EXTRA)
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.module.parameters()]


def tiny(rank, size):
    """The norm of four gradients, of which most ranks have none."""
    model = dpfuse.DataParallel(nn.Linear(2, 2, bias=False))
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1, clip_by_last_norm=1.0, **EXTRA)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return optimizer.last_norm.item()


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_without_elements_takes_part_in_the_norm(ranks, size):
    assert ranks(tiny, size=size) == [6.0] * size  # four times 3, squared


def memory(rank, size):
    """Bytes of all memory for gradients, over those of the views of torch's DDP."""
    net = nn.Sequential(*(nn.Linear(100, 100) for _ in range(120)))
    bytes_of_ddp = sum(param.nbytes for param in net.parameters())
    model = dpfuse.DataParallel(net, comm_buffer_size=0.04, last_comm_buffer_size=0.04, plan="greedy")
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, **EXTRA)
    most = 0
    for _ in range(4):
        model(torch.randn(3, 100)).sum().backward()
        tensors = [bucket.parts.buffer.flat for bucket in model._sync.grads.reducer.buckets]
        incoming = model._sync._dividing._incoming
        locals_of = (getgeneratorlocals(flying._stages) for flying in incoming._flying)  # none of one that has ended
        tensors += [*incoming._idle, *(found["memory"] for found in locals_of if found)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        assert all(isinstance(param.grad, ShardedGradient) for param in net.parameters())  # which have no memory
        most = max(most, sum(storage.nbytes() for storage in storages.values()))
        optimizer.step()
        optimizer.zero_grad()
    return most / bytes_of_ddp


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_few_buckets_have_memory_for_gradients(ranks, size):
    for share in ranks(memory, size=size):
        assert share <= 0.10


def muon(rank, size):
    """Steps after which the bits of Muon and AdamW differ from those of a step after backward."""
    seen = []
    for extra in ({}, EXTRA):
        model = dpfuse.DataParallel(network(), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
        inner, others = halves(model.module)
        groups = [{"params": inner, "optimizer_class": optim.Muon, "lr": 0.02}, {"params": others}]
        optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, groups, **ADAMW, **extra)
        weights = []
        for step in range(20):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights += [param.detach().clone() for param in model.module.parameters()]
        seen.append(weights)
    return bits_differ(*seen)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_whole_tensors_are_updated_too(ranks, size):
    assert ranks(muon, size=size) == [False] * size


class Recomputed(nn.Module):
    """Layers whose forward is computed again in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


def recomputed(rank, size):
    seen = []
    for extra in ({}, EXTRA):
        model = dpfuse.DataParallel(Recomputed(), comm_buffer_size=0.01, last_comm_buffer_size=0.01, plan="greedy")
        optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.01, **extra)
        for step in range(6):
            generator = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(3, 64, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append([param.detach() for param in model.module.parameters()])
    assert len(model.bucket_plan.buckets) > 2 * DEPTH
    return bits_differ(*seen)


def test_checkpointed_layers_are_computed_with_the_old_weights(ranks):
    assert ranks(recomputed) == [False, False]


def resumed(rank, size, folder):
    start = network()
    model = dpfuse.DataParallel(copy.deepcopy(start))
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.01, **EXTRA)

    def train(model, optimizer, steps):
        for step in steps:
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(model, optimizer, range(3))
    dpfuse.save_checkpoint(folder, model, optimizer, step=3)
    train(model, optimizer, range(3, 6))
    again = dpfuse.DataParallel(copy.deepcopy(start))
    other = dpfuse.ShardedOptimizer(again, optim.AdamW, lr=0.5, **EXTRA)
    dpfuse.load_checkpoint(folder, again, other)
    train(again, other, range(3, 6))
    return bits_differ([*model.module.parameters()], [*again.module.parameters()])


def test_a_checkpoint_resumes_with_the_same_bits(ranks, tmp_path):
    assert ranks(resumed, str(tmp_path)) == [False, False]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x, skip=False):
        x = torch.tanh(self.first(x))
        return self.last(x if skip else torch.tanh(self.middle(x)))


def wrapped(net=None, **options):
    return dpfuse.DataParallel(net or Branches(), comm_buffer_size=0.004, last_comm_buffer_size=0.004, **options)


def ready(model, **options):
    return dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.01, **EXTRA, **options)


X = torch.ones(2, 40)


def twice(rank):
    optimizer = ready(model := wrapped())
    model(X).sum().backward()
    model(X).sum().backward()
    optimizer.step()


def unused(rank):
    optimizer = ready(model := wrapped())
    for _ in range(2):
        model(X, skip=True).sum().backward()
        optimizer.step()


def read(rank):
    optimizer = ready(model := wrapped())
    model(X).sum().backward()
    with pytest.raises(DPFuseError, match=r"rank .: the gradient of parameter 'first.weight' was asked for"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(DPFuseError, match=r"rank .: the gradient of parameter 'that was passed' was asked for"):
        optimizer.full_gradient(model.module.last.weight)
    model.module.last.weight.grad.add_(1)


def scaled(rank):
    optimizer = ready(model := wrapped())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    scaler.step(optimizer)


def scaled_by_ours(rank):
    ready(model := wrapped())
    dpfuse.GradScaler("cpu", model=model)


def interrupted(rank):
    optimizer = ready(model := wrapped())
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def fail(_):
        raise KeyError("planted")

    handle = model.module.first.weight.register_hook(fail)
    with pytest.raises(KeyError):
        model(X).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    model(X).sum().backward()


def interrupted_and_stepped(rank):
    optimizer = ready(model := wrapped())
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    handle = model.module.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    with pytest.raises(DPFuseError, match="did not end"):
        model(X).sum().backward()
    optimizer.step()


def changed(rank):
    optimizer = ready(model := wrapped())
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.module.last = nn.Linear(40, 5)
    model(X).sum().backward()


def local(rank):
    optimizer = ready(model := wrapped())
    with model.no_sync():
        model(X).sum().backward()
    optimizer.step()


def old_graph(rank):
    optimizer = ready(model := wrapped())
    loss = model(X).sum()
    model.module.first.weight.grad = None
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


ERRORS = {
    "a second backward": (twice, DPFuseError, r"a second backward began before optimizer.step\(\)"),
    "a parameter that no rank uses": (unused, DPFuseError, "no rank has used parameter 'middle.bias' and 1 more"),
    "a gradient is read": (
        read,
        DPFuseError,
        "'last.weight': add_ was called on its gradient, expected no use",
    ),
    "torch's scaler": (scaled, DPFuseError, "with step_in_backward=True, backward has updated the parameters with it"),
    "our scaler": (scaled_by_ours, DPFuseError, "a GradScaler was made with step_in_backward=True of the model's"),
    "an interrupted backward": (interrupted, DPFuseError, "half updated: load a checkpoint into the model and the"),
    "a step after it": (interrupted_and_stepped, DPFuseError, r"step\(\) was called after a backward that did not end"),
    "a changed model": (changed, DPFuseError, "the parameters of the model have changed, with step_in_backward=True"),
    "a local backward": (local, DPFuseError, "that no synchronised backward of the wrapped model has averaged"),
    "an old graph": (old_graph, RuntimeError, "modified by an inplace operation"),
    "unused parameters": (
        lambda rank: ready(wrapped(find_unused_parameters=True)),
        ValueError,
        "with step_in_backward=True and find_unused_parameters=True",
    ),
    "accumulation in buckets": (
        lambda rank: ready(wrapped(accumulate_in_buckets=True)),
        ValueError,
        "with step_in_backward=True and accumulate_in_buckets=True",
    ),
    "a scaler before": (
        lambda rank: (dpfuse.GradScaler("cpu", model=(model := wrapped())), ready(model)),
        ValueError,
        "with step_in_backward=True and a GradScaler",
    ),
    "clipping without it": (
        lambda rank: dpfuse.ShardedOptimizer(wrapped(), optim.SGD, lr=1, clip_by_last_norm=1.0),
        ValueError,
        "clip_by_last_norm must be above 0 and needs step_in_backward=True, got 1.0 and False",
    ),
    "clipping by nothing": (
        lambda rank: ready(wrapped(), clip_by_last_norm=0.0),
        ValueError,
        "clip_by_last_norm must be above 0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.filterwarnings("ignore")
def test_mistakes_are_errors_on_every_rank(rank, size, name):
    action, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        action(rank)


def loaded_after_an_error(rank, size):
    """A checkpoint into model and optimizer makes an interrupted training go on."""
    optimizer = ready(model := wrapped())
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    handle = model.module.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    with pytest.raises(DPFuseError, match="half updated"):
        model(X).sum().backward()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.module.parameters()]


def test_a_checkpoint_mends_half_updated_parameters(ranks):
    one, other = ranks(loaded_after_an_error)
    assert not bits_differ(one, other)


START = FlatParams.start_gather


def start_late(params, rank):
    time.sleep(LATE * rank)
    return START(params)


def settled(rank):
    """A model and its optimizer after two steps, and a patch by which rank 1 sends its parts late."""
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(8)))
    optimizer = ready(model := wrapped(net, plan="greedy"))
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, mock.patch.object(FlatParams, "start_gather", partialmethod(start_late, rank))


def loaded_at_once(rank, size, forward):
    """Whether weights that are loaded after a failed backward change, since parts of updated ones come late."""
    model, optimizer, late = settled(rank)
    net = model.module
    saved = copy.deepcopy(net.state_dict())
    handle = net[0].weight.register_hook(lambda _: 1 / 0)
    with late:
        with pytest.raises(ZeroDivisionError):
            model(X).sum().backward()
        assert bits_differ([*net.state_dict().values()], [*saved.values()])
        if forward:
            model(X)  # completes on each rank what its peer waits for
        assert not optimizer._shards._gathers
        net.load_state_dict(saved)
        time.sleep(2 * LATE)
    handle.remove()
    return bits_differ([*net.state_dict().values()], [*saved.values()])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("forward", [False, True], ids=["at once", "after a forward"])
def test_no_part_comes_after_a_failed_backward_has_raised(ranks, forward):
    assert ranks(loaded_at_once, forward) == [False, False]


def read_between(rank, size):
    """Whether the weights between a backward and its step are others than those after it."""
    model, optimizer, late = settled(rank)
    with late:
        model(X).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    time.sleep(2 * LATE)
    optimizer.step()
    return bits_differ(before, [*model.parameters()])


def test_all_parts_have_come_when_backward_returns(ranks):
    assert ranks(read_between) == [False, False]
