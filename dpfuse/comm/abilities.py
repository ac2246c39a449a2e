"""What process groups can do, as far as they were asked. Calls no collective; `comm/ability_trials.py` does."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["Abilities", "abilities_of", "answers_of", "backend_of"]


class Abilities(NamedTuple):
    """What a group can do with tensors on one type of device. What it cannot do is done in another way."""

    on_streams: bool = False  # waiting for a collective blocks only the current stream, never the host
    coalesces: bool = False  # several collectives start as one
    multiplies: bool = False  # an all-reduce can multiply by a factor while it reads
    scatters: bool = False  # each rank can get its part of a sum in its place, without memory for what others send

    def __str__(self) -> str:
        return ", ".join(name.replace("_", " ") for name, can in self._asdict().items() if can) or "nothing special"


NOTHING = Abilities()
_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, Abilities]] = WeakKeyDictionary()


def abilities_of(group: dist.ProcessGroup, device: torch.device) -> Abilities:
    """Return what the group can do with tensors on `device`; nothing if it was not asked."""
    return _known.get(group, {}).get(device.type, NOTHING)


def answers_of(group: dist.ProcessGroup) -> dict[str, Abilities]:
    """Return what was found out, by the type of the device; to be filled. All ranks of the group have the same."""
    return _known.setdefault(group, {})


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of the group's back end, also of a group that `torch.distributed` does not know."""
    try:
        return str(dist.get_backend(group))
    except (RuntimeError, ValueError, AssertionError):
        return str(group.name())
