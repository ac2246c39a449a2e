"""`adamw_step` and its reference against the definition in NumPy, rounded after each operation, and against torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dpfuse_kernels
from dpfuse_kernels import launcher
from dpfuse_kernels.adamw import GRADS, NARROW, SHAPE, _adamw_kernel, _numbers, adamw_step
from tests.kernels.layouts import GUARD, POISON, adamw_step_reference, same_bits

both = pytest.mark.parametrize("update", [adamw_step, adamw_step_reference], ids=["triton", "reference"])
Update = Callable[..., None]


def defined(
    grad: Tensor, value: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, factor: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, with NumPy's float32: the new value, exp_avg and exp_avg_sq."""

    def exact(number: float) -> Any:
        return numpy.float32(number)

    g, p, m, v = (tensor.float().numpy() for tensor in (grad, value, exp_avg, exp_avg_sq))
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    lr, decay, step = options.get("lr", 1e-3), options.get("weight_decay", 1e-2), options["step"]
    g = g * exact(factor)
    if options.get("maximize", False):
        g = -g
    if decay and options.get("decoupled", True):
        p = p * exact(1 - lr * decay)
    elif decay:
        g = g + p * exact(decay)
    weight = exact(1 - beta1)
    m = m + weight * (g - m) if weight < 0.5 else g - (g - m) * (exact(1) - weight)
    v = v * exact(beta2) + exact(1 - beta2) * g * g
    denominator = numpy.sqrt(v) / exact((1 - beta2**step) ** 0.5) + exact(options.get("eps", 1e-8))
    p = p + exact(-lr / (1 - beta1**step)) * m / denominator
    return torch.from_numpy(p), torch.from_numpy(m), torch.from_numpy(v)


def rounded(value: Tensor, dtype: torch.dtype, update: Update) -> Tensor:
    """Triton's interpreter cuts float32 to bfloat16, everything else rounds."""
    if update is adamw_step and dtype == torch.bfloat16:
        return (value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return value.to(dtype)


@both
def test_example_of_the_kernel_docstring(update: Update) -> None:
    options = {"step": 1, "lr": 0.5, "betas": (0.75, 0.75), "eps": 0.0, "weight_decay": 0.5}
    grad, param, exp_avg, exp_avg_sq = torch.tensor([[2.0, -4], [4, 8], [0, 0], [0, 0]])
    update(grad, param, exp_avg, exp_avg_sq, **options)
    assert (exp_avg.tolist(), exp_avg_sq.tolist(), param.tolist()) == ([0.5, -1], [1, 4], [2.5, 6.5])
    master, narrow = torch.tensor([516.0, 8.0]), torch.zeros(2, dtype=torch.bfloat16)
    update(grad, narrow, torch.zeros(2), torch.zeros(2), master=master, **options)
    assert (master.tolist(), narrow.tolist()) == ([386.5, 6.5], [386, 6.5])
    text = _adamw_kernel.__doc__ or ""
    assert "exp_avg is [0.5, -1], exp_avg_sq [1, 4], and param becomes [2.5, 6.5]" in text
    assert "with master [516, 8]: master becomes [386.5, 6.5], and param in bfloat16 [386, 6.5]" in text


def guarded(numel: int, dtype: torch.dtype, shift: int) -> tuple[Tensor, Tensor]:
    """Poisoned memory, and the tensor inside."""
    memory = torch.full((2 * GUARD + shift + numel,), POISON, dtype=dtype)
    return memory, memory[GUARD + shift : GUARD + shift + numel]


@both
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numel=st.sampled_from([0, 1, 7, 8, 16, SHAPE.chunk - 1, SHAPE.chunk, SHAPE.chunk + 8, 2 * SHAPE.chunk + 5]),
    wire=st.sampled_from(GRADS),
    narrow=st.sampled_from([None, *NARROW]),
    shift=st.sampled_from([0, 1]),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.95), (0.0, 0.0)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    factor=st.sampled_from([None, 0.3]),
    step=st.sampled_from([1, 2, 1000]),
)
def test_any_step_has_the_bits_of_the_definition_and_nothing_else_is_written(
    update: Update,
    numel: int,
    wire: torch.dtype,
    narrow: torch.dtype | None,
    shift: int,
    factor: float | None,
    **options: Any,
) -> None:
    generator = torch.Generator().manual_seed(numel)
    grad = torch.randn(numel, generator=generator).to(wire)
    value, old_avg = torch.randn(2, numel, generator=generator)
    old_sq = torch.rand(numel, generator=generator)
    memories, (read, param, exp_avg, exp_avg_sq, master) = zip(
        *[guarded(numel, dtype, shift) for dtype in (wire, narrow or torch.float32, *[torch.float32] * 3)],
        strict=True,
    )
    read.copy_(grad)
    (param if narrow is None else master).copy_(value)
    exp_avg.copy_(old_avg)
    exp_avg_sq.copy_(old_sq)

    given_factor = None if factor is None else torch.tensor(factor)
    given_master = None if narrow is None else master
    update(read, param, exp_avg, exp_avg_sq, master=given_master, factor=given_factor, **options)
    wanted = defined(grad, value, old_avg, old_sq, 1.0 if factor is None else factor, **options)
    assert same_bits(param if narrow is None else master, wanted[0])
    assert same_bits(exp_avg, wanted[1])
    assert same_bits(exp_avg_sq, wanted[2])
    assert same_bits(read, grad)
    if narrow is not None:
        assert same_bits(param, rounded(wanted[0], narrow, update))
    for memory in memories:
        assert memory[: GUARD + shift].isnan().all()
        assert memory[GUARD + shift + numel :].isnan().all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-3}),
        (torch.optim.AdamW, {"betas": (0.3, 0.5), "maximize": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.0}),
    ],
)
def test_each_step_is_within_two_ulp_of_torchs_own_optimizer(kind: type[torch.optim.Adam], options: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    decoupled, ulp = kind is torch.optim.AdamW, torch.finfo(torch.float32).eps
    own = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 1e-2 if decoupled else 0.0, **options}
    theirs = torch.randn(10_003, generator=generator).requires_grad_()
    optimizer = kind([theirs], foreach=False, fused=False, **options)
    ours, started = theirs.detach().clone(), theirs.detach().clone()
    exp_avg, exp_avg_sq = torch.zeros(2, 10_003)
    for step in range(1, 21):
        grad = torch.randn(10_003, generator=generator)
        old, old_avg = ours.clone(), exp_avg.clone()
        adamw_step_reference(grad, ours, exp_avg, exp_avg_sq, step=step, decoupled=decoupled, **own)
        theirs.grad = grad
        optimizer.step()
        state = optimizer.state[theirs]

        # torch fuses the products of exp_avg and of the coupled decay with their sums. So the error is that of the
        # larger number from which a smaller one is left.
        added = 0.0 if decoupled else own["weight_decay"]
        given = grad.abs() + added * old.abs()
        largest = torch.maximum(given, old_avg.abs())
        assert ((exp_avg - state["exp_avg"]).abs() <= 2 * ulp * largest).all()
        slack = 2 * given * (ulp * given) * (1 - own["betas"][1]) if added else 0.0
        assert ((exp_avg_sq - state["exp_avg_sq"]).abs() <= 2 * ulp * state["exp_avg_sq"] + slack).all()
        # One ulp of the parameter, and of the update what the two averages, its root and its quotients have.
        root = (1 - own["betas"][1] ** step) ** 0.5
        update = (
            own["lr"] / (1 - own["betas"][0] ** step) * largest / (exp_avg_sq.sqrt() / root + options.get("eps", 0))
        )
        assert ((ours - theirs.detach()).abs() <= ulp * old.abs() + 4 * ulp * update).all()
        for mine, its in ((ours, theirs.detach()), (exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"])):
            mine.copy_(its)
    assert (theirs - started).abs().max() > 1e-3


@both
def test_one_minus_beta2_has_the_digits_of_double_precision(update: Update) -> None:
    param, exp_avg, exp_avg_sq = torch.zeros(3, 4)
    update(torch.ones(4), param, exp_avg, exp_avg_sq, step=1, betas=(0.9, 0.999))
    assert exp_avg_sq.tolist() == [torch.tensor(1 - 0.999).item()] * 4
    assert exp_avg_sq[0] != torch.tensor(1.0) - torch.tensor(0.999)


@both
def test_what_is_not_finite_stays_in_its_element(update: Update) -> None:
    inf, nan = float("inf"), float("nan")
    tiny = torch.finfo(torch.float32).smallest_normal / 2  # subnormal
    grad = torch.tensor([inf, -inf, nan, 0.0, -0.0, tiny, 1.0, 3e38])
    param = torch.tensor([1.0, 1.0, 1.0, 1.0, -0.0, tiny, inf, 1.0])
    exp_avg, exp_avg_sq = torch.zeros(2, 8)
    wanted = defined(grad, param, exp_avg, exp_avg_sq, step=1, weight_decay=0.0)
    update(grad, param, exp_avg, exp_avg_sq, step=1, weight_decay=0.0)
    assert param[:3].isnan().all()
    assert param[3] == 1.0
    assert param[4] == 0.0
    assert exp_avg[5] == wanted[1][5] > 0
    assert param[6] == inf
    assert exp_avg_sq[7] == inf
    for got, want in zip((param, exp_avg, exp_avg_sq), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@both
def test_without_decay_a_parameter_that_is_infinite_leaves_the_gradient_alone(update: Update) -> None:
    param, exp_avg, exp_avg_sq = torch.full((4,), float("inf")), torch.zeros(4), torch.zeros(4)
    update(torch.ones(4), param, exp_avg, exp_avg_sq, step=1, weight_decay=0.0, decoupled=False)
    assert exp_avg.isfinite().all()


@both
def test_a_factor_of_zero_keeps_the_parameter_and_lets_averages_fade(update: Update) -> None:
    param, exp_avg, exp_avg_sq = torch.ones(9), torch.zeros(9), torch.ones(9)
    update(torch.ones(9), param, exp_avg, exp_avg_sq, step=2, weight_decay=0.0, factor=torch.tensor(0.0))
    assert param.eq(1).all()
    assert exp_avg.eq(0).all()
    assert exp_avg_sq.eq(torch.tensor(0.999)).all()


def tensors(**others: Tensor | None) -> dict[str, Any]:
    """Arguments of a step, some of them others."""
    return {**{name: torch.zeros(6) for name in ("grad", "param", "exp_avg", "exp_avg_sq")}, "step": 1, **others}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "grad dtype": ({"grad": torch.zeros(6).double()}, r"grad is torch\.float64, expected torch\.float32 or .*Convert"),
    "state dtype": (
        {"exp_avg": torch.zeros(6).half()},
        r"exp_avg is torch\.float16, expected torch\.float32\. Convert",
    ),
    "narrow without master": (
        {"param": torch.zeros(6).bfloat16()},
        r"param is torch\.bfloat16, expected torch\.float32 without master\. Pass a float32 master",
    ),
    "wide with master": (
        {"master": torch.zeros(6)},
        r"param is torch\.float32, expected torch\.bfloat16 or torch\.float16 with master\. Convert",
    ),
    "master dtype": (
        {"param": torch.zeros(6).half(), "master": torch.zeros(6).half()},
        r"master is torch\.float16, expected torch\.float32",
    ),
    "length": ({"exp_avg_sq": torch.zeros(5)}, r"exp_avg_sq has shape \(5,\) .* expected contiguous, shape \(6,\)"),
    "two dimensions": ({"grad": torch.zeros(2, 3)}, r"grad has shape \(2, 3\)"),
    "gaps": ({"param": torch.zeros(12)[::2]}, r"param has shape \(6,\) and strides \(2,\).*slice of a flat tensor"),
    "device": ({"exp_avg": torch.zeros(6, device="meta")}, "exp_avg has .* on meta, expected .* on cpu"),
    "factor": ({"factor": torch.zeros(1)}, r"factor is torch\.float32 of shape \(1,\)"),
    "step": ({"step": 0}, "step is 0, expected 1 for the first step"),
    "lr": ({"lr": -0.1}, r"lr is -0\.1, expected 0 or more"),
    "eps": ({"eps": float("nan")}, "eps is nan"),
    "weight decay": ({"weight_decay": -1.0}, r"weight_decay is -1\.0"),
    "betas": ({"betas": (0.9, 1.0)}, r"betas are \(0\.9, 1\.0\), expected two numbers from 0 to below 1"),
}


@both
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_written(update: Update, case: str) -> None:
    others, text = WRONG[case]
    arguments = tensors(**others)
    with pytest.raises(ValueError, match=text):
        update(**arguments)
    assert all(value.eq(0).all() for value in arguments.values() if isinstance(value, Tensor) and not value.is_meta)


def test_the_public_name_chooses_by_device_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    module = sys.modules["dpfuse_kernels.adamw"]
    monkeypatch.setattr(module, "_step_reference", lambda *arguments: called.append(arguments[6].step_size))
    dpfuse_kernels.adamw_step(**tensors(), lr=0.5, betas=(0.0, 0.0))
    monkeypatch.delenv("DPFUSE_KERNELS")
    dpfuse_kernels.adamw_step(**tensors(), lr=0.25, betas=(0.0, 0.0))
    assert called == [0.25]


def test_the_last_program_of_tensors_beyond_31_bits() -> None:
    """Memory is reserved, but only the last pages are ever touched."""
    numel = (1 << 30) + 8
    try:
        grad, param = torch.empty(2, numel, dtype=torch.bfloat16)
        exp_avg, exp_avg_sq, master = torch.empty(3, numel)
    except RuntimeError as error:
        pytest.skip(f"this machine does not reserve {16 * numel} bytes: {error}")
    last = -(-numel // SHAPE.chunk) - 1
    rest = numel - last * SHAPE.chunk
    values = torch.arange(rest).remainder(7).float()
    for tensor in (grad, master):
        tensor[-rest:] = values
    exp_avg[-rest:] = 0
    exp_avg_sq[-rest:] = 0
    wanted = defined(values, values, torch.zeros(rest), torch.zeros(rest), step=1)
    numbers = _numbers(1, 1e-3, (0.9, 0.999), 1e-8, 1e-2, True)
    addresses = [one.data_ptr() for one in (grad, param, exp_avg, exp_avg_sq, master)]
    types = {name: launcher.triton_dtype(torch.bfloat16) for name in ("WIRE", "PARAM")}
    options = {"MASTER": True, "FACTOR": False, "MAXIMIZE": False, "DECOUPLED": True, "COUPLED": False}
    launcher.dispatch(
        _adamw_kernel,
        grad.device,
        1,
        (*addresses, 0, numel, last, *vars(numbers).values()),
        {**types, **options, "CHUNK": SHAPE.chunk},
        SHAPE.warps,
    )
    assert same_bits(master[-rest:], wanted[0])
    assert same_bits(exp_avg[-rest:], wanted[1])
    assert same_bits(exp_avg_sq[-rest:], wanted[2])
    assert same_bits(param[-rest:], rounded(wanted[0], torch.bfloat16, adamw_step))
    assert master[: SHAPE.chunk].eq(0).all(), "an offset of 32 bits would have wrapped round to here"
