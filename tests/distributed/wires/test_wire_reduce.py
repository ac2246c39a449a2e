"""A pair as `wire_dtype`: how narrow numbers are added up, what error that leaves, and what it needs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import dpfuse
from bench.network import Network, simulated_network
from dpfuse.engine.exchanges.all_reduce import AllReduce
from dpfuse.engine.exchanges.in_place import InPlace
from dpfuse.engine.exchanges.ordered import OrderedSum
from tests.distributed.in_place import copied
from tests.distributed.random_models import same_bits
from tests.distributed.wires.hard_gradients import Given, alike_everywhere, hard_gradients, sent, worst_share_of_bound

FACES = (dpfuse.DataParallel, dpfuse.DistributedDataParallel)
PAIR = (torch.bfloat16, torch.float32)
CASES = [
    torch.bfloat16,
    torch.float16,
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float8_e4m3fn, torch.float32),
    torch.float8_e5m2,
]


def ddp_options(face, megabytes):
    if face is dpfuse.DataParallel:
        return {"comm_buffer_size": megabytes, "last_comm_buffer_size": megabytes}
    return {"bucket_cap_mb": megabytes}


def means_of(parts, rank, face=dpfuse.DataParallel, **options):
    """The mean of each kind of gradients, all in one model, after the backward that settles its buckets."""
    model = face(Given([len(part[0]) for part in parts]), find_unused_parameters=True, **options)
    for _ in range(2):
        model.zero_grad()
        model([part[rank] for part in parts]).backward()
    net = model.module
    assert net.other.grad is None  # the flags survive every wire
    return [weight.grad for weight in net.weights], model.reducer.buckets


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_errors_keep_to_the_theory_and_all_ranks_are_alike(rank, size):
    names, parts = zip(*hard_gradients(size, 1500), strict=True)
    worst = {}
    for order, wire_dtype in enumerate(CASES):
        wire = wire_dtype[0] if isinstance(wire_dtype, tuple) else wire_dtype
        once = wire != wire_dtype or wire == torch.float8_e5m2
        face = FACES[(order + size) % 2]  # each of them with each case, on some number of ranks
        options = {**ddp_options(face, 4096 / 2**20), "wire_dtype": wire_dtype}
        means, buckets = means_of(parts, rank, face, **options)
        assert len(buckets) > 2
        kind = OrderedSum if once else AllReduce
        assert all(type(bucket.parts.exchange) is kind for bucket in buckets if bucket.params)
        for name, part, mean in zip(names, parts, means, strict=True):
            share = worst_share_of_bound(mean, part, wire, once=once)
            assert share <= 1, (name, wire_dtype, share)
            worst[wire_dtype] = max(share, worst.get(wire_dtype, 0))
            assert alike_everywhere(mean)
            if once:
                total = sent(part[0] * (1 / size), wire)
                for values in part[1:]:
                    total = total + sent(values * (1 / size), wire)
                assert same_bits(mean, sent(total, wire)), (name, wire)
    assert min(worst.values()) > 0.3  # the bounds are not so wide that nothing could break them


@pytest.mark.ranks(size=3)
def test_other_options_are_as_ever(rank, size):
    generator = torch.Generator().manual_seed(rank)
    grad = torch.randn(3000, generator=generator)
    # Averaging by hand gives the wrapper's bits; each gradient keeps its dtype.
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        own = grad.to(dtype)
        param = nn.Parameter(torch.zeros_like(own))
        for wire in (torch.bfloat16, torch.float32):
            param.grad = own.clone()
            dpfuse.fused_allreduce_gradients([param], wire_dtype=(wire, torch.float32))
            assert param.grad.dtype == dtype
            travels = dtype if dtype == torch.float64 else wire
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            if torch.finfo(travels).bits == 16:
                parts = [torch.empty_like(own) for _ in range(size)]
                dist.all_gather(parts, own)
                narrow = [(part.to(wide) * (1 / size)).to(travels).to(wide) for part in parts]
                expected = (narrow[0] + narrow[1] + narrow[2]).to(travels).to(dtype)
            else:  # a ring in float32 or float64 is as good
                again = nn.Parameter(torch.zeros_like(own))
                again.grad = own.clone()
                dpfuse.fused_allreduce_gradients([again], wire_dtype=wire)
                expected = again.grad
            assert same_bits(param.grad, expected), (dtype, wire)
    # 16-bit parameters that travel as they are may lie in the buffers; nothing large is reduced in place.
    model = dpfuse.DataParallel(nn.Linear(700, 800).bfloat16(), wire_dtype=PAIR)
    x = torch.randn(4, 700, generator=generator).bfloat16()
    bucket = model.reducer.buckets[0]  # before they are made anew
    model(x).sum().backward()
    assert type(bucket.parts.exchange) is OrderedSum
    storage = bucket.parts.buffer.flat.untyped_storage().data_ptr()
    assert all(param.grad.untyped_storage().data_ptr() == storage for param in bucket.params)
    with copied():
        model = dpfuse.DataParallel(
            nn.Linear(700, 800), gradient_as_bucket_view=False, wire_dtype=(torch.float32, torch.float32)
        )
    assert any(type(bucket.parts.exchange) is InPlace for bucket in model.reducer.buckets)
    # What was accumulated is sent as a whole, and float16 need not hold the sum of large numbers.
    large = torch.full((500,), 40000.0)
    model = dpfuse.DataParallel(
        Given([500]), wire_dtype=(torch.float16, torch.float32), gradient_scale=1.0, find_unused_parameters=True
    )
    for micro in range(3):
        with model.no_sync(enabled=micro < 2):
            model([large / 4]).backward()
    assert model.weights[0].grad.tolist() == [0.75 * 40000 * size] * 500


def test_ranks_must_agree_and_back_ends_must_be_able(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match=r"option wire_dtype = \(torch\.bfloat16, torch\.float32\)"):
        dpfuse.DataParallel(nn.Linear(2, 2), wire_dtype=[PAIR, torch.bfloat16][rank])
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    for wire in (torch.bfloat16, PAIR):
        with pytest.raises(dpfuse.DPFuseError, match="wire_dtype"):
            dpfuse.fused_allreduce_gradients([param], wire_dtype=wire if rank else None)
    with pytest.raises((ValueError, dpfuse.DPFuseError)[rank], match="the second dtype of wire_dtype must be"):
        dpfuse.fused_allreduce_gradients([param], wire_dtype=(PAIR[0], PAIR[0]) if rank == 0 else None)

    def refuse(*_):
        raise RuntimeError("Backend does not support alltoall_base")

    text = rf"rank {rank}: wire_dtype=\(torch.float16, torch.float32\) needs .*not support.*leave wire_dtype out"
    with mock.patch("dpfuse.comm.collective.start_all_to_all", refuse):
        with pytest.raises(dpfuse.DPFuseError, match=text):
            dpfuse.fused_allreduce_gradients([param], wire_dtype=(torch.float16, torch.float32))
        # float32 travels by an all-reduce, which is all that it needs.
        dpfuse.fused_allreduce_gradients([param], wire_dtype=(torch.float32, torch.float32))
    assert param.grad.tolist() == [1.0] * 3
    for wire in (torch.bfloat16, PAIR):
        model = dpfuse.DistributedDataParallel(nn.Linear(2, 2), wire_dtype=wire)
        with pytest.raises(
            dpfuse.DPFuseError, match=r"a communication hook was registered with wire_dtype=.*Leave wire_dtype"
        ):
            model.register_comm_hook(None, lambda state, bucket: None)
    dist.barrier()


def test_a_back_end_without_all_to_all_is_named_at_construction(monkeypatch):
    text = r"rank 0: wire_dtype=\(torch.bfloat16, torch.float32\) needs a back end with all-to-all .* simulated did not"
    with simulated_network():
        for name in ("alltoall_base", "_allgather_base"):
            with monkeypatch.context() as patch:
                patch.delattr(Network, name)
                for face in FACES:
                    face(nn.Linear(2, 2), wire_dtype=torch.bfloat16)
                    face(nn.Linear(2, 2), wire_dtype=(torch.float32, torch.float32))
                    with pytest.raises(dpfuse.DPFuseError, match=text):
                        face(nn.Linear(2, 2), wire_dtype=PAIR)


def test_what_cannot_be_meant_is_named(group):
    wrong = {
        (torch.bfloat16, torch.bfloat16): "second dtype of wire_dtype must be torch.float32, .* got torch.bfloat16 in",
        (torch.bfloat16, "fp32"): "second dtype of wire_dtype must be torch.float32, .* got 'fp32' in",
        (torch.bfloat16,): "a pair of two, .*, got 1 values",
        (torch.int8, torch.float32): r"or a pair such as .*, got \(torch.int8, torch.float32\)",
        torch.int8: r"wire_dtype must be None or one of torch.float16, .*got torch.int8",
    }
    param = nn.Parameter(torch.ones(3))
    for face in (*FACES, lambda module, **options: dpfuse.fused_allreduce_gradients([param], **options)):
        for value, text in wrong.items():
            with pytest.raises(ValueError, match=text):
                face(nn.Linear(2, 2), wire_dtype=value)
        with pytest.raises(TypeError, match="unexpected keyword argument 'wire_reduce'"):
            face(nn.Linear(2, 2), wire_reduce="fp32")
    precision = _MixedPrecision(reduce_dtype=torch.bfloat16)
    for wire in (torch.bfloat16, PAIR):
        dpfuse.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=precision, wire_dtype=wire)
    text = r"wire_dtype=torch.float16 was passed with reduce_dtype=torch.bfloat16 of mixed_precision, expected one"
    with pytest.raises(ValueError, match=text):
        dpfuse.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=precision, wire_dtype=torch.float16)
