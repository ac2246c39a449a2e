"""Tensors at known addresses are not checked in Python again, and a changed one is noticed all the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import PointerTable, Slot, checks
from dpfuse_kernels.flatten import flatten
from dpfuse_kernels.known_tensors import Seen
from dpfuse_kernels.unflatten import unflatten

SHAPES = [(4, 6), (5,), (), (1, 8)]


def new_table() -> PointerTable:
    slots, offset = [], 0
    for index, shape in enumerate(SHAPES):
        like = torch.empty(shape)
        slots.append(Slot(f"p{index}", offset, shape, like.stride()))
        offset += like.numel() + 1
    return PointerTable(torch.zeros(offset), slots, torch.float32)


def new_tensors() -> list[Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each list that is checked in Python."""
    found: list[int] = []
    check = checks._kernel_can_follow

    def counted(tensors: list[Tensor], *arguments: object) -> bool:
        found.append(len(tensors))
        return check(tensors, *arguments)

    monkeypatch.setattr(checks, "_kernel_can_follow", counted)
    return found


def test_only_the_first_list_is_checked_in_python(passes: list[int]) -> None:
    table, tensors = new_table(), new_tensors()
    for factor in (1.0, 2.0, 3.0):
        for tensor in tensors:
            tensor.fill_(factor)
        flatten(tensors, table)
        assert all(view.eq(factor).all() for view in table.views)
    assert len(passes) == 1
    # Others that are like them: only their addresses are looked at.
    others = new_tensors()
    for _ in range(2):
        flatten(others, table)
        assert all(map(torch.equal, table.views, others))
    unflatten(table, tensors)
    assert all(map(torch.equal, tensors, others))
    assert len(passes) == 1
    assert table.launcher.ring.uploads == 2


AT_THE_SAME_ADDRESS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dtype": (lambda t: t.view(torch.int32), r"'p0' got dtype torch\.int32, expected torch\.float32"),
    "shape": (lambda t: t.view(6, 4), r"'p0' got shape \(6, 4\), expected \(4, 6\)"),
    "fewer elements": (lambda t: t[:2], r"'p0' got shape \(2, 6\), expected \(4, 6\)"),
}


@pytest.mark.parametrize("change", AT_THE_SAME_ADDRESS)
def test_a_known_address_excuses_nothing(change: str, passes: list[int]) -> None:
    changed, text = AT_THE_SAME_ADDRESS[change]
    table, tensors = new_table(), new_tensors()
    for _ in range(2):
        flatten(tensors, table)
    held = table.flat.clone()
    wrong = [changed(tensors[0]), *tensors[1:]]
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            flatten(wrong, table, scale=0.5)
    assert torch.equal(table.flat, held)
    flatten(tensors, table)
    assert len(passes) == 3, "the first list, and the wrong ones"


@pytest.mark.parametrize(
    "other",
    [lambda t: t.as_strided((4, 6), (1, 4)), torch._neg_view, lambda t: t.requires_grad_()],
    ids=["strides", "negation", "requires_grad"],
)
def test_another_description_of_the_same_memory_is_followed(other: Callable[[Tensor], Tensor]) -> None:
    table, tensors = new_table(), new_tensors()
    for _ in range(2):
        flatten(tensors, table)
    tensors[0] = other(tensors[0])
    for _ in range(2):
        flatten(tensors, table)
        assert all(map(torch.equal, table.views, tensors))


def test_a_missing_tensor_and_one_in_its_slot() -> None:
    table, tensors = new_table(), new_tensors()
    flatten(tensors, table)
    flatten([None, *tensors[1:]], table)
    assert table.views[0].eq(0).all()
    assert torch.equal(table.views[1], tensors[1])
    flatten([tensors[0], table.views[1], *tensors[2:]], table, scale=2.0)
    assert torch.equal(table.views[0], 2 * tensors[0])
    assert torch.equal(table.views[1], 2 * tensors[1])


def test_another_number_of_tensors_is_named() -> None:
    table, tensors = new_table(), new_tensors()
    flatten(tensors, table)
    for wrong in (tensors[:-1], [*tensors, tensors[0]], []):
        with pytest.raises(ValueError, match=f"Got {len(wrong)} tensors, expected 4"):
            flatten(wrong, table)


def test_no_tensor_is_kept_alive() -> None:
    table, tensors = new_table(), new_tensors()
    flatten(tensors, table)
    gone = weakref.ref(tensors[0])
    tensors[0] = torch.zeros(SHAPES[0])
    assert gone() is None


def test_without_torchs_guards_every_list_is_checked(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")
    table, tensors = new_table(), new_tensors()
    for _ in range(3):
        flatten(tensors, table)
    assert all(map(torch.equal, table.views, tensors))
    assert len(passes) == 3


def test_a_stride_without_meaning_may_differ() -> None:
    seen = Seen()
    seen.remember([torch.ones(1, 4)])
    assert seen.like([torch.ones(4).as_strided((1, 4), (99, 1))])
    assert not seen.like([torch.ones(8).as_strided((1, 4), (4, 2))])
