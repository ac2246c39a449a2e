"""Role makers: Paddle's objects that say whether a job is collective. Here every process is a worker."""

from __future__ import annotations

__all__ = ["PaddleCloudRoleMaker"]


class PaddleCloudRoleMaker:
    """Tells `fleet.init` that the environment says which rank this is; the same as no role maker at all.

    Args:
        is_collective: must be True by the time of `fleet.init`; there is no parameter-server mode.

    Example:
        >>> from dpfuse.paddle.distributed import fleet
        >>> fleet.PaddleCloudRoleMaker(is_collective=True)
        PaddleCloudRoleMaker(is_collective=True)

    Source: `paddle.distributed.fleet.PaddleCloudRoleMaker`.
    """

    def __init__(self, is_collective: bool = False) -> None:
        self._is_collective = is_collective

    def __repr__(self) -> str:
        return f"PaddleCloudRoleMaker(is_collective={self._is_collective})"
