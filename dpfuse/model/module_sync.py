"""The synchronisation of one wrapped module: its gradients, its buffers, and what follows when it is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist
from torch import nn

from dpfuse.comm import votes
from dpfuse.comm.completion import let_threads_finish_at_exit
from dpfuse.comm.waiting import FORWARD, LOSS, Board, board_of
from dpfuse.engine.backward_table import ABANDONED, IDLE, RESTING
from dpfuse.engine.bucket_set import names_of
from dpfuse.engine.events import Inputs, Watcher
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.feature import Feature
from dpfuse.engine.feeds.accumulating import refuse_accumulated
from dpfuse.engine.inner_tensors import has_memory, inner_tensors
from dpfuse.engine.local_part import LocalPart, is_divided, leaf_of
from dpfuse.engine.micro_batches import MicroBatches
from dpfuse.engine.param_spec import grad_dtype_of
from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.settings import SyncSettings
from dpfuse.engine.sync import GradSync, Wrap
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError
from dpfuse.exclusions import refuse
from dpfuse.gradients.divided_norm import DividedGradients
from dpfuse.gradients.error_feedback import ErrorFeedback
from dpfuse.gradients.finite import FiniteCheck
from dpfuse.gradients.loss_scale_and_weight import GradientFactors
from dpfuse.gradients.norm import GradientReader, Measurable, refuse_running
from dpfuse.loop.journal import Journal
from dpfuse.loop.loop_check import LoopCheck
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.loop.wrapped_group import tell_of_group
from dpfuse.measure.metrics import Metrics
from dpfuse.model.agreement import send_tensors
from dpfuse.model.buffer_schedule import BufferSchedule
from dpfuse.model.buffers import BufferKind, BufferSync
from dpfuse.model.check import describe_attributes, named_kinds, tensors_of
from dpfuse.model.foreign_tensors import send_foreign
from dpfuse.model.micro_loop import MicroLoop
from dpfuse.model.module_follower import ModuleFollower, params_of
from dpfuse.model.open_window import OpenWindow
from dpfuse.model.options import SyncOptions
from dpfuse.model.signature import ModelSignature
from dpfuse.stopping.mesh_groups import groups_around
from dpfuse.stopping.request import StopRequest
from dpfuse.stopping.wish import StopReason
from dpfuse.weights.check import WeightsCheck
from dpfuse.weights.uncompared import compare_none

__all__ = ["Dividing", "FaceParts", "ModuleSync"]


@dataclass(frozen=True)
class FaceParts:
    """What a face adds to the synchronisation. None of it may keep the wrapper alive.

    Args:
        watcher: hears of averaged gradients, and has a place among the watchers for that.
        wrap: puts a listener of the face in front of the reducer.
        module_changed: called when the module may have changed, before it is looked at.
        meshes: of which the group is a dimension, if the face was given any.
    """

    watcher: Watcher | None = None
    wrap: Wrap = lambda reducer: reducer
    module_changed: Callable[[], None] | None = None
    meshes: Sequence[object] = ()


class Dividing(Feature):
    """Lets each rank receive only its part of the averaged gradients."""

    divides = True
    in_backward = False  # whether gradients are used up when a backward returns

    def gradients(self) -> Measurable:
        """Return the parts of all ranks as one."""
        raise NotImplementedError


class ModuleSync:
    """Keeps a module the same on all ranks: gradients in every backward that synchronises, buffers when asked to.

    Args:
        module: checked by `check_module`, equal on all ranks.
        number: of the wrapper, among those of its group.

    Attributes:
        grads: the synchronisation of the gradients; it owns the group, the plan and the reducer.
        window: counts what ranks must have in common.
        factors: what multiplies gradients while they are packed.
        error_feedback: what a narrow wire rounds away, if that is kept.
        buffers: when they are sent.
        weights: compares the weights of the ranks, if that was asked for.
        loop: looks at the training loop, if that was asked for.
        journal: writes down what the training does, if that was asked for.
        metrics: measures synchronised backwards, if that was asked for.
        micro_loop: the loop over a fixed number of micro-batches, if that was asked for.
        stop: asks the ranks to stop together.
        open_window: knows whether gradients have accumulated that no step has used.
        before_collectives: called in `before_forward`, once all is well.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        options: SyncOptions,
        number: int,
        face: FaceParts = FaceParts(),
        agreed_buffers: Mapping[str, BufferKind] | None = None,
    ) -> None:
        fixed = options.micro_batches is not None  # then ranks have different numbers of forwards and backwards
        self.window = Window(counts_forwards=not (options.find_unused_parameters or fixed), counts_backwards=not fixed)
        self.before_collectives: Callable[[], None] | None = None
        self.options = options
        self._module = module
        self._dividing: Dividing | None = None
        self._factors_due = False  # whether factors were asked for while they could not be attached
        self._divided: tuple[Sequence[Any], str] = (), ""  # a name, and for which planned parameters it was looked for
        self._sent = buffers = BufferSync(module, options.ignored, group, agreed_buffers)
        self.buffers = BufferSchedule(buffers, active=options.broadcast_buffers)
        if options.broadcast_buffers:
            buffers.keep_values()
        signature = ModelSignature(module, options.ignored)
        self._reader = GradientReader(module, signature, group.rank())
        self.factors = GradientFactors(
            self.window,
            options.gradient_scale,
            group,
            lambda: self.in_use,
            strict=options.strict,
        )
        params = params_of(module, plan)
        self.error_feedback = (
            ErrorFeedback(group.rank(), group.size(), options.wire) if options.common["error_feedback"] else None
        )
        watchers: list[Watcher] = [self.buffers] if options.broadcast_buffers else []
        watchers += [] if self.error_feedback is None else [self.error_feedback]
        self.metrics: Metrics | None = None
        if options.common["metrics"]:
            every, weight = int(options.common["metrics"]), self.factors.weight
            self.metrics = Metrics(every, weight)
            watchers += [self.metrics, self.metrics.step_times]
        if options.common["check_finite"] != "off":
            raises = options.common["check_finite"] == "raise"
            watchers.append(FiniteCheck(raises=raises, late=params[0].is_cuda))
        watchers += [] if face.watcher is None else [face.watcher]
        self.micro_loop: MicroLoop | None = None
        if (count := options.micro_batches) is not None:
            self.micro_loop = MicroLoop(
                MicroBatches(count, group.size()),
                group.rank(),
                module,
                self.window,
                seed=options.seed,
                steps=options.steps,
                threads=options.threads,
            )
            watchers.append(self.micro_loop)
        divided = [each.whole.device_mesh for each in params if type(each) is LocalPart]
        groups = groups_around(group, dict.fromkeys([*face.meshes, *divided]), number, late=params[0].is_cuda)
        self.stop = StopRequest(groups)
        watchers.append(self.stop)
        self.weights: WeightsCheck | None = None
        self.loop: LoopCheck | None = None
        self.journal: Journal | None = None
        self._timed_on: Board | None = None  # where the heartbeat finds the times of steps
        level = options.common["check_training"]
        if level != "off":
            tell_of_group(group)
            board = board_of(group)
            self._timed_on = None if board is None or board.heartbeat is None else board
            record = TrainingRecord(
                lambda: dict(zip(names_of(self.grads.plan), map(leaf_of, self.grads.params), strict=True)), group, level
            )
            if group.size() > 1:
                self.weights = WeightsCheck(lambda: tensors_of(module, options)[0], signature, group, level=level)
                self.loop = LoopCheck(module, record, self.weights.suspect)
                watchers.append(self.loop)
            if self.loop is not None or self._timed_on is not None:
                self.journal = Journal(module, record, self._timed_on, self.loop)
                watchers.append(self.journal)
            watchers += [] if self.weights is None else [self.weights]  # the last: they may raise in `delivered`
        self.grads = GradSync(
            plan,
            params,
            group,
            _settings_of(options, number, module, None if self.micro_loop is None else self.micro_loop.deal),
            window=self.window,
            watchers=watchers,
            later=[self.factors],
            wrap=face.wrap,
        )
        self.open_window = OpenWindow(self.window, self.grads)
        self.grads.events.add(self.open_window)
        self.grads.order.complete = WeakMethod(self._complete_failed)
        if level == "off":
            compare_none(self.grads.hooks)  # also where its parameters are averaged by hand
        let_threads_finish_at_exit()
        self._plan_residuals()
        self._follower = ModuleFollower(
            module,
            signature,
            options,
            self.grads,
            buffers,
            self.buffers,
            may_have_changed=face.module_changed,
            agreed=self._plan_residuals,
            window=self.window,
        )

    def before_forward(self, inputs: Inputs = ((), {})) -> bool:
        """To be called before a forward that may have a backward.

        Returns:
            Whether its backward may reach parameters of the module. It cannot where `functional_call()` has put other
            leaves into all their places; the forward is then none of the wrapper's.

        Raises:
            DPFuseError: the last backward was not averaged, or the ranks can no longer reach each other.
        """
        reducer, window = self.grads.reducer, self.window
        track = self.grads.track
        track.board.thread = get_ident()
        track.board.place = track.wrapper, FORWARD, reducer.completed, -1
        watch = self.grads.watch
        if watch.unopened:
            watch.look_back()
        if reducer.state is ABANDONED or self.grads.order.turns.failed:
            self.complete_failed()
        idle, own_tensors = reducer.state is IDLE, True
        if self.grads.lost.begun is not None and self._dividing is None:  # an optimizer that divides tells it itself
            self.grads.lost.look(reducer.completed)
        if idle:
            reducer.refuse_unaveraged()
            own_tensors = self._follower.look()
            if not own_tensors and not self._follower.reaches_parameters():
                return False
        # During a backward it is a checkpoint that recomputes, and stops where it has what it needs.
        counts = idle and self._module.training
        try:
            window.forward_begins(counts=counts)
            if self.before_collectives is not None:
                self.before_collectives()
            for begins in self.grads.events.forward_begins if idle else ():
                begins(inputs)
            buffers = self.buffers
            if (buffers.before_forward or buffers.beside_gradients) and (self._sent.agreed or buffers.hook is not None):
                # Those that stand in for the module's own are the program's. The next forward sends the module's.
                due = own_tensors and buffers.due(counts=counts)
                buffers.begin_forward(due=due, counts=counts, local=not window.require_sync, is_own=own_tensors)
        except BaseException:
            if window.counts:
                window.forward_failed()  # and not `buffers`: this forward may not have sent them
            raise
        return True

    def complete_failed(self) -> None:
        """Complete what the peers wait for, if a backward has failed on this rank, also of another model."""
        self.grads.watch.look_back()
        self.grads.order.complete_failed()
        self._complete_failed()

    def _complete_failed(self) -> None:
        reducer = self.grads.reducer
        if reducer.missed:
            reducer.abandon(opened=False)
        if reducer.state is ABANDONED:
            reducer.drain()
        if self._factors_due:
            self.attach_factors()

    def stop_reason(self) -> StopReason | None:
        """Why all ranks stop, if they do. A rank whose backward has failed takes part in it first, to hear of it."""
        reducer = self.grads.reducer
        if reducer.state is ABANDONED or self.grads.order.turns.failed:
            self.complete_failed()
        return self.stop.reason()

    def forward_failed(self) -> None:
        """To be called where the forward has raised, or what is done around it; it can be called again.

        A program may now train its batch in halves, or another one in its place, which is nothing that the other ranks
        must know. If it skips the batch, it has fewer batches than they have, and the heartbeat names this forward.
        """
        if self.window.counts:
            self.buffers.forward_failed()
            self.window.forward_failed()

    def after_forward(self, outputs: Any, *, takes_part: bool = True) -> None:
        """To be called with the outputs of that forward, and what `before_forward` returned."""
        reducer = self.grads.reducer
        track = self.grads.track
        track.board.place = track.wrapper, LOSS, reducer.completed, -1
        if not takes_part:
            return
        watched = self.grads.watch.watch(outputs, self.window.began)
        self.window.forward_ends(watched=watched, trains=self._module.training)

    @property
    def buffers_due(self) -> bool:
        """Whether a forward that begins now sends buffers first."""
        return self.buffers.due(counts=self._module.training)

    def send_model(self, *, buffers: bool) -> None:
        """Overwrite parameters, and buffers if asked to, with those of the rank `grads.source`."""
        params, others = tensors_of(self._module, self.options)
        named = named_kinds(params, others if buffers else {})
        send_tensors(named.values(), self.grads.group, self.grads.source)
        send_foreign(named, self.grads.group, self.grads.source)
        self.grads.lost.weights_replaced()
        self.buffers.sent_otherwise()
        if self.weights is not None:
            self.weights.synchronized()

    def synchronize_weights(self) -> None:
        """As that of the wrapper."""
        group = self.grads.group
        self._refuse_running("synchronize_weights() was called", " Call it once backward() has returned.")
        what, remedy = "the weights to be synchronized", "Change the module in the same way on every rank."
        try:
            named = named_kinds(*tensors_of(self._module, self.options))
            lines = [
                f"{name}{path} {tuple(each.shape)} {each.dtype}"
                for name, tensor in named.items()
                for path, each in (inner_tensors(tensor) or {}).items()
            ]
            lines += describe_attributes(named)
        except Exception as error:
            votes.report_failure(error, group, what)
            raise
        votes.agree_on_text("\n".join(lines), group, what, remedy)
        self.send_model(buffers=True)

    @property
    def differing_weights(self) -> dict[str, int]:
        """Parameters in which the ranks are known to differ, each with the averaged backward of which that is known.

        Frozen ones, of which each rank may have its own, are not among them.
        """
        return {} if self.weights is None else self.weights.wrong

    @property
    def late_ranks(self) -> dict[str, float]:
        """Numbers of the ranks that are late in each step, on the first rank; empty as long as none is known to be."""
        return {} if self._timed_on is None else self._timed_on.late

    def weigh(self, weight: Any, reduction: Any) -> None:
        """As `set_gradient_weight` of the wrapper."""
        self.factors.weigh(weight, reduction)
        if weight is not None:
            self.attach_factors()
            self.buffers.numbers_differ = True

    def attach_factors(self) -> None:
        """Have gradients multiplied from the next backward on; a model that never asks for that has no cost of it."""
        if self.factors.attached:
            return
        self._factors_due = self.grads.reducer.state is not IDLE  # then once what is in flight is drained
        if not self._factors_due:
            self.factors.attached = True
            self.grads.add_feature(self.factors, joined=True)

    @property
    def recording(self) -> bool:
        """Whether there is a recorder, and all ranks know of it."""
        return self.grads.hooks.recorder is not None and not self._follower.wishes

    def ask(self, wish: str) -> None:
        """Let the next synchronised backward fail on all ranks unless each of them has asked for the same.

        Raises:
            DPFuseError: a backward is running.
        """
        self._refuse_running("autotune was called")
        self._follower.ask(wish)

    def _refuse_running(self, what: str, remedy: str = "") -> None:
        """Complete a backward that has failed. Raise DPFuseError if `what` was done while one is running."""
        if self.grads.reducer.state in RESTING:
            self.complete_failed()
        state = self.grads.reducer.state
        if state is not IDLE:
            raise DPFuseError(
                f"rank {self.grads.group.rank()}: {what} while a backward is {state.name}, expected it between "
                f"backwards.{remedy}"
            )

    def shadow_backward(self) -> None:
        """As that of `GradSync`."""
        self.attach_factors()  # the others may give weights
        if self.weights is not None:
            self.weights.without_inputs()
        self.grads.shadow_backward()

    def set_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the gradients from the next synchronised backward on.

        Raises:
            RuntimeError: there is one already; a backward is running; the wrapper was told how gradients travel.
        """
        if self.grads.hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Got "
                f"{hook.name} after {self.grads.hook.name}; wrap the module again to change it."
            )
        rank, change = self.grads.group.rank(), self.grads.reducer.change
        refuse("hook", f"rank {rank}: a communication hook was registered with", self.in_use)
        self._refuse_running("a communication hook was registered", " Register it right after wrapping.")
        if change:
            raise DPFuseError(
                f"rank {rank}: a communication hook was registered after {change} and before a backward synchronised "
                "since. Register it before the change, or after that backward."
            )
        self.grads.set_hook(hook)
        if self.weights is not None:
            self.weights.turn_off("a communication hook may give each rank other gradients")

    def check_divisible(self, *, in_backward: bool = False) -> None:
        """Raise ValueError if gradients cannot be divided among the ranks, or be used up when a backward returns.

        It comes before the first collective of what is to divide them, so a backward that has failed is completed.
        """
        self.complete_failed()
        in_use, wire, specs = self.in_use, self.options.wire, self.grads.plan.specs
        if self.factors.weight.value is not None:
            in_use["weight"] = "gradient weights"
        if wire.dtype is not None and any(spec.dtype != wire.dtype for spec in specs):
            in_use["wire of another dtype"] = wire.argument
        if other := [spec for spec in specs if spec.sparse or spec.dtype.startswith("complex")]:
            in_use["indivisible parameter"] = f"the parameter {other[0].name!r}, whose gradient is sparse or complex"
        for spec, param in zip(specs, self.grads.params, strict=True):
            if grad_dtype_of(param) != param.dtype:
                in_use["indivisible parameter"] = (
                    f"the parameter {spec.name!r} of dtype {param.dtype}, whose grad_dtype is {grad_dtype_of(param)}"
                )
            if not has_memory(param):
                in_use["indivisible parameter"] = (
                    f"the parameter {spec.name!r}, a {type(param).__qualname__}, whose values are in other tensors"
                )
        if self.options.threads > 1:
            in_use["several threads"] = f"DPFUSE_THREADS={self.options.threads} and fixed_micro_batches"
        refuse("ShardedOptimizer", "a ShardedOptimizer was made with", in_use, ValueError)
        if in_backward:
            refuse("step_in_backward", "a ShardedOptimizer was made with step_in_backward=True and", in_use, ValueError)

    @property
    def in_use(self) -> dict[str, str]:
        """What is in use of what `dpfuse.exclusions` names, in words.

        A weight is not in it: it may be taken back, and the backward for which it was given asks itself.
        """
        in_use, hook, dividing = self.options.in_use, self.grads.hook, self._dividing
        if hook is not None:
            in_use["hook"] = f"the communication hook {hook.name}"
        if dividing is not None:
            in_use["ShardedOptimizer"] = "a ShardedOptimizer of the same model"
        if dividing is not None and dividing.in_backward:
            in_use["step_in_backward"] = "step_in_backward=True of the model's ShardedOptimizer"
        if self.factors.attached:
            in_use["GradScaler"] = "a GradScaler"
        if self.grads.hooks.recorder is not None:
            in_use["autotune"] = "autotune, which records"
        if self.divided:
            in_use["DTensor"] = f"the DTensor {self.divided!r} in the model"
        return in_use

    @property
    def divided(self) -> str:
        """The name of a parameter that is a DTensor; empty if there is none. Looked for where the plan changes."""
        planned, name = self._divided
        if planned is not self.grads.params:
            named = self._module.named_parameters()
            planned, name = self.grads.params, next((name for name, param in named if is_divided(param)), "")
            self._divided = planned, name
        return name

    def divide(self, dividing: Dividing) -> None:
        """Let each rank receive only its part of the averaged gradients, from the next backward on."""
        self.grads.add_feature(dividing)
        self._dividing = dividing

    def gradients(self) -> Measurable:
        """What `.grad` of all parameters of the module is now; raises DPFuseError if they cannot be read."""
        grads = self.grads
        if self.micro_loop is not None:
            self.micro_loop.refuse_inside("the norm of the gradients was asked for")
        if self._dividing is not None:
            refuse_running(grads.reducer, grads.group.rank())
            return self._dividing.gradients()
        if self.divided:
            refuse_running(grads.reducer, grads.group.rank())
            return DividedGradients(self._module.named_parameters())
        refuse_accumulated(grads.params, f"rank {grads.group.rank()}: the norm of the gradients was asked for")
        return self._reader.read(grads.reducer)

    def remove_hooks(self) -> None:
        """Leave the module as if it had never been wrapped."""
        self.grads.remove_hooks()
        self.factors.loss_scale.forget()  # what is wrapped again is unscaled by others

    def _plan_residuals(self) -> None:
        if self.error_feedback is not None:
            self.error_feedback.plan(self.grads.reducer.buckets)


def _settings_of(
    options: SyncOptions, number: int, module: nn.Module, micro_batches: MicroBatches | None
) -> SyncSettings:
    # Its backward has collectives of its own, between which buckets must be sent at the same place on every rank.
    between = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    return SyncSettings(
        number=number,
        scale=options.gradient_scale,
        wire=options.wire,
        views=options.gradient_as_bucket_view,
        registered=options.registered,
        deterministic=options.common["deterministic"],
        micro_batches=micro_batches,
        accumulates=options.common["accumulate_in_buckets"],
        strict=options.strict,
        warn_unused=not options.find_unused_parameters,
        alone=options.wants_params_alone,
        asks_graph=options.find_unused_parameters or between,
        stall_timeout=options.common["stall_timeout"],
    )
