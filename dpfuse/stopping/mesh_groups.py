"""The groups of a mesh stop together: what one has heard of a wish, the others read in the store of the job.

The report of a backward tells the ranks of one group. The ranks of the other groups take part in other collectives of
each step, such as those of tensor parallelism. So they find in the next step what a group has written before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from dpfuse.comm import votes
from dpfuse.engine.torch_private import default_store, ranks_of_root
from dpfuse.stopping.wish import StopReason, wish

__all__ = ["MeshGroups", "groups_around"]

DELAY = 1  # averaged backwards between the one in which a group hears, and the one after which all groups stop
# Where the host reads a report one backward later, another group finds a wish up to three backwards later. It asks its
# own ranks in that one, and they hear of it in the next.
LATE_DELAY = 4


class MeshGroups:
    """The groups of a mesh that average the same wrapper, each over other ranks.

    Args:
        ranks: those of the mesh, in its order.
        group: the one of this rank.
        number: of the wrapper, among those of its group.
        late: whether the host reads a report one backward later, as on a GPU.

    Attributes:
        delay: so many averaged backwards after a group has heard of a wish, all groups stop.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup, number: int, *, late: bool) -> None:
        self.delay = LATE_DELAY if late else DELAY
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        # What all groups have in common, and no group along another dimension has.
        places = [ranks.index(rank) for rank in self._ranks]
        shape = json.dumps([list(ranks), [place - places[0] for place in places]])
        self._name = f"dpfuse_stop/{hashlib.sha256(shape.encode()).hexdigest()[:16]}/{number}"
        self._store = default_store()

    @property
    def _key(self) -> str:
        return f"{self._name}/{wish.forgotten}"

    def have_heard(self) -> bool:
        """Whether a group has written that it has heard of a wish. Waits for the store, but for no rank."""
        try:
            return bool(self._store.check([self._key]))
        except dist.DistError:  # the process that serves it has ended; the heartbeat tells which rank that was
            return False

    def agree(self, reason: StopReason | None, step: int) -> tuple[StopReason | None, int]:
        """Return why all groups stop, if they do, and after how many more averaged backwards.

        A collective of the ranks of this group, of which only the first one uses the store.

        Args:
            reason: why this group stops, if one of its own ranks has asked.
            step: the number of this averaged backward.
        """
        lines = self._settle(reason, step) if self._group.rank() == 0 else []
        lines = votes.share_lines(lines, self._group)
        if not lines:
            return None, 0
        more, ranks, cause, text = lines
        return StopReason(tuple(json.loads(ranks)), cause, text), int(more)

    def _settle(self, reason: StopReason | None, step: int) -> list[str]:
        """Return what the first group has written that has heard, or write it: how many backwards, and the reason."""
        own = ""
        if reason is not None:
            ranks = json.dumps([self._ranks[rank] for rank in reason.ranks])
            own = json.dumps([step + self.delay, ranks, reason.cause, reason.text])
        try:
            if own:
                said = self._store.compare_set(self._key, "", own)
            else:
                said = self._store.get(self._key) if self.have_heard() else b""
        except dist.DistError:
            said = own.encode()  # this group stops as if there were no other
        if not said:
            return []
        last, *why = json.loads(said)
        # Where a program does not keep the steps of its groups together, each group stops once it has heard.
        more = last - step if 0 <= last - step <= 2 * self.delay else 0
        return [str(more), *why]


def groups_around(group: dist.ProcessGroup, meshes: Iterable[object], number: int, *, late: bool) -> MeshGroups | None:
    """Return the groups of the first mesh that has more ranks than this group; None if there is none.

    Args:
        group: the ranks that average the gradients of the wrapper.
        meshes: DeviceMeshes of which this group may be a dimension. The mesh that each was sliced from counts.
        number: of the wrapper, among those of its group.
        late: whether the host reads a report one backward later, as on a GPU.
    """
    if late and group.size() == 1:  # its host waits for no report, so it may be any number of backwards ahead
        return None
    for mesh in meshes:
        ranks = ranks_of_root(mesh)
        if set(dist.get_process_group_ranks(group)) < set(ranks):
            return MeshGroups(ranks, group, number, late=late)
    return None
