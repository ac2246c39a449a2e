"""`squared_norm` and `multiply`, kernels and references, against float64 arithmetic on one tensor at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import PointerTable
from dpfuse_kernels.multiply import _multiply_kernel, multiply, multiply_reference
from dpfuse_kernels.squared_norm import (
    GROUP,
    MIDDLE,
    ROW,
    _squared_norm_kernel,
    row_norms,
    squared_norm,
    squared_norm_reference,
)
from tests.kernels.layouts import DTYPES, guarded, same_bits, slot_of
from tests.kernels.test_flatten import odd_shapes, randoms

INF, NAN = float("inf"), float("nan")

every_norm = pytest.mark.parametrize("norm", [squared_norm, squared_norm_reference], ids=["triton", "reference"])
every_product = pytest.mark.parametrize("product", [multiply, multiply_reference], ids=["triton", "reference"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

Norm = Callable[[list[Any], PointerTable], Tensor]
Product = Callable[[list[Any], PointerTable, Tensor], None]


def exact(tensors: list[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def example() -> tuple[list[Tensor], PointerTable]:
    tensors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
    slots = [slot_of("a", 0, tensors[0]), slot_of("b", 4, tensors[1])]
    return tensors, PointerTable(torch.full((6,), 9.0), slots, torch.float32)


@every_norm
def test_example_of_the_norm_docstring(norm: Norm) -> None:
    tensors, table = example()
    assert norm(tensors, table).item() == pytest.approx(5 + 9 + 41, rel=1e-6)
    assert "sums are [5, 9, 41]" in (_squared_norm_kernel.__doc__ or "")


@every_product
def test_example_of_the_product_docstring(product: Product) -> None:
    tensors, table = example()
    product(tensors, table, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 1, 1.5], [2, 2.5]]
    assert table.flat.eq(9).all()
    assert "they become [0.5, 1, 1.5] and [2, 2.5]" in (_multiply_kernel.__doc__ or "")


@pytest.mark.one_in(2)
@every_norm
@every_dtype
@pytest.mark.parametrize("own", [False, True])
def test_the_norm_is_exact_to_a_few_last_digits(norm: Norm, dtype: torch.dtype, own: bool) -> None:
    tensors = randoms(dtype)
    buffer = guarded(tensors, dtype, dtype, gap=3)
    given = tensors
    if own:
        for view, tensor in zip(buffer.table.views, tensors, strict=True):
            view.copy_(tensor)
        given = buffer.table.views
    got = norm(given, buffer.table)
    assert got.dtype == torch.float64
    assert got.shape == ()
    assert got.item() == pytest.approx(exact(tensors), rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert buffer.untouched_outside_slots()


@every_norm
def test_the_same_numbers_give_the_same_bits(norm: Norm) -> None:
    tensors = randoms(torch.float32)
    first, second = (
        norm([tensor.clone() for tensor in tensors], guarded(tensors, torch.float32, torch.float32).table)
        for _ in range(2)
    )
    assert first.item() == second.item()


@every_norm
def test_none_strides_and_alignment_are_followed(norm: Norm) -> None:
    for name, (tensor, like) in odd_shapes().items():
        dense = torch.empty_strided(like.shape, like.stride())
        buffer = guarded([dense, torch.ones(3), torch.ones(7)], torch.float32, torch.float32, gap=1)
        got = norm([tensor, None, torch.full((7,), 2.0)], buffer.table)
        assert got.item() == pytest.approx(exact([tensor]) + 28, rel=1e-6), name
        assert buffer.untouched_outside_slots(), name


@every_norm
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_not_finite_gives_no_finite_norm(norm: Norm, value: float) -> None:
    tensors = randoms(torch.float32, (5, 9000))
    tensors[1][8999] = value
    table = guarded(tensors, torch.float32, torch.float32).table
    assert not norm(tensors, table).isfinite()


@every_norm
def test_what_is_in_the_buffer_and_nobodys_does_not_count(norm: Norm) -> None:
    tensors = randoms(torch.float32, (3, 5))
    table = guarded(tensors, torch.float32, torch.float32, gap=5).table
    table.flat.fill_(100.0)
    assert norm([None, None], table).item() == 0.0
    for view in table.views:
        view.fill_(1.0)
    assert norm(table.views, table).item() == pytest.approx(8.0, rel=1e-6)


def filled(numels: tuple[int, ...]) -> tuple[list[Tensor], PointerTable]:
    """Random numbers, and a table whose slots hold them, poisoned between them."""
    values = randoms(torch.float32, numels)
    table = guarded(values, torch.float32, torch.float32).table
    for view, value in zip(table.views, values, strict=True):
        view.copy_(value)
    return values, table


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_slots_whose_last_ones_are_missing_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    module = sys.modules["dpfuse_kernels.squared_norm"]  # the package has a function of that name
    asked: list[list[int]] = []
    norms = module.row_norms

    def recorded(tensors: list[Tensor], *arguments: Any) -> Tensor:
        asked.append([tensor.numel() for tensor in tensors])
        return norms(tensors, *arguments)

    monkeypatch.setattr(module, "row_norms", recorded)
    values, table = filled((5, 16, 3, 8))
    held = 4 - missing
    got = squared_norm_reference([*table.views[:held], *[None] * missing], table)
    assert got.item() == pytest.approx(exact(values[:held]), rel=1e-6)
    assert asked == [[{0: 40, 1: 27, 3: 5}[missing]]]
    assert table.flat.isnan().any(), "what lies between the slots is what it was"
    # Slots of another order, or with a gap in their row, are read one by one.
    reverse = PointerTable(torch.ones(8), [slot_of("a", 4, torch.ones(4)), slot_of("b", 0, torch.ones(4))], table.dtype)
    assert squared_norm_reference([reverse.views[0], None], reverse).item() == pytest.approx(4)
    assert squared_norm_reference([None, *table.views[1:]], table).item() == pytest.approx(exact(values[1:]), rel=1e-6)
    assert asked[1:] == [[4], [16, 3, 8]]


@every_norm
def test_a_wrong_tensor_is_named(norm: Norm) -> None:
    _, table = example()
    with pytest.raises(ValueError, match=r"Slot 'b' got dtype torch\.float64, expected torch\.float32"):
        norm([torch.ones(3), torch.ones(2, dtype=torch.float64)], table)


@every_norm
def test_no_slots_have_no_norm(norm: Norm) -> None:
    assert norm([], PointerTable(torch.full((4,), NAN), [], torch.float32)).item() == 0.0


def test_a_norm_of_millions_keeps_its_digits() -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    whole = float(values.double().norm())
    assert float(row_norms([values]).norm()) == pytest.approx(whole, rel=1e-7)
    assert float(row_norms([values[:-1].view(1000, 3000).t()]).norm()) == pytest.approx(
        float(values[:-1].double().norm()), rel=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_tensors_of_any_length_keep_their_digits_and_are_few_calls(dtype: torch.dtype) -> None:
    lengths = [ROW, ROW + 1, 3000, MIDDLE - 1, MIDDLE, MIDDLE + 1, *[700] * (GROUP // 700 + 3), 1, 0]
    # The same number everywhere: added up one behind the other in float32, it would lose the sixth digit at 2000.
    tensors = [torch.full((length,), 0.1, dtype=dtype) for length in lengths]
    tensors.append(torch.full((30, 40), 0.1, dtype=dtype).t())
    exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    assert float(row_norms(tensors).norm()) == pytest.approx(exact, rel=5e-7)
    with mock.patch.object(torch.linalg, "vector_norm", wraps=torch.linalg.vector_norm) as norms:
        row_norms(tensors)
    assert norms.call_count == 2 * 3, "two for each long one, and for two groups of short ones"


@pytest.mark.one_in(4)
@every_product
@every_dtype
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1.0, 0.0, NAN])
@pytest.mark.parametrize("own", [False, True])
def test_products_are_those_of_torch(product: Product, dtype: torch.dtype, factor: float, own: bool) -> None:
    tensors = randoms(dtype)
    buffer = guarded(tensors, dtype, dtype, gap=3)
    given = [tensor.clone() for tensor in tensors]
    if own:
        for view, tensor in zip(buffer.table.views, tensors, strict=True):
            view.copy_(tensor)
        given = buffer.table.views
    number = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))
    product(given, buffer.table, number)
    # The interpreter cuts float32 to bfloat16 where a GPU rounds.
    truncated = product is multiply and dtype == torch.bfloat16 and factor == 1 / 3
    for got, tensor in zip(given, tensors, strict=True):
        wanted = tensor.clone().mul_(number)
        torch.testing.assert_close(got, wanted, rtol=2.0**-7 if truncated else 0, atol=0, equal_nan=True)
    assert buffer.untouched_outside_slots()


@every_product
def test_what_lies_between_slots_is_not_multiplied(product: Product) -> None:
    _, table = example()
    for factor in (0.5, NAN):
        product(table.views, table, torch.tensor(factor))
        assert table.flat[3] == 9.0


def test_a_factor_of_one_keeps_every_bit() -> None:
    words = torch.tensor([0x7FC01234, -(2**31), 1, 0x7F800001], dtype=torch.int32)
    tensor = words.view(torch.float32).clone()
    table = PointerTable(torch.zeros(4), [slot_of("a", 0, tensor)], torch.float32)
    multiply([tensor], table, torch.tensor(1.0))
    assert same_bits(tensor, words.view(torch.float32))


@every_product
def test_products_of_unusual_tensors(product: Product) -> None:
    for name, (tensor, like) in odd_shapes().items():
        if "expanded" in name or name == "negated view":
            continue
        dense = torch.empty_strided(like.shape, like.stride())
        buffer = guarded([dense, torch.ones(3)], torch.float32, torch.float32, gap=1)
        wanted = tensor * 0.5
        product([tensor, None], buffer.table, torch.tensor(0.5))
        assert torch.equal(tensor, wanted), name
        assert buffer.untouched_outside_slots(), name


@every_product
def test_a_wrong_tensor_is_named_before_anything_is_written(product: Product) -> None:
    tensors, table = example()
    with pytest.raises(ValueError, match=r"Slot 'b' got dtype torch\.float64, expected torch\.float32"):
        product([tensors[0], torch.ones(2, dtype=torch.float64)], table, torch.tensor(0.5))
    assert tensors[0].tolist() == [1, 2, 3]


def test_the_first_slots_of_a_table_leave_the_rest_alone() -> None:
    tensors, table = example()
    table.views[0].copy_(tensors[0])
    part = table.first(1)
    assert part.views[0] is table.views[0]
    assert squared_norm_reference(part.views, part).item() == pytest.approx(14.0, rel=1e-6)
    multiply_reference(part.views, part, torch.tensor(2.0))
    assert table.flat.tolist() == [2, 4, 6, 9, 9, 9]
