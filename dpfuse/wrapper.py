"""What the wrapper modules share: the module inside, its synchronisation, no_sync(), copies. Adds no public name."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import votes
from dpfuse.comm.abilities import abilities_of, backend_of
from dpfuse.comm.collective import resolve_group, use_device_of
from dpfuse.comm.registered_memory import can_register
from dpfuse.comm.waiting import board_of, leave, wait_for_first_rank
from dpfuse.engine.events import Watcher
from dpfuse.engine.plan import MB, BucketPlan
from dpfuse.engine.reducer import Reducer
from dpfuse.engine.send_order import complete_failed
from dpfuse.engine.sync_decision import NEVER
from dpfuse.engine.torch_private import ended_early, inside_compiled, leave_untraced, set_tracer, uncompiled
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError
from dpfuse.exclusions import refuse
from dpfuse.gradients.divided_norm import DividedGradients
from dpfuse.gradients.error_feedback import ErrorFeedback
from dpfuse.gradients.loss_scaling import LossScale
from dpfuse.gradients.norm import (
    Gradients,
    Measurable,
    clip,
    norm_arguments,
    norms_by_bucket,
    norms_by_parameter,
    refuse_nonfinite,
)
from dpfuse.gradients.weight import GradientWeight
from dpfuse.measure.communication_times import CommunicationTimes
from dpfuse.model.agreement import agree_on_model
from dpfuse.model.buffers import BufferKind
from dpfuse.model.check import check_module
from dpfuse.model.logs import show_chosen_logs
from dpfuse.model.micro_loop import MicroLoop, common_seed, refuse_without_group, set_threads
from dpfuse.model.module_sync import FaceParts, ModuleSync
from dpfuse.model.options import SyncOptions
from dpfuse.model.other_wrappers import look_for_other_wrappers
from dpfuse.model.transforms import may_have_backward
from dpfuse.stopping.deadline import deadline
from dpfuse.stopping.request import own_reason, tell_program
from dpfuse.stopping.wish import StopReason

__all__ = [
    "SyncedModule",
    "Tuned",
    "bare_module",
    "loss_scale_of",
    "sync_of",
    "time_communication",
    "wrapper_of",
    "wrappers_in",
]

TRACE = "DPFUSE_TRACE"  # the variable that asks for a trace; its package is imported only then
log = logging.getLogger("dpfuse.plan")
_counted: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # wrappers made for a group


class Tuned(Protocol):
    """What users read of the `dpfuse.tune.Tuning` of a model."""

    done: bool  # whether the recording has ended
    kept: bool | None  # whether the new buckets are in use; None until that is known
    error: str  # why there are no new buckets, if something failed
    plan: BucketPlan | None  # the new buckets

    def explain(self) -> str:
        """Return the recorded times and what became of the new buckets, as lines of text."""


class _SetByConstructor:
    """Stands on the class for what the constructor puts into an instance, and raises where a subclass skipped that.

    An attribute of the instance comes first, so a wrapper that was constructed never reaches this. It is no
    AttributeError: a `__getattr__` of the subclass, as for names of the wrapped module, would then hide the reason.
    """

    def __get__(self, wrapper: Any, kind: type) -> Any:
        if wrapper is None:
            return self
        face = next(base for base in kind.__mro__ if base.__module__.startswith(f"{__package__}."))
        raise DPFuseError(
            f"{kind.__name__} has not run the constructor of dpfuse.{face.__name__}, expected that before this call: "
            "nothing here averages gradients. Call super().__init__(module) in its constructor. Or, where the class "
            "wraps parts of the module by itself, let it override this method, as forward() and no_sync()."
        )


_set_by_constructor: Any = _SetByConstructor()


class SyncedModule(nn.Module):
    """A module whose gradients are averaged over a group in every backward that synchronises.

    Subclasses give it a face: a constructor that calls `_connect`, state dicts, further names.

    Attributes:
        module: the wrapped module, the only child.
        tuning: what `dpfuse.autotune` has found, or will have; None where it was not called.
    """

    module: nn.Module
    _options: SyncOptions = _set_by_constructor
    _group: dist.ProcessGroup | None = _set_by_constructor
    _sync: ModuleSync | None = _set_by_constructor
    _require_sync: bool = _set_by_constructor
    tuning: Tuned | None = None
    _prefixed = False  # whether state dicts of this face have the prefix `module.`
    _is_replica = False  # each zero_grad() asks for it: without this, in two modules
    _number: int | None = None  # how many were made for the group before; a copy has that of its original
    _agreed_buffers: Mapping[str, BufferKind] | None = None  # that travel, on which the ranks have settled
    _finalizer: finalize[..., Any] | None = None
    _around: Callable[..., Any] | None = None  # what calls the module, its first argument, in our place
    _forward_ended: Callable[[], None] | None = None  # what a face does after a forward that may have a backward

    def _connect(self, group: dist.ProcessGroup | None, *, fresh: bool) -> None:
        """Build everything that is not part of the model. A copy (not `fresh`) needs no exchange with its peers."""
        if fresh:
            complete_failed(group)  # the peers may still wait in a backward of another model, dropped or not
        self._group = group
        self._let_go()
        if self._sync_if_any() is not None:
            self._options = self._options_now()
        self._sync = None
        self._require_sync = True
        try:
            if fresh:
                show_chosen_logs()
                deadline.read()
                self._options = self._options.with_plan_read()
            if group is not None and isinstance(self.module, nn.Module):
                use_device_of((param for _, param in self.module.named_parameters()), group)
            plan = check_module(self.module, self._options, group)
            if fresh and group is None and self._options.micro_batches is not None:
                refuse_without_group(self._options.micro_batches)
            if group is not None and fresh:  # else nothing is compared, or it was when the original was made
                device = torch.device(plan.buckets[0].device)
                self._options = replace(self._options, registered=can_register(group, device))
                if self._options.micro_batches is not None:
                    self._options = replace(self._options, threads=set_threads())
        except Exception as error:
            if group is not None and fresh:
                votes.report_failure(error, group, "the wrapped module")
            raise
        if group is None:
            return
        if fresh:
            nested = _warn_of_wrappers_inside(self.module, self._options.ignored)
            self._agreed_buffers = agree_on_model(self.module, plan, self._options, group)
            if self._options.threads:
                self._options = replace(self._options, seed=common_seed(group))
        if self._number is None:
            self._number = _counted.setdefault(group, 0)
            _counted[group] += 1
        try:
            self._sync = self._make_sync(plan, group)
        except Exception as error:
            if fresh:
                votes.report_failure(error, group, "wrapping the module")
            raise
        if fresh:
            votes.agree_on_text("", group, "wrapping the module")
            look_for_other_wrappers(self._sync.grads, told=nested)
        else:
            self._sync.buffers.doubt()
        if log.isEnabledFor(logging.INFO):  # the table takes time to make
            rank, count = group.rank(), len(plan.buckets)
            log.info("rank %d: %d buckets to start with\n%s", rank, count, plan.explain(), extra={"rank": rank})
        # The hooks live on the parameters, which may outlive the wrapper and be wrapped again. Where the garbage
        # collector frees the synchronisation as well, `ReadyHooks` takes them off.
        self._finalizer = finalize(self, _remove_hooks, ref(self._sync))
        self._finalizer.atexit = False
        if fresh and os.environ.get(TRACE):
            from dpfuse.trace.process_trace import process_tracer

            process_tracer().add(self)

    def _make_sync(self, plan: BucketPlan, group: dist.ProcessGroup) -> ModuleSync:
        assert self._number is not None
        return ModuleSync(
            self.module, plan, group, self._options, self._number, self._face_parts(), self._agreed_buffers
        )

    def _face_parts(self) -> FaceParts:
        """What this face adds to the synchronisation."""
        return FaceParts()

    def _let_go(self) -> None:
        """Take the hooks of an earlier synchronisation off the parameters, and let go of its buffers."""
        if self._finalizer is not None:
            self._finalizer()  # once: it then keeps nothing alive
            self._finalizer = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. Under `torch.no_grad()` nothing is recorded and nothing is communicated.

        The same holds inside transforms of `torch.func`, in forward-mode AD, for `make_fx` and `torch.export`, and
        where `functional_call()` replaces all parameters by other leaves.

        Raises:
            DPFuseError: gradients of a backward before were not averaged, or the ranks can no longer reach each other.
        """
        # Straight from the dict: an attribute that is a module is looked up in Python.
        sync, module = self._sync, self._modules["module"]
        assert module is not None
        call = module if self._around is None else partial(self._around, module)
        if sync is None:
            return call(*inputs, **kwargs)
        if not may_have_backward():
            sync.buffers.inferred = True
            return call(*inputs, **kwargs)
        # Dynamo, where it is on, compiles the module, not what happens around it.
        tracer = set_tracer(None)
        sync.window.began = NEVER  # what fails from here on is not the forward before
        try:
            takes_part = sync.before_forward((inputs, kwargs))
            set_tracer(tracer)
            outputs = call(*inputs, **kwargs)
            set_tracer(None)
            sync.after_forward(outputs, takes_part=takes_part)
            if takes_part and self._forward_ended is not None:
                self._forward_ended()
            set_tracer(tracer)
            return outputs
        except BaseException as error:
            set_tracer(tracer)
            sync.forward_failed()
            if isinstance(error, Exception) and not ended_early(error):
                sync.grads.track.failed(error, sync.grads.completed)
            raise

    leave_untraced(forward)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients locally: no communication for forwards inside this context.

        A backward is local if every forward since the last synchronised backward ran inside; the next
        synchronised one averages all that has accumulated. Nests, and ends properly on exceptions.

        Args:
            enabled: False makes it a context that does nothing, so that a loop needs one body:
                `with model.no_sync(enabled=micro < last): …`.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> for micro in range(3):
            ...     with model.no_sync(enabled=micro < 2):
            ...         model(torch.ones(3, 4)).sum().backward()
            >>> model.bias.grad
            tensor([9., 9.])
            >>> dist.destroy_process_group()

        Source: torch's `DistributedDataParallel.no_sync` and Paddle's; `enabled` is new.
        """
        if not enabled:
            yield
            return
        sync = self._sync_if_any()
        if sync is not None:
            _refuse_no_sync(sync, "no_sync() was called")
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def micro_batches(self, step: int | None = None) -> Iterator[int]:
        """Deal the micro-batches of a step: loop over this rank's numbers, and run one backward for each.

        Gradients are averaged in the last backward of the loop. Before each micro-batch the global generators of torch,
        Python and NumPy are seeded by the step and its number, so dropout draws the same on any rank. After the loop
        they are seeded by the step, the same on all ranks. What a micro-batch computes must depend on the step and its
        number alone. The step counts loops, and a checkpoint keeps it.

        Args:
            step: of which the seeds are taken; None is one more than that of the last loop.

        Returns:
            An iterator over this rank's numbers of `range(fixed_micro_batches)`.

        Raises:
            TypeError, ValueError: `step` is no whole number of at least 0.
            DPFuseError: the wrapper has no `fixed_micro_batches`; the last loop was left before its end, a parameter
                has a gradient already, or the number of threads has changed. And in the loop: a micro-batch had no
                backward, or two, or a parameter was frozen or unfrozen.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2), fixed_micro_batches=3)
            >>> for number in model.micro_batches():
            ...     model(torch.full((5, 4), float(number))).sum().backward()
            >>> model.module.bias.grad
            tensor([5., 5.])
            >>> dist.destroy_process_group()
        """
        return self._micro_loop("micro_batches()").numbers(step)

    def gather_micro_batches(self, values: Sequence[float | Tensor]) -> Tensor:
        """Return a value of each micro-batch of a step, such as its loss, in the order of their numbers.

        The mean of the result has the same bits on any number of ranks. To be called on all ranks, which send as many
        numbers as they have micro-batches.

        Args:
            values: one number for each of this rank's micro-batches, in their order.

        Returns:
            [fixed_micro_batches] float64, on the device of the parameters.

        Raises:
            DPFuseError: the wrapper has no `fixed_micro_batches`; a rank has given another number of values, which is
                raised on every rank.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2), fixed_micro_batches=3)
            >>> losses = [number + 0.5 for number in range(3)]
            >>> model.gather_micro_batches(losses).mean().item()
            1.5
            >>> dist.destroy_process_group()
        """
        return self._micro_loop("gather_micro_batches()").gather(values)

    def _micro_loop(self, caller: str) -> MicroLoop:
        sync = self._sync
        if sync is None or sync.micro_loop is None:
            raise DPFuseError(
                f"{caller} was called on a wrapper without fixed_micro_batches, expected a number. Pass for example "
                "fixed_micro_batches=8 to the wrapper."
            )
        sync.complete_failed()
        return sync.micro_loop

    @property
    def stop_requested(self) -> bool:
        """Whether a rank has asked all ranks to stop: the same answer on all of them in the same step, at no cost.

        Ask it after the optimizer's step, save, and leave the loop. A rank asks with `dpfuse.request_stop`. All ranks
        learn of it in a backward that synchronises, so never inside a window of `no_sync()`: in the first one that
        begins after the wish, on a GPU in the one after it. Beside other dimensions of a mesh, all groups of the mesh
        learn of it some backwards later, in the same one. It stays true until `dpfuse.forget_stop`. Without a process
        group it is the wish of this process.

        Raises:
            DPFuseError: the last backward was captured in a CUDA graph, whose replays tell the host nothing.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> for step in range(1000):
            ...     model(torch.ones(3, 4)).sum().backward()
            ...     if step == 3:
            ...         dpfuse.request_stop("an hour is over")
            ...     if model.stop_requested:
            ...         break
            >>> step
            4
            >>> dpfuse.forget_stop()
            >>> dist.destroy_process_group()
        """
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """Why all ranks stop, the same on all of them; None while `stop_requested` is false.

        Raises:
            DPFuseError: as `stop_requested`.
        """
        return tell_program(own_reason() if self._sync is None else self._sync.stop_reason())

    @contextmanager
    def rank_zero_work(self) -> Iterator[bool]:
        """Let only the first rank of the group work, such as evaluate or save, while the others wait for it at the end.

        Every rank enters the context, equally often and in the same order. The others wait as long as the first rank is
        alive. No collective waits, so the time limit of the process group does not matter. Inside, the first rank must
        call no collective; it may run the model under `torch.no_grad()`.

        Returns:
            A context, whose value is True on the first rank, and where there is no group.

        Raises:
            DPFuseError: at the end of the context, on the other ranks: the first rank has raised in it, has ended, or
                was silent for `stall_timeout` seconds; the text has its exception. Its exception is raised there, and
                it has then left the group. And at the begin, on all ranks: the group has no heartbeat, or another such
                context is open.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> with model.rank_zero_work() as mine:
            ...     if mine:
            ...         print("evaluates and saves")
            evaluates and saves
            >>> dist.destroy_process_group()

        Source: the trouble of huggingface/accelerate#3512.
        """
        group = self._group
        board = None if group is None else board_of(group)
        if group is None or group.size() == 1 or board is None:
            yield True
            return
        rank = group.rank()
        if board.heartbeat is None:
            raise DPFuseError(
                f"rank {rank}: rank_zero_work() was called for a group without a heartbeat, expected one, since only "
                "that tells the others that the work is done. See why it could not start, or let rank 0 work between "
                "two calls of torch.distributed.barrier()."
            )
        if board.in_section:
            raise DPFuseError(
                f"rank {rank}: rank_zero_work() was called inside another one of the same group, expected it outside. "
                "Do all of the work in one of them, or one after the other."
            )
        board.sections, board.in_section = board.sections + 1, True
        section = board.sections
        try:
            yield rank == 0
        except BaseException as error:
            if rank == 0:
                leave(board, error)
            raise
        finally:
            board.in_section = False
        if rank == 0:
            board.finished = section
        else:
            wait_for_first_rank(board, section)

    @property
    def require_backward_grad_sync(self) -> bool:
        """The switch that `no_sync()` sets, read when a forward ends; a program may set it directly.

        With `fixed_micro_batches` it tells whether the last micro-batch of this rank runs, and cannot be set.
        """
        sync = self._sync_if_any()
        if sync is not None and sync.micro_loop is not None:
            return sync.micro_loop.in_last
        return self._require_sync if sync is None else sync.grads.reducer.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        sync = self._sync_if_any()
        if sync is None:
            self._require_sync = bool(value)
        else:
            if sync.micro_loop is not None and bool(value) == sync.micro_loop.in_last:
                return  # as it is, such as in a copy
            _refuse_no_sync(sync, "require_backward_grad_sync was set")
            sync.grads.reducer.require_sync = bool(value)

    def _sync_if_any(self) -> ModuleSync | None:
        """What averages the gradients; None also where a subclass has skipped the constructor."""
        return self.__dict__.get("_sync")

    def set_gradient_weight(self, weight: float | Tensor | None, reduction: str = "mean") -> None:
        """Give this rank's gradients a weight in the next synchronised backward: ranks may have batches of other sizes.

        What lands is then the sum over the ranks of weight times gradient, divided by the sum of the weights: with the
        number of tokens as the weight, the gradient of the mean over all tokens of all ranks. The weights travel with
        the gradients. To be called on every rank for each synchronised backward, any time before it begins; in a window
        of `no_sync()` once, for the whole window. It holds until that backward has succeeded.

        A mean that is in `.grad` from an earlier backward stays there, and the weighted mean is added to it. With
        "sum", call this for the first time before the first backward of such a window.

        Args:
            weight: 0 or more; 0 leaves this rank out, unless its gradients are NaN or infinite. A tensor with one
                number, on the device of the gradients, is not waited for. It is used as float32. None takes it back.
            reduction: how the loss comes from the samples (or tokens) that the weight counts. "mean": it is their mean.
                "sum": it is their sum, whose gradient is a multiple of the weight already.

        Raises:
            TypeError, ValueError: an argument that is no such thing.
            DPFuseError: a backward is running; there is a communication hook or a `ShardedOptimizer`, or
                `gradient_scale` is set. And from `backward()`, on all ranks: only some of them have called this, or all
                weights are 0.

        Example:
            >>> import dpfuse, torch
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> model.set_gradient_weight(3, reduction="sum")
            >>> model(torch.ones(3, 4)).sum().backward()
            >>> model.module.bias.grad
            tensor([1., 1.])
            >>> dist.destroy_process_group()
        """
        if self._sync is not None:
            self._sync.weigh(weight, reduction)
            return
        GradientWeight.checked(weight, reduction, torch.device("cpu"))
        if reduction == "sum" and weight is not None:
            raise DPFuseError(
                'gradients were given a weight with reduction="sum" and there is no process group, so no rank divides; '
                "expected one. Call dpfuse.init_parallel_env() before wrapping, or divide the loss."
            )

    def discard_accumulated(self) -> None:
        """Throw away what `accumulate_in_buckets=True` has accumulated: the next batch begins a new window.

        With `fixed_micro_batches` it ends the loop over `micro_batches()`, whose step can be begun again.

        `optimizer.zero_grad()` cannot see it, for it is not in `.grad`; `zero_grad()` of this wrapper does the same.

        Raises:
            DPFuseError: a backward is running.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2), accumulate_in_buckets=True)
            >>> with model.no_sync():
            ...     model(torch.full((3, 4), torch.nan)).sum().backward()
            >>> model.discard_accumulated()
            >>> model(torch.ones(3, 4)).sum().backward()
            >>> model.module.bias.grad
            tensor([3., 3.])
            >>> dist.destroy_process_group()
        """
        if self._sync is not None:
            self._sync.grads.reducer.discard_accumulated()
            if self._sync.micro_loop is not None:
                self._sync.micro_loop.throw_away()

    def synchronize_weights(self) -> None:
        """Overwrite parameters and buffers with those of rank 0; to be called on all ranks, between backwards.

        This ends a difference of which a `WeightsWarning` or an error of `check_training` has told. States of the
        optimizer stay as they are: if they differ, the weights become different again.

        Raises:
            DPFuseError: a backward is running; the ranks' parameters or buffers have other names, shapes or dtypes,
                which is raised on every rank.

        Example:
            >>> import dpfuse, torch
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> model.synchronize_weights()
            >>> dist.destroy_process_group()
        """
        if self._sync is not None:
            self._sync.synchronize_weights()

    def _loaded(self, missing: Sequence[str]) -> None:
        """Note that a state was loaded, as on every rank; `missing` are the names that it had not."""
        sync = self._sync_if_any()
        if sync is not None and not missing:
            sync.grads.lost.weights_replaced()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of every module, also for what lies in buckets; it calls `discard_accumulated()`."""
        super().zero_grad(set_to_none)
        if self._sync_if_any() is not None:
            self.discard_accumulated()

    def grad_norm(self, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Return the norm of all gradients as one vector. After a synchronised backward they are means.

        What was done to `.grad` since backward counts, parameters without gradient do not. Gradients that still lie in
        the communication buffers are read by the buffer.

        Args:
            norm_type: order of the norm, such as 1, 2 or `math.inf`.
            error_if_nonfinite: True raises where the norm is NaN or infinite, which waits for the device.

        Returns:
            A scalar on the device of the gradients, float64 where some gradient is, else float32. Nothing has
            waited for it. Where parameters are DTensors, it is that of the whole model, and all ranks must ask for it.

        Raises:
            TypeError, ValueError: an argument that is no such number.
            DPFuseError: the norm is not finite and that is an error; a backward is running.

        Example:
            >>> import dpfuse, torch
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> model.grad_norm()
            tensor(3.1623)
            >>> dist.destroy_process_group()

        Source: `torch.nn.utils.get_total_norm`.
        """
        _, order = norm_arguments(0.0, norm_type)
        norm = self._gradients().norm(order)
        return refuse_nonfinite(norm, order) if error_if_nonfinite else norm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients in place so that their norm is at most `max_norm`: after backward, before the step.

        Args:
            max_norm: 0 or more.
            norm_type: as for `grad_norm`.
            error_if_nonfinite: as for `grad_norm`; nothing is scaled then.

        Returns:
            The norm before, as `grad_norm` returns it.

        Raises:
            TypeError, ValueError, DPFuseError: as `grad_norm`.

        Example:
            >>> import dpfuse, torch
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> model.clip_grad_norm_(1.0), model.grad_norm()
            (tensor(3.1623), tensor(1.0000))
            >>> dist.destroy_process_group()

        Source: `torch.nn.utils.clip_grad_norm_`, with the model in place of its parameters.
        """
        largest, order = norm_arguments(max_norm, norm_type)
        gradients = self._gradients()
        norm = gradients.norm(order)
        if error_if_nonfinite:
            refuse_nonfinite(norm, order)
        clip(gradients, largest, norm)
        return norm

    def grad_norms(self, by: str = "parameter", norm_type: float = 2.0) -> dict[str, Tensor]:
        """Return the norm of each parameter's or bucket's gradients, by name: for a log, or to find where they grow.

        Args:
            by: "parameter" for one norm of each gradient there is, under the name that the module gives to its
                parameter; or "bucket" for one of each bucket, in the order of communication, under the name that it has
                in a profile, "bucket 0" and so on. What is in no bucket keeps its own name.
            norm_type: as for `grad_norm`, which is the norm of all of these.

        Returns:
            Scalars on the device of the gradients, float64 where the gradient is, else float32. Nothing has waited for
            them: `torch.stack([*norms.values()]).tolist()` waits once for all.

        Raises:
            TypeError, ValueError: an argument that is not among these.
            DPFuseError: as `grad_norm`.

        Example:
            >>> import dpfuse, torch
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> model.grad_norms()
            {'weight': tensor(2.8284), 'bias': tensor(1.4142)}
            >>> model.grad_norms(by="bucket")
            {'bucket 0': tensor(3.1623)}
            >>> dist.destroy_process_group()
        """
        _, order = norm_arguments(0.0, norm_type)
        if by not in ("parameter", "bucket"):
            raise ValueError(f"by must be 'parameter' or 'bucket', got {by!r}")
        found = self._gradients()  # can they be read now?
        if isinstance(found, DividedGradients):
            norms = found.norms(order)
        else:
            norms = norms_by_parameter(self.module.named_parameters(), order)
        if by == "parameter":
            return norms
        plan = self.bucket_plan
        buckets = [[plan.specs[index].name for index in bucket.params] for bucket in plan.buckets]
        return norms_by_bucket(norms, buckets, order)

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last synchronised backward, for a log. On a GPU it waits for the device.

        Norm, counts and noise are those of all ranks; times and bytes are those of this rank. The noise scale is in
        batches of one rank, or in the unit of the weights where `set_gradient_weight` was called. It is very noisy
        from step to step: average `gradient_square` and `gradient_variance` over steps, and divide then. It needs
        gradients that were zero before: a mean that an earlier backward left in `.grad` counts as this rank's own.

        Returns:
            `step` counts synchronised backwards. `exposed_seconds` is what communication added to backward,
            `communication_seconds` what buckets travelled, `bytes_sent` their bytes. `grad_norm` is that of the
            gradients that this backward has averaged, `nonfinite_values` how many NaN and infinite values all ranks
            sent.
            `gradient_square` and `gradient_variance` are estimates without bias, and `noise_scale` is their ratio,
            infinite if the first is not positive. These three are NaN on one rank, and with a communication hook.
            `weights_differ_since` is there only while the ranks' weights are known to differ, and counts as `step`.
            `late_rank`, `late_seconds` and others are there only on the first rank, while a rank is late in each step;
            the guide to slow ranks lists them. Empty before the first synchronised backward, and without a group.

        Raises:
            DPFuseError: the model was wrapped without `metrics=True`.

        Example:
            >>> import dpfuse, torch
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2), metrics=True)
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> metrics = model.metrics()
            >>> round(metrics["grad_norm"], 3), metrics["noise_scale"]
            (3.162, nan)
            >>> dist.destroy_process_group()

        Source: the noise scale is that of McCandlish et al., "An Empirical Model of Large-Batch Training" (2018).
        """
        if not self._options.common["metrics"]:
            raise DPFuseError(
                "metrics() was called on a model that was wrapped with metrics=False, expected True: nothing was "
                "measured. Pass metrics=True where the model is wrapped."
            )
        if self._sync is None or self._sync.metrics is None:
            return {}
        known = self._sync.differing_weights
        differ = {"weights_differ_since": min(known.values())} if known else {}
        read = self._sync.metrics.read()
        return read | differ | self._sync.late_ranks if read else {}  # another model of the group may know a late rank

    def _gradients(self) -> Measurable:
        return Gradients((), self.module.parameters()) if self._sync is None else self._sync.gradients()

    def _observe(self, times: Watcher | None) -> None:
        """Report how each bucket travels to `times`; None ends that. `dpfuse.time_communication` uses it."""
        if self._sync is not None:
            self._sync.grads.observe(times)

    @property
    def error_feedback(self) -> ErrorFeedback | None:
        """What this rank has rounded away and is to send yet; None without `error_feedback=True`, or a group."""
        return None if self._sync is None else self._sync.error_feedback

    @property
    def reducer(self) -> Reducer | None:
        """The state machine of the synchronisation; None where the wrapper only passes calls through."""
        return None if self._sync is None else self._sync.grads.reducer

    @property
    def bucket_plan(self) -> BucketPlan:
        """The buckets in use: the planned ones, then those rebuilt after the first synchronised backward."""
        return check_module(self.module, self._options, None) if self._sync is None else self._sync.grads.plan

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedModule:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone._restore(copy.deepcopy(self._portable_state(), memo), self._group)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None and self._group is not dist.group.WORLD:
            raise DPFuseError(
                "a wrapper over a group other than the default one cannot be pickled: the group means "
                "nothing to another process. Pickle its state_dict(), or its .module."
            )
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, resolve_group(None))

    def _portable_state(self) -> dict[str, Any]:
        state = {
            key: value for key, value in self.__dict__.items() if key not in ("_sync", "_group", "_finalizer", "tuning")
        }
        state["_require_sync"] = self.require_backward_grad_sync
        if self._sync is not None:
            state["_agreed_buffers"] = dict(self._sync.buffers.agreed)
            state["_options"] = self._options_now()
        return state

    def _options_now(self) -> SyncOptions:
        """The options, with the seed and the step of fixed micro-batches, which change while training."""
        loop = None if self._sync is None else self._sync.micro_loop
        return self._options if loop is None else replace(self._options, seed=loop.seed, steps=loop.steps)

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        nn.Module.__setstate__(self, state)
        require_sync = state["_require_sync"]
        self._connect(group, fresh=False)
        if self._sync is None or self._sync.micro_loop is None:
            self.require_backward_grad_sync = require_sync

    def extra_repr(self) -> str:
        """Ranks, back end and buckets, for `repr(model)`."""
        if "_sync" not in self.__dict__:
            return "constructor skipped: averages no gradients itself"
        if self._sync is None:
            return "no process group: calls pass through"
        buckets = ", ".join(f"{bucket.nbytes / MB:.3g}" for bucket in self.bucket_plan.buckets)
        group = self._sync.grads.group
        abilities = abilities_of(group, torch.device(self.bucket_plan.buckets[0].device))
        backend = f"{backend_of(group)} ({abilities})" if any(abilities) else backend_of(group)
        return f"rank={group.rank()}, world_size={group.size()}, backend={backend}, buckets=[{buckets}] MB"


def _remove_hooks(known: ref[ModuleSync]) -> None:
    """Take the hooks off the parameters of a wrapper that is freed, or lets go of its synchronisation."""
    sync = known()
    if sync is not None:
        sync.remove_hooks()


def _refuse_no_sync(sync: ModuleSync, what: str) -> None:
    """Raise DPFuseError where another loop decides which backwards synchronise."""
    if sync.micro_loop is not None:
        refuse("no_sync", f"rank {sync.grads.group.rank()}: {what} with", sync.in_use)


def _warn_of_wrappers_inside(module: nn.Module, ignored: Collection[str]) -> bool:
    """Warn if something averages the gradients of `module`, or of a part of it, already; return whether it does.

    The wrapper that is being made leaves the parameters in `ignored` alone.
    """
    for name, inner in module.named_modules():
        if wrapper_of(inner) is None and not isinstance(inner, nn.parallel.DistributedDataParallel):
            continue
        prefix = f"{name}." if name else ""
        if any(prefix + param not in ignored for param, _ in inner.named_parameters()):
            got = (
                f"{type(module).__name__} whose part {name!r} is a {type(inner).__name__}"
                if name
                else (type(inner).__name__)
            )
            warn_at_user(
                f"the module is wrapped twice: got a {got}, expected a bare module. Each gradient would be averaged by "
                "both wrappers, which takes twice the time. Wrap the bare module (.module), and wrap it once: not by "
                "hand if a library such as accelerate wraps it, and not after dpfuse.replicate()."
            )
            return True
    return False


def wrapper_of(model: nn.Module) -> SyncedModule | None:
    """Return the wrapper that averages a module's gradients; None if none of dpfuse does.

    Args:
        model: the wrapper itself, a module after `dpfuse.replicate`, or what torch.compile made of one of these.
    """
    model = uncompiled(model)
    if hasattr(type(model), "replicated_by"):
        model = model.replicated_by  # type: ignore[assignment]
    return model if isinstance(model, SyncedModule) else None


def bare_module(model: nn.Module) -> nn.Module:
    """Return the module without wrappers: its names do not depend on how it is trained."""
    while True:
        if isinstance(model, (SyncedModule, nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif (inner := inside_compiled(model)) is not None:
            model = inner
        else:
            return model


def wrappers_in(model: nn.Module) -> dict[str, SyncedModule]:
    """Return the wrappers of a model and of its parts, by the name of what each wraps in the bare model."""
    found: dict[str, SyncedModule] = {}
    seen: set[nn.Module] = set()

    def look(part: nn.Module, name: str) -> None:
        wrapper = wrapper_of(part)
        if wrapper is not None and wrapper not in seen:
            seen.add(wrapper)
            found[name] = wrapper
        bare = bare_module(part)
        if bare not in seen:
            seen.add(bare)
            for child_name, child in bare.named_children():
                look(child, f"{name}.{child_name}" if name else child_name)

    look(model, "")
    return found


def sync_of(model: SyncedModule, caller: str) -> ModuleSync | None:
    """Return what keeps the module the same on all ranks; None where the wrapper only passes calls through.

    Raises:
        TypeError: a user has passed something else to the function `caller`.
    """
    check_wrapped(model, caller)
    return model._sync


def loss_scale_of(model: SyncedModule) -> LossScale | None:
    """How the gradients stand to the scale of a `GradScaler`; None where the wrapper only passes calls through."""
    sync = model._sync
    if sync is None:
        return None
    refuse("GradScaler", f"rank {sync.grads.group.rank()}: a GradScaler was made with", sync.in_use)
    sync.attach_factors()
    return sync.factors.loss_scale


def check_wrapped(model: object, caller: str) -> None:
    """Raise TypeError unless `model`, which a user has passed to the function `caller`, is one of dpfuse's wrappers."""
    if not isinstance(model, SyncedModule):
        inner = ", whose `_orig_mod` may be one" if inside_compiled(model) is not None else ""
        remedy = "the result of dpfuse.DistributedDataParallel(module) or dpfuse.DataParallel(module)"
        if hasattr(type(model), "replicated_by"):
            remedy = "its replicated_by"
        raise TypeError(f"{caller}: model must be wrapped by dpfuse, got {type(model).__name__}{inner}. Pass {remedy}.")


@contextmanager
def time_communication(model: SyncedModule) -> Iterator[CommunicationTimes]:
    """Measure the communication of every synchronised backward inside the context, on this rank.

    Costs a few microseconds per bucket, and nothing outside the context.

    Args:
        model: a wrapped model. One that only passes calls through gives zeros.

    Returns:
        The totals of this rank: `steps`, `collectives`, `nbytes`, `seconds` (buckets in flight at the same time
        count each) and `exposed` (seconds that communication added to backward).

    Raises:
        TypeError: The model is not wrapped by dpfuse.

    Example:
        >>> import torch, dpfuse
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> with dpfuse.time_communication(model) as times:
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> times.steps, times.collectives
        (1, 1)
        >>> dist.destroy_process_group()
    """
    check_wrapped(model, "time_communication")
    times = CommunicationTimes()
    model._observe(times)
    try:
        yield times
    finally:
        model._observe(None)
        times.finish()
