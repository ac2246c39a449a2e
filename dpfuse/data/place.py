"""Which of how many ranks this is: what a sampler deals by."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dpfuse.arguments import integer
from dpfuse.job import get_rank, get_world_size

__all__ = ["Place"]


class Place:
    """This rank's number and the number of ranks: as given, or where that is None from the process group.

    Raises:
        TypeError, ValueError: an argument is no such number.
    """

    def __init__(self, num_replicas: int | None, rank: int | None) -> None:
        self._given = num_replicas, rank
        self._last = self._read()

    def now(self) -> tuple[int, int]:
        """Return the number of ranks and the own one. A worker that has no group keeps what its rank has found.

        Raises:
            ValueError: the group that was made since has too few ranks.
        """
        if dist.is_initialized():
            self._last = self._read()
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        self.now()
        return self.__dict__

    def _read(self) -> tuple[int, int]:
        num_replicas, rank = self._given
        replicas = get_world_size() if num_replicas is None else integer("num_replicas", num_replicas, 1)
        own = get_rank() if rank is None else integer("rank", rank, 0)
        if own >= replicas:
            raise ValueError(
                f"rank must be below num_replicas={replicas}, got {own}; give both, or neither and a process group"
            )
        return replicas, own
