"""metrics() against a reference by hand: a bare copy's local gradients, gathered."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.errors import DPFuseError
from tests.distributed.in_place import ALL, NONE, large_from

CASES = {
    "views": (dpfuse.DataParallel, {}),
    "private": (dpfuse.DistributedDataParallel, {}),
    "half wire": (dpfuse.DataParallel, {"wire_dtype": torch.bfloat16}),
    "bucket each": (dpfuse.DataParallel, {"comm_buffer_size": 0, "last_comm_buffer_size": 0}),
    "accumulating": (dpfuse.DataParallel, {"accumulate_in_buckets": True}),
    "ordered": (dpfuse.DataParallel, {"deterministic": True}),
    "eight bits": (dpfuse.DataParallel, {"wire_dtype": torch.float8_e4m3fn}),
    "checked": (dpfuse.DataParallel, {"check_finite": "warn"}),
    "in place": (dpfuse.DistributedDataParallel, {}),
    "copied": (dpfuse.DistributedDataParallel, {}),
    "unread": (dpfuse.DataParallel, {}),
    "unread eight bits": (dpfuse.DataParallel, {"wire_dtype": torch.float8_e4m3fn}),
}
LARGE = {"in place": ALL, "copied": NONE}  # bytes from which gradients are reduced in their own memory, as on a GPU
CLOSE = {"half wire": 2e-2, "eight bits": 1e-1, "unread eight bits": 1e-1}  # what a narrow wire rounds away


def reference(net, batches, weight):
    for batch in batches:
        net(batch).square().mean().backward()
    local = torch.cat([param.grad.flatten() for param in net.parameters()]).double()
    both = [torch.zeros_like(local) for _ in range(2)]
    dist.all_gather(both, local)
    weights = [weight(rank) for rank in range(2)]
    total = sum(weights)
    mean = sum(w * grad for w, grad in zip(weights, both, strict=True)) / total
    small = sum(w * float(grad.square().sum()) for w, grad in zip(weights, both, strict=True)) / total
    big = float(mean.square().sum())
    return math.sqrt(big), 2 * big - small, (small - big) * total


@contextmanager
def unread():
    """The host reads no tensor, as on a GPU."""
    with ExitStack() as stack:
        for module in ("measure.local_squares", "measure.metrics"):
            stack.enter_context(patch(f"dpfuse.{module}.host_knows", return_value=False))
        yield


def compared(rank, size, case, weighted):
    place = large_from(LARGE[case]) if case in LARGE else unread() if "unread" in case else nullcontext()
    with place:
        return measured(rank, *CASES[case], weighted)


def measured(rank, face, options, weighted):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 130), nn.Tanh(), nn.Linear(130, 3))
    bare = copy.deepcopy(net)
    model = face(net, metrics=True, **options)
    assert model.metrics() == {}
    seen = []
    for step in range(3):
        torch.manual_seed(7 * step + rank)
        batches = [torch.randn(4, 40) for _ in range(2)]
        model.zero_grad(set_to_none=True)
        bare.zero_grad()
        if weighted:
            model.set_gradient_weight(1 + 2 * rank)
        for number, batch in enumerate(batches):
            with model.no_sync(enabled=number == 0):
                model(batch).square().mean().backward()
        seen.append((model.metrics(), reference(bare, batches, lambda r: 1 + 2 * r if weighted else 1)))
    return seen


@pytest.mark.one_in(5)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_norm_and_noise_are_those_of_the_reference(ranks, case, weighted):
    close = CLOSE.get(case, 1e-4)
    for seen in ranks(compared, case, weighted):
        for step, (metrics, (norm, square, variance)) in enumerate(seen):
            assert metrics["step"] == step + 1
            assert metrics["grad_norm"] == pytest.approx(norm, rel=close)
            assert metrics["gradient_square"] == pytest.approx(square, rel=close, abs=close * norm**2)
            assert metrics["gradient_variance"] == pytest.approx(variance, rel=close)
            assert metrics["nonfinite_values"] == 0
            assert 0 <= metrics["exposed_seconds"] < 10
            assert 0 <= metrics["communication_seconds"] < 10
            assert metrics["bytes_sent"] >= 51823 * {"half wire": 2, "eight bits": 1, "unread eight bits": 1}.get(
                case, 4
            )


def spoilt(rank, size, place):
    with place():
        model = dpfuse.DataParallel(nn.Linear(4, 2), metrics=True)
        model(torch.full((1, 4), math.inf if rank else 1.0)).sum().backward()
        return model.metrics()["nonfinite_values"]


@pytest.mark.parametrize("place", [nullcontext, unread])
def test_values_that_are_not_finite_are_counted_over_all_ranks(ranks, place):
    assert ranks(spoilt, place) == [8, 8]


def test_without_the_option_nothing_was_measured(rank, size):
    with pytest.raises(DPFuseError, match="metrics=True"):
        dpfuse.DataParallel(nn.Linear(4, 2)).metrics()


class Rows(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.out = nn.Linear(8, 2)

    def forward(self, numbers):
        return self.out(self.table(numbers))


def sparse(rank, size):
    torch.manual_seed(0)
    net = Rows()
    bare = copy.deepcopy(net)
    model = dpfuse.DataParallel(net, metrics=True)
    numbers = torch.tensor([rank, 7, 9 + rank])
    model(numbers).square().mean().backward()
    bare.table.sparse = False
    return model.metrics(), reference(bare, [numbers], lambda rank: 1)


def test_rows_of_sparse_gradients_are_measured(ranks):
    for metrics, (norm, square, variance) in ranks(sparse):
        assert metrics["gradient_square"] == pytest.approx(square, rel=1e-4, abs=1e-4 * norm**2)
        assert metrics["gradient_variance"] == pytest.approx(variance, rel=1e-4)


def alone(rank, size):
    group = [dist.new_group([one]) for one in range(size)][rank]
    model = dpfuse.DataParallel(nn.Linear(4, 2), group=group, metrics=True)
    model(torch.ones(1, 4)).sum().backward()
    return model.metrics()


def test_one_rank_has_a_norm_and_no_noise(ranks):
    for metrics in ranks(alone):
        assert metrics["grad_norm"] == pytest.approx(math.sqrt(10))
        assert math.isnan(metrics["noise_scale"])
        assert math.isnan(metrics["gradient_square"])


def after_an_error(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 2), metrics=True)
    loss = model(torch.ones(1, 4)).sum()
    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    return model.metrics()["grad_norm"]


def fail(grad):
    raise ZeroDivisionError


def test_a_backward_that_an_exception_ended_leaves_nothing_behind(ranks):
    assert ranks(after_an_error) == pytest.approx([math.sqrt(10)] * 2)


def joined(rank, size):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model = dpfuse.DistributedDataParallel(net, metrics=True)
    seen = []
    with model.join():
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
            seen.append(model.metrics())
    return seen


def test_a_rank_that_has_joined_counts_for_nothing(ranks):
    last = ranks(joined)[1][-1]
    assert last["step"] == 3
    assert math.isnan(last["noise_scale"])  # one rank was left


def every_third(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 2), metrics=3)
    seen = []
    for _ in range(7):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        seen.append(model.metrics()["step"])
    return seen


def test_a_number_measures_every_nth_backward(ranks):
    assert ranks(every_third) == [[1, 1, 1, 4, 4, 4, 7]] * 2


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "20", None])
def test_metrics_is_a_flag_or_a_number(wrong):
    with pytest.raises((TypeError, ValueError), match=r"metrics must be True, False or a whole number .* metrics=20"):
        dpfuse.DataParallel(nn.Linear(4, 2), metrics=wrong)
