"""`paddle.distributed.fleet.utils`, with `hybrid_parallel_util`: gradients averaged by hand."""

from dpfuse.paddle.distributed.fleet.utils import hybrid_parallel_util

__all__ = ["hybrid_parallel_util"]
