"""Defects that are planted into dpfuse, one line each, and the finding by which the race detector must see each one.

A plant is set while its program runs on the device, and taken back afterwards; on the CPU the program runs without it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import dpfuse
from dpfuse.checkpoint import save_load
from dpfuse.comm import collective, flat_broadcast
from dpfuse.comm.waiting import NO_LIMIT
from dpfuse.comm.work import StagedWork
from dpfuse.engine import bucket
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.delivery import Private
from dpfuse.engine.exchanges.all_reduce import AllReduce
from dpfuse.engine.exchanges.hooked import _HookWork
from dpfuse.engine.late_reading import LateReading
from dpfuse.engine.reducer import Reducer
from dpfuse.engine.report import Report
from dpfuse.engine.spoiler import Spoiler
from dpfuse.engine.streams import HostCopy, SideStream, WritingStreams
from dpfuse.gradients import finite, norm
from dpfuse.gradients.error_feedback import _Residual
from dpfuse.gradients.norm import Gradients
from dpfuse.gradients.weight import GradientWeight
from dpfuse.sharded import elementwise_shard, flat_params, in_backward, sharding
from dpfuse.sharded import norm as sharded_norm
from dpfuse.sharded.in_backward import InBackward
from dpfuse.sharded.sharding import ShardingInBackward
from dpfuse.weights.hashing import Hashing
from dpfuse_kernels import PointerTable, Slot
from dpfuse_kernels.address_ring import AddressRing, CudaStreams
from dpfuse_kernels.bit_hash import BitHashTable
from dpfuse_kernels.launcher import Dispatcher
from tests.pretended_gpu.programs import STEPS, Job, Net, Program
from tests.pretended_gpu.watch import snapshot
from tests.pretended_gpu.ways import WIDTH, Way, Wrap, chain, plain, zeroing

__all__ = ["PLANTS", "PLANT_PROGRAMS", "Plant"]

Setattr = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Plant:
    """A defect, and how it is found.

    Args:
        face: "ours" or "drop-in".
        program: in which it is planted: one of that face, or of `PLANT_PROGRAMS`.
        plant: plants it, with what sets attributes and the rank.
        found: a regular expression that a finding must match; "values" where only numbers are wrong; or "error: " and
            an expression for the error.
        breaks: whether the process cannot go on afterwards.
    """

    face: str
    program: str
    plant: Callable[[Setattr, int], None]
    found: str
    breaks: bool = False


# --- Programs that plants need: each is clean without one ---


class OnStreams(nn.Module):
    """Layers beside each other, each on a stream; their outputs are added up."""

    def __init__(self, layers: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(layers))
        self.used = [place % 3 for place in range(layers)]  # the stream of each layer; 0 is the current one
        self._streams: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        if not x.is_cuda:
            return _folded(sum(layer(x) for layer in self.layers))
        self._streams = self._streams or [torch.cuda.Stream() for _ in range(3)]
        main, outputs = torch.cuda.current_stream(), []
        for layer, used in zip(self.layers, self.used, strict=True):
            stream = self._streams[used - 1] if used else main
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(layer(x))
        for stream in self._streams:
            main.wait_stream(stream)
        return _folded(sum(outputs))


def _folded(values: Any) -> Tensor:
    return values.relu().view(len(values), -1, WIDTH).sum(1)


PAIR = 2 * (WIDTH + 1) * WIDTH * 4 / 2**20  # MB of two layers


def on_streams(*, changes: bool = False, windows: int = 1, width: int = WIDTH, **options: Any) -> Program:
    """Return a program of six layers on three streams, of which two share a bucket.

    Args:
        changes: whether some layers run on another stream in single late steps.
        windows: backwards of a step; all but the last are inside no_sync().
        width: of the layers' outputs.
        options: of the wrapper.
    """

    def program(job: Job) -> Iterator[list[Tensor]]:
        size = PAIR * width / WIDTH
        wrap = Wrap({"comm_buffer_size": size, "last_comm_buffer_size": size, **options})
        module, model = job.built(Way(wrap, lambda: OnStreams(width=width)))
        network: Any = module.network
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        settled = list(network.used)
        for step in range(STEPS):
            network.used = list(settled)
            if changes and step >= STEPS // 2:
                network.used[step % 6] = (settled[step % 6] + 1 + step // 6 % 2) % 3
            optimizer.zero_grad()
            for window in range(windows):
                x = job.inputs(step * windows + window)  # kept: layers on other streams read it in backward, too
                with nullcontext() if window == windows - 1 else model.no_sync():
                    model(x).sum().backward()
            optimizer.step()
            yield job.held(module, optimizer)

    return program


def changing_addresses(**options: Any) -> Program:
    """Return a program of windows of nine backwards, whose gradients lie elsewhere each time."""

    def program(job: Job) -> Iterator[list[Tensor]]:
        module, model = job.model(**options)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        kept: list[list[Tensor]] = []
        for step in range(8):
            for window in range(9):
                with nullcontext() if window == 8 else model.no_sync():
                    model(job.inputs(step * 9 + window)).sum().backward()
                # The next gradients cannot lie where these do.
                kept = [[torch.empty_like(one) for one in module.parameters()], *kept[: (step + window) % 7]]
            optimizer.step()
            optimizer.zero_grad()
            yield job.held(module, optimizer)

    return program


def dropping_models(job: Job) -> Iterator[list[Tensor]]:
    """Wrappers end a few steps after they began, the last one in the middle of a backward."""
    options = {"wire_dtype": torch.bfloat16}
    for last in (False, True):
        module, model = job.model(**options)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        for step in range(5):
            plain(model, optimizer, job.inputs(step))
            yield job.held(module, optimizer)
        if last:
            module.network[0].register_full_backward_hook(_fail)
            with suppress(ValueError):
                model(job.inputs(5)).sum().backward()
        shapes = [param.shape for param in module.parameters()] * 4
        del model, module, optimizer
        _collect()
        # Memory that was in use until now is used for something else.
        memory = [torch.ones(shape, device=job.device) for shape in shapes]
        yield [snapshot(one) for one in memory[:2]]


def _collect() -> None:
    for _ in range(3):
        gc.collect()
        time.sleep(0.1)  # a thread of autograd lets go of a backward that has failed


def _fail(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    raise ValueError("a planted failure")


def captured_then_eager(job: Job) -> Iterator[list[Tensor]]:
    """A step is captured and replayed; between replays, steps run whose gradients lie elsewhere each time."""
    module, model = job.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    x, kept = job.inputs(0), []
    for step in range(3):
        zeroing(model, optimizer, x.copy_(job.inputs(step)))
        yield job.held(module, optimizer)
    graph, is_cuda = None, job.device == "cuda"
    if is_cuda:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            zeroing(model, optimizer, x)
    for step in range(3, STEPS):
        x.copy_(job.inputs(step))
        if step % 3 == 0:
            if graph is None:
                zeroing(model, optimizer, x)
            else:
                graph.replay()
        else:
            plain(model, optimizer, job.inputs(step))
            kept = [[torch.empty_like(one) for one in module.parameters()], *kept[: step % 7]]
        yield job.held(module, optimizer)


def one_table_on_two_streams(job: Job) -> Iterator[list[Tensor]]:
    """Norms of tensors, whose addresses one table keeps, on two streams that do not wait for each other."""
    tensors = [[torch.full((64,), float(number), device=job.device) for _ in range(2)] for number in range(12)]
    table = PointerTable(
        torch.zeros(128, device=job.device), [Slot("a", 0, (64,), (1,)), Slot("b", 64, (64,), (1,))], torch.float32
    )
    sides = [torch.cuda.Stream() for _ in range(2)] if job.device == "cuda" else [None, None]
    if job.device == "cuda":
        norm.squared_norm(tensors[0], table)  # what reaches the device once
        for side in sides:
            side.wait_stream(torch.cuda.current_stream())
    found = []
    for number in range(40):
        with torch.cuda.stream(sides[number % 2]) if job.device == "cuda" else nullcontext():
            found.append(norm.squared_norm(tensors[number // 2 % 12], table))
        yield [snapshot(one) for one in found[-2:]]


def windows_of_changing_length(job: Job) -> Iterator[list[Tensor]]:
    """Windows have one backward and two in turn, so that each report tells another number."""
    module, model = job.model()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            with model.no_sync():
                model(job.inputs(step)).sum().backward()
        model(job.inputs(step)).sum().backward()
        optimizer.step()
        yield job.held(module, optimizer)


def metrics_read(job: Job) -> Iterator[list[Tensor]]:
    """The program asks for the metrics after each step."""
    module, model = job.model(metrics=1)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for step in range(8):
        plain(model, optimizer, job.inputs(step))
        value = model.metrics()["grad_norm"]
        yield [*job.held(module, optimizer), torch.tensor(value)]


def sharded_and_clipped(job: Job) -> Iterator[list[Tensor]]:
    """Gradients that are divided among the ranks are clipped by their norm."""
    module, model = job.model()
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=1e-6)
    for step in range(12):
        optimizer.zero_grad()
        model(job.inputs(step)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        yield job.held(module, optimizer)


def stepped_in_one_pass(job: Job) -> Iterator[list[Tensor]]:
    """Parameters of 16 bits with float32 copies, which one kernel updates on a device."""
    torch.manual_seed(0)
    module = Net(chain()).to(job.device, torch.bfloat16)
    model = job.wrap(Wrap({}, job.face), module)
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-6, master_dtype=torch.float32)
    for step in range(12):
        plain(model, optimizer, job.inputs(step, torch.bfloat16))
        yield []  # torch's operations, on the CPU, round elsewhere


def two_models_on_two_streams(job: Job) -> Iterator[list[Tensor]]:
    """Two models train beside each other, each on a stream of its own."""
    trained = []
    for _ in range(2):
        module, model = job.model()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        side = torch.cuda.Stream() if job.device == "cuda" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        trained.append((module, model, optimizer, side))
    for step in range(STEPS):
        for module, model, optimizer, side in trained:
            with torch.cuda.stream(side) if side is not None else nullcontext():
                plain(model, optimizer, job.inputs(step))
                yield job.held(module, optimizer)


def ending(job: Job) -> Iterator[list[Tensor]]:
    """The ranks end once they have been asked to stop."""
    module, model = job.model()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for step in range(12):
        plain(model, optimizer, job.inputs(step))
        yield job.held(module, optimizer)
        if model.stop_requested:
            break


LARGE = 8448  # outputs of a layer whose weight has more than 2 MB
PLANT_PROGRAMS: dict[str, Program] = {
    "layers on streams": on_streams(),
    "layers on streams, private": on_streams(gradient_as_bucket_view=False),
    "layers on streams, in place": on_streams(gradient_as_bucket_view=False, width=LARGE),
    "layers on streams, accumulated": on_streams(accumulate_in_buckets=True, windows=2),
    "layers change streams": on_streams(changes=True),
    "layers change streams, private": on_streams(changes=True, gradient_as_bucket_view=False),
    "changing addresses": changing_addresses(accumulate_in_buckets=True),
    "dropped models": dropping_models,
    "captured, then eager": captured_then_eager,
    "one table on two streams": one_table_on_two_streams,
    "metrics read": metrics_read,
    "sharded, clipped": sharded_and_clipped,
    "stepped in one pass": stepped_in_one_pass,
    "two models on two streams": two_models_on_two_streams,
    "ending": ending,
    "windows of changing length": windows_of_changing_length,
}


# --- What plants are made of ---


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def replacing(owner: Any, name: str, value: Any) -> Callable[[Setattr, int], None]:
    """Return a plant that puts `value` in the place of a function or method."""
    return lambda put, rank: put(owner, name, value)


def missing(owner: Any, name: str) -> Callable[[Setattr, int], None]:
    """Return a plant without the call of a function or method."""
    return replacing(owner, name, _do_nothing)


def on_another_stream(owner: Any, name: str) -> Callable[[Setattr, int], None]:
    """Return a plant that calls a method on a stream that waits for no other, and that no other waits for."""

    def plant(put: Setattr, rank: int) -> None:
        method, side = getattr(owner, name), torch.cuda.Stream()

        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            with torch.cuda.stream(side):
                return method(*args, **kwargs)

        put(owner, name, elsewhere)

    return plant


def sending(change: Callable[[Callable[[Any, Tensor], Any], Any, Tensor, int], Any]) -> Callable[[Setattr, int], None]:
    """Return a plant in what rank 1 sends: `change` gets the usual start, its arguments and the number of the call."""

    def plant(put: Setattr, rank: int) -> None:
        start, calls = AllReduce.start, iter(range(10**9))
        if rank == 1:
            put(AllReduce, "start", lambda exchange, flat: change(start, exchange, flat, next(calls)))

    return plant


class _Later(dist.Work):
    """A work that starts after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Any = None

    def wait(self, timeout: Any = NO_LIMIT) -> bool:
        return True if self.work is None else bool(self.work.wait(timeout))


def _swapped() -> Callable[[Setattr, int], None]:
    waiting: list[tuple[_Later, Tensor]] = []

    def change(start: Any, exchange: Any, flat: Tensor, call: int) -> Any:
        if call == 12:
            waiting.append((_Later(), flat))
            return waiting[0][0]
        work = start(exchange, flat)
        if waiting:
            later, held = waiting.pop()
            later.work = start(exchange, held)
        return work

    return sending(change)


def _skipped(start: Any, exchange: Any, flat: Tensor, call: int) -> Any:
    return _Later() if call == 12 else start(exchange, flat)


def _shorter(start: Any, exchange: Any, flat: Tensor, call: int) -> Any:
    return start(exchange, flat[:-8] if call == 12 else flat)


def _narrower(start: Any, exchange: Any, flat: Tensor, call: int) -> Any:
    return start(exchange, flat.bfloat16() if call == 12 else flat)


# --- The streams on which gradients are written ---


def first_backward_only(*, notes_sentinel: bool = False) -> Callable[[Setattr, int], None]:
    """Each bucket notes streams in its first backward alone, and waits for these in all backwards."""

    def plant(put: Setattr, rank: int) -> None:
        known: dict[WritingStreams, dict[int, None]] = {}
        noting, precede = WritingStreams.noting, WritingStreams.precede

        def noting_at_first(self: WritingStreams, marker: Any) -> Any:
            note = noting(self, marker)
            if notes_sentinel and getattr(marker, "__name__", "") == "mark_sentinel":
                return note
            return lambda param: (marker if self in known else note)(param)

        def precede_all(self: WritingStreams) -> bool:
            if known.get(self) or self._noted:
                self._noted |= known.setdefault(self, dict(self._noted))
            return precede(self)

        put(WritingStreams, "noting", noting_at_first)
        put(WritingStreams, "precede", precede_all)

    return plant


NO_WRITERS = replacing(WritingStreams, "precede", lambda self: bool(self._noted))
NOTHING_NOTED = replacing(WritingStreams, "noting", lambda self, marker: marker)


def _without_sources(put: Setattr, rank: int) -> None:
    send = GradBucket.send

    def forgetful(self: GradBucket, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        self._sources = []

    put(GradBucket, "send", forgetful)


# --- Collectives, and what follows them ---


def _go_on_without_waiting(work: StagedWork, stream: Any) -> None:
    with torch.cuda.stream(stream):
        while work._to_start:
            work._start_next()


def _go_on_after_the_wrong_stream(work: StagedWork, stream: Any) -> None:
    while work._to_start:
        work._work.wait(NO_LIMIT)  # type: ignore[union-attr]
        with torch.cuda.stream(stream):
            work._start_next()


def _last_bucket_not_waited_for(put: Setattr, rank: int) -> None:
    finish = bucket.finish
    put(bucket, "finish", lambda work, *args, last=False: None if last else finish(work, *args, last=last))


def _unpack_before_the_collective(self: SideStream, work: Any, unpack: Any, held: Any) -> bool:
    self._held += held
    with self._on():
        unpack()
    return True


def _holding_nothing(put: Setattr, rank: int) -> None:
    queue = SideStream.queue

    def forgetful(self: SideStream, work: Any, unpack: Any, held: Any) -> bool:
        queued = queue(self, work, unpack, held)
        self._held.clear()
        return queued

    put(SideStream, "queue", forgetful)


# --- What the host reads, and what it writes for the device ---


def _event_before_the_copy(put: Setattr, rank: int) -> None:
    def take(self: HostCopy, values: Tensor) -> None:
        if self.late:
            self._event = self._streams.current().record_event(self._event)
        self.arriving.copy_(values, non_blocking=True)

    put(HostCopy, "take", take)


def _event_before_the_kernel(put: Setattr, rank: int) -> None:
    hand_over = LateReading.hand_over

    def too_early(self: LateReading, guard: Any = None, pairs: Any = None) -> None:
        if self._uncopied is None or guard is None:
            hand_over(self, guard, pairs)
            return
        self._copy.written()  # type: ignore[union-attr]
        guard(pairs, self._uncopied)
        self._uncopied = None

    put(LateReading, "hand_over", too_early)


def _read_at_once(self: HostCopy) -> list[Any]:
    return list(self.arriving.tolist())


def _weights_read_at_once(put: Setattr, rank: int) -> None:
    hear = GradientWeight.hear
    put(HostCopy, "read", _read_at_once)
    put(GradientWeight, "hear", lambda self, wait=False: hear(self, wait=True))


def _one_pinned_buffer(put: Setattr, rank: int) -> None:
    pinned: dict[int, Tensor] = {}

    def tell(self: Report, values: list[object]) -> None:
        pairs = torch.tensor(self._format.pairs(values), dtype=self._source.dtype, device="cpu")
        kept = pinned.setdefault(id(self), torch.empty_like(pairs, pin_memory=True))
        kept.copy_(pairs)
        self._source[: pairs.numel()].copy_(kept, non_blocking=True)
        self._values = values

    put(Report, "_tell", tell)


# --- Tables of addresses ---


def _overwriting_tables(put: Setattr, rank: int) -> None:
    free = AddressRing._free_entry

    def free_now(self: AddressRing, current: Any) -> Any:
        for entry in self._entries:
            entry.passed = {}
        return free(self, current)

    put(AddressRing, "_free_entry", free_now)


def _forgetting_captures(put: Setattr, rank: int) -> None:
    free = AddressRing._free_entry

    def free_any(self: AddressRing, current: Any) -> Any:
        for entry in self._entries:
            entry.captured = False
        return free(self, current)

    put(AddressRing, "_free_entry", free_any)


def _repeating_on_any_stream(put: Setattr, rank: int) -> None:
    repeat = Dispatcher.repeat
    put(Dispatcher, "repeat", lambda self, call: repeat(self, call._replace(stream=call.bound.stream_of(self._index))))


def _repeating_on_the_old_stream(put: Setattr, rank: int) -> None:
    def repeat(self: Dispatcher, call: Any) -> bool:
        if torch._C._cuda_isCurrentStreamCapturing() or not call.copied.read_again(call.addresses):
            return False
        return bool(call.bound.launch_whole(call.programs, call.stream, call.arguments))

    put(Dispatcher, "repeat", repeat)


# --- Others ---


def _one_state_for_all(put: Setattr, rank: int) -> None:
    states: dict[Any, Tensor] = {}

    def state(table: BitHashTable) -> Tensor:
        if table.device not in states:
            states[table.device] = torch.zeros(2, dtype=torch.int32, device=table.device)
        return states[table.device]

    put(BitHashTable, "state", property(state))


def _copied_for_the_file(put: Setattr, rank: int) -> None:
    write = save_load.write_step

    def write_soon(place: Any, number: int, content: Any, keep: Any) -> Any:
        def moved(each: Any) -> Any:
            if not isinstance(each, Tensor) or not each.is_cuda:
                return each
            return torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)

        return write(place, number, tree_map(moved, content), keep)

    put(save_load, "write_step", write_soon)


def _one_step_less(put: Setattr, rank: int) -> None:
    kind = dpfuse.DataParallel
    if rank == 1:
        asked = iter(range(10**9))
        put(kind, "stop_requested", property(lambda self: next(asked) >= 6))


def _residual_made_elsewhere(put: Setattr, rank: int) -> None:
    before, side = _Residual.before, torch.cuda.Stream()

    def made_elsewhere(self: Any, arguments: Any) -> None:
        with torch.cuda.stream(side) if self._flat is None else nullcontext():
            before(self, arguments)

    put(_Residual, "before", made_elsewhere)


def _without_the_hooks_future(self: _HookWork, timeout: Any = None) -> bool:
    while not self._future.done():
        pass
    self.result = self._future.value()
    return True


PLANTS: dict[str, Plant] = {
    # The rules of tests/unit/test_stream_races.py and tests/unit/test_changing_streams.py.
    "writers, views": Plant("ours", "layers on streams", NO_WRITERS, "race: .*_flatten_kernel"),
    "writers, private": Plant("ours", "layers on streams, private", NO_WRITERS, "race: .*_flatten_kernel"),
    "writers, in place": Plant("ours", "layers on streams, in place", NO_WRITERS, "race: nccl allReduce"),
    "writers, accumulated": Plant("ours", "layers on streams, accumulated", NO_WRITERS, "race: .*_flatten_kernel"),
    "the bucket before the last": Plant(
        "ours",
        "layers on streams",
        replacing(Reducer, "_is_packed_early", lambda self, order: order < len(self.buckets) - 2),
        "race: .*_flatten_kernel",
    ),
    "what is accumulated": Plant(
        "ours",
        "layers on streams, accumulated",
        replacing(Reducer, "_is_packed_early", lambda self, order: False),
        "race: .*_flatten_kernel",
    ),
    "sources": Plant("ours", "layers on streams", _without_sources, "race: .*_flatten_kernel"),
    "side stream not joined": Plant(
        "drop-in", "bfloat16 wire", missing(SideStream, "join"), "race: .*_unflatten_kernel"
    ),
    "collective, views": Plant("ours", "views", missing(bucket, "finish"), "race: .*nccl allReduce"),
    "collective, private": Plant("ours", "private", missing(bucket, "finish"), "race: .*nccl allReduce"),
    "collective, in place": Plant(
        "ours", "private, large gradients", missing(bucket, "finish"), "race: .*nccl allReduce"
    ),
    "collective, bfloat16": Plant("ours", "bfloat16 wire", missing(bucket, "finish"), "race: .*nccl allReduce"),
    "sum of parts": Plant(
        "ours", "deterministic", replacing(StagedWork, "go_on_on", _go_on_without_waiting), "race: .*_sum_parts_kernel"
    ),
    "no stream, views": Plant("ours", "layers change streams", NOTHING_NOTED, "race: .*_flatten_kernel"),
    "no stream, private": Plant("ours", "layers change streams, private", NOTHING_NOTED, "race: .*_flatten_kernel"),
    "first streams, views": Plant("ours", "layers change streams", first_backward_only(), "race: .*_flatten_kernel"),
    "first streams, private": Plant(
        "ours", "layers change streams, private", first_backward_only(), "race: .*_flatten_kernel"
    ),
    "first streams and the sentinel's, views": Plant(
        "ours", "layers change streams", first_backward_only(notes_sentinel=True), "race: .*_flatten_kernel"
    ),
    "first streams and the sentinel's, private": Plant(
        "ours", "layers change streams, private", first_backward_only(notes_sentinel=True), "race: .*_flatten_kernel"
    ),
    # Collectives, and what follows them.
    "only the last bucket": Plant("drop-in", "face", _last_bucket_not_waited_for, "race: .*nccl allReduce"),
    "unpacked before the collective": Plant(
        "drop-in",
        "bfloat16 wire",
        replacing(SideStream, "queue", _unpack_before_the_collective),
        "race: _unflatten_kernel .* nccl allReduce",
    ),
    "nothing held": Plant("drop-in", "bfloat16 wire", _holding_nothing, "race: .*_unflatten_kernel"),
    "sum of quantized parts": Plant(
        "drop-in",
        "float8 wire",
        replacing(StagedWork, "go_on_on", _go_on_without_waiting),
        "race: .*_sum_quantized_kernel",
    ),
    "second stage after another stream": Plant(
        "drop-in",
        "deterministic",
        replacing(StagedWork, "go_on_on", _go_on_after_the_wrong_stream),
        "race: .*_sum_parts_kernel",
    ),
    "tree finished early": Plant(
        "ours", "fixed micro-batches", replacing(StagedWork, "go_on_on", _go_on_without_waiting), "race: aten::add_"
    ),
    "mean by hand": Plant("ours", "by hand", missing(bucket, "finish"), "race: .*nccl allReduce"),
    "buffers": Plant("ours", "buffers", missing(flat_broadcast, "finish"), "race: .*nccl broadcast"),
    "hook": Plant(
        "drop-in", "comm hook", replacing(_HookWork, "wait", _without_the_hooks_future), "race: .*comm_hook.py"
    ),
    "vote": Plant("ours", "by hand", missing(collective, "finish"), "race: .*votes.py"),
    "gathered parameters": Plant("ours", "sharded", missing(flat_params, "finish"), "race: .*nccl allGather"),
    "gathered parameters, captured masters": Plant(
        "ours", "sharded, masters", missing(flat_params, "finish"), "race: .*nccl allGather"
    ),
    "step before the gradients": Plant(
        "ours", "sharded, stepped in backward", missing(in_backward, "finish"), "race: .*nccl reduceScatter"
    ),
    "memory of a bucket in flight": Plant(
        "ours", "sharded, stepped in backward", missing(InBackward, "make_room"), "race: .*nccl reduceScatter"
    ),
    # What ranks send.
    "another order": Plant("ours", "views", _swapped(), "mismatch", breaks=True),
    "a bucket not sent": Plant("ours", "views", sending(_skipped), "mismatch|hang", breaks=True),
    "another size": Plant("ours", "views", sending(_shorter), "mismatch", breaks=True),
    "another dtype": Plant("ours", "views", sending(_narrower), "mismatch", breaks=True),
    "a rank that ends": Plant("ours", "ending", _one_step_less, "hang", breaks=True),
    # Kernels and operations on a wrong stream.
    "guard elsewhere, views": Plant("ours", "views", on_another_stream(Spoiler, "_spoil"), "race: .*_spoil_kernel"),
    "guard elsewhere, private": Plant("drop-in", "face", on_another_stream(Spoiler, "_spoil"), "race: .*_spoil_kernel"),
    "norm elsewhere": Plant("ours", "clip", on_another_stream(Gradients, "squares"), "race: _squared_norm_kernel"),
    "product elsewhere": Plant("ours", "clip", on_another_stream(Gradients, "multiply"), "race: .*_multiply_kernel"),
    "hash elsewhere": Plant("ours", "views", on_another_stream(Hashing, "write"), "race: .*_bit_hash_kernel"),
    "unpacked elsewhere": Plant("ours", "private", on_another_stream(Private, "copy_now"), "race: .*_unflatten_kernel"),
    "residual elsewhere": Plant(
        "ours",
        "error feedback",
        _residual_made_elsewhere,
        "race: _flatten_kernel .* (aten::zeros|aten::zero_|aten::fill_|a memset) on",
    ),
    "residual of eight bits": Plant(
        "ours",
        "error feedback, float8",
        replacing(StagedWork, "go_on_on", _go_on_without_waiting),
        "race: .*_sum_quantized_kernel",
    ),
    "repeated on the old stream": Plant(
        "ours", "layers change streams", _repeating_on_the_old_stream, "race: .*_flatten_kernel"
    ),
    # What the host reads, and what it writes.
    "event before the copy": Plant("ours", "check_finite raises", _event_before_the_copy, "race: .* on the host"),
    "event before the kernel": Plant("ours", "views", _event_before_the_kernel, "race: a look at the report"),
    "report read early": Plant("drop-in", "face", missing(HostCopy, "wait"), "race: a look at the report"),
    "counts read early": Plant(
        "ours", "check_finite raises", replacing(HostCopy, "read", _read_at_once), "race: Tensor.tolist"
    ),
    "weights read early": Plant("ours", "weight", _weights_read_at_once, "race: Tensor.tolist"),
    "one pinned buffer": Plant(
        "ours", "windows of changing length", _one_pinned_buffer, "race: aten::copy_ on the host"
    ),
    # Tables of addresses.
    "upload overwritten": Plant(
        "ours", "changing addresses", missing(CudaStreams, "synchronize"), "race: aten::copy_ on the host"
    ),
    "table overwritten": Plant("ours", "one table on two streams", _overwriting_tables, "race: a copy .*address_ring"),
    "table before its upload": Plant(
        "ours", "one table on two streams", missing(CudaStreams, "wait"), "race: _squared_norm_kernel .*address_ring"
    ),
    "words of the ranks read early": Plant(
        "drop-in", "face", replacing(HostCopy, "read", _read_at_once), "race: Tensor.tolist .*compared_words"
    ),
    "report told elsewhere": Plant(
        "ours", "windows of changing length", on_another_stream(Report, "_tell"), "race: .*a copy HtoD"
    ),
    "sharded gradients spoilt elsewhere": Plant(
        "ours",
        "sharded, stepped in backward",
        on_another_stream(ShardingInBackward, "spoil"),
        "race: aten::.*aten::add_",
    ),
    "step in one pass elsewhere": Plant(
        "ours", "stepped in one pass", on_another_stream(elementwise_shard, "step_in_one_pass"), "race: .*_adamw_kernel"
    ),
    "norm over the ranks": Plant(
        "ours", "sharded, clipped", missing(sharded_norm, "finish"), "race: .*nccl allReduce", breaks=True
    ),
    "one state of hashes": Plant("ours", "two models on two streams", _one_state_for_all, "race: .*_bit_hash_kernel"),
    "one piece of memory": Plant(
        "ours", "sharded, stepped in backward", replacing(sharding, "DEPTH", 1), "race: .*_flatten_kernel"
    ),
    "counts copied in a capture": Plant(
        "ours", "check_finite, captured", replacing(finite, "capturing", lambda: False), "race|error: ."
    ),
    "metrics": Plant("ours", "metrics read", missing(torch.cuda.Event, "synchronize"), "error: .*must be completed"),
    "tuning": Plant(
        "ours", "tuning", missing(torch.cuda.Event, "synchronize"), "error: .*must be completed", breaks=True
    ),
    "checkpoint copied early": Plant("ours", "checkpointing", _copied_for_the_file, "race: .* on the host"),
    "table of a graph": Plant("ours", "captured, then eager", _forgetting_captures, "changed: a table"),
}
