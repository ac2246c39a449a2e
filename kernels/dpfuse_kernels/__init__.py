"""Packs tensors into flat buffers, unpacks, measures and scales them. Needs torch; triton only to launch kernels."""

from dpfuse_kernels.backend import (
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
from dpfuse_kernels.mx import mx_bytes, mx_decode, mx_encode
from dpfuse_kernels.mx_table import MxTable
from dpfuse_kernels.pointer_table import PointerTable, Slot
from dpfuse_kernels.spoil import SpoilTable

__all__ = [
    "MxTable",
    "PointerTable",
    "Slot",
    "SpoilTable",
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
