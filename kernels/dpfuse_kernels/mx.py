"""Eight-bit floats with a shared scale per block of 32, as bytes: sizes, encoding, decoding. Knows no table.

The elements and scales are those of the OCP Microscaling (MX) specification, version 1.0: MXFP8 with E4M3 or E5M2
elements, and one power of two (E8M0) per block of 32. The order of the bytes is ours. A *super-block* of 528 bytes
holds 512 element bytes and then their 16 scale bytes: it starts at a multiple of 16 bytes and needs nothing from
elsewhere, so that a buffer may be split between ranks behind any of them. 528 / 2048 is 0.258 of what float32 takes.

The scale is chosen as the specification leaves open: the smallest power of two with which no finite element of the
block overflows after rounding. So nothing saturates: the specification's own example takes the largest element's
exponent, with which elements that are larger than the format's largest number become that number. Only what would be
rounded up to 2 ** 128, which is no float32, is rounded down, to 1.875 or 1.75 times 2 ** 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "SUPER_BLOCK", "SUPER_BYTES", "MxFormat", "mx_bytes", "mx_decode", "mx_encode", "mx_format"]

BLOCK = 32  # elements that share a scale
SUPER_BLOCK = 512  # elements whose scales lie behind them
SUPER_BYTES = SUPER_BLOCK + SUPER_BLOCK // BLOCK

NAN = 0x7F  # the element byte of whatever is not finite, in both formats


@dataclass(frozen=True)
class MxFormat:
    """The elements of one format.

    Attributes:
        dtype: torch's type of them.
        mantissa: bits of it.
        exponent: of the largest number, which is 1.75 * 2 ** exponent.
        room: what may be added to the mantissa bits of a float32 before a number of that exponent overflows, once it
            is rounded to nearest even: 1.8125 still becomes 1.75 where the last bit of that is 0, 1.875 does not.
        cap: the largest number, with any scale, that is also a float32.
    """

    dtype: torch.dtype
    mantissa: int
    exponent: int
    room: int
    cap: float


FORMATS = {
    torch.float8_e4m3fn: MxFormat(torch.float8_e4m3fn, mantissa=3, exponent=8, room=0x17FFFF, cap=1.875 * 2.0**127),
    torch.float8_e5m2: MxFormat(torch.float8_e5m2, mantissa=2, exponent=15, room=0x100000, cap=1.75 * 2.0**127),
}


def mx_format(dtype: torch.dtype) -> MxFormat:
    """The format whose elements are `dtype`.

    Raises:
        ValueError: there is none.

    Example:
        >>> mx_format(torch.float8_e5m2).mantissa
        2
    """
    if dtype not in FORMATS:
        raise ValueError(
            f"format is {dtype}, expected one of {', '.join(map(str, FORMATS))}. Only those have blocks with a scale."
        )
    return FORMATS[dtype]


def mx_bytes(elements: int) -> int:
    """Bytes of a buffer for `elements` elements: whole super-blocks.

    Example:
        >>> mx_bytes(0), mx_bytes(1), mx_bytes(512), mx_bytes(513)
        (0, 528, 528, 1056)
    """
    return -(-elements // SUPER_BLOCK) * SUPER_BYTES


@torch.no_grad()
def mx_encode(values: Tensor, format: torch.dtype, out: Tensor) -> Tensor:
    """Write `values` as bytes, by torch's own operations; on a GPU the host waits for some of them.

    Each element is divided by its block's scale and rounded to nearest even. The scale is the smallest power of two,
    from 2 ** -127 on, with which no finite element of the block overflows. What is not finite becomes NaN and has
    no part in the scale. Zeros keep their sign.

    Args:
        values: [elements] float32, contiguous, a multiple of 512 of them.
        format: torch.float8_e4m3fn or torch.float8_e5m2.
        out: [mx_bytes(elements)] uint8, contiguous, on the device of `values`.

    Returns:
        `out`.

    Example:
        >>> values = torch.zeros(512)
        >>> values[:3] = torch.tensor([896.0, -0.5, 1.0])
        >>> packed = mx_encode(values, torch.float8_e4m3fn, torch.empty(528, dtype=torch.uint8))
        >>> packed[:4].tolist(), packed[512].item()  # 448, -0.25, 0.5 and 0; times 2 ** (128 - 127)
        ([126, 168, 48, 0], 128)
    """
    kind = mx_format(format)
    blocks = values.view(-1, BLOCK)
    magnitude = blocks.abs()
    largest = magnitude.amax(1)
    usual = bool((largest <= kind.cap).all())
    if not usual:
        finite = blocks.isfinite()
        largest = magnitude.where(finite, 0.0).amax(1).clamp_(max=kind.cap)
        blocks = blocks.clamp(-kind.cap, kind.cap)
    scale = ((largest.view(torch.int32) + kind.room) >> 23).sub_(kind.exponent).clamp_(min=0)
    inverse = ((254 - scale) << 23).view(torch.float32)
    elements = (blocks * inverse.unsqueeze(1)).to(kind.dtype).view(torch.uint8)
    if not usual:
        elements.masked_fill_(~finite, NAN)
    rows = out.view(-1, SUPER_BYTES)
    rows[:, :SUPER_BLOCK] = elements.view(-1, SUPER_BLOCK)
    rows[:, SUPER_BLOCK:] = scale.view(-1, SUPER_BLOCK // BLOCK)
    return out


@torch.no_grad()
def mx_decode(packed: Tensor, format: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Read bytes as float32, which holds every such number exactly, by torch's own operations; the host waits for some.

    Args:
        packed: [bytes] uint8, contiguous: whole super-blocks.
        format: torch.float8_e4m3fn or torch.float8_e5m2.
        out: [elements] float32, contiguous; made by default.

    Returns:
        `out`: 512 elements for each 528 bytes.

    Example:
        >>> packed = torch.zeros(528, dtype=torch.uint8)
        >>> packed[:4] = torch.tensor([126, 168, 48, 0])
        >>> packed[512] = 128
        >>> mx_decode(packed, torch.float8_e4m3fn)[:4].tolist()
        [896.0, -0.5, 1.0, 0.0]
    """
    rows = packed.view(-1, SUPER_BYTES)
    if out is None:
        out = torch.empty(len(rows) * SUPER_BLOCK, dtype=torch.float32, device=packed.device)
    elements = rows[:, :SUPER_BLOCK]
    if mx_format(format).dtype == torch.float8_e4m3fn:
        # A float16 has the same bits further left, and an exponent that is larger by 8. Torch converts vectors of it,
        # but floats of this kind one by one, which takes six times as long.
        wide = elements.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.view(-1, SUPER_BLOCK).copy_(wide.view(torch.float16)).mul_(256.0)
        code = elements & 0x7F
        if code.numel() and code.max() == NAN:
            out.view(-1, SUPER_BLOCK).masked_fill_(code == NAN, float("nan"))
    else:
        out.view(-1, SUPER_BLOCK).copy_(elements.view(format))
    scale = rows[:, SUPER_BLOCK:].view(torch.float8_e8m0fnu).float()
    out.view(*scale.shape, BLOCK).mul_(scale.unsqueeze(2))
    return out


def check_packed(name: str, packed: Tensor) -> None:
    """Raise ValueError unless `packed`, [..., bytes] uint8, is contiguous, aligned and of whole super-blocks."""
    length = packed.shape[-1] if packed.dim() else 0
    whole = packed.dim() > 0 and length % SUPER_BYTES == 0 and packed.data_ptr() % 16 == 0
    if packed.dtype != torch.uint8 or not whole or not packed.is_contiguous():
        raise ValueError(
            f"{name} is {packed.dtype} of shape {tuple(packed.shape)} at address {packed.data_ptr():#x}, expected "
            f"contiguous torch.uint8 of whole super-blocks of {SUPER_BYTES} bytes at a multiple of 16. Allocate it "
            "with torch.zeros(mx_bytes(elements), dtype=torch.uint8)."
        )
