"""The optimizers of a trace: their numbers, their steps, and what their own lines say."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim.optimizer import Optimizer

from dpfuse.trace_file import Writer

__all__ = ["TracedOptimizers", "params_of", "settings_of"]


class TracedOptimizers:
    """Those that have stepped, in the order of their first steps.

    Args:
        file: for a line of each.

    Attributes:
        names: of parameters, by id.
    """

    def __init__(self, file: Writer) -> None:
        self.names: dict[int, str] = {}
        self._file = file
        self._stepped: list[ref[Optimizer]] = []
        self._steps: list[int] = []
        self._counts: list[int] = []  # of the parameters in their lines

    def step(self, optimizer: Optimizer) -> tuple[int, int]:
        """Count a step; return the number of the optimizer, and its steps.

        Its line has the names of its parameters. It is written again when their number has changed.
        """
        new = len(self._stepped)
        number = next((number for number, one in enumerate(self._stepped) if one() is optimizer), new)
        if number == new:
            self._stepped.append(ref(optimizer))
            self._steps.append(0)
            self._counts.append(-1)
        params = params_of(optimizer)
        if self._counts[number] != len(params):
            self._counts[number] = len(params)
            names = [self.names.get(id(param), f"parameter {place}") for place, param in enumerate(params)]
            self._file.write("optimizer", {"number": number, "class": type(optimizer).__name__, "names": names})
        self._steps[number] += 1
        return number, self._steps[number]

    def params(self) -> dict[int, list[Tensor]]:
        """Return the parameters of each optimizer that is still there, by its number."""
        found = ((number, one()) for number, one in enumerate(self._stepped))
        return {number: params_of(optimizer) for number, optimizer in found if optimizer is not None}


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers, switches and texts of each group of an optimizer, as JSON values."""
    groups = ({name: _plain(value) for name, value in group.items()} for group in optimizer.param_groups)
    return [
        {
            name: repr(value) if isinstance(value, (float, tuple, list)) else value
            for name, value in group.items()
            if name != "params" and isinstance(value, (float, int, str, tuple, list))
        }
        for group in groups
    ]


def _plain(value: Any) -> Any:
    """Return the number in a tensor of one element, and any other value as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
