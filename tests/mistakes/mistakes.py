"""Mistakes that a person makes with dpfuse in one process, and what the error must say. Runs nothing.

Each entry has a short program, the type of the error, and four parts of its text: *what* is wrong, what dpfuse *got*,
what it *expected*, and the *remedy*. A text may say two of these in one phrase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import dpfuse
from dpfuse import DataParallel, DPFuseError

__all__ = ["MISTAKES", "Mistake"]


@dataclass(frozen=True)
class Mistake:
    """One mistake: `action` gets an empty folder."""

    action: Callable[[Path], object]
    error: type[BaseException]
    what: str
    got: str
    expected: str
    remedy: str


DDP = dpfuse.DistributedDataParallel


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


class Skipping(dpfuse.DistributedDataParallel):
    """A class of a user that wraps parts of its module by itself."""

    def __init__(self, module: nn.Module) -> None:
        super(dpfuse.DistributedDataParallel, self).__init__()
        self.module = module


def divided(*placements: Any) -> nn.Module:
    """Return a layer whose weight is a DTensor over one rank."""
    layer = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.data, mesh, placements))
    return layer


def wrap(_: Path, module: Any = None, face: Any = DataParallel, **options: Any) -> object:
    return face(net() if module is None else module, **options)


def option(what: str, got: str, expected: str, remedy: str, error: Any = ValueError, **options: Any) -> Mistake:
    return Mistake(partial(wrap, **options), error, what, got, expected, remedy)


def module(what: str, got: str, expected: str, remedy: str, error: Any = ValueError, **options: Any) -> Mistake:
    return Mistake(partial(wrap, **options), error, what, got, expected, remedy)


def call(action: Callable[[Any], object], error: Any, *parts: str) -> Mistake:
    """A mistake with a wrapped model, to which no process group belongs yet."""
    return Mistake(lambda _: action(DataParallel(net())), error, *parts)


def by_hand(*arguments: Any, parts: tuple[str, ...], error: Any = TypeError, **options: Any) -> Mistake:
    return Mistake(lambda _: dpfuse.fused_allreduce_gradients(*arguments, **options), error, *parts)


def hooked(*hooks: Any) -> Any:
    model = DDP(net())
    for hook in hooks:
        model.register_comm_hook(None, hook)
    return model


def train(model: Any, steps: int = 2) -> Any:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
    return model


def norm_of_what_is_in_the_buckets(_: Path) -> None:
    model = train(DataParallel(net(), accumulate_in_buckets=True))
    with model.no_sync():
        train(model, 1)
    model.grad_norm()


def notes(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("not a plan")
    return path


def file_of_torch(folder: Path) -> Path:
    torch.save(net().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def buffer_of(_, bucket):
    return bucket.get_future()


MB, MODULE = "must be a number of MB", "must be a torch.nn.Module"
PLAN_REMEDY = 'expected "ramp", "greedy", "auto", a BucketPlan, or the path'
SIZE_REMEDY = "0 puts every parameter alone"

MISTAKES: dict[str, Mistake] = {
    # What is wrapped
    "parameters instead of the module": module(
        "layers", "got generator", MODULE, "pass the model instance", TypeError, module=net().parameters()
    ),
    "a list of layers": module("layers", "got list", MODULE, "pass the model instance", TypeError, module=[net()]),
    "a class instead of an instance": module(
        "layers", "got the class Linear", MODULE, "pass the model instance", TypeError, module=nn.Linear
    ),
    "a class, for DDP": module(
        "module", "got the class Linear", MODULE, "pass the model instance", TypeError, module=nn.Linear, face=DDP
    ),
    "a class that skips the constructor": Mistake(
        lambda _: Skipping(net())(torch.ones(2, 4)),
        DPFuseError,
        "Skipping has not run the constructor of dpfuse.DistributedDataParallel",
        "nothing here averages gradients",
        "expected that before this call",
        "Call super().__init__(module) in its constructor",
    ),
    "a module without parameters": module(
        "nothing to average", "ReLU has no parameter", "expected at least one", "without the wrapper", module=nn.ReLU()
    ),
    "a frozen module": module(
        "nothing to average",
        "Sequential has no parameter with requires_grad=True",
        "expected at least one",
        "without the wrapper",
        module=net().requires_grad_(False),
    ),
    "a module without parameters, for DDP": module(
        "not needed",
        "doesn't have any parameter",
        "requires a gradient",
        "use the module itself",
        RuntimeError,
        module=nn.ReLU(),
        face=DDP,
    ),
    "a lazy module": module(
        "parameter 'weight'", "uninitialized", "expected a known shape", "Run one forward", module=nn.LazyLinear(2)
    ),
    "a module on the meta device": module(
        "parameter 'weight'",
        "is on the meta device",
        "expected data",
        "Use module.to_empty",
        module=nn.Linear(2, 2, device="meta"),
    ),
    "a DTensor that is not added up": Mistake(
        lambda _: DDP(divided(Partial())),
        ValueError,
        "'weight' is a DTensor",
        "with placements (Partial",
        "expected each dimension to be Shard or Replicate",
        "Call redistribute()",
    ),
    "a DTensor beside an option": Mistake(
        lambda _: DDP(divided(Replicate()), metrics=True),
        ValueError,
        "'weight' is a DTensor",
        "metrics=True",
        "expected one of the two",
        "Leave out one of the two",
    ),
    "a DTensor in a checkpoint": Mistake(
        lambda folder: dpfuse.save_checkpoint(folder, divided(Replicate()), step=1),
        TypeError,
        "save_checkpoint",
        "'weight' is a DTensor",
        "expected plain tensors",
        "Use torch.distributed.checkpoint",
    ),
    # Checkpoints
    "a checkpoint in the order of torch.save": Mistake(
        lambda folder: dpfuse.save_checkpoint(net(), folder, step=1),
        TypeError,
        "folder must be",
        "got a Sequential",
        "a path",
        "in this order: save_checkpoint(folder, model, optimizer)",
    ),
    "model, optimizer, folder": Mistake(
        lambda folder: dpfuse.save_checkpoint(net(), torch.optim.SGD(net().parameters()), folder, step=1),
        TypeError,
        "folder must be",
        "got a Sequential",
        "a path",
        "in this order: save_checkpoint(folder, model, optimizer)",
    ),
    "optimizer before model": Mistake(
        lambda folder: dpfuse.load_checkpoint(folder, torch.optim.SGD(net().parameters()), net()),
        TypeError,
        "model must be",
        "got a SGD",
        "a torch.nn.Module",
        "in this order: load_checkpoint(path, model, optimizer)",
    ),
    "a state dict in place of the model": Mistake(
        lambda folder: dpfuse.save_checkpoint(folder, net().state_dict(), step=1),
        TypeError,
        "model must be",
        "got a OrderedDict",
        "a torch.nn.Module",
        "Pass the module itself, and not its state_dict()",
    ),
    "a state dict in place of the optimizer": Mistake(
        lambda folder: dpfuse.save_checkpoint(folder, net(), {"state": {}}, step=1),
        TypeError,
        "optimizer must be",
        "got a dict",
        "an object with state_dict()",
        "Pass the optimizer itself",
    ),
    "a file of torch.save": Mistake(
        lambda folder: dpfuse.load_checkpoint(file_of_torch(folder), net()),
        ValueError,
        "model.pt was not written by dpfuse.save_checkpoint",
        "got a file such as torch.save writes",
        "expected one of its files",
        "Read it with torch.load()",
    ),
    # Sizes
    "a size with its unit": option(
        "comm_buffer_size", "got '25MB' of type str", MB, "pass for example", TypeError, comm_buffer_size="25MB"
    ),
    "a size of None": option(
        "last_comm_buffer_size",
        "got None of type NoneType",
        MB,
        "pass for example",
        TypeError,
        last_comm_buffer_size=None,
    ),
    "a negative size": option("comm_buffer_size", "got -1", "must be >= 0 MB", SIZE_REMEDY, comm_buffer_size=-1),
    "a size that is NaN": option(
        "last_comm_buffer_size", "got nan", "must be >= 0 MB", SIZE_REMEDY, last_comm_buffer_size=float("nan")
    ),
    "DDP's size with its unit": option(
        "bucket_cap_mb", "got '25MB' of type str", MB, "pass for example", TypeError, face=DDP, bucket_cap_mb="25MB"
    ),
    "a negative size, for DDP": option(
        "bucket_cap_mb", "got -3", "must be >= 0 MB", SIZE_REMEDY, face=DDP, bucket_cap_mb=-3
    ),
    "a list of sizes as text": option(
        "bucket_cap_mb_list",
        "got '1,25' of type str",
        "must be a list of sizes",
        "pass for example [1, 25]",
        TypeError,
        face=DDP,
        bucket_cap_mb_list="1,25",
    ),
    "auto and a list of sizes": option(
        "bucket_cap_mb_list was passed",
        'with plan="auto"',
        "expected one of the two",
        "Leave out one",
        face=DDP,
        plan="auto",
        bucket_cap_mb_list=[1],
    ),
    # Other options
    "a typing error in the name of an option": option(
        "unexpected keyword argument",
        "'find_unused_parameter'",
        "did you mean",
        "find_unused_parameters",
        TypeError,
        find_unused_parameter=True,
    ),
    "the other class's name of an option": option(
        "unexpected keyword argument",
        "'bucket_cap_mb'",
        "which is one of DistributedDataParallel",
        "here it is comm_buffer_size",
        TypeError,
        bucket_cap_mb=25,
    ),
    "what only the other class has": option(
        "unexpected keyword argument",
        "'device_ids'",
        "which is one of DistributedDataParallel",
        "leave it out, or use dpfuse.DistributedDataParallel",
        TypeError,
        device_ids=[0],
    ),
    "a name of DataParallel, for DDP": option(
        "unexpected keyword argument",
        "'group'",
        "which is one of DataParallel",
        "here it is process_group",
        TypeError,
        face=DDP,
        group=None,
    ),
    "a name that nothing has": option(
        "unexpected keyword argument", "'zebra'", "expected one of", "comm_buffer_size", TypeError, zebra=1
    ),
    "a wire dtype by its name": option(
        "wire_dtype", "got 'bfloat16'", "torch.bfloat16", "None sends", wire_dtype="bfloat16"
    ),
    "a wire dtype of integers": option(
        "wire_dtype", "got torch.int8", "must be None or one of", "None sends", wire_dtype=torch.int8
    ),
    "sums in another dtype than float32": option(
        "the second dtype of wire_dtype",
        "got torch.bfloat16",
        "must be torch.float32",
        "or torch.float16 alone",
        wire_dtype=(torch.float16, torch.bfloat16),
    ),
    "three dtypes for the wire": option(
        "wire_dtype",
        "got 3 values",
        "a pair of two",
        "the first travels",
        wire_dtype=(torch.float16, torch.float32, torch.float32),
    ),
    "True for check_finite": option("check_finite", "got True", "must be one of", 'pass "raise"', check_finite=True),
    "an unknown check": option("check must be", "got 'loose'", "'deferred' or 'strict'", "strict waits", check="loose"),
    "an unknown rule for buckets": option(
        "plan is 'ramps'", "cannot be read", PLAN_REMEDY, "plan.save()", plan="ramps"
    ),
    "a number as a plan": option("plan must be", "got 25 of type int", PLAN_REMEDY, "plan.save()", TypeError, plan=25),
    "a plan of another model": option(
        "plan is of another model",
        "'weight' of shape (2, 2)",
        "'0.weight' of shape (3, 4)",
        "Make a plan of this model",
        plan=dpfuse.plan_buckets(nn.Linear(2, 2)),
    ),
    "error feedback without rounding": option(
        "error_feedback=True", "wire_dtype=None", "expected a narrow wire", "Pass for example", error_feedback=True
    ),
    "accumulation on a narrow wire": option(
        "accumulate_in_buckets=True",
        "with wire_dtype=torch.bfloat16",
        "expected one of the two",
        "let torch.float32 travel",
        accumulate_in_buckets=True,
        wire_dtype=torch.bfloat16,
    ),
    "a time-out of zero": option("stall_timeout", "got 0", "must be > 0 s", "float('inf') waits", stall_timeout=0),
    "a time-out as text": option(
        "stall_timeout",
        "got '60s' of type str",
        "must be a number of seconds",
        "pass for example",
        TypeError,
        stall_timeout="60s",
    ),
    "1 for True": option(
        "deterministic",
        "got 1 of type int",
        "must be True or False",
        "pass for example deterministic=True",
        TypeError,
        deterministic=1,
    ),
    "a scale of zero": option(
        "gradient_scale", "got 0.0", "must be between 1e-6", "leave it out for the mean", gradient_scale=0.0
    ),
    "a scale as text": option(
        "gradient_scale",
        "got 'mean' of type str",
        "must be a number",
        "leave it out for the mean",
        TypeError,
        gradient_scale="mean",
    ),
    "a group by its name": option(
        "group", "got str", "must be None or a torch.distributed.ProcessGroup", "pass what", TypeError, group="gloo"
    ),
    "a GPU for a module on the CPU": option(
        "device_ids", "a module on the CPU", "only work with GPU modules", "leave them out", face=DDP, device_ids=[0]
    ),
    "two devices": option(
        "device_ids",
        "got [0, 1]",
        "contain a single element",
        "start one process per device",
        face=DDP,
        device_ids=[0, 1],
    ),
    # A wrapped model
    "autotune of a bare module": Mistake(
        lambda _: dpfuse.autotune(net()),
        TypeError,
        "autotune",
        "got Sequential",
        "must be wrapped by dpfuse",
        "Pass the",
    ),
    "times of a bare module": Mistake(
        lambda _: dpfuse.time_communication(net()).__enter__(),
        TypeError,
        "time_communication",
        "got Sequential",
        "must be wrapped by dpfuse",
        "Pass the",
    ),
    "a bare module for the scaler": Mistake(
        lambda _: dpfuse.GradScaler(model=net()),
        TypeError,
        "model",
        "got Sequential",
        "must be a dpfuse.DataParallel",
        "Wrap the module first",
    ),
    "autotune of no steps": call(
        lambda model: dpfuse.autotune(model, steps=0),
        ValueError,
        "steps",
        "got 0",
        "must be at least 1",
        "leave it out",
    ),
    "autotune of a model with a hook": Mistake(
        lambda _: dpfuse.autotune(hooked(buffer_of)),
        DPFuseError,
        "autotune was called",
        "with the communication hook",
        "expected one of the two",
        "register the hook once the tuning is done",
    ),
    "a negative weight": call(
        lambda model: model.set_gradient_weight(-1), ValueError, "weight", "got -1", "finite, and 0 or more", "0 leaves"
    ),
    "a weight of NaN": call(
        lambda model: model.set_gradient_weight(float("nan")),
        ValueError,
        "weight",
        "got nan",
        "must be finite",
        "0 leaves this rank out",
    ),
    "a weight as text": call(
        lambda model: model.set_gradient_weight("3"),
        TypeError,
        "weight",
        "got '3' of type str",
        "must be a number",
        "None takes",
    ),
    "an unknown reduction": call(
        lambda model: model.set_gradient_weight(1, reduction="none"),
        ValueError,
        "reduction",
        "got 'none'",
        "must be 'mean' or 'sum'",
        "pass that of the loss",
    ),
    "clipping to a text": call(
        lambda model: train(model).clip_grad_norm_("1"),
        TypeError,
        "max_norm",
        "got '1' of type str",
        "must be a number",
        "pass for example",
    ),
    "an unknown norm": call(
        lambda model: train(model).clip_grad_norm_(1.0, norm_type="two"),
        TypeError,
        "norm_type",
        "got 'two'",
        "must be a number",
        "pass for example",
    ),
    "the norm of what is in the buckets": Mistake(
        norm_of_what_is_in_the_buckets,
        DPFuseError,
        "the norm of the gradients was asked for",
        "'0.weight' lie in its",
        "expected a synchronised backward",
        "discard_accumulated()",
    ),
    "a state dict by its path": call(
        lambda model: model.set_state_dict("m.pt"),
        TypeError,
        "set_state_dict",
        "got a str",
        "expected a dict",
        "Read the file first",
    ),
    "a state dict of another model": call(
        lambda model: model.set_state_dict({"other": torch.ones(1)}),
        ValueError,
        "no key of the state dict matches",
        "got 'other'",
        "expected '0.weight'",
        "Pass the state dict of this model",
    ),
    "a state dict of other shapes": call(
        lambda model: model.set_state_dict({"0.bias": torch.ones(9)}),
        ValueError,
        "'0.bias'",
        "has shape (9,)",
        "expected (3,)",
        "same architecture",
    ),
    # By hand
    "a module in place of parameters": by_hand(
        net(), parts=("parameter_list[0]", "is a Linear", "expected a parameter", "pass model.parameters()")
    ),
    "no parameters": by_hand(
        None, parts=("parameter_list", "got NoneType", "must be an iterable", "pass model.parameters")
    ),
    "names in place of parameters": by_hand(
        ["weight"], parts=("parameter_list[0]", "is a str", "expected a parameter", "pass model.parameters()")
    ),
    "a sum by its name": by_hand(
        net().parameters(),
        scale="sum",
        parts=("scale", "got 'sum' of type str", "must be a number", "pass 1.0 for the sum"),
    ),
    "buckets of a negative size": by_hand(
        net().parameters(),
        bucket_size=-1,
        error=ValueError,
        parts=("bucket_size", "got -1", "must be >= 0 bytes", "0 moves every gradient alone"),
    ),
    "one module as replicas": Mistake(
        lambda _: dpfuse.reduce_replicas(net()),
        TypeError,
        "replicas",
        "got a Sequential",
        "must be a list",
        "pass [model]",
    ),
    # Hooks
    "a hook that is no function": Mistake(
        lambda _: hooked(3), TypeError, "Communication hook", "Got 3 of type int", "must be callable", "pass a function"
    ),
    "two hooks": Mistake(
        lambda _: hooked(buffer_of, buffer_of),
        RuntimeError,
        "register_comm_hook",
        "Got buffer_of after buffer_of",
        "only be called once",
        "wrap the module again",
    ),
    "a hook that returns nothing": Mistake(
        lambda _: train(hooked(lambda state, bucket: None)),
        DPFuseError,
        "callback",
        "got NoneType",
        "must return a torch.futures.Future",
        "Return what",
    ),
    # Plans
    "names in place of a model": Mistake(
        lambda _: dpfuse.plan_buckets(["a"]),
        TypeError,
        "param_0",
        "is a str",
        "expected a parameter or a ParamSpec",
        "Or pass the model itself",
    ),
    "no model": Mistake(
        lambda _: dpfuse.plan_buckets(3), TypeError, "params", "got int", "must be a module", "pass the model itself"
    ),
    "a plan of nothing": Mistake(
        lambda _: dpfuse.plan_buckets([]),
        ValueError,
        "params",
        "has no trainable parameter",
        "expected at least one",
        "Or pass the model itself",
    ),
    "an unknown dtype": Mistake(
        lambda _: dpfuse.ParamSpec("w", (2,), "float12"),
        ValueError,
        "parameter 'w'",
        "has dtype 'float12'",
        "expected one of",
        "float32",
    ),
    "a file that is no plan": Mistake(
        lambda folder: dpfuse.load_plan(notes(folder)),
        ValueError,
        "notes.txt'",
        "got no plan",
        "expected format",
        "plan.save()",
    ),
    # Jobs
    "a lambda for spawn": Mistake(
        lambda _: dpfuse.spawn(lambda: None, nprocs=2),
        ValueError,
        "spawn: func",
        "<lambda>",
        "expected a function at the top level",
        "no lambda",
    ),
    "no processes for spawn": Mistake(
        lambda _: dpfuse.spawn(net, nprocs=0), ValueError, "nprocs", "got 0", "must be at least 1", "-1 for all GPUs"
    ),
}
