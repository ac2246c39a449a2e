"""fused_allreduce_gradients: the mean by hand, in place, for any gradients that all ranks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse import DataParallel, DPFuseError, fused_allreduce_gradients

SHAPES = [(3, 4), (), (7,), (0, 2), (2, 3, 2, 2), (1, 1), (129,)]


def parameters(rank: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with gradients that differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


def reference(params: list[Tensor], factor: float) -> list[Tensor]:
    """Each gradient on its own: multiplied first, then summed by torch."""
    results = []
    for param in params:
        compute = torch.promote_types(param.grad.dtype, torch.float32)
        value = (param.grad.detach().to(compute) * factor).to(param.grad.dtype).contiguous()
        dist.all_reduce(value)
        results.append(value)
    return results


def gradients(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def assert_group_works(rank: int, size: int) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), rank + 1.0)
    fused_allreduce_gradients([param])
    torch.testing.assert_close(param.grad, torch.full((2,), (size + 1) / 2))


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


def what_is_taken(rank: int, size: int) -> None:
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


def test_generators_duplicates_frozen_and_missing_gradients(ranks):
    ranks(what_is_taken)


def dtypes_alternate(rank: int, size: int) -> None:
    groups = [parameters(rank + 2 * place, dtype) for place, dtype in enumerate([torch.float32, torch.float64] * 2)]
    params = [param for group in groups for param in group]
    params += parameters(rank, torch.bfloat16)
    expected = reference(params, 0.5)
    fused_allreduce_gradients(params)
    assert_equal(gradients(params), expected)


def test_dtypes_may_alternate(ranks):
    ranks(dtypes_alternate)


def channels_last(value: Tensor) -> Tensor:
    return value.to(memory_format=torch.channels_last)


def every_other(value: Tensor) -> Tensor:
    return torch.stack([value, value], dim=-1)[..., 0]


def transposed(value: Tensor) -> Tensor:
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(value: Tensor) -> Tensor:
    return value[:1, :1, :1, :1].expand(value.shape)


def strided(
    rank: int, size: int, shape_grad: Callable[[Tensor], Tensor], shape_param: Callable[[Tensor], Tensor]
) -> None:
    value = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(rank))
    param, other = nn.Parameter(shape_param(torch.zeros_like(value))), nn.Parameter(torch.zeros(3))
    param.grad, other.grad = shape_grad(value), torch.full((3,), rank + 1.0)
    expected = reference([param, other], 0.5)
    fused_allreduce_gradients([param, other])
    assert_equal(gradients([param, other]), expected)


@pytest.mark.parametrize("shape_param", [channels_last, Tensor.contiguous])
@pytest.mark.parametrize("shape_grad", [channels_last, every_other, transposed, expanded])
def test_gradients_may_have_any_strides(ranks, shape_grad, shape_param):
    ranks(strided, shape_grad, shape_param, timeout=15)


def strides_differ(rank: int, size: int, which: str) -> None:
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


@pytest.mark.parametrize("which", ["parameter", "gradient"])
def test_strides_that_differ_between_ranks_are_averaged_rightly_or_refused(ranks, which):
    ranks(strides_differ, which, timeout=15)


def set_differs(rank: int, size: int, kind: str) -> str:
    params = parameters(rank)
    options: dict[str, Any] = {}
    if rank == 1:
        match kind:
            case "one less":
                params[2].grad = None
            case "none":
                params.clear()
            case "frozen":
                params[0].requires_grad_(False)
            case "shape":
                params[0] = nn.Parameter(torch.zeros(4, 3))
                params[0].grad = torch.ones(4, 3)
            case "dtype":
                params[0] = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
                params[0].grad = torch.ones(3, 4, dtype=torch.float64)
            case "scale":
                options["scale"] = 0.25
            case "bucket_size":
                options["bucket_size"] = 64
    before = [None if param.grad is None else param.grad.clone() for param in params]
    with pytest.raises(DPFuseError) as caught:
        fused_allreduce_gradients(params, **options)
    for param, grad in zip(params, before, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)
    assert_group_works(rank, size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fragments"),
    [
        ("one less", ["parameter_list[2]"]),
        ("none", ["parameter_list[0]", "0 gradients"]),
        ("frozen", ["parameter_list[0]"]),
        ("shape", ["parameter_list[0]", "shape=(4, 3)", "shape=(3, 4)"]),
        ("dtype", ["parameter_list[0]", "dtype=float64", "dtype=float32"]),
        ("scale", ["scale=0.25", "scale=None"]),
        ("bucket_size", ["bucket_size=64", "bucket_size=134217728"]),
    ],
)
def test_sets_that_differ_are_the_same_error_everywhere_and_change_nothing(ranks, kind, fragments):
    texts = ranks(set_differs, kind, timeout=15)
    assert texts[0] == texts[1]
    for fragment in ["set of gradients", "rank 1 has", "rank 0 has", "expected", *fragments]:
        assert fragment in texts[0]


def test_an_error_of_different_sets_speaks_of_gradients_not_of_models(ranks):
    text = ranks(set_differs, "one less", timeout=15)[0]
    assert "same model with the same options" not in text


def bad_list(kind: str) -> tuple[Any, dict[str, Any]]:
    params: list[Any] = parameters(0)
    match kind:
        case "sparse":
            params[0].grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (3, 4), check_invariants=True)
        case "complex":
            params[1] = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            params[1].grad = torch.ones(2, dtype=torch.complex64)
        case "text":
            params.append("weight")
        case "not iterable":
            return 7, {}
        case "tensor":
            return params[0], {}
        case "module":
            return nn.Linear(2, 2), {}
        case "broken generator":

            def broken() -> Iterator[Tensor]:
                yield params[0]
                raise LookupError("planted")

            return broken(), {}
        case _:
            option, _, value = kind.partition("=")
            return params, {option: {"-1": -1, "'1'": "1"}.get(value) or float(value)}
    return params, {}


BAD: dict[str, tuple[type[Exception], list[str]]] = {
    "sparse": (TypeError, ["parameter_list[0]", "(3, 4)", "sparse", "expected a dense", "sparse=False"]),
    "complex": (TypeError, ["parameter_list[1]", "complex64", "expected one of float16"]),
    "text": (TypeError, ["parameter_list[7]", "str", "expected a parameter"]),
    "not iterable": (TypeError, ["parameter_list", "int", "model.parameters()"]),
    "tensor": (TypeError, ["parameter_list", "Parameter", "model.parameters()"]),
    "module": (TypeError, ["parameter_list", "Linear", "model.parameters()"]),
    "broken generator": (LookupError, ["planted"]),
    "scale=nan": (ValueError, ["scale", "finite", "nan"]),
    "scale=inf": (ValueError, ["scale", "finite", "inf"]),
    "scale='1'": (TypeError, ["scale", "number", "'1'"]),
    "bucket_size=-1": (ValueError, ["bucket_size", ">= 0", "-1"]),
    "bucket_size=nan": (ValueError, ["bucket_size", ">= 0", "nan"]),
    "bucket_size='1'": (TypeError, ["bucket_size", "number of bytes", "'1'"]),
}


def bad_on_some_ranks(rank: int, size: int, kind: str, failing: list[int]) -> None:
    error, fragments = BAD[kind]
    if rank in failing:
        params, options = bad_list(kind)
        with pytest.raises(error) as caught:
            fused_allreduce_gradients(params, **options)
        assert type(caught.value) is error
    else:
        good = parameters(rank)
        before = [grad.clone() for grad in gradients(good)]
        with pytest.raises(DPFuseError) as caught:
            fused_allreduce_gradients(good)
        assert_equal(gradients(good), before)
        fragments = [f"rank {failing[0]}", *fragments]
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert_group_works(rank, size)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["both ranks", "rank 1"])
def test_bad_input_is_refused_and_the_other_ranks_learn_why(ranks, kind, failing):
    ranks(bad_on_some_ranks, kind, failing, timeout=12)


@pytest.fixture
def group_of_one(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_does_nothing_but_check() -> None:
    params = parameters(0)
    before = [grad.clone() for grad in gradients(params)]
    assert fused_allreduce_gradients(iter(params), scale=0.5) is None
    assert_equal(gradients(params), before)
    for kind, (error, fragments) in BAD.items():
        bad, options = bad_list(kind)
        with pytest.raises(error) as caught:
            fused_allreduce_gradients(bad, **options)
        for fragment in fragments:
            assert fragment in str(caught.value)


def test_without_a_process_group_it_only_checks():
    assert_does_nothing_but_check()


@pytest.mark.usefixtures("group_of_one")
def test_with_one_rank_it_only_checks():
    assert_does_nothing_but_check()


def over_a_subgroup(rank: int, size: int) -> None:
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


def test_over_a_subgroup(ranks):
    ranks(over_a_subgroup, size=3)


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


def same_as_wrapper(rank: int, size: int, views: bool) -> None:
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


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_after_no_sync_it_gives_the_wrappers_own_bits(ranks, views):
    ranks(same_as_wrapper, views)


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


def by_hand(rank: int, size: int, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
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


@pytest.mark.parametrize("loss", [plain_loss, penalised_loss])
def test_custom_functions_and_second_derivatives(ranks, loss):
    ranks(by_hand, loss)


def graph_in_gradients(rank: int, size: int) -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    with pytest.warns(UserWarning, match="create_graph"):
        (weight**3 * (rank + 1)).sum().backward(create_graph=True)
    fused_allreduce_gradients([weight])
    torch.testing.assert_close(weight.grad.detach(), torch.tensor([18.0]))


def test_gradients_that_carry_a_graph_are_averaged_by_value(ranks):
    ranks(graph_in_gradients)


def half_precision_sums_do_not_overflow(rank: int, size: int) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    fused_allreduce_gradients([param])
    assert torch.equal(param.grad, torch.full((4,), 60000.0, dtype=torch.float16))
    param.grad = torch.tensor([float("nan"), float("inf"), 1.0, -0.0]).half()
    fused_allreduce_gradients([param])
    assert param.grad.isnan().tolist() == [True, False, False, False]
    assert param.grad.isinf().tolist() == [False, True, False, False]


def test_half_precision_means_do_not_overflow_and_nan_and_inf_stay(ranks):
    ranks(half_precision_sums_do_not_overflow)


def test_the_public_name_is_the_function():
    assert dpfuse.fused_allreduce_gradients is fused_allreduce_gradients
