"""check_finite: who sends NaN or infinite gradients is named, in time, and only that."""

from __future__ import annotations

import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import dpfuse
from dpfuse.engine.streams import HostCopy
from dpfuse.gradients import finite as finite_module
from tests.distributed.in_place import ALL, large_from

INF, NAN = float("inf"), float("nan")


class Net(nn.Module):
    """The gradient of each parameter is the factor with which it is called, by name."""

    def __init__(self, sparse=False):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, 2))
        self.second = nn.Parameter(torch.ones(7))
        self.third = nn.Parameter(torch.ones(4))
        self.table = nn.Embedding(5, 2, sparse=True) if sparse else None

    def forward(self, **factors):
        total = sum((getattr(self, name) * factors.get(name, 1.0)).sum() for name in ("first", "second", "third"))
        if self.table is not None:
            total = total + (self.table(torch.tensor([1, 3])) * factors.get("table", 1.0)).sum()
        return total


FACES = {
    "views": lambda net, **options: dpfuse.DataParallel(net, **options),
    "private": lambda net, **options: dpfuse.DataParallel(net, gradient_as_bucket_view=False, **options),
    "bucket each": lambda net, **options: dpfuse.DataParallel(net, None, 0, 0, **options),
    "ddp": lambda net, **options: dpfuse.DistributedDataParallel(net, **options),
}


def bad():
    """Two values of `second` that are not finite, and all of `third`."""
    factor = torch.ones(7)
    factor[2], factor[5] = NAN, -INF
    return {"second": factor, "third": INF}


def failing(model, **factors):
    with pytest.raises(dpfuse.DPFuseError) as error:
        model(**factors).backward()
    return str(error.value)


def raised_everywhere(rank, size, face, guilty, large):
    with large_from(ALL if large else 1 << 60):
        model = FACES[face](Net(), check_finite="raise")
        texts = []
        for step in range(1, 5):
            model.zero_grad()
            if step == 3:
                texts.append(failing(model, **(bad() if rank == guilty else {})))
                # The step was not completed; what follows is whole, and has its number.
                model.zero_grad()
            model(second=float(rank)).backward()
            assert model.second.grad.eq((size - 1) / 2).all() if face != "ddp" else True
            assert model.reducer.completed == step
    return texts


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(("face", "large"), [*((face, False) for face in FACES), ("private", True)])
def test_a_rank_that_sends_nan_is_named_on_every_rank(ranks, face, guilty, large):
    told = ranks(raised_everywhere, face, guilty, large)
    for rank, (text,) in enumerate(told):
        if rank == guilty:
            assert text.startswith(f"rank {guilty}: in synchronised backward 3 this rank sent 6 gradient values")
            assert "2 in 'second'" in text
            assert "4 in 'third'" in text
            assert "'first'" not in text
        else:
            assert f"the backward failed on rank {guilty} of 2" in text
        assert "No rank's gradients of this backward are averaged" in text


def in_the_first(rank, size, face):
    return failing(FACES[face](Net(), check_finite="raise"), **(bad() if rank else {}))


@pytest.mark.parametrize("face", ["views", "ddp"])
def test_the_first_backward_is_looked_at_as_well(ranks, face):
    assert "synchronised backward 1 this rank" in ranks(in_the_first, face)[1]


def accumulated(rank, size, views):
    model = dpfuse.DataParallel(Net(), gradient_as_bucket_view=views, check_finite="raise")
    for step in range(3):
        model.zero_grad()
        for micro in range(3):
            with model.no_sync(enabled=micro < 2):
                loss = model(**(bad() if (rank, step, micro) == (1, 2, 0) else {}))
                if (step, micro) == (2, 2):
                    return failing_loss(loss)
                loss.backward()
    raise AssertionError


def failing_loss(loss):
    with pytest.raises(dpfuse.DPFuseError) as error:
        loss.backward()
    return str(error.value)


@pytest.mark.parametrize("views", [True, False])
def test_what_was_accumulated_inside_no_sync_is_found_when_it_is_sent(ranks, views):
    told = ranks(accumulated, views)
    assert "backward 3 this rank sent 6 gradient values" in told[1]
    assert "failed on rank 1" in told[0]


def on_the_wire(rank, size):
    model = dpfuse.DataParallel(Net(), wire_dtype=torch.float16, check_finite="raise")
    model(second=1e4).backward()  # whose sum would not fit in float16
    return failing(model, first=1e6 if rank else 1.0)


def test_what_overflows_on_its_way_is_found(ranks):
    assert "sent 6 gradient values that are NaN or infinite: 6 in 'first'" in ranks(on_the_wire)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_large_numbers_are_no_finding(rank, size, dtype):
    model = dpfuse.DataParallel(Net().to(dtype), check_finite="raise")
    largest = torch.finfo(dtype).max
    for _ in range(3):
        model.zero_grad()
        model(first=largest, second=largest, third=largest).backward()
    assert model.second.grad.eq(largest).all()


def sparse_rows(rank, size):
    model = dpfuse.DataParallel(Net(sparse=True), check_finite="raise")
    for _ in range(2):
        model.zero_grad()
        model().backward()
    return failing(model, table=NAN if rank else 1.0)


def test_sparse_rows_are_looked_at(ranks):
    told = ranks(sparse_rows)
    assert "4 in 'table.weight'" in told[1]
    assert "failed on rank 1" in told[0]


def with_hook(rank, size, sparse):
    model = dpfuse.DistributedDataParallel(Net(sparse), check_finite="raise", bucket_cap_mb=1e-9)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        model.zero_grad()
        model().backward()
    text = failing(model, **({"table" if sparse else "first": NAN} if rank else {}))
    model.zero_grad()
    model().backward()
    assert model.module.first.grad.eq(1).all()
    return text


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_communication_hook_gets_is_looked_at(ranks, sparse):
    told = ranks(with_hook, sparse)
    assert ("4 in 'table.weight'" if sparse else "6 in 'first'") in told[1]
    assert "failed on rank 1" in told[0]


def warned(rank, size, face):
    model = FACES[face](Net(), check_finite="warn")
    texts = []
    for step in range(1, 5):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**(bad() if rank == 1 and step in (2, 3) else {})).backward()
        texts.append([str(warning.message) for warning in caught])
        module = model.module
        assert module.first.grad.eq(1).all()
        assert module.third.grad.isinf().all() == (step in (2, 3))
    return texts


@pytest.mark.parametrize("face", list(FACES))
def test_a_warning_comes_once_per_step_on_the_rank_that_has_them(ranks, face):
    quiet, (first, second, third, fourth) = ranks(warned, face)
    assert quiet == [[]] * 4
    assert (first, fourth) == ([], [])
    for step, texts in ((2, second), (3, third)):
        (text,) = texts
        assert text.startswith(f"rank 1: in synchronised backward {step} this rank sent 6 gradient values")
        assert "2 in 'second'" in text


def test_a_warning_that_is_made_an_error_leaves_no_rank_waiting(rank, size):
    model = dpfuse.DataParallel(Net(), check_finite="warn")
    model().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if rank:
            with pytest.raises(UserWarning, match="rank 1: in synchronised backward 2"):
                model(**bad()).backward()
        else:
            model().backward()
    model.zero_grad()
    model().backward()
    assert model.first.grad.eq(1).all()


def test_by_default_nobody_looks(rank, size):
    model = dpfuse.DataParallel(Net(), check_training="off")  # which has a step of its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**(bad() if rank else {})).backward()
    assert all(bucket.parts.steps == () for bucket in model.reducer.buckets)


def test_what_an_interrupted_backward_has_counted_is_forgotten(rank, size):
    """What a backward has counted that an exception ended is not told of the next one, which has its number."""
    model = dpfuse.DataParallel(Net(), None, 0, 0, check_finite="raise")
    for _ in range(2):
        model().backward()
    model.zero_grad()
    loss = model(**bad())
    handle = model.first.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    model().backward()
    assert model.second.grad.eq(1).all()


def a_step_late(rank, size, mode):
    """As on a GPU: counts are copied without waiting, and looked at when the next backward ends."""
    read = []

    class Noted(HostCopy):
        def read(self):
            read.append(self)
            return super().read()

    with mock.patch.object(finite_module, "HostCopy", Noted):
        model = dpfuse.DataParallel(Net(), None, 0, 0, check_finite=mode)
        features = model._sync.grads._maker.features
        (check,) = (each for each in features if isinstance(each, finite_module.FiniteCheck))
        check.late = True
        texts = []
        for step in range(1, 6):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    model(**(bad() if rank == 1 and step == 1 else {})).backward()
                    texts.append(None)
                except dpfuse.DPFuseError as error:
                    texts.append(str(error))
            texts[-1] = texts[-1] or "; ".join(str(warning.message) for warning in caught) or None
        assert read
        return texts


@pytest.mark.parametrize("mode", ["warn", "raise"])
def test_what_is_not_waited_for_is_told_when_the_next_backward_ends(ranks, mode):
    peer, (at_once, next_step, *later) = ranks(a_step_late, mode)
    assert at_once is None
    assert "in synchronised backward 1 this rank sent 6 gradient values" in next_step
    assert later == [None] * 3
    assert peer[0] is None
    assert ("failed on rank 1" in peer[1]) if mode == "raise" else (peer[1] is None)


@pytest.mark.parametrize("value", ["on", True, None, 1])
def test_a_wrong_mode_is_refused(group, value):
    for face in (dpfuse.DataParallel, dpfuse.DistributedDataParallel):
        with pytest.raises(ValueError, match=re.escape("check_finite must be one of 'off', 'warn', 'raise', got")):
            face(Net(), check_finite=value)


def test_ranks_must_agree_on_it(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match="option check_finite"):
        dpfuse.DataParallel(Net(), check_finite="raise" if rank else "off")
