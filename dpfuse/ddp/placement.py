"""On which device and between which ranks a module lives, by the arguments of torch's wrapper. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from dpfuse.arguments import instance
from dpfuse.comm.collective import resolve_group

__all__ = ["device_index", "group_of", "refuse_sync_batch_norm_on_cpu", "single_device"]


def device_index(device: int | str | torch.device) -> int:
    """The number of a GPU, given as number, "cuda:1" or torch.device.

    Example:
        >>> from dpfuse.ddp.placement import device_index
        >>> device_index("cuda:1"), device_index(0)
        (1, 0)
    """
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def single_device(
    params: Mapping[str, nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> None:
    """Check parameters and device arguments as torch's class does.

    Args:
        params: the parameters that are not ignored, by name.
        device_ids, output_device: the arguments.

    Raises:
        TypeError: `device_ids` is no list.
        RuntimeError: nothing to train; an uninitialised parameter.
        ValueError: more than one device id; parameters on devices of several kinds; device ids for a module
            on the CPU.
    """
    if device_ids is not None:
        remedy = "leave it out on the CPU"
        instance("device_ids", device_ids, (list, tuple, range), "a list of one device, such as [0]", remedy)
    if not any(param.requires_grad for param in params.values()):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient; "
            "use the module itself"
        )
    lazy = next((name for name, param in params.items() if is_lazy(param)), None)
    if lazy is not None:
        raise RuntimeError(
            f"Modules with uninitialized parameters can't be used with DistributedDataParallel: parameter {lazy!r} has "
            "no shape yet. Run a forward with a sample batch first."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}; pass that of this "
            "process, and start one process per device"
        )
    kinds = {param.device.type for param in params.values()}
    if len(kinds) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, got parameters on "
            f"{', '.join(sorted(kinds))}"
        )
    if kinds == {"cpu"} and (device_ids or output_device):  # as torch asks: 0, too, says nothing
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with GPU modules, got device_ids "
            f"{device_ids}, output_device {output_device}, and a module on the CPU; leave them out"
        )


def refuse_sync_batch_norm_on_cpu(module: nn.Module) -> None:
    """Raises ValueError for torch's SyncBatchNorm on the CPU, where its forward would raise."""
    for name, layer in module.named_modules():
        own = layer._parameters.values() if type(layer) is nn.SyncBatchNorm else ()
        if any(param is not None and param.device.type == "cpu" for param in own):
            raise ValueError(
                f"SyncBatchNorm layers only work with GPU modules, got {name!r} on the CPU; move the module, or leave "
                "BatchNorm layers as they are"
            )


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The ranks to average over; None and None are the default group.

    Raises:
        RuntimeError: both arguments are given; the mesh has more than one dimension.
        ValueError: there is no default group.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments; leave one out")
    if device_mesh is not None:
        if not callable(getattr(device_mesh, "get_group", None)):
            got = f"{device_mesh!r:.100} of type {type(device_mesh).__name__}"
            raise TypeError(f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh, got {got}; leave it out")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, got {device_mesh}; slice it by a name")
        process_group = device_mesh.get_group(mesh_dim=0)
    group = resolve_group(process_group, "process_group")
    if group is None:
        raise ValueError(
            "Default process group has not been initialized; call dpfuse.init_parallel_env() or "
            "torch.distributed.init_process_group() before wrapping"
        )
    return group
