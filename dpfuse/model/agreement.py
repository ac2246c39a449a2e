"""All ranks begin with the same model: compared as text, then rank 0's values. Knows no bucket and no hook."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import collective, votes
from dpfuse.comm.ability_trials import ask
from dpfuse.comm.flat_broadcast import broadcast_flat
from dpfuse.engine.averaging import Wire
from dpfuse.engine.inner_tensors import inner_tensors, memory_of
from dpfuse.engine.plan import BucketPlan
from dpfuse.errors import DPFuseError
from dpfuse.liveness.start import start_heartbeat
from dpfuse.model.buffers import BufferKind, BufferSync
from dpfuse.model.check import (
    describe_attributes,
    describe_buffers,
    describe_model,
    describe_options,
    named_kinds,
    tensors_of,
)
from dpfuse.model.foreign_tensors import send_foreign
from dpfuse.model.options import SyncOptions
from dpfuse.model.shared_memory import describe_shared, refuse_common

__all__ = ["agree_on_model", "prepare_group", "send_tensors"]


def agree_on_model(
    module: nn.Module, plan: BucketPlan, options: SyncOptions, group: dist.ProcessGroup
) -> Mapping[str, BufferKind]:
    """Compare module and options over the ranks, start their heartbeat, and send rank 0's parameters and buffers.

    Returns:
        The buffers that are of the same kind on all ranks, by name. Only those that are not saved may be of others.

    Raises:
        DPFuseError: on every rank, naming rank and first difference, what the back end lacks, or a parameter whose
            memory ranks share.
    """
    what = "the wrapped module"
    try:
        params, buffers = tensors_of(module, options)
        named = named_kinds(params, buffers if options.send_buffers_at_start else {})
        lines = [*describe_options(options), *describe_model(module, plan, options)]
        lines += describe_buffers(module, options, saved=True)  # the others, such as caches, may differ
        lines += describe_attributes(named)
        shared = describe_shared(params)
    except Exception as error:
        votes.report_failure(error, group, what)
        raise
    remedy = "Build the same model with the same options everywhere."
    none_shared = votes.agree_on_text("\n".join(lines), group, what, remedy, ready=not shared).ready
    device = next(iter(params.values())).device
    common = options.common
    ordered = common["deterministic"] or options.micro_batches is not None
    prepare_group(group, [device], options.wire, ordered, common["stall_timeout"])
    if not none_shared:
        refuse_common(shared, group)
    sync = _settled_buffers(module, options, group)
    sent = {id(sync.found[name]): sync.found[name] for name in sync.agreed}  # once, however often they occur
    send_tensors([*params.values(), *(sent.values() if options.send_buffers_at_start else ())], group)
    send_foreign(named, group)
    return sync.agreed


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


def send_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` with those of rank `source`, in as few broadcasts as they have devices.

    Those without memory are left to `send_foreign`.
    """
    memories = [memory_of(each) for tensor in tensors for each in (inner_tensors(tensor) or {}).values()]
    with torch.no_grad():
        for device in dict.fromkeys(memory.device for memory in memories):  # in the same order on every rank
            broadcast_flat([memory for memory in memories if memory.device == device], group, source)
