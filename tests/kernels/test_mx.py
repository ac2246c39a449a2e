"""The bytes of eight-bit blocks: torch's operations against a search over all scales and all numbers of the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfuse_kernels import MxTable, Slot, mx
from dpfuse_kernels.mx import SUPER_BYTES, mx_bytes, mx_decode, mx_encode, mx_format
from dpfuse_kernels.quantize import quantize_reference
from dpfuse_kernels.sum_quantized import sum_quantized_reference
from tests.kernels.layouts import same_bits

INF, NAN = float("inf"), float("nan")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST = {E4M3: 2.0**-6, E5M2: 2.0**-14}  # normal number
MANTISSA = {E4M3: 3, E5M2: 2}
BELOW = {E4M3: 1.875, E5M2: 1.75}  # the last number before 2

every_format = pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def block_lists() -> dict[str, Tensor]:
    """Name -> [blocks, 32] float32, of every size and kind."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ladder = torch.tensor([(-1.0) ** i * 2.0 ** (i - 16) for i in range(32)])
    # Around the places where the scale changes: 1.8125 and 1.875 times a power of two.
    edges = torch.tensor([1.75, 1.8125, 1.875, 1.9375, 2.0])
    edges = torch.stack([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(9.0))]).view(-1, 1)
    strange = randn(8, 32)
    strange[0, 3], strange[1, 31], strange[2, 0], strange[3] = INF, -INF, NAN, NAN
    strange[4, ::2], strange[5, 1:] = INF, NAN
    return {
        "random": randn(64, 32),
        "of all sizes": randn(64, 32) * torch.exp2(torch.randint(-149, 128, (64, 1), generator=generator).float()),
        "of all sizes in one": randn(32, 32)
        * torch.exp2(torch.randint(-40, 40, (32, 32), generator=generator).float()),
        "ladder": torch.stack([ladder * 2.0**k for k in range(-120, 112, 8)]),
        "largest": torch.full((2, 32), torch.finfo(torch.float32).max) * torch.tensor([[1.0], [-1.0]]),
        "edges": torch.cat([edges * 2.0**k * torch.linspace(-1, 1, 32) for k in (-140, -127, -118, -111, 0, 100, 126)]),
        "subnormal": randn(16, 32) * 2.0**-130,
        "smallest": torch.full((1, 32), 2.0**-149),
        "zeros": torch.stack([torch.zeros(32), torch.full((32,), -0.0)]),
        "ties": (torch.arange(-256, 256).view(-1, 32) + 0.5) / 64,
        "not finite": strange,
    }


def numbers(format: torch.dtype) -> np.ndarray:
    """All finite magnitudes of a format by code, and the one that would come next."""
    count = 0x7F if format == E4M3 else 0x7C
    code = np.arange(count + 1)
    bits, bias = MANTISSA[format], 7 if format == E4M3 else 15
    exponent, mantissa = code >> bits, (code & ((1 << bits) - 1)) / (1 << bits)
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The index of the grid's number that is nearest, an even one where two are; by comparison with all."""
    above = np.searchsorted(grid, values).clip(1, len(grid) - 1)
    low, high = values - grid[above - 1], grid[above] - values
    return np.where((low < high) | ((low == high) & ((above - 1) % 2 == 0)), above - 1, above)


def search(block: np.ndarray, format: torch.dtype) -> tuple[np.ndarray, int]:
    """Element and scale bytes of one block, by the definition: the first scale with which nothing overflows."""
    grid = numbers(format)
    finite = np.isfinite(block)
    # Nothing may be rounded up to 2 ** 128, which is no float32.
    magnitude = np.abs(np.where(finite, block, 0)).astype(np.float64).clip(max=BELOW[format] * 2.0**127)
    for scale in range(255):
        scaled = magnitude / 2.0 ** (scale - 127)
        if scaled.max() < 2 * grid[-1]:
            code = nearest(scaled, grid)
            if code.max() < len(grid) - 1:
                return np.where(finite, code | np.where(np.signbit(block), 0x80, 0), 0x7F), scale
    raise AssertionError("even the largest scale overflows")


def encoded(blocks: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Element bytes [blocks, 32] and scale bytes [blocks] of the reference, which takes whole super-blocks."""
    values = torch.zeros(-(-len(blocks) // 16) * 16, 32)
    values[: len(blocks)] = blocks
    packed = mx_encode(values.view(-1), format, torch.full((mx_bytes(values.numel()),), 99, dtype=torch.uint8))
    rows = packed.view(-1, SUPER_BYTES)
    return rows[:, :512].reshape(-1, 32)[: len(blocks)], rows[:, 512:].reshape(-1)[: len(blocks)]


def decoded(blocks: Tensor, format: torch.dtype) -> Tensor:
    values = torch.zeros(-(-len(blocks) // 16) * 16, 32)
    values[: len(blocks)] = blocks
    packed = mx_encode(values.view(-1), format, torch.empty(mx_bytes(values.numel()), dtype=torch.uint8))
    return mx_decode(packed, format).view(-1, 32)[: len(blocks)]


@every_format
@pytest.mark.parametrize("name", block_lists())
def test_every_block_is_what_a_search_finds(format: torch.dtype, name: str) -> None:
    blocks = block_lists()[name]
    elements, scales = encoded(blocks, format)
    for block, codes, scale in zip(blocks.numpy(), elements, scales.tolist(), strict=True):
        wanted, wanted_scale = search(block, format)
        assert scale == wanted_scale
        assert codes.tolist() == wanted.tolist()


@every_format
@pytest.mark.parametrize("name", block_lists())
def test_every_element_is_near_what_it_was(format: torch.dtype, name: str) -> None:
    blocks = block_lists()[name]
    got = decoded(blocks, format)
    finite = blocks.isfinite()
    assert torch.equal(got.isfinite(), finite), "nothing overflows, and what is not finite says so"
    assert got[~finite].isnan().all()
    assert torch.equal(got.signbit()[finite], blocks.signbit()[finite])
    _, scales = encoded(blocks, format)
    unit = torch.exp2(scales.double() - 127).unsqueeze(1).expand_as(blocks)[finite]
    exact, error = blocks.double()[finite], (got.double() - blocks.double())[finite].abs()
    normal = exact.abs() >= SMALLEST[format] * unit
    relative = 2.0 ** -(MANTISSA[format] + 1)
    assert (error[normal] <= relative * exact.abs()[normal]).all()
    # Below the normal numbers there is one step for all of them.
    assert (error[~normal] <= relative * SMALLEST[format] * unit[~normal]).all()


@every_format
def test_the_scale_is_no_larger_than_it_must_be(format: torch.dtype) -> None:
    """Else half of the numbers would lie idle: the largest element of a block is in the upper half of the format."""
    blocks = torch.randn(1000, 32, generator=torch.Generator().manual_seed(1))
    elements, _ = encoded(blocks, format)
    largest = elements.contiguous().view(format).float().abs().amax(1)
    assert largest.min() > LARGEST[format] / 2
    assert largest.max() == LARGEST[format]


@every_format
def test_every_byte_and_every_scale_is_read_as_torch_reads_it(format: torch.dtype) -> None:
    packed = torch.empty(128, SUPER_BYTES, dtype=torch.uint8)
    packed[:, :512] = torch.arange(256, dtype=torch.uint8).repeat(2)
    packed[:, 512:] = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(128, 16)
    got = mx_decode(packed.view(-1), format).view(-1, 32)
    for row in range(0, len(got), 8):
        scale = torch.tensor([row // 8], dtype=torch.uint8).view(torch.float8_e8m0fnu).double()
        block = got[row : row + 8].reshape(-1)
        exact = torch.arange(256, dtype=torch.uint8).view(format).double() * scale
        torch.testing.assert_close(block, exact.float(), rtol=0, atol=0, equal_nan=True)


@every_format
def test_what_was_decoded_encodes_to_the_same(format: torch.dtype) -> None:
    blocks = torch.cat([blocks for name, blocks in block_lists().items() if name != "not finite"])
    once = decoded(blocks, format)
    assert same_bits(decoded(once, format), once)


@every_format
def test_a_buffer_of_several_chunks_is_that_of_one(format: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    count, generator = 7 * 512, torch.Generator().manual_seed(0)
    values = torch.randn(2, count, generator=generator)
    values[0, 3 * 512 + 5], values[0, 4 * 512] = NAN, INF
    seen = []
    for chunk in (count, 2 * 512):  # one, and four with an incomplete last one
        monkeypatch.setattr(mx, "CHUNK", chunk)
        parts = torch.stack([mx_encode(row, format, torch.empty(mx_bytes(count), dtype=torch.uint8)) for row in values])
        total, lost = torch.empty_like(parts[0]), torch.ones(count)
        sum_quantized_reference(parts, total, format, lost)
        table = MxTable(parts[0].clone(), [Slot("a", 0, (count,), (1,))], torch.float32, format)
        kept = torch.ones(count)
        quantize_reference([values[1]], table, residual=kept)
        seen.append([parts, mx_decode(total, format), lost, table.flat, kept])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*seen, strict=True))


def test_sizes_and_formats() -> None:
    assert [mx_bytes(n) for n in (0, 1, 512, 513, 1 << 20)] == [0, 528, 528, 1056, 2048 * 528]
    with pytest.raises(ValueError, match=r"format is torch\.float16, expected one of torch\.float8_e4m3fn, "):
        mx_format(torch.float16)
