"""Communication hooks: torch's own hooks give the numbers that torch's DistributedDataParallel gives with them."""

from __future__ import annotations

import contextlib
import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel
from dpfuse.engine.exchanges.comm_bucket import CommBucket

BUILTIN = dist.BuiltinCommHookType
SMALL = 100 / 2**20  # MB: several buckets for the nets below


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x, step=0):
        return self.layers(x)


class Convolutional(nn.Module):
    """A channels-last weight: its elements lie in the bucket in another order than that of its shape."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 3)

    def forward(self, x, step=0):
        image = x.repeat(1, 22)[:, :108].reshape(-1, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.head(torch.tanh(self.conv(image)).mean((2, 3)))


class SeveralDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(5, 5), nn.Linear(5, 5).double()
        self.brief, self.head = nn.Linear(5, 5).bfloat16(), nn.Linear(5, 3)

    def forward(self, x, step=0):
        h = torch.tanh(self.wide(torch.tanh(self.narrow(x)).double())).bfloat16()
        return self.head(torch.tanh(self.brief(h)).float())


class Branching(Mlp):
    """`extra` is used on one of two ranks or on both, `never` on none."""

    def __init__(self):
        super().__init__()
        self.extra, self.never = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, step=0):
        y = self.layers(x)
        return y + self.extra(x) if (step + dist.get_rank()) % 2 or step % 3 == 0 else y


def one_by_one(hook):
    """Torch starts the next bucket while callbacks of this one may still call collectives, in any order."""

    @functools.wraps(hook)
    def waiting(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting


def under_another_name(hook):
    """Torch refuses two hooks by name where there is no NCCL, although gloo can sum bfloat16 as well."""

    def renamed(state, bucket):
        return hook(state, bucket)

    return renamed


class _LikeNccl:
    """`torch.distributed`, whose all_gather has a future as with NCCL: of one tensor, which quantization needs."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_gather(self, *args, **kwargs):
        future = dist.all_gather(*args, **kwargs).get_future().then(lambda f: [torch.stack(f.value())])
        return SimpleNamespace(get_future=lambda: future)


@contextlib.contextmanager
def repaired_torch():
    """Two kinds of hooks of torch 2.13 that fail under torch's own class, over gloo or at all."""
    before = powerSGD_hook._orthogonalize, quantization_hooks.dist
    # Batched PowerSGD passes one matrix where a batch is expected.
    powerSGD_hook._orthogonalize = lambda m, epsilon=0: before[0](m if m.dim() == 3 else m[None], epsilon)
    quantization_hooks.dist = _LikeNccl()
    try:
        yield
    finally:
        powerSGD_hook._orthogonalize, quantization_hooks.dist = before


def with_then(state, bucket):
    """A chain of callbacks, and a result that is a new tensor."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0] / 2).then(lambda f: f.value() * 3)


def with_set_buffer(state, bucket):
    bucket.set_buffer(bucket.buffer() * 2)
    bucket.gradients()[0].mul_(2)
    return default_hooks.allreduce_hook(state, bucket)


def of_another_dtype(state, bucket):
    """The sum in float64, as a matrix."""
    future = dist.all_reduce(bucket.buffer().double()[None], async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def power_sgd(**options):
    return lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, **options)


def local_sgd():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return post_localSGD_hook.PostLocalSGDState(None, groups[dist.get_rank()], start_localSGD_iter=2)


ELEMENTWISE = {
    "allreduce": (None, default_hooks.allreduce_hook),
    "fp16": (None, default_hooks.fp16_compress_hook),
    "bf16": (None, under_another_name(default_hooks.bf16_compress_hook)),
    "fp16 wrapper": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": (None, under_another_name(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))),
    "post local SGD": (local_sgd, post_localSGD_hook.post_localSGD_hook),
    "noop": (None, debugging_hooks.noop_hook),
    "chained": (None, with_then),
    "set_buffer": (None, with_set_buffer),
    "other dtype": (None, of_another_dtype),
    "built in": (None, BUILTIN.ALLREDUCE),
    "built in fp16": (None, BUILTIN.FP16_COMPRESS),
}
# These look at a bucket as a whole, so buckets must be torch's, to the element.
LAYOUT = {
    "PowerSGD": (power_sgd(min_compression_rate=1), powerSGD_hook.powerSGD_hook),
    "PowerSGD, rank 2": (
        power_sgd(matrix_approximation_rank=2, min_compression_rate=1, use_error_feedback=False),
        powerSGD_hook.powerSGD_hook,
    ),
    "PowerSGD, batched tensors": (
        power_sgd(min_compression_rate=1, batch_tensors_with_same_shape=True),
        powerSGD_hook.powerSGD_hook,
    ),
    "batched PowerSGD": (power_sgd(), powerSGD_hook.batched_powerSGD_hook),
    "fp16 PowerSGD": (
        power_sgd(min_compression_rate=1),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "quantized": (None, quantization_hooks.quantization_pertensor_hook),
    "quantized by channel": (None, quantization_hooks.quantization_perchannel_hook),
}
HOOKS = ELEMENTWISE | LAYOUT


def register(model, make_state, hook):
    if isinstance(hook, BUILTIN):
        model._register_builtin_comm_hook(hook)
    else:
        model.register_comm_hook(make_state and make_state(), hook)


@repaired_torch()
def train_beside_torch(rank, size, net, name, views, cap, micros=1, set_to_none=True, steps=6):
    make_state, hook = HOOKS[name]
    bare = net()
    # Flagged, torch keeps its first buckets, which are those that ours are rebuilt to.
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views, "bucket_cap_mb": cap}
    ours = DistributedDataParallel(copy.deepcopy(bare), **options)
    theirs = TorchDDP(copy.deepcopy(bare), **options)
    register(ours, make_state, hook)
    register(theirs, make_state, one_by_one(hook) if name in LAYOUT else hook)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for micro in range(micros):
            x = torch.randn(4, 5, generator=generator)
            for model in (ours, theirs):
                with model.no_sync() if micro < micros - 1 else contextlib.nullcontext():
                    model(x, step).square().mean().backward()
        for (what, a), b in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), f"{what} in step {step}"
            if a.grad is not None:
                assert torch.equal(a.grad, b.grad), f"{what} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_gives_the_bits_of_torch(ranks, name, views):
    ranks(train_beside_torch, Mlp, name, views, SMALL)


@pytest.mark.parametrize("name", ["allreduce", "batched PowerSGD", "PowerSGD", "quantized", "built in fp16"])
def test_one_bucket_for_all(ranks, name):
    ranks(train_beside_torch, Mlp, name, True, None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("name", ["fp16", "batched PowerSGD", "chained"])
def test_accumulation_inside_no_sync(ranks, name, views, set_to_none):
    ranks(train_beside_torch, Mlp, name, views, SMALL, 3, set_to_none)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("name", ["allreduce", "fp16", "PowerSGD", "noop"])
def test_channels_last_weights(ranks, name, views):
    ranks(train_beside_torch, Convolutional, name, views, SMALL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("name", ["allreduce", "fp16", "bf16"])
def test_several_dtypes(ranks, name, views):
    ranks(train_beside_torch, SeveralDtypes, name, views, SMALL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("name", ["allreduce", "fp16", "chained", "fp16 wrapper"])
def test_parameters_that_some_ranks_do_not_use(ranks, name, views):
    ranks(train_beside_torch, Branching, name, views, SMALL)


def see_buckets(rank, size, views):
    seen = []

    def look(state, bucket):
        assert state == "state"
        assert not torch.is_grad_enabled()
        buffer, grads, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1
        assert buffer.numel() == sum(param.numel() for param in params)
        assert [grad.shape for grad in grads] == [param.shape for param in params]
        assert all(any(param is other for other in model.parameters()) for param in params)
        starts = [(grad.data_ptr() - buffer.data_ptr()) // 4 for grad in grads]
        seen.append((bucket.index(), starts, bucket.is_last()))
        return default_hooks.allreduce_hook(None, bucket)

    model = DistributedDataParallel(Mlp(), gradient_as_bucket_view=views, bucket_cap_mb=SMALL)
    model.register_comm_hook("state", look)
    steps = []
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        steps.append(seen.copy())
        seen.clear()
    return steps


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_a_hook_sees_the_buckets_in_the_order_of_communication_without_padding(ranks, views):
    first, second = ranks(see_buckets, views)
    assert first == second
    for step in first:
        assert step == [(0, [0], False), (1, [0, 9], False), (2, [0, 7], False), (3, [0], True)]


def named_in_the_logs(rank, size):
    facts = []
    for kind in (DistributedDataParallel, TorchDDP):
        for hook in (None, debugging_hooks.noop_hook, BUILTIN.FP16_COMPRESS):
            model = kind(nn.Linear(2, 1))
            if hook is not None:
                register(model, None, hook)
            facts.append(model._get_ddp_logging_data().get("comm_hook"))
    return facts


def test_the_log_names_the_hook_as_with_torch(ranks):
    facts = ranks(named_in_the_logs)[0]
    assert facts[:3] == facts[3:] == [None, "noop_hook", "BuiltinCommHookType.FP16_COMPRESS"]


def undivided(rank, size):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return model.module.weight.grad.tolist()


def test_nothing_is_divided_or_sent_but_by_the_hook(ranks):
    assert ranks(undivided) == [[[1.0, 1.0]], [[2.0, 2.0]]]


def test_a_hook_registered_late_counts_from_the_next_synchronised_backward(rank, size):
    """After a backward, between forward and backward, and after no_sync: from the next synchronised one on."""
    for when in ("after", "between", "no_sync"):
        model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
        bare = copy.deepcopy(model.module)
        x = torch.full((2, 5), 1.0 + rank)
        if when == "after":
            model(x).sum().backward()
            model.zero_grad()
        if when == "no_sync":
            with model.no_sync():
                model(x).sum().backward()
            bare(x).sum().backward()
        loss = model(x).sum()
        model.register_comm_hook(None, with_then)
        loss.backward()
        bare(x).sum().backward()
        for ours, local in zip(model.module.parameters(), bare.parameters(), strict=True):
            dist.all_reduce(local.grad)
            torch.testing.assert_close(ours.grad, local.grad / 2 * 3)


def copies(rank, size):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model.register_comm_hook(None, with_then)
    clone = copy.deepcopy(model)
    for each in (model, clone):
        each(torch.full((1, 2), rank + 1.0)).sum().backward()
    return model.module.weight.grad.tolist(), clone.module.weight.grad.tolist()


def test_a_copy_has_no_hook_as_with_torch(ranks):
    assert ranks(copies) == [([[4.5, 4.5]], [[1.5, 1.5]])] * 2


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, indices):
        return self.head(self.embedding(indices).sum(1))


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_a_hook_gets_sparse_gradients_as_from_torch(rank, size, views):
    bare = Sparse()
    ours, theirs = (
        kind(copy.deepcopy(bare), gradient_as_bucket_view=views) for kind in (DistributedDataParallel, TorchDDP)
    )
    for model in (ours, theirs):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(4):
        for model in (ours, theirs):
            model(torch.tensor([[rank, step, 1], [2, 2, rank]])).square().sum().backward()
        for a, b in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
            assert a.grad.layout == b.grad.layout
            a, b = a.grad.to_dense(), b.grad.to_dense()
            torch.testing.assert_close(a, b)  # rows are added up in no particular order
        ours.zero_grad()
        theirs.zero_grad()


def test_a_sparse_gradient_that_some_ranks_do_not_have(rank, size):
    model = DistributedDataParallel(Sparse(), find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for used in (True, False, True):
        model.zero_grad()
        out = model(torch.tensor([[0, 1], [1, 2]]))
        if rank == 0 and used:
            out.sum().backward()
        else:
            model.module.head(torch.ones(2, 3)).sum().backward()
        grad = model.module.embedding.weight.grad
        assert (grad is not None) == used
        if used:
            expected = model.module.head.weight.sum(0) / 2
            torch.testing.assert_close(grad.to_dense()[:3], torch.stack([expected, 2 * expected, expected]))


def test_a_bucket_shows_another_buffer_once_it_is_set():
    params = [torch.ones(2, 2), torch.ones(3)]
    bucket = CommBucket(1, torch.zeros(7), params, is_last=False)
    bucket.set_buffer(torch.arange(7.0))
    assert [grad.tolist() for grad in bucket.gradients()] == [[[0, 1], [2, 3]], [4, 5, 6]]
    assert bucket.parameters()[1] is params[1]
    assert repr(bucket) == "CommBucket(1: 7 elements of torch.float32)"
    with pytest.raises(TypeError, match="buffer must be a tensor, got list"):
        bucket.set_buffer([1.0])
