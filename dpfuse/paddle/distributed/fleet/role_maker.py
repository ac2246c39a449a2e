"""Role makers: Paddle's objects for the kind of a job. Here every job is collective, and every process is a worker."""

from __future__ import annotations

from dpfuse.arguments import flag

__all__ = ["PaddleCloudRoleMaker"]


class PaddleCloudRoleMaker:
    """Tells `fleet.init` to read this process's rank from the environment, which it also does without a role maker.

    Args:
        is_collective: `fleet.init` needs True, because there is no parameter-server mode.

    Example:
        >>> from dpfuse.paddle.distributed import fleet
        >>> fleet.PaddleCloudRoleMaker(is_collective=True)
        PaddleCloudRoleMaker(is_collective=True)

    Source: `paddle.distributed.fleet.PaddleCloudRoleMaker`.
    """

    def __init__(self, is_collective: bool = False) -> None:
        self._is_collective = flag("is_collective", is_collective)

    def __repr__(self) -> str:
        return f"PaddleCloudRoleMaker(is_collective={self._is_collective})"
