"""Gradients as eight-bit blocks: what a model is promised elsewhere holds with them, too."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from bench.network import Network, simulated_network
from dpfuse.engine.exchanges.ordered import Blocks, OrderedParts
from dpfuse.engine.exchanges.sparse import SparseRows
from tests.distributed.random_models import same_bits
from tests.distributed.wires.hard_gradients import Given, alike_everywhere, sent, warnings_are_errors

FACES = (dpfuse.DataParallel, dpfuse.DistributedDataParallel)
WIRES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Several(nn.Module):
    """Parameters of every kind."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)
        self.wide = nn.Parameter(torch.randn(37, dtype=torch.float64))
        self.pair = nn.Parameter(torch.randn(45, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(70).bfloat16())
        self.tiny = nn.Parameter(torch.randn(3).half())
        self.strided = nn.Parameter(torch.randn(80, 60).t())
        self.nothing = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.zeros(5))

    def forward(self, words, factor):
        dense = [self.small, self.tiny, self.strided, self.nothing, self.wide]
        total = self.table(words).square().sum() + sum((p * p * factor).sum().double() for p in dense)
        return total + (self.pair * self.pair.conj()).real.sum() * factor


def flat(grad):
    """Real numbers as float32, in the order of memory."""
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    return grad.t().reshape(-1).float() if grad.dim() == 2 and not grad.is_contiguous() else grad.reshape(-1).float()


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_kind_of_gradient_arrives(rank, size):
    torch.manual_seed(0)
    net = Several()
    words, factors = torch.tensor([rank, 7, 7]), [1.1 + peer for peer in range(size)]
    local = []
    for peer in range(size):
        bare = copy.deepcopy(net)
        bare(torch.tensor([peer, 7, 7]), factors[peer]).backward()
        local.append(dict(bare.named_parameters()))
    for wire in WIRES:
        for face in FACES:
            alone = {"comm_buffer_size" if face is dpfuse.DataParallel else "bucket_cap_mb": 0}
            for options in (alone, {"deterministic": True}, {"gradient_as_bucket_view": True}):
                model = face(copy.deepcopy(net), wire_dtype=wire, find_unused_parameters=True, **options)
                for _ in range(2):
                    model.zero_grad()
                    model(words, factors[rank]).backward()
                parts = [bucket.parts for bucket in model.reducer.buckets]
                formats = {type(each.buffer.format) for each in parts}
                assert Blocks in formats
                assert SparseRows in {type(each.exchange) for each in parts}
                assert (OrderedParts in formats) == ("deterministic" in options)
                assert parts[-1].report is not None
                params = dict(model.module.named_parameters())
                assert params.pop("unused").grad is None
                means = []
                for name, param in params.items():
                    grads = [peer[name].grad for peer in local]
                    assert param.grad.dtype == param.dtype
                    if name == "table.weight":
                        expected = sum(grad.to_dense() for grad in grads) / size
                        torch.testing.assert_close(param.grad.to_dense(), expected)
                        continue
                    if name == "wide":
                        torch.testing.assert_close(param.grad, sum(grads) / size)
                        continue
                    means.append(param.grad)
                    rows = [flat(grad) * (1 / size) for grad in grads]
                    total = sent(rows[0], wire)
                    for row in rows[1:]:
                        total = total + sent(row, wire)
                    assert same_bits(flat(param.grad), sent(total, wire).to(param.grad.real.dtype).float()), name
                norm = torch.stack([mean.abs().float().norm() for mean in [*means, params["wide"].grad]]).norm()
                full = (norm.square() + params["table.weight"].grad.coalesce().values().norm().square()).sqrt()
                torch.testing.assert_close(model.grad_norm().float(), full)


@warnings_are_errors()  # nothing is announced without a reason
def health(rank, size):
    """What a rank tells the others does not suffer."""
    gradients = [torch.randn(700, generator=torch.Generator().manual_seed(rank)), torch.ones(40)]

    def wrapped(**options):
        model = dpfuse.DataParallel(
            Given([700, 40]), comm_buffer_size=0, wire_dtype=WIRES[0], find_unused_parameters=True, **options
        )
        model(gradients).backward()
        model.zero_grad()
        return model

    # Values that are not finite are NaN on every rank, and only they; who checks for them is told.
    strange = [gradients[0].clone(), gradients[1]]
    if rank == 1:
        strange[0][3], strange[0][40], strange[0][41] = float("nan"), float("inf"), float("-inf")
    model = wrapped()
    model(strange).backward()
    got = model.weights[0].grad
    assert [index for index, good in enumerate(got.isfinite().tolist()) if not good] == [3, 40, 41]
    assert alike_everywhere(got.nan_to_num(0.5))
    model = wrapped(check_finite="raise")
    text = r"synchronised backward 2 .*3 .*NaN or infinite|failed on rank 1 of 2"
    with pytest.raises(dpfuse.DPFuseError, match=text) as raised:
        model(strange).backward()
    assert rank != 1 or "weights.0" in str(raised.value)
    model.zero_grad()
    model(gradients).backward()
    assert model.weights[0].grad.isfinite().all()
    model = wrapped(check_finite="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(strange).backward()
    assert len(caught) == (rank == 1)

    # A backward that fails on one rank fails on all.
    model = wrapped()
    handle = model.weights[0].register_hook(planted) if rank == 1 else None
    with pytest.raises((dpfuse.DPFuseError, KeyError)[rank], match=("failed on rank 1 of 2", "planted")[rank]):
        model(gradients).backward()
    if rank == 1:
        handle.remove()
    model.zero_grad()
    model(gradients).backward()

    # One rank in no_sync() only, with too many backwards, is found out; the flags of used parameters arrive.
    model = wrapped()
    with model.no_sync():
        model(gradients).backward()
    model([gradients[0] if rank == 0 else None, gradients[1]]).backward()
    assert model.other.grad is None
    expected = sent(sum(sent(one, WIRES[0]) for one in halves(rank, gradients[0])), WIRES[0])
    assert same_bits(model.weights[0].grad, expected)
    with pytest.raises(dpfuse.DPFuseError, match="has run"):
        with model.no_sync(enabled=rank == 1):
            model(gradients).backward()
        if rank == 1:
            model(gradients).backward()
            model(gradients).backward()
    dist.barrier()


def halves(rank, own):
    """What each rank sends: rank 0 accumulated two gradients, rank 1 one."""
    mine = own * (2 if rank == 0 else 1) * 0.5
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, mine)
    return parts


def planted(_grad):
    raise KeyError("planted")


def test_ranks_tell_each_other_as_ever(ranks):
    ranks(health)


def test_by_hand_after_changes_and_with_uneven_inputs(rank, size):
    gradients = [torch.randn(900, generator=torch.Generator().manual_seed(rank)), torch.full((33,), rank + 1.1)]
    for dtype in (torch.float32, torch.bfloat16):
        model = dpfuse.DataParallel(Given([900, 33], dtype), wire_dtype=WIRES[0], find_unused_parameters=True)
        own = [gradient.to(dtype) for gradient in gradients]
        model(own).backward()
        params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in own]
        for param, gradient in zip(params, own, strict=True):
            param.grad = gradient.clone()
        dpfuse.fused_allreduce_gradients(params, wire_dtype=WIRES[0])
        for param, weight in zip(params, model.weights, strict=True):
            assert param.grad.dtype == dtype
            assert same_bits(param.grad, weight.grad)  # blocks are a gradient's own: the layout plays no part
    # A ring of bytes does not exist, nor does a plan for what is no all-reduce.
    with pytest.raises(
        dpfuse.DPFuseError, match=r"autotune was called on a model with wire_dtype=torch\.float8_e4m3fn"
    ):
        dpfuse.autotune(model)
    # A model that changes plans its blocks anew.
    model = dpfuse.DataParallel(Given([900, 33]), wire_dtype=WIRES[0], find_unused_parameters=True)
    model(gradients).backward()
    model.zero_grad()
    model.weights.append(nn.Parameter(torch.zeros(100)))
    more = [*gradients, torch.full((100,), 1.0 + rank)]
    for _ in range(2):
        model.zero_grad()
        model(more).backward()
        assert model.weights[2].grad.tolist() == [(1.0 + size) / 2] * 100
    clone = copy.deepcopy(model)
    clone.zero_grad()
    clone(more).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(clone.weights, model.weights, strict=True))
    with dpfuse.time_communication(model) as times:
        model.zero_grad()
        model(more).backward()
    assert times.steps == 1
    assert times.collectives == len(model.reducer.buckets)
    # Uneven inputs: who has none left sends zeros, and the others may be divided by their own number.
    model = dpfuse.DistributedDataParallel(Given([900, 33]), wire_dtype=WIRES[0], find_unused_parameters=True)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            model.zero_grad()
            model(gradients).backward()
            if step == 2:
                assert same_bits(model.module.weights[0].grad, sent(sent(gradients[0], WIRES[0]), WIRES[0]))
    dist.barrier()


def test_what_cannot_be_meant_is_named(group):
    param = nn.Parameter(torch.ones(3))
    for call in (*FACES, lambda module, **options: dpfuse.fused_allreduce_gradients([param], **options)):
        with pytest.raises(
            ValueError, match=r"wire_dtype must be None or one of .*float8_e4m3fn.*e5m2, or a pair .*, got torch.float8"
        ):
            call(nn.Linear(2, 2), wire_dtype=torch.float8_e4m3fnuz)


def test_a_back_end_without_all_to_all_of_bytes_is_named():
    text = r"rank 0: wire_dtype=torch.float8_e5m2 needs a back end .*no bytes.*or leave wire_dtype out"
    exchange = Network.alltoall_base

    def floats_only(self, output, *rest):
        if output.dtype == torch.uint8:
            raise RuntimeError("no bytes here")
        return exchange(self, output, *rest)

    with simulated_network(), mock.patch.object(Network, "alltoall_base", floats_only):
        for face in FACES:
            face(nn.Linear(2, 2), deterministic=True)
            with pytest.raises(dpfuse.DPFuseError, match=text):
                face(nn.Linear(2, 2), wire_dtype=torch.float8_e5m2)
