"""The replicas of one program, one per device. Keeps their variables equal; runs nothing."""

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
    """One replica and one scope per device; a device may occur twice. The first replica is in the user's scope."""

    def __init__(self, program: Program, scopes: Sequence[Scope], devices: Sequence[torch.device]) -> None:
        self.scopes = list(scopes)
        self.replicas = [
            Replica(program, scope, device, index)
            for index, (scope, device) in enumerate(zip(scopes, devices, strict=True))
        ]
        self._seen: dict[str, _State] = {}

    def is_changed(self) -> bool:
        """Whether the first device's variables were written since the last `distribute` or `mark`.

        A write to `tensor.data` is not detected.
        """
        return self._seen != self._state()

    def mark(self) -> None:
        """Store the present state for the next comparison."""
        self._seen = self._state()

    @torch.no_grad()
    def distribute(self) -> None:
        """Copy changed variables and the optimizer's state from the first device to all devices."""
        first, *others = self.replicas
        changed = [name for name, state in self._state().items() if state != self._seen.get(name)]
        for replica in others:
            for name in changed:
                replica.tensors[name].copy_(first.tensors[name])
                replica.tensors[name].requires_grad_(first.tensors[name].requires_grad)
            trained = not first.trainable.keys().isdisjoint(changed)
            if trained and first.optimizer is not None and replica.optimizer is not None:
                # Loading does not copy tensors that are on the right device, and replicas must not share them.
                replica.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        self.mark()

    def _state(self) -> dict[str, _State]:
        return {
            name: (tensor._version, tensor.data_ptr(), tensor.requires_grad)
            for name, tensor in self.replicas[0].tensors.items()
        }
