"""What `dpfuse run` does inside each process of the program, once torch is imported: `patch()`, and one message.

It is imported behind `import torch`, which may be one of dpfuse's own imports. So it takes no name from `dpfuse`.
"""

from __future__ import annotations

import atexit
import os
import sys

from torch import nn

from dpfuse.ddp.distributed_data_parallel import DistributedDataParallel
from dpfuse.ddp.patch import Patch
from dpfuse.engine.plan import MB
from dpfuse.engine.user_line import user_frame

__all__ = ["start"]

RANK = "DPFUSE_STARTUP_RANK"  # set for processes that a rank starts, such as compilers: they make no wrapper

_message: _Message | None = None


def start() -> None:
    """From here on torch's DistributedDataParallel makes dpfuse's. Rank 0 says once what it replaced."""
    global _message
    if _message is None:
        _message = _Message()
        Patch({}, made=_message.made)
        atexit.register(_message.ended)


class _Message:
    """Says on stderr what was replaced, or at the end of rank 0 that nothing was."""

    def __init__(self) -> None:
        self._made = 0
        self._process = os.getpid()
        rank = os.environ.get("RANK")
        self._inner = rank is not None and os.environ.get(RANK) == rank
        if rank is not None:
            os.environ[RANK] = rank

    def made(self, wrapper: DistributedDataParallel) -> None:
        """Note that this wrapper was made where the program asked for torch's."""
        self._made += 1
        if self._made > 1 or wrapper.process_group.rank() != 0:
            return
        frame, _ = user_frame(sys._getframe(1))
        place = "" if frame is None else f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        name = type(wrapper.module).__name__
        _say(
            f"{name} is wrapped by dpfuse's DistributedDataParallel instead of torch's{place}: "
            f"{_size(wrapper.module)}, {wrapper.process_group.size()} ranks. So is each further model."
        )

    def ended(self) -> None:
        """Note that the process ends."""
        if not self._made and os.environ.get("RANK") == "0" and os.getpid() == self._process and not self._inner:
            _say("this program has made no DistributedDataParallel on rank 0, so dpfuse has replaced nothing")


def _size(module: nn.Module) -> str:
    trained = [param for param in module.parameters() if param.requires_grad]
    megabytes = sum(param.numel() * param.element_size() for param in trained) / MB
    return f"{len(trained)} parameters, {megabytes:.4g} MB of gradients"


def _say(text: str) -> None:
    print(f"dpfuse run: {text}", file=sys.stderr, flush=True)
