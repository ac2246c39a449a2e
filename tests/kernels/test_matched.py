"""The lean path for gradients that autograd has matched: the reference's bits, or a clean retreat."""

from __future__ import annotations

import pytest
import torch

from dpfuse_kernels import PointerTable, Slot, flatten, unflatten
from dpfuse_kernels.flatten import flatten_reference

pytestmark = pytest.mark.usefixtures("usual_choice")

SHAPES = [(4,), (8,), (4, 4), (4,), (4,), (4,), (4,), (3, 5), (), (0,), (40_000,), (2, 3, 2), (33_000,), (16,)]


def make(dtype=torch.float32):
    slots, offset = [], 0
    for index, shape in enumerate(SHAPES):
        view = torch.empty(shape)
        slots.append(Slot(f"t{index}", offset, shape, view.stride()))
        offset += -(-view.numel() // 4) * 4
    flat = torch.zeros(offset, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    return PointerTable(flat, slots, dtype), tensors


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_it_packs_the_bits_of_the_reference(dtype, scale):
    table, tensors = make(dtype)
    expected, _ = make(dtype)
    flatten_reference(tensors, expected, scale=scale)
    assert table.host_plan.pack_matched(list(tensors), table, scale)
    assert torch.equal(table.flat, expected.flat)


@pytest.mark.parametrize("change", ["none", "kept large", "kept small", "sparse", "dtype"])
def test_the_unusual_is_left_to_the_careful_path_and_scaled_once(change):
    table, tensors = make()
    expected, _ = make()
    place = 10 if change == "kept large" else 3
    if change == "none":
        tensors[place] = None
        flatten_reference(tensors, expected, scale=0.5)
    elif change.startswith("kept"):
        table.views[place].copy_(tensors[place])
        flatten_reference(tensors, expected, scale=0.5)
        tensors[place] = table.views[place]
    if change in ("sparse", "dtype"):
        tensors[place] = tensors[place].to_sparse() if change == "sparse" else tensors[place].double()
        with pytest.raises(ValueError, match="Slot 't3' got"):
            flatten(tensors, table, scale=0.5, matched=True)
        return
    flatten(tensors, table, scale=0.5, matched=True)
    assert torch.equal(table.flat, expected.flat)


@pytest.mark.parametrize("kind", ["plain", "kept", "missing"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_a_small_one_alone_behind_large_ones(kind, wire):
    large, small = torch.randn(40_000), torch.randn(6)
    slots = [Slot("large", 0, (40_000,), (1,)), Slot("tail", 40_000, (6,), (1,))]
    table = PointerTable(torch.full((40_008,), 9.0, dtype=wire), slots, torch.float32)
    if kind == "kept" and wire == torch.float32:
        table.views[1].copy_(small)
    told = {"plain": small, "kept": table.views[1] if wire == torch.float32 else small, "missing": None}[kind]
    flatten([large, told], table, scale=1 / 3, matched=True)
    expected = torch.zeros(6) if kind == "missing" else small * (1 / 3)
    assert torch.equal(table.flat, torch.cat([large * (1 / 3), expected, torch.full((2,), 9.0)]).to(wire))


def test_everything_kept_is_scaled_in_place():
    table, tensors = make()
    flatten_reference(tensors, table)
    expected = table.flat * 0.5
    flatten(list(table.views), table, scale=0.5, matched=True)
    assert torch.equal(table.flat, expected)


@pytest.mark.parametrize("missing", [False, True])
def test_unpacking_gives_back_what_was_packed(missing):
    table, tensors = make()
    flatten_reference(tensors, table)
    targets = [torch.full_like(tensor, 7) for tensor in tensors]
    if missing:
        targets[2] = None
    unflatten(table, targets, matched=True)
    for target, tensor in zip(targets, tensors, strict=True):
        assert target is None or torch.equal(target, tensor)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(5, 3), (1,)])
def test_a_large_one_or_one_alone_of_another_shape_is_refused(scale, shape):
    """`out=` would resize the view, and with it the buffer."""
    table = PointerTable(torch.zeros(4), [Slot("alone", 0, (3,), (1,))], torch.float32)
    with pytest.raises(ValueError, match=r"Slot 'alone' got shape"):
        flatten([torch.ones(shape)], table, scale=scale, matched=True)
    assert table.views[0].shape == (3,)
    assert not table.flat.any()
