"""The only file that calls a collective. Knows flat tensors and process groups, no parameter and no plan.

A function that starts a collective returns its work, which must be waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from dpfuse.comm.abilities import abilities_of
from dpfuse.comm.failed import mark
from dpfuse.comm.waiting import NO_LIMIT, board_of, finish
from dpfuse.errors import DPFuseError

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_max",
    "all_reduce_multiplied",
    "all_reduce_together",
    "broadcast",
    "check_all_to_all",
    "coalesced",
    "direct_all_reduce",
    "group_device",
    "is_exact",
    "is_registered",
    "multiplies",
    "resolve_group",
    "start_all_gather",
    "start_all_gather_into",
    "start_all_gather_parts",
    "start_all_to_all",
    "start_broadcast",
    "start_reduce_scatter",
    "together",
    "use_device_of",
]

Result = TypeVar("Result")
MOST_BROADCASTS = 16  # ranks; beyond, their number costs more than a copy

_SUM = dist.AllreduceOptions()
_MAX = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
_on_cpu: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()  # whether it sends from CPUs
_device_of: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.device] = weakref.WeakKeyDictionary()  # GPUs


def resolve_group(group: Any, name: str = "group") -> dist.ProcessGroup | None:
    """Return the process group to use: `group`, the default group, or None if none was initialised.

    Args:
        group: what a user has passed.
        name: of that argument.

    Raises:
        TypeError: `group` is neither None nor a process group.
        DPFuseError: this rank is not a member of `group`.
    """
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise DPFuseError(
            f"rank {dist.get_rank()} is not a member of the group it was given; expected a group that "
            "contains this rank. Build the module only on the ranks of its group."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be None or a torch.distributed.ProcessGroup, got {type(group).__name__}; "
            "pass what torch.distributed.new_group() returned"
        )
    return group


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch knows the group: it has made it, and not destroyed it since."""
    try:
        dist.get_backend(group)
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which small tensors for `group` must be: the CPU, if the group can send from there.

    Otherwise it is that of the first parameters that were averaged over the group. The current device may be that of
    another rank, since no program must set it.

    A group written in Python does not list its devices. With CUDA it is asked with one number, by the first call on
    each rank.
    """
    if group not in _on_cpu:
        types = {device.type for device in group._device_types}
        _on_cpu[group] = "cpu" in types or not (types or torch.cuda.is_available()) or (not types and _sends_cpu(group))
    if _on_cpu[group]:
        return torch.device("cpu")
    device = _device_of.get(group) or getattr(group, "bound_device_id", None)
    return device or torch.device("cuda", torch.cuda.current_device())


def use_device_of(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Let small tensors for `group` be on the device of the first of these that is on a GPU; to be called early."""
    if group in _device_of or _on_cpu.get(group):
        return
    found = next((each.device for each in tensors if each.is_cuda), None)
    if found is not None:
        _device_of[group] = found


def _sends_cpu(group: dist.ProcessGroup) -> bool:
    one = torch.ones(1, device="cpu")  # also where the program has set another default device
    try:
        all_reduce(one, group).wait(NO_LIMIT)
    except (RuntimeError, NotImplementedError):
        return False
    return one.item() == group.size()


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the SUM of `flat` over the ranks, in place.

    The group is called directly. The checks of `dist.all_reduce` cost as much as a small pack, and a flat
    buffer always passes them.
    """
    try:  # as `_called`, which would cost another call of Python for each bucket
        work = group.allreduce([flat], _SUM)
        return work if type(group) is dist.ProcessGroup else _PythonWork(work, flat)
    except BaseException as error:
        mark(error)
        raise


def direct_all_reduce(device: torch.device, group: dist.ProcessGroup) -> Callable[[Tensor], dist.Work] | None:
    """Return what starts `all_reduce` of a tensor on `device` in less time; None if nothing does.

    On CUDA that is the back end of the group. Torch's dispatcher, through which a group calls it, takes a fifth of the
    host's time of a collective of NCCL. It is used where a mode of the dispatcher watches all operations.
    """
    if device.type != "cuda" or type(group) is not dist.ProcessGroup:
        return None
    backend: Any = group._get_backend(device)
    start: Callable[[list[Tensor], Any], dist.Work] = backend.allreduce
    is_watched = torch._C._len_torch_dispatch_stack

    def all_reduce_directly(flat: Tensor) -> dist.Work:
        if is_watched():
            return all_reduce(flat, group)
        try:
            return start([flat], _SUM)
        except BaseException as error:
            mark(error)
            raise

    return all_reduce_directly


def is_in_order(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the group runs its collectives of tensors on `device` one after the other, on one stream, as NCCL does.

    Then what waits for one of them waits for all before it.
    """
    if device.type != "cuda" or type(group) is not dist.ProcessGroup or not dist.is_nccl_available():
        return False
    return type(group._get_backend(device)) is dist.ProcessGroupNCCL


def all_reduce_together(sums: list[Tensor], scaled: list[Tensor], factor: float, group: dist.ProcessGroup) -> dist.Work:
    """Start the SUM over the ranks of each of `sums`, and of `factor` times each of `scaled`, in place, as one work.

    Args:
        sums: contiguous tensors of one dtype and device, the same on all ranks.
        scaled: more of the same kind; both lists together hold at least one tensor.
        factor: multiplies `scaled` before the sum, in float32 for tensors of 16 bits.
    """
    first = (*scaled, *sums)[0]
    abilities = abilities_of(group, first.device)
    if factor == 1.0 or group.size() == 1 or not multiplies(first.dtype, first.device, group):
        _multiply(scaled, factor)
        sums, scaled = [*scaled, *sums], []
    if abilities.coalesces and not (sums and scaled) and len(sums) + len(scaled) > 1:
        return all_reduce_coalesced(scaled or sums, factor if scaled else 1.0, group)
    kinds = [(tensors, by) for tensors, by in ((scaled, factor), (sums, 1.0)) if tensors]

    def start() -> Iterator[dist.Work]:
        for tensors, by in kinds:
            if abilities.coalesces and len(tensors) > 1:
                yield all_reduce_coalesced(tensors, by, group)
            elif by != 1.0:
                yield from (all_reduce_multiplied(one, by, group) for one in tensors)
            else:
                yield from (all_reduce(one, group) for one in tensors)

    # Two kinds of sums are two calls, and one launch all the same.
    if abilities.coalesces and len(kinds) > 1:
        return coalesced(lambda: together(start()), first.device, group)
    return together(start())


def multiplies(dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether an all-reduce of the group multiplies tensors like these while it reads them, without a pass over memory.

    NCCL does. In 16 bits it would round the factor, too.
    """
    return abilities_of(group, device).multiplies and dtype in (torch.float32, torch.float64)


def all_reduce_multiplied(flat: Tensor, factor: float, group: dist.ProcessGroup) -> dist.Work:
    """Start the SUM of `factor` times `flat` over the ranks, in place, where the group can multiply."""
    options = dist.AllreduceOptions()
    options.reduceOp = _times(factor)
    return _called(group.allreduce, [flat], options)


def all_reduce_coalesced(tensors: list[Tensor], factor: float, group: dist.ProcessGroup) -> dist.Work:
    """Start, as one collective, the SUM of `factor` times each of the tensors over the ranks, in place.

    The group must be able to do that, and to multiply unless the factor is 1. For the host that is less work than one
    call for each tensor, between the two ends of coalescing.
    """
    return _called(group.allreduce_coalesced, tensors, _coalesced_sum(factor))


@lru_cache
def _coalesced_sum(factor: float) -> Any:
    options = dist.AllreduceCoalescedOptions()
    if factor != 1.0:
        options.reduceOp = _times(factor)
    return options


def _times(factor: float) -> Any:
    """Return the operation of NCCL that multiplies each summand by `factor`."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def coalesced(start: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> dist.Work:
    """Start as one the collectives of tensors on `device` that `start()` starts, where the group can do that."""
    _called(group._start_coalescing, device)
    try:
        start()
    except BaseException as error:
        with suppress(RuntimeError):
            group._end_coalescing(device)  # the group may still be used for other collectives
        mark(error)
        raise
    return _called(group._end_coalescing, device)


def _called(method: Callable[..., Result], *arguments: Any) -> Result:
    """Call a method of a group or of a work, and mark what it raises."""
    try:
        return method(*arguments)
    except BaseException as error:
        mark(error)
        raise


def _multiply(tensors: list[Tensor], factor: float) -> None:
    if factor == 1.0 or not tensors:
        return
    if is_exact(factor, tensors[0].dtype):  # on a GPU one kernel for all
        torch._foreach_mul_(tensors, factor)
        return
    # One by one: `_foreach_mul_` would round the factor to the dtype of the tensors.
    for tensor in tensors:
        tensor.mul_(factor)


@lru_cache
def is_exact(factor: float, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can hold the factor without rounding, as one half and one eighth."""
    return float(torch.tensor(factor, dtype=dtype, device="cpu").item()) == factor


class _PythonWork(dist.Work):
    """A work of a group that is written in Python. As for torch's DDP, its future has the sum, which may lie elsewhere.

    `flat` becomes the sum when the work is waited for the first time.
    """

    def __init__(self, work: dist.Work, flat: Tensor) -> None:
        super().__init__()
        self._work = work
        self._flat = flat
        self._waited = False

    @property
    def last(self) -> dist.Work:
        """What lands; to wait for it does nothing for this work."""
        return self._work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the work, and copy its result to where it belongs."""
        done = _called(self._work.wait, timeout)
        if not self._waited:
            self._take_result()
            self._waited = True
        return done

    def _take_result(self) -> None:
        try:
            future = self._work.get_future()
        except RuntimeError:  # it has none, so the sum is in its place
            return
        result = future.wait()
        found = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(found, Tensor) and found.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(found)

    def is_completed(self) -> bool:
        """Whether the work is completed. A class that does not say so itself is completed when it was waited for."""
        kind = type(self._work)
        silent = kind is not dist.Work and kind.is_completed == dist.Work.is_completed
        return self._waited if silent else self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the work."""
        return self._work.get_future()


class _Together(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all works, for each at most `timeout`."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all works are completed."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when all works are."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def together(works: Iterable[dist.Work]) -> dist.Work:
    """Return one work for several, which an iterator may start: where it raises, some of them may have begun."""
    try:  # as `_called`, but also around what makes one work of several: they have begun
        started = list(works)
        return started[0] if len(started) == 1 else _Together(started)
    except BaseException as error:
        mark(error)
        raise


def all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` by their element-wise maximum over the ranks; it is finished on return."""
    work = _called(group.allreduce, [values], _MAX)
    _finish(work if type(group) is dist.ProcessGroup else _PythonWork(work, values), group, values.device)


def all_gather(row: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return every rank's `row`, by rank; all rows have the same shape and dtype."""
    rows, work = start_all_gather(row, group)
    _finish(work, group, row.device)
    return rows


def start_all_gather(row: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], dist.Work]:
    """Start `all_gather`, and return the tensors that it will fill and the work."""
    rows = [torch.empty_like(row) for _ in range(group.size())]
    return rows, _called(group.allgather, [rows], [row], AllgatherOptions())


def start_all_to_all(
    parts: Tensor, flat: Tensor, group: dist.ProcessGroup, lengths: Sequence[int] = (), senders: Collection[int] = ()
) -> dist.Work:
    """Start to send each rank its part of `flat`, and to fill `parts` with what all ranks send here, by rank.

    Args:
        parts: flat; as long as this rank's part, times the number of ranks that send.
        flat: of the same dtype; empty on a rank that sends nothing.
        lengths: elements of each rank's part, the same on all ranks; empty if the parts are equally long.
        senders: the ranks that send; empty if all do. Then `lengths` must be given.
    """
    rank, size = group.rank(), group.size()
    received = [lengths[rank]] * size if lengths else []
    sent = list(lengths)
    if senders:
        received = [lengths[rank] * (other in senders) for other in range(size)]
        sent = sent if rank in senders else [0] * size
    return _called(group.alltoall_base, parts, flat, received, sent, dist.AllToAllOptions())


def start_reduce_scatter(own: Tensor, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `own`, this rank's place in `flat`, with the sum of what all ranks have there.

    It is `1 / ranks` of the elements. The other places keep this rank's numbers. The group must be able to do that with
    tensors on this device.
    """
    return _called(group._reduce_scatter_base, own, flat, dist.ReduceScatterOptions())


def start_all_gather_parts(flat: Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> dist.Work:
    """Start to overwrite the parts of all other ranks in `flat` with theirs. This rank's part is in its place.

    `bounds` says where each rank's part begins in `flat`, and where the last one ends; the same on all ranks.
    """
    parts = [(rank, flat[begin:end]) for rank, (begin, end) in enumerate(pairwise(bounds)) if begin < end]
    starts = (start_broadcast(part, group, rank) for rank, part in parts)
    if len(parts) > 1 and flat.is_cuda and abilities_of(group, flat.device).coalesces:
        return coalesced(lambda: together(starts), flat.device, group)
    return together(starts)


def start_all_gather_into(flat: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `flat` with every rank's `part`, by rank; `part` may be this rank's place in it."""
    size = group.size()
    if flat.is_cuda or size > MOST_BROADCASTS or type(group) is not dist.ProcessGroup:
        return _called(group._allgather_base, flat, part, AllgatherOptions())
    # gloo's all-gather copies all of `flat` twice, and takes up to three times as long as broadcasts.
    rows = flat.view(size, -1)
    own = rows[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    return together(start_broadcast(row, group, rank) for rank, row in enumerate(rows))


def check_all_to_all(
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    option: str = "deterministic=True",
) -> None:
    """Try the collectives that ordered sums need, with tensors of `dtype`; to be called on all ranks.

    Raises:
        DPFuseError: the back end lacks one of them, for which `option` asks.
    """
    flat = torch.zeros(group.size(), dtype=dtype, device=device)
    parts = torch.empty_like(flat)
    try:
        _finish(start_all_to_all(parts, flat, group), group, device)
        _finish(start_all_gather_into(flat, parts[:1], group), group, device)
    except DPFuseError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise DPFuseError(
            f"rank {group.rank()}: {option} needs a back end with all-to-all and all-gather of {device.type} "
            f"tensors, which {group.name()} did not do: {error}. Use gloo on CPUs and nccl on GPUs, or leave "
            f"{option.partition('=')[0]} out."
        ) from error


def broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensor` with that of rank `source` of the group."""
    _finish(start_broadcast(tensor, group, source), group, tensor.device)


def start_broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> dist.Work:
    """Start `broadcast`."""
    # The group is called directly: torch.distributed need not know it.
    options = dist.BroadcastOptions()
    options.rootRank = source
    return _called(group.broadcast, [tensor], options)


def _finish(work: dist.Work, group: dist.ProcessGroup, device: torch.device) -> None:
    _called(finish, work, board_of(group), device.type)
