"""Kernels that pack tensors into flat buffers, unpack, measure and scale them. They need torch, and triton to launch.

Read `layout` first, which says which tensor lies where in a buffer. `pointer_table` adds what runs over it: `launcher`
runs kernels on a GPU (with `address_ring` and `bound_kernel`), `host_plan` runs torch's operations on the CPU. Then
read `flatten`, a whole example of a kernel with its reference, and `unflatten`. `backend` says which of the two runs,
and `checks` looks at the tensors that they get.
The other kernels are `squared_norm`, `multiply`, `spoil`, `bit_hash`, `sum_parts`, `adamw`, and for eight-bit blocks
`quantize`, `dequantize` and `sum_quantized`, which use the files `mx*`.
"""

from dpfuse_kernels.adamw import adamw_step
from dpfuse_kernels.bit_hash import BitHashTable, Piece, bit_hash
from dpfuse_kernels.dequantize import dequantize
from dpfuse_kernels.flatten import flatten
from dpfuse_kernels.layout import Slot
from dpfuse_kernels.multiply import multiply
from dpfuse_kernels.mx import mx_bytes, mx_decode, mx_encode
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.pointer_table import PointerTable
from dpfuse_kernels.quantize import quantize
from dpfuse_kernels.spoil import SpoilTable, spoil
from dpfuse_kernels.squared_norm import squared_norm
from dpfuse_kernels.sum_parts import sum_parts
from dpfuse_kernels.sum_quantized import sum_quantized
from dpfuse_kernels.unflatten import unflatten

__all__ = [
    "BitHashTable",
    "MxTable",
    "Piece",
    "PointerTable",
    "Slot",
    "SpoilTable",
    "adamw_step",
    "bit_hash",
    "dequantize",
    "flatten",
    "multiply",
    "mx_bytes",
    "mx_decode",
    "mx_encode",
    "quantize",
    "spoil",
    "squared_norm",
    "sum_parts",
    "sum_quantized",
    "unflatten",
]
