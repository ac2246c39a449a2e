"""Which rank this process is."""

from __future__ import annotations

import os

import torch.distributed as dist

__all__ = ["RankOfProcess"]


class RankOfProcess:
    """What is known of this process: nothing but its number, until it trains.

    Attributes:
        process: its number. A fork that does not train, such as a worker of a loader, has another one.
        name: in the names of files. It is the rank once the process trains: its compilers inherit the variable RANK.
        number, size: the rank and how many there are, as the process group or the variables say.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.name = f"p{self.process}"
        self.number, self.size = 0, 1

    def trains(self) -> None:
        """Note that this process is a rank, and which one. A rank may be a fork."""
        self.process = os.getpid()
        if dist.is_available() and dist.is_initialized():
            self.number, self.size = dist.get_rank(), dist.get_world_size()
        else:
            self.number, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.name = str(self.number)
