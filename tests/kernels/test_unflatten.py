"""`unflatten` and its reference against the definition, one tensor at a time; and the way there and back."""

from __future__ import annotations

import pytest
import torch

from dpfuse_kernels import PointerTable
from dpfuse_kernels.unflatten import _unflatten_kernel
from tests.kernels.layouts import BACKENDS, PAIRS, Backend, assert_equal, expected, guarded, same_bits, slot_of
from tests.kernels.test_flatten import both, odd_shapes, randoms


@both
def test_example_of_the_kernel_docstring(backend: Backend) -> None:
    tensors = [torch.empty(3), torch.empty(2)]
    slots = [slot_of("a", 0, tensors[0]), slot_of("b", 4, tensors[1])]
    table = PointerTable(torch.tensor([1.0, 2.0, 3.0, 9.0, 4.0, 5.0]), slots, torch.float32)
    backend.unflatten(table, tensors, scale=0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 1.0, 1.5], [2.0, 2.5]]
    assert "[0.5, 1, 1.5] and [2, 2.5]" in (_unflatten_kernel.__doc__ or "")


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 / 3])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_dtype_pair_is_scaled_in_the_compute_type_and_rounded_once(
    backend: Backend, dtype: torch.dtype, wire: torch.dtype, scale: float
) -> None:
    values = randoms(wire)
    memory = [torch.full((value.numel() + 2,), float("nan"), dtype=dtype) for value in values]
    tensors = [around[1:-1] for around in memory]
    table = guarded(tensors, dtype, wire).table
    for view, value in zip(table.views, values, strict=True):
        view.copy_(value)
    held = table.flat.clone()
    backend.unflatten(table, tensors, scale=scale)
    exact = dtype == wire and scale == 1.0
    truncates = backend.truncates_bf16 and dtype == torch.bfloat16 and not exact
    for tensor, value, around in zip(tensors, values, memory, strict=True):
        assert_equal(tensor, expected(value, scale, dtype), truncated=int(truncates))
        assert around[[0, -1]].isnan().all()
    assert same_bits(table.flat, held)


@pytest.mark.one_in(3)
@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", [name for name in odd_shapes() if not name.startswith(("expanded", "negated"))])
def test_values_go_by_logical_index(backend: Backend, name: str, scale: float) -> None:
    tensor, like = odd_shapes()[name]
    buffer = guarded([torch.empty_strided(like.shape, like.stride()), torch.randn(3)], torch.float32, torch.float32)
    value = buffer.table.views[0].copy_(torch.randn(like.shape)).clone() * scale
    buffer.table.views[1].fill_(1.0)
    backend.unflatten(buffer.table, [tensor, torch.ones(3)], scale=scale)
    assert torch.equal(tensor, value)
    assert buffer.untouched_outside_slots()


@both
def test_none_is_skipped(backend: Backend) -> None:
    values = randoms(torch.float32)
    table = guarded(values, torch.float32, torch.float32).table
    for view, value in zip(table.views, values, strict=True):
        view.copy_(value)
    tensors = [torch.ones_like(value) if index % 2 else None for index, value in enumerate(values)]
    backend.unflatten(table, tensors, scale=0.5)
    for tensor, value in zip(tensors, values, strict=True):
        assert tensor is None or torch.equal(tensor, value * 0.5)
    backend.unflatten(table, [None] * len(values), scale=0.5)


@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_slots_in_place_mix_with_private_tensors(backend: Backend, scale: float) -> None:
    values = randoms(torch.float32, (5, 8, 40000, 3, 33000, 6))
    buffer = guarded(values, torch.float32, torch.float32)
    for view, value in zip(buffer.table.views, values, strict=True):
        view.copy_(value)
    tensors = [buffer.table.views[i] if i in (0, 2, 5) else torch.ones_like(v) for i, v in enumerate(values)]
    backend.unflatten(buffer.table, tensors, scale=scale)
    for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
        assert same_bits(tensor, value * scale), index
    for index in (1, 3, 4):
        assert same_bits(buffer.table.views[index], values[index])
    assert buffer.untouched_outside_slots()


BITS = {
    torch.float32: [0x7FC01234, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x00400000, 0x3F800001],
    torch.float16: [0x7E12, 0x8000, 1, 0x7C00, 0xFC00, 0x0200, 0x3C01],
    torch.bfloat16: [0x7FC5, 0x8000, 1, 0x7F80, 0xFF80, 0x0040, 0x3F81],
    torch.float64: [0x7FF8000000012345, 0x8000000000000000, 1, 0x7FF0000000000000, 0xFFF0000000000000],
}


@both
@pytest.mark.parametrize("dtype", BITS)
def test_there_and_back_keeps_every_bit(backend: Backend, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    words = [word - (1 << 8 * size) if word >> (8 * size - 1) else word for word in BITS[dtype]]
    specials = torch.tensor(words, dtype=integer).view(dtype)
    tensors = [specials, specials.repeat(2000), specials.repeat(6000)]
    table = guarded(tensors, dtype, dtype).table
    backend.flatten(tensors, table)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    backend.unflatten(table, copies)
    assert all(same_bits(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


@both
def test_leaves_that_require_grad_are_written(backend: Backend) -> None:
    tensors = [torch.zeros(5, requires_grad=True), torch.zeros(40000, requires_grad=True)]
    table = guarded(tensors, torch.float32, torch.float32).table
    table.flat.fill_(2.0)
    backend.unflatten(table, tensors, scale=0.5)
    assert all(tensor.eq(1.0).all() and tensor.is_leaf for tensor in tensors)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
def test_expanded_targets_are_refused(backend: Backend) -> None:
    table = guarded([torch.zeros(4, 6)], torch.float32, torch.float32).table
    with pytest.raises(ValueError, match=r"'p0' got an expanded tensor .*Pass tensor\.contiguous\(\)"):
        backend.unflatten(table, [torch.zeros(4, 1).expand(4, 6)])
