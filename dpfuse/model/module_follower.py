"""What follows when a wrapped module is changed: the change is found, described and agreed on. Sends no gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from dpfuse.engine.bucket_set import BucketSet, names_of
from dpfuse.engine.local_part import LocalPart, leaf_of, local_of
from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.sync import GradSync
from dpfuse.engine.sync_decision import Window
from dpfuse.errors import DPFuseError
from dpfuse.model.buffer_schedule import BufferSchedule
from dpfuse.model.buffers import BufferSync
from dpfuse.model.change import ModelChange, decline
from dpfuse.model.check import check_module, describe_model, tensors_of
from dpfuse.model.options import SyncOptions
from dpfuse.model.signature import ModelSignature
from dpfuse.model.transforms import functional_call_runs

__all__ = ["ModuleFollower", "params_of"]


class ModuleFollower:
    """Notices that the module of this rank was changed, and prepares the synchronisation of its gradients for that.

    Args:
        schedule: whether buffers are ever sent. Then the ranks compare which ones they have.
        may_have_changed: called before the module is looked at.
        agreed: called once all ranks have changed their modules in the same way.
    """

    def __init__(
        self,
        module: nn.Module,
        signature: ModelSignature,
        options: SyncOptions,
        grads: GradSync,
        buffers: BufferSync,
        schedule: BufferSchedule,
        *,
        may_have_changed: Callable[[], None] | None,
        agreed: Callable[[], None],
        window: Window,
    ) -> None:
        self._module = module
        self._signature = signature
        self._options = options
        self._grads = grads
        self._buffers = buffers
        self._schedule = schedule
        self._window = window
        self._had_buffers = buffers.exist
        self._may_have_changed = may_have_changed
        self._agreed = agreed
        self._wish = ""  # what this rank has asked for, until all ranks have

    @property
    def wishes(self) -> bool:
        """Whether this rank has asked for something that not all ranks have heard of."""
        return bool(self._wish)

    def look(self) -> bool:
        """Follow the module if it has changed since the last call. To be called between backwards.

        Returns:
            False where `functional_call()` lets tensors stand in for parameters or buffers, which is no change.
        """
        unchanged, buffers = self._signature.unchanged(), self._buffers
        found, sends = buffers.found, self._schedule.beside_gradients
        if sends and (found or any(buffers.tables)):
            buffers.look_for_others()
        if (not unchanged or buffers.found is not found) and functional_call_runs(self._module):
            return False
        if not unchanged:
            self._follow()
        elif self._signature.moved:
            self._signature.moved = False
            self._grads.hooks.restore()
            for param in self._grads.params:
                if type(param) is LocalPart:
                    param.renew()
        if sends and not self._had_buffers and (buffers.agreed or buffers.found):
            self._had_buffers = True
            self._grads.remake()
        return True

    def reaches_parameters(self) -> bool:
        """As that of `ModelSignature`."""
        return self._signature.reaches_parameters()

    def ask(self, wish: str) -> None:
        """Let the next synchronised backward fail on all ranks unless each of them has asked for the same.

        A rank that asked alone must not wait for an answer. So it reports what a rank with a changed module reports.
        """
        self._wish = wish
        self._follow()

    def _follow(self) -> None:
        """Make a plan for the module as it is now. Whether the other ranks have the same module is not known yet."""
        grads = self._grads
        grads.reducer.accumulation.release()  # buckets may be replaced
        if self._may_have_changed is not None:
            self._may_have_changed()
        text = self._signature.change(window_is_open=self._window.is_open)
        self._buffers.look_again()
        kept = None if text else grads.plan
        if text is None and self._wish:
            text = "autotune was called"
        if text is None:
            if grads.reducer.change:
                grads.unfollow()
            return
        if not any(param.requires_grad for param in tensors_of(self._module, self._options)[0].values()):
            return  # nothing of it trains; once something does again, it will be seen
        change, buckets = self._describe(text, kept)
        buckets = buckets or grads.bucket_set(grads.plan, grads.params)
        grads.follow(buckets, text, lambda: self._agree(change), partial(decline, grads.group))

    def _describe(self, text: str, kept: BucketPlan | None) -> tuple[ModelChange, BucketSet | None]:
        """Return the change, and the buckets of its plan, if there is one."""
        grads = self._grads
        if grads.hook is not None:
            refusal = DPFuseError(
                f"rank {grads.group.rank()}: {text} after the module was wrapped; expected no such change once the "
                f"communication hook {grads.hook.name} is registered, whose state may depend on the buckets. Wrap the "
                "module again, on every rank, and register the hook there."
            )
            return ModelChange([], {}, refusal), None
        try:
            in_use = (*grads.params, *grads.reducer.in_use.params)  # also of an earlier, pending change
            ours = set(map(id, map(leaf_of, in_use)))
            plan = kept or check_module(self._module, self._options, grads.group, ours, self._signature.kept())
            buckets = grads.bucket_set(plan, grads.params if plan is grads.plan else params_of(self._module, plan))
            facts = describe_model(self._module, plan, self._options)
        except Exception as error:  # the peers hear of it when the ranks agree
            return ModelChange([], {}, error), None
        if self._wish:
            facts.append(self._wish)
        return ModelChange(facts, self._signature.new_parameters()), buckets

    def _agree(self, change: ModelChange) -> None:
        try:
            change.agree(self._grads.group)
            refusal = self._schedule.settle()
            if refusal:
                raise DPFuseError(refusal)
            self._grads.keep_change()
            self._signature.agree()
            self._wish = ""
            self._agreed()
        except DPFuseError:
            raise
        except BaseException as error:
            if error is not change.error:
                self._grads.membership.leave(error)  # it is unknown in which vote the peers are
            raise


def params_of(module: nn.Module, plan: BucketPlan) -> list[nn.Parameter]:
    """Return the planned parameters, by registration index; of a DTensor the part of this rank."""
    named = dict(module.named_parameters())
    return [local_of(named[name]) for name in names_of(plan)]
