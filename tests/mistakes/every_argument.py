"""How each public function and class is called rightly, by the names of its arguments, and what is left out.

`test_every_argument.py` makes one of the arguments wrong. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dpfuse
import dpfuse.data
import dpfuse.tune
from dpfuse.job.spawn_context import RankFolder, SpawnContext
from tests.mistakes.every_kernel_argument import KERNELS
from tests.mistakes.every_paddle_argument import PADDLE
from tests.mistakes.right_call import Call, of, undone, values

__all__ = ["LEFT_OUT", "RIGHT", "TRUTH"]


class Numbers(Dataset[int]):
    """Four samples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Stream:
    """Samples without numbers."""

    def __iter__(self) -> Any:
        return iter(range(4))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def wrapped(**options: Any) -> Any:
    return dpfuse.DataParallel(net(), **options)


def backward_of(model: Any) -> Any:
    model(torch.ones(2, 4)).sum().backward()
    return model


def of_model(method: str, after_backward: bool = False, **options: Any) -> Callable[..., Any]:
    """A method of a wrapped model; what it returns is used up, if it is an iterator or a context."""

    def call(**arguments: Any) -> Any:
        model = wrapped(**options)
        result = getattr(backward_of(model) if after_backward else model, method)(**arguments)
        if hasattr(result, "__enter__"):
            with result:
                pass
        elif hasattr(result, "__next__"):
            next(result)
        return result

    return call


def sampler() -> Any:
    return dpfuse.data.ResumableBatchSampler(Numbers(), 2)


def micro_sampler() -> Any:
    return dpfuse.data.MicroBatchSampler(Numbers(), 2, 2)


def stream() -> Any:
    return dpfuse.data.ResumableIterableDataset(Stream(), 2)


def loader_of(own: Any) -> dict[str, Any]:
    return {"own": own, "loader": DataLoader(Numbers(), batch_sampler=own)}


def stream_loader(own: Any) -> dict[str, Any]:
    return {"own": own, "loader": DataLoader(own, batch_size=2)}


def ended_job() -> Any:
    """What spawn() returns, when all ranks have ended well."""
    ranks = SimpleNamespace(sentinels={}, processes=[], join=lambda *_, **__: True)
    return SpawnContext(ranks, RankFolder(), object())


def sharded(**arguments: Any) -> Any:
    return dpfuse.ShardedOptimizer(**{"model": wrapped(), "optimizer_class": torch.optim.Adam} | arguments)


def specs() -> list[Any]:
    return [dpfuse.ParamSpec("a", (4, 4), "float32"), dpfuse.ParamSpec("b", (4,), "float32")]


def timeline() -> Any:
    return dpfuse.tune.Timeline.synthetic(specs(), 0.1)


def cost() -> Any:
    return dpfuse.tune.CostTable.affine(1e-4, 1e9)


COMMON = {
    "wire_dtype": None,
    "error_feedback": False,
    "check_finite": "off",
    "check": "deferred",
    "check_training": "warn",
    "deterministic": False,
    "fixed_micro_batches": None,
    "accumulate_in_buckets": False,
    "metrics": False,
    "plan": "ramp",
    "stall_timeout": 60.0,
}
SIZES = {"comm_buffer_size": 25.0, "last_comm_buffer_size": 1.0}
SAMPLER = {"num_replicas": 1, "rank": 0, "shuffle": True, "seed": 0}
PARTS = {"scheduler": None, "scaler": None, "sampler": None, "group": None}


def trained(folder: Path, place: str, **more: Any) -> dict[str, Any]:
    model = net()
    return {place: folder, "model": model, "optimizer": torch.optim.SGD(model.parameters()), **PARTS, **more}


def plan_file(folder: Path) -> dict[str, Any]:
    dpfuse.plan_buckets(net()).save(folder / "plan.json")
    return {"path": folder / "plan.json"}


RIGHT: dict[str, Call] = {**KERNELS, **PADDLE} | {
    "dpfuse.DataParallel": Call(
        dpfuse.DataParallel,
        lambda _: {
            "layers": net(),
            "find_unused_parameters": False,
            "group": None,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
            "gradient_scale": None,
            **SIZES,
            **COMMON,
        },
    ),
    "dpfuse.DistributedDataParallel": Call(
        dpfuse.DistributedDataParallel,
        lambda _: {
            "module": net(),
            "device_ids": None,
            "output_device": None,
            "init_sync": True,
            "process_group": None,
            "bucket_cap_mb": 25,
            "find_unused_parameters": False,
            "gradient_as_bucket_view": False,
            "static_graph": False,
            "forward_sync_buffers": True,
            "device_mesh": None,
            "mixed_precision": None,
            "bucket_cap_mb_list": None,
            "skip_all_reduce_unused_params": False,
            **COMMON,
        },
    ),
    "dpfuse.DataParallel.clip_grad_norm_": Call(
        of_model("clip_grad_norm_", after_backward=True),
        values(max_norm=1.0, norm_type=2.0, error_if_nonfinite=False),
    ),
    "dpfuse.DataParallel.grad_norm": Call(
        of_model("grad_norm", after_backward=True), values(norm_type=2.0, error_if_nonfinite=False)
    ),
    "dpfuse.DataParallel.grad_norms": Call(
        of_model("grad_norms", after_backward=True), values(by="parameter", norm_type=2.0)
    ),
    "dpfuse.DataParallel.gather_micro_batches": Call(
        of_model("gather_micro_batches", fixed_micro_batches=2), values(values=[1.0, 2.0])
    ),
    "dpfuse.DataParallel.micro_batches": Call(of_model("micro_batches", fixed_micro_batches=2), values(step=1)),
    "dpfuse.DataParallel.no_sync": Call(of_model("no_sync"), values(enabled=True)),
    "dpfuse.DataParallel.load_state_dict": Call(
        of_model("load_state_dict"), lambda _: {"state_dict": net().state_dict(), "strict": True, "assign": False}
    ),
    "dpfuse.DataParallel.state_dict": Call(
        of_model("state_dict"), values(destination=None, include_sublayers=True, prefix="", keep_vars=False)
    ),
    "dpfuse.DataParallel.set_state_dict": Call(
        of_model("set_state_dict"), lambda _: {"state_dict": net().state_dict(), "use_structured_name": True}
    ),
    "dpfuse.DataParallel.set_gradient_weight": Call(
        of_model("set_gradient_weight"), values(weight=1.0, reduction="mean")
    ),
    "dpfuse.DistributedDataParallel.load_state_dict": Call(
        of(lambda: dpfuse.DistributedDataParallel(net()), "load_state_dict"),
        lambda _: {"state_dict": net().state_dict(), "strict": True, "assign": False},
    ),
    "dpfuse.DistributedDataParallel.register_comm_hook": Call(
        of(lambda: dpfuse.DistributedDataParallel(net()), "register_comm_hook"),
        values(state=None, hook=lambda state, bucket: None),
        free=("state",),
    ),
    "dpfuse.GradScaler": Call(
        dpfuse.GradScaler,
        lambda _: {
            "device": "cpu",
            "init_scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "enabled": True,
            "model": wrapped(),
        },
    ),
    "dpfuse.ShardedOptimizer": Call(
        sharded,
        lambda _: {
            "model": wrapped(),
            "optimizer_class": torch.optim.Adam,
            "params": None,
            "master_dtype": None,
            "step_in_backward": False,
            "clip_by_last_norm": None,
        },
    ),
    "dpfuse.ShardedOptimizer.add_param_group": Call(of(sharded, "add_param_group"), values(param_group={"params": []})),
    "dpfuse.ShardedOptimizer.full_gradient": Call(
        of(sharded, "full_gradient"), lambda _: {"param": next(net().parameters())}
    ),
    "dpfuse.ShardedOptimizer.load_state_dict": Call(
        of(sharded, "load_state_dict"), lambda _: {"state_dict": sharded().state_dict()}
    ),
    "dpfuse.ShardedOptimizer.step": Call(of(sharded, "step"), values(closure=None)),
    "dpfuse.ParamSpec": Call(
        dpfuse.ParamSpec, values(name="a", shape=(2,), dtype="float32", device="cpu", sparse=False)
    ),
    "dpfuse.BucketPlan.save": Call(
        lambda **arguments: dpfuse.plan_buckets(net()).save(**arguments), lambda folder: {"path": folder / "plan.json"}
    ),
    "dpfuse.agree_to_stop": Call(dpfuse.agree_to_stop, values(group=None)),
    "dpfuse.autotune": Call(dpfuse.autotune, lambda _: {"model": wrapped(), "steps": 5, "cost": None, **SIZES}),
    "dpfuse.fused_allreduce_gradients": Call(
        dpfuse.fused_allreduce_gradients,
        lambda _: {
            "parameter_list": list(backward_of(wrapped()).parameters()),
            "group": None,
            "scale": None,
            "bucket_size": 1 << 20,
            "deterministic": False,
            "wire_dtype": None,
        },
    ),
    "dpfuse.get_rank": Call(dpfuse.get_rank, values(group=None)),
    "dpfuse.get_world_size": Call(dpfuse.get_world_size, values(group=None)),
    "dpfuse.init_parallel_env": Call(dpfuse.init_parallel_env, values(timeout=60.0)),
    "dpfuse.load_checkpoint": Call(dpfuse.load_checkpoint, lambda folder: trained(folder, "path", random_state=None)),
    "dpfuse.save_checkpoint": Call(dpfuse.save_checkpoint, lambda folder: trained(folder, "folder", step=1, keep=3)),
    "dpfuse.load_plan": Call(dpfuse.load_plan, plan_file),
    "dpfuse.patch": Call(undone(dpfuse.patch), values(**COMMON)),
    "dpfuse.plan_buckets": Call(dpfuse.plan_buckets, lambda _: {"params": net(), **SIZES}),
    "dpfuse.reduce_replicas": Call(
        dpfuse.reduce_replicas, lambda _: {"replicas": [net(), net()], "scale": None, "bucket_size": 1 << 20}
    ),
    "dpfuse.replicate": Call(
        dpfuse.replicate, lambda _: {"module": net(), "mesh": None, "ignored_params": (), **COMMON}
    ),
    "dpfuse.request_stop": Call(dpfuse.request_stop, values(reason="")),
    "dpfuse.distributed.SpawnContext.join": Call(of(ended_job, "join"), values(timeout=1.0)),
    "dpfuse.spawn": Call(dpfuse.spawn, values(func=print, args=(), nprocs=1, join=True, daemon=False)),
    "dpfuse.stop_on_signals": Call(undone(dpfuse.stop_on_signals), values(grace=30.0)),
    "dpfuse.time_communication": Call(undone(dpfuse.time_communication), lambda _: {"model": wrapped()}),
    "dpfuse.data.MicroBatchSampler": Call(
        dpfuse.data.MicroBatchSampler,
        lambda _: {"dataset": Numbers(), "batch_size": 2, "fixed_micro_batches": 2, **SAMPLER},
    ),
    "dpfuse.data.MicroBatchSampler.set_epoch": Call(of(micro_sampler, "set_epoch"), values(epoch=1)),
    "dpfuse.data.MicroBatchSampler.load_state_dict": Call(
        of(micro_sampler, "load_state_dict"), lambda _: {"state_dict": micro_sampler().state_dict()}
    ),
    "dpfuse.data.MicroBatchSampler.steps": Call(
        lambda own, loader: list(own.steps(loader)), lambda _: loader_of(micro_sampler()), free=("own",)
    ),
    "dpfuse.data.ResumableBatchSampler": Call(
        dpfuse.data.ResumableBatchSampler,
        lambda _: {"dataset": Numbers(), "batch_size": 2, "drop_last": False, **SAMPLER},
    ),
    "dpfuse.data.ResumableBatchSampler.set_epoch": Call(of(sampler, "set_epoch"), values(epoch=1)),
    "dpfuse.data.ResumableBatchSampler.load_state_dict": Call(
        of(sampler, "load_state_dict"), lambda _: {"state_dict": sampler().state_dict()}
    ),
    "dpfuse.data.ResumableBatchSampler.track": Call(
        lambda own, loader: list(own.track(loader)), lambda _: loader_of(sampler()), free=("own",)
    ),
    "dpfuse.data.ResumableIterableDataset": Call(
        dpfuse.data.ResumableIterableDataset,
        lambda _: {"dataset": Stream(), "batch_size": 2, "num_replicas": 1, "rank": 0, "drop_last": False},
    ),
    "dpfuse.data.ResumableIterableDataset.set_epoch": Call(of(stream, "set_epoch"), values(epoch=1)),
    "dpfuse.data.ResumableIterableDataset.load_state_dict": Call(
        of(stream, "load_state_dict"), lambda _: {"state_dict": stream().state_dict()}
    ),
    "dpfuse.data.ResumableIterableDataset.track": Call(
        lambda own, loader: list(own.track(loader)), lambda _: stream_loader(stream()), free=("own",)
    ),
    "dpfuse.data.SeededDataset": Call(dpfuse.data.SeededDataset, lambda _: {"dataset": Numbers(), "seed": 0}),
    "dpfuse.tune.CostTable": Call(dpfuse.tune.CostTable, values(sizes=(1.0, 2.0), seconds=(1.0, 2.0))),
    "dpfuse.tune.CostTable.affine": Call(dpfuse.tune.CostTable.affine, values(latency=1e-4, bandwidth=1e9)),
    "dpfuse.tune.CostTable.measured": Call(
        dpfuse.tune.CostTable.measured, values(sizes=(1.0, 2.0), seconds=(1.0, 2.0))
    ),
    "dpfuse.tune.Timeline.from_steps": Call(
        dpfuse.tune.Timeline.from_steps,
        lambda _: {"specs": specs(), "ready": [[[0.1, 0.2]]], "backward_end": [[0.3]], "wire_dtype": None},
    ),
    "dpfuse.tune.Timeline.synthetic": Call(
        dpfuse.tune.Timeline.synthetic, lambda _: {"specs": specs(), "backward": 0.1, "work": None, "wire_dtype": None}
    ),
    "dpfuse.tune.measure_all_reduce": Call(
        dpfuse.tune.measure_all_reduce, values(group=None, sizes=(1024, 2048), repetitions=2)
    ),
    "dpfuse.tune.optimal_plan": Call(
        dpfuse.tune.optimal_plan, lambda _: {"timeline": timeline(), "cost": cost(), "margin": 0.5, **SIZES}
    ),
    "dpfuse.tune.plan_from_groups": Call(
        dpfuse.tune.plan_from_groups, lambda _: {"specs": specs(), "groups": [[0], [1]], **SIZES}
    ),
}

# Arguments that are taken as true or false, as torch and Python take them: numpy's truth values are right, too.
TRUTH = (
    "assign", "daemon", "enabled", "error_if_nonfinite", "init_sync", "join", "keep_vars", "return_merged",
    "return_numpy", "set_to_zero", "skip_all_reduce_unused_params", "static_graph", "strict", "update",
    "use_structured_name",
)  # fmt: skip

LEFT_OUT: dict[str, str] = {
    r"dpfuse\.paddle\.(callbacks\.\w+\.(on_|set_)\w+|metric\.Metric\.\w+)": "Model calls it; a program overrides it",
    r"dpfuse\.paddle\.io\.DataLoader": "torch's class, with torch's own words",
    r"dpfuse\.paddle\.static\.Program\.(add_feed|add_name|check_name|computed|name_of|rename)": "recording calls it",
    r"dpfuse\.paddle\.static\.Scope\.(hold|move|optimizer)": "the executors call it",
    r"dpfuse\.paddle\.static\.Variable(\.backward)?": "recording makes it; its backward raises for any argument",
    r"dpfuse\.paddle\.static\.cuda_places": "without a GPU it raises for any argument",
    r"dpfuse_kernels\.(Piece|Slot|\w+\.\w+)": "dpfuse makes or calls it with what it has checked",
    r"dpfuse_kernels\.([a-z]+_step|bit_hash|(de)?quantize|(un)?flatten|multiply|mx_\w+|spoil|squared_norm"
    r"|sum_parts|sum_quantized)": "it runs for each bucket of a step, where a check of each type would cost time",
    r"dpfuse\.((CommunicationTimes|StopReason)(\..*)?|Bucket|BucketPlan)": "dpfuse makes them; a program reads them",
    r"dpfuse\.distributed\.SpawnContext": "spawn() makes it",
    r"dpfuse\.tune\.(Timeline|RecordedTimes(\..*)?|CostTable\.__call__)": "the tuner makes them, and calls them",
    r"dpfuse\.\w*(Error|Warning)": "takes any text",
    r"dpfuse\.(DataParallel|DistributedDataParallel)\.(forward|join_hook)": "passes on what it gets",
    r"dpfuse\.(DataParallel|DistributedDataParallel)\.(zero_grad|join)": "true or false, as torch takes them",
    r"dpfuse\.GradScaler\.\w+": "torch's methods, with torch's own words",
    r"dpfuse\.data\.SeededDataset\.__getitem__": "the dataset inside judges the index",
    r"dpfuse\.launch\.main": "a command, whose parser names what is wrong",
}
