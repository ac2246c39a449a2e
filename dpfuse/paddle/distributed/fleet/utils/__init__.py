"""`paddle.distributed.fleet.utils`."""
