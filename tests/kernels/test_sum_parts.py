"""`sum_parts` and its reference against the definition: one element at a time, in the order of the rows."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dpfuse_kernels
from dpfuse_kernels import launcher
from dpfuse_kernels.sum_parts import _sum_parts_kernel, sum_parts, sum_parts_reference
from tests.kernels.layouts import DTYPES, GUARD, POISON, same_bits

both = pytest.mark.parametrize("add_up", [sum_parts, sum_parts_reference], ids=["triton", "reference"])


def in_order(parts: Tensor, *, truncated: bool) -> Tensor:
    """The definition. Triton's interpreter cuts float32 to bfloat16, everything else rounds."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    if truncated and parts.dtype == torch.bfloat16:
        return (total.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return total.to(parts.dtype)


@both
def test_example_of_the_kernel_docstring(add_up: Callable[[Tensor, Tensor], None]) -> None:
    parts = torch.tensor([[1.0, 2], [256, 4], [1, 6]], dtype=torch.bfloat16)
    out = torch.empty(2, dtype=torch.bfloat16)
    add_up(parts, out)
    assert out.tolist() == [258, 12]
    rounded = (parts[0] + parts[1]) + parts[2]
    assert rounded.tolist() == [256, 12]
    text = _sum_parts_kernel.__doc__ or ""
    assert "[[1, 2], [256, 4], [1, 6]] in bfloat16 give [258, 12]" in text
    assert "gives [256, 12]" in text


@both
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 6),
    numel=st.sampled_from([0, 1, 3, 8, 16, 4095, 4096, 4104, 9001]),
    dtype=st.sampled_from(DTYPES),
    shift=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_any_parts_are_added_in_order_and_nothing_else_is_written(
    add_up: Callable[[Tensor, Tensor], None], rows: int, numel: int, dtype: torch.dtype, shift: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Of sizes so different that every other order of addition has other bits.
    exponents = torch.randint(-9, 9, (rows, numel), generator=generator)
    values = torch.randn(rows, numel, generator=generator, dtype=torch.float64).ldexp(exponents).to(dtype)
    read = torch.full((rows * numel + shift + GUARD,), POISON, dtype=dtype)
    parts = read[shift : shift + rows * numel].view(rows, numel).copy_(values)
    memory = torch.full((2 * GUARD + numel + shift,), POISON, dtype=dtype)
    out = memory[GUARD + shift : GUARD + shift + numel]

    add_up(parts, out)
    assert same_bits(out, in_order(values, truncated=add_up is sum_parts))
    assert same_bits(parts, values)
    assert memory[: GUARD + shift].isnan().all()
    assert memory[GUARD + shift + numel :].isnan().all()


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_keep_their_sign_and_what_is_not_finite_stays_so(
    add_up: Callable[[Tensor, Tensor], None], dtype: torch.dtype
) -> None:
    inf, nan = float("inf"), float("nan")
    tiny = torch.finfo(dtype).smallest_normal / 2  # subnormal
    parts = torch.tensor([[-0.0, -0.0, inf, inf, nan, tiny], [-0.0, 0.0, inf, -inf, 1.0, 0.0]], dtype=dtype)
    out = torch.empty(6, dtype=dtype)
    add_up(parts, out)
    assert out.signbit()[:2].tolist() == [True, False]
    assert out[2] == inf
    assert out[3:5].isnan().all()
    if not (add_up is sum_parts and dtype == torch.bfloat16):  # which Triton's interpreter makes zero
        assert out[5] == tiny


@both
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_rounding_takes_is_added_to_the_residual(
    add_up: Callable[..., None], dtype: torch.dtype, shift: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    numel = 4096 + 8 + shift
    parts = torch.randn(3, numel, generator=generator).to(dtype)
    parts[0, :3] = torch.tensor([float("inf"), float("nan"), torch.finfo(dtype).max])
    parts[1, 2] = torch.finfo(dtype).max
    out = torch.empty(numel, dtype=dtype)
    memory = torch.full((2 * GUARD + shift + numel,), POISON)
    residual = memory[GUARD + shift : GUARD + shift + numel]
    old = torch.randn(numel, generator=generator)
    add_up(parts, out, residual.copy_(old))
    assert not out[:3].isfinite().any()
    wanted = old + (parts[0].float() + parts[1].float() + parts[2].float() - out.float()).nan_to_num(0, 0, 0)
    assert same_bits(residual, wanted)
    assert torch.equal(residual, old) == (dtype == torch.float32)
    assert memory[: GUARD + shift].isnan().all()
    assert memory[GUARD + shift + numel :].isnan().all()


@both
def test_example_of_the_residual(add_up: Callable[..., None]) -> None:
    out, residual = torch.empty(2, dtype=torch.bfloat16), torch.tensor([0.5, 0.0])
    add_up(torch.tensor([[256, 4], [3, 6]], dtype=torch.bfloat16), out, residual)
    if add_up is sum_parts:  # Triton's interpreter cuts float32 to bfloat16; everything else rounds
        assert (out.tolist(), residual.tolist()) == ([258, 10], [1.5, 0])
    else:
        assert (out.tolist(), residual.tolist()) == ([260, 10], [-0.5, 0])
    assert "out is [260, 10], and residual [0.5, 0] becomes [-0.5, 0]" in (_sum_parts_kernel.__doc__ or "")


@both
def test_a_residual_that_does_not_fit_is_named(add_up: Callable[..., None]) -> None:
    parts, out = torch.zeros(2, 3), torch.zeros(3)
    for residual in (torch.zeros(4), torch.zeros(3).half(), torch.zeros(3, device="meta"), torch.zeros(6)[::2]):
        with pytest.raises(
            ValueError, match=r"residual is .* expected contiguous torch\.float32 of shape \(3,\) on cpu"
        ):
            add_up(parts, out, residual)
    with pytest.raises(ValueError, match=r"for a buffer of torch\.float64.*Leave residual out"):
        add_up(parts.double(), out.double(), torch.zeros(3))


def test_the_order_of_the_rows_matters_here() -> None:
    """Or the tests above could not tell it from another one."""
    parts = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    one, other = torch.empty(2, 1000)
    sum_parts_reference(parts, one)
    sum_parts_reference(parts.flip(0).contiguous(), other)
    assert not torch.equal(one, other)


WRONG = {
    "rows of another length": ((3, 4), (5,), {}, r"parts has shape \(3, 4\) and out \(5,\), expected \[rows, numel\]"),
    "no rows": ((0, 4), (4,), {}, r"at least one row"),
    "no matrix": ((4,), (4,), {}, r"expected \[rows, numel\]"),
    "dtype": ((3, 4), (4,), {"dtype": torch.float16}, "parts is torch.float32 on cpu and out torch.float16 on cpu"),
    "device": ((3, 4), (4,), {"device": "meta"}, "parts is torch.float32 on cpu and out torch.float32 on meta"),
}


@both
@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_named(add_up: Callable[[Tensor, Tensor], None], case: str) -> None:
    shape, out_shape, options, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        add_up(torch.zeros(shape), torch.zeros(out_shape, **options))


@both
def test_integers_and_gaps_are_refused(add_up: Callable[[Tensor, Tensor], None]) -> None:
    with pytest.raises(ValueError, match=r"expected one device and one of torch\.float32.*Convert"):
        add_up(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    for parts, out in ((torch.zeros(3, 2).t(), torch.zeros(3)), (torch.zeros(2, 3), torch.zeros(6)[::2])):
        with pytest.raises(ValueError, match=r"expected contiguous tensors.*Call \.contiguous\(\)"):
            add_up(parts, out)


def test_the_public_name_chooses_by_device_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    # The package has the function under the name of its file.
    monkeypatch.setattr(sys.modules["dpfuse_kernels.sum_parts"], "sum_parts_reference", lambda *_: called.append(1))
    dpfuse_kernels.sum_parts(torch.zeros(2, 3), torch.zeros(3))
    assert called == []
    monkeypatch.delenv("DPFUSE_KERNELS")
    dpfuse_kernels.sum_parts(torch.zeros(2, 3), torch.zeros(3))
    assert called == [1]


def test_the_last_programs_of_parts_beyond_31_bits() -> None:
    """Memory is reserved, but of parts only the last pages are ever touched."""
    numel = (1 << 30) + 8
    try:
        parts = torch.empty(3, numel, dtype=torch.bfloat16)
        out = torch.empty(numel, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"this machine does not reserve {8 * numel} bytes: {error}")
    values = torch.arange(3000).remainder(7).to(torch.bfloat16)
    parts[:, -3000:] = values
    chunk = 4096
    last = -(-numel // chunk) - 1
    types = {"WIRE": launcher.triton_dtype(torch.bfloat16), "SUM": launcher.triton_dtype(torch.float32)}
    launcher.dispatch(
        _sum_parts_kernel,
        out.device,
        1,
        (parts.data_ptr(), out.data_ptr(), 3, numel, last, 0),
        {**types, "RESIDUAL": False, "CHUNK": chunk},
        8,
    )
    rest = numel - last * chunk
    assert torch.equal(out[-rest:], 3 * values[-rest:])
    assert out[:4096].eq(0).all(), "an offset of 32 bits would have wrapped round to here"
