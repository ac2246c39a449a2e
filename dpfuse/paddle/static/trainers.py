"""Several processes that train one program, each on its own devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import dpfuse
from dpfuse import DPFuseError
from dpfuse.arguments import integer
from dpfuse.paddle.collectives import broadcast
from dpfuse.paddle.static.replica import Replica

__all__ = ["Trainers"]


class Trainers:
    """The processes of a job. One process needs no process group."""

    def __init__(self, num_trainers: int, trainer_id: int) -> None:
        integer("num_trainers", num_trainers, 1)
        if integer("trainer_id", trainer_id, 0) >= num_trainers:
            raise ValueError(f"got num_trainers={num_trainers} and trainer_id={trainer_id}; expected numbers from 0")
        self.count = num_trainers
        if num_trainers == 1:
            return
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise DPFuseError(
                f"num_trainers={num_trainers} without a process group; expected one that joins the trainers. Call "
                "dpfuse.init_parallel_env() before."
            )
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if (num_trainers, trainer_id) != (world_size, rank):
            raise ValueError(
                f"got num_trainers={num_trainers} and trainer_id={trainer_id} on rank {rank} of {world_size}; expected "
                f"num_trainers={world_size} and trainer_id={rank}"
            )

    def share(self, replica: Replica, device_count: int) -> None:
        """Compare the trainers' programs, and overwrite a replica's variables with those of trainer 0.

        Raises:
            DPFuseError: The trainers have different variables or numbers of devices. Every trainer raises.
        """
        if self.count == 1 or not replica.trainable:
            return
        broadcast(replica.tensors.items(), "the trainers' program", f"devices per trainer: {device_count}")

    def sum_gradients(self, replicas: Sequence[Replica]) -> None:
        """Add up the gradients of all trainers' first replicas, and give the sum to every replica.

        Raises:
            DPFuseError: A trainer has failed, or has other gradients. Every trainer raises.
        """
        if self.count == 1:
            return
        first, *others = replicas
        dpfuse.fused_allreduce_gradients(first.trainable.values(), scale=1.0)
        for replica in others:
            for name, source in first.trainable.items():
                target = replica.trainable[name]
                if source.grad is not None and target.grad is not None:
                    target.grad.copy_(source.grad)

    def report(self, error: Exception) -> None:
        """Report that this trainer failed to the other trainers, which wait in `sum_gradients`. Raise `error`."""
        if self.count > 1:
            dpfuse.fused_allreduce_gradients(_raising(error))


def _raising(error: Exception) -> Iterator[Tensor]:
    raise error
    yield
