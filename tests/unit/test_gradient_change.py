"""Is a gradient that was unscaled, clipped or masked told from one that was averaged, or changed by an addition?"""

from __future__ import annotations

import pytest
import torch

from dpfuse.engine.gradient_change import Change, change_of

GENERATOR = torch.Generator().manual_seed(0)
BEFORE, OF_ANOTHER_RANK, WEIGHTS = torch.randn(3, 64, generator=GENERATOR)
SECOND = 1.01 * float(BEFORE.abs().sort().values[-2])
MASK = torch.randn(64, generator=GENERATOR) > 0
CHANGES = {
    "unscaled": (lambda grad, _: grad / 65536, Change.RESCALED),
    "clipped by norm": (lambda grad, _: grad * 0.37, Change.RESCALED),
    "clipped by value": (lambda grad, _: grad.clamp(-0.5, 0.5), Change.RESCALED),
    "unscaled, and clipped by norm": (lambda grad, _: grad / 1024 * 0.37, Change.RESCALED),
    "unscaled, and clipped by value": (lambda grad, _: (grad / 1024).clamp(-1e-3, 1e-3), Change.RESCALED),
    "multiplied by hand": (lambda grad, _: grad * 3, Change.RESCALED),
    "masked": (lambda grad, _: grad * MASK, Change.KEPT),
    "masked, and scaled": (lambda grad, _: grad * MASK / 7, Change.RESCALED),
    "noise": (lambda grad, _: grad + 0.01 * torch.linspace(-1, 1, 64), Change.OTHER),
    "averaged by hand": (lambda grad, other: (grad + other) / 2, Change.OTHER),
    "weight decay": (lambda grad, _: grad + 0.01 * WEIGHTS, Change.OTHER),
    "gradient of another rank": (lambda _, other: other, Change.OTHER),
}
AT_THE_EDGE = {
    "nothing": (lambda grad, _: grad.clone(), Change.KEPT),
    "only the largest one was cut": (lambda grad, _: grad.clamp(-SECOND, SECOND), Change.KEPT),
    "unscaled, and only the largest one was cut": (
        lambda grad, _: (grad / 4).clamp(-SECOND / 4, SECOND / 4),
        Change.RESCALED,
    ),
    "all were cut": (lambda grad, _: grad.clamp(-1e-4, 1e-4), Change.RESCALED),
    "unscaled, and all were cut": (lambda grad, _: (grad / 16).clamp(-1e-5, 1e-5), Change.RESCALED),
    "scaled up, and all were cut": (lambda grad, _: (grad * 4096).clamp(-10, 10), Change.RESCALED),
    "clipped by value, and then by norm": (lambda grad, _: grad.clamp(-0.5, 0.5) * 0.37, Change.RESCALED),
    "masked, and clipped by value": (lambda grad, _: (grad * MASK).clamp(-0.5, 0.5), Change.RESCALED),
    "centralised": (lambda grad, _: grad - grad.mean(), Change.OTHER),
    "added up by hand": (lambda grad, other: grad + other, Change.OTHER),
    "averaged by hand, and clipped by value": (lambda grad, other: ((grad + other) / 2).clamp(-1, 1), Change.OTHER),
    "noise, and clipped by value": (lambda grad, other: (grad + 0.1 * other).clamp(-0.5, 0.5), Change.OTHER),
    "sizes": (lambda grad, _: grad.abs(), Change.OTHER),
    "turned": (lambda grad, _: -grad, Change.OTHER),
    "zeroed": (lambda grad, _: grad * 0, Change.OTHER),
    "not finite": (lambda grad, _: grad * torch.inf, Change.OTHER),
    "not a number": (lambda grad, _: grad * torch.nan, Change.OTHER),
    "of another shape": (lambda grad, _: grad[:10], Change.OTHER),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", [*CHANGES, *AT_THE_EDGE])
def test_what_has_become_of_a_gradient(name, dtype):
    change, expected = (CHANGES | AT_THE_EDGE)[name]
    if dtype.is_complex:
        if "value" in name or "cut" in name or name == "sizes":
            pytest.skip("complex numbers have no order")
        before, other = (torch.complex(each, each.flip(0)) for each in (BEFORE, OF_ANOTHER_RANK))
    else:
        before, other = BEFORE.to(dtype), OF_ANOTHER_RANK.to(dtype)
    now = change(before, other)
    assert change_of(before, now.to(dtype)) is expected


def test_few_values_or_equal_ones_tell_nothing():
    """As gradients of a sum often are equal: a mean over ranks scales them, too."""
    for before in (torch.ones(8), torch.ones(1), torch.tensor([1.0, 2.0, 0.0])):
        assert change_of(before, before * 1.5) is Change.OTHER


def test_values_of_another_dtype_are_not_compared():
    assert change_of(BEFORE, BEFORE.double()) is Change.OTHER


def test_a_value_where_there_was_none_is_no_factor():
    before = torch.tensor([1.0, 2.0, 3.0, 0.0])
    assert change_of(before, torch.tensor([0.5, 1.0, 1.5, 0.1])) is Change.OTHER


def test_16_bits_round_a_factor_twice_and_lose_the_smallest_values():
    for dtype in (torch.float16, torch.bfloat16):
        before = (BEFORE * 2.0 ** -torch.arange(64).float().div(4)).to(dtype)
        assert change_of(before, before.mul(1 / 3).mul(0.7)) is Change.RESCALED
