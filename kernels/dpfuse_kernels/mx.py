"""Eight-bit floats with a shared scale per block of 32, as bytes: sizes, encoding, decoding. Knows no table.

The elements and scales are those of the OCP Microscaling (MX) specification, version 1.0: MXFP8 with E4M3 or E5M2
elements, and one power of two (E8M0) per block of 32. The order of the bytes is our own. A *super-block* of 528 bytes
holds 512 element bytes and then their 16 scale bytes. It starts at a multiple of 16 bytes and is complete in itself, so
a buffer may be split between ranks after any super-block. It takes 528 / 2048 = 0.258 of the bytes of float32.

The specification leaves the choice of the scale open. We use the smallest power of two with which no finite element of
the block overflows after rounding, so no element saturates. The specification's example uses the largest element's
exponent; there, elements above the format's largest number saturate. One case remains: a value that would be rounded up
to 2 ** 128, which is no float32, is rounded down to 1.875 or 1.75 times 2 ** 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "SUPER_BLOCK", "SUPER_BYTES", "MxFormat", "mx_bytes", "mx_decode", "mx_encode", "mx_format"]

BLOCK = 32  # elements that share a scale
SUPER_BLOCK = 512  # elements that are followed by their scales
SUPER_BYTES = SUPER_BLOCK + SUPER_BLOCK // BLOCK

CHUNK = 1 << 18  # elements that a CPU encodes or decodes at a time
NAN = 0x7F  # the element byte for NaN and infinities, in both formats


@dataclass(frozen=True)
class MxFormat:
    """The elements of one format.

    Attributes:
        dtype: torch's dtype of the elements.
        mantissa: number of mantissa bits.
        exponent: of the largest number, which is 1.75 * 2 ** exponent.
        room: added to the bits of a float32, it carries into the exponent if rounding to nearest even would overflow:
            for E4M3 above 1.8125, which is rounded to 1.75, and for E5M2 from 1.875 on.
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
    """Return the format with elements of `dtype`.

    Raises:
        ValueError: There is no such format.

    Example:
        >>> mx_format(torch.float8_e5m2).mantissa
        2
    """
    if dtype not in FORMATS:
        raise ValueError(f"format is {dtype}, expected one of {', '.join(map(str, FORMATS))}. Pass one of these.")
    return FORMATS[dtype]


def mx_bytes(elements: int) -> int:
    """Return the number of bytes of a buffer for `elements` elements, in whole super-blocks.

    Example:
        >>> mx_bytes(0), mx_bytes(1), mx_bytes(512), mx_bytes(513)
        (0, 528, 528, 1056)
    """
    return -(-elements // SUPER_BLOCK) * SUPER_BYTES


@torch.no_grad()
def mx_encode(values: Tensor, format: torch.dtype, out: Tensor) -> Tensor:
    """Write `values` as bytes, with torch's own operations. On a GPU the host waits for some of them.

    Each element is divided by its block's scale and rounded to nearest even. The scale is the smallest power of two,
    from 2 ** -127 on, with which no finite element of the block overflows. NaN and infinities become NaN and do not
    affect the scale. Zeros keep their sign.

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
    chunks = in_chunks(values)
    scratch = torch.empty_like(chunks[0])
    for some, packed in zip(chunks, in_chunks(out), strict=True):
        _encode_chunk(some, kind, packed, scratch[: len(some)])
    return out


def _encode_chunk(values: Tensor, kind: MxFormat, out: Tensor, scratch: Tensor) -> None:
    blocks, between = values.view(-1, BLOCK), scratch.view(-1, BLOCK)
    largest = torch.abs(blocks, out=between).amax(1)
    usual = bool((largest <= kind.cap).all())
    if not usual:
        finite = blocks.isfinite()
        largest = between.where(finite, 0.0).amax(1).clamp_(max=kind.cap)
        blocks = blocks.clamp(-kind.cap, kind.cap)
    scale = ((largest.view(torch.int32) + kind.room) >> 23).sub_(kind.exponent).clamp_(min=0)
    inverse = ((254 - scale) << 23).view(torch.float32)
    torch.mul(blocks, inverse.unsqueeze(1), out=between)
    rows = out.view(-1, SUPER_BYTES)
    elements = rows[:, :SUPER_BLOCK]
    elements.view(kind.dtype).copy_(between.view(-1, SUPER_BLOCK))
    if not usual:
        elements.masked_fill_(~finite.view(-1, SUPER_BLOCK), NAN)
    rows[:, SUPER_BLOCK:] = scale.view(-1, SUPER_BLOCK // BLOCK)


@torch.no_grad()
def mx_decode(packed: Tensor, format: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Read bytes as float32, which is exact, with torch's own operations. On a GPU the host waits for some of them.

    Args:
        packed: [bytes] uint8, contiguous: whole super-blocks.
        format: torch.float8_e4m3fn or torch.float8_e5m2.
        out: [elements] float32, contiguous; by default a new tensor.

    Returns:
        `out`: 512 elements for each 528 bytes.

    Example:
        >>> packed = torch.zeros(528, dtype=torch.uint8)
        >>> packed[:4] = torch.tensor([126, 168, 48, 0])
        >>> packed[512] = 128
        >>> mx_decode(packed, torch.float8_e4m3fn)[:4].tolist()
        [896.0, -0.5, 1.0, 0.0]
    """
    kind = mx_format(format)
    if out is None:
        out = torch.empty(packed.numel() // SUPER_BYTES * SUPER_BLOCK, dtype=torch.float32, device=packed.device)
    for values, some in zip(in_chunks(out), in_chunks(packed.view(-1)), strict=True):
        _decode_chunk(some, kind, values)
    return out


def _decode_chunk(packed: Tensor, kind: MxFormat, out: Tensor) -> None:
    rows = packed.view(-1, SUPER_BYTES)
    elements = rows[:, :SUPER_BLOCK]
    if kind.dtype == torch.float8_e4m3fn:
        # A float16 has the same bits further left, with a bias that is larger by 8. Torch converts float16 in vectors,
        # but E4M3 one by one, which takes six times as long.
        wide = elements.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.view(-1, SUPER_BLOCK).copy_(wide.view(torch.float16)).mul_(256.0)
        code = elements & 0x7F
        if code.numel() and code.max() == NAN:
            out.view(-1, SUPER_BLOCK).masked_fill_(code == NAN, float("nan"))
    else:
        out.view(-1, SUPER_BLOCK).copy_(elements.view(kind.dtype))
    scale = rows[:, SUPER_BLOCK:].view(torch.float8_e8m0fnu).float()
    out.view(*scale.shape, BLOCK).mul_(scale.unsqueeze(2))


def in_chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Return the slices of the last dimension that a CPU handles one by one: of bytes if it is uint8, else of elements.

    A result as large as a buffer would be written into memory that was just mapped, which takes a CPU several times as
    long as the arithmetic. A result of this size fits into the caches, and into memory that is in use already.
    """
    if tensor.device.type != "cpu":
        return [tensor]
    chunks: Sequence[Tensor] = tensor.split(mx_bytes(CHUNK) if tensor.dtype == torch.uint8 else CHUNK, -1)
    return chunks


def check_packed(name: str, packed: Tensor) -> None:
    """Raise ValueError unless `packed`, [..., bytes] uint8, is contiguous, aligned and made of whole super-blocks."""
    length = packed.shape[-1] if packed.dim() else 0
    whole = packed.dim() > 0 and length % SUPER_BYTES == 0 and packed.data_ptr() % 16 == 0
    if packed.dtype != torch.uint8 or not whole or not packed.is_contiguous():
        raise ValueError(
            f"{name} is {packed.dtype} of shape {tuple(packed.shape)} at address {packed.data_ptr():#x}, expected "
            f"contiguous torch.uint8 of whole super-blocks of {SUPER_BYTES} bytes at a multiple of 16. Allocate it "
            "with torch.zeros(mx_bytes(elements), dtype=torch.uint8)."
        )
