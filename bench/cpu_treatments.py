"""`python -m bench.cpu_treatments FILE`: what each special treatment of gradients on a CPU is worth, on two gloo ranks.

Eager packs a large gradient as soon as it is ready. Renewed memory lets private gradients below 2 MB lie in the buffer;
without it they are copied, none is eager, and none is handed out early. Early views are handed out when a
bucket is sent; eager ones earlier. Glibc keeps freed memory. Where a treatment has no effect, the figures show the
noise: renewed memory for views, eager packing for tiny gradients, and all three for private gradients of 4 MB.

A wrapper without one of them is timed in turns with the usual one, beside torch's DDP. A step is forward, backward and
dropping the gradients, in wall time. The most memory is that of a fresh pair of processes with one wrapper, after its
first steps, over what the process had before it wrapped. Memory that glibc keeps belongs to the whole process, so for
it times come from fresh processes, too, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from time import perf_counter, strftime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from bench.baselines import BARE
from bench.machine import describe
from bench.models import PAIR_MODELS, Workload, chain
from bench.rank_group import on_ranks
from bench.step_time import Effort, time_steps
from dpfuse.engine import assembly, sync
from dpfuse.engine.bucket_kinds import Trait
from dpfuse.engine.delivery import RenewedViews, Views

MODELS: dict[str, Callable[[], Workload]] = {"10 tiny": partial(chain, 10), **PAIR_MODELS}
FACES: dict[str, Callable[[nn.Module], Any]] = {
    "dp": dpfuse.DataParallel,
    "ddp": partial(dpfuse.DistributedDataParallel, forward_sync_buffers=False),
}
TREATMENTS = ("eager", "renewed memory", "early views")
FREED = "freed memory"  # of the host
WITHOUT = {"eager": {Trait.SINGLY}, "renewed memory": {Trait.COUNTED, Trait.RENEWED}}
STEPS, SETTLED, TURNS = 30, 10, 3
BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in signature(TorchDDP).parameters)

_off: dict[int, str] = {}  # by id of the list of features of a wrapper


class _LateViews(Views):
    def hand_out_early(self, missing: Any) -> None:
        self.handed_out = False


class _LateRenewedViews(RenewedViews):
    def prepare(self, grads: list[Any], *, complete: bool) -> None:
        self.handed_out = False
        self._memory.before_write(lists=1)
        self._elsewhere = range(len(grads))

    def hand_out_early(self, missing: Any) -> None:
        self.handed_out = False


def switch() -> None:
    """Replace methods of the assembly: it then leaves out a treatment for the wrappers that `without` makes."""
    one_bucket: Any = assembly._OneBucket
    traits_of, delivery_of = one_bucket._traits, one_bucket._delivery

    def traits(self: Any) -> set[Trait]:
        found: set[Trait] = traits_of(self)
        return found - WITHOUT.get(_off.get(id(self.assembly.features), ""), set())

    def delivery(self: Any, *arguments: Any) -> Any:
        made = delivery_of(self, *arguments)
        if _off.get(id(self.assembly.features)) == "early views":
            made.__class__ = {Views: _LateViews, RenewedViews: _LateRenewedViews}.get(type(made), type(made))
        return made

    one_bucket._traits, one_bucket._delivery = traits, delivery


def without(treatment: str, face: str, module: nn.Module) -> nn.Module:
    """Wrap a module, and make its buckets without this treatment; an empty name leaves out none."""
    wrapped: nn.Module = FACES[face](module)
    grads: Any = wrapped._sync.grads  # type: ignore[union-attr]
    if treatment:
        _off[id(grads._maker.features)] = treatment
        grads.remake()
    return wrapped


def times(model: str, face: str) -> Any:
    """Time a face without each treatment, in turns with the usual one; to be called on each rank."""
    switch()
    wraps: dict[str, Any] = {BARE: lambda module: module, "usual": partial(without, "", face)}
    wraps |= {treatment: partial(without, treatment, face) for treatment in TREATMENTS}
    wraps["usual again"] = partial(without, "", face)
    wraps["DDP"] = partial(TorchDDP, **{BUFFERS: False})
    wraps["DDP views"] = partial(TorchDDP, gradient_as_bucket_view=True, **{BUFFERS: False})
    found = time_steps(MODELS[model], wraps, effort=Effort(30, 3, 40))
    return {name: {"median": median(one["seconds"]), "extra": one["extra"]} for name, one in found.items()}


def alone(model: str, face: str, treatment: str) -> Any:
    """Train one wrapper in fresh processes: the most memory beyond that before wrapping, and the median of a step."""
    switch()
    if treatment == FREED:
        sync.keep_freed_memory = lambda: None  # type: ignore[assignment]
    torch.manual_seed(dist.get_rank())
    workload = MODELS[model]()
    _forget_most()
    before = _most()
    wrapped = (
        without("" if treatment == FREED else treatment, face, workload.module)
        if face in FACES
        else _ddp(face, workload)
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    seconds = []
    for step in range(STEPS):
        if step == SETTLED:
            _forget_most()
        dist.barrier()
        began = perf_counter()
        workload.loss(wrapped).backward()
        optimizer.zero_grad()
        seconds.append(perf_counter() - began)
    return {"MB": (_most() - before) / 1e6, "seconds": median(seconds[SETTLED:])}


def _ddp(face: str, workload: Workload) -> nn.Module:
    return TorchDDP(workload.module, gradient_as_bucket_view=face == "DDP views", **{BUFFERS: False})


def _forget_most() -> None:
    """Let `_most` begin again with what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def _most() -> int:
    """Return the most bytes that this process has had in memory since it began, or since `_forget_most`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main(file: str) -> None:
    """Measure all, print, and write the record."""
    found: dict[str, Any] = {}
    for model in MODELS:
        for face in FACES:
            found[f"{model}, {face}, times"] = on_ranks(2, "cpu", times, model, face)
            print(model, face, json.dumps(found[f"{model}, {face}, times"]), flush=True)
    for model in ("100 MB large", "transformer"):
        for face in (*FACES, "DDP", "DDP views"):
            treatments = ("", *TREATMENTS, FREED) if face in FACES else ("",)
            turns: dict[str, list[Any]] = {treatment or "usual": [] for treatment in treatments}
            for _ in range(TURNS):
                for treatment in treatments:
                    turns[treatment or "usual"].append(on_ranks(2, "cpu", alone, model, face, treatment))
            medians = {
                treatment: {part: median(one[part] for one in each) for part in ("MB", "seconds")}
                for treatment, each in turns.items()
            }
            found[f"{model}, {face}, alone"] = medians
            print(model, face, json.dumps(medians), flush=True)
    facts = {"date": strftime("%Y-%m-%d"), "machine": describe(gpu=False)}
    command = "python -m bench.cpu_treatments FILE"
    record = {"what": str(__doc__).splitlines()[0], "command": command, **facts, "found": found}
    Path(file).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
