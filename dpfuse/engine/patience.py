"""Waiting for a collective, but not for ever: looks up now and then whether it still has any use. Starts nothing."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dpfuse.engine.progress import progress_of
from dpfuse.engine.waiting import Board, Verdict
from dpfuse.errors import DPFuseError
from dpfuse.liveness import ending
from dpfuse.liveness.diagnosis import Status

__all__ = ["finish", "patient_devices"]

SLICE = timedelta(seconds=0.5)
_GLOO = getattr(dist, "ProcessGroupGloo", None)  # not in every build


def patient_devices(group: dist.ProcessGroup) -> frozenset[str]:
    """The types of devices whose works go on, and can be waited for again, after a wait that was too short.

    Gloo's do. A wait for NCCL's only orders streams, or, with a time-out, tears the group down.
    """
    found = set()
    for device in group._device_types:
        try:
            if _GLOO is not None and isinstance(group._get_backend(device), _GLOO):
                found.add(device.type)
        except RuntimeError:  # a group written in Python, which has no back ends
            continue
    return frozenset(found)


def finish(work: dist.Work, board: Board | None, device: str = "cpu", *, last: bool = False) -> None:
    """Wait for a work, as `work.wait()` does.

    Args:
        work: of a collective.
        board: of its group; None where that has no heartbeat.
        device: type of the device of its tensors.
        last: whether nothing else follows for a while, so that it tells whether all collectives have ended.

    Raises:
        DPFuseError: a rank has ended, or was silent for too long; the text names it.
        RuntimeError: the collective failed, and no rank is known to be the cause.
    """
    if board is None:
        work.wait()
        return
    board.waits += 1
    try:
        if device not in board.patient:
            work.wait()
            if last:
                board.reached = progress_of(work, device)
        elif not _ends_within_a_slice(work):
            _wait_on(work, board)
    except DPFuseError:
        raise
    except RuntimeError as error:
        verdict = board.explain()
        if verdict is None:
            raise
        raise _blaming(verdict, board) from error
    finally:
        board.waits += 1


def _ends_within_a_slice(work: dist.Work) -> bool:
    try:
        work.wait(SLICE)
        return True
    except RuntimeError:
        return False  # it has failed, or is not done


def _wait_on(work: dist.Work, board: Board) -> None:
    while not work.is_completed():
        if board.verdict is not None:
            ending.leave_behind(work)
            raise _blaming(board.verdict, board)
        _ends_within_a_slice(work)
    work.wait()  # raises what it has failed of


def _blaming(verdict: Verdict, board: Board) -> DPFuseError:
    wrapper, doing, completed, bucket = board.place
    here = Status(doing, completed + 1, bucket, wrapper.number, waits=True)
    error = DPFuseError(f"rank {board.rank} {here} and cannot go on: {verdict.text}")
    error.ranks = verdict.ranks
    board.gave_up = True
    return error
