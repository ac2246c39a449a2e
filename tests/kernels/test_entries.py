"""Wrong tensors: a named error from both backends, and nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import PointerTable, Slot
from tests.kernels.layouts import Backend, guarded, same_bits
from tests.kernels.test_flatten import both, randoms

NUMELS = (5, 40000, 4, 6)


def without_memory(tensor: Tensor) -> Tensor:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


WRONG: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "shape": (lambda t: torch.zeros(t.numel() + 1), r"got shape \(\d+,\), expected \(\d+,\)\. Plan again"),
    "shorter": (lambda t: torch.zeros(t.numel() - 1), "got shape .*, expected .*Plan again"),
    "one element": (lambda t: torch.zeros(1), r"got shape \(1,\), expected .*Plan again"),
    "more dimensions": (lambda t: t.view(1, -1), r"got shape \(1, \d+\), expected .*Plan again"),
    "other dimensions": (lambda t: t.view(-1, 1), r"got shape \(\d+, 1\), expected .*Plan again"),
    "wider dtype": (lambda t: t.double(), r"got dtype torch\.float64, expected torch\.float32\. Convert it with"),
    "narrower dtype": (lambda t: t.half(), r"got dtype torch\.float16, expected torch\.float32\. Convert it with"),
    "integers": (lambda t: t.int(), r"got dtype torch\.int32, expected torch\.float32\. Convert it with"),
    "device": (lambda t: t.to("meta"), r"got a tensor on meta, expected cpu\. Move it with"),
    "sparse": (lambda t: t.to_sparse_coo(), r"got a tensor of layout torch\.sparse_coo, .*Convert it with \.to_dense"),
    "no tensor": (lambda t: 3.0, "got a float, expected a tensor or None. Pass tensors"),
    "freed memory": (without_memory, r"got a tensor without memory \(address 0\), expected \d+ elements\. Its storage"),
}


@pytest.mark.one_in(3)
@both
@pytest.mark.parametrize("index", range(len(NUMELS)))
@pytest.mark.parametrize("name", WRONG)
def test_each_corruption_of_each_entry_is_named(backend: Backend, name: str, index: int) -> None:
    corrupt, text = WRONG[name]
    for dtype_wire in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
        buffer = guarded(randoms(torch.float32, NUMELS), *dtype_wire, gap=1)
        held = buffer.memory.clone()
        tensors: list[object] = list(randoms(torch.float32, NUMELS))
        tensors[index] = corrupt(tensors[index])
        untouched = [(t, t.clone()) for i, t in enumerate(tensors) if i != index]
        with pytest.raises(ValueError, match=f"'p{index}' {text}"):
            backend.flatten(tensors, buffer.table, scale=0.5)
        assert same_bits(buffer.memory, held)
        with pytest.raises(ValueError, match=f"'p{index}' {text}"):
            backend.unflatten(buffer.table, tensors, scale=0.5)
        assert all(same_bits(tensor, before) for tensor, before in untouched)


@both
@pytest.mark.parametrize("count", [0, 3, 5])
def test_number_of_tensors(backend: Backend, count: int) -> None:
    table = guarded(randoms(torch.float32, NUMELS), torch.float32, torch.float32).table
    with pytest.raises(ValueError, match=rf"Got {count} tensors, expected 4, one per slot\. Pass None"):
        backend.flatten([torch.zeros(5)] * count, table)
    with pytest.raises(ValueError, match=rf"Got {count} tensors, expected 4, one per slot\. Pass None"):
        backend.unflatten(table, [torch.zeros(5)] * count)
    assert table.flat.isnan().all()


@both
def test_transposed_shapes_of_equal_size(backend: Backend) -> None:
    """The sums of dimensions and elements are right; only the shapes are not."""
    for numel in (1, 40000):
        likes = [torch.zeros(2 * numel, 3), torch.zeros(4), torch.zeros(1, 4)]
        table = guarded(likes, torch.float32, torch.float32).table
        wrong = [torch.zeros(3, 2 * numel), torch.zeros(4), torch.zeros(1, 4)]
        with pytest.raises(ValueError, match=rf"'p0' got shape \(3, {2 * numel}\)"):
            backend.flatten(wrong, table)
        with pytest.raises(ValueError, match=rf"'p0' got shape \(3, {2 * numel}\)"):
            backend.unflatten(table, wrong)
        wrong = [likes[0], torch.zeros(1, 4), torch.zeros(4)]
        with pytest.raises(ValueError, match=r"'p1' got shape \(1, 4\), expected \(4,\)"):
            backend.flatten(wrong, table)
        with pytest.raises(ValueError, match=r"'p1' got shape \(1, 4\), expected \(4,\)"):
            backend.unflatten(table, wrong)


@both
def test_overlap_with_the_buffer_that_is_not_the_slot(backend: Backend) -> None:
    buffer = guarded([torch.zeros(4, 4), torch.zeros(4, 4)], torch.float32, torch.float32, gap=2)
    table, (first, second) = buffer.table, buffer.table.views
    start = first.storage_offset()
    overlapping = {
        "half a slot later": buffer.memory.as_strided((4, 4), (4, 1), start + 8),
        "from before the buffer": buffer.memory.as_strided((4, 4), (4, 1), start - 1),
        "another slot": second,
        "its slot, transposed": first.t(),
        "strided into it": buffer.memory.as_strided((4, 4), (1, 5), start - 14),
    }
    held = buffer.memory.clone()
    for tensor in overlapping.values():
        with pytest.raises(ValueError, match=r"'p0' got a tensor at address \w+ that overlaps .* Pass the slot's view"):
            backend.flatten([tensor, torch.ones(4, 4)], table, scale=0.5)
        with pytest.raises(ValueError, match=r"'p0' got a tensor at address \w+ that overlaps .* Pass the slot's view"):
            backend.unflatten(table, [tensor, torch.ones(4, 4)], scale=0.5)
    assert same_bits(buffer.memory, held)


@both
def test_same_memory_but_outside_the_buffer_is_private(backend: Backend) -> None:
    memory = torch.arange(24.0)
    table = PointerTable(memory[8:16], [Slot("a", 0, (8,), (1,))], torch.float32)
    backend.flatten([memory[:8]], table, scale=2.0)
    assert memory.tolist() == [*range(8), *range(0, 16, 2), *range(16, 24)]
    backend.unflatten(table, [memory[16:]])
    assert memory[16:].tolist() == list(range(0, 16, 2))


@both
def test_a_buffer_that_moved(backend: Backend) -> None:
    table = guarded([torch.zeros(4)], torch.float32, torch.float32).table
    backend.flatten([torch.ones(4)], table)
    table.flat.set_(torch.zeros(8))
    with pytest.raises(ValueError, match=r"The flat buffer lies at address .* Build a new PointerTable"):
        backend.flatten([torch.ones(4)], table)


@both
def test_a_view_that_was_moved_elsewhere_is_read_there(backend: Backend) -> None:
    table = guarded([torch.zeros(4)], torch.float32, torch.float32).table
    gradient = table.views[0]
    gradient.data = torch.full((4,), 3.0)
    backend.flatten([gradient], table)
    assert table.flat[:4].tolist() == [3.0] * 4


BAD_LAYOUTS = [
    ([Slot("a", 0, (4,), (1,)), Slot("b", 3, (4,), (1,))], "Slot 'b' starts at element 3, expected 4 or later"),
    ([Slot("a", 6, (4,), (1,))], "Slot 'a' covers elements 6 to 10, expected them inside the 8 elements"),
    ([Slot("a", -1, (4,), (1,))], "Slot 'a' covers elements -1 to 3"),
    ([Slot("a", 0, (2, 2), (4, 1))], r"Slot 'a' has strides \(4, 1\) for shape \(2, 2\), expected a dense"),
    ([Slot("a", 0, (2, 2), (0, 1))], r"Slot 'a' has strides \(0, 1\)"),
    ([Slot("a", 0, (4,), (1, 1))], r"Slot 'a' has strides \(1, 1\) for shape \(4,\)"),
]


@pytest.mark.parametrize(("slots", "text"), BAD_LAYOUTS)
def test_layouts_that_cannot_be(slots: list[Slot], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PointerTable(torch.zeros(8), slots, torch.float32)


def test_buffers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"flat has shape \(2, 2\) .*expected a contiguous 1-D tensor"):
        PointerTable(torch.zeros(2, 2), [], torch.float32)
    with pytest.raises(ValueError, match=r"flat\.dtype is torch\.int32, expected one of torch\.float32"):
        PointerTable(torch.zeros(2, dtype=torch.int32), [], torch.float32)
    with pytest.raises(ValueError, match=r"dtype is torch\.complex64, expected one of"):
        PointerTable(torch.zeros(2), [], torch.complex64)
