"""Buffers that a program writes between a backward and the next forward: on some ranks only, or on all of them."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from tests.distributed.buffers.test_after_backward import of_rank_0, state_of
from tests.operations import Operations

FACES = {
    "dp": lambda net, **options: dpfuse.DataParallel(net, broadcast_buffers=True, **options),
    "ddp": dpfuse.DistributedDataParallel,
}


class Net(nn.Module):
    """The gradient of the layer shows which center a forward has used."""

    def __init__(self, writes=False):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.writes = writes

    def forward(self, x, fails=False):
        if fails:
            raise KeyError("planted")
        out = self.layer(x - self.center)
        if self.writes and self.training:
            self.center.lerp_(x.detach().mean(0), 0.25)
            self.count += 1
        return out.sum() + self.norm(out).square().sum()


def wrapped(face, **options):
    torch.manual_seed(0)
    return FACES[face](Net(**options)) if face in FACES else TorchDDP(Net(**options))


def batch(rank, number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def assign(net, value):
    net.center = torch.full((4,), value)


def register(net, value):
    net.register_buffer("center", torch.full((4,), value))


def load(net, value):
    net.load_state_dict({**net.state_dict(), "center": torch.full((4,), value)})


WRITES = {
    "fill": lambda net, value: net.center.fill_(value),
    "a view": lambda net, value: net.center[1:].add_(value),
    "detached": lambda net, value: net.center.detach().fill_(value),
    "a new tensor": assign,
    "registered again": register,
    "load_state_dict": load,
    "data": lambda net, value: net.center.data.fill_(value),
    "other data": lambda net, value: setattr(net.center, "data", torch.full((4,), value)),
    "NumPy": lambda net, value: net.center.numpy().fill(value),
}
LATE = ("data", "other data", "NumPy")  # leave no trace, so they are found in the first steps, and in one out of 64


def train(model, rank, steps, write, window=1):
    """Return the gradient of each step, and the texts of all warnings."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            model.zero_grad()
            write(model, step)
            for number in range(window):
                with model.no_sync() if number < window - 1 else nullcontext():
                    model(batch(rank, 10 * step + number)).backward()
            found.append(model.module.layer.weight.grad.clone())
    return found, [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def beside_torch(rank, face, steps, write, window=1, **options):
    expected, _ = train(wrapped("torch", **options), rank, steps, write, window)
    got, texts = train(wrapped(face, **options), rank, steps, write, window)
    equal = [torch.allclose(ours, other, rtol=1e-4, atol=1e-4) for ours, other in zip(got, expected, strict=True)]
    return equal, texts


def told(rank, step, wrote, others):
    return (
        f"rank {rank}: after synchronised backward {step} and before the next forward, buffer 'center' was written on "
        f"rank {wrote}, and not on rank {others}."
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("face", FACES)
def test_one_step_is_late_and_later_ones_are_as_with_torch(rank, size, face, way):
    first = 1 if way in LATE else 3

    def write(model, step):
        if rank == 0 and step >= first:
            WRITES[way](model.module, float(step))

    equal, texts = beside_torch(rank, face, 7, write)
    assert equal == [step != first for step in range(7)]
    (text,) = texts
    assert text.startswith(told(rank, first, 0, 1))


@pytest.mark.parametrize("face", FACES)
def test_a_single_write_is_told_too(rank, size, face):
    def write(model, step):
        if rank == 0 and step == 4:
            model.module.center.fill_(2.0)

    equal, texts = beside_torch(rank, face, 6, write)
    assert equal == [step != 4 for step in range(6)]
    assert [text.startswith(told(rank, 4, 0, 1)) for text in texts] == [True]


@pytest.mark.parametrize(("writers", "others"), [((0,), "1, 2"), ((1,), "0, 2"), ((0, 2), "1")], ids=str)
@pytest.mark.ranks(size=3)
def test_the_ranks_that_wrote_are_named(rank, size, writers, others):
    def write(model, step):
        if rank in writers and step >= 2:
            model.module.center.fill_(step + 10 * rank)

    equal, texts = beside_torch(rank, "ddp", 6, write)
    assert equal == [step != 2 for step in range(6)]
    assert [text.startswith(told(rank, 2, ", ".join(map(str, writers)), others)) for text in texts] == [True]


@pytest.mark.parametrize("face", FACES)
def test_a_buffer_that_forwards_write_too(rank, size, face):
    def write(model, step):
        if rank == 0 and step >= 2:
            model.module.center.mul_(3.0)

    equal, texts = beside_torch(rank, face, 6, write, writes=True)
    assert equal == [step != 2 for step in range(6)]
    assert len(texts) == 1


@pytest.mark.parametrize("face", FACES)
def test_in_windows_the_first_forward_sends(rank, size, face):
    def write(model, step):
        if rank == 0 and step >= 2:
            model.module.center.fill_(float(step))

    equal, texts = beside_torch(rank, face, 6, write, window=3, writes=True)
    assert equal == [step != 2 for step in range(6)]
    assert len(texts) == 1


def own_values(model, rank, step):
    model.module.center.copy_(batch(rank, step).mean(0))


def rollout(model, rank, step):
    """Its forward, in training mode, takes the values of the batch over."""
    with torch.no_grad():
        model(batch(rank, 77 + step))


def three_alike(model, rank, step):
    model.module.center.fill_(float(step + 10 * (rank == 2)))


def told_of_values(rank, step, ranks, apart):
    return (
        f"rank {rank}: after synchronised backward {step} and before the next forward, buffer 'center' was written on "
        f"rank {ranks}, with other values on rank {apart} than on rank 0. If that forward has read it"
    )


@pytest.mark.parametrize("face", FACES)
def test_what_all_ranks_write_with_other_values_is_told_and_sent_from_then_on(rank, size, face):
    def write(model, step):
        if step >= 2:
            own_values(model, rank, step)

    equal, texts = beside_torch(rank, face, 7, write)
    assert [each for step, each in enumerate(equal) if step not in (2, 3)] == [True] * 5
    assert not all(equal)
    (text,) = texts
    assert text.startswith((told_of_values(rank, 2, "0, 1", "1"), told_of_values(rank, 3, "0, 1", "1")))


@pytest.mark.parametrize("face", FACES)
def test_what_forwards_without_gradients_write_stays_as_with_torch(rank, size, face):
    def write(model, step):
        if step >= 1:  # before the first forward of all we send buffers
            rollout(model, rank, step)

    assert beside_torch(rank, face, 7, write, writes=True) == ([True] * 7, [])


@pytest.mark.parametrize("program", ["one rank", "all ranks"])
@pytest.mark.parametrize("face", FACES)
def test_training_in_eval_mode_is_told_of_what_it_cannot_send(rank, size, face, program):
    model = wrapped(face)
    model.eval()

    def write(model, step):
        if program == "all ranks":
            own_values(model, rank, step)
        elif rank == 0:
            model.module.center.fill_(float(step + 1))

    _, (text,) = train(model, rank, 5, write)
    assert "buffer 'center' was written on rank 0" in text
    assert (
        "sent before forwards in training mode only, and this one was in eval mode. To be right in both, write" in text
    )


@pytest.mark.ranks(size=3)
def test_the_ranks_with_other_values_are_named(rank, size):
    equal, texts = beside_torch(rank, "ddp", 6, lambda model, step: three_alike(model, rank, step))
    assert equal[3:] == [True] * 3
    (text,) = texts
    assert text.startswith((told_of_values(rank, 1, "0, 1, 2", "2"), told_of_values(rank, 2, "0, 1, 2", "2")))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("counts", [(3, 1), (1, 4), (2, 0), (0, 1)], ids=str)
def test_afterwards_ranks_may_still_have_windows_of_other_lengths(rank, size, face, counts):
    model = wrapped(face, writes=True)
    for step in range(6):
        model.zero_grad()
        count = 1 if step < 2 else counts[(rank + step) % 2]
        model.set_gradient_weight(count)
        if rank == 0:
            model.module.center.fill_(float(step))
        late = pytest.warns(UserWarning, match="buffer 'center' was written on rank 0, and not on rank 1")
        with late if step == 1 else nullcontext():
            for number in range(count):
                with model.no_sync() if number < count - 1 else nullcontext():
                    if step % 2 == rank:
                        model.eval()
                        model(batch(rank, 99))
                        model.train()
                    model(batch(rank, 10 * step + number)).backward()
            if not count:
                (sum(param.sum() for param in model.parameters()) * 0).backward()
        assert torch.equal(state_of(model), of_rank_0(state_of(model)))


def test_afterwards_ranks_may_have_different_numbers_of_steps(rank, size):
    model = wrapped("ddp")
    for step in range(3):
        if rank == 0:
            model.module.center.fill_(float(step))
        with pytest.warns(UserWarning, match="was written") if step == 1 else nullcontext():
            model(batch(rank, step)).backward()
    with model.join():
        for step in range(2 + 2 * rank):
            model.module.center.fill_(float(step))
            model(batch(rank, step)).backward()
    assert torch.equal(state_of(model), of_rank_0(state_of(model)))


# --- What is no difference ---


def lone_forward(model, rank, step):
    if rank == step % 2:
        with torch.no_grad():
            model(batch(rank, 99))


def lone_evaluation(model, rank, step):
    if rank == 0:
        model.eval()
        model(batch(rank, 99))
        with torch.no_grad():
            model(batch(rank, 98))
        model.train()


def all_write(model, rank, step):
    model.module.center.fill_(float(step))
    model.module.count += 1


def all_write_and_one_evaluates(model, rank, step):
    all_write(model, rank, step)
    if rank == 0:
        with torch.no_grad():
            model(batch(rank, 99))


def all_write_unseen(model, rank, step):
    model.module.center.data.fill_(float(step))


def own_broadcast(model, rank, step):
    if rank == 0:
        model.module.center.fill_(float(step))
    dist.broadcast(model.module.center.data, 0)


def own_mean(model, rank, step):
    if rank == 0:
        model.module.center.fill_(float(step))
    else:
        model.module.center.data.zero_()
    dist.all_reduce(model.module.center)


def loaded_by_all(model, rank, step):
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})


def synchronized(model, rank, step):
    if step % 2:
        model.synchronize_weights()


def statistics_of_one(model, rank, step):
    """They are not read before all ranks have those of rank 0 again."""
    if rank == 0:
        model.module.norm.reset_running_stats()


def norm_on_one_rank(model, rank, step):
    """Data may decide which layers run."""
    if rank == step % 2:
        model.module.norm(batch(rank, step))


def another_attempt(model, rank, step):
    x = batch(rank, step)
    if rank == 0:
        with suppress(KeyError):
            model(x, fails=True)
        model(x).backward()
    else:
        model(x).backward()
    model.zero_grad()


def copied_on_one_rank(model, rank, step):
    if rank == 0:
        copy.deepcopy(model)


class OwnNorm(nn.BatchNorm1d):
    """A layer of a package, which has a forward of its own."""

    def forward(self, x):
        return super().forward(x)


def statistics_of_each(model, rank, step):
    """Each rank has run other batches through it, as the forwards of a generator that no backward follows."""
    if step == 0:
        model.module.norm.__class__ = OwnNorm
    model.module.norm(batch(rank, step))


def frozen(model, rank, step):
    model.module.norm.requires_grad_(step % 2 == 0)


def two_backwards(model, rank, step):
    value = model(batch(rank, step))
    value.backward(retain_graph=True)
    value.backward()
    model.zero_grad()


def nothing(model, rank, step):
    pass


RIGHT = [
    nothing, lone_forward, lone_evaluation, all_write, all_write_and_one_evaluates, all_write_unseen, own_broadcast,
    own_mean, loaded_by_all,
    synchronized, statistics_of_one, statistics_of_each, norm_on_one_rank, another_attempt, copied_on_one_rank, frozen,
    two_backwards,
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@pytest.mark.parametrize("face", FACES)
def test_a_right_program_hears_nothing_and_forwards_send_nothing(rank, size, face, program):
    model = wrapped(face)
    names = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            model.zero_grad()
            program(model, rank, step)
            with Operations() as forward:
                loss = model(batch(rank, step))
            loss.backward()
            names += forward.names if step else []
    assert "broadcast_" not in names
    assert torch.equal(state_of(model), of_rank_0(state_of(model)))


@pytest.mark.parametrize("face", FACES)
def test_windows_of_other_lengths_hear_nothing(rank, size, face):
    model = wrapped(face, writes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for counts in ((1, 3), (4, 1), (2, 0), (0, 2), (1, 1), (2, 2)):
            model.zero_grad()
            model.set_gradient_weight(counts[rank])
            model.module.count += 1
            for number in range(counts[rank]):
                with model.no_sync() if number < counts[rank] - 1 else nullcontext():
                    model(batch(rank, number)).backward()
            if not counts[rank]:
                (sum(param.sum() for param in model.parameters()) * 0).backward()


@pytest.mark.parametrize("steps", [(2, 5), (5, 2)], ids=str)
def test_a_rank_that_has_joined_says_nothing(rank, size, steps):
    model = wrapped("ddp", writes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with model.join():
                for step in range(steps[rank]):
                    model.module.count += 1
                    model(batch(rank, step)).backward()
                    model.zero_grad()
            model(batch(rank, 9)).backward()


def test_a_settled_step_exchanges_nothing_more(rank, size):
    """Neither where no rank writes, nor where all write the same."""
    for write in (nothing, all_write):
        model = wrapped("ddp")
        for step in range(6):
            write(model, rank, step)
            with Operations() as done:
                model(batch(rank, step)).backward()
        collectives = [name for name in done.names if name in ("allreduce_", "broadcast_", "allgather_")]
        assert collectives == ["allreduce_"] * collectives.count("allreduce_") + ["broadcast_"]


def test_a_model_that_grows_is_asked_nothing_of_a_report_that_has_not_travelled(rank, size):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = dpfuse.DataParallel(net, broadcast_buffers=True)
    for step in range(6):
        if step == 3:
            net.append(nn.Linear(3, 3))
        model.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
    everyone = [torch.zeros_like(net[1].running_mean) for _ in range(size)]
    dist.all_gather(everyone, net[1].running_mean)
    assert torch.equal(*everyone)
