"""What torch's wrapper lets users hang into it: communication and buffer hooks, optimizers in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel.distributed import _BufferCommHookLocation

from dpfuse.comm.flat_broadcast import broadcast_flat
from dpfuse.ddp.backward_optimizers import BackwardOptimizers
from dpfuse.ddp.buffer_hook import BufferFutures, BufferHook
from dpfuse.ddp.hook_check import built_in_hook, checked_hook
from dpfuse.ddp.torch_names import TorchNames
from dpfuse.engine.events import Watcher
from dpfuse.model.module_sync import FaceParts

__all__ = ["TorchHooks"]


class _AfterDelivery(Watcher):
    """Waits for buffer hooks and steps optimizers, once gradients are averaged. It hears nothing before there is one.

    Args:
        model: whose gradients they are; it is not kept alive.
    """

    def __init__(self, model: TorchHooks) -> None:
        self.unheard = ("delivered",)
        self._model = weakref.ref(model)
        self._futures, self._optimizers = model._buffer_futures, model._optimizers

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        self._futures.wait()
        model = self._model()
        if self._optimizers and model is not None and model._sync is not None:
            self._optimizers.step(model._sync.grads.params)


class TorchHooks(TorchNames):
    """The methods of torch's class that register something, and what has been registered.

    None of it is part of a copy.
    """

    module: nn.Module

    def _connect(self, group: dist.ProcessGroup | None, *, fresh: bool) -> None:
        if "_optimizers" not in self.__dict__:
            self._optimizers = BackwardOptimizers()
            self._optimizers_found = False
            self._buffer_futures = BufferFutures()
            self._buffer_hook: BufferHook | None = None
            self._after_delivery = _AfterDelivery(self)
        super()._connect(group, fresh=fresh)
        assert self._sync is not None
        if self._buffer_hook is not None:
            self._sync.buffers.hook = self._weak_buffer_hook()

    def _face_parts(self) -> FaceParts:
        return FaceParts(self._after_delivery)

    def _hear_deliveries(self) -> None:
        """Have something done after each synchronised backward from now on."""
        assert self._sync is not None
        self._after_delivery.unheard = ()
        self._sync.grads.events.refresh()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` communicate the gradients, in place of the all-reduce of their means.

        It is called as `hook(state, bucket)` when a bucket is complete, in the order of communication, and returns
        a `torch.futures.Future` of the new buffer. `bucket` has the methods of `torch.distributed.GradBucket`;
        its gradients are not divided by the number of ranks. The hooks of
        `torch.distributed.algorithms.ddp_comm_hooks` run as they are.

        Buckets are rebuilt once, after the first synchronised backward; the hook stays. It is called for a
        bucket when the future of the one before is complete, unless the back end completes futures at once
        (NCCL), so one future must not wait for the next call. An exception of the hook surfaces from
        `backward()`, and the module must be wrapped again after it; one of its future's callbacks, and a result
        that does not fit, is an error on every rank. A copy of the module has no hook.

        Args:
            state: given to the hook; many expect the process group here, or None.
            hook: a callable with parameters `state` and `bucket`.

        Raises:
            TypeError, KeyError, ValueError: `hook` is no such callable.
            RuntimeError: there is a hook already, or a backward is running.

        Example:
            >>> import torch, dpfuse
            >>> import torch.distributed as dist
            >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.DistributedDataParallel(torch.nn.Linear(4, 2))
            >>> model.register_comm_hook(None, fp16_compress_hook)
            >>> model(torch.ones(3, 4)).sum().backward()
            >>> model.module.bias.grad
            tensor([3., 3.])
            >>> dist.destroy_process_group()

        Source: `torch.nn.parallel.DistributedDataParallel.register_comm_hook`.
        """
        assert self._sync is not None
        with self._log_errors():
            self._sync.set_hook(checked_hook(state, hook, self.process_group.rank()))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Use a hook that torch has built in, by its name there."""
        assert self._sync is not None
        with self._log_errors():
            self._sync.set_hook(built_in_hook(comm_hook_type, self.process_group))

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Update parameters at the end of each synchronised backward, with a functional optimizer.

        Args:
            optim: a class of `torch.optim`; `args` and `kwargs` are what it takes besides parameters.
            optim_params: those to update; None is all, also those that come later.

        Raises:
            ValueError: there is no functional counterpart of `optim`, or a parameter is not this model's.
            RuntimeError: there are optimizers in backward already; `optim` cannot be used here.
        """
        if self._optimizers:
            raise RuntimeError(
                f"rank {self._distributed_rank}: {optim.__name__} cannot be registered, since there are optimizers in "
                "backward already; expected one for all parameters. Register it once, and use no "
                "_apply_optimizer_in_backward besides."
            )
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        chosen = None if optim_params is None else list(optim_params)
        overlapped = _as_overlapped_optim(optim, chosen, *args, **kwargs)
        state = getattr(overlapped, "_opt_hook_state", None)
        if state is None:  # a class that a user has registered with torch
            try:
                overlapped.register_ddp(self)
            except NotImplementedError as error:
                raise RuntimeError(
                    f"{optim} does not support overlapped DDP; ask its author, or step it yourself"
                ) from error
            return
        known = {id(param) for param in self._module_parameters if param.requires_grad}
        if chosen is not None and (strangers := sum(id(param) not in known for param in chosen)):
            raise ValueError(
                f"{strangers} of the {len(chosen)} optim_params are no trainable parameters of this model; "
                "expected only such. Pass some of model.parameters()."
            )
        self._optimizers.fuse(state.functional_optimizer, chosen)
        self._hear_deliveries()

    def _find_optimizers(self) -> None:
        """Step those that `_apply_optimizer_in_backward` was called for until this forward."""
        self._optimizers_found = True
        self._optimizers.take_over(param for param in self._module_parameters if param.requires_grad)
        if self._optimizers:
            self._hear_deliveries()

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Call `hook(state, named_buffers)` in place of sending rank 0's buffers, as `BufferHook` does it."""
        self._buffer_hook = BufferHook(state, hook, comm_hook_location)
        assert self._sync is not None
        self._sync.buffers.hook = self._weak_buffer_hook()
        self._hear_deliveries()

    def _run_buffer_hook(self) -> None:
        assert self._buffer_hook is not None
        buffers = self.named_module_buffers
        # The graph of the forward may hold them, and takes what the forward itself wrote just as well.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers.values())):
            self._buffer_futures.add(self._buffer_hook(buffers))

    def _weak_buffer_hook(self) -> Callable[[], None]:
        # The synchronisation lives as long as the parameters, which must not keep the wrapper alive.
        wrapper = weakref.proxy(self)
        return lambda: wrapper._run_buffer_hook()

    def _default_broadcast_coalesced(
        self, bufs: Iterable[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Overwrite tensors, by default the buffers, with those of a rank; for buffer hooks."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        broadcast_flat(tensors, self.process_group, authoritative_rank)

    def _portable_state(self) -> dict[str, Any]:
        own = ("_optimizers", "_optimizers_found", "_buffer_futures", "_buffer_hook", "_after_delivery")
        return {key: value for key, value in super()._portable_state().items() if key not in own}
