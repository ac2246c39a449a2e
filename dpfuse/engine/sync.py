"""Gradient synchronisation of one module: wires planner, buckets, reducer and engine hooks. No user-facing names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dpfuse.engine import votes
from dpfuse.engine.autograd import BackwardListener, BackwardWatch, ReadyHooks
from dpfuse.engine.averaging import averaging_for
from dpfuse.engine.buckets.accumulating_bucket import refuse_accumulated
from dpfuse.engine.buckets.bucket import GradBucket
from dpfuse.engine.buckets.kinds import make_buckets, make_hooked_buckets
from dpfuse.engine.comm_hook import CommHook
from dpfuse.engine.device_guard import DeviceGuard, guard_of
from dpfuse.engine.phase import ABANDONED, IDLE
from dpfuse.engine.plan import BucketPlan, rebuild_plan
from dpfuse.engine.reducer import Reducer
from dpfuse.engine.timing import BackwardObserver, BucketObserver
from dpfuse.engine.waiting import LOSS, Track, board_of
from dpfuse.engine.window import Canary
from dpfuse.errors import DPFuseError
from dpfuse.gradients.error_feedback import ErrorFeedback
from dpfuse.gradients.factors import GradientFactors
from dpfuse.gradients.finite import FiniteCheck, FiniteCounter
from dpfuse.gradients.norm import GradientReader, Gradients
from dpfuse.gradients.square_sum import SquareSum
from dpfuse.model.agreement import send_tensors
from dpfuse.model.buffers import BufferSync
from dpfuse.model.change import ModelChange
from dpfuse.model.check import check_module, describe_model, tensors_of
from dpfuse.model.options import SyncOptions
from dpfuse.model.signature import ModelSignature

__all__ = ["GradSync"]


class GradSync:
    """Averages a module's gradients over a group in every backward that is to synchronise.

    Args:
        module: checked by `check_module`, equal on all ranks.
        plan: its buckets.
        group: process group.
        options: of the wrapper.
        canary: of the wrapper.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        options: SyncOptions,
        canary: Canary,
    ) -> None:
        self.plan = plan
        self.group = group
        self.canary = canary
        self._module = module
        self._options = options
        self.broadcast_buffers = options.broadcast_buffers
        self.compare_buffers = options.broadcast_buffers  # whether some forward sends them, if maybe not this one
        self.wire = options.wire.dtype  # name of the dtype that travels; None: each gradient's own
        self.source = 0  # the rank whose buffers and ready order all ranks take
        self.before_collectives: Callable[[], None] | None = None  # called in before_forward, once all is well
        self.module_changed: Callable[[], None] | None = None  # called when it may have, before it is looked at
        self.buffer_hook: Callable[[], None] | None = None  # what synchronises the buffers in our place
        self._buffers = BufferSync(module, options.ignored, group)
        self._buffer_kinds = self._buffers.look()  # those that the description of a change would name
        self.hook: CommHook | None = None  # what reduces the gradients in our place
        self._times: BucketObserver | None = None
        self._recorder: BackwardObserver | None = None
        self._wish = ""  # what this rank has asked for, until all ranks have
        self._signature = ModelSignature(module, options.ignored)
        self._reader = GradientReader(module, self._signature, group.rank())
        self._change: ModelChange | None = None  # of this rank's module, until all ranks have heard of it
        self._planned = _params_of(module, plan)
        self._use_params(self._planned)
        self._marks = [1] * len(self._params)  # how often each of them becomes ready in a backward
        self._watch = BackwardWatch(canary.reached)
        self.error_feedback = ErrorFeedback(group.rank(), group.size()) if options.error_feedback else None
        self._finite: FiniteCheck | None = None
        self.factors = GradientFactors(canary, options.gradient_scale, group.rank(), group.size())
        if options.check_finite != "off":
            self._finite = FiniteCheck(
                raises=options.check_finite == "raise",
                late=self._params[0].is_cuda,
                rank=group.rank(),
                step=lambda: self.reducer.completed + 1,
            )
        self.track = Track(board_of(group), canary.wrapper, options.stall_timeout)
        self.reducer = Reducer(
            self._make_buckets(plan),
            _names(plan),
            canary=canary,
            index_of=lambda param: self._indices[id(param)],
            warn_unused=not options.find_unused_parameters,
            open_backward=self._watch.begin,
            rebuild=self._rebuild,
        )
        if self.error_feedback is not None:
            self._plan_residuals(self.error_feedback)
            self.reducer.after_delivery = (self.error_feedback.delivered,)
        if self._finite is not None:
            self.reducer.after_delivery = (*self.reducer.after_delivery, self._finite.warn)
        self.reducer.track = self.track
        self.reducer.strict = options.checked == "strict"
        self.reducer.guard = self._guard()
        self._watch.listener = self.reducer
        self._hooks = ReadyHooks(self._params, self._markers())

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """Those whose gradients are averaged, in the order of registration."""
        return self._params

    def before_forward(self) -> None:
        """To be called before a forward with gradients enabled.

        Raises:
            DPFuseError: the last backward was interrupted here only.
        """
        self.track.begin(self.reducer.completed)
        if self.reducer.phase is ABANDONED:
            self.reducer.drain()
        idle = self.reducer.phase is IDLE
        # During a backward it is a checkpoint that recomputes, and stops where it has what it needs.
        self.canary.forward_begins(counts=idle and self._module.training)
        if idle:
            unchanged = self._signature.unchanged()
            # A buffer that only this rank has must not travel: the peers would take it for another.
            if not unchanged or (self.compare_buffers and self._buffers.look() is not self._buffer_kinds):
                self._follow_module()
        if self.before_collectives is not None:
            self.before_collectives()
        if self.broadcast_buffers:
            self.send_buffers()

    def after_forward(self, outputs: Any) -> None:
        """To be called with the outputs of that forward."""
        self.track.tell(LOSS, self.reducer.completed)
        watched = self._watch.watch(outputs, self.canary.began)
        self.canary.forward_ends(watched=watched)
        self.reducer.record_forward(self.reducer.require_sync, outputs_watched=watched)

    def listen_through(self, wrap: Callable[[BackwardListener], BackwardListener]) -> None:
        """Let what `wrap` makes of the reducer hear of backwards, and pass them on."""
        self._watch.listener = wrap(self.reducer)

    def send_buffers(self) -> None:
        """Overwrite the buffers with those of rank `source`, or do what the user has registered instead."""
        if self.buffer_hook is not None:
            self.buffer_hook()
        else:
            self._buffers.send(self.source)

    def send_model(self, *, buffers: bool) -> None:
        """Overwrite parameters, and buffers if asked to, with those of rank `source`."""
        params, others = tensors_of(self._module, self._options)
        send_tensors([*params.values(), *(others.values() if buffers else ())], self.group, self.source)

    def average_over(self, rank_count: int) -> None:
        """Divide the sums of the next backwards by this number; a communication hook divides by its own."""
        for bucket in self.reducer.buckets:
            scale, wire = self._options.gradient_scale, self.wire
            bucket.average_by(averaging_for(bucket.plan.dtype, rank_count, scale, wire))

    def observe(self, times: BucketObserver | None) -> None:
        """Report every bucket's way to `times`, or to nobody."""
        self._times = times
        if self._recorder is not None:
            self._recorder.also, times = times, self._recorder
        for bucket in self.reducer.buckets:
            bucket.times = times

    def record(self, recorder: BackwardObserver | None) -> None:
        """Let `recorder` stand between engine and reducer, and see every bucket's way; None gives all back."""
        self._recorder = recorder
        self._watch.listener = self.reducer if recorder is None else recorder
        self._equip_buckets()

    @property
    def recording(self) -> bool:
        """Whether there is a recorder, and all ranks know of it."""
        return self._recorder is not None and not self._wish

    def ask(self, wish: str) -> None:
        """Have the next synchronised backward fail on all ranks unless each of them has asked for the same.

        A rank that asked alone must not wait for an answer to come. So it tells what a changed module would tell.
        """
        if self.reducer.phase is not IDLE:
            raise DPFuseError(
                f"rank {self.group.rank()}: autotune was called while a backward is {self.reducer.phase.name}, "
                "expected it between backwards."
            )
        self._wish = wish
        self._follow_module()

    def shadow_backward(self) -> None:
        """As that of the reducer; a recorder hears of it."""
        self.factors.attach(self.reducer)  # the others may give weights
        self.reducer.shadow_backward()
        if self._recorder is not None:
            self._recorder.shadowed()

    def use_plan(self, plan: BucketPlan) -> None:
        """Use these buckets of the same parameters from the next backward on; to be called as `_rebuild` is."""
        assert self.reducer.phase is IDLE
        assert self._change is None
        assert plan.specs == self.plan.specs
        self.plan = plan
        self._use_buckets(self._marks)

    def set_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the gradients from the next synchronised backward on.

        Raises:
            RuntimeError: there is one already; a backward is running, or was interrupted; the wrapper was told how
                gradients travel.
        """
        if self.hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Got "
                f"{hook.name} after {self.hook.name}; wrap the module again to change it."
            )
        phase = self.reducer.phase
        refused = hook.refused(
            option=self._options.of_communication,
            recording=self._recorder is not None,
            backward="" if phase is IDLE else phase.name,
            change="" if self._change is None else self._change.text,
        )
        if refused:
            raise DPFuseError(f"rank {self.group.rank()}: {refused}")
        self.hook = hook
        self._use_buckets(self._marks)

    def gradients(self) -> Gradients:
        """What `.grad` of all parameters of the module is now; raises DPFuseError if they cannot be read."""
        refuse_accumulated(self._params, f"rank {self.group.rank()}: the norm of the gradients was asked for")
        return self._reader.read(self.reducer, _names(self.plan), self._planned)

    def remove_hooks(self) -> None:
        """Leave the module as if it had never been wrapped."""
        self._hooks.remove()
        self.reducer.local.hand_back()
        self.factors.loss_scale.found = None  # what is wrapped again is unscaled by others

    def _use_params(self, params: list[nn.Parameter]) -> None:
        self._params = params
        self._indices = {id(param): index for index, param in enumerate(params)}

    def _make_buckets(self, plan: BucketPlan) -> list[GradBucket]:
        if self.hook is not None:
            views = self._options.gradient_as_bucket_view
            buckets = make_hooked_buckets(plan, self._params, self.group, self.hook, views=views, canary=self.canary)
        else:
            buckets = make_buckets(
                plan,
                self._params,
                self.group,
                scale=self._options.gradient_scale,
                wire=self._options.wire,
                views=self._options.gradient_as_bucket_view,
                canary=self.canary,
                registered=self._options.registered,
                deterministic=self._options.deterministic,
                feedback=self.error_feedback,
                accumulates=self._options.accumulate_in_buckets,
            )
        for order, bucket in enumerate(buckets):
            bucket.finite = None if self._finite is None else FiniteCounter(self._finite, is_first=order == 0)
            if self._options.grad_norm_in_backward:
                bucket.squares = SquareSum(torch.zeros((), dtype=torch.float64, device=bucket.plan.device))
        return buckets

    def _guard(self) -> DeviceGuard | None:
        squares = [bucket.squares.value for bucket in self.reducer.buckets if bucket.squares is not None]
        return guard_of(self._params, self.group.size(), squares)

    def _rebuild(self, order: list[int], marks: list[int]) -> None:
        # Backward is over and everything is averaged, so no bucket is in flight and nothing accumulated
        # waits for the old layout. Gradients that are views keep the old buffers alive until they are freed.
        order, marks = votes.agree_on_order(order, marks, self.group, self.source)
        if not self.plan.tuned and not self._options.deterministic:
            self.plan = rebuild_plan(self.plan, order)
        self._use_buckets(marks)

    def _use_buckets(self, marks: list[int]) -> None:
        self._marks = marks
        self.reducer.adopt(self._make_buckets(self.plan), marks)
        self._equip_buckets()

    def _plan_residuals(self, feedback: ErrorFeedback) -> None:
        residuals = [bucket.residual for bucket in self.reducer.buckets]
        feedback.plan(spec for residual in residuals if residual is not None for spec in residual.specs)

    def _equip_buckets(self) -> None:
        """What buckets have besides their gradients, and hooks for them."""
        self.observe(self._times)
        self.reducer.guard = self._guard()
        self._hooks.replace(self._params, self._markers())
        self.factors.equip(self.reducer)

    def _follow_module(self) -> None:
        """Prepare for the module as it is now, without knowing yet whether it is the same on the other ranks."""
        self.reducer.local.hand_back()  # buckets may be replaced
        if self.module_changed is not None:
            self.module_changed()
        text = self._signature.change()
        kinds = self._buffers.look(again=True)
        if self.compare_buffers:
            self._buffer_kinds = kinds
            text = text or self._buffers.change()
        kept = None if text else self.plan
        if text is None and self._wish:
            text = "autotune was called"
        if text is None:
            if self._change is not None:
                self._change = None
                self._use_params(self._planned)
                self.reducer.unfollow(_names(self.plan), self._marks)
                self._equip_buckets()
            return
        if not any(param.requires_grad for param in tensors_of(self._module, self._options)[0].values()):
            return  # nothing of it trains; once something does again, it will be seen
        self._change = self._describe_change(text, kept)
        plan = self._change.plan
        if isinstance(plan, BucketPlan) and plan is not self.plan:
            self._use_params(_params_of(self._module, plan))
        else:
            plan = self.plan
            self._use_params(self._planned)
        self.reducer.follow(self._make_buckets(plan), _names(plan), text, self._agree_on_change)
        self._equip_buckets()

    def _describe_change(self, text: str, kept: BucketPlan | None) -> ModelChange:
        plan: BucketPlan | Exception
        if self.hook is not None:
            plan = DPFuseError(
                f"rank {self.group.rank()}: {text} after the module was wrapped; expected no such change once the "
                f"communication hook {self.hook.name} is registered, whose state may depend on the buckets. Wrap the "
                "module again, on every rank, and register the hook there."
            )
        else:
            try:
                plan = kept or check_module(self._module, self._options, self.group, ours=self._indices)
            except (TypeError, ValueError) as error:
                plan = error
        if isinstance(plan, Exception):
            return ModelChange(text, plan, [], {})
        facts = describe_model(self._module, plan, self._options, buffers=self.compare_buffers)
        if self._wish:
            facts.append(self._wish)
        return ModelChange(text, plan, facts, self._signature.new_parameters())

    def _agree_on_change(self) -> None:
        assert self._change is not None
        self.plan = self._change.agree(self.group)
        self._planned = self._params
        self._marks = [1] * len(self._params)
        self._signature.agree()
        self._change = None
        self._wish = ""
        self._buffers.agree_on(self._buffer_kinds, self.source)
        if self.error_feedback is not None:
            self._plan_residuals(self.error_feedback)

    def _markers(self) -> list[Callable[[Any], None]]:
        markers = self.reducer.markers()
        for bucket in self.reducer.buckets:
            if bucket.writers is not None and bucket.plan.params:
                marker = bucket.writers.noting(markers[bucket.plan.params[0]])
                for index in bucket.plan.params:
                    markers[index] = marker
        if self._recorder is not None:
            markers = self._recorder.stamped(markers)
        for marker in markers:
            marker.alone = self._options.wants_params_alone  # type: ignore[attr-defined]  # see _check_alone
        return markers


def _names(plan: BucketPlan) -> list[str]:
    return [spec.name for spec in plan.specs]


def _params_of(module: nn.Module, plan: BucketPlan) -> list[nn.Parameter]:
    named = dict(module.named_parameters())
    return [named[name] for name in _names(plan)]
