"""mixed_precision: forward, backward and reduction in other dtypes, beside casts by hand."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision

from dpfuse import DistributedDataParallel, DPFuseError

SMALL = 100 / 2**20  # MB: several buckets
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

CONFIGS = {
    "bf16": _MixedPrecision(BF16, BF16, BF16),
    "fp16": _MixedPrecision(F16, F16, F16),
    "bf16, reduced in fp32": _MixedPrecision(BF16, F32, BF16),
    "bf16 alone": _MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
    "reduced in bf16": _MixedPrecision(reduce_dtype=BF16),
    "nothing": _MixedPrecision(),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, *, scale):
        seen.append((x.dtype, scale.dtype, self.first.weight.dtype, self.frozen.dtype, self.norm.running_mean.dtype))
        return self.head(torch.tanh(self.norm(self.first(x)))) * scale + self.frozen


seen: list[tuple[torch.dtype, ...]] = []


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("case", CONFIGS)
def test_it_trains_to_the_bits_of_casts_by_hand(rank, size, case, views):
    """Torch's own class reads freed memory where it has no streams, so casts by hand are the oracle."""
    config, net = CONFIGS[case], Net()
    dtype, wire = config.param_dtype or F32, config.reduce_dtype or config.param_dtype or F32
    alone = copy.deepcopy(net)
    for buffer in (alone.norm.running_mean, alone.norm.running_var):
        buffer.data = buffer.to(config.buffer_dtype or F32)
    model = DistributedDataParallel(net, mixed_precision=config, gradient_as_bucket_view=views, bucket_cap_mb=SMALL)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (alone, model)]
    for step in range(4):
        x, scale = batch(rank, step), torch.tensor(2.0)
        seen.clear()
        cast = {name: param.to(dtype) for name, param in alone.named_parameters()}
        for buffer in alone.buffers():
            dist.broadcast(buffer, 0)
        expected = functional_call(alone, cast, (x.to(dtype),), {"scale": scale.to(dtype)})
        got = model(x, scale=scale)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        assert seen[0] == seen[1] == (dtype, dtype, dtype, dtype, config.buffer_dtype or F32)
        for outputs, optimizer in zip((expected, got), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.square().mean().backward()
        for name, param in alone.named_parameters():
            grad = model.module.get_parameter(name).grad
            if not param.requires_grad:
                assert grad is None
                continue
            mean = (param.grad / size).to(wire)
            dist.all_reduce(mean)
            assert grad.dtype == F32
            assert torch.equal(grad, mean.to(F32)), name
            param.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    for buffer in alone.buffers():
        dist.broadcast(buffer, 0)
    for name, tensor in model.state_dict().items():
        expected = alone.state_dict()[name.removeprefix("module.")]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    assert all(param.dtype == F32 for param in model.parameters())


class Branching(nn.Module):
    """Unused on some ranks or all, tied, a recurrent layer with its list of weights, and a parameter used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.odd, self.never = (nn.Linear(6, 6) for _ in range(4))
        self.second.weight = self.first.weight
        self.recurrent = nn.LSTM(6, 6)

    def forward(self, x, step):
        y = self.recurrent(self.second(torch.tanh(self.first(self.first(x)))))[0]
        return y + self.odd(x) if (step + dist.get_rank()) % 2 else y


@pytest.mark.parametrize("hooked", [False, True])
def test_accumulation_unused_tied_and_recurrent_parameters_and_hooks(rank, size, hooked):
    """Casts by hand, and the mean of what they accumulate: torch's class knows none of this."""
    net = Branching()
    alone = copy.deepcopy(net)
    model = DistributedDataParallel(
        net, mixed_precision=_MixedPrecision(BF16, F32), find_unused_parameters=True, bucket_cap_mb=SMALL
    )
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        for each in (alone, model):
            each.zero_grad()
        for micro in range(2):
            x = batch(rank, 2 * step + micro).repeat(1, 2)[:, :6]
            with model.no_sync(enabled=micro == 0):
                got = model(x, step)
            cast = {name: param.to(BF16) for name, param in alone.named_parameters()}
            expected = functional_call(alone, cast, (x.to(BF16), step))
            assert got.dtype == BF16
            assert torch.equal(got, expected)
            for outputs in (got, expected):
                outputs.float().square().sum().backward()
        for name, param in alone.named_parameters():
            grad = model.module.get_parameter(name).grad
            if name.startswith("never"):
                assert grad is None
                continue
            mean = torch.zeros_like(param) if param.grad is None else param.grad / size
            dist.all_reduce(mean)
            assert torch.equal(grad, mean), name


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, index):
        return self.head(self.table(index))


def dense(module):
    module.table.sparse = False
    return module.named_parameters()


def test_sparse_gradients_arrive_sparse_and_in_the_parameters_dtype(rank, size):
    net = Table()
    alone = copy.deepcopy(net)
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(BF16, F32))
    for step in range(3):
        index = torch.tensor([rank, 3, step])
        for each in (model, alone):
            each.zero_grad()
        model(index).sum().backward()
        functional_call(alone, {name: param.to(BF16) for name, param in dense(alone)}, (index,)).sum().backward()
        for (name, param), other in zip(net.named_parameters(), alone.parameters(), strict=True):
            assert param.grad.is_sparse == name.startswith("table")
            mean = other.grad.to_dense() / size
            dist.all_reduce(mean)
            assert param.grad.dtype == F32
            assert torch.equal(param.grad.to_dense(), mean), name


def test_ranks_that_compute_in_different_dtypes_all_raise(rank, size):
    for config in (_MixedPrecision((F16, BF16)[rank], F32), _MixedPrecision((None, BF16)[rank], F32)):
        with pytest.raises(DPFuseError, match="option forward_dtype"):
            DistributedDataParallel(nn.Linear(2, 2), mixed_precision=config)


def test_ignored_parameters_and_buffers_keep_their_dtype(group):
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["frozen", "norm.running_mean"])
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(BF16, BF16, BF16))
    seen.clear()
    with torch.no_grad(), pytest.raises(RuntimeError):  # batch norm takes no mixture of both
        model(batch(0, 0), scale=torch.tensor(1.0))
    assert seen == [(BF16, BF16, BF16, F32, F32)]
    assert net.norm.running_var.dtype == BF16
    assert net.norm.num_batches_tracked.dtype == torch.int64


def test_the_parameters_are_back_whatever_happens(group):
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 2))
    held = dict(net.named_parameters())
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(BF16))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch(0, 0))
    assert all(net.get_parameter(name) is param for name, param in held.items())


def test_evaluation_runs_in_the_other_dtype_too(group):
    model = DistributedDataParallel(nn.Linear(5, 3), mixed_precision=_MixedPrecision(BF16)).eval()
    with torch.no_grad():
        assert model(batch(0, 0)).dtype == BF16
    assert model.module(batch(0, 0)).dtype == F32


def test_a_copy_is_as_precise(group):
    clone = copy.deepcopy(DistributedDataParallel(nn.Linear(5, 3), mixed_precision=_MixedPrecision(BF16)))
    assert clone(batch(0, 0)).dtype == BF16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_compiler_sees_the_casts_once(group):
    graphs = []

    def backend(graph, inputs):
        graphs.append([each.dtype for each in inputs])
        return graph.forward

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return torch.relu(self.layer(x))

    model = DistributedDataParallel(Small(), mixed_precision=_MixedPrecision(BF16))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(3):
        model.zero_grad()
        assert compiled(batch(0, step)).dtype == BF16
        compiled(batch(0, step)).sum().backward()
    assert [set(dtypes) for dtypes in graphs] == [{BF16}]
    assert model.module.layer.weight.grad.dtype == F32


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (BF16, TypeError, "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision, got dtype"),
        (_MixedPrecision(torch.float64), ValueError, "mixed_precision reduces gradients in torch.float64"),
        (_MixedPrecision(BF16, torch.int32), ValueError, "mixed_precision reduces gradients in torch.int32"),
    ],
)
def test_configurations_that_cannot_be_are_named(group, config, error, text):
    with pytest.raises(error, match=re.escape(text)):
        DistributedDataParallel(nn.Linear(2, 2), mixed_precision=config)
