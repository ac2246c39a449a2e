"""The sum of squares that unpacking produces, against float64 arithmetic on what it wrote, one tensor at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dpfuse_kernels
from dpfuse_kernels import MxTable, PointerTable
from dpfuse_kernels.dequantize import _dequantize_kernel
from dpfuse_kernels.squared_norm import squared_norm, squared_norm_reference
from dpfuse_kernels.unflatten import _unflatten_kernel
from tests.kernels.layouts import BACKENDS, DTYPES, PAIRS, REFERENCE, TRITON, Backend, guarded, same_bits, slot_of
from tests.kernels.test_flatten import both, odd_shapes, randoms
from tests.kernels.test_mx import every_format
from tests.kernels.test_quantize import REFERENCE as MX_REFERENCE
from tests.kernels.test_quantize import TRITON as MX_TRITON
from tests.kernels.test_quantize import Ways, every_dtype, table_of

INF, NAN = float("inf"), float("nan")
NUMELS = (1, 7, 4096, 0, 8195, 600, 16)
both_ways = pytest.mark.parametrize("ways", [MX_TRITON, MX_REFERENCE], ids=repr)


def unmeasured() -> Tensor:
    return torch.tensor(NAN, dtype=torch.float64)


def exact(tensors: list[Any]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors if tensor is not None)


def filled(values: list[Tensor], dtype: torch.dtype, **layout: int) -> PointerTable:
    """A table for tensors of `dtype` whose slots hold `values`, poisoned between them."""
    table = guarded([value.to(dtype) for value in values], dtype, values[0].dtype, **layout).table
    for view, value in zip(table.views, values, strict=True):
        view.copy_(value)
    return table


@both
def test_example_of_the_kernel_docstring(backend: Backend) -> None:
    tensors, squares = [torch.full((3,), 10.0), torch.full((2,), 10.0)], unmeasured()
    slots = [slot_of("a", 0, tensors[0]), slot_of("b", 4, tensors[1])]
    table = PointerTable(torch.tensor([1.0, 2.0, 3.0, 9.0, 4.0, 5.0]), slots, torch.float32)
    backend.unflatten(table, tensors, scale=0.5, accumulate=True, squares=squares)
    assert squares.item() == pytest.approx(10.5**2 + 11**2 + 11.5**2 + 12**2 + 12.5**2, rel=1e-6)
    assert [10.5**2 + 11**2, 11.5**2, 12**2 + 12.5**2] == [231.25, 132.25, 300.25]
    assert "[231.25, 132.25, 300.25]" in (_unflatten_kernel.__doc__ or "")
    assert 448**2 + 0.25**2 + 0.5**2 == 200704.3125
    assert "sum 200704.3125" in (_dequantize_kernel.__doc__ or "")


@both
@pytest.mark.parametrize("accumulate", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 / 3])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_dtype_pair_measures_what_is_then_in_the_tensors(
    backend: Backend, dtype: torch.dtype, wire: torch.dtype, scale: float, accumulate: bool
) -> None:
    table, squares = filled(randoms(wire, NUMELS), dtype, gap=3), unmeasured()
    tensors, others = ([torch.ones(numel, dtype=dtype) for numel in NUMELS] for _ in range(2))
    backend.unflatten(table, tensors, scale=scale, accumulate=accumulate, squares=squares)
    backend.unflatten(table, others, scale=scale, accumulate=accumulate)
    assert all(same_bits(one, other) for one, other in zip(tensors, others, strict=True))
    assert squares.item() == pytest.approx(exact(tensors), rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert table.flat.isnan().any(), "what lies between the slots is what it was"


SHAPES = [(), (3,), (4, 4), (2, 1, 3), (0,), (4097,), (64, 65)]
KINDS = ["private", "none", "own", "transposed", "shifted"]


def target(kind: str, view: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Something to unpack into, in one of the ways in which a gradient may lie in memory."""
    if kind == "none":
        return None
    if kind == "own" and view.dtype == dtype:
        return view
    if kind == "transposed" and view.dim() == 2:
        return torch.ones(view.shape[::-1], dtype=dtype).t()
    if kind == "shifted":
        return torch.ones(view.numel() + 1, dtype=dtype)[1:].view(view.shape)
    return torch.ones(view.shape, dtype=dtype)


@pytest.mark.parametrize("backend", [pytest.param(TRITON, marks=pytest.mark.slow), REFERENCE, "matched"], ids=str)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    items=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(KINDS)), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    wire=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    align=st.sampled_from([1, 8]),
    shift=st.sampled_from([0, 1]),
    accumulate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_list(
    backend: Backend | str,
    items: list[tuple[tuple[int, ...], str]],
    dtype: torch.dtype,
    wire: torch.dtype,
    scale: float,
    align: int,
    shift: int,
    accumulate: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(wire) for shape, _ in items]
    table, squares = filled(values, dtype, align=align, shift=shift), unmeasured()
    tensors = [target(kind, view, dtype) for (_, kind), view in zip(items, table.views, strict=True)]
    if isinstance(backend, Backend):
        backend.unflatten(table, tensors, scale=scale, accumulate=accumulate, squares=squares)
    else:
        dpfuse_kernels.unflatten(
            table, tensors, scale=scale, accumulate=accumulate, squares=squares, matched=None not in map(type, tensors)
        )
    assert squares.item() == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["scaled", "added", "own", "own, scaled"])
def test_the_kernels_sum_is_that_of_squared_norm_in_every_bit(dtype: torch.dtype, case: str) -> None:
    table, squares = filled(randoms(dtype, NUMELS), dtype, gap=1), unmeasured()
    tensors: list[Any] = table.views if "own" in case else [torch.ones(numel, dtype=dtype)[:] for numel in NUMELS]
    tensors[5] = tensors[5] if "own" in case else None
    scale = 1 / 3 if "scaled" in case else 1.0
    TRITON.unflatten(table, tensors, scale=scale, accumulate=case == "added", squares=squares)
    assert same_bits(squares, squared_norm(tensors, table))
    assert table.launcher.launches == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("missing", [(), (6,), (5, 6), (2,)], ids=str)
@pytest.mark.parametrize("matched", [False, True])
def test_the_references_sum_is_that_of_the_slots_in_every_bit(
    dtype: torch.dtype, missing: tuple[int, ...], matched: bool
) -> None:
    table, squares = filled(randoms(dtype, NUMELS), dtype, gap=1), unmeasured()
    tensors = [None if i in missing else torch.ones(numel, dtype=dtype) for i, numel in enumerate(NUMELS)]
    dpfuse_kernels.unflatten(table, tensors, squares=squares, matched=matched)
    views = [None if i in missing else view for i, view in enumerate(table.views)]
    assert same_bits(squares, squared_norm_reference(views, table))


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_slots_whose_last_ones_are_missing_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    module = sys.modules["dpfuse_kernels.squared_norm"]  # the package has a function of that name
    asked: list[list[int]] = []
    norms = module.row_norms

    def recorded(tensors: list[Tensor], *arguments: Any) -> Tensor:
        asked.append([tensor.numel() for tensor in tensors])
        return norms(tensors, *arguments)

    monkeypatch.setattr(module, "row_norms", recorded)
    values = randoms(torch.float32, (5, 16, 3, 8))
    table, squares = filled(values, torch.float32), unmeasured()
    held = 4 - missing
    lost = [None] * missing
    for given_ in ([*table.views[:held], *lost], [*map(torch.ones_like, values[:held]), *lost]):
        REFERENCE.unflatten(table, given_, squares=squares)
        assert squares.item() == pytest.approx(exact(given_), rel=1e-6)
    assert asked == 2 * [[{0: 40, 1: 27, 3: 5}[missing]]]
    assert table.flat.isnan().any(), "what lies between the slots is what it was"
    # Slots of another order, or with a gap in their row, are read one by one.
    reverse = PointerTable(torch.ones(8), [slot_of("a", 4, torch.ones(4)), slot_of("b", 0, torch.ones(4))], table.dtype)
    assert squared_norm_reference([reverse.views[0], None], reverse).item() == pytest.approx(4)
    assert squared_norm_reference([None, *table.views[1:]], table).item() == pytest.approx(exact(values[1:]), rel=1e-6)
    assert asked[2:] == [[4], [16, 3, 8]]


def test_what_float32_cannot_square_is_measured_in_the_precision_of_the_tensors() -> None:
    for numel in (3, 600):
        table, squares = filled([torch.full((numel,), 1e30)], torch.float64), unmeasured()
        REFERENCE.unflatten(table, [torch.zeros(numel, dtype=torch.float64)], squares=squares)
        assert squares.item() == pytest.approx(numel * 1e60, rel=1e-6)


@both
def test_strides_and_alignment_are_followed(backend: Backend) -> None:
    for name, (tensor, like) in odd_shapes().items():
        if name.startswith(("expanded", "negated")):
            continue
        values = [torch.empty_strided(like.shape, like.stride()).normal_(), torch.ones(3), torch.full((7,), 2.0)]
        table, squares = filled(values, torch.float32, gap=1), unmeasured()
        backend.unflatten(table, [tensor, None, torch.ones(7)], squares=squares)
        assert squares.item() == pytest.approx(exact([tensor]) + 28, rel=1e-6), name


@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_nothing_to_write_is_nothing_to_measure(backend: Backend, scale: float) -> None:
    table, squares = filled(randoms(torch.float32, (5, 9)), torch.float32), unmeasured()
    backend.unflatten(table, [None, None], scale=scale, squares=squares)
    assert squares.item() == 0.0
    slotless = PointerTable(torch.full((4,), NAN), [], torch.float32)
    backend.unflatten(slotless, [], scale=scale, squares=squares.fill_(NAN))
    assert squares.item() == 0.0
    for wire in DTYPES:
        empty = filled([torch.zeros(0, dtype=wire)], torch.float32)
        backend.unflatten(empty, [torch.zeros(0)], scale=scale, squares=squares.fill_(NAN))
        assert squares.item() == 0.0


@both
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("planted", "found"), [(NAN, NAN), (INF, INF), (-INF, INF)])
def test_what_is_not_finite_is_seen(backend: Backend, planted: float, found: float, own: bool) -> None:
    values = randoms(torch.float32, (5, 9000))
    values[1][8999] = planted
    for scale, accumulate in ((1.0, False), (0.5, False), (1.0, True)):
        table, squares = filled(values, torch.float32), unmeasured().zero_()
        tensors = table.views if own else [torch.ones(5), torch.ones(9000)]
        backend.unflatten(table, tensors, scale=scale, accumulate=accumulate, squares=squares)
        torch.testing.assert_close(squares.item(), found, equal_nan=True)


@both
def test_an_infinite_factor_multiplies_nothing_beyond_the_tensors(backend: Backend) -> None:
    # Zero times infinity would be NaN.
    table, squares = filled([torch.ones(5), torch.ones(16)], torch.float32), unmeasured()
    backend.unflatten(table, [torch.zeros(5), torch.zeros(16)], scale=INF, squares=squares)
    assert squares.item() == INF


WRONG = {
    r"torch\.float32 of shape \(\) on cpu": torch.zeros(()),
    r"torch\.float64 of shape \(1,\) on cpu": torch.zeros(1, dtype=torch.float64),
    r"torch\.float64 of shape \(\) on meta": torch.zeros((), dtype=torch.float64, device="meta"),
}
SAYS = r"squares is {}, expected torch\.float64 of shape \(\) on cpu: .* Make it with torch\.zeros\(\(\), "


@pytest.mark.parametrize("got", WRONG)
@pytest.mark.parametrize("unpack", [*(backend.unflatten for backend in BACKENDS), dpfuse_kernels.unflatten])
@pytest.mark.parametrize("matched", [False, True])
def test_a_wrong_scalar_is_named_before_anything_is_written(
    unpack: Callable[..., None], got: str, matched: bool
) -> None:
    table, tensor = filled([torch.ones(4)], torch.float32), torch.zeros(4)
    options = {"matched": matched} if unpack is dpfuse_kernels.unflatten else {}
    with pytest.raises(ValueError, match=SAYS.format(got)):
        unpack(table, [tensor], squares=WRONG[got], **options)
    assert not tensor.any()


def test_unpacking_and_measuring_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFUSE_KERNELS", "triton")
    table, squares = filled(randoms(torch.float32, NUMELS), torch.float32), unmeasured()
    dpfuse_kernels.unflatten(table, [torch.zeros(numel) for numel in NUMELS], squares=squares, matched=True)
    assert table.launcher.launches == 1
    assert squares.item() == pytest.approx(exact(table.views), rel=1e-6)


def packed(dtype: torch.dtype, format: torch.dtype) -> tuple[MxTable, list[Any]]:
    """Blocks full of random numbers with poison between them, and something to unpack them into; one is None."""
    values = randoms(dtype, NUMELS)
    table, _ = table_of(values, dtype, format, gap=1)
    MX_REFERENCE.quantize(values, table)
    tensors: list[Any] = [torch.empty_like(value) for value in values]
    tensors[5] = None
    return table, tensors


@both_ways
@every_format
@every_dtype
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 / 3])
def test_eight_bit_blocks_are_measured_as_they_are_unpacked(
    ways: Ways, dtype: torch.dtype, format: torch.dtype, scale: float
) -> None:
    (table, tensors), squares = packed(dtype, format), unmeasured()
    before = table.flat.clone()
    ways.dequantize(table, tensors, scale=scale, squares=squares)
    assert squares.item() == pytest.approx(exact(tensors), rel=1e-6)
    norm = squared_norm if ways is MX_TRITON else squared_norm_reference
    assert same_bits(squares, norm(tensors, table))
    others = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    ways.dequantize(table, others, scale=scale)
    assert all(one is None or same_bits(one, other) for one, other in zip(tensors, others, strict=True))
    assert torch.equal(table.flat, before)


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("matched", [False, True])
@every_format
def test_eight_bit_blocks_without_their_last_ones(format: torch.dtype, matched: bool, missing: int) -> None:
    table, _ = packed(torch.float32, format)
    held = len(NUMELS) - missing
    tensors = [*map(torch.zeros, NUMELS[:held]), *[None] * missing]
    squares = unmeasured()
    dpfuse_kernels.dequantize(table, tensors, squares=squares, matched=matched)
    assert squares.item() == pytest.approx(exact(tensors), rel=1e-6)


@both_ways
def test_eight_bit_blocks_of_nan_and_a_wrong_scalar(ways: Ways) -> None:
    table, _ = table_of([torch.ones(9)], torch.float32, torch.float8_e4m3fn)
    MX_REFERENCE.quantize([torch.tensor([1.0] * 8 + [INF])], table)
    tensor, squares = torch.zeros(9), unmeasured().zero_()
    with pytest.raises(ValueError, match=SAYS.format(r"torch\.float32 of shape \(\) on cpu")):
        ways.dequantize(table, [tensor], squares=torch.zeros(()))
    assert not tensor.any()
    ways.dequantize(table, [tensor], squares=squares)
    assert squares.isnan(), "blocks hold no infinity"
