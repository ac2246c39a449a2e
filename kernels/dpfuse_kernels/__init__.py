"""Kernels that pack tensors into flat buffers, unpack, measure and scale them. They need torch, and triton to launch.

Read `layout` first, which says which tensor lies where in a buffer. `pointer_table` adds what runs over it: `launcher`
runs kernels on a GPU (with `address_ring` and `bound`), `host_plan` runs torch's operations on the CPU. Then read
`flatten`, a whole example of a kernel with its reference, and `unflatten`. `backend` chooses between the two, and
`checks` looks at the tensors that they get.
The other kernels are `squared_norm`, `multiply`, `spoil`, `bit_hash`, `sum_parts`, `adamw`, and for eight-bit blocks
`quantize`, `dequantize` and `sum_quantized`, which use the files `mx*`.
"""

from dpfuse_kernels.backend import (
    adamw_step,
    bit_hash,
    dequantize,
    flatten,
    multiply,
    quantize,
    spoil,
    squared_norm,
    sum_parts,
    sum_quantized,
    unflatten,
)
from dpfuse_kernels.bit_hash import BitHashTable, Piece
from dpfuse_kernels.layout import Slot
from dpfuse_kernels.mx import mx_bytes, mx_decode, mx_encode
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.pointer_table import PointerTable
from dpfuse_kernels.spoil import SpoilTable

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
