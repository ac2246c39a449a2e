"""The norm of the gradients of a model with DTensors, and clipping by it. Every rank of their meshes must ask."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.engine.local_part import LocalPart, local_of
from dpfuse.gradients.norm import norms_by_parameter

__all__ = ["DividedGradients"]


class DividedGradients:
    """The gradients of some parameters, in the same order on all ranks, where parts of some are on other ranks."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._parts: dict[str, Tensor] = {name: local_of(param) for name, param in named}

    @torch.no_grad()
    def norms(self, order: float) -> dict[str, Tensor]:
        """Return the norm of that order of each whole gradient there is, by the name of its parameter.

        Raises:
            ValueError: the order is not above 0.
        """
        if not order > 0:
            raise ValueError(
                f"norm_type must be above 0 where parameters are DTensors, got {order}: other norms of a parameter are "
                "not the sum of those of its parts. Pass 2.0 or math.inf."
            )
        found = norms_by_parameter(((name, part) for name, part in self._parts.items() if part.numel()), order)
        groups: dict[Any, list[str]] = {}
        for name, part in self._parts.items():
            if dims := _divided_dims(part):
                groups.setdefault((part.whole.device_mesh, dims), []).append(name)  # type: ignore[attr-defined]
        for (mesh, dims), names in groups.items():
            device = self._parts[names[0]].device
            zero = torch.zeros((), dtype=torch.float64, device=device)
            row = torch.stack([found[name].double() if name in found else zero for name in names])
            for dim in dims:
                rows = collective.all_gather(row, mesh.get_group(dim))
                row = torch.linalg.vector_norm(torch.stack(rows), order, dim=0)
            for name, norm in zip(names, row.unbind(), strict=True):
                if (grad := self._parts[name].grad) is not None:
                    found[name] = norm.to(torch.promote_types(grad.dtype.to_real(), torch.float32))
        return {name: found[name] for name in self._parts if name in found}

    @torch.no_grad()
    def norm(self, order: float) -> Tensor:
        """As `Measurable.norm`."""
        norms = [*self.norms(order).values()]
        if not norms:
            return torch.zeros((), device="cpu")
        kind = reduce(torch.promote_types, (norm.dtype for norm in norms), torch.float32)
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]), order)
        return total.to(kind)

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """As `Measurable.multiply`."""
        for part in self._parts.values():
            if (grad := part.grad) is not None:
                grad.mul_(factor)


def _divided_dims(part: Tensor) -> tuple[int, ...]:
    """Return the dimensions of the mesh of a DTensor along which the ranks have different parts of it."""
    if type(part) is not LocalPart:
        return ()
    return tuple(dim for dim, placement in enumerate(part.whole.placements) if not placement.is_replicate())
