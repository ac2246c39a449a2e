"""`python -m tests.pretended_gpu.host_time FILE`: the host's time of a backward on the pretended device, as a record.

A GPU that takes no time leaves only the host's work: CPU seconds of the process during backward, and during the whole
step with zero_grad, forward and optimizer, over those of the bare module. All wrappers take their turns in one process;
each figure is the median of the differences within a round. Set PRETENDED_NODATA=1, which leaves out large copies and
sums: they would cost the memory bandwidth of the host.

The process runs on one core. On two, the thread of autograd wakes the core on which the main thread waits. After a
short backward that core is still awake. After a longer one it takes 20 to 30 us to wake it, which no wrapper spends.

The sketch is the least that any wrapper in Python does: see its class. A goal below its time cannot be reached.

A profile tells where the time of our backward goes: for the functions that take most, also in C, their calls in a
backward and the microseconds of their own; "all" is the sum of all functions. The profiler itself adds some tenths of a
microsecond to each call. From Python 3.12 on it hears other threads, too: then there is no profile.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from cProfile import Profile
from functools import partial
from operator import sub
from pathlib import Path
from pstats import Stats
from statistics import median
from time import process_time, strftime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from bench.machine import describe
from tests.pretended_gpu.device import counted

# Number of linear layers, each with two parameters, and their width.
MODELS = {12: (6, 64), 160: (80, 565), 392: (196, 1310), 2000: (1000, 16)}
SETTLED, ROUNDS, TURNS = 24, 40, 3
PROFILED, LINES = 200, 40  # backwards, and functions that are named
DDP = partial(DistributedDataParallel, device_ids=[0])
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "DDP default": DDP,
    "DDP views": partial(DDP, gradient_as_bucket_view=True),
    "DDP static graph": partial(DDP, static_graph=True),
    "DDP views, static graph": partial(DDP, gradient_as_bucket_view=True, static_graph=True),
    "replicate": lambda module: replicate(module, device_id=0),
    "dpfuse": dpfuse.DataParallel,
    "dpfuse's DDP face": partial(dpfuse.DistributedDataParallel, device_ids=[0]),
    "sketch": lambda module: _Sketch(module),
}
BUCKET = 25 << 20  # bytes, of DDP; its first one has 1 MB


class _Sketch(nn.Module):
    """Has the buckets of DDP, and for each gradient a hook in C and a view; for each bucket a sum and a wait.

    Nothing is packed or checked, and no stream is looked at: gradients that this would average are wrong.

    Args:
        module: of parameters that all get a gradient, in the reverse of their order.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._buckets: list[tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]] = []
        self._works: list[dist.Work] = []
        self._sum: Any = dist.group.WORLD._get_backend(torch.device("cuda", 0)).allreduce  # type: ignore[union-attr]
        self._options = dist.AllreduceOptions()
        params: list[torch.Tensor] = []
        room = 1 << 20
        for param in [*module.parameters()][::-1]:
            params.append(param)
            room -= param.nbytes
            if room <= 0:
                self._add(params)
                params, room = [], BUCKET
        if params:
            self._add(params)

    def _add(self, params: list[torch.Tensor]) -> None:
        order, ready = len(self._buckets), list[torch.Tensor]()
        flat = torch.zeros(sum(map(torch.Tensor.numel, params)), device="cuda")
        pieces = flat.split([param.numel() for param in params])
        views = [piece.view_as(param) for piece, param in zip(pieces, params, strict=True)]
        self._buckets.append((params, flat, views))

        def complete(param: torch.Tensor) -> None:
            ready.clear()
            self._send(order)

        for param in params[:-1]:
            param.register_post_accumulate_grad_hook(ready.append)
        params[-1].register_post_accumulate_grad_hook(complete)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the module."""
        output: torch.Tensor = self.module(inputs)
        output.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._end))
        return output

    def _send(self, order: int) -> None:
        params, flat, views = self._buckets[order]
        for grad in [param.grad for param in params]:
            assert grad is not None
            grad.data_ptr()  # what a pack would need
        self._works.append(self._sum([flat], self._options))
        for param, view in zip(params, views, strict=True):
            param.grad = view

    def _end(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


def main(file: str) -> None:
    """Measure all models, print, and write the record."""
    if not os.environ.get("PRETENDED_NODATA"):
        sys.exit("PRETENDED_NODATA is not set; expected 1, so that large copies are left out. Set it.")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2, device_id=device)
    found = {}
    for count, (layers, width) in MODELS.items():
        found[f"{count} parameters"] = measured = _measure(layers, width)
        print(count, json.dumps({part: of for part, of in measured.items() if part != "profiles"}), flush=True)
    facts = {"date": strftime("%Y-%m-%d"), "machine": describe(gpu=False)}
    command = "PRETENDED_NODATA=1 python -m tests.pretended_gpu.host_time FILE, on the pretended device"
    record = {"what": str(__doc__).splitlines()[0], "command": command, **facts, "microseconds": found}
    Path(file).write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the peers that NCCL would wait for do not exist


def _measure(layers: int, width: int) -> dict[str, Any]:
    x = torch.ones(4, width, device="cuda")
    models = {name: wrap(_network(layers, width)) for name, wrap in WRAPS.items()}
    optimizers = {model: torch.optim.SGD(model.parameters(), fused=True) for model in models.values()}

    def step(model: nn.Module) -> tuple[float, float]:
        """Train on a batch; return the seconds of the backward, and of all of it."""
        began = process_time()
        optimizers[model].zero_grad()
        loss = model(x).sum()
        backward_began = process_time()
        loss.backward()
        backward_ended = process_time()
        optimizers[model].step()
        return backward_ended - backward_began, process_time() - began

    calls = {}
    for name, model in models.items():
        for _ in range(SETTLED):
            step(model)
        with counted() as calls[name]:
            step(model)
    gc.collect()
    gc.freeze()
    gc.disable()
    backwards: dict[str, list[float]] = {name: [] for name in models}
    steps: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            step(model)  # the caches are now those of this wrapper
            turns = [step(model) for _ in range(TURNS)]
            backwards[name].append(median(backward for backward, _ in turns))
            steps[name].append(median(whole for _, whole in turns))
    buckets = {name: calls[name].get("nccl allReduce", 0) for name in models}
    ours = {name: model for name, model in models.items() if name.startswith("dpfuse")}
    heard = ours if sys.version_info < (3, 12) else {}
    profiles = {name: _profiled(model, x, optimizers[model]) for name, model in heard.items()}
    gc.enable()
    gc.unfreeze()
    return {"backward": _compared(backwards), "step": _compared(steps), "buckets": buckets, "profiles": profiles}


def _profiled(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Return the calls and the own microseconds of the functions that take most of a backward, and of all together."""
    profile = Profile()
    switches = {0: profile.enable, PROFILED: profile.disable}  # called in the thread that runs backwards
    for number in range(PROFILED + 1):
        optimizer.zero_grad()
        loss = model(x).sum()
        if number in switches:
            loss.register_hook(lambda _, number=number: switches[number]())
        loss.backward()
        optimizer.step()
    found = {
        f"{'/'.join(Path(file).parts[-2:])}:{line} {name}": [round(calls / PROFILED, 2), round(1e6 * own / PROFILED, 2)]
        for (file, line, name), (_, calls, own, _, _) in Stats(profile).stats.items()  # type: ignore[attr-defined]
    }
    longest = sorted(found, key=lambda name: found[name][1], reverse=True)[:LINES]
    whole = [round(sum(one[place] for one in found.values()), 1) for place in range(2)]
    return {"all": whole, **{name: found[name] for name in longest}}


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the time of the bare module, what each wrapper adds, and that over what the best peer adds."""
    # The machine is faster in one round than in the other, so each is compared with the bare module of its own round.
    beyond = {name: map(sub, times, seconds["bare"]) for name, times in seconds.items()}
    over = {name: round(1e6 * median(differences), 1) for name, differences in beyond.items()}
    peers = [name for name in over if name.startswith(("DDP", "replicate"))]
    best = min(peers, key=over.__getitem__)
    ratios = {name: round(over[name] / over[best], 3) for name in over if name.startswith(("dpfuse", "sketch"))}
    return {"bare": round(1e6 * median(seconds["bare"]), 1), "over bare": over, "best peer": best, "ratios": ratios}


def _network(layers: int, width: int) -> nn.Module:
    with torch.device("cuda"):  # initialised there by kernels, which do nothing: no memory of the host is touched
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


if __name__ == "__main__":
    main(*sys.argv[1:])
