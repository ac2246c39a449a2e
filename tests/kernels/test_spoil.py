"""`spoil` and its reference: all of a tensor or nothing, by a flag; and its machine code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import SpoilTable
from dpfuse_kernels.spoil import _spoil_kernel, spoil, spoil_reference
from tests.kernels.compile_kernels import AMD, NVIDIA
from tests.kernels.ptx import narrow_products_in_addresses
from tests.kernels.test_ahead_of_time import compilations, targets

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
Spoil = Callable[..., None]
ALARM = torch.tensor([0.0, 2.0, 1.0, 1.0, 3.0, 0.0])
CALM = torch.tensor([0.0, 2.0, 2.0, 0.0, 3.0, 0.0])
both = pytest.mark.parametrize("fill", [spoil, spoil_reference], ids=["kernel", "reference"])


def guarded(numels: list[int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of ones, and the memory around them, with a guard of sevens at each end."""
    memory = [torch.full((numel + 2,), 7.0, dtype=dtype) for numel in numels]
    return [around[1:-1].fill_(1.0) for around in memory], memory


@both
def test_example_of_the_kernel_docstring(fill: Spoil) -> None:
    (first, second), _ = guarded([3, 2], torch.float32)
    fill(SpoilTable([3, 2], torch.float32, CPU, chunk=2), [first, None], ALARM)
    assert first.isnan().all()
    assert second.eq(1.0).all()
    assert "numels [3, 2], CHUNK 2 give chunks (0, 0, 2), (0, 2, 1), (1, 0, 2)" in (_spoil_kernel.__doc__ or "")
    assert SpoilTable([3, 2], torch.float32, CPU, chunk=2).rows.tolist() == [[0, 0, 2], [0, 2, 1], [1, 0, 2]]


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alarm", [True, False])
def test_everything_or_nothing_is_filled_and_nothing_around_it(fill: Spoil, dtype: torch.dtype, alarm: bool) -> None:
    numels = [1, 8, 0, 130, 64, 5]
    tensors, memory = guarded(numels, dtype)
    fill(SpoilTable(numels, dtype, CPU, chunk=64), list(tensors), ALARM if alarm else CALM)
    for tensor, around in zip(tensors, memory, strict=True):
        assert tensor.isnan().all() if alarm else tensor.eq(1.0).all()
        assert around[[0, -1]].eq(7.0).all()


@both
def test_dense_tensors_of_any_order_and_others(fill: Spoil) -> None:
    memory = torch.ones(4, 6)
    odd = [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), memory[:, ::2], torch.ones(3, 5).t()]
    table = SpoilTable([tensor.numel() for tensor in odd], torch.float32, CPU, chunk=64)
    fill(table, list(odd), ALARM)
    assert all(tensor.isnan().all() for tensor in odd)
    assert memory[:, 1::2].eq(1.0).all(), "between the strides is somebody else's"


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [None, 0, 1, 127, 128, 199])
def test_any_pair_of_two_numbers_alarms(fill: Spoil, dtype: torch.dtype, place: int | None) -> None:
    pairs = torch.zeros(200, 2, dtype=dtype)
    pairs[::2, 0], pairs[1::2, 1] = 2.0, torch.tensor(1e-3, dtype=dtype)
    if place is not None:
        pairs[place] = torch.tensor([1.0, float("nan") if place % 2 else 1.0])
    tensor = torch.ones(5)
    fill(SpoilTable([5], torch.float32, CPU), [tensor], pairs.flatten())
    assert tensor.isnan().all() if place is not None else tensor.eq(1.0).all()


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_few_programs_fill_many_chunks(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    # `dpfuse_kernels.spoil` is the function; the module has the same name.
    monkeypatch.setattr(sys.modules["dpfuse_kernels.spoil"], "PROGRAMS", programs)
    numels = [130, 64, 0, 5]
    tensors, memory = guarded(numels, torch.float32)
    spoil(SpoilTable(numels, torch.float32, CPU, chunk=64), list(tensors), ALARM)
    assert all(tensor.isnan().all() for tensor in tensors)
    assert all(around[[0, -1]].eq(7.0).all() for around in memory)


@pytest.mark.parametrize("wrong", ["dtype", "size", "sparse", "count"])
def test_what_the_kernel_could_not_fill_is_filled_by_torch(wrong: str) -> None:
    usual = torch.ones(4)
    other = {
        "dtype": torch.ones(4, dtype=torch.float64),
        "size": torch.ones(3),
        "sparse": torch.eye(3).to_sparse(1),
        "count": torch.ones(4),
    }[wrong]
    table = SpoilTable([4] if wrong == "count" else [4, 4], torch.float32, CPU)
    spoil(table, [usual, other], ALARM)
    assert usual.isnan().all()
    assert (other.coalesce().values() if other.is_sparse else other).isnan().all()
    assert table.dispatcher.launches == (wrong != "count"), "the usual one is the kernel's all the same"


def test_addresses_are_uploaded_once_and_tensors_not_kept() -> None:
    tensors = [torch.ones(4), None, torch.ones(2)]
    table = SpoilTable([4, 3, 2], torch.float32, CPU)
    for _ in range(3):
        spoil(table, tensors, CALM)
    assert table.ring.uploads == 1
    gone = weakref.ref(tensors[2])
    tensors[2] = None
    assert gone() is None
    tensors[0].data = torch.ones(4)
    spoil(table, tensors, ALARM)
    assert table.ring.uploads == 2
    assert tensors[0].isnan().all()


@pytest.mark.one_in(4)
@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [ALARM, CALM], ids=["alarm", "calm"])
@pytest.mark.parametrize("count", [0, 6, 128, 300])
def test_the_same_launch_copies_numbers(fill: Spoil, dtype: torch.dtype, pairs: Tensor, count: int) -> None:
    (tensor,), _ = guarded([40], torch.float32)
    (to,), around = guarded([count], dtype)
    numbers = torch.cat([pairs.to(dtype), torch.arange(300, dtype=dtype)])[:count]
    table = SpoilTable([40], torch.float32, CPU, chunk=16)
    for factor in (1, 2, 2):
        fill(table, [tensor], pairs.to(dtype), (numbers * factor, to))
        assert torch.equal(to, numbers * factor)
        assert around[0][[0, -1]].eq(7.0).all()
        assert tensor.isnan().all() if pairs is ALARM else tensor.eq(1.0).all()


def test_numbers_are_copied_where_no_tensor_is_to_be_filled() -> None:
    table, to = SpoilTable([4], torch.float32, CPU), torch.zeros(2)
    spoil(table, [None], CALM, (torch.tensor([3.0, 4.0]), to))
    assert to.tolist() == [3.0, 4.0]
    assert table.dispatcher.launches == 0


@both
def test_only_the_spans_of_a_tensor_are_filled(fill: Spoil) -> None:
    (flat, whole), memory = guarded([300, 5], torch.float32)
    spans = [[(3, 130), (136, 64), (299, 1)], [(0, 5)]]
    table = SpoilTable([300, 5], torch.float32, CPU, chunk=64, spans=spans)
    fill(table, [flat, whole], CALM)
    assert not flat.isnan().any()
    fill(table, [flat, whole], ALARM)
    filled = torch.zeros(300, dtype=torch.bool)
    for first, numel in spans[0]:
        filled[first : first + numel] = True
    assert torch.equal(flat.isnan(), filled)
    assert whole.isnan().all()
    assert all(around[[0, -1]].eq(7.0).all() for around in memory)


def test_other_tensors_like_those_before_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SpoilTable([4, 3], torch.float32, CPU)
    spoil(table, [torch.ones(4), torch.ones(3)], CALM)
    monkeypatch.setattr(table, "_is_as_described", lambda *_: pytest.fail("it was checked"))
    others = [torch.ones(4), torch.ones(3)]
    spoil(table, list(others), ALARM)
    assert all(tensor.isnan().all() for tensor in others)


@pytest.mark.parametrize("odd", [torch.ones(4, dtype=torch.float64), torch.ones(8)[::2], torch.ones(5)])
def test_a_tensor_unlike_those_before_is_checked(odd: Tensor) -> None:
    table = SpoilTable([4, 3], torch.float32, CPU)
    spoil(table, [torch.ones(4), torch.ones(3)], CALM)
    last, odd = torch.ones(3), odd.clone() if odd.is_contiguous() else odd
    spoil(table, [odd, last], ALARM)
    assert odd.isnan().all()
    assert last.isnan().all()


def test_new_addresses_in_a_capture_are_filled_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    known, new = [torch.ones(4)], [torch.ones(4)]
    table = SpoilTable([4], torch.float32, CPU)
    spoil(table, list(known), CALM)
    monkeypatch.setattr("dpfuse_kernels.address_ring.HostStreams.capturing", lambda self: True)
    for tensors in (known, new):
        spoil(table, list(tensors), ALARM)
        assert tensors[0].isnan().all()
    assert (table.dispatcher.launches, table.ring.uploads) == (2, 1)


@targets(*NVIDIA, *AMD)
def test_the_machine_code_spills_nothing_and_addresses_are_of_64_bits(architecture: int | str) -> None:
    rows = compilations("spoil", architecture)
    assert len(rows) == 4
    for row in rows:
        assert row["spilled"] == 0, {**row, "assembly": ""}
        if architecture in NVIDIA:
            assert not narrow_products_in_addresses(str(row["assembly"]))
