"""`paddle.distributed.fleet.utils`."""

from dpfuse.paddle.distributed.fleet.utils import hybrid_parallel_util

__all__ = ["hybrid_parallel_util"]
