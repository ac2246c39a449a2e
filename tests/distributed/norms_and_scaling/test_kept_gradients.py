"""What acts on gradients after the mean acts on what a backward has delivered, not on what `.grad` keeps besides."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from tests.distributed.in_place import ALL, NONE, large_from

FACES = {
    "views": lambda net, **options: dpfuse.DataParallel(net, **options),
    "private": lambda net, **options: dpfuse.DataParallel(net, gradient_as_bucket_view=False, **options),
    "bucket each": lambda net, **options: dpfuse.DataParallel(net, None, 0, 0, **options),
    "in buckets": lambda net, **options: dpfuse.DataParallel(net, accumulate_in_buckets=True, **options),
    "deterministic": lambda net, **options: dpfuse.DataParallel(net, deterministic=True, **options),
    "ddp": lambda net, **options: dpfuse.DistributedDataParallel(net, **options),
    "ddp views": lambda net, **options: dpfuse.DistributedDataParallel(net, gradient_as_bucket_view=True, **options),
}
STEPS = 4


class Gan(nn.Module):
    """A maker and its judge in one wrapper. The judge may read rows of a table with sparse gradients."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.table = nn.Embedding(5, 4, sparse=sparse)
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.spare = nn.Linear(1, 1)  # no rank uses it

    def judges(self):
        return [*self.judge.parameters(), *self.table.parameters()]

    def forward(self, noise, real=None):
        made = self.maker(noise)
        if real is None:
            return self.judge(made + self.table.weight.detach()[0]).square()
        rows = torch.arange(len(real)) % 5
        return (self.judge(real + self.table(rows)) - self.judge(made.detach()) + 1).square()


def inputs(rank, step, part=0, count=2):
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 4, generator=generator)


def freeze(net, frozen):
    for param in net.judges():
        param.requires_grad_(not frozen)


def clones(params):
    return [None if param.grad is None else param.grad.to_dense().clone() for param in params]


def same(ours, theirs, **close):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **(close or {"rtol": 1e-5, "atol": 1e-7}))


# --- The loss scale ---


def train(model, net, scaler, rank, way, spoilt):
    """Return gradients, skipped steps and scales of a training whose judge is frozen in the maker's backward.

    Args:
        model: the wrapper of `net`.
        net: a `Gan`.
        scaler: of the losses.
        rank: of this process.
        way: "plain"; "windows" with two micro-batches of each loss; "early unscale" of the judge before the maker's
            backward; "clipped"; or "zeroed" judge's gradients after a first backward that is thrown away.
        spoilt: steps in which the judge's loss is infinite on rank 1.
    """
    judge, maker = (torch.optim.SGD(params, lr=0.02) for params in (net.judges(), net.maker.parameters()))
    found = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        parts = 2 if way == "windows" else 1
        for part in range(parts):
            bad = math.inf if step in spoilt and rank == 1 else 1.0
            with nullcontext() if part == parts - 1 else model.no_sync():
                scaler.scale((model(*inputs(rank, step, part)) * bad).mean()).backward()
        if way == "zeroed":
            judge.zero_grad(set_to_none=False)
        if way == "early unscale":
            scaler.unscale_(judge)
        freeze(net, True)
        for part in range(parts):
            with nullcontext() if part == parts - 1 else model.no_sync():
                scaler.scale(model(inputs(rank, step, part)[0]).mean()).backward()
        freeze(net, False)
        if way != "early unscale":
            scaler.unscale_(judge)
        scaler.unscale_(maker)
        if way == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append(clones(net.parameters()))
        before = [[param.detach().clone() for param in params] for params in (net.judges(), net.maker.parameters())]
        scaler.step(judge)
        scaler.step(maker)
        scaler.update()
        skipped = [
            all(map(torch.equal, params, now))
            for params, now in zip(before, (net.judges(), net.maker.parameters()), strict=True)
        ]
        found.append((skipped, scaler.get_scale()))
    return found


def with_frozen_judge(rank, size, face, way, spoilt, sparse, large):
    torch.manual_seed(3)
    net = Gan(sparse=sparse)
    twin = copy.deepcopy(net)
    with large_from(large):
        model = FACES[face](net, find_unused_parameters=True)
        scaler = dpfuse.GradScaler(model=model, init_scale=1024.0)
        ours = train(model, net, scaler, rank, way, spoilt)
    model = TorchDDP(twin, find_unused_parameters=True)
    theirs = train(model, twin, torch.amp.GradScaler("cpu", init_scale=1024.0), rank, way, spoilt)
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, tuple):
            assert one == other, (step, one, other)
        elif step // 2 not in spoilt or way == "zeroed":
            same(one, other)
    if way == "zeroed":  # then the judge's step changes nothing
        assert ours[-1][1] == 1024.0
    else:
        assert [judge for (judge, _), _ in ours[1::2]] == [step in spoilt for step in range(STEPS)]


@pytest.mark.parametrize("way", ["plain", "windows", "early unscale", "clipped"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.one_in(5)
def test_a_loss_scale_is_undone_once(ranks, face, way):
    ranks(with_frozen_judge, face, way, (), False, NONE)


@pytest.mark.parametrize("face", ["views", "private", "ddp"])
def test_a_loss_scale_is_undone_once_for_sparse_rows_and_in_place(ranks, face):
    ranks(with_frozen_judge, face, "plain", (), True, ALL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["plain", "windows", "early unscale", "zeroed"])
@pytest.mark.parametrize("face", ["views", "ddp", "in buckets"])
def test_an_overflow_of_an_earlier_backward_skips_the_step(ranks, face, way):
    """Values are looked at where they are kept. Gradients that were zeroed since skip nothing, as with torch."""
    ranks(with_frozen_judge, face, way, (2,), False, NONE)


def test_an_overflow_of_sparse_rows_skips_the_step(ranks):
    ranks(with_frozen_judge, "ddp", "plain", (1, 3), True, NONE)


# --- Weights ---


def weights_of(rank, step):
    return [float((rank + step) % 3 + 1), float((2 * rank + step) % 4 + 1)]


def weighted(rank, size, face, reduction, sparse):
    """The mean of the judge stays as it is, bitwise, in a backward with weights through the frozen judge."""
    torch.manual_seed(4)
    net = Gan(sparse=sparse)
    model = FACES[face](net, find_unused_parameters=True)
    for step in range(STEPS):
        model.zero_grad()
        for part, weight in enumerate(weights_of(rank, step)):
            freeze(net, part == 1)
            noise, real = inputs(rank, step, part, count=int(weight))
            model.set_gradient_weight(weight, reduction)
            out = model(noise) if part else model(noise, real)
            getattr(out, reduction)().backward()
            if part == 0:
                before = clones(net.judges())
        same(clones(net.judges()), before, rtol=0, atol=0)
        freeze(net, False)
        alone = copy.deepcopy(net)
        alone.zero_grad()
        everyone = [inputs(other, step, 1, count=int(weights_of(other, step)[1]))[0] for other in range(size)]
        alone(torch.cat(everyone)).mean().backward()
        same(clones(net.maker.parameters()), clones(alone.maker.parameters()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("face", [face for face in FACES if face != "ddp views"])
@pytest.mark.one_in(2)
def test_a_weight_leaves_alone_what_frozen_parameters_keep(ranks, face, reduction):
    ranks(weighted, face, reduction, face == "ddp")


class Heads(nn.Module):
    """A trunk and three heads, of which each loss uses one; the first layer may be a table with sparse rows."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=sparse)
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, rows, which):
        return self.heads[which](torch.tanh(self.trunk(self.table(rows)))).square()


def rows_of(rank, step, loss, micro):
    count = 1 + (rank + 2 * loss + micro + step) % 4
    return torch.randint(
        0, 5, (count,), generator=torch.Generator().manual_seed(1000 * step + 100 * loss + 10 * micro + rank)
    )


def several_losses(rank, size, face, reduction, sparse, micros, scaled, late, large):
    """Each loss has synchronised backwards of its own before one step; the reference has all data in one process."""
    torch.manual_seed(5)
    net = Heads(sparse=sparse)
    alone = copy.deepcopy(net)
    with large_from(large):
        model = FACES[face](net, find_unused_parameters=True)
        scaler = dpfuse.GradScaler(model=model, init_scale=256.0) if scaled else None
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, alone)]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step != 2)
            for loss in range(3):
                batches = [rows_of(rank, step, loss, micro) for micro in range(micros)]
                total = sum(map(len, batches))
                if not late:
                    model.set_gradient_weight(total, reduction)
                for micro, rows in enumerate(batches):
                    if late:
                        # What was counted so far, as a loop would that does not know the length of its window.
                        model.set_gradient_weight(sum(map(len, batches[: micro + 1])), reduction)
                    with model.no_sync(enabled=micro < micros - 1):
                        value = model(rows, loss).sum()
                        value = value if reduction == "sum" else value / total
                        (scaler.scale(value) if scaler else value).backward()
                every = [rows_of(other, step, loss, micro) for other in range(size) for micro in range(micros)]
                alone(torch.cat(every), loss).mean().backward()
            if scaler:
                scaler.unscale_(optimizers[0])
            same(clones(net.parameters()), clones(alone.parameters()), rtol=2e-5, atol=1e-6)
            if scaler:
                scaler.step(optimizers[0])
                scaler.update()
            else:
                optimizers[0].step()
            optimizers[1].step()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("face", FACES)
def test_a_second_loss_leaves_the_first_mean_alone(ranks, face, reduction):
    ranks(several_losses, face, reduction, False, 1, False, False, NONE)


@pytest.mark.parametrize(("micros", "scaled", "late"), [(3, False, False), (1, True, False), (3, True, True)])
@pytest.mark.parametrize("face", ["views", "private", "in buckets", "ddp"])
@pytest.mark.one_in(4)
def test_a_second_window_leaves_the_first_mean_alone(ranks, face, micros, scaled, late):
    ranks(several_losses, face, "sum", False, micros, scaled, late, NONE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("face", ["private", "ddp"])
def test_a_second_loss_leaves_sparse_rows_and_gradients_in_place_alone(ranks, face, micros):
    ranks(several_losses, face, "sum", True, micros, False, False, ALL)


def first_given_late(rank, size):
    """The first weight of a model, given in the last backward of a window, divides that window's sums."""
    torch.manual_seed(6)
    net = nn.Linear(3, 1)
    alone = copy.deepcopy(net)
    model = dpfuse.DataParallel(net)
    parts = [[inputs(other, 0, part, count=1 + other + part)[0] for part in range(2)] for other in range(size)]
    with model.no_sync():
        model(parts[rank][0]).square().sum().backward()
    model.set_gradient_weight(sum(map(len, parts[rank])), "sum")
    model(parts[rank][1]).square().sum().backward()
    alone(torch.cat([each for every in parts for each in every])).square().mean().backward()
    same(clones(net.parameters()), clones(alone.parameters()))


def test_the_first_weight_may_come_with_the_last_backward(ranks):
    ranks(first_given_late)


def thawed_inside(rank, size):
    """A parameter that is frozen when a window begins, and trained when it ends, keeps the mean that it had."""
    torch.manual_seed(7)
    net = Gan()
    model = dpfuse.DataParallel(net, find_unused_parameters=True)
    model.set_gradient_weight(2 + rank, "sum")
    model(*inputs(rank, 0, count=2 + rank)).sum().backward()
    first = clones(net.judges())
    model.set_gradient_weight(3 - rank, "sum")
    freeze(net, True)
    with model.no_sync():
        model(inputs(rank, 1, 0, count=1)[0]).sum().backward()
    freeze(net, False)
    model(*inputs(rank, 1, 1, count=2 - rank)).sum().backward()
    alone = copy.deepcopy(net)
    alone.zero_grad()
    total = sum(3 - other for other in range(size))
    for other in range(size):
        (alone(*inputs(other, 1, 1, count=2 - other)).sum() / total).backward()
    expected = [one + more for one, more in zip(first, clones(alone.judges()), strict=True)]
    same(clones(net.judges()), expected)


def test_a_parameter_that_is_unfrozen_inside_a_window_keeps_its_mean(ranks):
    ranks(thawed_inside)


def frozen_inside(rank, size, face, used):
    """Parameters are frozen between two backwards of a window; the first has added to their means, or not to all."""
    torch.manual_seed(7)
    net = Gan()
    model = FACES[face](net, find_unused_parameters=True)
    model.set_gradient_weight(2 + rank, "sum")
    model(*inputs(rank, 0, count=2 + rank)).sum().backward()
    first = clones(net.judges())
    model.set_gradient_weight(3 - rank, "sum")
    alone = copy.deepcopy(net)

    def inside(model, rank):
        noise, real = inputs(rank, 1, 0, count=1)
        return (model(noise, real) if used else model(noise)).sum()  # without the table

    with model.no_sync():
        inside(model, rank).backward()
    freeze(net, True)
    model(inputs(rank, 1, 1, count=2 - rank)[0]).sum().backward()
    alone.zero_grad()
    total = sum(3 - other for other in range(size))
    for other in range(size):
        (inside(alone, other) / total).backward()
    expected = [one if more is None else one + more for one, more in zip(first, clones(alone.judges()), strict=True)]
    same(clones(net.judges()), expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("face", ["views", "private", "in buckets", "ddp"])
def test_a_parameter_that_is_frozen_inside_a_window_keeps_its_mean(ranks, face, used):
    ranks(frozen_inside, face, used)


# --- What is measured ---


def measured(rank, size, face, sparse, large):
    torch.manual_seed(8)
    net = Gan(sparse=sparse)
    with large_from(large):
        model = FACES[face](net, metrics=True, find_unused_parameters=True)
        for step in range(STEPS):
            model.zero_grad()
            (1000 * model(*inputs(rank, step))).sum().backward()
            freeze(net, True)
            model.zero_grad() if step == 0 else [setattr(param, "grad", None) for param in net.maker.parameters()]
            model(inputs(rank, step)[0]).sum().backward()
            freeze(net, False)
            got = model.metrics()
            delivered = [grad for grad in clones(net.maker.parameters()) if grad is not None]
            squares = sum(grad.double().square().sum().item() for grad in delivered)
            assert got["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
            alone = copy.deepcopy(net)
            local = []
            for other in range(size):
                alone.zero_grad()
                alone(inputs(other, step)[0]).sum().backward()
                local.append(sum(param.grad.double().square().sum().item() for param in alone.maker.parameters()))
            signal = (size * squares - sum(local) / size) / (size - 1)
            assert got["gradient_square"] == pytest.approx(signal, rel=1e-3, abs=1e-6)
    return None


@pytest.mark.parametrize(("sparse", "large"), [(False, NONE), (True, ALL)])
@pytest.mark.parametrize("face", ["views", "private", "in buckets", "ddp"])
@pytest.mark.one_in(2)
def test_the_metrics_are_those_of_what_the_backward_has_averaged(ranks, face, sparse, large):
    ranks(measured, face, sparse, large)


def unnoticed(rank, size, face, how):
    """NaN in what a frozen parameter keeps is no NaN of this backward."""
    net = Gan()
    model = FACES[face](net, check_finite=how, find_unused_parameters=True)
    model(*inputs(rank, 0)).sum().backward()
    freeze(net, True)
    for param in net.judges():
        if param.grad is not None:
            param.grad.fill_(math.nan)
    for step in range(3):
        model(inputs(rank, step)[0]).sum().backward()
    assert all(param.grad.isfinite().all() for param in net.maker.parameters())
    assert all(param.grad is None or param.grad.isnan().all() for param in net.judges())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["warn", "raise"])
@pytest.mark.parametrize("face", ["views", "ddp"])
def test_the_check_for_finite_values_reads_what_is_sent(ranks, face, how):
    ranks(unnoticed, face, how)


def clipped(rank, size, face):
    """`grad_norm` and `clip_grad_norm_` take every `.grad` there is, as torch's functions do."""
    torch.manual_seed(9)
    net = Gan()
    twin = copy.deepcopy(net)
    found = []
    for one, model in (
        (net, FACES[face](net, find_unused_parameters=True)),
        (twin, TorchDDP(twin, find_unused_parameters=True)),
    ):
        model(*inputs(rank, 0)).sum().backward()
        freeze(one, True)
        model(inputs(rank, 1)[0]).sum().backward()
        freeze(one, False)
        clip = (
            model.clip_grad_norm_
            if one is net
            else lambda largest: nn.utils.clip_grad_norm_(twin.parameters(), largest)
        )
        found.append([clip(0.5), *clones(one.parameters())])
    same(*found)


@pytest.mark.parametrize("face", ["views", "private", "ddp"])
def test_clipping_takes_what_frozen_parameters_keep_as_torch_does(ranks, face):
    ranks(clipped, face)


# --- Where each rank has one part ---


def divided(rank, size, scaled):
    torch.manual_seed(10)
    net = Gan()
    twin = copy.deepcopy(net)
    found = []
    for one, ours in ((net, True), (twin, False)):
        wrap = dpfuse.DistributedDataParallel if ours else TorchDDP
        model = wrap(one, find_unused_parameters=True)
        if ours:
            optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.05)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = (
            dpfuse.GradScaler(model=model, init_scale=64.0) if ours else torch.amp.GradScaler("cpu", init_scale=64.0)
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2 if step else 1):  # buckets are planned again after the first backward
                freeze(one, part == 1)
                noise, real = inputs(rank, step, part)
                loss = (model(noise) if part else model(noise, real)).mean()
                loss = loss * (math.inf if (rank, step, part) == (1, 2, 0) else 1.0)
                (scaler.scale(loss) if scaled else loss).backward()
            freeze(one, False)
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            elif step != 2:
                optimizer.step()
        found.append([param.detach() for param in one.parameters()])
    same(*found)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_sharded_optimizer_steps_on_what_frozen_parameters_keep(ranks, scaled):
    ranks(divided, scaled)
