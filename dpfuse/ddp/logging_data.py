"""What a wrapper tells about itself, under the keys of torch's DDP logging data. It only reads."""

from __future__ import annotations

import os
import sys
from typing import Any

from dpfuse.comm.abilities import backend_of
from dpfuse.ddp.torch_names import TorchNames
from dpfuse.engine.plan import BucketPlan

__all__ = ["logging_data"]

# torch reads the environment under these names, for this back end and for all.
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
BACKEND_ENVIRONMENT = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
}
CPP_NAMES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}


def logging_data(model: TorchNames) -> dict[str, Any]:
    """Facts about wrapper, buckets and environment; only those that mean here what they mean in torch.

    With `metrics=True`, the times of the last step and their means, in nanoseconds, are among them on a CPU.
    """
    plan, group = model.bucket_plan, model.process_group
    backend = backend_of(group)
    data: dict[str, Any] = {
        "world_size": group.size(),
        "rank": group.rank(),
        "module_name": type(model.module).__name__,
        "backend_name": backend,
        "device_ids": ", ".join(map(str, model.device_ids or ())),
        "output_device": -1 if model.output_device is None else model.output_device,
        "num_parameter_tensors": len(plan.specs),
        "total_parameter_size_bytes": plan.nbytes,
        "dtypes": ", ".join(sorted({CPP_NAMES.get(spec.dtype, spec.dtype) for spec in plan.specs})),
        "bucket_sizes": _sizes(plan),
        "bucket_cap_bytes": int(min(plan.comm_buffer_size, sys.maxsize)),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "static_graph": int(model.static_graph),
        "can_set_static_graph": False,  # it would change nothing, and Lightning advises it where this is true
    }
    if model._has_rebuilt_buckets:
        data["has_rebuilt_buckets"] = 1
        data["rebuilt_bucket_sizes"] = _sizes(plan)
        data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, b.params)) for b in plan.buckets)
    if model._sync is not None:
        reducer = model._sync.grads.reducer
        data["iteration"] = reducer.completed
        if model._sync.metrics is not None:
            data |= model._sync.metrics.step_times.read()
        if model._sync.grads.hook is not None:
            data["comm_hook"] = model._sync.grads.hook.name
    if model._authoritative_rank is not None:
        data["join_uneven_inputs"] = True
    error = model._logged_error
    if error:
        data["has_error"] = 1
        data["error"] = error
    for name in ENVIRONMENT + BACKEND_ENVIRONMENT.get(backend, ()):
        data[name.lower()] = os.environ.get(name, "N/A")
    return data


def _sizes(plan: BucketPlan) -> str:
    return ", ".join(str(bucket.nbytes) for bucket in plan.buckets)
