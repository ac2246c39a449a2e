"""dpfuse.GradScaler against torch's in the same run: the same numbers, the same steps skipped, on every rank."""

from __future__ import annotations

import copy
import gc
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse.wrapper import loss_scale_of
from tests.distributed.in_place import ALL, NONE, large_from
from tests.distributed.norms_and_scaling.test_check_finite import Net

OPTIONS = {"init_scale": 2.0**10, "growth_interval": 4}

FACES = {
    "views": lambda net, **options: dpfuse.DataParallel(net, **options),
    "private": lambda net, **options: dpfuse.DataParallel(net, gradient_as_bucket_view=False, **options),
    "bucket each": lambda net, **options: dpfuse.DataParallel(net, None, 0, 0, **options),
    "in buckets": lambda net, **options: dpfuse.DataParallel(net, accumulate_in_buckets=True, **options),
    "deterministic": lambda net, **options: dpfuse.DataParallel(net, deterministic=True, **options),
    "ddp": lambda net, **options: dpfuse.DistributedDataParallel(net, **options),
    "half wire": lambda net, **options: dpfuse.DataParallel(net, wire_dtype=torch.float16, **options),
    "eight bits": lambda net, **options: dpfuse.DataParallel(net, wire_dtype=torch.float8_e5m2, **options),
    "sum": lambda net, **options: dpfuse.DataParallel(net, gradient_scale=1.0, **options),
}
UNSCALES = {"half wire": False, "sum": False}  # of the faces


class Model(nn.Module):
    """A little of everything: several layers, a table with sparse rows, one that is not always used."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table = nn.Embedding(7, 6, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 5))
        self.spare = nn.Linear(5, 5)

    def forward(self, rows, spare=True):
        x = self.body(self.table(rows))
        return self.spare(x) if spare else x


def rows_of(rank, step, micro=0):
    return torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def one_gradient(model):
    return model.module.first.grad.flatten()[0].item()


def train(model, scaler, rank, steps, *, micros=1, half=False, clip=None, synced=(), planted=(), fused=False):
    """Losses of some steps; `planted` are (rank, step, micro) at which the loss overflows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            last = micro == micros - 1 or micro in synced
            with nullcontext() if last else model.no_sync(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(rows_of(rank, step, micro)).square().mean()
                if (rank, step, micro) in planted:
                    loss = loss * 1e38
                scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = [param.detach().clone() for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        skipped = all(map(torch.equal, before, model.parameters()))
        history.append((skipped, scaler.get_scale()))
    return history


def close(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


PLANTED = {(1, 3, 0), (0, 11, 0), (1, 12, 0), (1, 40, 0)}


def as_torchs(rank, size, face, large, options):
    with large_from(large):
        net = Model()
        theirs = TorchDDP(copy.deepcopy(net))
        ours = FACES[face](net)
        if face == "sum":
            theirs.register_comm_hook(None, summed)
        peer = torch.amp.GradScaler("cpu", **OPTIONS)
        expected = train(theirs, peer, rank, 60, planted=PLANTED, **options)
        scaler = dpfuse.GradScaler(model=ours, **OPTIONS)
        folded = []
        scale = loss_scale_of(ours)

        def tell(ids, found, *, unscaled, tell=scale.delivered):
            folded.append(float(found))
            tell(ids, found, unscaled=unscaled)

        scale.delivered = tell
        assert train(ours, scaler, rank, 60, planted=PLANTED, **options) == expected
    skipped = [step for step, (skipped, _) in enumerate(expected) if skipped]
    assert {3, 11, 12, 40} <= set(skipped)
    assert len(skipped) < 20
    if face not in ("half wire", "eight bits"):
        close(ours, theirs)
    assert scaler.state_dict() == peer.state_dict()
    if UNSCALES.get(face, True):
        backwards = 1 + len(options.get("synced", ()))  # that synchronise, in each step
        assert len(folded) == 60 * backwards
        assert [step for step, found in enumerate(folded[backwards - 1 :: backwards]) if found] == skipped
    else:
        assert not folded
    return skipped


def summed(_state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


QUICK = ("views", "half wire")


@pytest.mark.parametrize(
    "face",
    [pytest.param(face, marks=() if face in QUICK else pytest.mark.slow) for face in FACES if face != "in buckets"],
)
def test_sixty_steps_are_those_of_torch(ranks, face):
    first, second = ranks(as_torchs, face, NONE, {"clip": 0.3} if face in ("views", "ddp") else {})
    assert first == second


@pytest.mark.parametrize(
    ("face", "options"),
    [
        pytest.param("views", {"micros": 3}, marks=pytest.mark.slow),
        ("in buckets", {"micros": 3}),
        pytest.param("views", {"micros": 3, "synced": (0, 1)}, marks=pytest.mark.slow),
        pytest.param("in buckets", {"micros": 4, "synced": (1,)}, marks=pytest.mark.slow),
        pytest.param("views", {"half": True}, marks=pytest.mark.slow),
        ("views", {"fused": True, "micros": 2}),
    ],
)
def test_sixty_steps_with_accumulation_autocast_and_a_fused_optimizer(ranks, face, options):
    ranks(as_torchs, face, NONE, options)


@pytest.mark.slow
def test_sixty_steps_with_gradients_that_are_reduced_in_place(ranks):
    ranks(as_torchs, "private", ALL, {"micros": 2, "synced": (0,)})


def test_narrow_gradients_in_place_and_another_default_dtype(rank, size):
    """bfloat16 gradients in place, and a default dtype that is none of the scaler's."""
    torch.set_default_dtype(torch.float64)
    try:
        with large_from(ALL):
            model = dpfuse.DataParallel(Net().bfloat16(), gradient_as_bucket_view=False)
            scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
            for step in range(4):
                model.zero_grad()
                model.set_gradient_weight(1)
                scaler.scale(model(second=math.nan if (rank, step) == (1, 2) else 1.0)).backward()
                assert one_gradient(model) == 1.0
                assert loss_scale_of(model).found.item() == float(step == 2)
                scaler.update(8.0)
    finally:
        torch.set_default_dtype(torch.float32)


class Mixed(Model):
    """Sparse rows, and a layer of float64."""

    def __init__(self):
        super().__init__(sparse=True)
        self.spare.double()
        self.pairs = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, rows, spare=True):
        x = self.body(self.table(rows)) * self.pairs.abs()
        return self.spare(x.double()).float() if spare else x


@pytest.mark.parametrize("views", [True, False])
def test_every_kind_of_gradient_is_unscaled_and_looked_at(rank, size, views):
    net = Mixed()
    ours = dpfuse.DataParallel(net, None, 0, 0, gradient_as_bucket_view=views, find_unused_parameters=True)
    twin = copy.deepcopy(net)
    scaler = dpfuse.GradScaler(model=ours, **OPTIONS)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(8):
        ours.zero_grad()
        twin.zero_grad()
        if step == 4:  # the module changes, and its buckets with it
            for one in (net, twin):
                torch.manual_seed(4)
                one.late = nn.Linear(5, 5)
                one.register_forward_hook(lambda module, inputs, outputs: module.late(outputs))
        spare, bad = step % 3 == 0 and rank == 0, step in (2, 6) and rank == 1
        for model in (twin, ours):
            loss = model(rows_of(rank, step), spare).square().mean() * (math.inf if bad else 1.0)
            (loss if model is twin else scaler.scale(loss)).backward()
        assert loss_scale_of(ours).found is not None
        for (name, param), other in zip(net.named_parameters(), twin.parameters(), strict=True):
            if param.grad is None:
                assert name.startswith("spare")
                assert step % 3
                continue
            mean = torch.zeros_like(param) if other.grad is None else other.grad.to_dense() / size
            dist.all_reduce(mean)
            if step in (2, 6) and not name.startswith("spare"):
                assert not mean.isfinite().all()  # a complex number that is not finite may be so in several ways
                assert not param.grad.to_dense().isfinite().all()
            else:
                torch.testing.assert_close(param.grad.to_dense(), mean, rtol=1e-5, atol=1e-7)
        scaler.unscale_(optimizer)
        assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == float(step in (2, 6))
        scaler.update()


def test_other_backwards_other_models_and_other_parameters(rank, size):
    """Backwards that are none of the scaler's, several models and optimizers, parameters that no model has."""
    generator, judge = (dpfuse.DataParallel(Net()) for _ in range(2))
    foreign = nn.Parameter(torch.ones(2))
    scaler = dpfuse.GradScaler(model=[generator, judge], init_scale=8.0)
    first = torch.optim.SGD([*generator.parameters(), foreign], lr=0.0)
    second = torch.optim.SGD(judge.parameters(), lr=0.0)
    third = torch.optim.SGD([foreign], lr=0.0)
    for step in range(5):
        for optimizer in (first, second):
            optimizer.zero_grad()
        # Gradients that accumulate nowhere, of a loss that is scaled; then a backward of one that is not.
        torch.autograd.grad(scaler.scale(generator()), generator.module.first)
        generator.zero_grad()
        generator().backward()
        assert one_gradient(generator) == 1.0
        assert loss_scale_of(generator).found is None or step
        generator.zero_grad()
        scaler.scale(generator() + foreign.sum() * (rank + 1)).backward()
        scaler.unscale_(first)
        assert one_gradient(generator) == 1.0
        assert foreign.grad.tolist() == [rank + 1.0] * 2
        # A backward that does not reach the first model leaves its gradients alone.
        scaler.scale(judge(third=math.inf if (step, rank) == (3, 1) else 1.0)).backward()
        assert one_gradient(generator) == one_gradient(judge) == 1.0
        for optimizer in (first, second):
            scaler.step(optimizer)
        if step == 2:
            foreign.grad.fill_(math.inf)
            scaler.step(third)
        scaler.update()
        assert scaler.get_scale() == [8.0, 8.0, 4.0, 2.0, 2.0][step]


def test_what_is_accumulated_on_unscaled_gradients(rank, size):
    """A backward without scale on top of unscaled gradients is looked at as well; a local one gets the scale back."""
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(model()).backward()
    model(third=math.nan if rank else 1.0).backward()
    assert one_gradient(model) == 2.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    model.zero_grad()
    scaler.scale(model()).backward()
    with model.no_sync():
        scaler.scale(model()).backward()
    assert one_gradient(model) == 8.0
    dpfuse.fused_allreduce_gradients(list(model.parameters()))
    scaler.unscale_(optimizer)
    assert one_gradient(model) == 2.0
    scaler.step(optimizer)
    scaler.update()


def test_with_a_communication_hook_torchs_own_pass_unscales(rank, size):
    model = dpfuse.DistributedDataParallel(Net(sparse=True))
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        model.zero_grad()
        scaler.scale(model(second=math.nan if rank and step == 2 else 1.0)).backward()
        assert one_gradient(model) == (8.0 if step < 3 else 4.0), "a hook gets the gradients as they are"
        scaler.step(optimizer)
        assert one_gradient(model) == 1.0
        scaler.update()
    assert scaler.get_scale() == 4.0


def test_check_finite_may_be_on_as_well(rank, size):
    """check_finite beside it still names what it finds."""
    model = dpfuse.DataParallel(Net(sparse=True), None, 0, 0, check_finite="warn")
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    for step in range(4):
        model.zero_grad()
        bad = rank == 1 and step == 2
        with pytest.warns(UserWarning, match="4 in 'third'") if bad else nullcontext():
            scaler.scale(model(third=math.inf if bad else 1.0)).backward()
        assert loss_scale_of(model).found.item() == float(step == 2)
        scaler.update(8.0)


def called(model, first):
    return model(first=first)


def test_a_checkpoint_around_the_wrapper_and_one_scaler_for_two_wrappers(rank, size):
    """A checkpoint around the wrapper, which is reached in backwards of its own; then another wrapper, one scaler."""
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    one = torch.ones((), requires_grad=True)
    for step in range(6):
        if step == 4:
            net = model.module
            del model
            gc.collect()
            model = dpfuse.DataParallel(net)
        model.zero_grad()
        if step % 2:
            several = [checkpoint(called, model, one * (rank + 1), use_reentrant=True) for _ in range(3)]
        else:
            several = [model(first=one * (rank + 1.0))]
        scaler.scale(sum(several)).backward()
        assert (loss_scale_of(model).found is None) == (step >= 4), "the scaler does not know the second one"
        scaler.unscale_(optimizer)
        assert one_gradient(model) == len(several) * (size + 1) / 2
        scaler.step(optimizer)
        scaler.update()
