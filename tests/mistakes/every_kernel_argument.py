"""How what `dpfuse_kernels` makes once per plan is called rightly, by the names of its arguments."""

from __future__ import annotations

import torch

from dpfuse_kernels import BitHashTable, MxTable, Piece, PointerTable, Slot, SpoilTable, mx_bytes
from tests.mistakes.right_call import Call, values

__all__ = ["KERNELS"]

SLOTS = [Slot("a", 0, (3,), (1,))]
CPU = torch.device("cpu")

KERNELS: dict[str, Call] = {
    "dpfuse_kernels.BitHashTable": Call(
        BitHashTable, values(nbytes=[40], groups=[[Piece(0, 0, 40)]], device=CPU, chunk=4)
    ),
    "dpfuse_kernels.MxTable": Call(
        MxTable,
        lambda _: {
            "flat": torch.zeros(mx_bytes(3), dtype=torch.uint8),
            "slots": SLOTS,
            "dtype": torch.float32,
            "format": torch.float8_e4m3fn,
        },
    ),
    "dpfuse_kernels.PointerTable": Call(
        PointerTable, lambda _: {"flat": torch.zeros(4), "slots": SLOTS, "dtype": torch.float32}
    ),
    "dpfuse_kernels.SpoilTable": Call(
        SpoilTable, values(numels=[5, 2], dtype=torch.float32, device=CPU, chunk=4, spans=None)
    ),
}
