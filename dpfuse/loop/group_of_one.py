"""The rule of DPF-L09: a model of a larger job is wrapped with a group of one rank."""

from __future__ import annotations

import torch.distributed as dist

from dpfuse.findings import ALONE, findings

__all__ = ["tell_of_group"]


def tell_of_group(group: dist.ProcessGroup) -> None:
    """Log that this group has one rank, though the job has more.

    A dimension of a device mesh may have one rank, as where a model is only divided: nothing is said of such a group.

    Args:
        group: over which gradients are averaged.
    """
    if group.size() > 1 or not dist.is_initialized() or str(getattr(group, "group_desc", "")).startswith("mesh"):
        return
    ranks = dist.get_world_size()
    if ranks > 1:
        findings.note(
            ALONE,
            dist.get_rank(),
            f"rank {dist.get_rank()}: a model was wrapped with a group of one rank, and the job has {ranks}. Its "
            "gradients are not averaged. Expected a group of several ranks. Leave the group out for all ranks of the "
            "job, or call dist.new_group() with the ranks that train together.",
        )
