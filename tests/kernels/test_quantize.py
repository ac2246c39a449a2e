"""`quantize`, `sum_quantized` and `dequantize`: kernels and references against `mx_encode`, one tensor at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import dpfuse_kernels
from dpfuse_kernels import MxTable, Slot
from dpfuse_kernels.dequantize import _dequantize_kernel, dequantize, dequantize_reference
from dpfuse_kernels.mx import SUPER_BYTES, mx_bytes, mx_decode, mx_encode
from dpfuse_kernels.quantize import _quantize_kernel, quantize, quantize_reference
from dpfuse_kernels.sum_quantized import _sum_quantized_kernel, sum_quantized, sum_quantized_reference
from tests.kernels.layouts import assert_equal, same_bits
from tests.kernels.test_flatten import randoms
from tests.kernels.test_mx import E4M3, E5M2, INF, MANTISSA, NAN, block_lists, every_format

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 64  # bytes around a buffer that nobody may touch
FILL = 0x55

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass(frozen=True)
class Ways:
    """One implementation of all three."""

    name: str
    quantize: Callable[..., None]
    sum_quantized: Callable[..., None]
    dequantize: Callable[..., None]

    def __repr__(self) -> str:
        return self.name


TRITON = Ways("triton", quantize, sum_quantized, dequantize)
REFERENCE = Ways("reference", quantize_reference, sum_quantized_reference, dequantize_reference)
both = pytest.mark.parametrize("ways", [TRITON, REFERENCE], ids=repr)

NUMELS = (1, 32, 31, 4096, 0, 1000, 8195, 33, 32769)


def table_of(
    likes: list[Tensor], dtype: torch.dtype, format: torch.dtype, *, gap: int = 0, spare: int = 0
) -> tuple[MxTable, Tensor]:
    """A table for tensors like these, `gap` blocks apart, in guarded memory full of FILL; and that memory."""
    slots, end = [], 0
    for index, like in enumerate(likes):
        slots.append(Slot(f"p{index}", end, tuple(like.shape), tuple(like.stride())))
        end += (-(-like.numel() // 32) + gap) * 32
    size = mx_bytes(end) + spare * SUPER_BYTES
    device = likes[0].device if likes else torch.device("cpu")
    memory = torch.full((size + 2 * GUARD,), FILL, dtype=torch.uint8, device=device)
    return MxTable(memory[GUARD : GUARD + size], slots, dtype, format), memory


def places(table: MxTable, slot: Slot) -> Tensor:
    """Per block of a slot the indices of its 33 bytes in the buffer: [blocks, 33]."""
    block = torch.arange(slot.offset // 32, -(-(slot.offset + slot.numel) // 32)).unsqueeze(1)
    elements = block // 16 * SUPER_BYTES + block % 16 * 32 + torch.arange(32)
    return torch.cat((elements, block // 16 * SUPER_BYTES + 512 + block % 16), 1)


def wanted_bytes(values: Tensor, format: torch.dtype) -> Tensor:
    """The bytes of one tensor alone, [blocks, 33]."""
    padded = torch.zeros(-(-values.numel() // 512) * 512)
    padded[: values.numel()] = values
    packed = mx_encode(padded, format, torch.empty(mx_bytes(values.numel()), dtype=torch.uint8))
    slot = Slot("alone", 0, tuple(values.shape), tuple(values.stride()))
    return packed[places(MxTable(packed, [slot], torch.float32, format), slot)]


def outside_is_untouched(table: MxTable, memory: Tensor) -> bool:
    outside = torch.ones(memory.numel(), dtype=torch.bool)
    for slot in table.slots:
        outside[GUARD + places(table, slot)] = False
    return bool(memory.cpu()[outside].eq(FILL).all())


@both
def test_examples_of_the_kernel_docstrings(ways: Ways) -> None:
    tensors = [torch.tensor([896.0, -0.5, 1.0])]
    table = MxTable(torch.zeros(528, dtype=torch.uint8), [Slot("a", 32, (3,), (1,))], torch.float32, E4M3)
    ways.quantize(tensors, table)
    assert table.flat[32:64].tolist() == [126, 168, 48] + 29 * [0]
    assert table.flat[513] == 128
    assert "bytes 32 to 34 of flat are 126, 168, 48" in (_quantize_kernel.__doc__ or "")
    ways.dequantize(table, tensors, scale=0.5)
    assert tensors[0].tolist() == [448.0, -0.25, 0.5]
    assert "[448, -0.25, 0.5]" in (_dequantize_kernel.__doc__ or "")
    residual = torch.full((512,), 30.0)
    ways.quantize([torch.tensor([896.0, 0, 0])], table, residual=residual)
    assert mx_decode(table.flat, E4M3)[32:36].tolist() == [896, 30, 30, 0]
    assert residual[31:36].tolist() == [30, 30, 0, 0, 30]
    assert "residual is [30, 0, 0]" in (_quantize_kernel.__doc__ or "")

    parts = torch.zeros(3, 528, dtype=torch.uint8)
    for row, number in zip(parts, (1.0, 2.25, 240.0), strict=True):
        mx_encode(torch.full((512,), number), E4M3, row)
    out, residual = torch.empty(528, dtype=torch.uint8), torch.full((512,), 0.5)
    ways.sum_quantized(parts, out, E4M3, residual)
    assert mx_decode(out, E4M3).eq(240).all()
    assert residual.eq(3.75).all()
    assert "RESIDUAL full of 0.5 becomes 3.75" in (_sum_quantized_kernel.__doc__ or "")


@pytest.mark.one_in(3)
@both
@every_format
@pytest.mark.parametrize("name", block_lists())
def test_blocks_of_all_kinds_are_torch_s_own_casts(ways: Ways, format: torch.dtype, name: str) -> None:
    """`test_mx` holds `mx_encode`, which casts with torch, against a search."""
    values = block_lists()[name].reshape(-1)
    table, memory = table_of([values], torch.float32, format)
    counts = torch.zeros(1, dtype=torch.int32)
    ways.quantize([values], table, counts=counts)
    assert torch.equal(table.flat[places(table, table.slots[0])], wanted_bytes(values, format))
    assert counts.item() == values.isfinite().logical_not().sum()
    assert outside_is_untouched(table, memory)
    got = torch.full_like(values, 7.0)
    ways.dequantize(table, [got])
    torch.testing.assert_close(got, mx_decode(table.flat, format)[: values.numel()], rtol=0, atol=0, equal_nan=True)


@pytest.mark.one_in(2)
@both
@every_format
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 / 3])
@every_dtype
def test_every_dtype_is_scaled_in_float32_and_encoded_once(
    ways: Ways, dtype: torch.dtype, scale: float, format: torch.dtype
) -> None:
    tensors = randoms(dtype, NUMELS)
    table, memory = table_of(tensors, dtype, format, gap=3, spare=1)
    ways.quantize(tensors, table, scale=scale)
    for tensor, slot in zip(tensors, table.slots, strict=True):
        assert torch.equal(table.flat[places(table, slot)], wanted_bytes(tensor.float() * scale, format))
    assert outside_is_untouched(table, memory)
    got = [torch.full_like(tensor, 7.0) for tensor in tensors]
    before = memory.clone()
    ways.dequantize(table, got, scale=scale)
    numbers = mx_decode(table.flat, format)
    for tensor, slot in zip(got, table.slots, strict=True):
        exact = (numbers[slot.offset : slot.offset + slot.numel] * scale).to(dtype)
        assert_equal(tensor, exact, truncated=int(ways is TRITON and dtype == torch.bfloat16 and scale != 1))
    assert torch.equal(memory, before)


@pytest.mark.one_in(2)
@both
@every_format
def test_factor_residual_none_and_counts(ways: Ways, format: torch.dtype) -> None:
    tensors: list[Tensor | None] = [*randoms(torch.float32, NUMELS)]
    table, memory = table_of(randoms(torch.float32, NUMELS), torch.float32, format, gap=1)
    tensors[3] = None
    tensors[5] = torch.full((1000,), INF)
    residual = torch.full((table.elements,), NAN)
    for slot in table.slots:
        place = slice(slot.offset, slot.offset + slot.numel)
        residual[place] = torch.randn(slot.numel, generator=torch.Generator().manual_seed(slot.offset)) / 100
    old = residual.clone()
    counts = torch.ones(len(tensors), dtype=torch.int32)
    factor = torch.tensor(0.7)
    ways.quantize(tensors, table, scale=1 / 3, factor=factor, residual=residual, counts=counts)
    numbers = mx_decode(table.flat, format)
    inside = torch.zeros(table.elements, dtype=torch.bool)
    for tensor, slot in zip(tensors, table.slots, strict=True):
        place = slice(slot.offset, slot.offset + slot.numel)
        inside[place] = True
        value = old[place] + (0.0 if tensor is None else tensor * (1 / 3 * float(factor)))
        assert torch.equal(table.flat[places(table, slot)], wanted_bytes(value, format))
        assert same_bits(residual[place] + 0.0, (value - numbers[place]).nan_to_num(0, 0, 0) + 0.0)
    assert residual[~inside].isnan().all()
    assert counts.tolist() == [1001 if index == 5 else 1 for index in range(len(tensors))]
    assert outside_is_untouched(table, memory)


@both
def test_none_packs_zeros_whatever_the_factor_and_is_skipped_on_the_way_back(ways: Ways) -> None:
    likes = randoms(torch.float32, (40, 33, 5))
    table, _ = table_of(likes, torch.float32, E4M3)
    ways.quantize([None, likes[1], None], table, scale=INF, factor=torch.tensor(NAN))
    numbers = mx_decode(table.flat, E4M3)
    assert numbers[:40].eq(0).all()
    assert numbers[64:97].isnan().all()
    assert numbers[97:128].eq(0).all(), "what lies between a tensor's end and its last block's is zero, too"
    got = [None, torch.zeros(33), torch.ones(5)]
    ways.dequantize(table, got)
    assert got[1].isnan().all()
    assert got[2].eq(0).all()


@pytest.mark.one_in(2)
@both
@every_format
def test_nothing_is_lost_over_many_steps(ways: Ways, format: torch.dtype) -> None:
    """What was sent in fifty steps and what is left is what was given: error feedback's identity."""
    table, _ = table_of([torch.empty(700)], torch.float32, format)
    residual = torch.zeros(table.elements)
    generator = torch.Generator().manual_seed(1)
    given, sent = torch.zeros(2, 700, dtype=torch.float64)
    for _ in range(50):
        tensor = torch.randn(700, generator=generator)
        ways.quantize([tensor], table, residual=residual)
        given += tensor
        sent += mx_decode(table.flat, format)[:700]
    assert (given - sent).abs().max() > 2.0 ** -(MANTISSA[format] + 3)
    assert (given - sent - residual[:700]).abs().max() < 50 * 2.0**-22
    assert residual[:700].abs().max() < 8 * 2.0 ** -(MANTISSA[format] + 1), "what is left does not grow"


@pytest.mark.one_in(2)
@both
@every_format
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_added_in_order_and_encoded_once(ways: Ways, format: torch.dtype, rows: int) -> None:
    blocks = torch.cat(list(block_lists().values()))
    blocks = torch.cat([blocks, torch.zeros(-len(blocks) % 16, 32)]).view(-1)
    generator = torch.Generator().manual_seed(rows)
    values = torch.stack([blocks * torch.randn(blocks.shape, generator=generator).exp() for _ in range(rows)])
    size = mx_bytes(blocks.numel())
    parts = torch.stack([mx_encode(row, format, torch.empty(size, dtype=torch.uint8)) for row in values])
    memory = torch.full((size + 2 * GUARD,), FILL, dtype=torch.uint8)
    out = memory[GUARD : GUARD + size]
    old = torch.randn(blocks.numel(), generator=generator)
    residual = old.clone()
    before = parts.clone()
    ways.sum_quantized(parts, out, format, residual)
    total = mx_decode(parts[0], format)
    for row in parts[1:]:
        total = total + mx_decode(row, format)
    assert torch.equal(out, mx_encode(total, format, torch.empty_like(out)))
    assert same_bits(residual, old + (total - mx_decode(out, format)).nan_to_num(0, 0, 0))
    assert torch.equal(parts, before)
    assert memory[:GUARD].eq(FILL).all()
    assert memory[GUARD + size :].eq(FILL).all()
    again = torch.empty_like(out)
    ways.sum_quantized(parts, again, format)
    assert torch.equal(out, again)


@both
@every_format
def test_a_sum_does_not_depend_on_how_the_buffer_is_split(ways: Ways, format: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = torch.stack(
        [
            mx_encode(torch.randn(20 * 512, generator=generator), format, torch.empty(20 * 528, dtype=torch.uint8))
            for _ in range(3)
        ]
    )
    whole = torch.empty(20 * 528, dtype=torch.uint8)
    ways.sum_quantized(parts, whole, format)
    for first, last in ((0, 1), (1, 12), (12, 20)):
        place = slice(first * 528, last * 528)
        piece = torch.empty_like(whole[place])
        ways.sum_quantized(parts[:, place].contiguous(), piece, format)
        assert torch.equal(piece, whole[place])


@both
def test_unusual_strides_and_misaligned_tensors(ways: Ways) -> None:
    tensors = [torch.randn(6, 5).t(), torch.randn(4097)[1:], torch.randn(8, 4)[::2]]
    table, _ = table_of([torch.empty(5, 6), torch.empty(4096), torch.empty(4, 4)], torch.float32, E5M2)
    ways.quantize(tensors, table)
    numbers = mx_decode(table.flat, E5M2)
    got = [torch.zeros(6, 5).t(), torch.zeros(4097)[1:], torch.zeros(8, 4)[::2]]
    ways.dequantize(table, got)
    for tensor, slot, back in zip(tensors, table.slots, got, strict=True):
        exact = numbers[slot.offset : slot.offset + slot.numel].view(tensor.shape)
        assert torch.equal(back, exact)
        assert (exact - tensor).abs().max() < 0.125 * tensor.abs().max()


def test_one_launch_each() -> None:
    tensors = randoms(torch.float32, NUMELS)
    table, _ = table_of(tensors, torch.float32, E4M3)
    quantize(tensors, table, factor=torch.tensor(0.5), residual=torch.zeros(table.elements))
    dequantize(table, tensors)
    assert table.launcher.dispatcher.launches == 2


@pytest.mark.parametrize("pack", [quantize, quantize_reference, dpfuse_kernels.quantize])
def test_wrong_arguments_are_named(pack: Callable[..., None]) -> None:
    table, memory = table_of([torch.empty(8)], torch.float32, E4M3)
    cases: list[tuple[Tensor, dict[str, Tensor], str]] = [
        (torch.ones(7), {}, r"Slot 'p0' got shape \(7,\), expected \(8,\)"),
        (torch.ones(8).half(), {}, r"Slot 'p0' got dtype torch\.float16, expected torch\.float32"),
        (torch.ones(8), {"factor": torch.ones(1)}, r"factor is torch\.float32 of shape \(1,\)"),
        (torch.ones(8), {"residual": torch.ones(8)}, r"residual is .* of shape \(8,\) .* shape \(512,\)"),
        (torch.ones(8), {"residual": torch.ones(513)[1:]}, r"residual lies at address .* a multiple of 16"),
    ]
    for tensor, options, text in cases:
        with pytest.raises(ValueError, match=text):
            pack([tensor], table, **options)
    assert memory.eq(FILL).all()


def test_a_tensor_inside_the_buffer_is_refused() -> None:
    table, memory = table_of([torch.empty(8)], torch.float32, E4M3)
    for offset in (0, 64):
        with pytest.raises(ValueError, match="overlaps the flat buffer"):
            quantize([table.flat[offset : offset + 32].view(torch.float32)], table)
        with pytest.raises(ValueError, match="overlaps the flat buffer"):
            dequantize(table, [table.flat[offset : offset + 32].view(torch.float32)])
    assert memory.eq(FILL).all()


def test_wrong_tables_are_named() -> None:
    flat = torch.zeros(1057, dtype=torch.uint8)
    slots = [Slot("a", 0, (40,), (1,))]
    for buffer in (flat, flat[1:], flat[:1056].view(2, 528).t(), flat[:528].view(torch.int8)):
        with pytest.raises(
            ValueError, match=r"flat is .* whole super-blocks of 528 bytes at a multiple of 16\. Allocate"
        ):
            MxTable(buffer, slots, torch.float32, E4M3)
    flat = flat[:528]
    with pytest.raises(ValueError, match=r"flat has shape \(1, 528\), expected \[bytes\]"):
        MxTable(flat.view(1, -1), slots, torch.float32, E4M3)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64, expected one of torch\.float32"):
        MxTable(flat, slots, torch.float64, E4M3)
    with pytest.raises(ValueError, match=r"format is torch\.float16, expected one of torch\.float8_e4m3fn"):
        MxTable(flat, slots, torch.float32, torch.float16)
    with pytest.raises(ValueError, match=r"Slot 'b' starts at element 48, expected a multiple of 32"):
        MxTable(flat, [*slots, Slot("b", 48, (1,), (1,))], torch.float32, E4M3)
    with pytest.raises(ValueError, match=r"Slot 'b' covers elements 512 to 513, expected them inside the 512"):
        MxTable(flat, [*slots, Slot("b", 512, (1,), (1,))], torch.float32, E4M3)


@pytest.mark.parametrize("add_up", [sum_quantized, sum_quantized_reference])
def test_wrong_parts_are_named(add_up: Callable[..., None]) -> None:
    parts, out = torch.zeros(2, 528, dtype=torch.uint8), torch.zeros(528, dtype=torch.uint8)
    for wrong, text in (
        ((parts.int(), out, E4M3), r"parts is torch\.int32"),
        ((parts[0], out, E4M3), r"parts has shape \(528,\)"),
        ((parts[:0], out, E4M3), "at least one row"),
        ((parts, torch.zeros(1056, dtype=torch.uint8), E4M3), r"out \(1056,\)"),
        ((parts, out, torch.float16), r"format is torch\.float16"),
        ((parts, out, E4M3, torch.zeros(528)), r"residual is .* of shape \(528,\) .*\(512,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            add_up(*wrong)


def test_the_public_names_choose_by_device_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    names = ["quantize", "dequantize", "sum_quantized"]
    for name in names:
        module = sys.modules[f"dpfuse_kernels.{name}"]  # the package has the function under this name
        monkeypatch.setattr(module, f"{name}_reference", lambda *_, name=name, **__: called.append(name))
    for way, expected in (("reference", names), ("triton", [])):
        monkeypatch.setenv("DPFUSE_KERNELS", way)
        table, _ = table_of([torch.empty(8)], torch.float32, E4M3)
        dpfuse_kernels.quantize([torch.zeros(8)], table)
        dpfuse_kernels.dequantize(table, [torch.zeros(8)])
        dpfuse_kernels.sum_quantized(table.flat.view(1, -1), table.flat, E4M3)
        assert called == expected
        called.clear()


@pytest.mark.parametrize("matched", [False, True])
def test_the_matched_path_packs_the_same(matched: bool) -> None:
    tensors = randoms(torch.float32, (40, 1000, 33000))
    got, _ = table_of(tensors, torch.float32, E4M3)
    want, _ = table_of(tensors, torch.float32, E4M3)
    got.triton = False
    for _ in range(2):
        dpfuse_kernels.quantize(tensors, got, scale=0.3, matched=matched)
        quantize(tensors, want, scale=0.3)
        assert torch.equal(got.flat, want.flat)
        back = [torch.empty_like(tensor) for tensor in tensors]
        dpfuse_kernels.dequantize(got, back, matched=matched)
        numbers = mx_decode(got.flat, E4M3)
        assert all(torch.equal(b, numbers[s.offset : s.offset + s.numel]) for b, s in zip(back, got.slots, strict=True))


def test_the_first_slots_alone() -> None:
    tensors = randoms(torch.float32, (600, 40))
    table, _ = table_of(tensors, torch.float32, E4M3)
    first = table.first(1)
    assert (first.elements, first.flat.data_ptr(), len(first.slots)) == (1024, table.flat.data_ptr(), 1)
