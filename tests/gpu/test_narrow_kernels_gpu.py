"""Error feedback, accumulation and eight-bit blocks on real hardware: the same bits as on the CPU."""

from __future__ import annotations

import pytest
import torch

from dpfuse_kernels import dequantize, flatten, quantize, sum_parts, sum_quantized
from dpfuse_kernels.dequantize import dequantize_reference
from dpfuse_kernels.flatten import flatten_reference
from dpfuse_kernels.mx import mx_bytes, mx_decode, mx_encode
from dpfuse_kernels.quantize import quantize_reference
from dpfuse_kernels.sum_parts import sum_parts_reference
from dpfuse_kernels.sum_quantized import sum_quantized_reference
from tests.gpu.test_kernels_gpu import NUMELS, randoms
from tests.kernels.layouts import PAIRS, guarded, same_bits
from tests.kernels.test_mx import E4M3, block_lists, every_format
from tests.kernels.test_quantize import outside_is_untouched, places, table_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_flatten_with_all_of_its_options(dtype: torch.dtype, wire: torch.dtype, accumulate: bool) -> None:
    tensors = randoms(dtype)
    results = []
    for pack, device in ((flatten, "cuda"), (flatten_reference, "cpu")):
        given: list[torch.Tensor | None] = [tensor.to(device) for tensor in tensors]
        buffer = guarded([tensor.to(device) for tensor in tensors], dtype, wire, gap=3)
        for view in buffer.table.views:
            view.copy_(torch.linspace(-2, 2, view.numel()).view(view.shape))
        given[2] = None
        numel = buffer.table.flat.numel()
        residual = None if wire == torch.float64 else (torch.linspace(-1, 1, numel) / 100).to(device)
        factor, counts = torch.tensor(0.7, device=device), torch.zeros(len(given), dtype=torch.int32, device=device)
        pack(
            given,
            buffer.table,
            scale=1 / 3,
            counts=counts,
            factor=factor,
            residual=residual,
            accumulate=accumulate,
        )
        assert buffer.untouched_outside_slots()
        left = torch.zeros(0) if residual is None else residual.cpu()
        results.append([*(view.cpu() for view in buffer.table.views), left, counts.cpu().float()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_rounding_takes_from_a_sum_is_that_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in NUMELS:
        parts = torch.randn(3, numel, generator=generator).to(dtype)
        old = torch.randn(numel, generator=generator)
        wanted, out = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device="cuda")
        wanted_left, left = old.clone(), old.cuda()
        sum_parts_reference(parts, wanted, wanted_left)
        sum_parts(parts.cuda(), out, left)
        assert same_bits(out.cpu(), wanted)
        assert same_bits(left.cpu(), wanted_left)


@every_format
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_become_the_bytes_that_they_are_on_the_cpu(
    dtype: torch.dtype, scale: float, format: torch.dtype
) -> None:
    tensors = randoms(dtype)
    results = []
    for pack, unpack, device in ((quantize, dequantize, "cuda"), (quantize_reference, dequantize_reference, "cpu")):
        given: list[torch.Tensor | None] = [tensor.to(device) for tensor in tensors]
        table, memory = table_of([tensor.to(device) for tensor in tensors], dtype, format, gap=1, spare=1)
        given[2] = None
        residual = (torch.linspace(-1, 1, table.elements) / 10).to(device)
        factor, counts = torch.tensor(0.7, device=device), torch.zeros(len(given), dtype=torch.int32, device=device)
        pack(given, table, scale=scale, factor=factor, residual=residual, counts=counts)
        assert outside_is_untouched(table, memory)
        back = [torch.empty_like(tensor, device=device) for tensor in tensors]
        unpack(table, back, scale=scale)
        results.append([memory.cpu(), residual.cpu(), counts.cpu(), *(tensor.cpu() for tensor in back)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@every_format
@pytest.mark.parametrize("name", block_lists())
def test_blocks_of_all_kinds_are_what_they_are_on_the_cpu(name: str, format: torch.dtype) -> None:
    """The ends of float32 too: nothing here flushes a subnormal number to zero."""
    values = block_lists()[name].reshape(-1)
    table, _ = table_of([values.cuda()], torch.float32, format)
    wanted, _ = table_of([values], torch.float32, format)
    quantize([values.cuda()], table)
    quantize_reference([values], wanted)
    assert torch.equal(table.flat.cpu(), wanted.flat)
    back = torch.empty_like(values, device="cuda")
    dequantize(table, [back])
    exact = mx_decode(wanted.flat, format)[: values.numel()]
    torch.testing.assert_close(back.cpu(), exact, rtol=0, atol=0, equal_nan=True)
    # And torch's own operations on the GPU, which the tests elsewhere hold for right.
    padded = torch.zeros(table.elements, device="cuda")
    padded[: values.numel()] = values.cuda()
    again = mx_encode(padded, format, torch.empty_like(table.flat))
    inside = places(wanted, wanted.slots[0])
    assert torch.equal(again.cpu()[inside], wanted.flat[inside])


@every_format
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_rows_add_up_to_the_bytes_that_they_do_on_the_cpu(rows: int, format: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    for super_blocks in (1, 7, 8, 2000):
        elements = super_blocks * 512
        parts = torch.stack(
            [
                mx_encode(
                    torch.randn(elements, generator=generator).exp(),
                    format,
                    torch.empty(mx_bytes(elements), dtype=torch.uint8),
                )
                for _ in range(rows)
            ]
        )
        old = torch.randn(elements, generator=generator)
        wanted, out = torch.empty_like(parts[0]), torch.empty_like(parts[0], device="cuda")
        wanted_left, left = old.clone(), old.cuda()
        sum_quantized_reference(parts, wanted, format, wanted_left)
        sum_quantized(parts.cuda(), out, format, left)
        assert torch.equal(out.cpu(), wanted)
        assert same_bits(left.cpu(), wanted_left)


def test_a_captured_graph_reads_factor_and_residual_anew_at_each_replay() -> None:
    tensors = randoms(torch.float32, (5000, 7))
    table, _ = table_of(tensors, torch.float32, E4M3)
    wanted, _ = table_of([tensor.cpu() for tensor in tensors], torch.float32, E4M3)
    residual, left = torch.zeros(table.elements, device="cuda"), torch.zeros(table.elements)
    factor = torch.tensor(1.0, device="cuda")
    quantize(tensors, table, factor=factor, residual=residual)
    residual.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize(tensors, table, factor=factor, residual=residual)
    for step in range(10):
        factor.fill_(1 / (step + 1))
        graph.replay()
        quantize_reference([tensor.cpu() for tensor in tensors], wanted, factor=factor.cpu(), residual=left)
        assert torch.equal(table.flat.cpu(), wanted.flat)
        assert torch.equal(residual.cpu(), left)
