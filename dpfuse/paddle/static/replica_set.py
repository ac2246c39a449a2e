"""The replicas of one program, one per device, and how their variables are kept equal. Runs nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.replica import Replica
from dpfuse.paddle.static.scope import Scope

__all__ = ["ReplicaSet"]

_State = tuple[int, int, bool]  # writes so far, address, requires_grad


class ReplicaSet:
    """One replica per device; that of the first device lives in the user's scope.

    Args:
        program: what the replicas run.
        scopes: one per device.
        devices: the devices; the same one may occur several times.

    Attributes:
        replicas: by device.
        scopes: by device.
    """

    def __init__(self, program: Program, scopes: Sequence[Scope], devices: Sequence[torch.device]) -> None:
        self.scopes = list(scopes)
        self.replicas = [
            Replica(program, scope, device, index)
            for index, (scope, device) in enumerate(zip(scopes, devices, strict=True))
        ]
        self._seen: dict[str, _State] = {}

    def is_changed(self) -> bool:
        """Did somebody else write into the first device's variables since the last `distribute` or `mark`?

        Writing through `tensor.data` cannot be noticed.
        """
        return self._seen != self._state()

    def mark(self) -> None:
        """Take the state after a run of these replicas as the one to compare with."""
        self._seen = self._state()

    @torch.no_grad()
    def distribute(self) -> None:
        """Give all devices what changed on the first one since then: variables, and its optimizer's state."""
        first, *others = self.replicas
        changed = [name for name, state in self._state().items() if state != self._seen.get(name)]
        for replica in others:
            for name in changed:
                replica.tensors[name].copy_(first.tensors[name])
                replica.tensors[name].requires_grad_(first.tensors[name].requires_grad)
            trained = not first.trainable.keys().isdisjoint(changed)
            if trained and first.optimizer is not None and replica.optimizer is not None:
                # Loading keeps tensors that are on the right device as they are, and replicas must not share them.
                replica.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        self.mark()

    def _state(self) -> dict[str, _State]:
        return {
            name: (tensor._version, tensor.data_ptr(), tensor.requires_grad)
            for name, tensor in self.replicas[0].tensors.items()
        }
