"""DistributedDataParallel: the same engine behind the names of torch's class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.scatter_gather import scatter_kwargs

from dpfuse.agreement import report_failure
from dpfuse.collective import resolve_group
from dpfuse.comm_hook import CommHook
from dpfuse.errors import DPFuseError
from dpfuse.grad_sync import SyncOptions
from dpfuse.join_hook import UnevenInputs, UnevenInputsHook
from dpfuse.placement import device_index, refuse_sync_batch_norm_on_cpu, single_device
from dpfuse.plan import MB
from dpfuse.state_dict import accept_unprefixed
from dpfuse.torch_names import TorchNames
from dpfuse.tracing import leave_untraced
from dpfuse.wrapper import SyncedModule

__all__ = ["DistributedDataParallel"]

DEFAULT_CAP_MB = 25
SMALL_CAP_MB = 1
TORCH_CLASS = nn.parallel.DistributedDataParallel


class DistributedDataParallel(TorchNames, Joinable):
    """`torch.nn.parallel.DistributedDataParallel`, on dpfuse's buckets: change the import, and nothing else.

    Names, order, defaults and errors of the arguments are those of torch 2.13. What dpfuse does better is in
    `DataParallel`: unused parameters, layers that run twice, changed graphs need no flag, and what goes wrong
    is an error on every rank.

    Args:
        module: the module to train; the same on every rank.
        device_ids: None, or the one GPU of the module; inputs are moved there.
        output_device: as in torch; the outputs stay where the module computes.
        dim: accepted for its position.
        broadcast_buffers: deprecated in torch 2.13, as `forward_sync_buffers`; False also leaves buffers as
            they are at construction.
        init_sync: False trusts that all ranks hold the same model: nothing is compared or sent.
        process_group: None is the default group.
        bucket_cap_mb: MB (1048576 bytes) at which a bucket is sent; None is 25, with 1 for the last one.
        find_unused_parameters: only silences the warning that names unused parameters; they get the right
            mean either way, and no graph is walked.
        check_reduction: deprecated in torch, ignored.
        gradient_as_bucket_view: True makes `.grad` a view of the buffers and saves a copy.
        static_graph: accepted; nothing has to be known beforehand.
        device_mesh: a 1-D mesh instead of `process_group`.
        skip_all_reduce_unused_params: accepted; ranks may differ in what they use.
        batched_grad_copy: accepted; gradients always travel fused.
        forward_sync_buffers: whether rank 0's buffers are sent before every forward with gradients enabled.

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
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce must be given together")
        for name, value in (
            ("delay_all_reduce_named_params", delay_all_reduce_named_params),
            ("mixed_precision", mixed_precision),
            ("bucket_cap_mb_list", bucket_cap_mb_list),
        ):
            if value is not None:
                raise ValueError(f"{name} is not supported yet, got {value!r}; leave it out")
        if check_reduction:
            warnings.warn("check_reduction is deprecated and ignored; leave it out", FutureWarning, stacklevel=2)
        group = _group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            _shard_as_tensor_parallel(module, device_mesh)
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = {name: param for name, param in module.named_parameters() if name not in ignored}
        for name, param in module.named_parameters():
            param._ddp_ignored = name in ignored  # type: ignore[attr-defined]  # torch.compile reads it
        try:
            single_device(params, device_ids, output_device)
            refuse_sync_batch_norm_on_cpu(module)
        except (RuntimeError, ValueError) as error:
            if init_sync:
                report_failure(error, group, "the wrapped module")
            raise
        at_start, each_forward = _buffer_options(broadcast_buffers, forward_sync_buffers)

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
        self.mixed_precision = None
        self.parameters_to_ignore = set(ignored)
        self.require_forward_param_sync = True
        self.forward_sync_buffers = each_forward
        cap = DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self._options = SyncOptions(
            cap,
            SMALL_CAP_MB if bucket_cap_mb is None else cap,
            find_unused_parameters,
            gradient_as_bucket_view,
            each_forward,
            ignored=ignored,
            send_buffers_at_start=at_start,
        )
        # What torch.compile splits the graph by; its optimizer refuses less than one MB.
        self.bucket_bytes_cap = max(MB, int(min(cap, 1 << 40) * MB))
        nn.Module.register_load_state_dict_pre_hook(self, accept_unprefixed)
        self._connect(group, fresh=init_sync)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, as `DataParallel.forward`; inputs are moved to `device_ids`."""
        sync = self._sync
        assert sync is not None
        sync.broadcast_buffers = self.forward_sync_buffers and self.require_forward_param_sync
        if self.device_ids:
            moved, moved_kwargs = scatter_kwargs(inputs, kwargs, self.device_ids, dim=self.dim)
            inputs, kwargs = moved[0], moved_kwargs[0]
        # Dynamo asks torch's class which wrapper is running, to split the graph at bucket borders.
        before = TORCH_CLASS._active_ddp_module
        TORCH_CLASS._active_ddp_module = self  # type: ignore[assignment]
        try:
            outputs = SyncedModule.forward(self, *inputs, **kwargs)
        finally:
            TORCH_CLASS._active_ddp_module = before
        # Of the forwards inside no_sync() only the first sends buffers: none is sent where nothing was.
        if torch.is_grad_enabled() and self.require_forward_param_sync != sync.reducer.require_sync:
            self.require_forward_param_sync = sync.reducer.require_sync
        return outputs

    leave_untraced(forward)

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

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` communicate the gradients, in place of the all-reduce of their means.

        It is called as `hook(state, bucket)` when a bucket is complete, in the order of communication, and returns
        a `torch.futures.Future` of the new buffer. `bucket` has the methods of `torch.distributed.GradBucket`;
        its gradients are not divided by the number of ranks. The hooks of
        `torch.distributed.algorithms.ddp_comm_hooks` run as they are, and those of `dpfuse.hooks`.

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
        self._sync.set_hook(CommHook(state, hook, self.process_group.rank()))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Use a hook that torch has built in, by its name there."""
        assert self._sync is not None
        self._sync.set_hook(CommHook.built_in(comm_hook_type, self.process_group))

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
        """Facts about the wrapper, under torch's keys where they mean the same here."""
        plan, group = self.bucket_plan, self.process_group
        sizes = ", ".join(str(bucket.nbytes) for bucket in plan.buckets)
        return {
            "world_size": group.size(),
            "rank": group.rank(),
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(group),
            "num_parameter_tensors": len(plan.specs),
            "total_parameter_size_bytes": plan.nbytes,
            "bucket_sizes": sizes,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": True,
            **({"comm_hook": self._sync.hook.name} if self._sync is not None and self._sync.hook is not None else {}),
        }

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise DPFuseError(
                "a DistributedDataParallel can be pickled or copied only over the default process group; pickle its "
                "state_dict(), or its .module"
            )
        return super().__getstate__()

    def _portable_state(self) -> dict[str, Any]:
        return {key: value for key, value in super()._portable_state().items() if key != "process_group"}

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        self.process_group = _group_of(group, None)
        super()._restore(state, self.process_group)


# Whoever asks isinstance(model, torch's class), to unwrap it or to switch its synchronisation, gets a yes.
TORCH_CLASS.register(DistributedDataParallel)


def _group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments; leave one out")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, got {device_mesh}; slice it by a name")
        process_group = device_mesh.get_group(mesh_dim=0)
    group = resolve_group(process_group)
    if group is None:
        raise ValueError(
            "Default process group has not been initialized; call dpfuse.init_parallel_env() or "
            "torch.distributed.init_process_group() before wrapping"
        )
    return group


def _shard_as_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Where the mesh is a slice, the module's parameters are DTensors of another slice; torch knows what to do."""
    if mesh._get_root_mesh() != mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def _buffer_options(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are sent at construction, and before each forward."""
    if broadcast_buffers is not None:
        text = "broadcast_buffers is deprecated, use forward_sync_buffers (which still sends buffers at construction)"
        if forward_sync_buffers is not None:
            text = "broadcast_buffers is deprecated and ignored, since forward_sync_buffers is given"
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    value = broadcast_buffers is not False
    return value, value
