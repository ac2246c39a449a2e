"""Asks a process group what it can do, by trying with one number: its class and its name say nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.abilities import Abilities, abilities_of, answers_of, backend_of
from dpfuse.comm.waiting import NO_LIMIT

__all__ = ["ask"]

log = logging.getLogger("dpfuse.group")

BUSY_CYCLES = 20_000_000  # some 10 ms of a GPU
FACTOR = 0.5


def ask(group: dist.ProcessGroup, device: torch.device) -> Abilities:
    """Return what the group can do with tensors on `device`; to be called on all its ranks.

    An ability counts if every rank has found it. The answer is logged, and later calls look it up. On CPUs there is
    nothing to ask.
    """
    answers = answers_of(group)
    if device.type == "cuda" and device.type not in answers:
        found = answers[device.type] = _tried(group, device)
        rank = group.rank()
        log.info("rank %d: the group's back end %s: %s", rank, backend_of(group), found, extra={"rank": rank})
    return abilities_of(group, device)


def _tried(group: dist.ProcessGroup, device: torch.device) -> Abilities:
    size = group.size()
    # The first collective may make connections, which block the host.
    collective.all_reduce(torch.ones(1, device=device), group).wait(NO_LIMIT)
    torch.cuda.synchronize(device)
    found = Abilities(
        on_streams=_waits_on_streams(group, device),
        coalesces=_coalesces(group, device),
        # Switches do not multiply. They are expected to save more than a pass over memory costs.
        multiplies=_gives(FACTOR * size, device, lambda one: collective.all_reduce_multiplied(one, FACTOR, group))
        and not _adds_in_switches(device),
        scatters=_scatters(group, device),
    )
    votes = torch.tensor(found, dtype=torch.float32, device=device)
    collective.all_reduce(votes, group).wait(NO_LIMIT)
    return Abilities(*(vote == size for vote in votes.tolist()))


def _gives(
    expected: float, device: torch.device, start: Callable[[Tensor], dist.Work], result: Tensor | None = None
) -> bool:
    one = torch.ones(1, device=device) if result is None else result
    try:
        start(one).wait(NO_LIMIT)
        return set(one.tolist()) == {expected}
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):  # what back ends raise for what they lack
        return False


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether one call for several sums works, also between the two ends of coalescing, beside another sum."""
    sums = torch.ones(3, device=device)
    first, second, third = sums.split(1)

    def start() -> None:
        collective.all_reduce_coalesced([first, second], 1.0, group)
        collective.all_reduce(third, group)

    return _gives(group.size(), device, lambda _: collective.coalesced(start, device, group), sums)


def _scatters(group: dist.ProcessGroup, device: torch.device) -> bool:
    flat = torch.ones(group.size(), device=device)
    own = flat[group.rank() : group.rank() + 1]
    return _gives(group.size(), device, lambda _: collective.start_reduce_scatter(own, flat, group), own)


def _adds_in_switches(device: torch.device) -> bool:
    """Whether NCCL can let the switches between the devices of one machine add up (NVLS), which it does for plain sums.

    Source: NCCL's environment variable NCCL_NVLS_ENABLE, and the multicast objects of CUDA that NVLS needs.
    """
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return os.environ.get("NCCL_NVLS_ENABLE") != "0" and _SymmetricMemory.has_multicast_support(
            DeviceType.CUDA, device.index or 0
        )
    except (ImportError, AttributeError, RuntimeError):  # a torch without it, or a device without a driver for it
        return False


def _waits_on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the host comes back from a wait while the device still works on what comes before the collective."""
    with torch.cuda.device(device):
        values = torch.ones(1, device=device)
        torch.cuda._sleep(BUSY_CYCLES)
        busy = torch.cuda.current_stream(device).record_event()
        collective.all_reduce(values, group).wait(NO_LIMIT)
        return not busy.query()
