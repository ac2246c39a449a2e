"""Errors of peers that are read one step later, as on a GPU, with tensors on the CPU: gradients are NaN meanwhile."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.bucket_maker import BucketMaker
from dpfuse.engine.comm_buffer import CommBuffer, zeros_on
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.report import Report
from dpfuse.engine.spoiler import Spoiler, spoiler_of

WRAPS = {
    "views": {},
    "private": {"gradient_as_bucket_view": False},
    "bfloat16": {"wire_dtype": torch.bfloat16},
}


@contextmanager
def as_on_a_gpu():
    """Reports are read one step later, and a spoiler is on the device."""
    spoiled = mock.patch("dpfuse.engine.bucket_maker.spoiler_of", side_effect=lambda params, *_: Spoiler(params))
    late = property(lambda self: False, lambda self, value: None)
    with mock.patch.object(Report, "is_on_cpu", late, create=True), spoiled:
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.table(x) * self.turn).real)


def is_nan(grad):
    return (grad.coalesce().values() if grad.is_sparse else grad).isnan().all()


def a_peer_fails(rank, size, kind, first, check):
    with as_on_a_gpu():
        model = dpfuse.DataParallel(Net(), None, 0, 0, check=check, **WRAPS[kind])
        used = list(model.module.parameters())
        x = torch.tensor([1, 2])
        for _ in range(0 if first else 3):
            model.zero_grad()
            model(x).sum().backward()
            assert not any(is_nan(param.grad) for param in used)
        model.zero_grad()
        late = check == "deferred" and not first
        if rank == 1:
            planted = model.module.head.bias.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x).sum().backward()
            planted.remove()
        elif not late:
            with pytest.raises(dpfuse.DPFuseError, match="the backward failed on rank 1 of 2"):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
            assert all(is_nan(param.grad) for param in used)
        model.zero_grad()
        if late:  # the rank that failed raises with its peers, so that the next batches pair again
            with pytest.raises(dpfuse.DPFuseError, match=r'failed on rank 1 of 2.*needs check="strict"'):
                model(x).sum().backward()
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
            assert not any(is_nan(param.grad) for param in used)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check", ["deferred", "strict"])
@pytest.mark.parametrize("kind", WRAPS)
def test_until_a_peers_failure_is_read_gradients_are_nan(ranks, kind, check):
    ranks(a_peer_fails, kind, False, check)


def views_are_filled_in_their_buffers(rank, size, freezes):
    filled = []
    fill = Spoiler.fill_buffers

    def noted(spoiler, buffers, pairs, copy=None):
        filled.append(len(buffers))
        fill(spoiler, buffers, pairs, copy)

    with as_on_a_gpu(), mock.patch.object(Spoiler, "fill_buffers", noted):
        chain = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
        model = dpfuse.DataParallel(chain, None, 4e-5, 4e-5)
        params, x = list(chain.parameters()), torch.ones(2, 3)
        for step in range(4):
            model.zero_grad()
            if freezes and step == 3:
                params[-1].requires_grad_(False)
                params[-1].grad = torch.full((3,), 5.0)  # its own, not a view
            model(x).sum().backward()
        buffers = [bucket.parts.buffer for bucket in model.reducer.buckets]
        assert len(buffers) > 1
        assert filled == [len(buffers)] * (2 if freezes else 3), "the first backward is read at once"
        pairs = torch.tensor([1.0, 1.0])
        if not freezes:
            gaps = [buffer.flat.clone() for buffer in buffers]
            spoiler = Spoiler(params)
            fill(spoiler, buffers, pairs)
            assert all(is_nan(param.grad) for param in params)
            for before, buffer in zip(gaps, buffers, strict=True):
                between = ~buffer.flat.isnan()
                assert between.sum() == buffer.flat.numel() - sum(param.numel() for param in buffer.params)
                assert torch.equal(buffer.flat[between], before[between]), "the report and the gaps are kept"
            buffers[0].renew()
            fill(spoiler, buffers, pairs)
            assert all(view.isnan().all() for buffer in buffers for view in buffer.views)


@pytest.mark.parametrize("freezes", [False, True])
def test_where_all_gradients_are_views_the_buffers_are_filled(ranks, freezes):
    ranks(views_are_filled_in_their_buffers, freezes)


def test_the_guard_keeps_no_buffer():
    plan = plan_buckets([ParamSpec("a", (4,), "float32")], 1, 1)
    params = [nn.Parameter(torch.ones(4))]
    buffer = CommBuffer(plan.buckets[0], params, ["a"], Averaging("float32", 1.0), zeros=zeros_on("cpu"))
    spoiler = Spoiler(params)
    spoiler.fill_buffers([buffer], torch.tensor([1.0, 1.0]))
    assert buffer.views[0].isnan().all()
    gone = weakref.ref(buffer.flat)
    del buffer
    assert gone() is None


def test_a_failure_in_the_first_backward_is_read_at_once(ranks):
    ranks(a_peer_fails, "views", True, "deferred")


@pytest.mark.parametrize("check", ["deferred", "strict"])
def test_nothing_is_spoiled_once_the_report_was_read(rank, size, check):
    asked = []
    spoiler = mock.patch.object(BucketMaker, "spoil", lambda maker, in_use: asked.append(in_use.report))
    with as_on_a_gpu(), spoiler:
        model = dpfuse.DataParallel(nn.Linear(2, 2), check=check)
        for first in (True, False):
            model(torch.ones(2)).sum().backward()
            assert len(asked) == (not first and check == "deferred")


def test_there_is_a_guard_only_where_errors_are_late():
    cpu, cuda = [torch.zeros(2)], [mock.Mock(device=torch.device("cuda", 0), dtype=torch.float32)]
    cuda[0].numel.return_value = 2
    cuda[0].is_complex.return_value = False
    cuda[0].grad_dtype = torch.float32
    assert spoiler_of(cpu, 2) is None
    assert spoiler_of(cuda, 1) is None
    assert isinstance(spoiler_of(cuda, 2), Spoiler)


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_another_check_is_refused_by_name(group, face):
    with pytest.raises(ValueError, match="check must be 'deferred' or 'strict', got 'late'"):
        face(nn.Linear(2, 2), check="late")
