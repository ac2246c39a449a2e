"""May the gradients of a DTensor be averaged over a group? Each rank averages what it has of it. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.local_part import LocalPart, is_divided
from dpfuse.exclusions import refuse

if TYPE_CHECKING:
    from dpfuse.model.options import SyncOptions

__all__ = ["check_divided", "words_of_division"]


def check_divided(named: Mapping[str, Tensor], options: SyncOptions, group: dist.ProcessGroup | None) -> None:
    """Check the DTensors among the parameters and buffers of a module, each given as the part of this rank.

    Raises:
        ValueError: a DTensor cannot be averaged, or an option has no meaning beside it.
    """
    for name, part in named.items():
        if type(part) is LocalPart:
            _check(name, part, group)
            refuse("DTensor", f"{name!r} is a DTensor, and the module was wrapped with", options.in_use, ValueError)


def _check(name: str, part: LocalPart, group: dist.ProcessGroup | None) -> None:
    mesh, placements = part.whole.device_mesh, part.whole.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{name!r} is a DTensor with placements {placements}, which are sums that are not added up; expected each "
            "dimension to be Shard or Replicate. Call redistribute() on it before wrapping."
        )
    if group is None:
        return
    ranks = dist.get_process_group_ranks(group)
    shared = sorted(set(ranks).intersection(mesh.mesh.flatten().tolist()))
    if len(shared) > 1:
        raise ValueError(
            f"{name!r} is a DTensor over the mesh {mesh}, and the ranks {shared} of that mesh are in the group of the "
            f"wrapper, which has the ranks {ranks}; expected a mesh of other ranks, and this one. Average over another "
            'dimension of the mesh, such as device_mesh=mesh["dp"] beside mesh["tp"]; FSDP averages its own parameters.'
        )


def words_of_division(param: object) -> str:
    """Return what the ranks of a group must have in common of a DTensor; "" for other tensors."""
    if not is_divided(param):
        return ""
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    placements, shape = param.placements, tuple(param.shape)  # type: ignore[attr-defined]
    return f" part {coordinate} in a mesh of {tuple(mesh.shape)} with placements {placements} of shape {shape}"
