"""torch's face: `DistributedDataParallel` with the names, arguments and errors of torch's class, and `patch()`."""

from dpfuse.ddp.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
