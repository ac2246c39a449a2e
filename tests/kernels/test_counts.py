"""Non-finite values that packing counts, kernel and reference, against torch's own test of each value."""

from __future__ import annotations

import pytest
import torch

from dpfuse_kernels.flatten import _flatten_kernel, all_finite, count_nonfinite
from tests.kernels.layouts import BACKENDS, PAIRS, TRITON, Backend, guarded, same_bits, slot_of
from tests.kernels.test_flatten import NUMELS, randoms

INF, NAN = float("inf"), float("nan")

both = pytest.mark.parametrize("backend", BACKENDS, ids=repr)


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


@both
def test_example_of_the_kernel_docstring(backend: Backend) -> None:
    tensors = [torch.tensor([1.0, INF, NAN]), torch.tensor([4.0, NAN])]
    table = guarded(tensors, torch.float32, torch.float32, align=4).table
    counts = torch.tensor([10, 20], dtype=torch.int32)
    backend.flatten(tensors, table, scale=0.5, counts=counts)
    assert counts.tolist() == [12, 21]
    assert "counts [10, 20] become [12, 21]" in (_flatten_kernel.__doc__ or "")


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 / 3])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_kind_at_every_place_is_counted_once(
    backend: Backend, dtype: torch.dtype, wire: torch.dtype, scale: float
) -> None:
    tensors = randoms(dtype)
    planted = [0] * len(tensors)
    for index, tensor in enumerate(tensors):
        for place, value in ((0, NAN), (-1, -INF), (tensor.numel() // 2, INF)):
            if tensor.numel() > 7:
                tensor[place] = value
                planted[index] += 1
    assert max(NUMELS) > 8192, "several chunks add to one count"
    buffer = guarded(tensors, dtype, wire, gap=3)
    counts = zeros(len(tensors))
    backend.flatten(tensors, buffer.table, scale=scale, counts=counts)
    assert counts.tolist() == planted
    assert buffer.untouched_outside_slots()


@both
def test_what_counts_packs_the_same(backend: Backend) -> None:
    tensors = randoms(torch.float32)
    one, other = (guarded(tensors, torch.float32, torch.bfloat16).table for _ in range(2))
    backend.flatten(tensors, one, scale=0.3, counts=zeros(len(tensors)))
    backend.flatten(tensors, other, scale=0.3)
    assert all(same_bits(a, b) for a, b in zip(one.views, other.views, strict=True))


@both
def test_what_overflows_on_its_way_into_the_buffer_counts(backend: Backend) -> None:
    tensors = [torch.tensor([70000.0, 1.0, -70000.0]), torch.tensor([65504.0])]
    table = guarded(tensors, torch.float32, torch.float16).table
    counts = zeros(2)
    backend.flatten(tensors, table, counts=counts)
    assert counts.tolist() == [2, 0]
    backend.flatten(tensors, table, scale=0.5, counts=counts)
    assert counts.tolist() == [2, 0]


@both
def test_slots_in_place_none_and_unusual_strides_count(backend: Backend) -> None:
    tensors = [torch.ones(5), torch.ones(4, 3), torch.ones(9), torch.ones(3)]
    buffer = guarded(tensors, torch.float32, torch.float32)
    buffer.table.views[0].copy_(torch.tensor([1, NAN, 1, INF, 1]))
    turned = torch.full((3, 4), INF).t()
    given = [buffer.table.views[0], turned, None, tensors[3]]
    counts = zeros(4)
    backend.flatten(given, buffer.table, counts=counts)
    assert counts.tolist() == [2, 12, 0, 0]


@both
def test_a_buffer_that_is_all_in_place_is_counted_too(backend: Backend) -> None:
    table = guarded([torch.ones(4), torch.ones(4)], torch.float32, torch.float32).table
    table.views[0].fill_(1.0)
    table.views[1].fill_(NAN)
    counts = zeros(2)
    backend.flatten(table.views, table, counts=counts)
    assert counts.tolist() == [0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_sum_that_overflows_is_no_finding(dtype: torch.dtype) -> None:
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    # Those of float16 add up in float32, others do not fit in anything.
    assert all_finite(largest) == (dtype == torch.float16)
    table = guarded([largest], dtype, dtype).table
    table.flat.copy_(largest)
    counts = zeros(1)
    count_nonfinite(table, counts)
    assert counts.tolist() == [0]


def test_nothing_cancels_in_the_sum() -> None:
    assert not all_finite(torch.tensor([INF, -INF]))
    assert not all_finite(torch.tensor([NAN, 0.0]))
    assert all_finite(torch.zeros(0))


@pytest.mark.usefixtures("usual_choice")
def test_the_matched_path_counts() -> None:
    from dpfuse_kernels import PointerTable, flatten

    tensors = [torch.ones(4), torch.tensor([1.0, NAN, 1.0, INF])]
    table = PointerTable(torch.zeros(8), [slot_of("a", 0, tensors[0]), slot_of("b", 4, tensors[1])], torch.float32)
    for matched in (False, True):
        counts = zeros(2)
        flatten(tensors, table, scale=0.5, counts=counts, matched=matched)
        assert counts.tolist() == [0, 2]


def test_counting_is_one_launch() -> None:
    tensors = randoms(torch.float32)
    table = guarded(tensors, torch.float32, torch.float32).table
    TRITON.flatten(tensors, table, scale=0.5, counts=zeros(len(tensors)))
    assert table.launcher.dispatcher.launches == 1
