"""fused_allreduce_gradients: the mean by hand, in place, of any gradients, equal to the wrapper's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse import DataParallel, DPFuseError, fused_allreduce_gradients
from tests.distributed.manual.gradients import assert_equal, gradients, parameters, reference


def averages(rank: int, size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = parameters(rank, dtype)
    expected = reference(params, options.get("scale", 1 / size))
    before = gradients(params)
    addresses = [grad.data_ptr() for grad in before]
    assert fused_allreduce_gradients(params, **options) is None
    after = gradients(params)
    assert all(map(lambda one, other: one is other, before, after))
    assert [grad.data_ptr() for grad in after] == addresses
    if size == 2:
        assert_equal(after, expected)
    else:
        for one, other in zip(after, expected, strict=True):
            # Sums of more than two may be taken in any order, each with a rounding.
            error = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(one, other, rtol=error, atol=error)
    flat = torch.cat([grad.reshape(-1) for grad in after])
    everyones = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(everyones, flat)
    assert all(torch.equal(flat, other) for other in everyones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 1.0}, {"scale": 0.3}, {"scale": 0}, {"scale": -2}, {"bucket_size": 0}, {"bucket_size": 100}],
    ids=str,
)
def test_gradients_become_the_mean_or_the_scaled_sum_in_place(ranks, dtype, options):
    ranks(averages, dtype, options)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_over_more_ranks(ranks, dtype, size):
    ranks(averages, dtype, {}, size=size, timeout=120)


def test_generators_duplicates_frozen_and_missing_gradients(rank: int, size: int) -> None:
    used, twice, frozen, without, once_trained = parameters(rank)[:5]
    frozen.requires_grad_(False)
    without.grad = None
    frozen_grad = frozen.grad.clone()
    expected = reference([used, twice, once_trained], 0.5)

    def given() -> Iterator[Tensor]:
        yield from (used, twice, frozen, without, twice, once_trained, used)

    fused_allreduce_gradients(given())
    assert_equal(gradients([used, twice, once_trained]), expected)
    assert torch.equal(frozen.grad, frozen_grad)
    assert without.grad is None
    fused_allreduce_gradients([])
    fused_allreduce_gradients(iter([without, frozen]))
    assert torch.equal(frozen.grad, frozen_grad)
    module = nn.Linear(2, 2)
    module(torch.full((1, 2), rank + 1.0)).sum().backward()
    fused_allreduce_gradients(module.parameters())
    assert torch.equal(module.weight.grad, torch.full((2, 2), 1.5))
    plain = torch.zeros(2, requires_grad=True)
    plain.grad = torch.full((2,), rank + 1.0)
    fused_allreduce_gradients((plain,))
    assert torch.equal(plain.grad, torch.full((2,), 1.5))


def test_dtypes_may_alternate(rank: int, size: int) -> None:
    groups = [parameters(rank + 2 * place, dtype) for place, dtype in enumerate([torch.float32, torch.float64] * 2)]
    params = [param for group in groups for param in group]
    params += parameters(rank, torch.bfloat16)
    expected = reference(params, 0.5)
    fused_allreduce_gradients(params)
    assert_equal(gradients(params), expected)


def channels_last(value: Tensor) -> Tensor:
    return value.to(memory_format=torch.channels_last)


def every_other(value: Tensor) -> Tensor:
    return torch.stack([value, value], dim=-1)[..., 0]


def transposed(value: Tensor) -> Tensor:
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(value: Tensor) -> Tensor:
    return value[:1, :1, :1, :1].expand(value.shape)


@pytest.mark.parametrize("shape_param", [channels_last, Tensor.contiguous])
@pytest.mark.parametrize("shape_grad", [channels_last, every_other, transposed, expanded])
@pytest.mark.ranks(timeout=15)
def test_gradients_may_have_any_strides(
    rank: int, size: int, shape_grad: Callable[[Tensor], Tensor], shape_param: Callable[[Tensor], Tensor]
) -> None:
    value = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(rank))
    param, other = nn.Parameter(shape_param(torch.zeros_like(value))), nn.Parameter(torch.zeros(3))
    param.grad, other.grad = shape_grad(value), torch.full((3,), rank + 1.0)
    expected = reference([param, other], 0.5)
    fused_allreduce_gradients([param, other])
    assert_equal(gradients([param, other]), expected)


@pytest.mark.parametrize("which", ["parameter", "gradient"])
@pytest.mark.ranks(timeout=15)
def test_strides_that_differ_between_ranks_are_averaged_rightly_or_refused(rank: int, size: int, which: str) -> None:
    values = [torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(source)) for source in range(size)]
    change = channels_last if rank else Tensor.contiguous
    param = nn.Parameter(torch.zeros(4, 3, 2, 2))
    if which == "parameter":
        param.data = change(param.data)
    param.grad = change(values[rank].clone()) if which == "gradient" else values[rank].clone()
    failure = ""
    try:
        fused_allreduce_gradients([param])
    except DPFuseError as error:
        failure = str(error)
    if failure:
        assert "parameter_list[0]" in failure
        assert "strides" in failure
        assert torch.equal(param.grad, values[rank])
    else:
        assert torch.equal(param.grad, values[0] * 0.5 + values[1] * 0.5)
    dist.barrier()


@pytest.mark.ranks(size=3)
def test_over_a_subgroup(rank: int, size: int) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), rank + 1.0)
    fused_allreduce_gradients([param], pair)
    assert torch.equal(param.grad, torch.full((2,), 2.0))
    bad = nn.Parameter(torch.zeros(2))
    if rank == 2:
        bad.grad = torch.ones(2)
    with pytest.raises(DPFuseError, match="differs between ranks"):
        fused_allreduce_gradients([bad], pair)


class Mixed(nn.Module):
    """Two dtypes, a channels-last weight, several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(12, 4)
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.conv(x).flatten(1))).double())


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_after_no_sync_it_gives_the_wrappers_own_bits(rank: int, size: int, views: bool) -> None:
    torch.manual_seed(rank)
    automatic = DataParallel(Mixed(), comm_buffer_size=1e-4, gradient_as_bucket_view=views)
    manual = DataParallel(Mixed(), comm_buffer_size=1e-4, gradient_as_bucket_view=views)
    manual.load_state_dict(automatic.state_dict())
    for _ in range(3):
        automatic.zero_grad()
        manual.zero_grad()
        for micro in range(2):
            with automatic.no_sync(enabled=micro == 0):
                automatic(batch(rank, micro)).square().sum().backward()
            with manual.no_sync():
                manual(batch(rank, micro)).square().sum().backward()
        fused_allreduce_gradients(manual.parameters())
        assert_equal(gradients(list(manual.parameters())), gradients(list(automatic.parameters())))
    # And on from gradients that are views of the wrapper's buffers.
    expected = reference(list(automatic.parameters()), 2.0)
    fused_allreduce_gradients(automatic.parameters(), scale=2.0)
    assert_equal(gradients(list(automatic.parameters())), expected)
    for _ in range(2):
        automatic.zero_grad()
        automatic(batch(rank)).square().sum().backward()
        manual.zero_grad()
        manual(batch(rank)).square().sum().backward()
        assert_equal(gradients(list(manual.parameters())), gradients(list(automatic.parameters())))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Cube.apply(self.first(x)))


def penalised_loss(module: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradient needs a second derivative."""
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def sample(rank: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def plain_loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


@pytest.mark.parametrize("loss", [plain_loss, penalised_loss])
def test_custom_functions_and_second_derivatives(
    rank: int, size: int, loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    torch.manual_seed(rank)
    model = DataParallel(Cubed().double())
    alone = Cubed().double()
    alone.load_state_dict(model.state_dict())
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        with model.no_sync():
            loss(model, sample(rank)).backward()
        fused_allreduce_gradients(model.parameters())
        for source in range(size):
            (loss(alone, sample(source)) / size).backward()
        for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)
        with torch.no_grad():
            for module in (model, alone):
                for param in module.parameters():
                    param -= 0.01 * param.grad
        alone.load_state_dict(model.state_dict())


def test_gradients_that_carry_a_graph_are_averaged_by_value(rank: int, size: int) -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph", category=UserWarning)  # torch's, once per process
        (weight**3 * (rank + 1)).sum().backward(create_graph=True)
    fused_allreduce_gradients([weight])
    torch.testing.assert_close(weight.grad.detach(), torch.tensor([18.0]))


def test_half_precision_means_do_not_overflow_and_nan_and_inf_stay(rank: int, size: int) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    fused_allreduce_gradients([param])
    assert torch.equal(param.grad, torch.full((4,), 60000.0, dtype=torch.float16))
    param.grad = torch.tensor([float("nan"), float("inf"), 1.0, -0.0]).half()
    fused_allreduce_gradients([param])
    assert param.grad.isnan().tolist() == [True, False, False, False]
    assert param.grad.isinf().tolist() == [False, True, False, False]


def test_the_public_name_is_the_function():
    assert dpfuse.fused_allreduce_gradients is fused_allreduce_gradients
