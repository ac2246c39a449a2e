"""A process group that simulates a network: collectives share one link, and take a given time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from queue import SimpleQueue
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

__all__ = ["Cost", "Network", "simulated_network"]

BACKEND = "simulated"
CALIBRATION = 10_000_000  # cycles, about 5 ms
WARM_UP = 20
HALF = 0.5  # of the bytes of an all-reduce, which is an all-to-all and an all-gather

Cost = Callable[[int], float]  # seconds for which a number of bytes occupies the link


class Network(dist.ProcessGroup):
    """A group of one rank with collectives that take as long as those of many ranks.

    The results are those of one rank: tensors do not change. All collectives use one link, one after another. Each
    occupies the link for the `cost` of its bytes, and its work is done after that time.

    On a CPU a thread sleeps until a collective has landed, which uses no core. On CUDA a kernel spins on a separate
    stream, after the work that is queued on the current stream, as NCCL's kernel would.

    Args:
        cost: seconds by bytes. With None there is no link, and collectives are done at once. You may assign another
            cost at any time, for later collectives.
        device: device of the tensors, `"cpu"` or `"cuda"`.

    Attributes:
        sent: bytes so far, counted as all-reduces. An all-to-all or an all-gather into one tensor counts half.

    Raises:
        ValueError: From a collective: `cost` returned no valid time.
        RuntimeError: From a collective: the network was shut down.

    Example:
        >>> from time import perf_counter
        >>> import torch
        >>> import torch.distributed as dist
        >>> from bench.network import simulated_network
        >>> with simulated_network(lambda nbytes: 0.01) as network:
        ...     begin = perf_counter()
        ...     dist.all_reduce(torch.ones(3))
        ...     seconds = perf_counter() - begin
        >>> seconds >= 0.01
        True
    """

    def __init__(self, cost: Cost | None = None, device: str = "cpu") -> None:
        super().__init__(0, 1)
        self.cost = cost
        self.sent = 0.0
        self._device = torch.device(device)
        self._link: _Sleeper | _Spinner = _Spinner() if self._device.type == "cuda" else _Sleeper()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name for torch's logs."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which a device mesh finds this group."""
        return dist.distributed_c10d._world.pg_names[self]

    def calibrate(self) -> None:
        """Measure again how many cycles a second has, because the clock of a GPU depends on its load."""
        self._link.calibrate()

    def shutdown(self) -> None:
        """Wait until all collectives have landed, and end. `destroy_process_group` calls it."""
        self._link.close()

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:
        """Send these tensors."""
        return self._send(tensors)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """Send these tensors."""
        return self._send(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Send these inputs, and copy them to the outputs."""
        for (output,), ours in zip(outputs, inputs, strict=True):
            output.copy_(ours)
        return self._send([output for (output,) in outputs])

    def alltoall_base(
        self, output: Tensor, ours: Tensor, _output_sizes: list[int], _sizes: list[int], opts: Any
    ) -> dist.Work:
        """Send this tensor, and copy it to the output."""
        return self._send([_filled(output, ours)], HALF)

    def _allgather_base(self, output: Tensor, ours: Tensor, opts: Any) -> dist.Work:
        """Send this tensor, and copy it to the output."""
        return self._send([_filled(output, ours)], HALF)

    def barrier(self, opts: dist.BarrierOptions) -> dist.Work:
        """Send an empty message, which also takes its time."""
        return self._send([torch.empty(0, device=self._device)])

    def _send(self, tensors: Sequence[Tensor], part: float = 1) -> dist.Work:
        if any(tensor.device.type != self._device.type for tensor in tensors):
            raise RuntimeError(f"this network carries tensors on {self._device.type}")  # so dpfuse finds out which
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.sent += part * nbytes
        seconds = None if self.cost is None else self.cost(int(part * nbytes))
        if seconds is not None and not 0 <= seconds < inf:
            raise ValueError(f"cost must give finite seconds >= 0, got {seconds!r} for {nbytes} bytes")
        future = self._link.carry(list(tensors), seconds)
        work: dist.Work = _create_work_from_future(future)
        return work


def _filled(output: Tensor, ours: Tensor) -> Tensor:
    """Copy `ours` to the output, unless this is the same memory, and return the output."""
    return output if output.data_ptr() == ours.data_ptr() else output.copy_(ours)


class _Sleeper:
    """The link of a CPU."""

    def __init__(self) -> None:
        self._free = 0.0  # time at which all collectives will have landed
        self._sent: SimpleQueue[tuple[float, list[Tensor], Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="simulated network", daemon=True)
        self._thread.start()

    def carry(self, tensors: list[Tensor], seconds: float | None) -> Future[Any]:
        """Return a future that is done when `tensors` have landed."""
        if not self._thread.is_alive():
            raise RuntimeError("this network was shut down; expected no collective after destroy_process_group()")
        future: Future[Any] = Future()
        if seconds is None:
            future.set_result(tensors)
            return future
        # The time at which it lands is set here. So a late wake-up of the thread delays only this collective.
        self._free = max(self._free, perf_counter()) + seconds
        self._sent.put((self._free, tensors, future))
        return future

    def calibrate(self) -> None:
        """Do nothing: sleeping needs no calibration."""

    def close(self) -> None:
        """Return when all collectives have landed."""
        self._sent.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (message := self._sent.get()) is not None:
            land, tensors, future = message
            sleep(max(0.0, land - perf_counter()))
            future.set_result(tensors)


class _Spinner:
    """The link of a GPU."""

    def __init__(self) -> None:
        # High priority: otherwise large kernels of backward would delay each message.
        self._stream = torch.cuda.Stream(priority=-1)
        self._cycles_per_second = 0.0
        self.calibrate()

    def carry(self, tensors: list[Tensor], seconds: float | None) -> Future[Any]:
        """Return a future. A stream that waits for it waits until `tensors` have landed."""
        future: Future[Any] = Future(devices=[self._stream.device])
        if seconds is None:
            future.set_result(tensors)  # on the current stream
            return future
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(round(seconds * self._cycles_per_second))
            future.set_result(tensors)  # records an event on this stream
        return future

    def calibrate(self) -> None:
        """Count the cycles per second at the present speed of the GPU's clock."""
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                torch.cuda._sleep(CALIBRATION)  # the clock of an idle GPU rises slowly
            self._cycles_per_second = CALIBRATION / median(_spin_seconds() for _ in range(3))

    def close(self) -> None:
        """Return when all collectives have landed."""
        self._stream.synchronize()


def _spin_seconds() -> float:
    """Return the seconds of `CALIBRATION` cycles: the difference of two spins, without the time of a launch."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    torch.cuda._sleep(CALIBRATION)
    events[1].record()
    torch.cuda._sleep(2 * CALIBRATION)
    events[2].record()
    events[2].synchronize()
    return float(events[1].elapsed_time(events[2]) - events[0].elapsed_time(events[1])) / 1e3


@contextmanager
def simulated_network(cost: Cost | None = None, device: str = "cpu") -> Iterator[Network]:
    """Make a `Network` the default process group of this process for the block.

    Args:
        cost: seconds by bytes; None means no link.
        device: device of the tensors, `"cpu"` or `"cuda"`.

    Raises:
        ValueError: There is already a default process group.
    """
    network = Network(cost, device)
    try:
        dist.Backend.register_backend(BACKEND, lambda *_: network, extended_api=True, devices=[device])
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield network
        finally:
            dist.destroy_process_group()
    finally:
        network.shutdown()
