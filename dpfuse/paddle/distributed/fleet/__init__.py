"""`paddle.distributed.fleet`: data-parallel training from one strategy object."""

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
