"""DistributedDataParallel: the same engine behind the names of torch's class."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from dpfuse.arguments import instance
from dpfuse.comm.collective import use_device_of
from dpfuse.comm.votes import report_failure
from dpfuse.ddp.backward_optimizers import APPLY
from dpfuse.ddp.join_hook import UnevenInputs, UnevenInputsHook
from dpfuse.ddp.logging_data import logging_data
from dpfuse.ddp.mixed_precision import MixedPrecision
from dpfuse.ddp.placement import (
    device_index,
    group_of,
    refuse_sync_batch_norm_on_cpu,
    single_device,
)
from dpfuse.ddp.torch_buckets import BucketSizes, rule_of
from dpfuse.ddp.torch_hooks import TorchHooks
from dpfuse.engine.send_order import complete_failed
from dpfuse.engine.sync_decision import NEVER
from dpfuse.engine.torch_private import leave_untraced, on_device
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError
from dpfuse.exclusions import refuse
from dpfuse.model.module_sync import FaceParts
from dpfuse.model.options import CommonOptions, SyncOptions, filled, takes_common_options
from dpfuse.model.state_dict import accept_unprefixed, naming_keys, with_prefix
from dpfuse.wrapper import SyncedModule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedDataParallel"]

TORCH_CLASS = nn.parallel.DistributedDataParallel


@takes_common_options
class DistributedDataParallel(TorchHooks, Joinable):
    """`torch.nn.parallel.DistributedDataParallel`, on dpfuse's buckets: change the import, and nothing else.

    Names, order, defaults and errors of the arguments up to `forward_sync_buffers` are those of torch 2.13; the
    keyword-only ones after it are those of `DataParallel`. What dpfuse does better is in `DataParallel`: unused
    parameters, layers that run twice, changed graphs need no flag, and what goes wrong is an error on every rank.

    Args:
        module: the module to train; the same on every rank.
        device_ids: None, or the one GPU of the module; inputs are moved there.
        output_device: as in torch; the outputs stay where the module computes.
        dim: accepted for its position.
        broadcast_buffers: deprecated in torch 2.13, as `forward_sync_buffers`; False also leaves buffers as
            they are at construction.
        init_sync: False trusts that all ranks hold the same model: nothing is compared or sent.
        process_group: None is the default group.
        bucket_cap_mb: MB (1048576 bytes) at which a bucket is sent; None is 25, with 1 for the last one, and after the
            first backward a tenth of the model more, on GPUs and between machines.
        find_unused_parameters: True leaves out the warning that names unused parameters. They get the right mean
            either way. A bucket then waits only for those that the graph of the backward reaches.
        check_reduction: deprecated in torch, ignored.
        gradient_as_bucket_view: True makes `.grad` a view of the communication buffer. False never overwrites a
            gradient that was kept, which costs a copy on a GPU.
        static_graph: accepted; nothing has to be known beforehand.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients travel in buckets of their own.
        param_to_hook_all_reduce: the parameter after whose bucket they are sent.
        mixed_precision: a `torch.nn.parallel.distributed._MixedPrecision`: inputs, and for the time of a forward
            parameters, are cast to its `param_dtype`, buffers at once to `buffer_dtype`; gradients travel in
            `reduce_dtype` and arrive in the parameter's own.
        device_mesh: a 1-D mesh instead of `process_group`.
        skip_all_reduce_unused_params: accepted; ranks may differ in what they use.
        bucket_cap_mb_list: MB for each bucket in place of `bucket_cap_mb`, first sent first; the last repeats.
        batched_grad_copy: accepted; gradients always travel fused.
        forward_sync_buffers: whether rank 0's buffers are sent in every backward that synchronises, and before a
            forward that no such backward preceded. So they are the same after a step, and not only in a forward. With
            fixed_micro_batches the default is False.
        lazy_bucket_allocation: accepted; buckets stay allocated, so that no backward can run out of memory for them.

    Raises:
        RuntimeError, ValueError, TypeError: as torch's class does for the same arguments.
        DPFuseError: the ranks' models or options differ; on every rank.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from dpfuse import DistributedDataParallel as DDP
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DDP(torch.nn.Linear(4, 2))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> list(model.state_dict())
        ['module.weight', 'module.bias']
        >>> dist.destroy_process_group()

    Source: `torch.nn.parallel.DistributedDataParallel`.
    """

    _prefixed = True

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        common = filled(options, DistributedDataParallel)
        super().__init__()
        Joinable.__init__(self)
        if check_reduction:
            warn_at_user(FutureWarning("check_reduction is deprecated and ignored; leave it out"))
        group = group_of(process_group, device_mesh)
        if init_sync:
            complete_failed(group)  # before a failure is told here
        try:
            if not isinstance(module, nn.Module):
                got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
                raise TypeError(f"module must be a torch.nn.Module, got {got}; pass the model instance")
            use_device_of((param for _, param in module.named_parameters()), group)
            flags = {"broadcast_buffers": broadcast_buffers, "forward_sync_buffers": forward_sync_buffers}
            for name, flag in flags.items():
                instance(name, flag, (bool, NoneType), "True, False or None", "leave it out to send buffers each time")
            if device_mesh is not None:
                self.device_mesh = device_mesh
            ignored, params = _split_parameters(module)
            sizes = BucketSizes.of(bucket_cap_mb, bucket_cap_mb_list)
            rule = rule_of(sizes, module, delay_all_reduce_named_params, param_to_hook_all_reduce)
            precision = None if mixed_precision is None else MixedPrecision(mixed_precision, ignored)
            single_device(params, device_ids, output_device)
            refuse_sync_batch_norm_on_cpu(module)
            if precision is not None:
                precision.cast_buffers(module)
        except (RuntimeError, TypeError, ValueError) as error:
            if init_sync:
                report_failure(error, group, "the wrapped module")
            raise
        at_start, each_forward = _buffer_options(broadcast_buffers, forward_sync_buffers)
        if broadcast_buffers is None and forward_sync_buffers is None:
            each_forward = common["fixed_micro_batches"] is None  # whose forwards write no buffers

        self.module = module
        self.process_group = group
        self.device = next(iter(params.values())).device
        self.device_type = self.device.type
        self.is_multi_device_module = False
        on_gpu = bool(device_ids) and self.device_type != "cpu"
        self.device_ids = [device_index(device) for device in device_ids or ()] if on_gpu else None
        self.output_device = None
        if self.device_ids is not None:
            self.output_device = self.device_ids[0] if output_device is None else device_index(output_device)
        self.dim = dim
        self.init_sync = init_sync
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self._around: MixedPrecision | None = precision
        self.parameters_to_ignore = {*ignored, *rule.delayed}
        self.require_forward_param_sync = True
        self.forward_sync_buffers = each_forward
        self._options = SyncOptions(
            None if sizes.is_default else sizes.cap_mb,
            sizes.small_mb,
            find_unused_parameters,
            gradient_as_bucket_view,
            each_forward,
            common,
            reduce_dtype=None if precision is None else precision.reduce_dtype,
            forward_dtype=None if precision is None else precision.dtype,
            ignored=ignored,
            send_buffers_at_start=at_start,
            rule=rule,
        )
        self.bucket_bytes_cap = sizes.in_bytes
        self.bucket_bytes_cap_list = list(sizes.caps)
        self.bucket_bytes_cap_default = sizes.is_default
        nn.Module.register_load_state_dict_pre_hook(self, accept_unprefixed)
        self._connect(group, fresh=init_sync)
        if self._options.autotune and self._sync is not None:
            from dpfuse.tune import autotune  # it takes time to import

            autotune(self)

    def _face_parts(self) -> FaceParts:
        mesh = getattr(self, "device_mesh", None)  # as torch's class, this one has it only where it was given
        parts = replace(super()._face_parts(), meshes=[] if mesh is None else [mesh])
        if self._around is None:
            return parts
        cast_buffers = partial(self._around.cast_buffers, self.module)
        return replace(parts, wrap=partial(self._around.wrap, self.module), module_changed=cast_buffers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, as `DataParallel.forward`; inputs are moved to `device_ids`."""
        sync, hook = self._sync, self._buffer_hook
        assert sync is not None
        if not self._optimizers_found or (APPLY in sys.modules and self._optimizers.waiting()):
            self._find_optimizers()
        if hook is not None:
            self._buffer_futures.wait()  # those of a forward without a backward, or with one inside no_sync()
            sync.buffers.before_forward = self._sends_buffers and hook.before_forward
            sync.buffers.beside_gradients = False
        else:
            if self.forward_sync_buffers and not sync.options.broadcast_buffers and sync.buffers.agreed:
                raise DPFuseError(
                    f"rank {self._distributed_rank}: forward_sync_buffers was set to True, but the module was wrapped "
                    "with False, so that its backwards have no room for buffers; expected True when it is wrapped. "
                    "Wrap it with forward_sync_buffers=True, and set that to False for the steps that are to send none."
                )
            # After a forward inside no_sync(), `buffers` itself knows whether a backward has ended the window.
            first = self.require_forward_param_sync or sync.buffers.local
            sync.buffers.before_forward = self.forward_sync_buffers and first
            sync.buffers.beside_gradients = self.forward_sync_buffers
        if self.device_ids:
            inputs, kwargs = on_device(inputs, kwargs, self.device)
        # Dynamo asks torch's class which wrapper is running, to split the graph at bucket borders.
        before = TORCH_CLASS._active_ddp_module
        TORCH_CLASS._active_ddp_module = self  # type: ignore[assignment]
        sync.window.began = NEVER
        try:
            outputs = SyncedModule.forward(self, *inputs, **kwargs)
            TORCH_CLASS._active_ddp_module = before
            return outputs
        except BaseException:
            TORCH_CLASS._active_ddp_module = before
            sync.forward_failed()
            raise

    leave_untraced(forward)

    @property
    def _sends_buffers(self) -> bool:
        return self.forward_sync_buffers and self.require_forward_param_sync

    def _forward_ended(self) -> None:
        sync, hook = self._sync, self._buffer_hook
        assert sync is not None
        if hook is not None and not hook.before_forward and self._sends_buffers:
            self._run_buffer_hook()
        # Of the forwards inside no_sync() only the first sends buffers: none is sent where nothing was.
        if self.module.training and self.require_forward_param_sync != sync.window.require_sync:
            self.require_forward_param_sync = sync.window.require_sync

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for a training loop of which ranks may have different numbers of iterations.

        Ranks that have ended theirs shadow the collectives of the others, with zeros for gradients. In the end
        all take the model of the rank that ended last. An iteration is one forward and, outside of `no_sync()`,
        one backward; forwards under `torch.no_grad()` do not count. For several modules, and for a
        `ZeroRedundancyOptimizer`, use `torch.distributed.algorithms.join.Join`: each must have ended its
        communication before the next in that list begins.

        Args:
            divide_by_initial_world_size: False divides sums by the number of ranks that have not ended.
            enable: False makes it a context that does nothing.
            throw_on_early_termination: True ends the loop of all ranks with a RuntimeError, once one has ended.

        Returns:
            The context.
        """
        return UnevenInputs(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> UnevenInputsHook:
        """This module's part in a `Join`; takes its keyword argument `divide_by_initial_world_size`."""
        assert self._sync is not None
        in_use = self._sync.in_use
        if self._buffer_hook is not None and not self._buffer_hook.before_forward:
            in_use["buffer hook after the forward"] = "a buffer hook that runs after the forward"
        refuse("join", f"rank {self._distributed_rank}: join() was called with", in_use)
        mean_of_all = kwargs.get("divide_by_initial_world_size", True)
        return UnevenInputsHook(self, self._sync, divide_by_initial_world_size=mean_of_all)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` communicates."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks of `Join`."""
        return self.process_group

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's class does it. A state dict of the bare module, without `module.`, is loaded as well.

        Args:
            state_dict: its own, the bare module's, or that of a wrapper around it, compiled or not.
            strict: whether missing and unexpected keys raise.
            assign: whether the tensors themselves become the parameters.

        Returns:
            A named tuple (missing_keys, unexpected_keys).

        Raises:
            RuntimeError: as torch raises it, for a shape mismatch, and for differing keys if `strict`.
        """
        own = with_prefix(state_dict, self.module) if isinstance(state_dict, Mapping) else state_dict
        with naming_keys(state_dict, own):
            result = super().load_state_dict(own, strict=strict, assign=assign)
        self._loaded(result.missing_keys)
        return result

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name for `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Iterable[str]) -> None:
        """Leave parameters and buffers of `module`, by name, to themselves; to be called before wrapping."""
        ignored = list(names)
        module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts about the wrapper, under torch's keys where they mean the same here."""
        return logging_data(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not dist.group.WORLD:
            raise DPFuseError(
                "a DistributedDataParallel can be pickled or copied only over the default process group; pickle its "
                "state_dict(), or its .module"
            )
        return super().__getstate__()

    def _portable_state(self) -> dict[str, Any]:
        return {key: value for key, value in super()._portable_state().items() if key != "process_group"}

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        self.process_group = group_of(group, None)
        super()._restore(state, self.process_group)


# Libraries ask isinstance(model, torch's class) before they unwrap it or switch its synchronisation: it is True.
TORCH_CLASS.register(DistributedDataParallel)


def _split_parameters(module: nn.Module) -> tuple[frozenset[str], dict[str, nn.Parameter]]:
    """The names to ignore, and all other parameters by name; every parameter is marked as one or the other."""
    ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    params = {}
    for name, param in module.named_parameters():
        # What torch.compile reads; others only ask whether it is there.
        if name in ignored:
            param._ddp_ignored = True  # type: ignore[attr-defined]
            continue
        params[name] = param
        if hasattr(param, "_ddp_ignored"):
            del param._ddp_ignored
    return ignored, params


def _buffer_options(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are sent at construction, and before each forward."""
    if broadcast_buffers is not None:
        text = "broadcast_buffers is deprecated, use forward_sync_buffers (which still sends buffers at construction)"
        if forward_sync_buffers is not None:
            text = "broadcast_buffers is deprecated and ignored, since forward_sync_buffers is given"
        warn_at_user(FutureWarning(text))
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    value = broadcast_buffers is not False
    return value, value
