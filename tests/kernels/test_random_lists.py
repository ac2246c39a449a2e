"""Random lists of tensors: both backends give what the definition gives, whatever is mixed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dpfuse_kernels
from tests.kernels.layouts import DTYPES, REFERENCE, TRITON, Backend, assert_equal, expected, guarded, same_bits

SHAPES = [(), (1,), (16,), (3,), (4, 4), (2, 1, 3), (0,), (5, 0), (1, 7), (4097,), (64, 65), (33000,)]
KINDS = ["private", "none", "own", "own, another object", "transposed", "shifted"]
EACH = [pytest.param(TRITON, marks=pytest.mark.slow), REFERENCE]  # Triton's interpreter takes seconds


def made(kind: str, value: Tensor, view: Tensor) -> Tensor | None:
    """A tensor that holds `value`, in one of the ways in which a gradient may lie in memory."""
    if kind == "none":
        return None
    if kind.startswith("own") and view.dtype == value.dtype:
        view.copy_(value)
        return view if kind == "own" else view.view(view.shape)
    if kind == "transposed":
        return value.t().contiguous().t() if value.dim() == 2 else value.clone()
    if kind == "shifted":
        memory = torch.empty(value.numel() + 1, dtype=value.dtype)
        return memory[1:].view(value.shape).copy_(value)
    return value.clone()


@pytest.mark.parametrize("backend", EACH, ids=repr)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    items=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(KINDS)), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    wire=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 3.0]),
    align=st.sampled_from([1, 4, 8]),
    shift=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_any_list(
    backend: Backend,
    items: list[tuple[tuple[int, ...], str]],
    dtype: torch.dtype,
    wire: torch.dtype,
    scale: float,
    align: int,
    shift: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, _ in items]
    buffer = guarded(values, dtype, wire, align=align, shift=shift)
    views = buffer.table.views
    tensors = [made(kind, value, view) for (_, kind), value, view in zip(items, values, views, strict=True)]
    truncates = backend.truncates_bf16

    backend.flatten(tensors, buffer.table, scale=scale)
    for tensor, value, view in zip(tensors, values, views, strict=True):
        wanted = torch.zeros_like(view) if tensor is None else expected(value, scale, wire)
        assert_equal(view, wanted, truncated=int(truncates and wire == torch.bfloat16))
    assert buffer.untouched_outside_slots()

    held = [view.clone() for view in views]
    targets = [None if tensor is None else torch.ones_like(tensor) for tensor in tensors]
    backend.unflatten(buffer.table, targets, scale=scale)
    for target, value in zip(targets, held, strict=True):
        if target is not None:
            wanted = expected(value, scale, dtype)
            if truncates and dtype == torch.bfloat16:
                torch.testing.assert_close(target, wanted, rtol=2.0**-6, atol=2.0**-5)
            else:
                assert_equal(target, wanted)
    assert buffer.untouched_outside_slots()


@pytest.mark.parametrize("backend", [*EACH, "matched"], ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    items=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(KINDS)), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    align=st.sampled_from([1, 4, 8]),
    shift=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_any_bits_of_any_list_come_back(
    backend: Backend | str,
    items: list[tuple[tuple[int, ...], str]],
    dtype: torch.dtype,
    align: int,
    shift: int,
    seed: int,
) -> None:
    """Whatever they mean: NaN of every payload, infinities, subnormal numbers, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = []
    for shape, _ in items:
        words = torch.randint(256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        values.append(words.view(dtype).squeeze(-1))
    buffer = guarded(values, dtype, dtype, align=align, shift=shift)
    views = buffer.table.views
    tensors = [made(kind, value, view) for (_, kind), value, view in zip(items, values, views, strict=True)]
    targets = [torch.zeros_like(value) for value in values]
    if isinstance(backend, str):  # what gradients of a backward take, where nothing about them is unusual
        buffer.table.triton = False
        dpfuse_kernels.flatten(tensors, buffer.table, matched=True)
        dpfuse_kernels.unflatten(buffer.table, targets, matched=True)
    else:
        backend.flatten(tensors, buffer.table)
        backend.unflatten(buffer.table, targets)
    for tensor, value, target in zip(tensors, values, targets, strict=True):
        assert same_bits(target, torch.zeros_like(value) if tensor is None else value)
    assert buffer.untouched_outside_slots()
