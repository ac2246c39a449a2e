"""Programs of several ranks that do more than one plain step after the other, for the race detector.

Each is a generator: it trains on one device, and yields copies of what it holds after each step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dpfuse
from tests.pretended_gpu.watch import silence, snapshot
from tests.pretended_gpu.ways import SETTLED, WAYS, WIDTH, Way, Wrap, chain, plain, zeroing

__all__ = ["EARLY", "FOUR", "LATE", "PEERS", "PROGRAMS", "TORCH", "Job", "Program", "failing", "replayed", "trained"]

STEPS = SETTLED + 6
LARGE = 8448  # a weight of 64 rows has more than 1 MB, also in 16 bits
# MB: several gradients share a bucket, and the large ones have one each.
SIZES = {False: {"comm_buffer_size": 0.05, "last_comm_buffer_size": 0.01}, True: {"bucket_cap_mb": 0.05}}


class Net(nn.Module):
    """The network of a way, then a large layer, whose outputs are folded."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.large = nn.Linear(WIDTH, LARGE)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.network(x)).relu().view(len(x), -1, WIDTH).sum(1)


@dataclass(frozen=True)
class Job:
    """One rank of a job on one kind of device.

    Args:
        face: whether models are wrapped by the class that stands in for torch's.
        device: "cpu" or "cuda".
        group: for the CPU; None is the default group.
        rank: of this process.
        ranks: how many there are.
    """

    face: bool
    device: str
    group: Any
    rank: int
    ranks: int

    def built(self, way: Way) -> tuple[Net, Any]:
        """Return the module of a way of use, the same on each rank and device, and its wrapper."""
        torch.manual_seed(0)
        module = Net(way.network()).to(self.device, way.dtype)
        return module, self.wrap(replace(way.wrap, face=self.face), module)

    def model(self, **options: Any) -> tuple[Net, Any]:
        """Return a module and its wrapper, with these options."""
        return self.built(Way(Wrap(options)))

    def wrap(self, wrap: Wrap, module: nn.Module, group: Any = None) -> Any:
        """Wrap a module in small buckets."""
        sizes = {name: size for name, size in SIZES[wrap.face].items() if name not in wrap.options}
        return wrap(module, **{"process_group" if wrap.face else "group": group or self.group}, **sizes)

    def inputs(self, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the inputs of this rank in a step. The host waits for nothing: that would hide what it reads early."""
        draw = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(8, WIDTH, generator=draw).to(dtype)
        return x if self.device == "cpu" else x.pin_memory().to(self.device, non_blocking=True)

    def held(self, module: nn.Module, optimizer: Any) -> list[Tensor]:
        """Return copies of the gradients, the parameters, the buffers and the states. The host waits for nothing."""
        with silence():
            tensors = [*module.parameters(), *module.buffers()]
            if not isinstance(optimizer, dpfuse.ShardedOptimizer):  # each rank has a part of its gradients and states
                tensors += [param.grad for param in module.parameters() if param.grad is not None]
                states = [optimizer.state.get(param, {}) for param in module.parameters()]
                tensors += [one for state in states for one in state.values() if isinstance(one, Tensor)]
            return [snapshot(tensor) for tensor in tensors]


Program = Callable[[Job], Iterator[list[Tensor]]]


def trained(way: Way) -> Program:
    """Return a program that does the steps of a way of use."""

    def program(job: Job) -> Iterator[list[Tensor]]:
        module, model = job.built(way)
        optimizer, do = way.optimizer(model), way.step or plain
        for step in range(STEPS):
            do(model, optimizer, job.inputs(step, way.dtype))
            yield job.held(module, optimizer)

    return program


def replayed(way: Way) -> Program:
    """Return a program that settles, captures a step in a CUDA graph, and replays it. On the CPU it goes on."""

    def program(job: Job) -> Iterator[list[Tensor]]:
        module, model = job.built(way)
        optimizer = way.optimizer(model, capturable=job.device == "cuda")
        if job.device == "cpu":
            for step in range(STEPS):
                zeroing(model, optimizer, job.inputs(step, way.dtype))
                yield job.held(module, optimizer)
            return
        x = job.inputs(0, way.dtype)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for step in range(STEPS // 2):
            with torch.cuda.stream(side):
                x.copy_(job.inputs(step, way.dtype))
                zeroing(model, optimizer, x)
            yield job.held(module, optimizer)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            zeroing(model, optimizer, x)
        for step in range(STEPS // 2, STEPS):
            x.copy_(job.inputs(step, way.dtype))
            graph.replay()
            yield job.held(module, optimizer)

    return program


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), fused=True)


def on_a_stream_of_its_own(job: Job) -> Iterator[list[Tensor]]:
    """All training runs on a stream of the program's own, and the inputs are copied on a third one."""
    module, model = job.model()
    optimizer = _adamw(module)
    if job.device == "cpu":
        for step in range(STEPS):
            plain(model, optimizer, job.inputs(step))
            yield job.held(module, optimizer)
        return
    main, copies = torch.cuda.Stream(), torch.cuda.Stream()
    main.wait_stream(torch.cuda.current_stream())
    for step in range(STEPS):
        with torch.cuda.stream(copies):
            x = job.inputs(step)
        main.wait_stream(copies)
        x.record_stream(main)
        with torch.cuda.stream(main):
            plain(model, optimizer, x)
        yield job.held(module, optimizer)


def two_models_in_turn(job: Job) -> Iterator[list[Tensor]]:
    """Two models train in turn, the second one on what the first one gives."""
    first, one = job.model()
    second, other = job.model()
    optimizers = _adamw(first), _adamw(second)
    for step in range(STEPS):
        x = job.inputs(step)
        plain(one, optimizers[0], x)
        yield job.held(first, optimizers[0])
        with torch.no_grad():
            made = first(x)
        plain(other, optimizers[1], made)
        yield job.held(second, optimizers[1])


def failing(way: Way, fails: dict[int, set[int]], at: Callable[[Net], nn.Module], check: str = "deferred") -> Program:
    """Return a program that does the steps of a way of use, of which some fail, and goes on with the next batch.

    Args:
        way: of use.
        fails: by step the ranks whose backward fails.
        at: returns the module in whose backward it fails.
        check: of the wrapper. With "strict" all ranks hear of it in the same backward. With "deferred" a GPU hears of
            it in the next one, and its weights are worth nothing in between: no values are compared then.
    """

    def program(job: Job) -> Iterator[list[Tensor]]:
        module, model = job.built(replace(way, wrap=replace(way.wrap, options={**way.wrap.options, "check": check})))
        optimizer, do = way.optimizer(model), way.step or plain
        for step in range(STEPS):
            fail = job.rank in fails.get(step, ())
            handle = at(module).register_full_backward_hook(_fail) if fail else None
            try:
                do(model, optimizer, job.inputs(step, way.dtype))
            except (RuntimeError, ValueError):
                pass  # this rank's own, or the word that another rank has failed
            finally:
                if handle is not None:
                    handle.remove()
            yield job.held(module, optimizer) if check == "strict" and step not in fails else []

    return program


def _fail(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    raise ValueError("a planted failure")


def stopping(job: Job) -> Iterator[list[Tensor]]:
    """One rank asks to stop, and all stop after the same step."""
    module, model = job.model()
    optimizer = _adamw(module)
    stopped: list[bool] = []
    dpfuse.forget_stop()
    for step in range(STEPS):
        plain(model, optimizer, job.inputs(step))
        yield job.held(module, optimizer)
        if step == 12 and job.rank == 1:
            dpfuse.request_stop("enough")
        stopped.append(model.stop_requested)
    dpfuse.forget_stop()
    assert stopped[14:] == [True] * (STEPS - 14)  # a GPU hears of it one backward later
    assert not any(stopped[:12])


def changing(job: Job) -> Iterator[list[Tensor]]:
    """A layer is frozen, another one comes, and the first is trained again."""
    module, model = job.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)
    for step in range(STEPS):
        if step == 6:
            module.network[1].requires_grad_(False)
        if step == 12:
            torch.manual_seed(1)
            module.network.append(nn.Linear(WIDTH, WIDTH).to(job.device))
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)
        if step == 18:
            module.network[1].requires_grad_(True)
        plain(model, optimizer, job.inputs(step))
        yield job.held(module, optimizer)


def checkpointing(job: Job) -> Iterator[list[Tensor]]:
    """A checkpoint is written while the training goes on, and is read again."""
    module, model = job.model()
    optimizer = _adamw(module)
    places: list[Any] = [tempfile.mkdtemp() if job.rank == 0 else None]
    dist.broadcast_object_list(places, 0, group=job.group or _cpu_of(job))
    path = None
    for step in range(STEPS):
        plain(model, optimizer, job.inputs(step))
        yield job.held(module, optimizer)
        if step in (7, 15):
            path = dpfuse.save_checkpoint(places[0], model, optimizer, step=step)
        if step == 19:
            dpfuse.load_checkpoint(path, model, optimizer)


def _cpu_of(job: Job) -> Any:
    return PEERS[0]


def tuning(job: Job) -> Iterator[list[Tensor]]:
    """The buckets are chosen by measuring."""
    module, model = job.model()
    optimizer = _adamw(module)
    dpfuse.autotune(model, steps=3)
    for step in range(STEPS):
        plain(model, optimizer, job.inputs(step))
        yield job.held(module, optimizer)


def by_hand(job: Job) -> Iterator[list[Tensor]]:
    """Gradients are averaged by hand after backwards inside no_sync()."""
    module, model = job.model()
    optimizer = _adamw(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(job.inputs(step)).sum().backward()
        dpfuse.fused_allreduce_gradients(module.parameters(), job.group)
        optimizer.step()
        yield job.held(module, optimizer)


def keeping_gradients(job: Job) -> Iterator[list[Tensor]]:
    """The memory of gradients is kept, and clones of them are used after the step."""
    module, model = job.model()
    optimizer, kept = _adamw(module), []
    for step in range(STEPS):
        zeroing(model, optimizer, job.inputs(step))
        kept = [param.grad.clone() for param in module.parameters() if param.grad is not None][:2] + kept[:6]
        yield job.held(module, optimizer) + [snapshot(each) for each in kept]


def with_torch(**options: Any) -> Program:
    """Return a program that uses torch's own class."""
    hook = options.pop("hook", None)

    def program(job: Job) -> Iterator[list[Tensor]]:
        torch.manual_seed(0)
        module = Net(chain()).to(job.device)
        ids = {"device_ids": [0]} if job.device == "cuda" else {}
        model = nn.parallel.DistributedDataParallel(
            module, process_group=job.group, bucket_cap_mb=0.05, **ids, **options
        )
        if hook is not None:
            model.register_comm_hook(job.group, hook)
        optimizer = _adamw(module)
        for step in range(STEPS):
            plain(model, optimizer, job.inputs(step))
            yield job.held(module, optimizer)

    return program


class Complex(nn.Module):
    """Complex weights, read by their parts: other functions of complex numbers are compiled on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, dtype=torch.complex64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.view_as_real(weight) for weight in self.weights]
        return sum(x * part[:, 0] + 2 * x * part[:, 1] for part in parts)  # type: ignore[return-value]


def complex_weights(job: Job) -> Iterator[list[Tensor]]:
    """The weights and gradients are complex numbers."""
    torch.manual_seed(0)
    module = Complex().to(job.device)
    model = job.wrap(Wrap({}, job.face), module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in range(STEPS):
        plain(model, optimizer, job.inputs(step))
        yield [torch.view_as_real(each) for each in job.held(module, optimizer)]


def tensor_parallel(job: Job) -> Iterator[list[Tensor]]:
    """Two layers are divided over two ranks. Their gradients are averaged over the two replicas."""
    name = job.device
    mesh = init_device_mesh(name, (job.ranks // 2, 2), mesh_dim_names=(f"data_{name}", f"tensor_{name}"))
    data, tensor = mesh[f"data_{name}"], mesh[f"tensor_{name}"]
    torch.manual_seed(0)
    module = Net(chain()).to(name)
    plan = {"network.0": ColwiseParallel(), "network.1": RowwiseParallel()}
    parallelize_module(module, tensor, plan)
    model = job.wrap(Wrap({}, job.face), module, group=data.get_group())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9, foreach=False)
    replica = replace(job, rank=job.rank // 2)
    for step in range(STEPS):
        plain(model, optimizer, replica.inputs(step))
        with silence():
            yield [snapshot(_local(one)) for param in module.parameters() for one in (param, param.grad)]


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


PEERS: list[Any] = []  # the group of the CPU
PROGRAMS: dict[str, Program] = {
    program.__name__.replace("_", " "): program
    for program in (
        on_a_stream_of_its_own, two_models_in_turn, stopping, changing, checkpointing, tuning, by_hand,
        keeping_gradients, complex_weights,
    )
}  # fmt: skip
LATE = {5: {0, 1}, 9: {1}, 14: {0}, 15: {1}, 22: {0, 1}}
EARLY = {0: {1}, 1: {0}, 2: {0, 1}, 4: {1}}  # while buckets are planned anew
for _check in ("strict", "deferred"):
    for _where, _at in {
        "before the first bucket": lambda net: net,
        "in the middle": lambda net: net.network[0],
    }.items():
        for _when, _fails in {"late": LATE, "early": EARLY}.items():
            PROGRAMS[f"failing {_when}, {_where}, {_check}"] = failing(WAYS["views"], _fails, _at, _check)
FOUR: dict[str, Program] = {"tensor parallel": tensor_parallel}
TORCH: dict[str, Program] = {
    "torch's class": with_torch(),
    "torch's class, views": with_torch(gradient_as_bucket_view=True),
    "torch's class, static graph": with_torch(static_graph=True),
    "torch's class, unused parameters": with_torch(find_unused_parameters=True),
    "torch's class, bfloat16 hook": with_torch(hook=default_hooks.bf16_compress_hook),
}
