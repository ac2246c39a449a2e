"""reduce_replicas: the mean over copies of a model in one process, in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dpfuse
from dpfuse import reduce_replicas
from tests.one_in import one_in

SHAPES = [(3, 4), (), (7,), (0, 2), (2, 3, 2, 2), (1, 1), (40_000,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def replica(seed: int, dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    """Parameters of all shapes with random gradients, their dtypes taken in turn."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for place, shape in enumerate(SHAPES):
        dtype = dtypes[place % len(dtypes)]
        params.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        params[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    return params


def reference(replicas: list[list[nn.Parameter]], factor: float) -> list[Tensor]:
    """Each gradient on its own: multiplied in at least float32, rounded, then added in the order of the replicas."""
    sums = []
    for params in zip(*replicas, strict=True):
        total = None
        for param in params:
            compute = torch.promote_types(param.grad.dtype, torch.float32)
            scaled = (param.grad.to(compute) * factor).to(param.grad.dtype)
            total = scaled if total is None else total + scaled
        sums.append(total)
    return sums


@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("count", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", one_in(2, [{}, {"scale": 1.0}, {"scale": 0.3}, {"bucket_size": 0}, {"bucket_size": 64}]), ids=str
)
def test_every_replica_gets_the_mean_or_the_scaled_sum_in_place(dtypes, count, options):
    replicas = [replica(seed, dtypes) for seed in range(count)]
    expected = reference(replicas, options.get("scale", 1 / count))
    grads = [[param.grad for param in params] for params in replicas]
    assert reduce_replicas(replicas, **options) is None
    for params, before in zip(replicas, grads, strict=True):
        for param, grad, want in zip(params, before, expected, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, want)


def test_modules_channels_last_and_tied_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

    nets = [Net(), Net(), Net()]
    for index, net in enumerate(nets):
        for param in net.parameters():
            param.grad = torch.full_like(param, float(index))
    reduce_replicas(nets)
    for net in nets:
        for param in net.parameters():
            assert torch.equal(param.grad, torch.ones_like(param))
            assert param.grad.stride() == param.stride()


def test_parameters_by_name_are_called_by_it():
    nets = [nn.Linear(2, 1), nn.Linear(2, 1)]
    for index, net in enumerate(nets):
        net(torch.ones(1, 2) * index).sum().backward()
    reduce_replicas([dict(net.named_parameters()) for net in nets])
    assert all(torch.equal(net.weight.grad, torch.tensor([[0.5, 0.5]])) for net in nets)
    nets[1].bias.requires_grad_(False)
    for replicas in (nets, [dict(net.named_parameters()) for net in nets]):
        with pytest.raises(ValueError, match=r"bias has requires_grad False in replicas\[1\]"):
            reduce_replicas(replicas)


def test_one_replica_is_left_as_it_is():
    params = replica(0, [torch.float32])
    before = [param.grad.clone() for param in params]
    reduce_replicas([params], scale=0.5)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, before, strict=True))


def test_missing_gradients_count_as_zeros_unless_all_miss():
    first, second, third = (replica(seed, [torch.float32]) for seed in range(3))
    expected = (first[0].grad / 3) + (third[0].grad / 3)
    second[0].grad = None
    for params in (first, second, third):
        params[2].grad = None
    reduce_replicas([first, second, third])
    for params in (first, second, third):
        torch.testing.assert_close(params[0].grad, expected)
        assert params[2].grad is None
    assert torch.equal(first[0].grad, second[0].grad)


def test_frozen_parameters_are_left_alone():
    first, second = (replica(seed, [torch.float32]) for seed in range(2))
    before = first[0].grad.clone()
    for params in (first, second):
        params[0].requires_grad_(False)
    reduce_replicas([iter(first), iter(second)])
    assert torch.equal(first[0].grad, before)
    assert torch.equal(first[2].grad, second[2].grad)


def test_means_of_half_precision_do_not_overflow():
    replicas = [[nn.Parameter(torch.zeros(4, dtype=torch.float16))] for _ in range(4)]
    for params in replicas:
        params[0].grad = torch.full((4,), 60000.0, dtype=torch.float16)
    reduce_replicas(replicas)
    assert all(torch.equal(params[0].grad, torch.full((4,), 60000.0).half()) for params in replicas)


def test_gradients_that_share_memory_get_their_own():
    replicas = [[nn.Parameter(torch.zeros(3))] for _ in range(2)]
    for index, params in enumerate(replicas):
        params[0].grad = torch.tensor(float(index)).expand(3)
    reduce_replicas(replicas)
    assert all(torch.equal(params[0].grad, torch.full((3,), 0.5)) for params in replicas)


def test_after_backward_it_is_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    halves = [copy.deepcopy(whole), copy.deepcopy(whole)]
    x = torch.randn(6, 3, dtype=torch.float64)
    whole(x).mean().backward()
    for half, rows in zip(halves, x.chunk(2), strict=True):
        half(rows).mean().backward()
    reduce_replicas(halves)
    for half in halves:
        for param, want in zip(half.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.grad, want.grad)


def pair() -> list[list[nn.Parameter]]:
    return [replica(0, [torch.float32]), replica(1, [torch.float32])]


def wrong(kind: str):
    replicas = pair()
    match kind:
        case "number":
            replicas[1].pop()
        case "shape":
            replicas[1][0] = nn.Parameter(torch.zeros(4, 3))
        case "dtype":
            replicas[1][0] = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
            replicas[1][0].grad = torch.ones(3, 4, dtype=torch.float64)
        case "frozen":
            replicas[1][0].requires_grad_(False)
        case "shared":
            replicas[1][0] = replicas[0][0]
        case "sparse":
            replicas[1][0].grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (3, 4), check_invariants=True)
        case "complex":
            for params in replicas:
                params[2] = nn.Parameter(torch.zeros(7, dtype=torch.complex64))
                params[2].grad = torch.ones(7, dtype=torch.complex64)
        case "text":
            replicas[1][0] = "weight"
        case "a module":
            return nn.Linear(1, 1)
        case "a generator":
            return iter(replicas)
        case "a number in it":
            return [replicas[0], 7]
        case "a parameter in it":
            return [replicas[0], replicas[1][0]]
        case "none":
            return []
    return replicas


@pytest.mark.parametrize(
    ("kind", "error", "fragments"),
    [
        ("number", ValueError, ["replicas[1] has 6 parameters", "replicas[0] has 7", "expected the same number"]),
        ("shape", ValueError, ["parameter 0", "shape (4, 3) in replicas[1]", "(3, 4) in replicas[0]"]),
        ("dtype", ValueError, ["parameter 0", "float64", "replicas[1]", "float32", "replicas[0]"]),
        ("frozen", ValueError, ["parameter 0", "requires_grad False in replicas[1]"]),
        ("shared", ValueError, ["parameter 0", "the same tensor in several replicas"]),
        ("sparse", TypeError, ["replicas[1], parameter 0", "sparse", "sparse=False"]),
        ("complex", TypeError, ["parameter 2", "complex64", "expected real ones"]),
        ("text", TypeError, ["replicas[1], parameter 0", "str", "expected a parameter"]),
        ("a module", TypeError, ["replicas", "Linear", "[model]"]),
        ("a generator", TypeError, ["replicas", "list_iterator"]),
        ("a number in it", TypeError, ["replicas[1]", "int", "expected a module"]),
        ("a parameter in it", TypeError, ["replicas[1]", "Parameter", "expected a module"]),
        ("none", ValueError, ["replicas is empty"]),
    ],
)
def test_replicas_that_do_not_correspond_are_named(kind, error, fragments):
    with pytest.raises(error) as caught:
        reduce_replicas(wrong(kind))
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"scale": "1"}, TypeError, "scale must be a number"),
        ({"bucket_size": -1}, ValueError, "bucket_size must be >= 0"),
        ({"bucket_size": "1"}, TypeError, "bucket_size must be a number of bytes"),
    ],
    ids=str,
)
def test_bad_options_change_nothing(options, error, text):
    replicas = pair()
    before = [[param.grad.clone() for param in params] for params in replicas]
    with pytest.raises(error, match=text):
        reduce_replicas(replicas, **options)
    for params, grads in zip(replicas, before, strict=True):
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))


def test_the_public_name_is_the_function():
    assert dpfuse.reduce_replicas is reduce_replicas
