"""`wire_dtype` and `gradient_scale`: what travels, what arrives, and how much of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dpfuse


def stock_bf16(state, bucket):
    """torch's own, under a name that DDP does not refuse on gloo."""
    return bf16_compress_hook(state, bucket)


def fp16_scaled_first(state, bucket):
    """What torch's fp16_compress_hook does, but for one thing: it rounds first, and small halves once more."""
    half = (bucket.buffer() / dist.get_world_size()).half()
    dist.all_reduce(half)
    done = torch.futures.Future()
    done.set_result(bucket.buffer().copy_(half))
    return done


HOOKS = {torch.float16: fp16_scaled_first, torch.bfloat16: stock_bf16}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("wire", HOOKS, ids=str)
def test_a_narrow_wire_gives_the_bits_of_ddps_compressing_hook(rank, size, wire):
    torch.manual_seed(3)
    net = Mlp()
    twin = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1e-4)
    twin.register_comm_hook(None, HOOKS[wire])
    model = dpfuse.DataParallel(net, comm_buffer_size=1e-4, last_comm_buffer_size=1e-5, wire_dtype=wire)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    data = torch.Generator().manual_seed(rank)
    for step in range(10):
        x, t = torch.randn(8, 6, generator=data), torch.randn(8, 3, generator=data)
        for wrapper, optimizer in zip((model, twin), optimizers, strict=True):
            (wrapper(x) - t).square().mean().backward()
            if step % 4 != 3:  # sometimes accumulate: the private gradient is what is packed next
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"step {step}"
            if ours.grad is not None:
                assert ours.grad.dtype == torch.float32
                assert torch.equal(ours.grad, theirs.grad), f"step {step}"


class Given(nn.Module):
    """One parameter, whose gradient is whatever it is told."""

    def __init__(self, numel, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.other = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def reduced(gradient, **options):
    model = dpfuse.DataParallel(Given(gradient.numel(), gradient.dtype), find_unused_parameters=True, **options)
    for _ in range(2):  # the recorded backward, and one with buckets that are sent early
        model.zero_grad()
        model(gradient).backward()
    assert model.other.grad is None  # used nowhere; the flags survive every wire and factor
    return model.weight.grad


def gradient_of(rank, dtype):
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype)


def test_each_gradient_is_scaled_rounded_once_and_summed(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        parts = [gradient_of(r, dtype) for r in range(size)]
        for wire in (torch.float16, torch.bfloat16, torch.float32):
            travels = dtype if dtype == torch.float64 else wire
            compute = torch.float64 if dtype == torch.float64 else torch.float32
            first, second = ((part.to(compute) / size).to(travels) for part in parts)
            got = reduced(parts[rank], wire_dtype=wire)
            assert got.dtype == dtype
            assert torch.equal(got, (first + second).to(dtype)), (dtype, wire)


def test_a_16_bit_wire_halves_the_bytes(rank, size):
    sent = {}
    for wire in (None, torch.bfloat16):
        model = dpfuse.DataParallel(nn.Linear(64, 64), wire_dtype=wire)
        with dpfuse.time_communication(model) as times:
            model(torch.ones(1, 64)).sum().backward()
        sent[wire] = times.nbytes - 4 * model.reducer.buckets[-1].parts.report.numel  # which is never narrowed
    assert sent[torch.bfloat16] * 2 == sent[None]


def test_gradient_scale_replaces_the_mean(rank, size):
    parts = [gradient_of(r, torch.float32) for r in range(size)]
    total = parts[0] + parts[1]
    assert torch.equal(reduced(parts[rank], gradient_scale=1.0), total)
    assert torch.equal(reduced(parts[rank], gradient_scale=1.0, gradient_as_bucket_view=False), total)
    assert torch.equal(reduced(parts[rank], gradient_scale=-2), -2 * parts[0] - 2 * parts[1])
    # 40000 fits into float16, the sum of two does not: it must not be formed there.
    large = torch.full((5,), 40000.0)
    assert reduced(large, gradient_scale=1.0, wire_dtype=torch.float16).tolist() == [80000.0] * 5
    # No factor may drown the flags of used parameters.
    for scale in (1e-6, 1e6):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert reduced(torch.zeros(5, dtype=dtype), gradient_scale=scale).tolist() == [0.0] * 5


def _raise(_grad):
    raise KeyError("planted")


def test_a_failed_backward_raises_on_all_ranks_over_a_narrow_wire(rank, size):
    model = dpfuse.DataParallel(Mlp(), comm_buffer_size=0, last_comm_buffer_size=0, wire_dtype=torch.bfloat16)
    model(torch.ones(2, 6)).sum().backward()
    if rank == 1:
        handle = model.module.layers[0].weight.register_hook(_raise)
        with pytest.raises(KeyError, match="planted"):
            model(torch.ones(2, 6)).sum().backward()
        handle.remove()
    else:
        with pytest.raises(dpfuse.DPFuseError, match="failed on rank 1 of 2"):
            model(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())
    dist.barrier()


def test_ranks_must_agree_on_wire_and_factor(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match="wire_dtype"):
        dpfuse.DataParallel(Mlp(), wire_dtype=[torch.bfloat16, None][rank])
    with pytest.raises(dpfuse.DPFuseError, match="gradient_scale"):
        dpfuse.DataParallel(Mlp(), gradient_scale=[1, 0.5][rank])
    dpfuse.DataParallel(Mlp(), gradient_scale=[1, 1.0][rank])  # the same number


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"wire_dtype": torch.int8}, ValueError, "wire_dtype must be None or one of torch.float16, .*got torch.int8"),
        ({"wire_dtype": "bfloat16"}, ValueError, "wire_dtype must be .*got 'bfloat16'"),
        ({"gradient_scale": 0}, ValueError, "gradient_scale must be between 1e-6 and 1e6"),
        ({"gradient_scale": -1e7}, ValueError, "gradient_scale must be between 1e-6 and 1e6"),
        ({"gradient_scale": float("inf")}, ValueError, "gradient_scale must be finite, got inf"),
        ({"gradient_scale": "1"}, TypeError, "gradient_scale must be a number, got '1'"),
    ],
)
def test_a_bad_option_is_refused_by_name(option, error, text):
    with pytest.raises(error, match=text):
        dpfuse.DataParallel(Mlp(), **option)


def test_a_gradient_that_cannot_be_written_is_replaced(rank, size):
    model = dpfuse.DataParallel(nn.Linear(3, 2), wire_dtype=torch.bfloat16)
    model.weight.grad = torch.ones(1, 1).expand(2, 3)
    model.weight.grad = model.weight.grad if rank == 0 else torch.ones(2, 3)
    model.module.bias.register_hook(lambda grad: grad)
    with model.no_sync(False):
        (model.module.bias * 2.0).sum().backward()
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    assert model.bias.grad.tolist() == [2.0, 2.0]


def test_a_sum_is_not_taken_twice(rank, size):
    """One way of summing at a time; means may meet."""
    net = Mlp()
    kept = dpfuse.DataParallel(net, gradient_scale=1.0)
    for options in ({}, {"gradient_scale": 1.0}):
        with pytest.raises(ValueError, match=r"parameter 'layers.0.weight' belongs to another wrapper"):
            dpfuse.DataParallel(net, **options)
    del kept
    mean = dpfuse.DataParallel(net)
    with pytest.raises(ValueError, match="belongs to another wrapper"):
        dpfuse.DataParallel(net, gradient_scale=0.5)
    dpfuse.DataParallel(mean)
    dist.barrier()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        # b runs first, so its gradients arrive last, in the middle of a bucket that begins with a's.
        return self.c(torch.tanh(self.a(torch.tanh(self.b(x)))))


def test_a_part_that_is_wrapped_too_gets_the_mean(rank, size):
    torch.manual_seed(0)
    net = Shared()
    net.b = dpfuse.DataParallel(net.b, comm_buffer_size=0, last_comm_buffer_size=0)
    model = dpfuse.DataParallel(net, comm_buffer_size=8 * 8 * 4 * 1.5 / 2**20, last_comm_buffer_size=1e-6)
    seen = []
    net.a.bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for step in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(x).square().sum().backward()
        parameters = list(net.parameters())
        local = torch.autograd.grad(net.c(torch.tanh(net.a(torch.tanh(net.b.module(x))))).square().sum(), parameters)
        for param, mine in zip(parameters, local, strict=True):
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            torch.testing.assert_close(param.grad, sum(parts) / size)
        bias = next(i for i, param in enumerate(parameters) if param is net.a.bias)
        torch.testing.assert_close(seen[-1], local[bias])  # a hook sees what this rank accumulated, whole
