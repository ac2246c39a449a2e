"""Asks the rule of DPF-L09 where a model is wrapped."""

from __future__ import annotations

import torch.distributed as dist

from dpfuse.findings import findings
from dpfuse.rules import l09_group_of_one
from dpfuse.rules.codes import ALONE

__all__ = ["tell_of_group"]


def tell_of_group(group: dist.ProcessGroup) -> None:
    """Log that this group, over which gradients are averaged, has one rank, though the job has more."""
    if not dist.is_initialized():
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_mesh = str(getattr(group, "group_desc", "")).startswith("mesh")
    if l09_group_of_one.is_alone(group.size(), ranks, is_mesh=is_mesh):
        findings.note(ALONE, rank, l09_group_of_one.text_of(rank, ranks))
