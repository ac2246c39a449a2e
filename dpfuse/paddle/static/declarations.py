"""Descriptions of a program's variables, known without a run. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

__all__ = ["REQUIRED", "Feed", "Objective", "OptimizerFactory", "VariableInfo", "VariableKind"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

REQUIRED = object()  # stands for the default of a feed without default


class VariableKind(Enum):
    """The kind of a program's variable."""

    FEED = "feed"  # given to each run
    PARAMETER = "parameter"  # lives in a scope, may be trained
    BUFFER = "buffer"  # lives in a scope
    INTERMEDIATE = "intermediate"  # computed by a run


@dataclass(frozen=True)
class VariableInfo:
    """Description of a variable."""

    name: str
    kind: VariableKind
    shape: tuple[int | None, ...] | None = None  # None: unknown
    dtype: torch.dtype | None = None

    @property
    def persistable(self) -> bool:
        """Whether the variable lives in a scope."""
        return self.kind in (VariableKind.PARAMETER, VariableKind.BUFFER)


@dataclass(frozen=True)
class Feed:
    """One input of a program. None means not declared."""

    name: str
    shape: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None
    default: Any = REQUIRED

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss that a program minimises. `optimizer` makes an optimizer for the parameters of each replica."""

    loss: str
    optimizer: OptimizerFactory
