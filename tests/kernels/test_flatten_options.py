"""`flatten` with a factor, a residual and into what is there: kernel and reference against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dpfuse_kernels
from dpfuse_kernels import PointerTable
from dpfuse_kernels.flatten import _flatten_kernel, flatten, flatten_reference
from tests.kernels.layouts import (
    BACKENDS,
    DTYPES,
    GUARD,
    PAIRS,
    Backend,
    Guarded,
    assert_equal,
    guarded,
    same_bits,
    slot_of,
)
from tests.kernels.test_flatten import randoms

both = pytest.mark.parametrize("backend", BACKENDS, ids=repr)
INF, NAN = float("inf"), float("nan")


def residual_of(buffer: Guarded, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random errors of the size that a float16 leaves, inside poisoned memory; and that memory."""
    numel = buffer.table.flat.numel()
    memory = torch.full((numel + 2 * GUARD,), NAN)
    residual = memory[GUARD : GUARD + numel]
    for slot in buffer.table.slots:
        generator = torch.Generator().manual_seed(seed + slot.offset)
        residual[slot.offset : slot.offset + slot.numel] = torch.randn(slot.numel, generator=generator) * 1e-3
    return residual, memory


def inside(buffer: Guarded, values: Tensor) -> Tensor:
    return torch.cat([values[slot.offset : slot.offset + slot.numel] for slot in buffer.table.slots])


def outside_is_poison(buffer: Guarded, memory: Tensor) -> bool:
    """Is a residual's memory untouched wherever no slot lies?"""
    outside = torch.ones(memory.numel(), dtype=torch.bool)
    for slot in buffer.table.slots:
        outside[GUARD + slot.offset : GUARD + slot.offset + slot.numel] = False
    return bool(memory[outside].isnan().all())


@both
def test_examples_of_the_kernel_docstring(backend: Backend) -> None:
    tensors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
    slots = [slot_of("a", 0, tensors[0]), slot_of("b", 4, tensors[1])]
    table = PointerTable(torch.full((6,), 9.0), slots, torch.float32)
    backend.flatten(tensors, table, scale=0.5, factor=torch.tensor(4.0), accumulate=True)
    assert table.flat.tolist() == [11, 13, 15, 9, 17, 19]
    tensors[0][1] = 2048
    table = PointerTable(torch.full((6,), 9.0, dtype=torch.float16), slots, torch.float32)
    residual = torch.full((6,), 0.25)
    backend.flatten(tensors, table, residual=residual)
    assert table.flat.tolist() == [1.25, 2048, 3.25, 9, 4.25, 5.25]
    assert residual.tolist() == [0, 0.25, 0, 0.25, 0, 0]
    text = _flatten_kernel.__doc__ or ""
    assert "[11, 13, 15, 9, 17, 19]" in text
    assert "residual is [0, 0.25, 0, 0.25, 0, 0]" in text


@pytest.mark.one_in(4)
@both
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_pair_against_the_definition(
    backend: Backend, dtype: torch.dtype, wire: torch.dtype, accumulate: bool
) -> None:
    tensors: list[Tensor | None] = [*randoms(dtype)]
    buffer = guarded(randoms(dtype), dtype, wire, gap=3)
    table = buffer.table
    for view in table.views:
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(view.numel())))
    before = [view.clone() for view in table.views]
    kept = wire != torch.float64
    residual, memory = residual_of(buffer)
    old = residual.clone()
    tensors[3] = None
    scale, factor = 1 / 3, torch.tensor(0.7)
    backend.flatten(
        tensors, table, scale=scale, factor=factor, residual=residual if kept else None, accumulate=accumulate
    )
    compute = table.compute_dtype
    for tensor, slot, view, was in zip(tensors, table.slots, table.views, before, strict=True):
        value = torch.zeros(slot.numel, dtype=compute)
        if tensor is not None:
            value = tensor.to(compute) * torch.tensor(scale * float(factor), dtype=torch.float64).to(compute)
        if accumulate:
            value = was.to(compute) + value
        place = slice(slot.offset, slot.offset + slot.numel)
        if kept:
            value = value + old[place]
        truncated = int(backend.truncates_bf16 and wire == torch.bfloat16)
        assert_equal(view, value.to(torch.promote_types(wire, torch.float32)).to(wire), truncated=truncated)
        if kept:
            # Whatever the rounding was: what the slot holds and what it lacks are the value.
            assert same_bits(residual[place] + 0.0, (value - view.to(compute)).float() + 0.0)
    assert buffer.untouched_outside_slots()
    assert outside_is_poison(buffer, memory)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_none_leaves_what_it_is_added_to(backend: Backend, dtype: torch.dtype) -> None:
    likes = randoms(dtype, (5, 4096, 33000, 3))
    buffer = guarded(likes, dtype, dtype)
    for view, like in zip(buffer.table.views, likes, strict=True):
        view.copy_(like)
    buffer.table.views[0][1] = -0.0
    was = [view.clone() for view in buffer.table.views]
    backend.flatten([None, likes[1], None, None], buffer.table, scale=INF, accumulate=True)
    for index in (0, 2, 3):
        assert same_bits(buffer.table.views[index], was[index])
    assert not buffer.table.views[1].isfinite().any()
    assert buffer.untouched_outside_slots()


@both
def test_none_packs_the_residual_whatever_the_factor(backend: Backend) -> None:
    likes = randoms(torch.float32, (5, 4096, 7))
    buffer = guarded(likes, torch.float32, torch.float16)
    residual, _ = residual_of(buffer)
    old = residual.clone()
    factor = torch.tensor(INF)
    backend.flatten([None, likes[1], None], buffer.table, factor=factor, residual=residual)
    for slot, view in list(zip(buffer.table.slots, buffer.table.views, strict=True))[::2]:
        place = slice(slot.offset, slot.offset + slot.numel)
        assert same_bits(view, old[place].half())
        assert torch.equal(residual[place], old[place] - old[place].half())
    # And what is not finite leaves no error behind.
    assert not buffer.table.views[1].isfinite().any()
    assert inside(buffer, residual)[5:-7].eq(0).all()


@both
def test_what_overflows_or_is_not_finite_leaves_no_error(backend: Backend) -> None:
    tensors = [torch.tensor([70000.0, -INF, NAN, 1.0, 65504.0])]
    buffer = guarded(tensors, torch.float32, torch.float16)
    residual = torch.full_like(buffer.table.flat, 0.25, dtype=torch.float32)
    counts = torch.zeros(1, dtype=torch.int32)
    backend.flatten(tensors, buffer.table, residual=residual, counts=counts)
    assert buffer.table.views[0].tolist()[:2] == [INF, -INF]
    assert residual[:5].tolist() == [0, 0, 0, 0, 0.25]
    assert counts.tolist() == [3]


@both
def test_counts_are_of_what_the_slots_hold_afterwards(backend: Backend) -> None:
    tensors = [torch.ones(9), torch.ones(4), torch.tensor([INF, 1.0])]
    table = guarded(tensors, torch.float32, torch.float32).table
    for view in table.views:
        view.zero_()
    table.views[0][3:5] = INF
    table.views[1][1] = NAN
    counts = torch.zeros(3, dtype=torch.int32)
    backend.flatten([None, tensors[1], tensors[2]], table, accumulate=True, counts=counts)
    assert counts.tolist() == [2, 1, 1]


@both
@pytest.mark.parametrize("given", ["residual", "accumulate", "factor"])
def test_slots_in_place_are_read_before_they_are_written(backend: Backend, given: str) -> None:
    values = randoms(torch.float32, (5, 4096, 40000, 9))
    buffer = guarded(values, torch.float32, torch.float32)
    for view, value in zip(buffer.table.views, values, strict=True):
        view.copy_(value)
    options: dict[str, object] = {
        "residual": {"residual": torch.full_like(buffer.table.flat, 0.5)},
        "accumulate": {"accumulate": True},
        "factor": {"factor": torch.tensor(3.0)},
    }[given]
    backend.flatten(buffer.table.views, buffer.table, scale=0.25, **options)
    for view, value in zip(buffer.table.views, values, strict=True):
        exact = {"residual": value * 0.25 + 0.5, "accumulate": value + value * 0.25, "factor": value * 0.75}[given]
        assert same_bits(view, exact)
    assert buffer.untouched_outside_slots()


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_nothing_is_lost_over_many_steps(backend: Backend, wire: torch.dtype) -> None:
    """What was packed in fifty steps and what is left is what was given: error feedback's identity."""
    like = torch.zeros(700)
    buffer = guarded([like], torch.float32, wire)
    residual = torch.zeros(buffer.table.flat.numel())
    generator = torch.Generator().manual_seed(1)
    given, packed = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for _ in range(50):
        tensor = torch.randn(700, generator=generator)
        backend.flatten([tensor], buffer.table, residual=residual)
        given += tensor
        packed += buffer.table.views[0]
    lost = (given - packed).abs().max()
    assert lost > 1e-4
    assert (given - packed - residual[:700]).abs().max() < 50 * 2.0**-22


@both
def test_unusual_strides_go_by_logical_index(backend: Backend) -> None:
    tensors = [torch.randn(6, 5).t(), torch.randn(9)]
    buffer = guarded([torch.empty(5, 6), torch.empty(9)], torch.float32, torch.float32)
    for view in buffer.table.views:
        view.fill_(1.0)
    backend.flatten(tensors, buffer.table, scale=0.5, accumulate=True)
    assert torch.equal(buffer.table.views[0], tensors[0] * 0.5 + 1)


def test_everything_in_one_launch() -> None:
    tensors = randoms(torch.float32)
    table = guarded(tensors, torch.float32, torch.float16).table
    counts = torch.zeros(len(tensors), dtype=torch.int32)
    residual = torch.zeros(table.flat.numel())
    flatten(tensors, table, scale=0.5, counts=counts, factor=torch.tensor(2.0), residual=residual, accumulate=True)
    assert table.launcher.dispatcher.launches == 1


WRONG = {
    "factor of two": ({"factor": torch.ones(2)}, r"factor is torch\.float32 of shape \(2,\) on cpu, .*shape \(\)"),
    "factor in double": ({"factor": torch.ones((), dtype=torch.float64)}, r"factor is torch\.float64 .*torch\.tensor"),
    "factor elsewhere": ({"factor": torch.ones((), device="meta")}, r"on meta, expected .* on cpu"),
    "short residual": ({"residual": torch.zeros(7)}, r"residual is .* of shape \(7,\) .*shape \(8,\).*torch\.zeros"),
    "residual in half": ({"residual": torch.zeros(8).half()}, r"residual is torch\.float16"),
    "residual elsewhere": ({"residual": torch.zeros(8, device="meta")}, r"on meta, expected .* on cpu"),
    "residual with gaps": ({"residual": torch.zeros(16)[::2]}, r"expected contiguous"),
}


@pytest.mark.parametrize("pack", [flatten, flatten_reference, dpfuse_kernels.flatten])
@pytest.mark.parametrize("case", WRONG)
def test_options_that_do_not_fit_are_named(pack: object, case: str) -> None:
    options, text = WRONG[case]
    table = guarded([torch.ones(8)], torch.float32, torch.float32).table
    with pytest.raises(ValueError, match=text):
        pack([torch.ones(8)], table, **options)
    assert table.flat.isnan().all()


def test_a_residual_of_float64_is_refused() -> None:
    table = guarded([torch.ones(8)], torch.float32, torch.float64).table
    for pack, triton in ((flatten, True), (flatten, False), (flatten_reference, False)):
        table.triton = triton
        with pytest.raises(ValueError, match=r"for a buffer of torch\.float64.*Leave residual out"):
            pack([torch.ones(8)], table, residual=torch.zeros(8))


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.usefixtures("usual_choice")
def test_the_public_name_takes_all_of_it(matched: bool) -> None:
    tensors = randoms(torch.float32, (5, 4096))
    got, want = (guarded(tensors, torch.float32, torch.float32).table for _ in range(2))
    for options in ({"factor": torch.tensor(0.3)}, {"accumulate": True}, {"residual": torch.ones(got.flat.numel())}):
        dpfuse_kernels.flatten(tensors, got, scale=0.5, matched=matched, **options)
        if "residual" in options:
            options = {"residual": torch.ones(got.flat.numel())}
        flatten_reference(tensors, want, scale=0.5, **options)
        assert all(same_bits(one, other) for one, other in zip(got.views, want.views, strict=True))
