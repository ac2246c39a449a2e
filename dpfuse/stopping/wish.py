"""The wish of this process that all ranks stop together. Knows no group, no wrapper and no handler of signals."""

from __future__ import annotations

import os

__all__ = ["Wish", "request_stop", "wish"]


class Wish:
    """Whether this process wants all ranks to stop, and why.

    A handler of a signal may make it, at any moment. So it is one assignment, without a lock.

    Attributes:
        words: the cause and, after a blank, a text of the program; empty without a wish.
        told: whether the program has read that all ranks stop. If it then ends well, the launcher knows why.
        forgotten: how often `dpfuse.forget_stop` was called, on all ranks.
    """

    def __init__(self) -> None:
        self.words = ""
        self.forgotten = 0
        self.told = False

    def make(self, cause: str, text: str = "") -> None:
        """Wish that all ranks stop. The first wish stays."""
        if not self.words:
            self.words = f"{cause} {text}".rstrip()

    def forget(self) -> None:
        """Wish it no more."""
        self.words, self.told = "", False


wish = Wish()  # of this process
os.register_at_fork(after_in_child=wish.forget)  # a worker of a DataLoader wishes nothing


def request_stop(reason: str = "") -> None:
    """Ask all ranks to stop together. One rank is enough, from any thread.

    All ranks learn of it in the next backward that synchronises, on a GPU in the one after it: `model.stop_requested`
    is then true on each of them. Beside other dimensions of a mesh, all groups of the mesh learn of it some backwards
    later. This adds no collective to a step. Where no backward follows, call `dpfuse.agree_to_stop`.

    Args:
        reason: for `model.stop_reason`, such as "the disk is full". At most 54 bytes of it travel.

    Raises:
        TypeError: the reason is no text.

    Example:
        >>> import torch, torch.distributed as dist, dpfuse
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> dpfuse.request_stop("a key was pressed")
        >>> model.stop_requested
        False
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.stop_requested, str(model.stop_reason)
        (True, 'rank 0 has asked: a key was pressed')
        >>> dist.destroy_process_group()
        >>> dpfuse.forget_stop()
    """
    if not isinstance(reason, str):
        raise TypeError(
            f"request_stop() got a reason of type {type(reason).__name__}, expected a text. Pass what a reader of the "
            "log is to know, such as 'the disk is full', or nothing."
        )
    wish.make("program", " ".join(reason.split()))
