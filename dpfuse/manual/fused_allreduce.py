"""Average gradients by hand, after any backward: the manual path, for no_sync() and custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from dpfuse.arguments import flag
from dpfuse.comm import votes
from dpfuse.comm.collective import is_registered, resolve_group, use_device_of
from dpfuse.comm.failed import has_raised
from dpfuse.comm.waiting import board_of, leave
from dpfuse.engine.assembly import Assembly
from dpfuse.engine.averaging import Wire, averaging_for
from dpfuse.engine.bucket import FLIGHT, GradBucket, Surroundings
from dpfuse.engine.comm_buffer import dense_stride
from dpfuse.engine.events import Events
from dpfuse.engine.feeds.accumulating import refuse_accumulated
from dpfuse.engine.local_part import is_divided
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import MB
from dpfuse.engine.reading import Outcome, Reading
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportLayout
from dpfuse.engine.send_order import complete_failed
from dpfuse.engine.settings import SyncSettings
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError
from dpfuse.manual.call_weights import DUE, CallWeights
from dpfuse.manual.gradient_spec import spec_of_gradient
from dpfuse.manual.plan import check_bucket_size, plan_in_order
from dpfuse.model.agreement import prepare_group
from dpfuse.stopping import request
from dpfuse.weights.uncompared import are_uncompared

__all__ = ["fused_allreduce_gradients"]

WHAT = "the set of gradients of fused_allreduce_gradients"
REMEDY = "Call it on every rank with the same parameters, each with a gradient on all ranks or on none."
CALLED = "fused_allreduce_gradients() was called"
STOP = DUE << 1  # of what a rank says in the vote, beside its weights: whether it asks all to stop
Result = TypeVar("Result")
STALL_TIMEOUT = 60.0  # seconds; the default of the wrappers
KEPT = 4  # calls with other parameters or options whose buffers are kept, for each group

_kept: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by process group, latest last
_kept_alone: list[Any] = []  # where there is no other rank
_left: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by process group: why this rank sends nothing any more


def fused_allreduce_gradients(
    parameter_list: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    scale: float | None = None,
    bucket_size: int = 128 * MB,
    deterministic: bool = False,
    wire_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Average the gradients of `parameter_list` over the ranks, in place, in fused buffers.

    For gradients that were accumulated locally: after `no_sync()`, after custom autograd functions, after
    second-order terms, for modules that are not wrapped at all. Every rank must call it with gradients of
    the same parameters. Frozen parameters and parameters without gradient are skipped. The buffers are kept for the
    next call with the same parameters. They go in the first call after these were freed. From the second call on, the
    ranks compare the weights after the optimizer's steps, and warn (`WeightsWarning`) of those that differ, unless a
    wrapper of the model was made with `check_training="off"`.

    Args:
        parameter_list: parameters of any shapes and floating dtypes; a generator is fine, and a parameter
            that occurs twice is averaged once.
        group: process group; None is the default group. Without one, or with one rank, nothing is done.
        scale: factor on each rank's gradient before the sum; None is 1 / number of ranks, the mean; 1.0
            gives the plain sum.
        bucket_size: bytes after which a buffer is closed; a change of dtype closes it too.
        deterministic: True adds up in the order of the ranks, in float32 (float64 for float64), and rounds once: no
            bit depends on `bucket_size`, and all are those of a wrapper with `deterministic=True`.
        wire_dtype: the dtype in which gradients travel, or a pair, as for `DataParallel`; each gradient keeps its own
            dtype afterwards.

    Raises:
        TypeError: `parameter_list` is not iterable or holds something else than plain tensors; a gradient is
            sparse or of a dtype that cannot be averaged; `scale` is not a number, `deterministic` no bool.
        ValueError: `scale` is not finite; `bucket_size` is negative; `wire_dtype` cannot be used.
        DPFuseError: the ranks hold different sets of gradients, or the call failed on another rank, or
            `deterministic` or `wire_dtype` needs what the back end lacks, or gradients are where
            `accumulate_in_buckets=True` has put them; raised on every rank. Or an earlier call has failed while the
            ranks exchanged something, and the group cannot be used any more.

    Example:
        >>> import torch, dpfuse
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> with model.no_sync():
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> dpfuse.fused_allreduce_gradients(model.parameters())
        >>> model.bias.grad
        tensor([3., 3.])
        >>> dist.destroy_process_group()

    Source: Paddle's `fused_allreduce_gradients` and its grouping rule `build_groups`.
    """
    process_group = resolve_group(group)
    options = _Options(scale, bucket_size, deterministic, wire_dtype)
    if process_group is not None and process_group.size() == 1 and request.asks(process_group):
        request.agree(process_group)
    if process_group is None or process_group.size() == 1:
        process_group, kept = None, _kept_alone
    else:
        _check_group(process_group)
        kept = _kept_for(process_group)
    try:
        if process_group is None:
            _prepare(parameter_list, options, kept)
        else:
            _average(parameter_list, options, process_group, kept)
    finally:
        for prepared in kept:
            prepared.params = []


def _average(parameter_list: Any, options: _Options, group: dist.ProcessGroup, kept: list[_Prepared]) -> None:
    complete_failed(group)  # the peers may still wait in a backward of a wrapped model
    prepared, agreed = _agree(parameter_list, options, group, kept)
    try:
        if any(number & STOP for number in agreed.numbers):
            request.agree(group)
        # Ranks may have kept the buffers of different calls, for example where one of them has refused its arguments.
        if not agreed.ready:
            prepared.allocate(group)
        elif prepared.weights is not None:
            prepared.weights.compared(agreed.numbers, prepared.params)
        prepared.average(group)
    except BaseException as error:
        kept.clear()  # the buckets may be in flight
        if not isinstance(error, DPFuseError):
            _leave(group, error)  # the peers wait for this rank, or are further
        raise
    if prepared.weights is not None:
        prepared.weights.averaged()


def _kept_for(group: dist.ProcessGroup) -> list[_Prepared]:
    """What earlier calls over this group have kept."""
    if group not in _kept:
        for other in [each for each in _kept if not is_registered(each)]:
            del _kept[other]  # a destroyed group, which lives as long as its buckets
        _kept[group] = []
    return _kept[group]


def _agree(
    parameter_list: Any, options: _Options, group: dist.ProcessGroup, kept: list[_Prepared]
) -> tuple[_Prepared, votes.Agreed]:
    """Prepare a call, and compare it over the ranks.

    Returns:
        What was prepared, whether all ranks have buckets for it, and what each says of its weights and of a stop.

    Raises:
        DPFuseError: a rank cannot do the call, or does another one; on every rank.
    """
    try:
        prepared = _prepare(parameter_list, options, kept)
        use_device_of(prepared.params, group)
        number = 0 if prepared.weights is None else prepared.weights.number()
    except Exception as error:  # the iterable is the user's, and the peers wait whatever it raised
        _vote(partial(votes.report_failure, error, group, WHAT), group)
        raise
    number |= request.asks(group) * STOP
    ready = bool(prepared.buckets)
    vote = partial(votes.agree_on_text, prepared.text, group, WHAT, REMEDY, ready=ready, number=number)
    return prepared, _vote(vote, group)


def _vote(vote: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Vote, and leave the group if a collective fails in that: the peers may wait in it, or be further."""
    try:
        return vote()
    except BaseException as error:
        if has_raised(error) and not isinstance(error, DPFuseError):
            _leave(group, error)
        raise


def _leave(group: dist.ProcessGroup, error: BaseException) -> None:
    _left.setdefault(group, f"{type(error).__name__}: {error}")
    leave(board_of(group), error)


def _check_group(group: dist.ProcessGroup) -> None:
    if group in _left:
        raise DPFuseError(
            f"rank {group.rank()}: an earlier fused_allreduce_gradients() over this process group has failed "
            f"({_left[group]}), so that the collectives of the ranks no longer fit together; expected a new group. "
            "Restart the job, or make another group."
        )


@dataclass(frozen=True)
class _Options:
    """What a call was asked for, besides gradients."""

    scale: Any
    bucket_size: Any
    deterministic: Any
    wire_dtype: Any

    @property
    def wire(self) -> Wire:
        """How gradients travel; raises ValueError for a dtype or a pair that cannot be used."""
        return Wire.of(self.wire_dtype)

    def check(self) -> None:
        """Raise TypeError or ValueError for an option that cannot be used."""
        check_bucket_size(self.bucket_size)
        flag("deterministic", self.deterministic)
        averaging_for("float32", 1, self.scale)
        Wire.of(self.wire_dtype)

    def __str__(self) -> str:
        return (
            f"scale={self.scale}, bucket_size={float(self.bucket_size)}, deterministic={self.deterministic}, "
            f"wire_dtype={self.wire_dtype}"
        )


class _Prepared:
    """Gradients that were checked and planned, for the next call with the same ones.

    Between calls it refers to no parameter, not even weakly, since torch refuses to swap a tensor that has a weak
    reference. It knows their ids and their memory.

    Args:
        items: what the caller passed.
        params: those of `items` that have a gradient to average.
        specs: of these gradients.
        options: of the call.

    Attributes:
        key: as `_key_of`.
        text: what the ranks must have in common.
        params: those whose gradients are averaged; empty between calls.
        buckets: for these gradients, in the order of communication; empty before they were allocated.
        weights: compares those of the ranks, once there are buckets; None where nothing is compared.
    """

    def __init__(
        self, items: Sequence[Tensor], params: Sequence[Tensor], specs: list[ParamSpec], options: _Options
    ) -> None:
        self.params = list(params)
        self.buckets: list[GradBucket] = []
        self.weights: CallWeights | None = None
        self._options = options
        self._specs = specs
        self.key = _key_of(items, options)
        places = {id(item): place for place, item in enumerate(items)}
        self._chosen = [places[id(param)] for param in params]
        self._memory = _memory_of(params)
        self._devices = list(dict.fromkeys(param.device for param in params))
        lines = [
            f"{spec.name} shape={spec.shape} strides={dense_stride(param)} dtype={spec.dtype}"
            for spec, param in zip(specs, params, strict=True)
        ]
        self.text = "\n".join([*lines, f"{len(specs)} gradients, {options}"])

    def take(self, items: Sequence[Tensor]) -> None:
        """Take what a call with the same key has passed."""
        self.params = [items[place] for place in self._chosen]
        if not self.is_alive:  # a program may replace the memory of all in each step
            self._memory = _memory_of(self.params)

    @property
    def is_alive(self) -> bool:
        """Whether some memory of its parameters still is."""
        return not self._memory or any(memory() is not None for memory in self._memory)

    def allocate(self, group: dist.ProcessGroup) -> None:
        """Make the buckets.

        Raises:
            DPFuseError: a rank has no memory for them, or the back end lacks what the options need; on every rank.
        """
        options = self._options
        prepare_group(group, self._devices, options.wire, options.deterministic, STALL_TIMEOUT)
        if self._specs:
            self.buckets, self.weights = votes.agree_on_success(partial(self._make, group), group, CALLED)

    def _make(self, group: dist.ProcessGroup) -> tuple[list[GradBucket], CallWeights | None]:
        options, window = self._options, Window()
        assembly = Assembly(
            group,
            Surroundings(board_of(group), Events(), lambda error: _leave(group, error)),
            SyncSettings(scale=options.scale, wire=options.wire, deterministic=options.deterministic),
            overlaps=False,
            make_report=lambda count, dtype, device: Report(group, count, ReportLayout(), window, dtype, device),
        )
        buckets = assembly.make(plan_in_order(self._specs, options.bucket_size), self.params)
        names = [spec.name for spec in self._specs]
        alone = are_uncompared(self.params)
        return buckets, None if alone else CallWeights(dict(zip(names, self.params, strict=True)), group)

    def average(self, group: dist.ProcessGroup) -> None:
        """Average the gradients.

        Raises:
            DPFuseError: a rank failed; on every rank.
        """
        if not self.buckets:
            return
        outcome, unsent = Outcome(), list(self.buckets)
        try:
            try:
                # Neither kernels nor collectives count as writes, and a check may compare versions.
                increment_version([param.grad for param in self.params if param.grad is not None])
                failed = self._exchange(unsent, outcome)
            except Exception as error:
                if isinstance(error, DPFuseError) or has_raised(error):
                    raise
                # The peers wait for the rest of the collectives, and for this rank's report.
                outcome.note(error)
                failed = self._exchange(unsent, outcome)
            if failed is not None:
                raise DPFuseError(_failure(group, failed, outcome)) from outcome.error
        finally:
            outcome.error = None  # its frames would keep the parameters alive

    def _exchange(self, unsent: list[GradBucket], outcome: Outcome) -> Reading | None:
        """Send, wait, deliver. After an exception it can be called again: what was done is not done again.

        Args:
            unsent: the buckets that are still to be sent; this method removes those that were.
            outcome: of this rank; after an error, the buckets that are left send zeros.

        Returns:
            The report if a rank has failed, else None.
        """
        buckets, params, report = self.buckets, self.params, self.buckets[-1].parts.report
        assert report is not None
        if outcome.well:
            for bucket in buckets:
                bucket.bind([params[index] for index in bucket.plan.params])
        while unsent:
            if not unsent[0].busy and outcome.well:
                unsent[0].send(outcome, complete=True)
            elif not unsent[0].busy:
                unsent[0].send_empty(outcome)
            del unsent[0]
        for bucket in buckets:
            if bucket.state is FLIGHT:
                bucket.wait()
        reading = report.read(outcome, wait=True, gather=True)
        for bucket in buckets:
            if bucket.busy and reading.all_well:
                bucket.deliver()
            elif bucket.busy:
                bucket.discard()
            bucket.bind(())
        return None if reading.all_well else reading


def _memory_of(params: Iterable[Tensor]) -> list[ref[torch.UntypedStorage]]:
    return [ref(param.untyped_storage()) for param in params]


def _key_of(items: Sequence[Tensor], options: _Options) -> list[Any]:
    """What must be equal for a call to use the buffers of another one, in a few passes over the list."""
    grads = [param.grad for param in items]
    present = [grad for grad in grads if grad is not None]
    return [
        list(map(id, items)),
        [(type(value), value) for value in vars(options).values()],  # True is not 1 here
        [grad is None for grad in grads],
        list(map(attrgetter("requires_grad"), items)),
        list(map(Tensor.size, items)),
        [item.stride() for item in items if item.layout is torch.strided],
        list(map(attrgetter("dtype"), present)),
        list(map(attrgetter("device"), present)),
        set(map(attrgetter("layout"), present)),
        list(map(Tensor.size, present)),
        [grad.stride() for grad in present if grad.layout is torch.strided],
    ]


def _failure(group: dist.ProcessGroup, reading: Reading, outcome: Outcome) -> str:
    rank, failed = group.rank(), ", ".join(map(str, reading.failed())) or "another"
    if outcome.well:
        return (
            f"rank {rank}: fused_allreduce_gradients() failed on rank {failed}, see the error there; "
            "expected gradients from every rank. No rank's gradients of this call are averaged: zero them before the "
            "next backward."
        )
    return (
        f"rank {rank} failed in fused_allreduce_gradients(): "
        f"{str(outcome.error).rstrip('.')}. No rank's gradients of this call are averaged: zero them before the next "
        "backward."
    )


def _prepare(parameter_list: Any, options: _Options, kept: list[_Prepared]) -> _Prepared:
    """What an earlier call has prepared for these gradients and options, or what this one does."""
    if not isinstance(parameter_list, Iterable) or isinstance(parameter_list, Tensor):
        raise TypeError(
            f"parameter_list must be an iterable of parameters, got {type(parameter_list).__name__}; "
            "pass model.parameters() or a list"
        )
    items = list(parameter_list)
    found = None
    if kept and all(issubclass(kind, Tensor) for kind in set(map(type, items))):
        key = _key_of(items, options)
        found = next((prepared for prepared in kept if prepared.key == key), None)
    if found is not None:
        found.take(items)
    kept[:] = [prepared for prepared in kept if prepared.is_alive]
    if found is not None:
        refuse_accumulated(items, CALLED)
        return found
    prepared = _gradients_of(items, options)
    kept.append(prepared)
    del kept[:-KEPT]
    return prepared


def _gradients_of(items: list[Any], options: _Options) -> _Prepared:
    options.check()
    refuse_accumulated(items, CALLED)
    params: dict[int, Tensor] = {}
    specs: list[ParamSpec] = []
    for index, param in enumerate(items):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"parameter_list[{index}] is a {type(param).__name__}; expected a parameter; pass model.parameters()"
            )
        if is_divided(param):
            raise TypeError(
                f"parameter_list[{index}] of shape {tuple(param.shape)} is a DTensor, of which each rank may have "
                "another part; expected plain parameters. Wrap the model, or pass local tensors that have a .grad."
            )
        grad = param.grad
        if id(param) in params or not param.requires_grad or grad is None:
            continue
        params[id(param)] = param
        specs.append(spec_of_gradient(f"parameter_list[{index}]", param, grad))
    return _Prepared(items, list(params.values()), specs, options)
