"""A process group that is a network without a cluster: collectives share one link, and take the time they are told."""

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
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

__all__ = ["Cost", "Network", "simulated_network"]

BACKEND = "simulated"
CALIBRATION = 10_000_000  # cycles, some 5 ms
WARM_UP = 20
HALF = 0.5  # of what an all-reduce of as many bytes sends: it is an exchange of all parts, and their gathering

Cost = Callable[[int], float]  # seconds for which so many bytes occupy the link


class Network(dist.ProcessGroup):
    """A group of one rank whose collectives take as long as those of many.

    The results are those of one rank: tensors stay as they are. But they have to travel over one link, first come,
    first served, each collective for `cost` of its bytes, and until then their work is not done.

    On a CPU a thread sleeps until a collective has landed, which takes no core. On CUDA a kernel spins on a stream of
    its own, behind what was queued on the current one, as NCCL's would.

    Args:
        cost: seconds by bytes; None: there is no link, and everything is done at once. It may be assigned at any
            time, for the collectives to come.
        device: `"cpu"` or `"cuda"`, where the tensors are.

    Attributes:
        sent: bytes so far, as all-reduces have them; an all-to-all or an all-gather into one tensor sends half as many.

    Raises:
        ValueError: from a collective, that `cost` gave a time that is none.
        RuntimeError: from a collective, that the network was shut down.

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
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.cost = cost
        self.sent = 0.0
        self._device = torch.device(device)
        self._link: _Sleeper | _Spinner = _Spinner() if self._device.type == "cuda" else _Sleeper()

    @property
    def _device_types(self) -> list[torch.device]:
        # Torch and dpfuse look here for where tensors may be; a group without a backend in C++ has no such list.
        return [self._device]

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """For torch's logs."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        # Dpfuse asks it, with large private gradients on CUDA, whether it is NCCL's; there is none in C++ to return.
        return self

    def calibrate(self) -> None:
        """Look again how long a second is on this device; the clock of a GPU follows its load."""
        self._link.calibrate()

    def shutdown(self) -> None:
        """Let what was sent land, and end; `destroy_process_group` calls it."""
        self._link.close()

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]
        """Send these tensors."""
        return self._send(tensors)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work:  # type: ignore[override]
        """Send these tensors."""
        return self._send(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Send these inputs, and copy them to the outputs."""
        for (output,), ours in zip(outputs, inputs, strict=True):
            output.copy_(ours)
        return self._send([output for (output,) in outputs])

    def alltoall_base(  # type: ignore[override]
        self, output: Tensor, ours: Tensor, _output_sizes: list[int], _sizes: list[int], opts: Any
    ) -> dist.Work:
        """Send this tensor, and copy it to the output."""
        return self._send([output.copy_(ours)], HALF)

    def _allgather_base(self, output: Tensor, ours: Tensor, opts: Any) -> dist.Work:  # type: ignore[override]
        """Send this tensor, and copy it to the output."""
        return self._send([output.copy_(ours)], HALF)

    def barrier(self, opts: dist.BarrierOptions) -> dist.Work:  # type: ignore[override]
        """Send nothing, which takes its time, too."""
        return self._send([torch.empty(0, device=self._device)])

    def _send(self, tensors: Sequence[Tensor], part: float = 1) -> dist.Work:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.sent += part * nbytes
        seconds = None if self.cost is None else self.cost(int(part * nbytes))
        if seconds is not None and not 0 <= seconds < inf:
            raise ValueError(f"cost must give finite seconds >= 0, got {seconds!r} for {nbytes} bytes")
        future = self._link.carry(list(tensors), seconds)
        work: dist.Work = _create_work_from_future(future)
        return work


class _Sleeper:
    """The link of a CPU."""

    def __init__(self) -> None:
        self._free = 0.0  # when all that was sent will have landed
        self._sent: SimpleQueue[tuple[float, list[Tensor], Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="simulated network", daemon=True)
        self._thread.start()

    def carry(self, tensors: list[Tensor], seconds: float | None) -> Future[Any]:
        """A future that is done once `tensors` have landed."""
        if not self._thread.is_alive():
            raise RuntimeError("this network was shut down; expected no collective behind destroy_process_group()")
        future: Future[Any] = Future()
        if seconds is None:
            future.set_result(tensors)
            return future
        # Landing is planned here: that the thread wakes up late delays this one, and none behind it.
        self._free = max(self._free, perf_counter()) + seconds
        self._sent.put((self._free, tensors, future))
        return future

    def calibrate(self) -> None:
        """A second of sleep is one."""

    def close(self) -> None:
        """Return once everything has landed."""
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
        # First in line for the next free place on the device, or large kernels of backward would delay each message.
        self._stream = torch.cuda.Stream(priority=-1)
        self._cycles_per_second = 0.0
        self.calibrate()

    def carry(self, tensors: list[Tensor], seconds: float | None) -> Future[Any]:
        """A future that lets a stream that waits for it wait until `tensors` have landed."""
        future: Future[Any] = Future(devices=[self._stream.device])
        if seconds is None:
            future.set_result(tensors)  # on the current stream
            return future
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(round(seconds * self._cycles_per_second))
            future.set_result(tensors)  # notes the place on this stream
        return future

    def calibrate(self) -> None:
        """Count the cycles in a second of this GPU's clock, as it runs now."""
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                torch.cuda._sleep(CALIBRATION)  # an idle GPU's clock takes a while to rise
            self._cycles_per_second = CALIBRATION / median(_spin_seconds() for _ in range(3))

    def close(self) -> None:
        """Return once everything has landed."""
        self._stream.synchronize()


def _spin_seconds() -> float:
    """Seconds of `CALIBRATION` cycles: the difference of two spins, so that what a launch takes does not count."""
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
    """The default process group of this process is a `Network`, until the end of the context.

    Args:
        cost: seconds by bytes; None: there is no link.
        device: `"cpu"` or `"cuda"`, where the tensors are.

    Raises:
        ValueError: there is a default process group already.
    """
    network = Network(cost, device)
    try:
        dist.Backend.register_backend(BACKEND, lambda *_: network, extended_api=True, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            yield network
        finally:
            dist.destroy_process_group()
    finally:
        network.shutdown()
