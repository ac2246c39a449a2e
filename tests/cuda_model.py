"""A model of CUDA's memory and streams, for machines without a GPU: it fails where two streams could race.

Operations run at once, on CPU tensors. Beside that, the model notes on which stream each operation would run, which
memory it reads and writes, and which streams have waited for which (vector clocks). A read must come behind the last
write, and a write behind all reads and writes before it, in every order that a GPU could choose. Freed memory goes back
to the stream that has allocated it, as in torch's caching allocator. That stream may use it again at once, so its next
new tensor takes over what is still under way there.

What it proves: in the schedules that a test runs, no operation of torch races with another one. What it does not prove:
kernels count as operations of torch, NCCL is a stream that reads and writes its tensors, a memory pool never returns
memory to the device, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpfuse.engine.streams import HostCopy

__all__ = ["Cuda", "RaceError", "StreamGroup"]

END = 1 << 62  # behind the last byte of any memory
METADATA_ONLY = ("aten.set_.", "aten.resize_.", "aten.detach_.", "aten.requires_grad_.")


class RaceError(AssertionError):
    """Two accesses to the same memory, of which nothing says which one comes first."""


class Line:
    """Operations in order: those of a stream, or of the host. Its clock tells what comes before its next operation."""

    def __init__(self, name: str, host: Line | None) -> None:
        self.name = name
        self.clock: dict[Line, int] = {self: 0}
        self._host = host

    def wait_stream(self, other: Line) -> None:
        """Let later operations wait for all that were submitted to `other`."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event behind all operations that were submitted. A given one is another one from now on."""
        return Event(dict(self.clock), self._host or self)

    def wait_event(self, event: Event) -> None:
        """Let later operations wait for an event."""
        for line, time in event.clock.items():
            self.clock[line] = max(self.clock.get(line, 0), time)


@dataclass
class Event:
    """What had been submitted when it was recorded."""

    clock: dict[Line, int]
    host: Line

    def synchronize(self) -> None:
        """Let the host wait."""
        self.host.wait_event(self)

    def query(self) -> bool:
        """Whether it has passed: nobody knows."""
        return False


@dataclass(frozen=True)
class Access:
    """An operation that has read or written the bytes from `first` to before `end` of a block of memory."""

    line: Line
    time: int
    writes: bool
    first: int
    end: int
    what: str

    def is_before(self, line: Line) -> bool:
        """Whether later operations of `line` come behind it in every order."""
        return self.line is line or line.clock.get(self.line, 0) >= self.time


@dataclass
class Block:
    """The memory of one storage."""

    owner: Line | None  # the stream that has allocated it; None for memory of the host
    alive: StorageWeakRef
    accesses: list[Access] = field(default_factory=list)
    recorded: set[Line] = field(default_factory=set)  # the allocator waits for these before it uses the memory again


class Cuda:
    """One device. In `with cuda:`, it watches every operation of torch on this thread.

    Attributes:
        main: the stream that is current outside of `stream`.
        current: the stream to which operations are submitted.
        compared: number of pairs of accesses that were compared, so that a test can tell that it has checked something.
    """

    def __init__(self) -> None:
        self.host = Line("host", None)
        self.main = self.current = self.Stream("main")
        self.compared = 0
        self._blocks: dict[int, Block] = {}
        self._freed: dict[Line, list[Access]] = {}
        self._modes = (_Operations(self), _Readings(self))

    def __enter__(self) -> Cuda:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    # --- What `torch.cuda` is asked for, under the same names ---

    def install(self, monkeypatch: Any) -> None:
        """Let torch ask this device."""
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(self.current), raising=False)
        monkeypatch.setattr("torch.get_device_module", lambda device=None: self)
        for name in ("Stream", "current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        wait = HostCopy.wait

        def wait_and_read(copy: HostCopy) -> None:
            wait(copy)
            self.read_by_host(copy.arriving)  # which needs no operation of torch

        monkeypatch.setattr(HostCopy, "wait", wait_and_read)
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)  # nothing is captured here

    def Stream(self, name: object = None) -> Line:  # noqa: N802  # torch's name
        """Return a new stream; torch passes a device instead of a name."""
        return Line(name if isinstance(name, str) else "side", self.host)

    def current_stream(self, device: object = None) -> Line:
        """Return the stream to which operations are submitted."""
        return self.current

    @contextmanager
    def stream(self, stream: Line) -> Iterator[None]:
        """Submit operations to this stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record_stream(self, tensor: Tensor, stream: Line) -> None:
        """As `tensor.record_stream(stream)`: its memory is not used again before `stream` is done with it."""
        self._block(tensor).recorded.add(stream)

    # --- What operations do ---

    def submit(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note an operation on the current stream. `made` are its new tensors.

        Raises:
            RaceError: it comes neither before nor after another one that uses the same memory.
        """
        self._find_freed()
        self.current.wait_stream(self.host)  # what is submitted runs behind what the host has done or waited for
        self.current.clock[self.current] += 1
        for tensor in made:
            self._allocate(tensor)
        for tensor in reads:
            self._access(self.current, tensor, what, writes=False)
        for tensor in writes:
            self._access(self.current, tensor, what, writes=True)

    def read_by_host(self, tensor: Tensor) -> None:
        """The host reads pinned memory as it is, and memory of the device behind the current stream."""
        self._find_freed()
        if self._block(tensor).owner is not None:
            self.host.wait_stream(self.current)
        self.host.clock[self.host] += 1
        self._access(self.host, tensor, "a read by the host", writes=False)

    def pin(self, tensor: Tensor) -> None:
        """`tensor` is new memory of the host."""
        self._block(tensor).owner = None

    def _allocate(self, tensor: Tensor) -> None:
        stream, block = self.current, self._block(tensor)
        under_way = [access for access in self._freed.get(stream, []) if not access.is_before(stream)]
        self._freed[stream] = under_way
        block.owner = stream
        block.accesses += under_way

    def _block(self, tensor: Tensor) -> Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:  # it was there before `with cuda:`, or `torch.tensor` has made it on the host
            block = self._blocks[storage._cdata] = Block(None, StorageWeakRef(storage))
        return block

    def _access(self, line: Line, tensor: Tensor, what: str, *, writes: bool) -> None:
        if not tensor.numel():
            return
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        first, end = (element * tensor.element_size() for element in (0, last + 1))
        start = tensor.storage_offset() * tensor.element_size()
        access = Access(line, line.clock[line], writes, start + first, start + end, what)
        block = self._block(tensor)
        kept = []
        for other in block.accesses:
            apart = other.end <= access.first or access.end <= other.first
            if not apart and (writes or other.writes):
                self.compared += 1
                if not other.is_before(line):
                    raise RaceError(
                        f"{what} on stream {line.name} {'writes' if writes else 'reads'} memory that {other.what} on "
                        f"stream {other.line.name} {'writes' if other.writes else 'reads'}, and does not wait for it"
                    )
            covered = access.first <= other.first and other.end <= access.end
            if not covered or not (writes or (other.line is line and not other.writes)):
                kept.append(other)
        block.accesses = [*kept, access]

    def _find_freed(self) -> None:
        for key, block in list(self._blocks.items()):
            if block.alive.expired():
                del self._blocks[key]
                if block.owner is not None:
                    self._freed.setdefault(block.owner, []).extend(
                        Access(each.line, each.time, True, 0, END, f"{each.what} (freed)")
                        for each in block.accesses
                        if each.line not in block.recorded
                    )


class _Operations(TorchDispatchMode):
    """Tells a device of every operation of torch."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        name = str(func)
        if name.startswith(METADATA_ONLY):
            return result
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        reads, writes, storages = [], [], set()
        for argument, value in given:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            storages |= {tensor.untyped_storage()._cdata for tensor in tensors}
            if argument.alias_info is None:
                reads += tensors
            elif argument.alias_info.is_write:
                writes += tensors
        made = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in storages
        ]
        if pinned:
            for tensor in made:
                self._cuda.pin(tensor)
            return result
        self._cuda.submit(name, reads, [*writes, *([] if "empty" in name else made)], made)
        if name.startswith(("aten._local_scalar_dense", "aten.equal")):
            for tensor in reads:
                self._cuda.read_by_host(tensor)
        return result


class _Readings(TorchFunctionMode):
    """Tells a device of what the host reads without an operation."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            self._cuda.read_by_host(args[0])
        return func(*args, **(kwargs or {}))


class _StreamWork(dist._Work):
    """A collective on the stream of its group. It keeps its tensors until somebody has waited for it."""

    def __init__(self, cuda: Cuda, event: Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._cuda, self._event, self._tensors = cuda, event, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._cuda.current.wait_event(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return False


class StreamGroup(dist.ProcessGroup):
    """Two ranks that hold the same numbers, of which this process is the first; its collectives run on a stream."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__(0, 2)
        self._cuda, self._stream = cuda, cuda.Stream("collectives")
        self._sent: Tensor | None = None  # what the last all-to-all has sent

    def getBackendName(self) -> str:  # noqa: N802  # torch's names
        return "streams"

    def getSize(self) -> int:  # noqa: N802
        return 2

    def _run(self, tensors: list[Tensor], operation: Callable[[], object]) -> dist.Work:
        self._stream.wait_stream(self._cuda.current)
        with self._cuda.stream(self._stream):
            operation()
        return _StreamWork(self._cuda, self._stream.record_event(), tensors)

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        factor = 1 if options.reduceOp == dist.ReduceOp.MAX else 2
        return self._run(tensors, lambda: [tensor.mul_(factor) for tensor in tensors])

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        return self._run(tensors, lambda: [tensor.mul_(1) for tensor in tensors])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> dist.Work:
        return self._run([*outputs[0], *inputs], lambda: [output.copy_(inputs[0]) for output in outputs[0]])

    def alltoall_base(self, output: Tensor, values: Tensor, *_: object) -> dist.Work:
        def exchange() -> None:
            self._sent = values.clone()
            output.view(2, -1).copy_(values.view(2, -1)[0])

        return self._run([output, values], exchange)

    def _allgather_base(self, output: Tensor, values: Tensor, options: Any) -> dist.Work:
        def gather() -> None:
            parts = output.view(2, -1)
            parts[0].copy_(values)
            assert self._sent is not None
            torch.mul(self._sent.view(2, -1)[1], 2, out=parts[1])  # what the other rank has added up

        return self._run([output, values], gather)
