"""One program's part of an eight-bit buffer in a kernel: its addresses, reading, encoding and decoding.

The functions use only integers and plain float32 arithmetic, no conversions of the hardware: so all devices give the
same bits. Kernels call these functions; `launcher.jit` compiles them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__: list[str] = []


def _read(flat_address: tl.tensor, block: tl.tensor, mask: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Return the values of `block`, [blocks, 1] int64, as [blocks, 32] float32. The buffer must be aligned."""
    element = tl.load(_element_ptr(flat_address, block), mask=mask, other=0)
    scale = tl.load(_scale_ptr(flat_address, block), mask=mask, other=0)
    return _decode(element, scale, E4M3)


def _lost(value: tl.tensor, element: tl.tensor, scale: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Return what encoding has taken from [blocks, 32] float32; 0 where that is not finite."""
    error = value - _decode(element, scale, E4M3)
    return tl.where(tl.abs(error) < float("inf"), error, 0.0)


def _encode(value: tl.tensor, E4M3: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Encode [blocks, 32] float32 as element bytes [blocks, 32] and scale bytes [blocks, 1], as `mx_encode` does.

    Example: in E4M3 a block of 896, -0.5, 1 and zeros becomes 126, 168, 48 and zeros; its scale is 128.
    """
    MANTISSA: tl.constexpr = 3 if E4M3 else 2
    BIAS: tl.constexpr = 7 if E4M3 else 15
    EXPONENT: tl.constexpr = 8 if E4M3 else 15  # of the largest number
    ROOM: tl.constexpr = 0x17FFFF if E4M3 else 0x100000
    CAP: tl.constexpr = 0x7F700000 if E4M3 else 0x7F600000
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    magnitude = tl.minimum(tl.where(finite, magnitude, 0), CAP)
    largest = tl.max(magnitude, axis=1, keep_dims=True)
    scale = tl.maximum(((largest + ROOM) >> 23) - EXPONENT, 0)
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude.to(tl.float32, bitcast=True) * inverse
    # Round to nearest even: add half of the last place, or a little less if the even neighbour is below. A carry goes
    # into the exponent. Subnormal results are rounded by adding a power of two with the same last place.
    there = scaled.to(tl.int32, bitcast=True)
    normal = ((there + ((1 << (SHIFT - 1)) - 1) + ((there >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    STEP: tl.constexpr = 127 + 1 - BIAS - MANTISSA + 23  # exponent bits of that power of two
    power = tl.full(scaled.shape, STEP << 23, tl.int32).to(tl.float32, bitcast=True)
    tiny = (scaled + power).to(tl.int32, bitcast=True) - (STEP << 23)
    code = tl.where(there < ((128 - BIAS) << 23), tiny, normal) | ((bits >> 24) & 0x80)
    return tl.where(finite, code, 0x7F).to(tl.uint8), scale.to(tl.uint8)


def _decode(element: tl.tensor, scale: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Decode element bytes [blocks, 32] and scale bytes [blocks, 1] to [blocks, 32] float32, exactly.

    Example: in E4M3 126, 168, 48 with the scale 128 are 896, -0.5 and 1.
    """
    MANTISSA: tl.constexpr = 3 if E4M3 else 2
    BIAS: tl.constexpr = 7 if E4M3 else 15
    element = element.to(tl.int32)
    scale = scale.to(tl.int32)
    code = element & 0x7F
    # The same bits in a float32, with the difference of the biases added. This makes subnormal numbers normal.
    OFFSET: tl.constexpr = (127 + 127 - BIAS) << 23
    offset = tl.full(code.shape, OFFSET, tl.int32).to(tl.float32, bitcast=True)
    value = (code << (23 - MANTISSA) | (element & 0x80) << 24).to(tl.float32, bitcast=True) * offset
    if E4M3:
        value = tl.where(code == 0x7F, float("nan"), value)
    else:
        value = tl.where(code == 0x7C, value * float("inf"), tl.where(code > 0x7C, float("nan"), value))
    # 2 ** -127 is subnormal, 255 is NaN.
    unit = tl.where(scale == 0, 0x00400000, tl.where(scale == 255, 0x7FC00000, scale << 23))
    return value * unit.to(tl.float32, bitcast=True)


def _element_ptr(flat_address: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Return pointers [blocks, 32] to the element bytes of `block`, [blocks, 1] int64."""
    flat_ptr = tl.multiple_of(flat_address.to(tl.int64).to(tl.pointer_type(tl.uint8)), 16)
    return flat_ptr + ((block >> 4) * 528 + (block & 15) * 32) + tl.arange(0, 32)[None, :]


def _scale_ptr(flat_address: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Return pointers [blocks, 1] to the scale bytes of `block`, [blocks, 1] int64."""
    return flat_address.to(tl.int64).to(tl.pointer_type(tl.uint8)) + ((block >> 4) * 528 + 512 + (block & 15))
