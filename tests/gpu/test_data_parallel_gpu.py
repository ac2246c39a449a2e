"""DataParallel on real hardware: NCCL at world size 1, and two gloo ranks that share the GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from dpfuse.comm import collective
from dpfuse.engine.exchanges import in_place as in_place_exchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)
        self.spare = nn.Linear(8, 5)

    def forward(self, x, spare=False):
        h = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(h) + self.spare(h) if spare else self.head(h)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(4, 3, 8, 8, generator=generator).to("cuda", dtype).to(memory_format=torch.channels_last)


def beside_ddp(rank, dtype, views, steps=10):
    torch.manual_seed(0)
    bare = Net().to("cuda", dtype)
    ours = dpfuse.DataParallel(
        copy.deepcopy(bare), None, 0.001, 0.0005, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    theirs = DistributedDataParallel(copy.deepcopy(bare), find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, theirs)]
    for step in range(steps):
        spare = (step + rank) % 2 == 1
        for model in (ours, theirs):
            model(batch(rank, step, dtype), spare).float().pow(2).sum().backward()
        for (name, a), b in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), f"{name} in step {step}"
            assert a.grad is None or torch.equal(a.grad, b.grad), f"{name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ten_steps_over_nccl_equal_ddp_bitwise(nccl, dtype, views, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    beside_ddp(0, dtype, views)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ten_steps_with_private_gradients_in_place_equal_ddp_bitwise(nccl, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(in_place_exchange, "LARGE", 1)
    beside_ddp(0, dtype, False)


def test_large_private_gradients_are_neither_packed_nor_unpacked(nccl):
    net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
    model = dpfuse.DataParallel(net, None, 8, 0, gradient_as_bucket_view=False)
    x = torch.randn(8, 1024, device="cuda")
    for _ in range(5):
        model(x).sum().backward()
        model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(x).sum().backward()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum(bucket.parts.exchange.bytes_in_place for bucket in model.reducer.buckets) == 8 * 4 << 20
    assert sum("_flatten_kernel" in name for name in names) == 1  # of the report
    assert not any("_unflatten_kernel" in name for name in names)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.ranks(timeout=120)
def test_two_nccl_ranks_scale_in_the_collective(rank, size, dtype):
    """The factor of the mean in the collective, beside a multiplication and a plain sum."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = dist.new_group(backend="nccl")
    large = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(device, dtype) for _ in range(3)]
    small = large[0].clone()
    expected = [tensor / 3 for tensor in large] + [small.clone()]
    for tensor in expected:
        dist.all_reduce(tensor, group=group)
    collective.all_reduce_together([small], large, 1 / 3, group).wait()
    for got, mean in zip((*large, small), expected, strict=True):
        torch.testing.assert_close(got, mean)


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.ranks(timeout=120)
def test_two_gloo_ranks_on_one_gpu_equal_ddp_bitwise(rank, size, views):
    torch.backends.cudnn.deterministic = True
    torch.cuda.set_device(0)
    beside_ddp(rank, torch.float32, views, steps=5)


@pytest.mark.ranks(timeout=120)
def test_the_manual_path_averages_on_the_gpu(rank, size):
    torch.cuda.set_device(0)
    model = dpfuse.DataParallel(Net().cuda(), find_unused_parameters=True)
    with model.no_sync():
        model(batch(rank, 0)).pow(2).sum().backward()
    local = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    dpfuse.fused_allreduce_gradients(model.parameters())
    means = [gradient.cpu() / size for gradient in local]
    for value in means:
        dist.all_reduce(value)
    averaged = [param.grad.cpu() for param in model.parameters() if param.grad is not None]
    assert all(map(torch.equal, averaged, means))


def test_gradients_are_final_on_the_current_stream_when_backward_returns(nccl):
    """Clipping and stepping right after backward, without any synchronisation, beside a bare module."""
    torch.manual_seed(0)
    bare = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    model = dpfuse.DataParallel(copy.deepcopy(bare), None, 4, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (bare, model)]
    for step in range(20):
        x = torch.randn(64, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for net, optimizer in zip((bare, model), optimizers, strict=True):
            net(x).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(model.module.parameters()), list(bare.parameters()))


def test_a_launch_is_one_kernel_per_bucket_and_uploads_nothing_in_steady_state(nccl):
    model = dpfuse.DataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]).cuda(), None, 0.05, 0.01)
    x = torch.randn(8, 64, device="cuda")
    for _ in range(5):
        model(x).sum().backward()
        model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    buckets = len(model.bucket_plan.buckets)
    assert buckets > 1
    assert sum("_flatten_kernel" in name for name in names) == 3 * buckets
    assert not any("_unflatten_kernel" in name for name in names)
    assert sum("Memcpy HtoD" in name for name in names) == 0


def test_communication_is_timed_with_events(nccl):
    model = dpfuse.DataParallel(nn.Linear(2048, 2048).cuda())
    x = torch.randn(8, 2048, device="cuda")
    with dpfuse.time_communication(model) as times:
        for _ in range(3):
            model(x).sum().backward()
    assert (times.steps, times.collectives) == (3, 3 * len(model.bucket_plan.buckets))
    assert times.nbytes >= 3 * 4 * 2048 * 2049
    assert times.seconds >= 0
    assert times.exposed >= 0


def test_a_peers_failure_is_known_after_the_next_backward_and_gradients_are_nan_until_then(rank, size):
    torch.cuda.set_device(0)
    model = dpfuse.DataParallel(nn.Linear(4, 4).cuda())
    x = torch.ones(2, 4, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    if rank == 0:
        # On CUDA the report of a peer is read without waiting, after the next backward; until then no step is finite.
        model(x).sum().backward()
        assert all(param.grad.isnan().all() for param in model.parameters())
    else:
        planted = model.module.bias.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        planted.remove()
    model.zero_grad()
    # The rank that failed raises with its peers, so that the next batches pair again.
    with pytest.raises(dpfuse.DPFuseError, match=r'the backward failed on rank 1 of 2.*needs check="strict"'):
        model(x).sum().backward()
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())


def test_a_strict_check_raises_in_the_same_backward(rank, size):
    torch.cuda.set_device(0)
    model = dpfuse.DataParallel(nn.Linear(4, 4).cuda(), check="strict")
    x = torch.ones(2, 4, device="cuda")
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    planted = model.module.bias.register_hook(lambda grad: 1 / 0) if rank == 1 else None
    with pytest.raises(ZeroDivisionError if rank == 1 else dpfuse.DPFuseError):
        model(x).sum().backward()
    if planted is not None:
        planted.remove()
    model.zero_grad()
    model(x).sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("weight", [70001.0, 257.0])
def test_a_weight_multiplies_gradients_of_16_bits_without_rounding_itself(nccl, weight, accumulate):
    """16 bits cannot hold these weights. Rounded, all gradients that travel in place would be wrong by one factor."""
    bare = nn.Linear(2048, 1024).cuda().bfloat16()
    face = dpfuse.DataParallel if accumulate else dpfuse.DistributedDataParallel
    model = face(copy.deepcopy(bare), **({"accumulate_in_buckets": True} if accumulate else {}))
    inputs = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        bare.zero_grad()
        model.zero_grad()
        if accumulate:
            with model.no_sync():
                model(inputs).float().sum().backward()
            bare(inputs).float().sum().backward()
        model.set_gradient_weight(weight)
        model(inputs).float().sum().backward()
        bare(inputs).float().sum().backward()
        ratio = model.module.weight.grad.double().norm() / bare.weight.grad.double().norm()
        assert ratio.item() == pytest.approx(1.0, abs=5e-4)
