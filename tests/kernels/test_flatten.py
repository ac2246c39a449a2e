"""`flatten` and its reference against the definition, one tensor at a time."""

from __future__ import annotations

import pytest
import torch

from dpfuse_kernels import PointerTable
from dpfuse_kernels.flatten import _flatten_kernel, flatten, flatten_reference
from tests.kernels.layouts import (
    BACKENDS,
    PAIRS,
    REFERENCE,
    TRITON,
    Backend,
    assert_equal,
    expected,
    guarded,
    same_bits,
    slot_of,
)

both = pytest.mark.parametrize("backend", BACKENDS, ids=repr)

# Odd, even and whole eights, below, at and above one chunk of 4096 or 8192, and the reference's limit between small
# and large.
NUMELS = (1, 7, 8, 4096, 0, 1000, 8195, 4104, 32769)


def randoms(dtype: torch.dtype, numels: tuple[int, ...] = NUMELS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for numel in numels]


@both
def test_example_of_the_kernel_docstring(backend: Backend) -> None:
    tensors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
    slots = [slot_of("a", 0, tensors[0]), slot_of("b", 4, tensors[1])]
    table = PointerTable(torch.full((6,), 9.0), slots, torch.float32)
    backend.flatten(tensors, table, scale=0.5)
    assert table.flat.tolist() == [0.5, 1.0, 1.5, 9.0, 2.0, 2.5]
    assert "[0.5, 1, 1.5, 9, 2, 2.5]" in (_flatten_kernel.__doc__ or "")


@pytest.mark.one_in(3)
@both
@pytest.mark.parametrize("scale", [1.0, pytest.param(0.25, marks=pytest.mark.slow), 1 / 3])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_dtype_pair_is_scaled_in_the_compute_type_and_rounded_once(
    backend: Backend, dtype: torch.dtype, wire: torch.dtype, scale: float
) -> None:
    tensors = randoms(dtype)
    buffer = guarded(tensors, dtype, wire, gap=3)
    backend.flatten(tensors, buffer.table, scale=scale)
    exact = dtype == wire and scale in (1.0, 0.25)
    truncated = int(backend.truncates_bf16 and wire == torch.bfloat16 and not exact)
    for tensor, view in zip(tensors, buffer.table.views, strict=True):
        assert_equal(view, expected(tensor, scale, wire), truncated=truncated)
    assert buffer.untouched_outside_slots()


@both
def test_float64_gets_the_whole_factor(backend: Backend) -> None:
    tensors = [torch.tensor([3.0, 1e300, 7.0], dtype=torch.float64)]
    buffer = guarded(tensors, torch.float64, torch.float64)
    backend.flatten(tensors, buffer.table, scale=1 / 3)
    assert buffer.table.views[0].tolist() == [3.0 * (1 / 3), 1e300 * (1 / 3), 7.0 * (1 / 3)]


@both
def test_none_packs_zeros_whatever_the_factor(backend: Backend) -> None:
    tensors = randoms(torch.float32)
    for scale in (1.0, -0.5, float("inf")):
        buffer = guarded(tensors, torch.float32, torch.float32)
        present = [tensor if index % 2 else None for index, tensor in enumerate(tensors)]
        backend.flatten(present, buffer.table, scale=scale)
        for index, view in enumerate(buffer.table.views):
            if index % 2:
                assert_equal(view, expected(tensors[index], scale, torch.float32))
            else:
                assert same_bits(view, torch.zeros_like(view))
        assert buffer.untouched_outside_slots()


@both
def test_nothing_but_none_packs_zeros(backend: Backend) -> None:
    tensors = randoms(torch.float32, (3, 5))
    buffer = guarded(tensors, torch.float32, torch.float32)
    backend.flatten([None, None], buffer.table, scale=0.5)
    assert all(view.eq(0).all() for view in buffer.table.views)


@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("same_object", [True, False])
def test_slots_in_place_mix_with_private_tensors_and_none(backend: Backend, scale: float, same_object: bool) -> None:
    values = randoms(torch.float32, (5, 8, 40000, 3, 33000, 6, 4, 4, 4, 4))
    buffer = guarded(values, torch.float32, torch.float32, align=1)
    tensors: list[torch.Tensor | None] = list(values)
    for index in (0, 2, 5):
        view = buffer.table.views[index].copy_(values[index])
        tensors[index] = view if same_object else view.view(-1)
    tensors[3] = None
    backend.flatten(tensors, buffer.table, scale=scale)
    for index, view in enumerate(buffer.table.views):
        wanted = torch.zeros(3) if index == 3 else values[index] * scale
        assert same_bits(view, wanted), index
    assert buffer.untouched_outside_slots()


@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_all_slots_in_place_are_scaled_once(backend: Backend, scale: float) -> None:
    values = randoms(torch.float32)
    buffer = guarded(values, torch.float32, torch.float32)
    for view, value in zip(buffer.table.views, values, strict=True):
        view.copy_(value)
    backend.flatten(buffer.table.views, buffer.table, scale=scale)
    for view, value in zip(buffer.table.views, values, strict=True):
        assert same_bits(view, value * scale)
    assert buffer.untouched_outside_slots()


def test_slots_in_place_at_factor_one_launch_nothing() -> None:
    values = randoms(torch.float32)
    table = guarded(values, torch.float32, torch.float32).table
    flatten(table.views, table)
    assert table.launcher.dispatcher.launches == 0


def test_one_launch_per_call() -> None:
    values = randoms(torch.float32)
    table = guarded(values, torch.float32, torch.float32).table
    flatten([values[0].expand(1), None, *values[2:]], table, scale=0.5)
    assert table.launcher.dispatcher.launches == 1


def odd_shapes() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name -> (tensor, what gives its slot the memory order)."""
    image = torch.randn(2, 3, 4, 5)
    return {
        "channels-last in its own order": (image.to(memory_format=torch.channels_last),) * 2,
        "contiguous into channels-last": (image, image.to(memory_format=torch.channels_last)),
        "channels-last into contiguous": (image.to(memory_format=torch.channels_last), image),
        "transposed": (torch.randn(5, 7).t(), torch.randn(7, 5)),
        "transposed square": (torch.randn(6, 6).t(), torch.randn(6, 6)),
        "permuted slot": (torch.randn(3, 4, 5), torch.randn(5, 3, 4).permute(1, 2, 0)),
        "expanded": (torch.randn(4, 1).expand(4, 6), torch.randn(4, 6)),
        "expanded scalar": (torch.randn(()).expand(9), torch.randn(9)),
        "strided": (torch.randn(10, 8)[::2, ::2], torch.randn(5, 4)),
        "misaligned": (torch.randn(4101)[1:], torch.randn(4100)),
        "misaligned full chunk": (torch.randn(4097)[1:], torch.randn(4096)),
        "size-1 strides": (torch.randn(6, 6)[:, :1], torch.randn(6, 1)),
        "size-1 strides only": (torch.randn(1, 5).as_strided((1, 5), (77, 1)), torch.randn(1, 5)),
        "no dimension": (torch.randn(()), torch.randn(())),
        "empty": (torch.randn(0, 3), torch.randn(0, 3)),
        "large transposed": (torch.randn(200, 180).t(), torch.randn(180, 200)),
        "negated view": (torch.randn(5, dtype=torch.complex64).conj().imag, torch.randn(5)),
    }


@pytest.mark.one_in(3)
@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", odd_shapes())
def test_values_go_by_logical_index(backend: Backend, name: str, scale: float) -> None:
    tensor, like = odd_shapes()[name]
    dense = torch.empty_strided(like.shape, like.stride())
    buffer = guarded([dense, torch.randn(3)], torch.float32, torch.float32, gap=1)
    backend.flatten([tensor, torch.ones(3)], buffer.table, scale=scale)
    wanted = torch.full_like(buffer.table.views[0], 0).copy_(tensor * scale)
    assert torch.equal(buffer.table.views[0], wanted)
    assert buffer.untouched_outside_slots()


@both
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_misaligned_buffers(backend: Backend, shift: int) -> None:
    tensors = randoms(torch.float32, (4096, 4097, 12288))
    buffer = guarded(tensors, torch.float32, torch.float32, align=1, shift=shift)
    backend.flatten(tensors, buffer.table, scale=0.5)
    for tensor, view in zip(tensors, buffer.table.views, strict=True):
        assert same_bits(view, tensor * 0.5)
    assert buffer.untouched_outside_slots()


@both
def test_padding_holds_what_it_held(backend: Backend) -> None:
    tensors = randoms(torch.float32, (3, 5, 2))
    table = guarded(tensors, torch.float32, torch.float32, gap=2).table
    table.flat.fill_(7.0)
    backend.flatten(tensors, table, scale=0.5)
    inside = torch.zeros(table.flat.numel(), dtype=torch.bool)
    for slot in table.slots:
        inside[slot.offset : slot.offset + slot.numel] = True
    assert table.flat[~inside].eq(7.0).all()


@both
def test_gradients_that_require_grad_leave_no_graph(backend: Backend) -> None:
    tensors = [torch.randn(5, requires_grad=True), torch.randn(40000, requires_grad=True)]
    table = guarded(tensors, torch.float32, torch.float32).table
    backend.flatten(tensors, table, scale=0.5)
    assert not table.flat.requires_grad
    assert torch.equal(table.views[1], tensors[1].detach() * 0.5)


@both
def test_slots_may_lie_in_any_order(backend: Backend) -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    table = PointerTable(torch.zeros(4), [slot_of("a", 2, tensors[0]), slot_of("b", 0, tensors[1])], torch.float32)
    backend.flatten(tensors, table)
    assert table.flat.tolist() == [3.0, 4.0, 1.0, 2.0]


@both
def test_no_slots(backend: Backend) -> None:
    table = PointerTable(torch.zeros(4), [], torch.float32)
    backend.flatten([], table, scale=0.5)
    assert table.flat.tolist() == [0.0] * 4


def test_one_row_of_equal_shapes_is_moved_by_cat() -> None:
    tensors = [torch.randn(4, 4) for _ in range(6)]
    table = guarded(tensors, torch.float32, torch.float32).table
    assert table.host_plan.only_rows
    flatten_reference(tensors, table, scale=0.5)
    assert torch.equal(table.flat.view(24, 4), torch.cat(tensors) * 0.5)


def test_backends_are_the_two_implementations() -> None:
    assert (TRITON.flatten, REFERENCE.flatten) == (flatten, flatten_reference)
