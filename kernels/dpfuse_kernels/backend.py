"""Chooses the implementation of each function: the Triton kernel on CUDA tensors, torch's own operations elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpfuse_kernels.adamw import adamw_step as adamw_step_triton
from dpfuse_kernels.adamw import adamw_step_reference
from dpfuse_kernels.bit_hash import BitHashTable, bit_hash_reference
from dpfuse_kernels.bit_hash import bit_hash as bit_hash_triton
from dpfuse_kernels.dequantize import dequantize as dequantize_triton
from dpfuse_kernels.dequantize import dequantize_reference
from dpfuse_kernels.flatten import check_options, count_nonfinite, flatten_reference, product
from dpfuse_kernels.flatten import flatten as flatten_triton
from dpfuse_kernels.multiply import multiply as multiply_triton
from dpfuse_kernels.multiply import multiply_reference
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.pointer_table import PointerTable
from dpfuse_kernels.quantize import quantize as quantize_triton
from dpfuse_kernels.quantize import quantize_reference
from dpfuse_kernels.spoil import SpoilTable, spoil_reference
from dpfuse_kernels.spoil import spoil as spoil_triton
from dpfuse_kernels.squared_norm import squared_norm as squared_norm_triton
from dpfuse_kernels.squared_norm import squared_norm_reference
from dpfuse_kernels.sum_parts import sum_parts as sum_parts_triton
from dpfuse_kernels.sum_parts import sum_parts_reference
from dpfuse_kernels.sum_quantized import sum_quantized as sum_quantized_triton
from dpfuse_kernels.sum_quantized import sum_quantized_reference
from dpfuse_kernels.unflatten import unflatten as unflatten_triton
from dpfuse_kernels.unflatten import unflatten_reference

__all__ = [
    "adamw_step",
    "bit_hash",
    "dequantize",
    "flatten",
    "multiply",
    "quantize",
    "spoil",
    "squared_norm",
    "sum_parts",
    "sum_quantized",
    "unflatten",
    "uses_triton",
]

VARIABLE = "DPFUSE_KERNELS"


def uses_triton(table: PointerTable) -> bool:
    """Whether the functions of this file launch Triton kernels for this table.

    Tables on CUDA use Triton, others use torch's own operations. The environment variable DPFUSE_KERNELS (`triton`
    or `reference`) overrides that. On CPU tensors Triton needs TRITON_INTERPRET=1.

    Raises:
        ValueError: DPFUSE_KERNELS has another value.
    """
    if table.triton is None:
        table.triton = _choose(table.flat.device)
    return table.triton


def _choose(device: torch.device) -> bool:
    choice = os.environ.get(VARIABLE, "")
    if not choice:
        return device.type == "cuda"
    if choice not in ("triton", "reference"):
        raise ValueError(f"{VARIABLE} is {choice!r}, expected 'triton' or 'reference'. Correct it, or unset it.")
    return choice == "triton"


def flatten(
    tensors: Sequence[Tensor | None],
    table: PointerTable,
    *,
    scale: float = 1.0,
    counts: Tensor | None = None,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
    accumulate: bool = False,
    matched: bool = False,
) -> None:
    """Pack `tensors` into their slots of `table.flat`: copy, scale and cast in one pass; count if `counts` is given.

    Arguments, result and errors are those of `dpfuse_kernels.flatten.flatten`. With `matched=True` the caller promises
    a list of tensors that have the shapes and the device of their slots, as autograd guarantees for gradients. The CPU
    path then checks only dtypes, at about 0.05 us per tensor. Before a kernel, all checks are made.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, flatten
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> flatten([torch.tensor([1.0, 2.0, 3.0])], table, scale=0.5)
        >>> table.flat
        tensor([0.5000, 1.0000, 1.5000, 0.0000])
    """
    # The choice is read here, because a call for each bucket costs more than the check.
    if table.triton or (table.triton is None and uses_triton(table)):
        flatten_triton(
            tensors, table, scale=scale, counts=counts, factor=factor, residual=residual, accumulate=accumulate
        )
        return
    if factor is not None or residual is not None or accumulate:
        check_options(table, factor, residual)
        scale, factor = product(scale, factor), None
        matched = matched and residual is None and not accumulate
    if not (matched and table.host_plan.pack_matched(tensors, table, scale)):  # type: ignore[arg-type]
        flatten_reference(tensors, table, scale=scale, counts=counts, residual=residual, accumulate=accumulate)
    elif counts is not None:
        count_nonfinite(table, counts)


def unflatten(
    table: PointerTable,
    tensors: Sequence[Tensor | None],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    matched: bool = False,
) -> None:
    """Copy the slots of `table.flat` to `tensors`, or add them: copy, scale and cast in one pass.

    Arguments, result and errors are those of `dpfuse_kernels.unflatten.unflatten`. `matched` is that of `flatten`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, unflatten
        >>> table = PointerTable(torch.tensor([1.0, 2.0, 3.0]), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> gradient = torch.full((3,), 10.0)
        >>> unflatten(table, [gradient], scale=0.5, accumulate=True)
        >>> gradient
        tensor([10.5000, 11.0000, 11.5000])
    """
    if uses_triton(table):
        unflatten_triton(table, tensors, scale=scale, accumulate=accumulate)
        return
    plain = matched and scale == 1.0 and not accumulate and table.dtype == table.flat.dtype
    if not (plain and table.host_plan.unpack_matched(tensors, table)):  # type: ignore[arg-type]
        unflatten_reference(table, tensors, scale=scale, accumulate=accumulate)


def quantize(
    tensors: Sequence[Tensor | None],
    table: MxTable,
    *,
    scale: float = 1.0,
    factor: Tensor | None = None,
    counts: Tensor | None = None,
    residual: Tensor | None = None,
    matched: bool = False,
) -> None:
    """Pack `tensors` into eight-bit blocks: scale, encode, count and keep the error in one pass.

    Arguments, result and errors are those of `dpfuse_kernels.quantize.quantize`. `matched` is that of `flatten`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import MxTable, Slot, mx_bytes, quantize
        >>> flat = torch.zeros(mx_bytes(3), dtype=torch.uint8)
        >>> table = MxTable(flat, [Slot("a", 0, (3,), (1,))], torch.float32, torch.float8_e4m3fn)
        >>> quantize([torch.tensor([896.0, -0.5, 1.0])], table)
        >>> flat[:4].tolist(), flat[512].item()  # 448, -0.25, 0.5 and 0; times 2 ** (128 - 127)
        ([126, 168, 48, 0], 128)
    """
    if uses_triton(table):
        quantize_triton(tensors, table, scale=scale, factor=factor, counts=counts, residual=residual)
    else:
        quantize_reference(
            tensors, table, scale=scale, factor=factor, counts=counts, residual=residual, matched=matched
        )


def dequantize(table: MxTable, tensors: Sequence[Tensor | None], *, scale: float = 1.0, matched: bool = False) -> None:
    """Unpack eight-bit blocks into `tensors`: decode, scale and cast in one pass.

    Arguments, result and errors are those of `dpfuse_kernels.dequantize.dequantize`. `matched` is that of `flatten`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import MxTable, Slot, dequantize, mx_bytes
        >>> flat = torch.zeros(mx_bytes(3), dtype=torch.uint8)
        >>> flat[:3], flat[512] = torch.tensor([126, 168, 48]), 128
        >>> table = MxTable(flat, [Slot("a", 0, (3,), (1,))], torch.float32, torch.float8_e4m3fn)
        >>> tensor = torch.empty(3)
        >>> dequantize(table, [tensor], scale=0.5)
        >>> tensor.tolist()
        [448.0, -0.25, 0.5]
    """
    if uses_triton(table):
        dequantize_triton(table, tensors, scale=scale)
    else:
        dequantize_reference(table, tensors, scale=scale, matched=matched)


def sum_quantized(parts: Tensor, out: Tensor, format: torch.dtype, residual: Tensor | None = None) -> None:
    """Decode the rows of `parts`, add them up in their order in float32, and encode the sum once.

    Arguments, result and errors are those of `dpfuse_kernels.sum_quantized.sum_quantized`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import mx_bytes, mx_decode, mx_encode, sum_quantized
        >>> parts = torch.zeros(2, mx_bytes(512), dtype=torch.uint8)
        >>> for row, number in zip(parts, (1.0, 2.5)):
        ...     _ = mx_encode(torch.full((512,), number), torch.float8_e4m3fn, row)
        >>> out = torch.empty_like(parts[0])
        >>> sum_quantized(parts, out, torch.float8_e4m3fn)
        >>> mx_decode(out, torch.float8_e4m3fn)[:3]
        tensor([3.5000, 3.5000, 3.5000])
    """
    (sum_quantized_triton if _choose(out.device) else sum_quantized_reference)(parts, out, format, residual)


def squared_norm(tensors: Sequence[Tensor | None], table: PointerTable) -> Tensor:
    """Return the sum of the squares of all `tensors`, a scalar in float64 on their device.

    Arguments, result and errors are those of `dpfuse_kernels.squared_norm.squared_norm`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, squared_norm
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> squared_norm([torch.tensor([1.0, 2.0, 3.0])], table)
        tensor(14.0000, dtype=torch.float64)
    """
    return (squared_norm_triton if uses_triton(table) else squared_norm_reference)(tensors, table)


def multiply(tensors: Sequence[Tensor | None], table: PointerTable, factor: Tensor) -> None:
    """Multiply `tensors` in place by a scalar on their device, which the host does not read.

    Arguments and errors are those of `dpfuse_kernels.multiply.multiply`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import PointerTable, Slot, multiply
        >>> table = PointerTable(torch.zeros(4), [Slot("a", 0, (3,), (1,))], torch.float32)
        >>> gradient = torch.tensor([1.0, 2.0, 3.0])
        >>> multiply([gradient], table, torch.tensor(0.5))
        >>> gradient
        tensor([0.5000, 1.0000, 1.5000])
    """
    (multiply_triton if uses_triton(table) else multiply_reference)(tensors, table, factor)


def bit_hash(table: BitHashTable, group: int, tensors: Mapping[int, Tensor], seed: int, pairs: Tensor) -> None:
    """Hash the bits of pieces of `tensors`, and write each bit b of the hash as a pair (b, 1 - b).

    Arguments and result are those of `dpfuse_kernels.bit_hash.bit_hash`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import BitHashTable, Piece, bit_hash
        >>> table = BitHashTable([8], [[Piece(0, 0, 8)]], torch.device("cpu"))
        >>> one, other = torch.zeros(32, 2), torch.zeros(32, 2)
        >>> bit_hash(table, 0, {0: torch.tensor([1.0, 2.0])}, 1, one)
        >>> bit_hash(table, 0, {0: torch.tensor([1.0, 2.1])}, 1, other)
        >>> torch.equal(one, other)
        False
    """
    (bit_hash_triton if _choose(table.device) else bit_hash_reference)(table, group, tensors, seed, pairs)


def spoil(
    table: SpoilTable, tensors: Sequence[Tensor | None], pairs: Tensor, copy: tuple[Tensor, Tensor] | None = None
) -> None:
    """Fill `tensors` with NaN if both numbers of one of the `pairs`, on their device, differ from zero.

    Arguments and result are those of `dpfuse_kernels.spoil.spoil`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import SpoilTable, spoil
        >>> gradient = torch.ones(2)
        >>> spoil(SpoilTable([2], torch.float32, torch.device("cpu")), [gradient], torch.tensor([1.0, 1.0]))
        >>> gradient
        tensor([nan, nan])
    """
    if table.triton is None:
        table.triton = _choose(table.device)
    if table.triton:
        spoil_triton(table, tensors, pairs, copy)
    else:
        spoil_reference(table, tensors, pairs, copy)


def sum_parts(parts: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Add up the rows of `parts` in their order, in float32 (float64 for float64), and round once.

    Arguments, result and errors are those of `dpfuse_kernels.sum_parts.sum_parts`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import sum_parts
        >>> out = torch.empty(2, dtype=torch.bfloat16)
        >>> sum_parts(torch.tensor([[1.0, 2], [256, 4], [1, 6]], dtype=torch.bfloat16), out)
        >>> out
        tensor([258.,  12.], dtype=torch.bfloat16)
    """
    (sum_parts_triton if _choose(out.device) else sum_parts_reference)(parts, out, residual)


def adamw_step(
    grad: Tensor,
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decoupled: bool = True,
    maximize: bool = False,
    master: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Do one step of AdamW, or of Adam, on flat tensors, each of which is read and written once.

    Arguments, result and errors are those of `dpfuse_kernels.adamw.adamw_step`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import adamw_step
        >>> param, exp_avg, exp_avg_sq = torch.tensor([4.0, 8.0]), torch.zeros(2), torch.zeros(2)
        >>> settings = {"lr": 0.5, "betas": (0.75, 0.75), "eps": 0.0, "weight_decay": 0.5}
        >>> adamw_step(torch.tensor([2.0, -4.0]), param, exp_avg, exp_avg_sq, step=1, **settings)
        >>> param
        tensor([2.5000, 6.5000])
    """
    (adamw_step_triton if _choose(grad.device) else adamw_step_reference)(
        grad,
        param,
        exp_avg,
        exp_avg_sq,
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        master=master,
        factor=factor,
    )
