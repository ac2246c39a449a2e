"""The check of machine code finds what it looks for."""

from __future__ import annotations

from tests.kernels.ptx import narrow_products_in_addresses

SHARED = """
    mad.lo.s32 %r3, %r1, %r2, %r0;
    st.shared.b32 [ %r3 + 0 ], %r4;
"""
WIDENED = """
    mul.lo.s32 %r3, %r1, %r2;
    @%p1 add.s32 %r4, %r3, 1;
    mul.wide.s32 %rd1, %r4, 4;
"""
IN_A_LOOP = """
    cvt.s64.s32 %rd1, %r5;
    add.s32 %r5, %r4, 1;
    mul.lo.u32 %r4, %r1, %r2;
"""


def test_a_product_that_stays_narrow_is_no_address() -> None:
    assert narrow_products_in_addresses(SHARED) == []


def test_a_widened_product_is_found_whatever_lies_between() -> None:
    assert narrow_products_in_addresses(WIDENED) == ["mul.lo.s32 %r3, %r1, %r2"]
    assert narrow_products_in_addresses(IN_A_LOOP) == ["mul.lo.u32 %r4, %r1, %r2"]


def test_a_product_of_64_bits_and_a_comparison_are_fine() -> None:
    assert narrow_products_in_addresses("mul.lo.s64 %rd3, %rd1, %rd2;\nadd.s64 %rd4, %rd3, 8;") == []
    assert narrow_products_in_addresses("mul.lo.s32 %r3, %r1, %r2;\nsetp.lt.s32 %p1, %r3, %r4;") == []
