"""What is known of a program's variables without running it. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

__all__ = ["REQUIRED", "Feed", "Objective", "OptimizerFactory", "VariableInfo", "VariableKind"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

REQUIRED = object()  # default of a feed that has none


class VariableKind(Enum):
    """What a variable of a program is."""

    FEED = "feed"  # given to each run
    PARAMETER = "parameter"  # lives in a scope, may be trained
    BUFFER = "buffer"  # lives in a scope
    INTERMEDIATE = "intermediate"  # computed by a run


@dataclass(frozen=True)
class VariableInfo:
    """What is known of a variable without running its program."""

    name: str
    kind: VariableKind
    shape: tuple[int | None, ...] | None = None  # None: not known
    dtype: torch.dtype | None = None

    @property
    def persistable(self) -> bool:
        """Does it live in a scope?"""
        return self.kind in (VariableKind.PARAMETER, VariableKind.BUFFER)


@dataclass(frozen=True)
class Feed:
    """One input of a program; None stands for what was not declared."""

    name: str
    shape: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None
    default: Any = REQUIRED

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


@dataclass(frozen=True, eq=False)
class Objective:
    """What a program minimises, and how: `optimizer` makes one for the parameters of each replica."""

    loss: str
    optimizer: OptimizerFactory
