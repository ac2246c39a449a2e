"""Tensors without memory that can be found: ranks compare them, and send what differs by operations of its class.

Most wrapper classes show their tensors, and need nothing of this. Knows no module and no bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective, votes
from dpfuse.comm.flat_broadcast import broadcast_flat
from dpfuse.engine.inner_tensors import has_memory, inner_tensors, memories_of, memory_of, readable_parts
from dpfuse.engine.tensor_hash import joined
from dpfuse.errors import DPFuseError
from dpfuse.model.check import bits_of, hashes_of_attributes, memory_facts

__all__ = ["send_foreign"]

UNKNOWN = -1  # instead of a hash
WAY_OUT = (
    "Give each rank the same values before, or let the class have __tensor_flatten__(), or detach, view, cat and copy_."
)
log = logging.getLogger("dpfuse.weights")


@torch.no_grad()
def send_foreign(named: Mapping[str, Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite those of these tensors that have no memory, and differ, with those of rank `source`.

    To be called on every rank.

    Raises:
        DPFuseError: an operation has failed on some ranks only; on every rank.
    """
    foreign = {
        f"{name}, a {type(tensor).__qualname__},": tensor
        for name, tensor in named.items()
        if inner_tensors(tensor) is None
    }
    if not foreign:
        return
    device = collective.group_device(group)
    own = torch.tensor([_state_of(tensor) for tensor in foreign.values()], device=device)
    states = torch.stack(collective.all_gather(own, group)).tolist()
    for (what, tensor), found in zip(foreign.items(), zip(*states, strict=True), strict=True):
        if set(found) == {UNKNOWN}:
            if group.rank() == source:
                log.warning("%s was neither sent to the other ranks nor compared. %s", what, WAY_OUT)
        elif len(set(found)) > 1:
            _send(what, tensor, group, source)


def _send(what: str, tensor: Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Let all ranks write the values of one, also that one: a class may round what is written."""
    values, reason = None, ""
    try:
        values = _values_of(tensor)
    except Exception as error:  # whatever a class raises
        reason = f"{type(error).__name__}: {error}"
    readable = torch.tensor([values is not None], device=collective.group_device(group))
    if not any(bool(each) for each in collective.all_gather(readable, group)):
        inside = memories_of(tensor)
        facts = "\n".join(f"{path} {memory_facts(memory)}" for path, memory in inside.items())
        votes.agree_on_text(facts, group, f"what {what} has in its attributes", WAY_OUT)
        broadcast_flat([*inside.values()], group, source)
        if not inside and group.rank() == source:
            log.warning(
                "%s differs between ranks and cannot be sent: %s. Each rank keeps its own. %s", what, reason, WAY_OUT
            )
        return
    wire = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)

    def stage() -> None:
        if values is None:
            raise DPFuseError(f"{what} differs between ranks and cannot be read: {reason}. {WAY_OUT}")
        wire.copy_(values)

    def write() -> None:
        try:
            tensor.detach().copy_(wire.view(tensor.shape))
        except Exception as error:
            raise DPFuseError(f"{what} cannot be written: {type(error).__name__}: {error}. {WAY_OUT}") from error

    votes.agree_on_success(stage, group, "sending the model")
    broadcast_flat([wire], group, source)
    votes.agree_on_success(write, group, "sending the model")


def _values_of(tensor: Tensor) -> Tensor:
    """Return the elements, [elements], by the operations with which torch's class reads them."""
    flat = torch.cat([tensor.detach().view(-1)])
    if not has_memory(flat):
        raise TypeError(f"cat() returns a {type(flat).__qualname__} without memory")
    return memory_of(flat)


def _state_of(tensor: Tensor) -> int:
    """Return a hash of what is known of the values, below 2**32; `UNKNOWN` if that is nothing."""
    with suppress(Exception):  # whatever a class raises: then the ranks do not have the same hash, or none
        hashes = [*hashes_of_attributes(tensor).values()]
        hashes = hashes or [bits_of(each) for each in readable_parts(tensor) or [_values_of(tensor)]]
        return int(joined(hashes))
    return UNKNOWN
