"""Checks the tensors of one call against their slots. Moves no data.

The usual list costs a few passes in C. If one of these passes fails, the list is checked tensor by tensor. That names
the wrong tensor, or finds that it is allowed but unusual (None, or other strides).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from dpfuse_kernels.entries import Entries
from dpfuse_kernels.known_tensors import Seen
from dpfuse_kernels.layout import Slot
from dpfuse_kernels.pointer_table import PointerTable

__all__ = ["check_all", "check_cheaply", "diagnose"]

_dtype_of = attrgetter("dtype")
_address_of = Tensor.data_ptr


def check_cheaply(tensors: list[Tensor | None], table: PointerTable, *, written: bool = False) -> Entries:
    """Check for everything that torch's own operations would silently broadcast, cast or copy across devices.

    The CPU path uses this. It takes about 0.2 us per tensor, and 0.09 us if every tensor is its slot. Any strides pass.

    Raises:
        ValueError: A tensor is wrong: count, shape, dtype, device, sparse layout, or memory that overlaps the flat
            buffer without being the slot. The text names the first such slot.
    """
    return _check(tensors, table, written, _torch_would_see, None)


def check_all(tensors: list[Tensor | None], table: PointerTable, *, written: bool = False) -> Entries:
    """Check everything that a kernel relies on when it uses the addresses; also find `irregular`.

    This takes about 0.45 us per tensor, and 0.13 us if the list and its addresses are like those of an earlier call.

    Raises:
        ValueError: as `check_cheaply`.
    """
    return _check(tensors, table, written, _kernel_can_follow, table.seen)


def _check(
    tensors: list[Tensor | None],
    table: PointerTable,
    written: bool,
    regular: Callable[[list[Tensor], PointerTable, list[int] | None], bool],
    seen: Seen | None,
) -> Entries:
    if table.flat.data_ptr() != table.address:
        raise ValueError(
            f"The flat buffer lies at address {table.flat.data_ptr():#x}, expected {table.address:#x}, where it "
            "was when the table was built. Build a new PointerTable after moving or resizing the buffer."
        )
    if len(tensors) != len(table.slots):
        return diagnose(tensors, table)
    present: list[int] | None = None  # None: all of them
    found: list[Tensor] = tensors  # type: ignore[assignment]
    slot_addresses = table.addresses
    try:
        addresses = list(map(_address_of, found))
        if addresses == slot_addresses and table.are_views(found):
            return table.all_own
    except (TypeError, RuntimeError):  # None and sparse tensors have no address
        present = [i for i, tensor in enumerate(tensors) if tensor is not None]
        found = [tensors[i] for i in present]  # type: ignore[misc]
        slot_addresses = [slot_addresses[i] for i in present]
        try:
            addresses = list(map(_address_of, found))
        except (TypeError, RuntimeError):
            return diagnose(tensors, table, written=written)
    like = seen is not None and seen.like(found)
    if like and seen is not None and addresses == seen.entries.addresses:
        return seen.entries  # with the same list of addresses: a later comparison of a list with itself costs little
    if 0 in addresses or not (like or regular(found, table, present)):
        return diagnose(tensors, table, written=written)
    own: list[int] = []
    if _touches(addresses, table.storage_range):
        at_home = [i for i, (got, slot) in enumerate(zip(addresses, slot_addresses, strict=True)) if got == slot]
        own = at_home if present is None else [present[i] for i in at_home]
        others = [got for got, slot in zip(addresses, slot_addresses, strict=True) if got != slot]
        if _touches(others, table.storage_range) or not all(_is_slot(tensors[i], table, i) for i in own):
            return diagnose(tensors, table, written=written)
    if present is None:
        entries = Entries(addresses, own=None if len(own) == len(tensors) else tuple(own))
        if seen is not None and not own:
            seen.entries = entries
            if not like:
                seen.remember(found)
        return entries
    everywhere = [0] * len(tensors)
    for i, address in zip(present, addresses, strict=True):
        everywhere[i] = address
    missing = tuple(i for i, tensor in enumerate(tensors) if tensor is None)
    return Entries(everywhere, missing, tuple(own))


def _torch_would_see(found: list[Tensor], table: PointerTable, present: list[int] | None) -> bool:
    numels = table.numels if present is None else [table.numels[i] for i in present]
    if list(map(Tensor.numel, found)) != numels or not set(map(_dtype_of, found)) <= {table.dtype}:
        return False
    if present is None and table.host_plan.only_rows:
        return True  # `cat` itself rejects other devices and other numbers of dimensions
    ndims = table.ndims if present is None else sum(len(table.slots[i].shape) for i in present)
    # A broadcasting copy can only add dimensions or elements. So if the sums are equal and torch rejects no copy, all
    # shapes are right.
    return sum(map(Tensor.dim, found)) == ndims and _devices_right(found, table)


def _kernel_can_follow(found: list[Tensor], table: PointerTable, present: list[int] | None) -> bool:
    shapes = table.shapes if present is None else [table.shapes[i] for i in present]
    return (
        list(map(Tensor.size, found)) == shapes
        and set(map(_dtype_of, found)) <= {table.dtype}
        and _strides_right(found, table, present)
        and _devices_right(found, table)
        and not any(map(Tensor.is_neg, found))
    )


def _strides_right(found: list[Tensor], table: PointerTable, present: list[int] | None) -> bool:
    if table.contiguous:
        return all(map(Tensor.is_contiguous, found))
    places = range(len(found)) if present is None else present
    return all(_has_strides(tensor, table, i) for tensor, i in zip(found, places, strict=True))


def _has_strides(tensor: Tensor, table: PointerTable, index: int) -> bool:
    stride = tensor.stride()
    return stride == table.strides[index] or _same_strides(stride, table.slots[index])


def _devices_right(found: list[Tensor], table: PointerTable) -> bool:
    # `get_device` is -1 on the CPU and at least 0 elsewhere, so for the CPU the sum is sufficient.
    devices = map(Tensor.get_device, found)
    device = table.flat.get_device()
    return sum(devices) == -len(found) if device < 0 else set(devices) <= {device}


def _touches(addresses: list[int], memory: tuple[int, int]) -> bool:
    low, high = memory
    if not addresses or min(addresses) >= high or max(addresses) < low:
        return False
    # Sorting is a call in C, and addresses are nearly in order: at most a fifth of the time of a loop in Python.
    ordered = sorted(addresses)
    place = bisect_left(ordered, low)
    return place < len(ordered) and ordered[place] < high


def _is_slot(tensor: Tensor | None, table: PointerTable, index: int) -> bool:
    """Whether a tensor with the slot's address and shape is the slot."""
    return (tensor is table.views[index] and index not in table.turnable) or (
        tensor is not None
        and table.dtype == table.flat.dtype
        and not tensor.is_neg()
        and _has_strides(tensor, table, index)
    )


def diagnose(tensors: Sequence[Tensor | None], table: PointerTable, *, written: bool = False) -> Entries:
    """Check tensor by tensor. Raise for the first wrong tensor, or return which tensors are unusual.

    Args:
        tensors: one per slot, or None.
        table: the layout.
        written: the tensors are the target. Then an expanded tensor is wrong, too.

    Raises:
        ValueError: A tensor is wrong; the text names its slot.
    """
    if len(tensors) != len(table.slots):
        raise ValueError(
            f"Got {len(tensors)} tensors, expected {len(table.slots)}, one per slot. "
            "Pass None for a tensor that is missing."
        )
    addresses: list[int] = []
    missing: list[int] = []
    own: list[int] = []
    irregular: dict[int, Tensor] = {}
    for index, (tensor, slot) in enumerate(zip(tensors, table.slots, strict=True)):
        if tensor is None:
            missing.append(index)
            addresses.append(0)
            continue
        _check_kind(tensor, slot, table)
        address = tensor.data_ptr()
        addresses.append(address)
        if slot.numel == 0:
            if tensor.dtype == table.flat.dtype:
                own.append(index)  # it has no elements that could lie elsewhere
            continue
        if address == 0:
            raise ValueError(
                f"Slot {slot.name!r} got a tensor without memory (address 0), expected {slot.numel} elements. Its "
                "storage was freed, or it is a meta tensor: pass the tensor that holds the data."
            )
        same_order = not tensor.is_neg() and _same_strides(tensor.stride(), slot)
        if address == table.addresses[index] and same_order and tensor.dtype == table.flat.dtype:
            own.append(index)
            continue
        if _overlaps_flat(tensor, table):
            raise ValueError(
                f"Slot {slot.name!r} got a tensor at address {address:#x} that overlaps the flat buffer, with strides "
                f"{tensor.stride()}, expected the slot itself, at {table.addresses[index]:#x} with strides "
                f"{slot.stride}, or separate memory. Pass the slot's view, or a clone."
            )
        if not same_order:
            if written and any(
                step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
            ):
                raise ValueError(
                    f"Slot {slot.name!r} got an expanded tensor with strides {tensor.stride()}, expected separate "
                    "memory for each element, because the tensor is written. Pass tensor.contiguous()."
                )
            irregular[index] = tensor
    everything = len(own) == len(table.slots)
    return Entries(addresses, tuple(missing), None if everything else tuple(own), irregular)


def _check_kind(tensor: Tensor, slot: Slot, table: PointerTable) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"Slot {slot.name!r} got a {type(tensor).__name__}, expected a tensor or None. Pass tensors.")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"Slot {slot.name!r} got a tensor of layout {tensor.layout}, expected torch.strided. "
            "Convert it with .to_dense(), or leave sparse gradients out of fused buffers."
        )
    if tensor.dtype != table.dtype:
        raise ValueError(
            f"Slot {slot.name!r} got dtype {tensor.dtype}, expected {table.dtype}. "
            f"Convert it with .to({table.dtype}), or plan again after changing the model's dtype, or a parameter's "
            "grad_dtype."
        )
    if tensor.shape != slot.shape:
        raise ValueError(
            f"Slot {slot.name!r} got shape {tuple(tensor.shape)}, expected {tuple(slot.shape)}. "
            "Plan again after changing the model's shapes."
        )
    if tensor.device != table.flat.device:
        raise ValueError(
            f"Slot {slot.name!r} got a tensor on {tensor.device}, expected {table.flat.device}. "
            f"Move it with .to('{table.flat.device}'), or plan again after moving the model."
        )


def _same_strides(stride: tuple[int, ...], slot: Slot) -> bool:
    return all(got == want for got, want, size in zip(stride, slot.stride, slot.shape, strict=True) if size != 1)


def _overlaps_flat(tensor: Tensor, table: PointerTable) -> bool:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    end = start + (last + 1) * tensor.element_size()
    flat_end = table.address + table.flat.numel() * table.flat.element_size()
    return start < flat_end and table.address < end
