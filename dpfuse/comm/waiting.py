"""Waiting for the other ranks: the board of a group, what this rank writes on it, and the bounded wait. No network.

The thread that trains writes on the board where it is. The heartbeat of the group (`dpfuse.liveness`) reads it, and
writes on it that another rank has failed. `finish` then ends a wait that can no longer succeed.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from math import inf
from threading import get_ident
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from dpfuse.comm.failed import has_raised
from dpfuse.comm.step_clock import StepClock
from dpfuse.errors import DPFuseError

__all__ = [
    "BACKWARD",
    "BETWEEN",
    "FORWARD",
    "LOSS",
    "NO_LIMIT",
    "Board",
    "Doing",
    "GroupHeartbeat",
    "PeerFailure",
    "Track",
    "Wrapper",
    "board_of",
    "describe_place",
    "finish",
    "forget_unfinished_works",
    "has_unfinished_works",
    "interruptible_devices",
    "leave",
    "put_board",
    "telling",
    "wait_for_first_rank",
]

SLICE = timedelta(seconds=0.5)  # a wait lasts this long before the board is read again
POLL = 0.02  # seconds between two looks at the board
RELAXED = 2  # cudaStreamCaptureModeRelaxed
NO_LIMIT = timedelta(0)  # as torch says it; a work written in Python may want the argument


class Doing(IntEnum):
    """What a rank does with a wrapped module."""

    BETWEEN = 0  # nothing: it computes a loss, steps, loads data, evaluates, saves
    FORWARD = 1  # runs a forward with gradients
    LOSS = 2  # has run such a forward, and no backward since
    BACKWARD = 3  # runs a backward, or waits at its end
    STEP = 4  # updates its part of the parameters, and gathers those of all ranks
    READ = 5  # reads gradients or states of which each rank has a part
    SAVE = 6  # saves a checkpoint
    LOAD = 7  # loads one


# For the hot path: before Python 3.12 looking up a member is slow.
BETWEEN, FORWARD, LOSS, BACKWARD, STEP, READ, *_ = Doing


class Wrapper(NamedTuple):
    """One wrapper of a group."""

    number: int  # in the order in which they were made
    stall_timeout: float  # seconds


class PeerFailure(NamedTuple):
    """Why the collectives of a group cannot end."""

    text: str
    ranks: tuple[int, ...]  # of the group; those that have failed
    waits: int | None = None  # on the board while the wait that cannot end was looked at; None: of any wait


class GroupHeartbeat(Protocol):
    """What the thread that trains asks of the heartbeat of a group."""

    def explain(self) -> PeerFailure | None:
        """Return why a collective has just failed; may wait for the news for a moment."""

    def leave(self, error: BaseException) -> None:
        """Tell the peers that this rank takes part in no further collective of the group."""


class Board:
    """What the thread that trains and the heartbeat of its group tell each other, without a lock.

    Attributes are assigned directly. An assignment takes some ten nanoseconds, and every step makes several.

    `stall_timeout` is that of the first wrapper, in seconds, while that wrapper is being made.
    """

    def __init__(self, rank: int = 0, interruptible: frozenset[str] = frozenset(), stall_timeout: float = inf) -> None:
        self.rank = rank
        self.interruptible = interruptible  # types of devices on which waiting for a work can be interrupted
        self.one_machine = False  # whether all ranks of a group of several are on this machine
        # Written by the thread that trains.
        # Wrapper, what it does, synchronised backwards completed, the bucket last sent or waited for (-1: none). Each
        # move writes a new tuple, so the same object means that this rank has not moved.
        self.place: tuple[Wrapper, Doing, int, int] = (Wrapper(0, stall_timeout), Doing.BETWEEN, 0, -1)
        self.waits = 0  # waits begun plus waits ended: odd while this rank waits for its peers
        self.waited = 0.0  # seconds, in all of these
        self.clock: StepClock | None = None  # where the time of its steps goes, if a wrapper measures that
        self.thread = get_ident()
        self.device_done: Callable[[], bool] | None = None  # whether the device has run the last collective
        self.error = ""  # the error that last ended a forward
        self.failed_step = 0  # the synchronised backward, from 1, before which it did
        self.gave_up = False  # whether a wait has ended because another rank failed
        self.progress: _DeviceProgress | None = None  # of the CUDA device of the last one
        self.sections = 0  # that only the first rank runs, and that this rank has entered
        self.in_section = False  # whether it is in one
        # Written by the thread that trains on the first rank, and by the heartbeat on all others.
        self.finished = 0  # of these sections: how many the first rank has finished
        # Written by the heartbeat.
        self.peer_failure: PeerFailure | None = None
        self.heartbeat: GroupHeartbeat | None = None  # while its thread runs
        self.late: dict[str, float] = {}  # numbers of the ranks that are late in each step; on the first rank


class Track:
    """Writes what one wrapper does on the board of its group. Without a heartbeat no rank reads that board.

    A step assigns `track.board.place` itself: a call takes longer than that.

    Attributes:
        board: of the group.
        wrapper: which writes.
    """

    def __init__(self, board: Board | None = None, number: int = 0, stall_timeout: float = inf) -> None:
        self.board = board or Board()
        self.wrapper = Wrapper(number, stall_timeout)

    def tell(self, doing: Doing, completed: int) -> None:
        """Write what the wrapper does now, after `completed` synchronised backwards."""
        self.board.place = (self.wrapper, doing, completed, -1)

    def failed(self, error: Exception, completed: int) -> None:
        """Write that a forward raised `error`, after `completed` synchronised backwards.

        The process may end without telling its peers why, or may have fewer batches than they have.
        """
        self.board.error = f"{type(error).__name__}: {error}"
        self.board.failed_step = completed + 1


_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def board_of(group: Any) -> Board | None:
    """Return the board of a process group; None if the group has no heartbeat."""
    return _boards.get(group)


def put_board(group: Any, board: Board) -> None:
    """Make `board` the board of the group."""
    _boards[group] = board


@contextmanager
def telling(group: Any, doing: Doing) -> Iterator[None]:
    """Write on the board of the group, if it has a heartbeat, what this rank does in this context between two steps."""
    board = board_of(group)
    if board is None:
        yield
        return
    wrapper, before, completed, bucket = board.place
    board.place = (wrapper, doing, completed, -1)
    try:
        yield
    finally:
        board.place = (wrapper, before, completed, bucket)


def leave(group_board: Board | None, error: BaseException) -> None:
    """Tell the peers that this rank takes part in no further collective of the group, and why.

    A peer that waits in a collective of the group then raises a DPFuseError that names this rank and `error`. This
    process goes on. Without a heartbeat nothing happens.
    """
    heartbeat = None if group_board is None else group_board.heartbeat
    if heartbeat is not None:
        heartbeat.leave(error)


def finish(work: dist.Work, board: Board | None, device: str = "cpu", *, last: bool = False) -> None:
    """Wait for a work as `work.wait()` does, but no longer than it can still succeed.

    Args:
        device: of its tensors, such as "cpu" or "cuda:1".
        last: whether no other collective follows for a while; the heartbeat then asks the device about this one.

    Raises:
        DPFuseError: a rank has ended, has left the group, or was silent for too long; the text names it.
        RuntimeError: the collective failed, and no rank is known to be the cause.
    """
    if board is None:
        work.wait(NO_LIMIT)
        return
    board.waits += 1
    began = perf_counter()
    try:
        kind = device.partition(":")[0]
        if kind not in board.interruptible:
            work.wait(NO_LIMIT)
            if last and (kind != "cpu" or not work.is_completed()):  # on a CPU most back ends wait until it has ended
                board.device_done = _completion(work, device, board)
            return
        while True:
            try:
                work.wait(SLICE)
                return  # nearly always the first time
            except RuntimeError as error:  # it has failed, or is not done
                if has_raised(error):
                    raise  # the next stage of the work could not start
            if work.is_completed():
                work.wait(NO_LIMIT)  # raises the error with which the work failed
                return
            failure = board.peer_failure  # read once: the heartbeat may take it back
            if failure is not None and failure.waits in (None, board.waits):
                _unfinished.append(work)
                raise _error_of(failure, board)
    except RuntimeError as error:
        if isinstance(error, DPFuseError) and error.ranks:
            raise
        failure = None if board.heartbeat is None else board.heartbeat.explain()
        if failure is None:
            raise
        raise _error_of(failure, board) from error
    finally:
        board.waited += perf_counter() - began
        board.waits += 1


def wait_for_first_rank(board: Board, section: int) -> None:
    """Wait until the first rank of the group has finished this many sections of its own, however long that takes.

    Only the heartbeat tells of it, up to half a second later. No collective waits meanwhile, so none runs into its
    time limit.

    Raises:
        DPFuseError: the first rank has ended, has left the group, or was silent for too long.
    """
    board.waits += 1
    began = perf_counter()
    try:
        while board.finished < section:
            failure = board.peer_failure  # read once: the heartbeat may take it back
            if failure is not None and failure.waits in (None, board.waits):
                raise _error_of(failure, board)
            if board.heartbeat is None:
                raise DPFuseError(
                    f"rank {board.rank} waits until rank 0 has finished its work, and cannot learn of it: the "
                    "heartbeat has ended. Read its message on stderr."
                )
            sleep(POLL)
    finally:
        board.waited += perf_counter() - began
        board.waits += 1


def interruptible_devices(group: dist.ProcessGroup) -> frozenset[str]:
    """Return the types of devices on which a wait with a time limit leaves the work intact.

    Gloo's works go on after such a wait, and can be waited for again. A wait for a work of NCCL only orders streams,
    or, with a time limit, destroys the communicator. No collective that succeeds tells, so only gloo is trusted.
    """
    found = set()
    for device in group._device_types:
        try:
            if group._get_backend(device).name() == "gloo":
                found.add(device.type)
        except (RuntimeError, AttributeError):  # a group written in Python has no back ends
            continue
    return frozenset(found)


def describe_place(wrapper: int, doing: Doing, step: int, bucket: int, *, waits: bool) -> str:
    """Return where a rank is, as the predicate of a sentence: "runs the forward of step 4".

    Args:
        step: the synchronised backward that runs or comes next, from 1.
        bucket: the one last sent or waited for; -1 for none.
    """
    which = f" of wrapper {wrapper}" if wrapper else ""
    if waits:
        return {
            Doing.BETWEEN: f"waits for the other ranks between steps{which}, before step {step}",
            Doing.FORWARD: f"waits for the other ranks in the forward{which} of step {step}",
            Doing.LOSS: f"waits for the other ranks before the backward{which} of step {step}",
            Doing.BACKWARD: f"waits for bucket {bucket} in the backward{which} of step {step}",
            Doing.STEP: f"waits for parameters in the optimizer's step{which}, before step {step}",
            Doing.READ: f"waits for the other ranks in a norm, whole gradient or state dict{which}, before step {step}",
            Doing.SAVE: f"waits for the other ranks in save_checkpoint(){which}, before step {step}",
            Doing.LOAD: f"waits for the other ranks in load_checkpoint(){which}, before step {step}",
        }[doing]
    sent = f" and has sent bucket {bucket}" if bucket >= 0 else ""
    return {
        Doing.BETWEEN: f"is between steps{which}, before step {step}",
        Doing.FORWARD: f"runs the forward{which} of step {step}",
        Doing.LOSS: f"is between forward and backward{which} of step {step}",
        Doing.BACKWARD: f"runs the backward{which} of step {step}{sent}",
        Doing.STEP: f"runs the optimizer's step{which}, before step {step}",
        Doing.READ: f"reads gradients or states{which}, before step {step}",
        Doing.SAVE: f"runs save_checkpoint(){which}, before step {step}",
        Doing.LOAD: f"runs load_checkpoint(){which}, before step {step}",
    }[doing]


_unfinished: list[dist.Work] = []  # works that a wait has given up; they keep Python from ending


def has_unfinished_works() -> bool:
    """Whether a work that `finish` gave up is still not completed."""
    return any(not work.is_completed() for work in _unfinished)


def forget_unfinished_works() -> None:
    """Forget the works that `finish` gave up; for a fork, whose parent owns them."""
    _unfinished.clear()


def _error_of(failure: PeerFailure, board: Board) -> DPFuseError:
    wrapper, doing, completed, bucket = board.place
    here = describe_place(wrapper.number, doing, completed + 1, bucket, waits=True)
    error = DPFuseError(f"rank {board.rank} {here} and cannot go on: {failure.text}")
    error.ranks = failure.ranks
    board.gave_up = True
    return error


class _DeviceProgress:
    """Tells another thread whether a CUDA device has run what was queued before the last `record`."""

    def __init__(self, device: str) -> None:
        self.device = device
        index = torch.device(device).index
        self._index: int = torch._C._cuda_getDevice() if index is None else index
        self._event = torch.cuda.Event()
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle: asking for the stream makes a new object

    def record(self) -> None:
        """Mark the end of what is queued on the current stream of the device."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._index)
        self._event.record(stream)

    def is_done(self) -> bool:
        """Whether the device has run it."""
        _permit_queries()
        return bool(self._event.query())


def _completion(work: dist.Work, device: str, board: Board) -> Callable[[], bool] | None:
    """Return a function that tells another thread whether the device has run the collectives up to `work`.

    The work has been waited for, which only orders what follows on the device. The board keeps the event. While a CUDA
    graph is captured, the collective does not run yet, and the result is None.
    """
    if not device.startswith("cuda"):
        return work.is_completed
    if torch.cuda.is_current_stream_capturing():
        return None
    # Not the work itself: it would keep gradients that travel in place, which must have no second owner.
    if board.progress is None or board.progress.device != device:
        board.progress = _DeviceProgress(device)
    board.progress.record()
    return board.progress.is_done  # a new object each time, by which the heartbeat knows the collective


_permitted = threading.local()


def _permit_queries() -> None:
    """Let this thread query events while another thread captures a graph; a query would break the capture."""
    if getattr(_permitted, "done", False):
        return
    _permitted.done = True
    with suppress(OSError, AttributeError):
        with open("/proc/self/maps", encoding="utf-8") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libcudart" in line}
        for path in paths:
            ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
