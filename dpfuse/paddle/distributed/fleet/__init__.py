"""`paddle.distributed.fleet`: data-parallel training from one strategy object.

Read `session` first: `init`, `distributed_model` and `distributed_optimizer`. `strategy` has the settings, with their
defaults in `strategy_fields`. Gradient merging is in `optimizer`, `gradient_merge` and `merged_data_parallel`.
`sync_batch_norm` averages over ranks inside the autograd graph. `workers` and `role_maker` say which rank this is.
"""

from dpfuse.paddle.distributed.fleet import utils
from dpfuse.paddle.distributed.fleet.role_maker import PaddleCloudRoleMaker
from dpfuse.paddle.distributed.fleet.session import distributed_model, distributed_optimizer, init
from dpfuse.paddle.distributed.fleet.strategy import DistributedStrategy
from dpfuse.paddle.distributed.fleet.workers import (
    barrier_worker,
    is_first_worker,
    is_server,
    is_worker,
    server_num,
    worker_endpoints,
    worker_index,
    worker_num,
)

__all__ = [
    "DistributedStrategy",
    "PaddleCloudRoleMaker",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "init",
    "is_first_worker",
    "is_server",
    "is_worker",
    "server_num",
    "utils",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]
