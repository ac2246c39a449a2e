"""`multiply_each`: products of single tensors, rounded once, also where the factor lies on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpfuse_kernels.multiply import multiply_each

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix": lambda values: values,
    "columns": lambda values: values[:, ::2],
    "scalar": lambda values: values[1, 2],
    "empty": lambda values: values[:0],
    "sparse": lambda values: values.to_sparse()._values(),
}


class Operands(TorchDispatchMode):
    """Keeps the tensors that operations get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append([one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, Tensor)])
        return function(*args, **(kwargs or {}))


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_rounded_once_and_no_scalar_on_the_device_is_beside_16_bits(dtype, shape, as_tensor):
    factor = 1 + 1 / 257  # 16 bits cannot hold it
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = [SHAPES[shape](values.clone()), SHAPES[shape](values + 1)]
    wide = torch.promote_types(dtype, torch.float32)
    given = torch.tensor(factor) if as_tensor else factor
    expected = [(one.to(wide) * given).to(dtype) for one in tensors]
    with Operands() as watch:
        multiply_each(tensors, given)
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
    for operands in watch.seen:
        scalars = [one for one in operands if one.dtype == torch.float32 and not one.dim()]
        assert not (scalars and any(one.dtype.itemsize == 2 for one in operands))


def test_there_may_be_nothing():
    multiply_each([], torch.tensor(2.0))
    multiply_each([], 2.0)
