"""`paddle.summary`: prints the layers of a network with their shapes and numbers of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpfuse import get_rank
from dpfuse.paddle.checks import instance
from dpfuse.paddle.mode import network_mode
from dpfuse.paddle.static.input_spec import InputSpec, checked_shape, dtype_of

__all__ = ["summary"]

MB = 1 << 20
HEADINGS = ("Layer (type)", "Input Shape", "Output Shape", "Param #")


def summary(net: nn.Module, input_size: Any = None, dtypes: Any = None, input: Any = None) -> dict[str, int]:
    """Print a table of the layers on rank 0, after a forward without gradients in evaluation mode.

    Args:
        net: the network.
        input_size: the shape of its input, or an InputSpec, or a list of these; None or -1 counts as 1.
        dtypes: the dtype of the input, or a list of dtypes; by default float32, or the spec's dtype.
        input: an input instead of `input_size`, passed to the network unchanged.

    Returns:
        `{"total_params": …, "trainable_params": …}`; a shared parameter counts once.

    Raises:
        TypeError, ValueError: Not exactly one of `input_size` and `input` is given, or a shape or dtype is invalid.

    Example:
        >>> import torch, dpfuse.paddle as paddle
        >>> paddle.summary(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()), (1, 4))
        ------------------------------------------------
        Layer (type)  Input Shape  Output Shape  Param #
        ================================================
          Linear-1       [1, 4]       [1, 2]        10
           ReLU-2        [1, 2]       [1, 2]        0
        ================================================
        Total params: 10
        Trainable params: 10
        Non-trainable params: 0
        Params size (MB): 0.00
        ------------------------------------------------
        {'total_params': 10, 'trainable_params': 10}

    Source: `paddle.summary`.
    """
    instance("net", net, nn.Module)
    if (input_size is None) == (input is None):
        raise ValueError("summary needs either input_size, such as (1, 784), or input, a tensor; got both or neither")
    params = list(net.parameters())
    device = params[0].device if params else torch.device("cpu")
    inputs = [input] if input is not None else _examples(input_size, dtypes, device)
    rows = _rows(net, inputs)
    counts = {
        "total_params": sum(param.numel() for param in params),
        "trainable_params": sum(param.numel() for param in params if param.requires_grad),
    }
    if get_rank() == 0:
        size = sum(param.numel() * param.element_size() for param in params) / MB
        _print(rows, counts, size)
    return counts


def _examples(input_size: Any, dtypes: Any, device: torch.device) -> list[Tensor]:
    several = isinstance(input_size, list) and not all(size is None or isinstance(size, int) for size in input_size)
    sizes = input_size if several else [input_size]
    if not isinstance(dtypes, (list, tuple)):
        dtypes = [dtypes] * len(sizes)
    if len(dtypes) != len(sizes):
        raise ValueError(f"dtypes has {len(dtypes)} entries for {len(sizes)} inputs; expected one for each")
    specs = []
    for size, dtype in zip(sizes, dtypes, strict=True):
        if not isinstance(size, InputSpec):
            size = InputSpec(checked_shape((size,) if isinstance(size, int) else size, "input_size"))
        specs.append((size.shape, size.dtype if dtype is None else dtype_of(dtype, "dtypes")))
    shapes = [([1 if n < 0 else n for n in shape], dtype) for shape, dtype in specs]
    return [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in shapes]


def _rows(net: nn.Module, inputs: Sequence[Any]) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    counted: set[int] = set()

    def record(layer: nn.Module, taken: Any, given: Any) -> None:
        own = [param for param in layer.parameters() if id(param) not in counted]
        counted.update(map(id, own))
        name = f"{type(layer).__name__}-{len(rows) + 1}"
        rows.append((name, _shapes(taken), _shapes(given), f"{sum(param.numel() for param in own):,}"))

    # A module that owns parameters is shown even if it has children.
    layers = [
        m for m in net.modules() if not any(m.children()) or any(each is not None for each in m._parameters.values())
    ]
    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        with network_mode(net, training=False), torch.no_grad():
            net(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def _shapes(value: Any) -> str:
    return ", ".join(str(list(getattr(leaf, "shape", ()))) for leaf in tree_leaves(value))


def _print(rows: Sequence[tuple[str, str, str, str]], counts: Mapping[str, int], size: float) -> None:
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    lines = [
        "  ".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) for row in [HEADINGS, *rows]
    ]
    length = max(map(len, lines))
    frozen = counts["total_params"] - counts["trainable_params"]
    print("-" * length, lines[0].rstrip(), "=" * length, *(line.rstrip() for line in lines[1:]), "=" * length, sep="\n")
    print(f"Total params: {counts['total_params']:,}", f"Trainable params: {counts['trainable_params']:,}", sep="\n")
    print(f"Non-trainable params: {frozen:,}", f"Params size (MB): {size:.2f}", "-" * length, sep="\n", flush=True)
