"""Weighted means: against an explicit all-reduce in ten lines, and against one process that has all batches."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import dpfuse
from dpfuse.wrapper import loss_scale_of
from tests.distributed.in_place import ALL, NONE, large_from
from tests.distributed.norms_and_scaling.test_check_finite import Net

FACES = {
    "views": lambda net, **options: dpfuse.DataParallel(net, **options),
    "private": lambda net, **options: dpfuse.DataParallel(net, gradient_as_bucket_view=False, **options),
    "bucket each": lambda net, **options: dpfuse.DataParallel(net, None, 0, 0, **options),
    "deterministic": lambda net, **options: dpfuse.DataParallel(net, deterministic=True, **options),
    "ddp": lambda net, **options: dpfuse.DistributedDataParallel(net, **options),
    "half wire": lambda net, **options: dpfuse.DataParallel(net, wire_dtype=torch.bfloat16, **options),
    "eight bits": lambda net, **options: dpfuse.DataParallel(net, wire_dtype=torch.float8_e4m3fn, **options),
}
CLOSE = {"half wire": 2e-2, "eight bits": 0.2}


class Kinds(nn.Module):
    """Dense, sparse, float64 and complex gradients, and a parameter that some ranks do not use."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.body = nn.Linear(4, 30)
        self.wide = nn.Linear(30, 3, dtype=torch.float64)
        self.pairs = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.spare = nn.Linear(3, 3)

    def forward(self, rows, spare=False):
        x = self.wide(torch.tanh(self.body(self.table(rows))).double()).float() * self.pairs.abs()
        return self.spare(x) if spare else x


def weighted_mean(local, weight, reduction):
    """The reference."""
    total = torch.tensor([weight], dtype=torch.float64)
    dist.all_reduce(total)
    share = (weight if reduction == "mean" else 1.0) / float(total)
    summed = local.to_dense().clone() * share
    dist.all_reduce(summed)
    return summed


def tokens(rank, step):
    return int(torch.randint(1, 9, (), generator=torch.Generator().manual_seed(10 * step + rank)))


def against_the_reference(rank, size, face, large):
    with large_from(large):
        net = Kinds()
        twin = copy.deepcopy(net)
        model = FACES[face](net, find_unused_parameters=True)
        for step in range(6):
            reduction = ("mean", "sum")[step % 2]
            count = 0 if (rank, step) == (1, 4) else tokens(rank, step)
            weight = [count, float(count), torch.tensor(count), torch.tensor([count], dtype=torch.float64)][step % 4]
            model.zero_grad()
            twin.zero_grad()
            rows = torch.randint(0, 7, (max(count, 1),), generator=torch.Generator().manual_seed(step + 100 * rank))
            model.set_gradient_weight(weight, reduction)
            for one in (model, twin):
                getattr(one(rows, spare=rank == 0).square().sum(-1), reduction)().backward()
            for (name, param), other in zip(net.named_parameters(), twin.parameters(), strict=True):
                local = torch.zeros_like(param) if other.grad is None else other.grad
                mean = weighted_mean(local, count, reduction)
                size_of = float(mean.abs().max())
                close = CLOSE.get(face, 1e-5)
                assert (param.grad.to_dense() - mean).abs().max() <= close * size_of + 1e-7, (name, step, reduction)
        # Without a weight the next backward is a plain mean again.
        model.zero_grad()
        twin.zero_grad()
        for one in (model, twin):
            one(torch.tensor([1, 2]), spare=True).sum().backward()
        torch.testing.assert_close(net.spare.bias.grad, twin.spare.bias.grad)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_a_weighted_mean_is_that_of_an_explicit_all_reduce(ranks, face):
    ranks(against_the_reference, face, NONE)


def test_on_three_ranks_with_gradients_that_are_reduced_in_place(ranks):
    ranks(against_the_reference, "private", ALL, size=3)


def batch_of(rank, step):
    count = 2 + (rank + step) % 3 * 3
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("micros", "in_buckets"), [(1, False), (3, False), (3, True), (None, False), (None, True)])
def test_ranks_with_other_batch_sizes_train_as_one_process_with_all_of_them(rank, size, reduction, micros, in_buckets):
    """Ranks with batches of other sizes train as one process with all of them."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    alone = copy.deepcopy(net)
    model = dpfuse.DataParallel(net, accumulate_in_buckets=in_buckets)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, alone))
    for step in range(10):
        ours.zero_grad()
        theirs.zero_grad()
        lengths = [micros or 1 + (other + step) % 3 for other in range(size)]
        batches = [[batch_of(other, step * 3 + micro) for micro in range(lengths[other])] for other in range(size)]
        alone(torch.cat([part for parts in batches for part in parts])).square().mean().backward()
        count = sum(map(len, batches[rank]))
        model.set_gradient_weight(count, reduction)
        for micro, part in enumerate(batches[rank]):
            with model.no_sync(enabled=micro < lengths[rank] - 1):
                total = model(part).square().sum()
                (total if reduction == "sum" else total / count).backward()
        ours.step()
        theirs.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_with_a_loss_scale(rank, size):
    """A weight and a loss scale: both are undone, and a rank's infinite value skips the step everywhere."""
    model = dpfuse.DataParallel(Net())
    scaler = dpfuse.GradScaler(model=model, init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        model.zero_grad()
        model.set_gradient_weight(rank + 1)
        bad = (rank, step) == (1, 2)
        scaler.scale(model(first=float(rank), third=math.inf if bad else 1.0)).backward()
        assert model.module.first.grad.allclose(torch.tensor(2 / 3))
        assert loss_scale_of(model).found.item() == float(step == 2)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0


def failing(model, **factors):
    with pytest.raises(dpfuse.DPFuseError) as error:
        model(**factors).backward()
    model.zero_grad()
    return str(error.value)


def misuses(rank, size):
    model = dpfuse.DataParallel(Net())
    for _ in range(2):
        model().backward()
        model.zero_grad()
    texts = []
    if rank:
        model.set_gradient_weight(3)
    texts.append(failing(model))
    model.set_gradient_weight(3, "sum" if rank else "mean")
    texts.append(failing(model))
    for weight in (0, torch.tensor(-1.0 if rank else 5.0), torch.tensor(math.nan if rank else 1.0)):
        model.set_gradient_weight(weight)
        model(second=2.0)
        with pytest.raises(dpfuse.DPFuseError) as error:
            model(second=2.0).backward()
        texts.append(str(error.value))
        assert all(param.grad.isnan().all() for param in model.parameters())
        model.zero_grad()
    model.set_gradient_weight(rank)
    model.set_gradient_weight(None)
    model(second=float(rank)).backward()
    assert model.module.second.grad.eq(0.5).all()
    return texts


def test_misuse_is_told_on_every_rank(ranks):
    for rank, (one_rank, reductions, zero, negative, nan) in enumerate(ranks(misuses)):
        assert "rank 1 weighs its gradients, rank 0 averages its gradients as they are" in one_rank
        assert "rank 1 weighs gradients of sums, rank 0 weighs its gradients" in reductions
        assert "set_gradient_weight(None) takes a weight back" in reductions
        assert zero.startswith(f"rank {rank}: in synchronised backward 3 the ranks 0 to 1 gave their gradients the")
        assert "weights 0, 0; expected finite ones" in zero
        assert "backward 4 " in negative
        assert "weights 5, -1; expected" in negative
        assert "weights 1, nan; expected" in nan


def dying(rank, size):
    """A window with a weight in which a backward of rank 0 dies: who goes on is noticed, who begins again is not."""
    model = dpfuse.DataParallel(Net())
    texts = []
    for begins_again, weighs in ((False, True), (True, True), (False, rank == 0)):
        model.zero_grad()
        if weighs:
            model.set_gradient_weight(3 - 2 * rank)
        with model.no_sync():
            model(first=2.0).backward()
            if rank == 0 and weighs and (begins_again or not texts):
                loss = model()
                handle = model.module.second.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                handle.remove()
                if begins_again:
                    model.zero_grad()
                    model.set_gradient_weight(3)
                    model(first=2.0).backward()
            elif not begins_again:
                model(first=2.0).backward()
        if begins_again:
            model(first=float(rank)).backward()
            assert model.module.first.grad.allclose(torch.tensor((3 * 2 + 1 * 3) / 4))
        else:
            texts.append(failing(model))
    return texts


def test_a_window_that_goes_on_after_an_exception_is_noticed(ranks):
    for went_on, alone in ranks(dying):
        assert "rank 0 weighs its gradients and goes on after a backward that an exception ended; exp" in went_on
        assert "rank 1 averages its gradients as they are, rank 0 weighs its gradients; expected" in alone


def test_inside_join_ranks_without_inputs_do_not_count(rank, size):
    """Ranks without inputs have no weight."""
    model = dpfuse.DistributedDataParallel(Net())
    seen = []
    with model.join():
        for _ in range(2 + 2 * rank):
            model.zero_grad()
            model.set_gradient_weight(3 if rank else 1)
            model(first=float(rank)).backward()
            seen.append(model.module.first.grad.mean().item())
    assert seen == pytest.approx([0.75, 0.75, 1.0, 1.0][: len(seen)])


@pytest.mark.parametrize("weighs", [True, False])
def test_inside_join_an_optimizer_with_shards_steps_everywhere(rank, size, weighs):
    """A rank without inputs has the weighted mean as well: an optimizer steps there for the others, on its shard."""
    model = dpfuse.DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    if not weighs and rank == 0:
        model.set_gradient_weight(7.0)  # and never a backward
    with Join([model, optimizer]):
        for step in range(3 * rank):
            model.zero_grad()
            if weighs:
                model.set_gradient_weight(5.0 + step)
            model(first=2.0, second=2.0, third=2.0).backward()
            optimizer.step()
    # The mean over the ranks with inputs, where there are weights; else over all.
    for param in model.parameters():
        assert param.eq(1 - 0.5 * 3 * (2.0 if weighs else 2.0 * (size - 1) / size)).all()


def test_what_is_no_synchronised_backward_uses_no_weight_up(rank, size):
    """Gradients that accumulate nowhere keep the weight for the backward that follows; a failed one does, too."""
    model = dpfuse.DataParallel(Net())
    for _ in range(3):
        model.zero_grad()
        model.set_gradient_weight(3 - 2 * rank)
        torch.autograd.grad(model(), model.module.first)
        loss = model(first=float(rank))
        handle = model.module.second.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        model.zero_grad()
        model(first=float(rank)).backward()
        assert model.module.first.grad.allclose(torch.tensor(0.25))


def test_without_a_weight_the_bits_are_those_of_ever(rank, size):
    """A model that had weights once, or never, averages the same bits."""
    results = []
    for once in (False, True):
        torch.manual_seed(0)
        model = dpfuse.DataParallel(nn.Linear(50, 50), None, 0, 0, check_training="off")
        if once:
            model.set_gradient_weight(7.0)
            model(torch.randn(3, 50, generator=torch.Generator().manual_seed(9))).sum().backward()
            model.zero_grad()
        else:
            model(torch.randn(3, 50, generator=torch.Generator().manual_seed(9))).sum().backward()
            model.zero_grad()
            assert not model._sync.factors.attached
            assert all(bucket.parts.steps == () for bucket in model.reducer.buckets)
        model(torch.randn(3, 50, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        results.append([param.grad.clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))


def a_step_late(rank, size):
    """As on a GPU: weights are copied without waiting, and looked at when the next backward ends."""
    model = dpfuse.DataParallel(Net())
    model.set_gradient_weight(1)
    model().backward()
    weight = model._sync.factors.weight
    delivered = weight.delivered

    def late(report):
        factor = delivered(report)
        weight._told[-1].values.late = True
        return factor

    weight.delivered = late
    model.zero_grad()
    model.set_gradient_weight(0)
    model().backward()
    assert model.module.first.grad.isnan().all(), "until the error no finite step is taken"
    model.zero_grad()
    model.set_gradient_weight(1)
    return failing(model)


def test_what_is_not_waited_for_is_told_when_the_next_backward_ends(ranks):
    for text in ranks(a_step_late):
        assert "in synchronised backward 2 the weights that the ranks gave their gradients make no mean" in text


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("1",), TypeError, "weight must be a number or a tensor with one, got '1' of type str"),
        ((True,), TypeError, "weight must be a number or a tensor with one, got True"),
        ((torch.ones(2),), TypeError, "of type Tensor; None takes one back"),
        ((-1,), ValueError, "weight must be finite, and 0 or more, got -1; 0 leaves this rank out"),
        ((math.nan,), ValueError, "weight must be finite"),
        ((math.inf,), ValueError, "weight must be finite"),
        ((1, "max"), ValueError, "reduction must be 'mean' or 'sum', got 'max'; pass that of the loss"),
    ],
)
def test_arguments_that_are_no_weights(group, arguments, error, text):
    model = dpfuse.DataParallel(Net())
    with pytest.raises(error, match=re.escape(text)):
        model.set_gradient_weight(*arguments)


def test_where_weights_cannot_be(group):
    model = dpfuse.DataParallel(Net(), gradient_scale=1.0)
    with pytest.raises(dpfuse.DPFuseError, match=r"with gradient_scale=1\.0, expected one of the two"):
        model.set_gradient_weight(1)
    model = dpfuse.DistributedDataParallel(Net())
    model.set_gradient_weight(1)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(dpfuse.DPFuseError, match="with the communication hook allreduce_hook, expected one of"):
        model().backward()
    with pytest.raises(dpfuse.DPFuseError, match="with the communication hook allreduce_hook, expected one of"):
        model.set_gradient_weight(1)
    model.set_gradient_weight(None)
    model().backward()
    model = dpfuse.DataParallel(Net())
    model.first.register_hook(lambda grad: model.set_gradient_weight(1))
    with pytest.raises(dpfuse.DPFuseError, match="while a backward is RECORDING, expected it before"):
        model().backward()


def test_without_a_process_group_a_mean_is_what_it_is_and_a_sum_is_nobodys():
    with pytest.warns(UserWarning, match="no process group"):
        model = dpfuse.DataParallel(Net())
    model.set_gradient_weight(4)
    model().backward()
    assert model.first.grad.eq(1).all()
    with pytest.raises(dpfuse.DPFuseError, match="so no rank divides"):
        model.set_gradient_weight(4, "sum")
    with pytest.raises(ValueError, match="weight must be finite"):
        model.set_gradient_weight(-4)


@pytest.mark.parametrize("face", ["views", "private", "bucket each", "ddp"])
@pytest.mark.ranks(size=2)
def test_a_layer_that_is_frozen_between_windows_of_different_lengths_gets_no_gradient(rank, size, face):
    """Else an optimizer with weight decay would move its weights on the rank that has the longer window."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = FACES[face](net)
    backwards = 2 - rank
    for step in range(5):
        net[0].requires_grad_(step not in (1, 3))
        for number in range(backwards):
            with model.no_sync(enabled=number < backwards - 1):
                model.set_gradient_weight(backwards)
                model(torch.ones(2, 3)).sum().backward()
        assert (net[0].weight.grad is None) == (step in (1, 3)), step
        model.zero_grad()
