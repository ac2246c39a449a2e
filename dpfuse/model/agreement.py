"""All ranks begin with the same model: compared as text, then rank 0's values. Knows no bucket and no hook."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import collective, votes
from dpfuse.comm.ability_trials import ask
from dpfuse.comm.flat_broadcast import broadcast_flat
from dpfuse.engine.averaging import Wire
from dpfuse.engine.plan import BucketPlan
from dpfuse.errors import DPFuseError
from dpfuse.liveness.start import start_heartbeat
from dpfuse.model.buffers import BufferKind, BufferSync
from dpfuse.model.check import describe_buffers, describe_model, describe_options, tensors_of
from dpfuse.model.options import SyncOptions

__all__ = ["agree_on_model", "prepare_group", "send_tensors"]


def agree_on_model(
    module: nn.Module, plan: BucketPlan, options: SyncOptions, group: dist.ProcessGroup
) -> Mapping[str, BufferKind]:
    """Compare module and options over the ranks, start their heartbeat, and send rank 0's parameters and buffers.

    Returns:
        The buffers that are of the same kind on all ranks, by name. Only those that are not saved may be of others.

    Raises:
        DPFuseError: on every rank, naming rank and first difference, or what the back end lacks.
    """
    lines = [*describe_options(options), *describe_model(module, plan, options)]
    lines += describe_buffers(module, options, saved=True)  # the others, such as caches, may differ
    params, _ = tensors_of(module, options)
    votes.agree_on_text(
        "\n".join(lines), group, "the wrapped module", "Build the same model with the same options everywhere."
    )
    device = next(iter(params.values())).device
    common = options.common
    ordered = common["deterministic"] or options.micro_batches is not None
    prepare_group(group, [device], options.wire, ordered, common["stall_timeout"])
    buffers = _settled_buffers(module, options, group)
    sent = {id(buffers.found[name]): buffers.found[name] for name in buffers.agreed}  # once, however often they occur
    send_tensors([*params.values(), *(sent.values() if options.send_buffers_at_start else ())], group)
    return buffers.agreed


def _settled_buffers(module: nn.Module, options: SyncOptions, group: dist.ProcessGroup) -> BufferSync:
    sync = BufferSync(module, options.ignored, group)
    text = "\n".join(describe_buffers(module, options, saved=False))
    digests = votes.gather_texts(hashlib.sha256(text.encode()).hexdigest()[:32], group)
    if len(set(digests)) > 1 and (refusal := sync.settle(0)) is not None:
        raise DPFuseError(refusal)
    return sync


def prepare_group(
    group: dist.ProcessGroup, devices: Sequence[torch.device], wire: Wire, deterministic: bool, stall_timeout: float
) -> None:
    """Start the heartbeat of a group, and try what it must be able to do; to be called on all its ranks.

    Args:
        group: process group.
        devices: of the gradients.
        wire: how they travel.
        deterministic: whether they are added up in the order of the ranks.
        stall_timeout: seconds; of a heartbeat that starts.

    Raises:
        DPFuseError: the back end lacks what the options need; on every rank.
    """
    start_heartbeat(group, stall_timeout)
    for device in devices:
        ask(group, device)
        if deterministic:
            collective.check_all_to_all(group, device)
        if wire.probe is not None:
            collective.check_all_to_all(group, device, *wire.probe)


def send_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` with those of rank `source`, in as few broadcasts as they have devices."""
    with torch.no_grad():
        for device in dict.fromkeys(tensor.device for tensor in tensors):  # in the same order on every rank
            broadcast_flat([tensor for tensor in tensors if tensor.device == device], group, source)
