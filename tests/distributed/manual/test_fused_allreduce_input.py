"""fused_allreduce_gradients: sets that differ, bad input, nobody to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfuse import DPFuseError, fused_allreduce_gradients
from tests.distributed.manual.gradients import assert_equal, assert_group_works, gradients, parameters


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
        case "8 bits":
            params[1] = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))
            params[1].grad = torch.ones(2).to(torch.float8_e5m2)
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
    "8 bits": (TypeError, ["parameter_list[1]", "float8_e5m2", "expected one of float16"]),
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


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["both ranks", "rank 1"])
@pytest.mark.ranks(timeout=12)
def test_bad_input_is_refused_and_the_other_ranks_learn_why(
    rank: int, size: int, kind: str, failing: list[int]
) -> None:
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


@pytest.mark.usefixtures("group")
def test_with_one_rank_it_only_checks():
    assert_does_nothing_but_check()
