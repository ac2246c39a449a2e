"""The kernels on real hardware: exact rounding, large sizes, zero uploads, CUDA graphs, streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dpfuse_kernels import PointerTable, Slot, SpoilTable, adamw_step, flatten, sum_parts, unflatten
from dpfuse_kernels.adamw import GRADS, NARROW
from dpfuse_kernels.flatten import flatten_reference
from dpfuse_kernels.spoil import spoil
from dpfuse_kernels.sum_parts import sum_parts_reference
from dpfuse_kernels.unflatten import unflatten_reference
from tests.kernels.layouts import DTYPES, PAIRS, adamw_step_reference, expected, guarded, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMELS = (1, 7, 4096, 8195, 1_000_003, 16, 0)


def randoms(dtype: torch.dtype, numels: tuple[int, ...] = NUMELS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).cuda() for n in numels]


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_dtype_pair_is_exact(dtype: torch.dtype, wire: torch.dtype, scale: float) -> None:
    tensors = randoms(dtype)
    buffer = guarded(tensors, dtype, wire, gap=3)
    flatten(tensors, buffer.table, scale=scale)
    for tensor, view in zip(tensors, buffer.table.views, strict=True):
        # On the CPU, so that the answer does not come from the same hardware.
        assert same_bits(view.cpu(), expected(tensor.cpu(), scale, wire))
    assert buffer.untouched_outside_slots()
    targets = [torch.ones_like(tensor) for tensor in tensors]
    unflatten(buffer.table, targets, scale=scale)
    for target, view in zip(targets, buffer.table.views, strict=True):
        assert same_bits(target.cpu(), expected(view.cpu(), scale, dtype))


def test_none_own_strided_and_misaligned_mix_and_agree_with_the_reference() -> None:
    values = [torch.randn(64, 96), torch.randn(50), torch.randn(5000), torch.randn(2, 3, 8, 8), torch.randn(4096)]
    values = [value.cuda() for value in values]
    values[3] = values[3].to(memory_format=torch.channels_last)
    left, right = (guarded(values, torch.float32, torch.float32, gap=1) for _ in range(2))
    for buffer, pack in ((left, flatten), (right, flatten_reference)):
        own = buffer.table.views[2].copy_(values[2])
        shifted = torch.empty(4097, device="cuda")[1:].copy_(values[4])
        tensors = [values[0].t().contiguous().t(), None, own, values[3], shifted]
        pack(tensors, buffer.table, scale=0.3)
        assert buffer.untouched_outside_slots()
    assert all(same_bits(a, b) for a, b in zip(left.table.views, right.table.views, strict=True))
    results = []
    for unpack in (unflatten, unflatten_reference):
        targets = [torch.ones(96, 64, device="cuda").t(), *map(torch.ones_like, values[1:])]
        unpack(left.table, targets, scale=0.7)
        results.append(targets)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_there_and_back_keeps_every_bit() -> None:
    words = torch.tensor([0x7FC01234, -(2**31), 1, 0x7F800000, 0x00400000, 0x3F800001], dtype=torch.int32)
    tensors = [words.view(torch.float32).repeat(count).cuda() for count in (1, 3000)]
    table = guarded(tensors, torch.float32, torch.float32).table
    flatten(tensors, table)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    unflatten(table, copies)
    assert all(same_bits(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_the_last_element_beyond_31_bits_is_right() -> None:
    numel = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    tensor = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    tensor[-1], tensor[2**31 - 1], tensor[0] = 3.0, 5.0, 7.0
    flat = torch.full((numel + 3,), -1.0, dtype=torch.bfloat16, device="cuda")
    table = PointerTable(flat, [Slot("huge", 0, (numel,), (1,))], torch.bfloat16)
    flatten([tensor], table, scale=0.5)
    assert [flat[0].item(), flat[2**31 - 1].item(), flat[numel - 1].item()] == [3.5, 2.5, 1.5]
    assert flat[numel:].eq(-1.0).all()
    unflatten(table, [tensor], scale=2.0)
    assert [tensor[0].item(), tensor[2**31 - 1].item(), tensor[-1].item()] == [7.0, 5.0, 3.0]


def test_steady_state_uploads_nothing_and_launches_once() -> None:
    gradients = randoms(torch.float32)
    table = guarded(gradients, torch.float32, torch.float32).table
    for _ in range(20):
        flatten(gradients, table, scale=0.5)
        unflatten(table, gradients)
    assert table.launcher.ring.uploads == 1
    assert table.launcher.dispatcher.launches == 40


def test_fifty_changing_lists_behind_a_busy_stream() -> None:
    table = guarded(randoms(torch.float32, (8,)), torch.float32, torch.float32).table
    gradients = [torch.full((8,), float(step), device="cuda") for step in range(50)]
    results = torch.zeros(50, device="cuda")
    torch.cuda._sleep(1_000_000_000)
    for step, gradient in enumerate(gradients):
        flatten([gradient], table)
        results[step].copy_(table.flat[0])
    assert results.tolist() == [float(step) for step in range(50)]


def test_side_streams_see_the_addresses_they_were_given() -> None:
    table = guarded(randoms(torch.float32, (4096,)), torch.float32, torch.float32).table
    streams = [torch.cuda.Stream() for _ in range(3)]
    gradients = [torch.full((4096,), float(step), device="cuda") for step in range(30)]
    torch.cuda.synchronize()
    last = torch.cuda.Event()
    last.record()
    results = torch.zeros(30, device="cuda")
    for step, gradient in enumerate(gradients):
        with torch.cuda.stream(streams[step % 3]):
            torch.cuda.current_stream().wait_event(last)
            torch.cuda._sleep(1_000_000)
            flatten([gradient], table)
            results[step].copy_(table.flat[-1])
            last = torch.cuda.current_stream().record_event()
    torch.cuda.synchronize()
    assert results.tolist() == [float(step) for step in range(30)]


def test_a_captured_graph_replays_bitwise_and_keeps_its_addresses() -> None:
    gradients = randoms(torch.float32, (5000, 7))
    table = guarded(gradients, torch.float32, torch.float32).table
    flatten(gradients, table, scale=1 / 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flatten(gradients, table, scale=1 / 3)
    for _ in range(20):  # other lists come and go; the graph's stays
        flatten([gradient.clone() for gradient in gradients], table)
    for seed in range(100):
        generator = torch.Generator("cuda").manual_seed(seed)
        for gradient in gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator, device="cuda"))
        table.flat.zero_()
        graph.replay()
        for gradient, view in zip(gradients, table.views, strict=True):
            assert same_bits(view, gradient * (1 / 3))


def test_capture_refuses_moved_tensors() -> None:
    gradients = randoms(torch.float32, (50, 7))
    moved = [gradient.clone() for gradient in gradients]
    table = guarded(gradients, torch.float32, torch.float32).table
    flatten(gradients, table)
    with (
        pytest.raises(ValueError, match=r"2 of 2 tensors are not where .*Keep gradients as bucket views"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        moved[0].add_(1.0)  # an empty graph would warn
        flatten(moved, table)


def test_a_tensor_on_the_cpu_is_named() -> None:
    table = guarded(randoms(torch.float32, (5,)), torch.float32, torch.float32).table
    with pytest.raises(ValueError, match=r"'p0' got a tensor on cpu, expected cuda:0\. Move it"):
        flatten([torch.zeros(5)], table)
    with pytest.raises(ValueError, match=r"'p0' got a tensor on cpu, expected cuda:0\. Move it"):
        unflatten_reference(table, [torch.zeros(5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_parts_are_added_up_as_on_the_cpu(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    for numel in NUMELS:
        parts = torch.randn(rows, numel, generator=generator, dtype=torch.float64).to(dtype)
        wanted, out = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device="cuda")
        sum_parts_reference(parts, wanted)
        sum_parts(parts.cuda(), out)
        assert same_bits(out.cpu(), wanted)


@pytest.mark.parametrize("options", [{}, {"decoupled": False, "maximize": True, "betas": (0.4, 0.9)}])
@pytest.mark.parametrize("narrow", [None, *NARROW])
@pytest.mark.parametrize("wire", GRADS)
def test_a_step_of_adamw_has_the_bits_of_the_cpu(
    wire: torch.dtype, narrow: torch.dtype | None, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(5)
    for numel in NUMELS:
        for shift in (0, 1):
            value, exp_avg, exp_avg_sq = torch.randn(3, numel + shift, generator=generator)
            exp_avg_sq.square_()
            grad = torch.randn(numel + shift, generator=generator).to(wire)
            param = value if narrow is None else torch.zeros(numel + shift, dtype=narrow)
            there = [tensor.cuda() for tensor in (grad, param, exp_avg, exp_avg_sq, value)]
            results = []
            for update, tensors in (
                (adamw_step_reference, [grad, param, exp_avg, exp_avg_sq, value]),
                (adamw_step, there),
            ):
                parts = [tensor[shift:] for tensor in tensors]
                factor = torch.tensor(0.7, device=grad.device if update is adamw_step_reference else "cuda")
                master = None if narrow is None else parts[4]
                for step in (1, 2):
                    update(*parts[:4], step=step, master=master, factor=factor, **options)
                results.append([tensor.cpu() for tensor in (tensors if narrow is not None else tensors[:4])])
            assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


def test_a_captured_step_of_adamw_replays_with_the_factor_of_that_moment() -> None:
    grad, param, exp_avg, exp_avg_sq = torch.ones(4, 5000, device="cuda")
    factor = torch.ones((), device="cuda")
    adamw_step(grad, param, exp_avg, exp_avg_sq, step=2, factor=factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw_step(grad, param, exp_avg, exp_avg_sq, step=2, factor=factor)
    for number in (0.5, 2.0):
        wanted = [tensor.cpu() for tensor in (param, exp_avg, exp_avg_sq)]
        adamw_step_reference(grad.cpu(), *wanted, step=2, factor=torch.tensor(number))
        factor.fill_(number)
        graph.replay()
        for got, want in zip((param, exp_avg, exp_avg_sq), wanted, strict=True):
            assert same_bits(got.cpu(), want)


def test_the_kernel_that_fills_with_nan_writes_numbers_to_pinned_memory() -> None:
    gradient = torch.ones(100_000, device="cuda")
    table = SpoilTable([gradient.numel()], torch.float32, torch.device("cuda", torch.cuda.current_device()))
    pinned = torch.zeros(300, pin_memory=True)
    numbers = torch.zeros(300, device="cuda")
    for step in range(1, 5):  # from the second one on, the launch is made again
        numbers[2:] = step
        spoil(table, [gradient], numbers[:2], (numbers, pinned))
        event = torch.cuda.current_stream().record_event()
        event.synchronize()
        assert pinned.tolist() == [0.0, 0.0, *[float(step)] * 298]
    assert table.dispatcher.launches == 4
    assert gradient.eq(1.0).all()
